"""Compare one call of a transformer denoiser with diffusers' on other engines, one after another.

Such a model can fill the memory alone. So each engine has a process that loads it, times its calls
and ends, before the next one starts; every round does this for all engines.
"""

import os
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from sd_tf.bench.peers import agreement, apart, report
from sd_tf.bench.peers.engine import CALL, DENOISERS, OURS, Job
from sd_tf.bench.peers.measure import Progress, versions
from sd_tf.bench.peers.process import Process
from sd_tf.bench.plan import BenchError
from sd_tf.bench.report import gigabytes, hardware, machine

TIMESTEP, GUIDANCE = 700.0, 3.5
FAILED = "failed"  # why an engine has no figures
HEAD = ("", "seconds a call", "from", "to", "theirs / ours", "first call", "load", "dB", "peak GB")


@dataclass(frozen=True)
class DenoiserOptions:
    """The checkpoint, the size, the engines, and how often they are called."""

    checkpoint: str
    size: int = 512
    precision: str = "float32"
    engines: tuple[str, ...] = tuple(DENOISERS)
    rounds: int = 2  # processes of each engine, in turn
    calls: int = 3  # timed calls in each process
    work: str = "out/peers"

    def check(self) -> "DenoiserOptions":
        for name in ("rounds", "calls"):
            if getattr(self, name) < 1:
                raise BenchError(f"`{name}` is at least 1. Received: {getattr(self, name)}")
        if unknown := [name for name in self.engines if name not in DENOISERS]:
            raise BenchError(f"`engines` are of {', '.join(DENOISERS)}. Received: {unknown[0]}")
        if self.size < 16 or self.size % 16:
            raise BenchError(f"`size` is a positive multiple of 16. Received: {self.size}")
        if not (Path(self.checkpoint) / "model_index.json").is_file():
            raise BenchError(f"`checkpoint` is a diffusers folder. Received: {self.checkpoint!r}")
        return self


def compare(options: DenoiserOptions, progress: Progress) -> dict:
    """Time the engines' calls, and compare their outputs with ours.

    An engine that fails is left out, with its reason; the others go on.
    """
    options.check()
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    inputs, load_average = work / "denoiser.npz", os.getloadavg()
    shapes = apart(write_inputs, inputs, options.checkpoint, options.size)
    engines = list(dict.fromkeys([OURS, *options.engines]))
    found = {
        name: {"label": DENOISERS[name].label_in(options.precision), "seconds": []}
        for name in engines
    }
    for round_ in range(options.rounds):
        for name in engines:
            if FAILED in found[name]:
                continue
            progress(f"round {round_ + 1} of {options.rounds}: {found[name]['label']} …")
            try:
                _measure(name, options, inputs, work, found)
            except BenchError as error:
                if name == OURS:
                    raise
                found[name][FAILED] = str(error)
                progress(f"{found[name]['label']} failed: {error}")
    for record in found.values():
        if FAILED in record:
            continue
        pairs = zip(record["seconds"], found[OURS]["seconds"], strict=True)
        record["theirs_over_ours"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoint": Path(options.checkpoint).resolve().name,
        "size": options.size,
        "precision": options.precision,
        "shapes": shapes,
        "hardware": {**hardware(), "devices": ["CPU"]},
        "versions": versions(),
        "load_average": load_average,
        "engines": found,
    }


def _measure(name: str, options: DenoiserOptions, inputs: Path, work: Path, found: dict) -> None:
    """Load one engine, call it, compare its output with ours, and add its times."""
    record, output = found[name], work / f"denoiser-{name}.npy"
    job = Job(
        name,
        steps=1,
        threads=len(os.sched_getaffinity(0)),
        precision=options.precision,
        checkpoint=options.checkpoint,
        inputs=str(inputs),
        does="denoises",
    )
    with Process(job, work / "logs" / f"denoiser-{name}.log") as worker:
        loaded = worker.ask("load")
        first = worker.ask("run", stage=CALL, save=str(output))["seconds"]
        record["seconds"] += [
            worker.ask("run", stage=CALL)["seconds"] for _ in range(options.calls)
        ]
        memory = worker.ask("memory")["peak_memory_bytes"]
    decibels = agreement.decibels(np.load(work / f"denoiser-{OURS}.npy"), np.load(output))
    agreement.check(record["label"], CALL, decibels, options.precision, options.precision)
    record |= {
        "psnr": decibels,
        "first_seconds": loaded["compile_seconds"] + first,
        "load_seconds": loaded["load_seconds"],
        "peak_memory_bytes": max(memory, record.get("peak_memory_bytes", 0)),
    }


def write_inputs(path: Path, checkpoint: str, size: int) -> dict[str, list[int]]:
    """Write random inputs of one call, two predictions if guidance needs them; return the shapes.

    `counts` tells how many equal tokens each one of the context stands for.
    """
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    from sd_tf.components.conditions import conditioner_of
    from sd_tf.components.geometry import Fixed, geometry_of
    from sd_tf.components.guidance import guidance_of
    from sd_tf.weights import open_checkpoint

    config = open_checkpoint(checkpoint).config
    denoiser = config.denoiser
    if denoiser.component != "transformer":
        raise BenchError(
            f"Denoisers are compared on checkpoints of SD3 and Flux; `sd-tf bench peers` compares "
            f"UNets. Received: {checkpoint}"
        )
    geometry = geometry_of(config, Fixed(height=size, width=size))
    conditioner = conditioner_of(config)
    count = len(guidance_of(geometry.guidance, config, 0.0).parts)
    draws = np.random.default_rng(0)

    def normal(*shape):
        return draws.standard_normal((count, *shape), "float32")

    length = conditioner.length(config, 1)
    context = normal(length, denoiser.context_dim)
    counts = conditioner.counts(config, 1) or [1] * length
    context[:, np.asarray(counts) > 1] = 0.0
    inputs = {
        "latents": normal(*geometry.shapes.latent((size, size))),
        "timesteps": np.full(count, TIMESTEP, "float32"),
        "context": context,
        "pooled": normal(denoiser.pooled_dim),
        "counts": np.asarray(counts),
    }
    if denoiser.is_told_guidance:
        inputs["guidance"] = np.full(count, GUIDANCE, "float32")
    np.savez(path, **inputs)
    return {name: list(value.shape) for name, value in inputs.items()}


def failed(results: dict) -> bool:
    return any(FAILED in record for record in results["engines"].values())


def table(results: dict) -> str:
    lines, reasons = [list(HEAD)], []
    for record in results["engines"].values():
        if FAILED in record:
            reasons.append(f"{record['label']}: failed. {record[FAILED]}")
            continue
        seconds = record["seconds"]
        lines.append(
            [
                record["label"],
                f"{statistics.median(seconds):.3g}",
                f"{min(seconds):.3g}",
                f"{max(seconds):.3g}",
                f"{record['theirs_over_ours']:.2f}",
                f"{record['first_seconds']:.3g}",
                f"{record['load_seconds']:.3g}",
                f"{record['psnr']:.0f}",
                gigabytes(record["peak_memory_bytes"]),
            ]
        )
    title = (
        f"One call of the transformer of {results['checkpoint']}, {results['size']} px, "
        f"batch {results['shapes']['latents'][0]}, {results['precision']}."
    )
    return "\n".join([title, machine(results), "", *report.columns(lines), *reasons])
