"""Compare updates of a UNet's weights by our trainer and by PyTorch, in turn."""

import os
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from sd_tf.bench.peers import apart, report
from sd_tf.bench.peers.engine import TRAINERS, UPDATE, Job
from sd_tf.bench.peers.measure import Progress, versions
from sd_tf.bench.peers.process import Process
from sd_tf.bench.plan import BenchError
from sd_tf.bench.report import gigabytes, hardware, machine
from sd_tf.checkpoints import TINY_FOLDER

OURS = "ours"
TOLERANCE = 1e-3  # relative difference of the first losses
STEPS = 1000  # steps of the run to which an update belongs
HEAD = ("", "examples/s", "update, ms", "from", "to", "theirs / ours", "first loss", "peak GB")


@dataclass(frozen=True)
class UpdateOptions:
    """The engines whose updates are compared, the checkpoint, and how often."""

    checkpoint: str = str(TINY_FOLDER)
    batch_size: int = 32
    rounds: int = 15  # timed updates of each engine, in turn
    engines: tuple[str, ...] = tuple(TRAINERS)
    lora_rank: int | None = None  # train an adapter, not the weights
    work: str = "out/peers"

    def check(self) -> "UpdateOptions":
        for name in ("batch_size", "rounds", "lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BenchError(f"`{name}` is at least 1. Received: {value}")
        if unknown := [name for name in self.engines if name not in TRAINERS]:
            raise BenchError(f"`engines` are of {', '.join(TRAINERS)}. Received: {unknown[0]}")
        if not (Path(self.checkpoint) / "model_index.json").is_file():
            raise BenchError(f"`checkpoint` is a diffusers folder. Received: {self.checkpoint!r}")
        return self


def compare(options: UpdateOptions, progress: Progress) -> dict:
    """Measure the engines' updates in turn, ours among them."""
    options.check()
    engines = list(dict.fromkeys([OURS, *options.engines]))
    load_average = os.getloadavg()
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    inputs = work / "training.npz"
    apart(write_inputs, inputs, options.checkpoint, options.batch_size)
    found = measure(engines, options, inputs, work / "logs", progress)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoint": Path(options.checkpoint).resolve().name,
        "batch_size": options.batch_size,
        "lora_rank": options.lora_rank,
        "hardware": {**hardware(), "devices": ["CPU"]},
        "versions": versions(),
        "load_average": load_average,
        "engines": found,
    }


def write_inputs(path: Path, checkpoint: str, batch_size: int) -> None:
    """Write one random batch of latents and text states, in place of computed ones."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    from sd_tf.weights import open_checkpoint

    unet = open_checkpoint(checkpoint).config.denoiser
    is_unet = unet.component == "unet"
    if not is_unet or unet.added is not None or unet.in_channels != unet.out_channels:
        raise BenchError(
            f"Comparing updates needs a text-to-image checkpoint of SD1 or SD2. "
            f"Received: {checkpoint}"
        )
    draws = np.random.default_rng(0)
    shape = (batch_size, unet.sample_size, unet.sample_size, unet.in_channels)
    np.savez(
        path,
        latents=draws.standard_normal(shape, "float32"),
        noise=draws.standard_normal(shape, "float32"),
        timesteps=draws.integers(0, 1000, batch_size).astype("int32"),
        context=draws.standard_normal((batch_size, 77, unet.context_dim), "float32"),
    )


def measure(
    engines: list[str], options: UpdateOptions, inputs: Path, logs: Path, progress: Progress
) -> dict[str, dict]:
    """Load all engines, compare their first losses from the same weights, and time them in turn."""
    threads = len(os.sched_getaffinity(0))
    found = {}
    with ExitStack() as stack:
        workers = {}
        for name in engines:
            progress(f"{TRAINERS[name].label} …")
            job = Job(
                name,
                STEPS,
                threads,
                checkpoint=options.checkpoint,
                inputs=str(inputs),
                does="trains",
                lora_rank=options.lora_rank,
            )
            worker = stack.enter_context(Process(job, logs / f"training-{name}.log"))
            worker.ask("load")
            loss = logs / f"training-{name}.npy"
            first = worker.ask("run", stage=UPDATE, save=str(loss))
            workers[name] = worker
            found[name] = {
                "label": TRAINERS[name].label,
                "first_seconds": first["seconds"],
                "first_loss": float(np.load(loss)),
                "seconds": [],
            }
            difference = abs(found[name]["first_loss"] / found[OURS]["first_loss"] - 1.0)
            if difference > TOLERANCE:
                raise BenchError(
                    f"All first losses must be equal. {TRAINERS[name].label} gave "
                    f"{found[name]['first_loss']:.6g}, ours {found[OURS]['first_loss']:.6g}."
                )
        for worker in workers.values():
            worker.ask("run", stage=UPDATE)  # warm
        for _ in range(options.rounds):
            for name, worker in workers.items():
                found[name]["seconds"].append(worker.ask("run", stage=UPDATE)["seconds"])
        for name, worker in workers.items():
            found[name] |= worker.ask("memory")
    for record in found.values():
        pairs = zip(record["seconds"], found[OURS]["seconds"], strict=True)
        record["examples_per_second"] = options.batch_size / statistics.median(record["seconds"])
        record["theirs_over_ours"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return found


def table(results: dict) -> str:
    lines = [list(HEAD)]
    for record in results["engines"].values():
        milliseconds = [1e3 * seconds for seconds in record["seconds"]]
        lines.append(
            [
                record["label"],
                f"{record['examples_per_second']:.1f}",
                f"{statistics.median(milliseconds):.0f}",
                f"{min(milliseconds):.0f}",
                f"{max(milliseconds):.0f}",
                f"{record['theirs_over_ours']:.2f}",
                f"{record['first_loss']:.6f}",
                gigabytes(record["peak_memory_bytes"]),
            ]
        )
    rank = results["lora_rank"]
    trained = "all weights" if rank is None else f"LoRA of rank {rank}"
    title = f"Updates with {results['batch_size']} examples, float32, {results['checkpoint']}"
    title = f"{title}, {trained}."
    return "\n".join([title, machine(results), "", *report.columns(lines)])
