"""Render figures as self-contained HTML pages."""

from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from sd_tf.bench.report import STAGES, gigabytes, machine, number, remarks, rows, work

STARTUP = {
    "other": "start of Python",
    "import_seconds": "import",
    "load_seconds": "load",
    "first_call_seconds": "first call",
}
SHOWN = 1e-3  # of the longest stack: parts that are smaller in all stacks are left out

ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters |= {
    "number": number,
    "percent": lambda share: f"{share:.2%}",
    "total": lambda seconds: sum(seconds.values()),
}


def render(template: str, results: dict, **values) -> str:
    """Fill in a template; every page tells the machine and the date of its results."""
    return ENVIRONMENT.get_template(template).render(
        machine=machine(results), date=datetime.fromisoformat(results["date"]), **values
    )


def page(results: dict) -> str:
    """Return the page of a benchmark."""
    variants = results["variants"]
    return render(
        "benchmark.html.j2",
        results,
        heading="Benchmark",
        work=work(results),
        setup=_setup(results),
        headline=_headline(variants),
        remarks=remarks(results),
        first=variants[0],
        variants=variants,
        names=[v["name"] for v in variants],
        rows=rows(results),
        warm=[(v["name"], v["warm"]) for v in variants],
        stages=_stacks([(v["name"], _stage_seconds(v)) for v in variants], STAGES),
        startup=_stacks([(v["name"], _startup_seconds(v)) for v in variants], STARTUP),
    )


def _headline(variants: list[dict]) -> list[tuple[str, str, str]]:
    """Return (a figure, what it is, of which variant)."""
    fastest = min(variants, key=lambda v: v["warm"]["median"])
    least = min(variants, key=lambda v: v["peak_memory_bytes"])
    soonest = min(variants, key=lambda v: v["first_image_seconds"])
    ratio = variants[0]["warm"]["median"] / fastest["warm"]["median"]
    against = f"warm, {ratio:.2f} × as fast as {variants[0]['name']}" if ratio > 1 else "warm"
    return [
        (f"{number(fastest['warm']['median'])} s", fastest["name"], against),
        (f"{number(fastest['images_per_second'])}", "pictures per second", fastest["name"]),
        (f"{number(soonest['first_image_seconds'])} s", "to the first picture", soonest["name"]),
        (f"{gigabytes(least['peak_memory_bytes'])} GB", "peak memory", least["name"]),
    ]


def _stage_seconds(variant: dict) -> dict[str, float]:
    seconds = {name: figures["median"] for name, figures in variant["stages"].items()}
    rest = variant["warm"]["median"] - sum(seconds.values())
    return {**seconds, "other": max(rest, 0.0)}


def _startup_seconds(variant: dict) -> dict[str, float]:
    seconds = {name: variant[name] for name in STARTUP if name != "other"}
    rest = variant["first_image_seconds"] - sum(seconds.values())
    return {"other": max(rest, 0.0), **seconds}


def _stacks(stacks: list[tuple[str, dict[str, float]]], labels: dict[str, str]):
    """Return the stacks, and the labels of those parts that can be seen in any of them."""
    limit = SHOWN * max(sum(seconds.values()) for _, seconds in stacks)
    is_seen = {name: any(s.get(name, 0) > limit for _, s in stacks) for name in labels}
    return stacks, {name: label for name, label in labels.items() if is_seen[name]}


def _setup(results: dict) -> dict[str, str]:
    h = results["hardware"]
    flags = " ".join(
        f"--{name}={value}" if not isinstance(value, bool) else f"--{name}"
        for name, value in results["flags"].items()
        if value is not None and value is not False
    )
    return {
        "processor": f"{h['cpu']}, {h['cores']} cores",
        "memory": f"{h['memory_bytes'] / 1e9:.1f} GB",
        "devices": ", ".join(h["devices"]),
        "system": h["system"],
        "load before": f"{results['load_average']:.2f}",
        "order": " → ".join(v["name"] for v in results["variants"]),
        **results["versions"],
        "flags": flags,
    }
