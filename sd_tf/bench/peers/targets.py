"""The targets that the SavedModels should reach in comparison with their peers, at one size."""

from collections.abc import Callable
from dataclasses import dataclass

from sd_tf.bench.peers.engine import OURS

SIZE = 512


@dataclass(frozen=True)
class Target:
    """A figure of the comparison and the limit that it should keep."""

    label: str
    value: Callable[[dict], float | None]  # from a size's results; None: not measured
    limit: float
    at_most: bool = False
    unit: str = ""

    def met(self, size: dict) -> bool | None:
        value = self.value(size)
        if value is None:
            return None
        return value <= self.limit if self.at_most else value >= self.limit


def engine(size: dict, name: str) -> dict | None:
    return next((found for found in size["engines"] if found["name"] == name), None)


def matmul_share(size: dict) -> float | None:
    """Return the UNet step's rate, in percent of the fastest matrix product that was measured.

    The rate counts the operations of direct convolutions.
    """
    ours, rates = engine(size, OURS), size["matmul_gflops"].values()
    if ours is None or not rates:
        return None
    rate = size["unet_flops"] / ours["stages"]["unet_step"]["seconds"]["median"] / 1e9
    return 100 * rate / max(rates)


def _ratio(name: str, stage: str) -> Callable[[dict], float | None]:
    def value(size):
        found = engine(size, name)
        if found is None:
            return None
        part = found["end_to_end"] if stage == "end_to_end" else found["stages"][stage]
        return part["ratio"]

    return value


def _memory(size: dict) -> float | None:
    ours = engine(size, OURS)
    return None if ours is None else ours["peak_memory_bytes"] / 1e9


FLOAT32_ON_CPU = (
    Target("UNet step, OpenVINO / ours", _ratio("openvino", "unet_step"), 1.2),
    Target("UNet step, KerasCV + XLA / ours", _ratio("kerascv", "unet_step"), 1.6),
    Target("UNet step, PyTorch eager / ours", _ratio("torch", "unet_step"), 1.5),
    Target("decoder, OpenVINO / ours", _ratio("openvino", "decoder"), 1.2),
    Target("end to end, KerasCV + XLA / ours", _ratio("kerascv", "end_to_end"), 1.6),
    Target("UNet step, share of the matmul peak", matmul_share, 100.0, unit=" %"),
    Target("peak memory of ours", _memory, 6.5, at_most=True, unit=" GB"),
)
# OpenVINO's default computes in bfloat16 where the processor does.
BFLOAT16_ON_CPU = (
    Target("UNet step, OpenVINO / ours", _ratio("openvino_default", "unet_step"), 1.0),
    Target("UNet step, PyTorch eager / ours", _ratio("torch", "unet_step"), 1.5),
    Target("decoder, OpenVINO / ours", _ratio("openvino_default", "decoder"), 1.2),
    Target("end to end, OpenVINO / ours", _ratio("openvino_default", "end_to_end"), 1.0),
    Target("peak memory of ours", _memory, 4.0, at_most=True, unit=" GB"),
)
ON_GPU = (
    Target("end to end, torch.compile / ours", _ratio("torch_compile", "end_to_end"), 1.3),
    Target("end to end, KerasCV + XLA / ours", _ratio("kerascv", "end_to_end"), 2.0),
)


def targets_of(device: str, precision: str) -> tuple[Target, ...]:
    """Return the targets for a device and a precision; none where none are set."""
    if device == "gpu":
        return ON_GPU
    return {"float32": FLOAT32_ON_CPU, "bfloat16": BFLOAT16_ON_CPU}.get(precision, ())


def judged(results: dict) -> list[dict]:
    """Compare the results with each target; the list is empty if `SIZE` was not measured."""
    sizes = [size for size in results["sizes"] if size["size"] == SIZE]
    flags = results["flags"]
    return [
        {
            "label": target.label,
            "limit": f"{'≤' if target.at_most else '≥'} {target.limit:g}{target.unit}",
            "value": target.value(size),
            "unit": target.unit,
            "met": target.met(size),
        }
        for size in sizes
        for target in targets_of(flags["device"], flags["precision"])
    ]
