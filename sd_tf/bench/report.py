"""A benchmark's results as a text table and as JSON, and the words that its page shares."""

import importlib.metadata
import json
import os
import platform
import textwrap
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sd_tf

FORMAT_VERSION = 1
DEFAULT_NAME = "benchmark"
SUFFIXES = (".json", ".html")
PATHS = ("checkpoint", "compile_cache", "export_dir", "output", "work")  # flags
LIBRARIES = ("tensorflow", "keras", "keras-cv", "numpy")
STAGES = {
    "text_encoder": "text encoder",
    "image_encoder": "image encoder",
    "diffusion_model": "diffusion model",
    "decoder": "decoder",
    "other": "other",
}


def complete(measured: dict, flags: dict) -> dict:
    """Add the context of the figures: date, flags, hardware, versions."""
    devices = measured["variants"][0]["devices"]
    return {
        "format_version": FORMAT_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "flags": without_folders(flags),
        "hardware": {**hardware(), "devices": devices},
        "versions": versions_of(LIBRARIES),
        **measured,
        "variants": [without_folders(variant) for variant in measured["variants"]],
    }


def without_folders(values: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten absolute paths to their last part: reports are made to be shared."""
    return {
        name: Path(value).name if name in PATHS and Path(value or "").is_absolute() else value
        for name, value in values.items()
    }


def versions_of(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of sd_tf, of Python and of those libraries that are installed."""
    found = {"sd_tf": sd_tf.__version__, "python": platform.python_version()}
    for name in libraries:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict:
    def first(path, key):
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
        return None

    return {
        "cpu": first("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(first("/proc/meminfo", "MemTotal").split()[0]) * 1024,
        "system": f"{platform.system()} {platform.release()}",
    }


# Files


def output_paths(output: str) -> tuple[Path, Path]:
    """Return the paths of the JSON and of the page.

    `output` is a folder (which exists, or ends in /) or a name, with or without .json or .html.
    """
    path = Path(output)
    if path.is_dir() or output.endswith("/"):
        path = path / DEFAULT_NAME
    elif path.suffix in SUFFIXES:
        path = path.with_suffix("")
    path.parent.mkdir(parents=True, exist_ok=True)
    return tuple(path.with_name(path.name + suffix) for suffix in SUFFIXES)


def write(results: dict, page: str, json_path: Path, html_path: Path) -> tuple[Path, Path]:
    """Write the results without their pictures, which are in the page, and the page."""
    variants = [
        {key: value for key, value in variant.items() if key != "pictures"}
        for variant in results["variants"]
    ]
    content = json.dumps({**results, "variants": variants}, indent=1, ensure_ascii=False)
    json_path.write_text(content + "\n", encoding="utf-8")
    html_path.write_text(page, encoding="utf-8")
    return json_path, html_path


# Figures in words


def number(value: float | None) -> str:
    """Write a figure with three or four digits."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    for limit, digits in ((0.01, 5), (0.1, 4), (1, 3), (10, 2), (100, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}".replace(",", "\u202f")


def gigabytes(size: int | None) -> str:
    return "–" if size is None else f"{size / 1e9:.2f}"


def rows(results: dict) -> list[tuple[str, list[str]]]:
    """Return (label, a cell for each variant).

    Two spaces before a label mean that it is a part of the one above.
    """
    variants = results["variants"]
    first = variants[0]["warm"]["median"]

    def row(label, value):
        return label, [value(variant) for variant in variants]

    def stage(name):
        return lambda v: number(v["stages"].get(name, {}).get("median"))

    def compiled(key):
        return lambda v: "?" if v["compilations"] is None else str(v["compilations"][key])

    used = [name for name in STAGES if any(name in v["stages"] for v in variants)]
    table = [
        row("import", lambda v: number(v["import_seconds"])),
        row("load", lambda v: number(v["load_seconds"])),
        row("first call", lambda v: number(v["first_call_seconds"])),
        row(
            "  XLA compiling in it",
            lambda v: number(v["compilations"] and v["compilations"]["first_call_seconds"]),
        ),
        row("first picture since start", lambda v: number(v["first_image_seconds"])),
        row("warm run, median", lambda v: number(v["warm"]["median"])),
        row("  min", lambda v: number(v["warm"]["min"])),
        row("  max", lambda v: number(v["warm"]["max"])),
    ]
    if any(v["warm"]["p95"] is not None for v in variants):
        table.append(row("  95th percentile", lambda v: number(v["warm"]["p95"])))
    for name in used:
        table.append(row(f"  {STAGES[name]}", stage(name)))
        if name == "diffusion_model":
            table.append(row("    per model call", lambda v: number(v["per_model_call"]["median"])))
    table += [
        row("pictures per second", lambda v: number(v["images_per_second"])),
        row("speed, first column = 1", lambda v: f"{first / v['warm']['median']:.2f}"),
        row("peak memory, GB", lambda v: gigabytes(v["peak_memory_bytes"])),
    ]
    if any(v["peak_device_memory_bytes"] is not None for v in variants):
        table.append(
            row("peak device memory, GB", lambda v: gigabytes(v["peak_device_memory_bytes"]))
        )
    return table + [
        row("XLA compilations, first call", compiled("first_call")),
        row("  timed runs", compiled("timed_runs")),
    ]


def work(results: dict) -> str:
    """Say what each run did."""
    v = results["variants"][0]
    pictures = "1 picture" if v["batch_size"] == 1 else f"{v['batch_size']} pictures"
    return (
        f"{pictures} of {v['height']}×{v['width']} px, {v['num_steps']} steps of {v['scheduler']} "
        f"({v['model_calls']} model calls), guidance {v['guidance_scale']:g}"
    )


def remarks(results: dict) -> list[str]:
    """Return warnings about figures that do not mean what they seem to."""
    variants, found = results["variants"], []
    for item in results["left_out"]:
        what = "failed" if item["failed"] else "left out"
        found.append(f"{item['name']}: {what}. {item['reason']}")
    if any(v["engine"] == "kerascv" and v["random_weights"] for v in variants):
        found.append("KerasCV ran with random weights: the same work, but no meaningful pictures.")
    if len({v["precision"] for v in variants}) > 1:
        each = ", ".join(f"{v['name']} {v['precision']}" for v in variants)
        found.append(f"The variants compute in different precisions: {each}.")
    for v in variants:
        if v["compilations"] is None:
            found.append(f"{v['name']}: TensorFlow did not tell what it compiled.")
        elif v["compilations"]["timed_runs"]:
            found.append(f"{v['name']}: the timed runs compiled, so they were not warm.")
        if not v["same_pictures_in_all_runs"]:
            found.append(f"{v['name']}: the runs did not all make the same pictures.")
    return found


def machine(results: dict) -> str:
    h = results["hardware"]
    cores = "1 core" if h["cores"] == 1 else f"{h['cores']} cores"
    gpus = "".join(f", {device}" for device in h["devices"] if device != "CPU")
    return f"{h['cpu']}, {cores}, {h['memory_bytes'] / 1e9:.0f} GB{gpus}"


def table(results: dict) -> str:
    names = [variant["name"] for variant in results["variants"]]
    lines = [("seconds", names), *rows(results)]
    widths = [max(len(cells[i]) for _, cells in lines) for i in range(len(names))]
    left = max(len(label) for label, _ in lines)
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    text = ["", f"{work(results)}; {results['variants'][0]['repeat']} timed runs", machine(results)]
    text += [versions, ""]
    for index, (label, cells) in enumerate(lines):
        padded = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        text.append(f"{label:<{left}}  {padded}")
        if index == 0:
            text.append("-" * len(text[-1]))
    text.append("")
    for remark in remarks(results):
        text += textwrap.wrap(remark, 100, subsequent_indent="  ")
    return "\n".join(text)
