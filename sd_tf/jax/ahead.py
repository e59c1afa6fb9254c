"""Compiling ahead of time: from shapes alone, for devices that may be somewhere else."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from sd_tf.components.described import manifest_of
from sd_tf.components.fixed import Fixed, geometry_of
from sd_tf.components.text import empty_tokens_of
from sd_tf.jax import compiled as on_disk
from sd_tf.jax import programs
from sd_tf.jax.chips import compile_lowered
from sd_tf.jax.sharding import bytes_per_device, check_mesh
from sd_tf.manifest import Component, Manifest, describe_files
from sd_tf.publish import staging
from sd_tf.weights import Checkpoint
from sd_tf.weights.tensors import save_safetensors

Report = Callable[[str, dict], None]  # ("component.endpoint", its figures)


def compile_pipeline(
    checkpoint: Checkpoint,
    fixed: Fixed,
    mesh: Mesh,
    out: str | Path,
    *,
    topology: str | None = None,
    overwrite: bool = False,
    report: Report | None = None,
) -> Manifest:
    """Write what `JaxPipeline.load` runs; without weights where the checkpoint has none."""
    geometry = geometry_of(checkpoint.config, fixed)
    check_mesh(mesh, fixed.batch_size)
    parts = components(checkpoint, fixed, mesh)
    out = Path(out)
    with staging(out, overwrite) as folder:
        signatures = {}
        for name, component in parts.items():
            (folder / name).mkdir()
            signatures[name] = {}
            for endpoint in programs.CALLED[name]:
                code, signature = compile_endpoint(component, endpoint, mesh, fixed.batch_size)
                path = folder / name / endpoint
                path.with_suffix(".xla").write_bytes(serialize_executable.serialize(code)[0])
                path.with_suffix(".stablehlo").write_bytes(portable(component, endpoint, fixed))
                signatures[name][endpoint] = signature
                if report is not None:
                    report(f"{name}.{endpoint}", signature.report)
            if checkpoint.readers:
                weights = programs.host_weights(component, checkpoint)
                save_safetensors(weights, folder / name / on_disk.WEIGHTS)
        target = on_disk.Target.of(mesh)
        described = {
            name: Component(
                programs.CALLED[name],
                target.platform,
                component.rewrites.names,
                describe_files(folder, name),
            )
            for name, component in parts.items()
        }
        manifest = manifest_of(
            checkpoint,
            geometry,
            fixed,
            described,
            programs.calls_of(parts),
            compiler="jax",
            jit_compiled_text_encoder=True,
        )
        for encoder, place in manifest.tokenizers.items():
            checkpoint.tokenizer(encoder).save(folder / place)
        on_disk.Compiled(target, topology, bool(checkpoint.readers), signatures).write(folder)
        manifest.write(folder)
    return manifest


def components(checkpoint: Checkpoint, fixed: Fixed, mesh: Mesh) -> dict[str, programs.Component]:
    return programs.components_of(
        checkpoint.config,
        geometry_of(checkpoint.config, fixed),
        fixed.precision,
        empty_tokens_of(checkpoint),
        mesh.devices.flat[0].platform,
    )


def compile_endpoint(
    component: programs.Component, endpoint: str, mesh: Mesh, batch_size: int
) -> tuple[jax.stages.Compiled, on_disk.Signature]:
    """Machine code and what is known of it; nothing is allocated on a device."""
    function, arguments, placed = component.jitted(endpoint, mesh, batch_size)
    start = time.perf_counter()
    lowered = function.lower(*arguments)
    traced = time.perf_counter()
    code = compile_lowered(lowered)
    seconds = time.perf_counter() - traced
    weights, state, inputs = (on_disk.shapes_of(part) for part in arguments)
    figures = {
        "trace_seconds": round(traced - start, 2),
        "compile_seconds": round(seconds, 2),
        "weight_bytes": bytes_per_device(placed[0], arguments[0]),
        **figures_of(code),
    }
    outputs = tuple(sorted(lowered.out_info))
    return code, on_disk.Signature(weights, state, inputs, outputs, figures)


def figures_of(code: jax.stages.Compiled) -> dict[str, float]:
    """The compiler's own, for each device. A loop's body counts once."""
    memory, costs = code.memory_analysis(), code.cost_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "flops": costs.get("flops", math.nan),
        "accessed_bytes": costs.get("bytes accessed", math.nan),
    }


def portable(component: programs.Component, endpoint: str, fixed: Fixed) -> bytes:
    """StableHLO without shardings, so that any mesh will do."""
    function = jax.jit(component.pure(endpoint), donate_argnums=1)
    arguments = component.arguments(endpoint, fixed.batch_size)
    exported = jax.export.export(function, platforms=on_disk.STABLEHLO_PLATFORMS)(*arguments)
    return bytes(exported.serialize())
