"""What the application is told when it starts."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scale:
    """Of one deployment: how many replicas, and what each reserves."""

    least: int = 1
    most: int = 1
    cpus: float = 0.1
    gpus: float = 0.0


@dataclass(frozen=True)
class Settings:
    export_dir: str
    jit_compile: bool = True
    compile_cache: str | None = None
    warm_up_all: bool = False
    scales: dict[str, Scale] = field(default_factory=dict)  # component, or "front"
    max_queue: int = 64  # pictures that wait in a front, and TensorFlow Serving calls in flight
    batch_wait: float = 0.02  # seconds that an incomplete batch waits for more
    max_count: int = 16  # pictures of one call
    max_body: int = 64 << 20  # bytes of a TensorFlow Serving call over HTTP
    num_steps: int = 50
    guidance_scale: float = 7.5
    timeout: float = 600.0  # seconds of a call that names none
    examples: tuple[str, ...] = ()
    watch: float = 2.0  # seconds between looks at the export folder; 0: never
