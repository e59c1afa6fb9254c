"""The settings of the application."""

from dataclasses import dataclass, field
from typing import Any

from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.shapes import Shape

# Bytes of a TensorFlow Serving call: as a rule, and beside the numbers of a larger one.
USUAL_BODY, MORE_BODY = 64 << 20, 1 << 20
MOST_BODY = 2047  # MiB: a message of gRPC is smaller than 2 GiB


@dataclass(frozen=True)
class Scale:
    """The number of replicas of one deployment, and what each of them reserves."""

    least: int = 1
    most: int = 1
    cpus: float = 0.1
    gpus: float = 0.0

    @classmethod
    def of(cls, name: str) -> "Scale":
        """Return a deployment's default; the diffusion model does most of the work."""
        return cls(cpus=1.0) if name == "diffusion_model" else cls()


@dataclass(frozen=True)
class Settings:
    export_dir: str
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8500
    allow_origin: tuple[str, ...] = ()  # other sites whose pages may call
    api_key_hash: bytes | None = field(default=None, repr=False)
    jit_compile: bool = True
    compile_cache: str | None = None
    warm_up: tuple[Shape, ...] | None = None  # shapes compiled at the start; None: all
    warm_up_all: bool = False
    scales: dict[str, Scale] = field(default_factory=dict)  # component, or "front"
    max_queue: int = 64  # pictures that wait in a front, and TensorFlow Serving calls in flight
    batch_wait: float = 0.02  # seconds that an incomplete batch waits for more
    max_count: int = 16  # pictures of one call
    max_body: int | None = None  # MiB of a TensorFlow Serving call; None: see `most_body`
    num_steps: int | None = None  # of a call that gives none; None: the export's default
    guidance_scale: float | None = None
    timeout: float = 600.0  # seconds of a call that gives none
    examples: tuple[str, ...] = ()
    watch: float = 2.0  # seconds between checks for a new export; 0: never
    keep_old: float = 60.0  # seconds that an export stays loaded after a newer one was taken up

    def most_body(self, needed: int) -> int:
        """Return how many bytes a TensorFlow Serving call can have.

        `needed`: what the export's largest call needs, beside its texts and names.
        """
        if self.max_body is not None:
            return self.max_body << 20
        return min(max(USUAL_BODY, needed + MORE_BODY), MOST_BODY << 20)

    def call_defaults(self, manifest: Manifest) -> dict[str, Any]:
        """Return this server's own defaults for parameters of a call, by name."""
        own = {"guidance_scale": self.guidance_scale}
        if self.num_steps is not None:
            own["num_steps"] = min(self.num_steps, manifest.max_steps)
        return {name: value for name, value in own.items() if value is not None}
