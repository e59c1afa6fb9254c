"""Plan a benchmark: check its options, and turn them into jobs."""

import dataclasses
import math
from dataclasses import dataclass

from sd_tf.errors import SdTfError
from sd_tf.runtime.call import Call
from sd_tf.runtime.graph_kernels import is_in_graph
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.parameters import GUIDANCE
from sd_tf.runtime.shapes import Shape, ShapeError

DEFAULT_PROMPT = "a lighthouse on a cliff above the sea at sunset, oil painting"
KERASCV_SCHEDULER = "kerascv"  # KerasCV's only method, which exports offer too
KERASCV_MULTIPLE = 128
KERASCV_SIZE = 512
KERASCV_MAX_STEPS = 1000
SD1_UNET_PARAMETERS = 859_520_964
ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


class BenchError(SdTfError):
    """A measurement that cannot be made, and why."""


@dataclass(frozen=True)
class BenchOptions:
    """The variants to measure, their work, and how often."""

    export_dir: str | None = None
    jit_compile: bool = False
    kerascv: bool = False
    all: bool = False
    random_weights: bool = False
    prompt: str = DEFAULT_PROMPT
    num_steps: int = 50
    repeat: int = 3
    scheduler: str | None = None  # None: the export's own; beside KerasCV, KerasCV's
    guidance_scale: float | None = None  # None: the export's default, or everyone's
    seed: int = 0
    height: int | None = None
    width: int | None = None
    batch_size: int | None = None
    compile_cache: str | None = None


@dataclass(frozen=True)
class Job:
    """One variant to be measured, as its process reads it."""

    engine: str  # saved_models | kerascv
    jit_compile: bool
    export_dir: str | None
    random_weights: bool
    prompt: str
    num_steps: int
    model_calls: int
    repeat: int
    scheduler: str
    guidance_scale: float
    seed: int
    batch_size: int
    height: int
    width: int
    precision: str
    compile_cache: str | None
    in_graph: bool  # XLA compiles nothing: TensorFlow's own kernels take its place

    @property
    def name(self) -> str:
        engine = {"saved_models": "SavedModels", "kerascv": "KerasCV"}[self.engine]
        if not self.jit_compile:
            return engine
        return f"{engine} + {'graph kernels' if self.in_graph else 'XLA'}"


@dataclass(frozen=True)
class LeftOut:
    """A variant without figures, and why."""

    name: str
    reason: str
    failed: bool  # tried without success; False: not tried


@dataclass(frozen=True)
class Plan:
    """The variants to be measured in turn, and those that cannot be."""

    jobs: list[Job]
    left_out: list[LeftOut]


def make_plan(options: BenchOptions) -> Plan:
    """Plan the variants in the order in which they run; check all options before any of them."""
    check(options)
    if options.export_dir is None and not options.kerascv:
        raise BenchError(
            "An export is needed, unless `kerascv` is measured alone. Make one with `sd-tf export` "
            "and give its folder as `export_dir`."
        )
    manifest = Manifest.read(options.export_dir) if options.export_dir is not None else None
    left_out = []
    with_kerascv = options.kerascv or options.all
    if options.all and (reason := why_not_the_same_work(manifest, options)):
        left_out = [LeftOut("KerasCV", reason, failed=False)]
        with_kerascv = False
    scheduler = options.scheduler
    if scheduler is None:
        scheduler = KERASCV_SCHEDULER if with_kerascv else manifest.default_sampler
    model_calls = options.num_steps  # of KerasCV's method
    if not options.kerascv:
        model_calls = _model_calls(manifest, scheduler, options.num_steps)

    engines = [
        name
        for name, wanted in (("kerascv", with_kerascv), ("saved_models", not options.kerascv))
        if wanted
    ]
    compiled = (False, True) if options.all else (options.jit_compile,)
    shared = {
        name: getattr(options, name)
        for name in "export_dir random_weights prompt num_steps repeat seed compile_cache".split()
    }
    shared["guidance_scale"] = _guidance_scale(manifest, options)
    jobs = [
        Job(
            engine=engine,
            jit_compile=jit_compile,
            scheduler=scheduler,
            model_calls=model_calls,
            precision=manifest.precision if engine == "saved_models" else "float32",
            in_graph=engine == "saved_models" and is_in_graph(manifest, "diffusion_model"),
            **_geometry(manifest, options, engine),
            **shared,
        )
        for engine in engines
        for jit_compile in compiled
    ]
    return Plan(jobs, left_out)


def why_not_the_same_work(manifest: Manifest, options: BenchOptions) -> str | None:
    """Return why KerasCV, which is SD 1.4 with one method, cannot do what this export does.

    None: it can.
    """
    ours = f"This export is {manifest.family}"
    if manifest.family != "sd1" or manifest.latent_inputs != "none":
        return f"KerasCV's pipeline is Stable Diffusion 1.4, text to image. {ours}."
    if more := [*(net.name for net in manifest.controls), *manifest.image_prompts.names]:
        return f"KerasCV has no ControlNets or IP-Adapters. {ours} with {', '.join(more)}."
    parameters = unet_parameters(manifest)
    if not math.isclose(parameters, SD1_UNET_PARAMETERS, rel_tol=0.05):
        return (
            f"KerasCV's UNet has {SD1_UNET_PARAMETERS / 1e6:.0f} M parameters and no other size; "
            f"this export's has about {parameters / 1e6:.1f} M."
        )
    if manifest.guidance != "classifier_free":
        return f"KerasCV always guides. {ours} without guidance."
    height, width = _shape(manifest, options).size
    if height % KERASCV_MULTIPLE or width % KERASCV_MULTIPLE:
        return f"KerasCV's sizes are multiples of {KERASCV_MULTIPLE}. This one is {height}×{width}."
    if options.scheduler is None:
        return None
    calls = _model_calls(manifest, options.scheduler, options.num_steps)
    if calls != options.num_steps:
        return (
            f"KerasCV calls its model {options.num_steps} times for {options.num_steps} steps, "
            f"{options.scheduler} {calls} times."
        )
    return None


def unet_parameters(manifest: Manifest) -> float:
    """Count the UNet's parameters from the bytes of its weights, nearly all of them kernels."""
    files = manifest.components["diffusion_model"].files
    weights = min(name for name in files if ".data-" in name)  # others have places for adapters
    return files[weights]["size"] / ITEM_SIZES[manifest.storage.get("unet", manifest.precision)]


def check(options: BenchOptions) -> None:
    """Raise if the options contradict each other or are out of range, whatever the export is."""
    if options.kerascv and options.all:
        raise BenchError("`all` includes KerasCV: give one of `all` and `kerascv`.")
    if options.all and options.jit_compile:
        raise BenchError("`all` measures with and without XLA: give it without `jit_compile`.")
    if options.random_weights and not (options.kerascv or options.all):
        raise BenchError("`random_weights` are KerasCV's: give it with `kerascv` or `all`.")
    if options.kerascv and options.scheduler not in (None, KERASCV_SCHEDULER):
        raise BenchError(
            f"KerasCV has one method, `scheduler` {KERASCV_SCHEDULER}. "
            f"Received: {options.scheduler!r}"
        )
    if options.kerascv and not 1 <= options.num_steps <= KERASCV_MAX_STEPS:
        raise BenchError(
            f"`num_steps` is 1 to {KERASCV_MAX_STEPS} for KerasCV. Received: {options.num_steps}"
        )
    if options.repeat < 1:
        raise BenchError(f"`repeat` is at least 1. Received: {options.repeat}")
    if options.guidance_scale is not None and not math.isfinite(options.guidance_scale):
        raise BenchError(f"`guidance_scale` is a finite number. Received: {options.guidance_scale}")
    if not -(2**31) <= options.seed < 2**31:
        raise BenchError(f"`seed` is a whole number of 32 bits. Received: {options.seed}")


def _model_calls(manifest: Manifest, scheduler: str, num_steps: int) -> int:
    try:
        return manifest.model_calls(scheduler, num_steps)
    except ValueError as error:
        raise BenchError(str(error)) from error


def _guidance_scale(manifest: Manifest | None, options: BenchOptions) -> float:
    if options.guidance_scale is not None:
        return options.guidance_scale
    if options.kerascv:
        return GUIDANCE
    return Call.parameters()["guidance_scale"].default_for(manifest)


def _shape(manifest: Manifest, options: BenchOptions) -> Shape:
    """Return the export's shape that is to be measured."""
    shapes, batch_size = manifest.shapes, options.batch_size
    if batch_size is None:
        batch_size = shapes.first.batch_size
    try:
        size = shapes.size_of(options.height, options.width)
        return shapes.checked(Shape(batch_size, *size))
    except ShapeError as error:
        raise BenchError(str(error)) from error


def _geometry(manifest: Manifest | None, options: BenchOptions, engine: str) -> dict[str, int]:
    names = ("batch_size", "height", "width")
    given = {name: getattr(options, name) for name in names}
    if manifest is not None:
        given = dataclasses.asdict(_shape(manifest, options))
    defaults = {"batch_size": 1, "height": KERASCV_SIZE, "width": KERASCV_SIZE}
    geometry = {name: defaults[name] if v is None else v for name, v in given.items()}
    if geometry["batch_size"] < 1:
        raise BenchError(f"`batch_size` is at least 1. Received: {geometry['batch_size']}")
    for name in ("height", "width"):
        value = geometry[name]
        if engine == "kerascv" and (value < 1 or value % KERASCV_MULTIPLE):
            raise BenchError(
                f"KerasCV's {name} is a positive multiple of {KERASCV_MULTIPLE}. Received: {value}"
            )
    return geometry
