"""The engines: each is a row of a table of `TABLES`, and a module with `load(job)`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sd_tf.bench.plan import BenchError
from sd_tf.config.rewrites import in_saved_models

SAMPLER = "ddim"  # all engines have it but KerasCV, whose own method takes as many model calls
GUIDANCE = 7.5
PROMPT, NEGATIVE = "a lighthouse on a cliff above the sea at sunset, oil painting", ""
STAGES = ("text_encoder", "unet_step", "decoder")
OURS, PLAIN = "sd_tf", "plain"


class NoGpuError(BenchError):
    """An engine's library sees no GPU, and one is to be measured."""


@dataclass(frozen=True)
class Job:
    """The description of an engine for a worker to load."""

    engine: str
    steps: int
    threads: int
    height: int | None = None  # None: that of the inputs
    width: int | None = None
    batch_size: int = 1
    device: str = "cpu"  # cpu | gpu
    precision: str = "float32"
    checkpoint: str | None = None
    export_dir: str | None = None  # folder of our export
    ir_dir: str | None = None  # folder of OpenVINO's models
    inputs: str | None = None  # None: no stages are measured
    does: str = "draws"  # which of `TABLES` the engine is in
    lora_rank: int | None = None  # train an adapter, not the weights

    @property
    def kind(self) -> "Kind":
        return TABLES[self.does][self.engine]

    @property
    def label(self) -> str:
        return self.kind.label_in(self.precision, self.device)

    def check_device(self, library: str, has_gpu: bool) -> None:
        """Refuse to measure on the CPU what is to be measured on a GPU."""
        if self.device == "gpu" and not has_gpu:
            raise NoGpuError(f"`device` gpu needs a GPU that {library} sees.")


@dataclass(frozen=True)
class Stage:
    """One measured part of an engine.

    `run` makes `calls` calls and returns when the result is available; `output` turns the result
    into the array that is compared. The time of `less` is subtracted, for a loop whose own time is
    the difference between two lengths.
    """

    run: Callable[[], Any]
    output: Callable[[Any], np.ndarray]
    calls: int = 1
    less: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Loaded:
    """A loaded engine. `draw(steps)` makes a picture and returns the seconds of one step in it."""

    stages: dict[str, Stage]
    draw: Callable[[int], float] | None
    compile_seconds: float = 0.0  # if the engine compiles when it loads
    matmul: Callable[[], dict[str, float]] | None = None  # GFLOP/s by size and kind
    device_memory: Callable[[], int | None] = lambda: None  # peak bytes
    devices: list[str] = field(default_factory=lambda: ["CPU"])
    precision: str | None = None  # what the engine chose, where the job leaves it the choice


@dataclass(frozen=True)
class Kind:
    """A kind of engine: its name in reports, its module, and what it supports."""

    label: str
    module: str  # in the package `engines`
    in_graph: str | None = None  # the label where TensorFlow's own kernels take XLA's place
    backend: str = "tensorflow"  # Keras' backend
    devices: tuple[str, ...] = ("cpu", "gpu")
    precisions: tuple[str, ...] = ("float32", "bfloat16", "float16")
    chooses_precision: bool = False  # as the device does it best, whatever the job's

    def label_in(self, precision: str, device: str = "cpu") -> str:
        is_in_graph = in_saved_models(device, precision).graph_kernels
        return self.in_graph if is_in_graph and self.in_graph is not None else self.label


KINDS = {
    OURS: Kind("sd_tf SavedModels + XLA", "saved_models", "sd_tf SavedModels + graph kernels"),
    PLAIN: Kind("sd_tf SavedModels", "saved_models"),
    "kerascv_plain": Kind("KerasCV", "kerascv"),
    "kerascv": Kind("KerasCV + XLA", "kerascv"),
    "torch": Kind("diffusers, PyTorch eager", "pytorch"),
    "torch_compile": Kind("diffusers, torch.compile", "pytorch"),
    "openvino": Kind(
        "diffusers → OpenVINO", "openvino_ir", devices=("cpu",), precisions=("float32", "bfloat16")
    ),
    "openvino_default": Kind(
        "diffusers → OpenVINO by default", "openvino_ir", devices=("cpu",), chooses_precision=True
    ),
    "jax": Kind("sd_tf on JAX", "jax_models", backend="jax"),
}
PEERS = tuple(name for name in KINDS if name != OURS)
SELDOM = (PLAIN, "kerascv_plain")  # compared where they are asked for: XLA's gain is not new
# A trainer's only stage is one update of the weights, whose output is the loss.
UPDATE = "update"
TRAINERS = {
    "ours": Kind("sd_tf, TensorFlow + XLA", "our_updates"),
    "ours_jax": Kind("sd_tf, JAX", "our_updates", backend="jax"),
    "torch": Kind("diffusers, PyTorch eager", "pytorch_updates"),
    "torch_channels_last": Kind("the same, channels_last", "pytorch_updates"),
    "torch_compile": Kind("diffusers, torch.compile", "pytorch_updates"),
}
# A denoiser's only stage is one call of a transformer, whose output is the prediction.
CALL = "call"
DENOISERS = {
    OURS: Kind("sd_tf, TensorFlow + XLA", "our_denoiser", "sd_tf, TensorFlow + graph kernels"),
    "jax": Kind("sd_tf on JAX", "our_denoiser", backend="jax"),
    "torch": Kind("diffusers, PyTorch eager", "diffusers_denoiser"),
    "torch_compile": Kind("diffusers, torch.compile", "diffusers_denoiser"),
    "openvino": Kind("diffusers → OpenVINO", "diffusers_denoiser"),
}
TABLES = {"draws": KINDS, "trains": TRAINERS, "denoises": DENOISERS}
