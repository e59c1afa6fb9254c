"""Compile pipelines ahead of time, from shapes alone, for devices that need not be present."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from sd_tf.components.describe import manifest_of, origins, tokenizer_folder
from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.files.publish import staging
from sd_tf.files.tensors import save_safetensors
from sd_tf.jax import artifacts
from sd_tf.jax import components as programs
from sd_tf.jax.chips import compile_lowered
from sd_tf.jax.sharding import bytes_per_device, check_mesh
from sd_tf.runtime.manifest import (
    FILE_NAME,
    ComponentRecord,
    ExportError,
    Manifest,
    describe_files,
)
from sd_tf.runtime.shapes import Shape
from sd_tf.weights import Checkpoint

Report = Callable[[str, dict], None]  # ("component.endpoint", its figures)


def compile_pipeline(
    checkpoint: Checkpoint,
    fixed: Fixed,
    mesh: Mesh,
    output_dir: str | Path,
    *,
    topology: str | None = None,
    overwrite: bool = False,
    report: Report | None = None,
) -> Manifest:
    """Compile a pipeline into a folder that `JaxPipeline.load` runs.

    The folder has no weights where the checkpoint has none.
    """
    geometry = geometry_of(checkpoint.config, fixed)
    check_mesh(mesh, *geometry.shapes.batch_sizes)
    parts = components(checkpoint, fixed, mesh)
    tokenizers = checkpoint.tokenizers()
    output_dir = Path(output_dir)
    with staging(output_dir, overwrite, FILE_NAME, ExportError) as folder:
        signatures = {}
        for name, component in parts.items():
            (folder / name).mkdir()
            signatures[name] = {}
            for served, (endpoint, shape) in programs.called(component, geometry.shapes).items():
                code, signature = compile_endpoint(component, endpoint, mesh, shape)
                path = folder / name / served
                path.with_suffix(".xla").write_bytes(serialize_executable.serialize(code)[0])
                path.with_suffix(".stablehlo").write_bytes(portable(component, endpoint, shape))
                signatures[name][served] = signature
                if report is not None:
                    report(f"{name}.{served}", signature.report)
            if component.places:
                component.component.adaptable.write(folder / name)
            if checkpoint.readers:
                weights = programs.host_weights(component, checkpoint)
                save_safetensors(weights, folder / name / artifacts.WEIGHTS)
        for encoder, tokenizer in tokenizers.items():
            tokenizer.save(folder / tokenizer_folder(encoder))
        target = artifacts.Target.of(mesh)
        origin = origins(checkpoint, parts)
        described = {
            name: ComponentRecord(
                tuple(signatures[name]),
                target.platform,
                component.rewrites.names,
                describe_files(folder, name),
                origin[name],
            )
            for name, component in parts.items()
        }
        manifest = manifest_of(
            checkpoint,
            geometry,
            fixed,
            described,
            compiler="jax",
            jit_compiled_text_encoder=True,
        )
        config = artifacts.compiled_config(checkpoint.config)
        has_weights = bool(checkpoint.readers)
        artifacts.Compiled(target, topology, has_weights, config, signatures).write(folder)
        manifest.write(folder)
    return manifest


def components(
    checkpoint: Checkpoint, fixed: Fixed, mesh: Mesh
) -> dict[str, programs.JaxComponent]:
    """Assemble the pipeline's components for the mesh's devices."""
    geometry = geometry_of(checkpoint.config, fixed)
    target = mesh.devices.flat[0].platform
    return programs.components_of(checkpoint, geometry, fixed, target)


def compile_endpoint(
    component: programs.JaxComponent, endpoint: str, mesh: Mesh, shape: Shape
) -> tuple[jax.stages.Compiled, artifacts.Signature]:
    """Compile an endpoint, allocating nothing on a device; return its code and signature."""
    function, arguments, placed = component.jitted(endpoint, mesh, shape)
    start = time.perf_counter()
    lowered = function.lower(*arguments)
    traced = time.perf_counter()
    code = compile_lowered(lowered)
    seconds = time.perf_counter() - traced
    weights, state, inputs = (artifacts.shapes_of(part) for part in arguments)
    figures = {
        "trace_seconds": round(traced - start, 2),
        "compile_seconds": round(seconds, 2),
        "weight_bytes": bytes_per_device(placed[0], arguments[0]),
        **figures_of(code),
    }
    outputs = tuple(sorted(lowered.out_info))
    return code, artifacts.Signature(weights, state, inputs, outputs, figures)


def figures_of(code: jax.stages.Compiled) -> dict[str, float]:
    """Return the compiler's own figures for each device; a loop's body counts once."""
    memory, costs = code.memory_analysis(), code.cost_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "flops": costs.get("flops", math.nan),
        "accessed_bytes": costs.get("bytes accessed", math.nan),
    }


def portable(component: programs.JaxComponent, endpoint: str, shape: Shape) -> bytes:
    """Serialize an endpoint as StableHLO without shardings, so that any mesh will do."""
    function = jax.jit(component.pure(endpoint, shape), donate_argnums=1)
    arguments = component.arguments(endpoint, shape)
    exported = jax.export.export(function, platforms=artifacts.STABLEHLO_PLATFORMS)(*arguments)
    return bytes(exported.serialize())
