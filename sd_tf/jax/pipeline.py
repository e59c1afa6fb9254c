"""`JaxPipeline`: the same calls and pictures as `Pipeline`, on JAX."""

import time
from collections.abc import Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

from sd_tf.chain import Chain, open_export
from sd_tf.jax import compiled as on_disk
from sd_tf.jax.program import JaxStages
from sd_tf.jax.sharding import DATA, check_mesh, make_mesh
from sd_tf.manifest import ExportError, Manifest


class JaxPipeline(Chain):
    """See `from_checkpoint`, `load` and `Chain.__call__`."""

    @property
    def weights(self) -> Mapping[str, Mapping[str, jax.Array]]:
        """Component → weights by the checkpoint's names, where they lie on the mesh."""
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
        max_steps: int = 100,
        guidance: str = "classifier_free",
        guidance_rescale: float = 0.0,
        compile_cache: str | Path | None = None,
        **opening,
    ) -> "JaxPipeline":
        """Load a checkpoint of any format onto a mesh; compiled when it is first called.

        Args:
            source: a diffusers folder, a single file, a Hub id, KerasCV's: see `open_checkpoint`.
            mesh: the devices, as `make_mesh` arranges them; None: all, one picture to each.
            precision: of the models. Sampler, guidance, norms and softmax stay float32.
            batch_size: pictures per call of the compiled code; None: one for each data shard.
            height, width, max_steps, guidance, guidance_rescale: as for an export.
            compile_cache: folder where compiled code is kept between processes.
            opening: `family`, `scheduler`, `variant`, `revision`, `ema` of `open_checkpoint`.
        """
        from sd_tf.components.described import manifest_of
        from sd_tf.components.fixed import Fixed, geometry_of
        from sd_tf.components.text import empty_tokens_of
        from sd_tf.jax import programs
        from sd_tf.manifest import Component
        from sd_tf.weights import open_checkpoint

        start = time.perf_counter()
        if compile_cache is not None:
            set_compile_cache(compile_cache)
        checkpoint = open_checkpoint(source, **opening)
        mesh = make_mesh() if mesh is None else mesh
        fixed = Fixed(
            batch_size=mesh.shape.get(DATA, 1) if batch_size is None else batch_size,
            height=height,
            width=width,
            precision=precision,
            max_steps=max_steps,
            guidance=guidance,
            guidance_rescale=guidance_rescale,
        )
        geometry = geometry_of(checkpoint.config, fixed)
        check_mesh(mesh, fixed.batch_size)
        target = mesh.devices.flat[0].platform
        empty = empty_tokens_of(checkpoint)
        components = programs.components_of(checkpoint.config, geometry, precision, empty, target)
        callable_programs = {
            name: {
                endpoint: component.program(endpoint, mesh, fixed.batch_size)
                for endpoint in programs.CALLED[name]
            }
            for name, component in components.items()
        }
        manifest = manifest_of(
            checkpoint,
            geometry,
            fixed,
            {
                name: Component(programs.CALLED[name], target, component.rewrites.names, {})
                for name, component in components.items()
            },
            programs.calls_of(components),
            compiler="jax",
            jit_compiled_text_encoder=True,
            hashed=False,
        )
        weights = programs.load_weights(components, checkpoint, mesh)
        tokenizers = {name: checkpoint.tokenizer(name) for name in checkpoint.config.text_encoders}
        stages = JaxStages(manifest, callable_programs, weights)
        return cls(manifest, [stages], tokenizers, time.perf_counter() - start)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        mesh: Mesh | None = None,
        *,
        checkpoint: str | Path | None = None,
        fallback: bool = True,
    ) -> "JaxPipeline":
        """Load what `python -m sd_tf.jax compile` wrote; nothing is traced or compiled.

        Args:
            mesh: None: the first devices, arranged as it was compiled for.
            checkpoint: whose weights to take where the folder has none of its own.
            fallback: on another platform, mesh or release compile the portable StableHLO, with a
                warning that says why; False: refuse with the reason.
        """
        start = time.perf_counter()
        folder = Path(folder)
        compiled = on_disk.Compiled.read(folder)
        manifest, tokenizers = open_export(folder)
        manifest.check_files(folder)
        if mesh is None:
            devices = jax.devices()[: compiled.target.data * compiled.target.model]
            model = compiled.target.model
            mesh = make_mesh(devices, model if len(devices) % model == 0 else 1)
        check_mesh(mesh, manifest.batch_size)
        programs = on_disk.load_programs(folder, compiled, mesh, fallback)
        if compiled.has_weights:
            weights = on_disk.load_weights(folder, compiled, mesh)
        elif checkpoint is not None:
            weights = _weights_of_checkpoint(checkpoint, compiled, manifest, mesh)
        else:
            raise ExportError(
                f"{folder} was compiled from shapes alone and holds no weights: give checkpoint=..."
            )
        stages = JaxStages(manifest, programs, weights)
        return cls(manifest, [stages], tokenizers, time.perf_counter() - start)


def _weights_of_checkpoint(source, compiled: on_disk.Compiled, manifest: Manifest, mesh: Mesh):
    from sd_tf.components.fixed import Fixed
    from sd_tf.jax import ahead, programs
    from sd_tf.weights import open_checkpoint

    checkpoint = open_checkpoint(source)
    if checkpoint.config.family != manifest.family:
        raise ExportError(
            f"It was compiled for a {manifest.family}. Received: a {checkpoint.config.family}, "
            f"{source}"
        )
    fixed = Fixed(
        batch_size=manifest.batch_size,
        height=manifest.height,
        width=manifest.width,
        precision=manifest.precision,
        max_steps=manifest.max_steps,
    )
    components = ahead.components(checkpoint, fixed, mesh)
    for name, component in components.items():
        on_disk.check_weights(compiled.programs[name], component.weights, str(source))
    return programs.load_weights(components, checkpoint, mesh)


def set_compile_cache(folder: str | Path) -> None:
    """JAX's own persistent cache, with everything in it, however small."""
    jax.config.update("jax_compilation_cache_dir", str(Path(folder).expanduser().resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
