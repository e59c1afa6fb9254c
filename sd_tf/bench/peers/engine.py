"""What an engine is: to the parent a row of a table, to its worker a module with `load(job)`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SAMPLER = "ddim"  # which all engines have but KerasCV, whose own method takes as many calls
GUIDANCE = 7.5
PROMPT, NEGATIVE = "a lighthouse on a cliff above the sea at sunset, oil painting", ""
STAGES = ("text_encoder", "unet_step", "decoder")
OURS = "sd_tf"


@dataclass(frozen=True)
class Job:
    """What a worker is to load."""

    engine: str
    steps: int
    threads: int
    height: int | None = None  # None: of the inputs
    width: int | None = None
    device: str = "cpu"  # cpu | gpu
    precision: str = "float32"
    checkpoint: str | None = None
    export_dir: str | None = None  # of ours
    ir_dir: str | None = None  # of OpenVINO's
    inputs: str | None = None  # None: the stages are not wanted
    trains: bool = False  # then the engine is one of TRAINERS

    @property
    def kind(self) -> "Kind":
        return (TRAINERS if self.trains else KINDS)[self.engine]


@dataclass(frozen=True)
class Stage:
    """`run` returns when the result is there, after `calls` calls; `output` is what is compared.

    With `less`, what that takes is taken off: a loop's own time is the difference of two lengths.
    """

    run: Callable[[], Any]
    output: Callable[[Any], np.ndarray]
    calls: int = 1
    less: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Loaded:
    """An engine, ready. `draw(steps)` makes a picture and gives the seconds of one step in it."""

    stages: dict[str, Stage]
    draw: Callable[[int], float] | None
    compile_seconds: float = 0.0  # where the engine compiles as it loads
    matmul: Callable[[], dict[str, float]] | None = None  # GFLOP/s by size and kind
    device_memory: Callable[[], int | None] = lambda: None  # the peak
    devices: list[str] = field(default_factory=lambda: ["CPU"])


@dataclass(frozen=True)
class Kind:
    label: str
    module: str  # below `engines`
    backend: str = "tensorflow"  # Keras'
    devices: tuple[str, ...] = ("cpu", "gpu")
    precisions: tuple[str, ...] = ("float32", "bfloat16", "float16")


KINDS = {
    OURS: Kind("sd_tf SavedModels + XLA", "saved_models"),
    "kerascv": Kind("KerasCV + XLA", "kerascv", devices=("cpu",), precisions=("float32",)),
    "torch": Kind("diffusers, PyTorch eager", "pytorch"),
    "torch_compile": Kind("diffusers, torch.compile", "pytorch"),
    "openvino": Kind(
        "diffusers → OpenVINO", "openvino_ir", devices=("cpu",), precisions=("float32", "bfloat16")
    ),
    "jax": Kind("sd_tf on JAX", "jax_models", backend="jax"),
}
PEERS = tuple(name for name in KINDS if name != OURS)
# One update of the weights: `stages` is {UPDATE: …} alone, whose output is the loss.
UPDATE = "update"
TRAINERS = {
    "ours": Kind("sd_tf, TensorFlow + XLA", "our_updates"),
    "ours_jax": Kind("sd_tf, JAX", "our_updates", backend="jax"),
    "torch": Kind("diffusers, PyTorch eager", "pytorch_updates"),
    "torch_channels_last": Kind("the same, channels_last", "pytorch_updates"),
    "torch_compile": Kind("diffusers, torch.compile", "pytorch_updates"),
}
