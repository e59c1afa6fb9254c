"""`sd-tf jax compile`: compile a pipeline for this machine, or for a TPU slice elsewhere."""

import argparse
import time
from dataclasses import replace

import jax
from jax.sharding import Mesh

from sd_tf.cli.arguments import add_json, names, whole_numbers, write_json
from sd_tf.cli.options import (
    ADDITIONS,
    DISABLE_REWRITES,
    EXPORT,
    OPENING,
    PLACES,
    SEVERAL,
    STORAGE,
    chosen,
    opened,
)
from sd_tf.cli.options import add_arguments as add_options
from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.config import FAMILIES, ScheduleConfig, family_of
from sd_tf.jax import chips
from sd_tf.jax import compile as ahead
from sd_tf.jax.sharding import DATA, check_mesh, make_mesh
from sd_tf.runtime.manifest import ExportError
from sd_tf.sampling.tables import steps
from sd_tf.weights import Checkpoint, t5_readers, with_texts

EXPORTED = {option.name: option for option in EXPORT}
AS_EXPORTED = (
    *("height", "width", "max_steps", "guidance", "guidance_rescale", "prompt_chunks"),
    "overwrite",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        help="as for `sd-tf export`; without it, --family names an architecture, which is "
        "compiled from shapes alone",
    )
    add_options(parser, OPENING)
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="default: this machine's")
    parser.add_argument(
        "--topology",
        type=names,
        default=(),
        help="a TPU slice, like v5e:2x2, that need not be here; several with --sweep",
    )
    parser.add_argument("--batch_size", type=whole_numbers, default=(), help="several with --sweep")
    precision = replace(EXPORTED["precision"], default="bfloat16")
    add_options(parser, [precision, *(EXPORTED[name] for name in AS_EXPORTED)])
    add_options(parser, [*SEVERAL, STORAGE, DISABLE_REWRITES, *PLACES, *ADDITIONS])
    parser.add_argument("--model_axis", type=int, default=1, help="devices that share one denoiser")
    parser.add_argument("--num_steps", type=int, default=20, help="that the estimate is for")
    parser.add_argument("--out", dest="output_dir", help="folder for the compiled pipeline")
    parser.add_argument(
        "--sweep", action="store_true", help="a table over topologies and batches, nothing kept"
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    if options.sweep == bool(options.output_dir):
        raise ExportError("Give --out for a compiled pipeline, or --sweep for a table of figures.")
    if not options.sweep and max(len(options.topology), len(options.batch_size)) > 1:
        raise ExportError(
            "Several topologies, or several of --batch_size, are for --sweep; one pipeline of "
            "several batches takes --batch_sizes."
        )
    if options.sweep and (options.batch_sizes or options.sizes):
        raise ExportError("--batch_sizes and --sizes are for a compiled pipeline, not for --sweep.")
    if options.batch_size and options.batch_sizes:
        raise ExportError("Give --batch_size or --batch_sizes.")
    if bool(options.topology) != (options.platform == "tpu") and options.platform is not None:
        raise ExportError("--platform=tpu takes a --topology, like v5e:2x2; the others take none.")
    checkpoint = _checkpoint(options)
    if options.topology:
        _check_estimate(options, checkpoint.config.schedule)
    meshes = {name: _mesh(options, name) for name in options.topology or [None]}
    wanted = [
        (topology, _fixed(options, mesh, batch))
        for topology, mesh in meshes.items()
        for batch in options.batch_size or [None]
    ]
    for topology, fixed in wanted:  # before anything is compiled
        check_mesh(meshes[topology], *geometry_of(checkpoint.config, fixed).shapes.batch_sizes)
    results = [
        _one(options, checkpoint, topology, meshes[topology], fixed) for topology, fixed in wanted
    ]
    write_json(options.json, results)
    rows = [result["row"] for result in results if result["row"] is not None]
    if rows:
        print(f"\n{options.num_steps} steps, {options.precision}; the rest of a call, and of the")
        print("hardware, is not in the estimate: time = max(arithmetic, memory) at published peaks")
        print()
        print(chips.table("slice, batch", "weights", "image", "a call", rows))
    return 0


def _check_estimate(options, schedule: ScheduleConfig) -> None:
    """Refuse a number of steps that no call can take, before anything is compiled for it."""
    if not 1 <= options.num_steps <= options.max_steps:
        raise ExportError(f"`num_steps` is 1…{options.max_steps}. Received: {options.num_steps}")
    steps(schedule, schedule.sampler, options.num_steps)


def _checkpoint(options) -> Checkpoint:
    if options.checkpoint is not None:
        return opened(options, options.checkpoint, (*OPENING, *ADDITIONS))
    for name, value in chosen(options, (*OPENING, *ADDITIONS)).items():
        if value and name not in ("family", "without", "max_sequence_length", "t5_tokenizer"):
            raise ExportError(f"`{name}` is for a checkpoint: give `checkpoint`.")
    if options.family is None:
        raise ExportError("Give `checkpoint`, or `family` to compile from shapes alone.")
    name = f"the family {options.family}"
    family = FAMILIES[options.family]
    config = with_texts(family, options.without, options.max_sequence_length, name)
    tokenizers = t5_readers(config, options.t5_tokenizer, name)
    return Checkpoint(name, name, "shapes alone", config, {}, tokenizers)


def _mesh(options, topology: str | None) -> Mesh:
    return make_mesh(_devices(options.platform, topology), options.model_axis)


def _fixed(options, mesh: Mesh, batch: int | None) -> Fixed:
    """Return what is fixed; without a batch size, it has a picture for each data shard."""
    if batch is None and not options.batch_sizes:
        batch = mesh.shape[DATA]
    return Fixed(
        batch_sizes=options.batch_sizes or (batch,),
        height=options.height,
        width=options.width,
        sizes=options.sizes,
        precision=options.precision,
        storage=options.storage,
        max_steps=options.max_steps,
        guidance=options.guidance,
        guidance_rescale=options.guidance_rescale,
        prompt_chunks=options.prompt_chunks,
        disabled_rewrites=options.disable_rewrites,
        **chosen(options, PLACES),
    )


def _one(options, checkpoint, topology: str | None, mesh: Mesh, fixed: Fixed) -> dict:
    shape, devices = geometry_of(checkpoint.config, fixed).shapes.first, list(mesh.devices.flat)
    label = f"{topology or devices[0].device_kind}, {shape.batch_size}"
    print(f"{label}: {family_of(checkpoint.config)}, {len(devices)} devices", flush=True)
    reports, start = {}, time.perf_counter()

    def report(name, figures):
        reports[name] = figures
        trace, compilation = figures["trace_seconds"], figures["compile_seconds"]
        took = f"traced in {trace:.1f} s, compiled in {compilation:.1f} s"
        print(f"[{time.perf_counter() - start:7.1f} s] {name}: {took}", flush=True)

    if options.sweep:
        parts = ahead.components(checkpoint, fixed, mesh)
        try:
            for name in chips.runs_of(calls=1):
                component, endpoint = name.split(".")
                _, signature = ahead.compile_endpoint(parts[component], endpoint, mesh, shape)
                report(name, signature.report)
        except chips.DoesNotFitError as error:
            print(f"{name}: {error}", flush=True)
            row = chips.no_row(label)
            return {"label": label, "topology": topology, "programs": reports, "row": row}
        calls = parts["diffusion_model"].component.tables[shape.size].calls_by_sampler()
    else:
        manifest = ahead.compile_pipeline(
            checkpoint,
            fixed,
            mesh,
            options.output_dir,
            topology=topology,
            overwrite=options.overwrite,
            report=report,
        )
        calls = {name: scheduler.calls for name, scheduler in manifest.schedulers.items()}
        print(f"{options.output_dir}: {label}, {time.perf_counter() - start:.1f} s")
    row = None
    if topology is not None:
        chip = chips.chip_of(topology)
        calls = calls[checkpoint.config.schedule.sampler][options.num_steps - 1]
        found = chips.outlook(reports, chip, chips.runs_of(calls))
        row = chips.row(label, found, chip, shape.batch_size, len(devices))
    return {"label": label, "topology": topology, "programs": reports, "row": row}


def _devices(platform: str | None, topology: str | None) -> list[jax.Device]:
    if topology is not None:
        return chips.slice_devices(topology)
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        raise ExportError(f"This machine has no {platform}: {error}") from error
