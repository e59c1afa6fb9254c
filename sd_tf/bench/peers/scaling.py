"""`python -m sd_tf.bench scaling`: pictures per second of the SavedModels by batch and by size."""

import argparse
import os
import shutil
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from sd_tf.bench import BenchError
from sd_tf.bench.page import STYLE, escape
from sd_tf.bench.peers import folders, report
from sd_tf.bench.peers.command import add_shared_arguments, numbers
from sd_tf.bench.peers.engine import KINDS, OURS, Job
from sd_tf.bench.peers.measure import FULL_STEPS, MAX_STEPS, versions
from sd_tf.bench.peers.process import Process
from sd_tf.bench.report import gigabytes, hardware, machine, number

HEAD = ("batch", "px", "pictures/s", "pictures/s, 1st = 1", "step", "picture call", "peak GB")
WIDTH, HEIGHT, MARGIN = 840, 300, 46


@dataclass(frozen=True)
class Point:
    batch: int
    size: int


def points(batches: tuple[int, ...], sizes: tuple[int, ...], grid: str) -> list[Point]:
    """cross: every batch at the smallest size, every size at the smallest batch."""
    batches, sizes = sorted(set(batches)), sorted(set(sizes))
    if batches[0] < 1:
        raise BenchError(f"--batches are at least 1. Received: {batches[0]}")
    if wrong := [size for size in sizes if size < 8 or size % 8]:
        raise BenchError(f"--sizes are positive multiples of 8. Received: {wrong[0]}")
    everything = [Point(*pair) for pair in product(batches, sizes)]
    if grid == "full":
        return everything
    return [p for p in everything if p.batch == batches[0] or p.size == sizes[0]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser)
    parser.add_argument("--batches", type=numbers, default=(1, 2, 4, 8))
    parser.add_argument("--sizes", type=numbers, default=(256, 384, 512, 640, 768))
    parser.add_argument(
        "--grid",
        choices=["cross", "full"],
        default="cross",
        help="cross: all batches at the smallest size, all sizes at the smallest batch.",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=2,
        help="A step is timed by pictures of one step and of so many more. Default: 2.",
    )


def run(options: argparse.Namespace) -> int:
    chosen = points(options.batches, options.sizes, options.grid)
    if not 1 <= options.steps < FULL_STEPS:
        raise BenchError(f"--steps is 1 to {FULL_STEPS - 1}. Received: {options.steps}")
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    load_average = os.getloadavg()
    checkpoint = folders.checkpoint(options.checkpoint, work).resolve()
    measured, left_out, devices = [], [], ["CPU"]
    for point in chosen:
        print(f"batch {point.batch}, {point.size} px …", flush=True)
        try:
            found = measure(point, checkpoint, work, options)
        except BenchError as error:
            left_out.append({**vars(point), "reason": str(error)})
            continue
        devices = found.pop("devices")
        measured.append(found)
    if not measured:
        raise BenchError(f"Nothing could be measured. {left_out[0]['reason']}")
    flags = {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()}
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "flags": flags,
        "checkpoint": str(checkpoint),
        "hardware": {**hardware(), "devices": devices},
        "versions": versions(),
        "load_average": load_average,
        "full_steps": FULL_STEPS,
        "points": measured,
        "left_out": left_out,
    }
    print("\n" + table(results))
    if options.output is not None:
        print(*report.write(results, options.output, "scaling", page(results)), sep="\n")
    for item in left_out:
        what = f"batch {item['batch']}, {item['size']} px"
        print(f"sd_tf.bench: {what} failed. {item['reason']}", file=sys.stderr)
    return int(bool(left_out))


def measure(point: Point, checkpoint: Path, work: Path, options: argparse.Namespace) -> dict:
    """One export, made for this point and then deleted: together they would fill a disk."""
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
            first, short, long = (
                ours.ask("draw", steps=steps)["seconds"] for steps in (1, 1, 1 + options.steps)
            )
            memory = ours.ask("memory")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    step_seconds = (long - short) / options.steps  # without what a call does but once
    seconds = short + (FULL_STEPS - 1) * step_seconds
    return {
        **vars(point),
        "images_per_second": point.batch / seconds,
        "full_seconds": seconds,
        "first_seconds": first,
        "short_seconds": short,
        "long_seconds": long,
        "step_seconds": step_seconds,
        "load_seconds": loaded["load_seconds"],
        "devices": loaded["devices"],
        **memory,
    }


# The report


def table(results: dict) -> str:
    lines = [list(HEAD), *_rows(results)]
    return "\n".join([f"{work(results)}.", machine(results), "", *report.columns(lines)])


def work(results: dict) -> str:
    steps = results["flags"]["steps"]
    return (
        f"{KINDS[OURS].label}, {results['flags']['precision']}, {FULL_STEPS} steps, extrapolated "
        f"from 1 and {1 + steps}"
    )


def _rows(results: dict) -> list[list[str]]:
    first = results["points"][0]["images_per_second"]
    return [
        [
            str(point["batch"]),
            str(point["size"]),
            number(point["images_per_second"]),
            f"{point['images_per_second'] / first:.2f}",
            number(point["step_seconds"]),
            number(point["full_seconds"]),
            gigabytes(point["peak_memory_bytes"]),
        ]
        for point in results["points"]
    ]


def page(results: dict) -> str:
    date = datetime.fromisoformat(results["date"])
    return report.PAGE.substitute(
        title="Scaling",
        style=STYLE,
        work=escape(work(results)),
        machine=escape(machine(results)),
        date=f'<time datetime="{escape(results["date"])}">{date:%d %B %Y, %H:%M} UTC</time>',
        sections=_charts(results) + report.setup(results),
    )


def _charts(results: dict) -> str:
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
    figures = report.html_table([list(HEAD), *_rows(results)])
    return (
        f"<section><h2>Pictures per second by batch</h2><p>{smallest} px.</p>"
        f"{curve(by_batch, 'pictures in a batch')}</section>"
        f"<section><h2>Megapixels per second by size</h2><p>Batch {fewest}.</p>"
        f"{curve(by_pixels, 'pixels of a picture')}</section>"
        f"<section><h2>All figures</h2>{figures}</section>"
    )


def curve(values: list[tuple[float, float, str]], label: str) -> str:
    """A line through the points (x, y, x in words), both axes from zero."""
    right, top = max(x for x, _, _ in values), max(y for _, y, _ in values)

    def place(x, y):
        across = MARGIN + x / right * (WIDTH - 2 * MARGIN)
        return f"{across:.1f}", f"{HEIGHT - MARGIN - y / top * (HEIGHT - 2 * MARGIN):.1f}"

    places = [place(x, y) for x, y, _ in values]
    line = " ".join(",".join(at) for at in places)
    marks = "".join(
        f'<circle cx="{x}" cy="{y}" r="3.5" fill="var(--main)"/>'
        f'<text x="{x}" y="{float(y) - 8:.1f}" text-anchor="middle">{number(value)}</text>'
        f'<text x="{x}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{at}</text>'
        for (x, y), (_, value, at) in zip(places, values, strict=True)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{HEIGHT - MARGIN}" y2="{HEIGHT - MARGIN}" '
        f'stroke="var(--soft)"/><polyline points="{line}" fill="none" stroke="var(--main)" '
        f'stroke-width="2"/>{marks}'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(label)}</text></svg>'
    )
