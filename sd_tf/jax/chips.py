"""Estimate, without a TPU slice, the memory and time that a program takes on it."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from sd_tf.runtime.manifest import ExportError

GB = 1e9
GIB = 2**30
NO_CHIPS = "TPU_SKIP_MDS_QUERY"  # JAX sets it to 1 on a machine without a TPU
# Without these, on such a machine, libtpu warns that its TPU has no name and locks out others.
COMPILE_ONLY = {
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


@dataclass(frozen=True)
class Chip:
    """A TPU's published bfloat16 peak and bandwidth, and the memory that its compiler allots."""

    flops: float
    memory_bytes: float
    bandwidth: float


# By the topology's first word. From Google Cloud's documentation of each generation, and libtpu's
# limit on memory.
CHIPS = {
    "v5e": Chip(197e12, 15.75 * GIB, 800e9),
    "v5p": Chip(459e12, 95.73 * GIB, 2765e9),
    "v6e": Chip(918e12, 31.24 * GIB, 1600e9),
}


class DoesNotFitError(ExportError):
    """The compiler found no way to stay within a chip's memory."""


@dataclass(frozen=True)
class Outlook:
    """Memory, work and time of one chip of a slice; times are estimates from published peaks."""

    weight_bytes: int
    temporary_bytes: int  # of the program that needs the most
    code_bytes: int
    flops: float  # of one whole call
    accessed_bytes: float
    seconds: float

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.temporary_bytes + self.code_bytes

    def fits(self, chip: Chip) -> bool:
        return self.memory_bytes <= chip.memory_bytes


def runs_of(calls: int) -> dict[str, int]:
    """Return how often a call runs each program, given the model calls of its loop."""
    return {
        "text_encoder.encode": 1,
        "diffusion_model.segment": calls,
        "decoder.serving_default": 1,
    }


def outlook(reports: Mapping[str, dict], chip: Chip, runs: Mapping[str, int]) -> Outlook:
    """Add up the compiler's figures by program, times its runs: a loop's body counts once."""
    flops = accessed = seconds = 0.0
    for name, count in runs.items():
        report = reports[name]
        flops += count * report["flops"]
        accessed += count * report["accessed_bytes"]
        seconds += count * max(
            report["flops"] / chip.flops, report["accessed_bytes"] / chip.bandwidth
        )
    of_component = {name.partition(".")[0]: r["weight_bytes"] for name, r in reports.items()}
    return Outlook(
        weight_bytes=sum(of_component.values()),
        temporary_bytes=max(r["temporary_bytes"] + _inputs(r) for r in reports.values()),
        code_bytes=sum(r["code_bytes"] for r in reports.values()),
        flops=flops,
        accessed_bytes=accessed,
        seconds=seconds,
    )


def _inputs(report) -> int:
    return report["argument_bytes"] - report["weight_bytes"] + report["output_bytes"]


def chip_of(topology: str) -> Chip:
    name = topology.partition(":")[0]
    if name not in CHIPS:
        raise ExportError(
            f"A topology is a generation, one of {', '.join(CHIPS)}, and a shape, like v5e:2x2. "
            f"Received: {topology}"
        )
    return CHIPS[name]


def slice_devices(topology: str) -> list[jax.Device]:
    """Return the devices of a slice that is not present: programs compile for them, no more."""
    chip_of(topology)
    if os.environ.get(NO_CHIPS) == "1":
        for name, value in COMPILE_ONLY.items():
            os.environ.setdefault(name, value)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # the plugin raises errors of many types
        raise ExportError(
            f"The topology {topology} cannot be described: {error}. It takes the package libtpu "
            f"(pip install 'sd_tf[tpu]') and a shape that the generation has, like v5e:2x2."
        ) from error
    return list(found.devices)


def compile_lowered(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile for the devices that it is lowered for; DoesNotFitError if memory is too small."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in reason:
            raise
        raise DoesNotFitError(
            f"{reason} Give each chip fewer examples, or use a narrower precision."
        ) from error


def table(label: str, weights: str, unit: str, run: str, rows: list[list[str]]) -> str:
    """Format `row`s as a Markdown table.

    Args:
        label: what the rows are named by.
        weights: what stays on a chip between runs.
        unit: what a run makes, in the singular.
        run: what one run is.
    """
    headings = [
        label,
        f"{weights}, GB a chip",
        "temporaries",
        "HBM in all",
        f"TFLOP an {unit}",
        f"GB an {unit}",
        f"seconds {run} (estimate)",
        f"{unit}s/s (estimate)",
    ]
    lines = (headings, ["---"] * len(headings), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def row(label: str, found: Outlook, chip: Chip, made: int, chips: int) -> list[str]:
    """Format the cells of a run that makes `made` pictures, or learns from as many examples."""
    return [
        label,
        f"{found.weight_bytes / GB:.2f}",
        f"{found.temporary_bytes / GB:.2f}",
        f"{found.memory_bytes / GB:.2f} of {chip.memory_bytes / GB:.1f}"
        + ("" if found.fits(chip) else ", does not fit"),
        _three_digits(found.flops * chips / made / 1e12),
        _three_digits(found.accessed_bytes * chips / made / GB),
        _three_digits(found.seconds),
        _three_digits(made / found.seconds),
    ]


def no_row(label: str) -> list[str]:
    """Format the cells of a run that does not fit."""
    return [label, "–", "–", "does not fit", "–", "–", "–", "–"]


def _three_digits(value: float) -> str:
    """Format a number with at least three digits, never as a power of ten."""
    if math.isnan(value):
        return "–"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"
