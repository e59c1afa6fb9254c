"""`JaxPipeline`: the same calls and pictures as `Pipeline`, on JAX."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from sd_tf.jax import artifacts
from sd_tf.jax.runner import JaxRunner
from sd_tf.jax.sharding import DATA, check_mesh, make_mesh
from sd_tf.runtime.adapter_places import DEFAULT_LAYERS, DEFAULT_RANK
from sd_tf.runtime.adapters import layers_of
from sd_tf.runtime.chain import Chain, open_export
from sd_tf.runtime.manifest import ExportError
from sd_tf.runtime.shapes import Size


class JaxPipeline(Chain):
    """A pipeline on JAX devices: see `from_checkpoint`, `load` and `Chain.__call__`."""

    @property
    def weights(self) -> Mapping[str, Mapping[str, jax.Array]]:
        """Each component's weights by the checkpoint's names, as placed on the mesh."""
        return self._replicas[0].weights

    @classmethod
    def from_checkpoint(
        cls,
        source: str | Path,
        mesh: Mesh | None = None,
        precision: str = "bfloat16",
        *,
        batch_size: int | None = None,
        height: int | None = None,
        width: int | None = None,
        batch_sizes: Sequence[int] = (),
        sizes: Sequence[Size] = (),
        storage: str | None = None,
        max_steps: int = 100,
        guidance: str = "classifier_free",
        guidance_rescale: float = 0.0,
        prompt_chunks: int = 1,
        adapter_slots: int = 0,
        adapter_rank: int = DEFAULT_RANK,
        adapter_layers: str = DEFAULT_LAYERS,
        image_prompts: int = 4,
        reuse: int = 1,
        tile: int = 0,
        disabled_rewrites: Sequence[str] = (),
        compile_cache: str | Path | None = None,
        **opening,
    ) -> "JaxPipeline":
        """Load a checkpoint of any format onto a mesh; its programs are compiled on first call.

        Args:
            source: a diffusers folder, a single file, a Hub id or KerasCV's: see `open_checkpoint`.
            mesh: the devices, as `make_mesh` arranges them; None: all, one picture to each.
            precision: of the models. Sampler, guidance, norms and softmax stay float32.
            batch_size: pictures per call of the compiled code; None: one for each data shard.
            height, width, batch_sizes, sizes: as for an export.
            storage: of kernels, as for an export; None: in the precision.
            max_steps, guidance, guidance_rescale, prompt_chunks: as for an export.
            adapter_slots, adapter_rank, adapter_layers, image_prompts, reuse, tile,
                disabled_rewrites: as for an export.
            compile_cache: folder where compiled code is kept between processes.
            opening: `family`, `scheduler`, `variant`, `revision`, `ema`, `without`,
                `max_sequence_length`, `t5_tokenizer`, `lora`, `embeddings`, `controlnet`,
                `ip_adapter`, `image_encoder`, `decoder`, `preview_decoder` of `open_checkpoint`.
        """
        from sd_tf.components.describe import manifest_of, origins
        from sd_tf.components.geometry import Fixed, geometry_of
        from sd_tf.jax import components as programs
        from sd_tf.runtime.manifest import ComponentRecord
        from sd_tf.weights import open_checkpoint

        start = time.perf_counter()
        if batch_size is not None and batch_sizes:
            raise ExportError("Give `batch_size` or `batch_sizes`.")
        if compile_cache is not None:
            set_compile_cache(compile_cache)
        checkpoint = open_checkpoint(source, **opening)
        mesh = make_mesh() if mesh is None else mesh
        if not batch_sizes:
            batch_sizes = (mesh.shape.get(DATA, 1) if batch_size is None else batch_size,)
        fixed = Fixed(
            batch_sizes=batch_sizes,
            height=height,
            width=width,
            sizes=sizes,
            precision=precision,
            storage=storage,
            max_steps=max_steps,
            guidance=guidance,
            guidance_rescale=guidance_rescale,
            prompt_chunks=prompt_chunks,
            adapter_slots=adapter_slots,
            adapter_rank=adapter_rank,
            adapter_layers=adapter_layers,
            image_prompts=image_prompts,
            reuse=reuse,
            tile=tile,
            disabled_rewrites=disabled_rewrites,
        )
        geometry = geometry_of(checkpoint.config, fixed)
        check_mesh(mesh, *geometry.shapes.batch_sizes)
        target = mesh.devices.flat[0].platform
        components = programs.components_of(checkpoint, geometry, fixed, target)
        callable_programs = {
            name: {
                served: component.program(endpoint, mesh, shape)
                for served, (endpoint, shape) in programs.called(component, geometry.shapes).items()
            }
            for name, component in components.items()
        }
        origin = origins(checkpoint, components, hashed=False)
        manifest = manifest_of(
            checkpoint,
            geometry,
            fixed,
            {
                name: ComponentRecord(
                    tuple(callable_programs[name]),
                    target,
                    component.rewrites.names,
                    {},
                    origin[name],
                )
                for name, component in components.items()
            },
            compiler="jax",
            jit_compiled_text_encoder=True,
        )
        weights = programs.load_weights(components, checkpoint, mesh)
        tokenizers = checkpoint.tokenizers()
        stages = JaxRunner(manifest, callable_programs, weights)
        layers = {name: one.component.adaptable for name, one in components.items() if one.places}
        return cls(manifest, [stages], tokenizers, time.perf_counter() - start, layers)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        mesh: Mesh | None = None,
        *,
        checkpoint: str | Path | None = None,
        fallback: bool = True,
        **opening,
    ) -> "JaxPipeline":
        """Load what `sd-tf jax compile` wrote; nothing is traced or compiled.

        Args:
            mesh: None: the first devices, arranged as it was compiled for.
            checkpoint: the source of the weights where the folder has none of its own. Its
                tokenizers, schedule and default scheduler are taken, too.
            fallback: on another platform, mesh or release compile the portable StableHLO, with a
                warning that says why; False: refuse with the reason.
            opening: `family`, `variant`, `revision`, `ema`, `without`, `max_sequence_length`,
                `t5_tokenizer`, `lora` of `open_checkpoint`, for that source.
        """
        start = time.perf_counter()
        folder = Path(folder)
        compiled = artifacts.Compiled.read(folder)
        _check_source(folder, compiled, checkpoint, opening)
        manifest, tokenizers = open_export(folder)
        manifest.check_files(folder)
        if mesh is None:
            devices = jax.devices()[: compiled.target.data * compiled.target.model]
            model = compiled.target.model
            mesh = make_mesh(devices, model if len(devices) % model == 0 else 1)
        check_mesh(mesh, *manifest.shapes.batch_sizes)
        programs = artifacts.load_programs(folder, compiled, mesh, fallback)
        if compiled.has_weights:
            weights = artifacts.load_weights(folder, compiled, mesh)
        else:
            from sd_tf.jax.supply import supplied

            weights, manifest, tokenizers = supplied(
                checkpoint, opening, compiled, manifest, tokenizers, mesh
            )
        stages = JaxRunner(manifest, programs, weights)
        layers = layers_of(folder, manifest)
        return cls(manifest, [stages], tokenizers, time.perf_counter() - start, layers)


def _check_source(folder: Path, compiled: artifacts.Compiled, checkpoint, opening: dict) -> None:
    """Refuse a source of weights where the folder has its own, and its lack where it has none."""
    if not compiled.has_weights:
        if checkpoint is None:
            raise ExportError(
                f"{folder} was compiled from shapes alone and holds no weights: give `checkpoint`."
            )
        return
    weights = f"{folder} holds the weights that it was compiled with"
    if checkpoint is not None:
        raise ExportError(f"{weights}: leave out `checkpoint`, or compile again.")
    for name, value in opening.items():
        if value:
            later = ", or with `adapter_slots`, to load adapters later" if name == "lora" else ""
            raise ExportError(f"{weights}: compile again with `{name}`{later}.")


def set_compile_cache(folder: str | Path) -> None:
    """Keep all compiled code in JAX's persistent cache, however small."""
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser().resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
