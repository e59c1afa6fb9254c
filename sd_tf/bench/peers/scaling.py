"""Measure the SavedModels' pictures per second by batch and by size."""

import dataclasses
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from sd_tf.bench.page import render
from sd_tf.bench.peers import folders, report
from sd_tf.bench.peers.engine import KINDS, OURS, Job
from sd_tf.bench.peers.measure import FULL_STEPS, MAX_STEPS, Progress, versions
from sd_tf.bench.peers.process import Process
from sd_tf.bench.plan import BenchError
from sd_tf.bench.report import gigabytes, hardware, machine, number, without_folders
from sd_tf.bench.timing import summary

HEAD = (
    *("batch", "px", "pictures/s", "pictures/s, 1st = 1", "step", "step, min to max"),
    *("picture call", "peak GB"),
)


@dataclass(frozen=True)
class ScalingOptions:
    """The batches and sizes to measure, the checkpoint, and how to measure."""

    checkpoint: str | None = None  # None: a random SD1.5
    work: str = "out/peers"
    batches: tuple[int, ...] = (1, 2, 4, 8)
    sizes: tuple[int, ...] = (256, 384, 512, 640, 768)
    grid: str = "cross"
    steps: int = 2  # a step is timed by a picture of 1 step and one of 1 + `steps`
    rounds: int = 3  # such pairs of pictures
    precision: str = "float32"
    device: str = "cpu"


@dataclass(frozen=True)
class Point:
    """One batch at one size."""

    batch: int
    size: int


def points(batches: tuple[int, ...], sizes: tuple[int, ...], grid: str) -> list[Point]:
    """Return the points of a grid.

    cross: every batch at the smallest size, every size at the smallest batch.
    """
    batches, sizes = sorted(set(batches)), sorted(set(sizes))
    if batches[0] < 1:
        raise BenchError(f"`batches` are at least 1. Received: {batches[0]}")
    if wrong := [size for size in sizes if size < 8 or size % 8]:
        raise BenchError(f"`sizes` are positive multiples of 8. Received: {wrong[0]}")
    everything = [Point(*pair) for pair in product(batches, sizes)]
    if grid == "full":
        return everything
    return [p for p in everything if p.batch == batches[0] or p.size == sizes[0]]


def scale(options: ScalingOptions, progress: Progress) -> dict:
    """Measure every point in turn. A point that fails is left out, with its reason."""
    chosen = points(options.batches, options.sizes, options.grid)
    if not 1 <= options.steps < FULL_STEPS:
        raise BenchError(f"`steps` is 1 to {FULL_STEPS - 1}. Received: {options.steps}")
    if options.rounds < 1:
        raise BenchError(f"`rounds` is at least 1. Received: {options.rounds}")
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    load_average = os.getloadavg()
    checkpoint = folders.checkpoint(options.checkpoint, work).resolve()
    measured, left_out, devices = [], [], ["CPU"]
    for point in chosen:
        progress(f"batch {point.batch}, {point.size} px …")
        try:
            found = measure(point, checkpoint, work, options)
        except BenchError as error:
            left_out.append({**vars(point), "reason": str(error)})
            continue
        devices = found.pop("devices")
        measured.append(found)
    if not measured:
        raise BenchError(f"Nothing could be measured. {left_out[0]['reason']}")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "flags": without_folders(dataclasses.asdict(options)),
        "checkpoint": checkpoint.name,
        "hardware": {**hardware(), "devices": devices},
        "versions": versions(),
        "load_average": load_average,
        "full_steps": FULL_STEPS,
        "points": measured,
        "left_out": left_out,
    }


def measure(point: Point, checkpoint: Path, work: Path, options: ScalingOptions) -> dict:
    """Export for one point, measure, and delete the export: all exports would fill a disk."""
    folder = work / "exports" / "scaling"
    flags = {"height": point.size, "width": point.size, "max_steps": MAX_STEPS}
    flags |= {"batch_size": point.batch, "precision": options.precision, "target": options.device}
    shutil.rmtree(folder, ignore_errors=True)
    folders.export(checkpoint, folder, flags)
    job = Job(
        engine=OURS,
        height=point.size,
        width=point.size,
        steps=1 + options.steps,
        threads=len(os.sched_getaffinity(0)),
        device=options.device,
        precision=options.precision,
        export_dir=str(folder),
    )
    try:
        with Process(job, work / "logs" / f"scaling-{point.batch}-{point.size}.log") as ours:
            loaded = ours.ask("load")
            first = ours.ask("draw", steps=1)["seconds"]
            pairs = [
                [ours.ask("draw", steps=steps)["seconds"] for steps in (1, 1 + options.steps)]
                for _ in range(options.rounds)
            ]
            memory = ours.ask("memory")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        **vars(point),
        **extrapolated(point.batch, pairs, options.steps),
        "first_seconds": first,
        "load_seconds": loaded["load_seconds"],
        "devices": loaded["devices"],
        **memory,
    }


def extrapolated(batch: int, pairs: Sequence[tuple[float, float]], steps: int) -> dict:
    """Return a whole picture's figures from those of pictures of 1 step and of 1 + `steps`.

    The difference of the two has none of the parts of a call that run once.

    Args:
        pairs: the seconds of one and of the other, drawn in turn.
    """
    short, long = (summary(seconds) for seconds in zip(*pairs, strict=True))
    step = summary([(slow - fast) / steps for fast, slow in pairs])
    if step["median"] <= 0:
        raise BenchError(
            f"A picture of {1 + steps} steps takes longer than one of 1 step, or nothing follows "
            f"from the two: give more `steps` or more `rounds`. Received: {number(long['median'])} "
            f"s and {number(short['median'])} s, medians of {len(pairs)}"
        )
    seconds = short["median"] + (FULL_STEPS - 1) * step["median"]
    return {
        "images_per_second": batch / seconds,
        "full_seconds": seconds,
        "short_seconds": short,
        "long_seconds": long,
        "step_seconds": step,
    }


# The report


def table(results: dict) -> str:
    lines = [list(HEAD), *_rows(results)]
    return "\n".join([f"{work(results)}.", machine(results), "", *report.columns(lines)])


def work(results: dict) -> str:
    flags = results["flags"]
    label = KINDS[OURS].label_in(flags["precision"], flags["device"])
    return (
        f"{label}, {flags['precision']}, {FULL_STEPS} steps, extrapolated from 1 and "
        f"{1 + flags['steps']}, medians of {flags['rounds']} turns"
    )


def _rows(results: dict) -> list[list[str]]:
    first = results["points"][0]["images_per_second"]
    return [
        [
            str(point["batch"]),
            str(point["size"]),
            number(point["images_per_second"]),
            f"{point['images_per_second'] / first:.2f}",
            number(point["step_seconds"]["median"]),
            f"{number(point['step_seconds']['min'])} to {number(point['step_seconds']['max'])}",
            number(point["full_seconds"]),
            gigabytes(point["peak_memory_bytes"]),
        ]
        for point in results["points"]
    ]


def page(results: dict) -> str:
    measured = results["points"]
    smallest = min(point["size"] for point in measured)
    fewest = min(point["batch"] for point in measured)
    by_batch = [
        (p["batch"], p["images_per_second"], str(p["batch"]))
        for p in measured
        if p["size"] == smallest
    ]
    by_pixels = [
        (p["size"] ** 2, p["images_per_second"] * p["size"] ** 2 / 1e6, f"{p['size']}²")
        for p in measured
        if p["batch"] == fewest
    ]
    return render(
        "scaling.html.j2",
        results,
        heading="Scaling",
        work=work(results),
        setup=report.setup(results),
        smallest=smallest,
        fewest=fewest,
        by_batch=Curve("pictures in a batch", by_batch),
        by_pixels=Curve("pixels of a picture", by_pixels),
        head=HEAD,
        rows=report.labelled(_rows(results)),
    )


@dataclass(frozen=True)
class Curve:
    """A line through the values (x, y, x in words) on a page, both axes from zero."""

    label: str
    values: list[tuple[float, float, str]]
    width: int = 840
    height: int = 300
    margin: int = 46

    @property
    def floor(self) -> int:
        """The place of y = 0, counted from the top."""
        return self.height - self.margin

    @property
    def points(self) -> list[dict]:
        right, top = max(x for x, _, _ in self.values), max(y for _, y, _ in self.values)
        across, up = self.width - 2 * self.margin, self.height - 2 * self.margin
        return [
            {
                "x": round(self.margin + x / right * across, 1),
                "y": round(self.floor - y / top * up, 1),
                "value": y,
                "name": name,
            }
            for x, y, name in self.values
        ]
