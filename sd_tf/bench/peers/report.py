"""Write a comparison's results as text, as JSON and as an HTML page."""

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path

from sd_tf.bench.page import render
from sd_tf.bench.peers import targets
from sd_tf.bench.peers.engine import STAGES
from sd_tf.bench.report import gigabytes, machine, number

NAMES = {"text_encoder": "text encoder", "unet_step": "UNet step", "decoder": "decoder"}
HEAD = ("", *NAMES.values(), "end to end", "compile", "load", "peak GB", "PSNR dB")
VERDICTS = {True: "met", False: "not met", None: "not measured"}


def write(results: dict, folder: Path, name: str, page: str) -> list[Path]:
    figures, shown = write_json(results, folder, name), folder / f"{name}.html"
    shown.write_text(page, encoding="utf-8")
    return [figures, shown]


def write_json(results: dict, folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(content + "\n", encoding="utf-8")
    return path


# Figures in words


def _with_ratio(part: dict) -> str:
    seconds = number(part["seconds"]["median"])
    return f"{seconds} ({part['ratio']:.2f}×)" if "ratio" in part else seconds


def row(engine: dict) -> list[str]:
    """Return the cells below HEAD; a ratio is the engine's seconds over our SavedModels'."""
    stages = [engine["stages"][name] for name in STAGES]
    decibels = [f"{stage['psnr']:.0f}" for stage in stages if "psnr" in stage]
    return [
        engine["label"],
        *map(_with_ratio, stages),
        _with_ratio(engine["end_to_end"]),
        number(engine["compile_seconds"]),
        number(engine["load_seconds"]),
        gigabytes(engine["peak_memory_bytes"]),
        " / ".join(decibels) or "–",
    ]


def device_memory(size: dict) -> list[str]:
    found = {e["label"]: e["peak_device_memory_bytes"] for e in size["engines"]}
    each = [f"{label} {gigabytes(size)} GB" for label, size in found.items() if size is not None]
    return [f"Peak device memory: {', '.join(each)}."] if each else []


def matmul_line(size: dict) -> str:
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in size["matmul_gflops"].items())
    share = targets.matmul_share(size)
    line = f"The UNet's step is {number(size['unet_flops'] / 1e9)} GFLOP taken directly."
    if share is None:
        return line
    return f"{line} Matmul, GFLOP/s: {rates}. Our step does {share:.0f} % of the best of them."


def absences(size: dict) -> list[str]:
    return [
        f"{item['label']}: {'failed' if item['failed'] else 'left out'}. {item['reason']}"
        for item in size["left_out"]
    ]


def lost(results: dict) -> list[str]:
    """Say which sizes were not measured, and why."""
    return [f"{size}: failed. {reason}" for size, reason in results["failed_sizes"].items()]


def notes(size: dict) -> list[str]:
    return [*device_memory(size), matmul_line(size)]


def work(results: dict) -> str:
    flags = results["flags"]
    steps, full = flags["steps"], results["full_steps"]
    batch = flags["batch_size"]
    pictures = "one picture" if batch == 1 else f"{batch} pictures at once"
    how = "" if steps == full else f", extrapolated from {steps}"
    return (
        f"{pictures}, {flags['precision']}, on the {flags['device'].upper()}; a UNet step is both "
        f"halves of guidance; end to end is {full} steps{how}; medians of {flags['rounds']} turns"
    )


def judgement(target: dict) -> list[str]:
    value = "–" if target["value"] is None else number(target["value"]) + target["unit"]
    return [target["label"], target["limit"], value, VERDICTS[target["met"]]]


def columns(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    text = []
    for index, (label, *cells) in enumerate(lines):
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        text.append("  ".join([label.ljust(widths[0]), *padded]).rstrip())
        if index == 0:
            text.append("-" * (sum(widths) + 2 * len(cells)))
    return text


def table(results: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    load = results["load_average"][0]
    text = ["", *textwrap.wrap(f"Seconds, {work(results)}.", 100)]
    text += [f"{machine(results)}; load before {load:.2f}", *textwrap.wrap(versions, 100)]
    for size in results["sizes"]:
        rows = [list(HEAD), *map(row, size["engines"])]
        rows[0][0] = f"{size['size']} px"
        text += ["", *columns(rows), ""]
        for note in (*absences(size), *notes(size)):
            text += textwrap.wrap(note, 100, subsequent_indent="  ")
    for reason in lost(results):
        text += ["", *textwrap.wrap(reason, 100, subsequent_indent="  ")]
    if judged := targets.judged(results):
        head = [f"targets, {targets.SIZE} px", "limit", "measured", ""]
        text += ["", *columns([head, *map(judgement, judged)])]
    return "\n".join(text)


# The page


def page(results: dict) -> str:
    judged = [judgement(target) for target in targets.judged(results)]
    return render(
        "peers.html.j2",
        results,
        heading="Peers",
        work=work(results),
        setup=setup(results),
        sizes=[_size(size) for size in results["sizes"]],
        lost=lost(results),
        target_size=targets.SIZE,
        judged=labelled(judged),
    )


def _size(size: dict) -> dict:
    engines = size["engines"]
    stages = [{**engine["stages"], "end_to_end": engine["end_to_end"]} for engine in engines]
    return {
        "size": size["size"],
        "head": [f"{size['size']} px", *HEAD[1:]],
        "rows": labelled(map(row, engines)),
        "absences": absences(size),
        "notes": notes(size),
        "charts": {
            name: [
                (engine["label"], part[stage]["seconds"])
                for engine, part in zip(engines, stages, strict=True)
            ]
            for stage, name in {**NAMES, "end_to_end": "end to end"}.items()
        },
    }


def labelled(lines: Iterable[list[str]]) -> list[tuple[str, list[str]]]:
    """Split lines into (label, cells), as a page's tables take them."""
    return [(label, cells) for label, *cells in lines]


def setup(results: dict) -> dict[str, str]:
    flags = " ".join(f"--{k}={_flag(v)}" for k, v in results["flags"].items() if v is not None)
    return {
        "system": results["hardware"]["system"],
        "load before": ", ".join(f"{value:.2f}" for value in results["load_average"]),
        **results["versions"],
        "flags": flags,
    }


def _flag(value) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
