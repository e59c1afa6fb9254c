"""What is measured against what: the plan, and one process for each variant, in turn.

Nothing here imports TensorFlow: the variants' processes do, so that neither memory peaks nor
compiled code pass from one to the next.
"""

import base64
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import sd_tf
from sd_tf.manifest import Manifest

DEFAULT_PROMPT = "a lighthouse on a cliff above the sea at sunset, oil painting"
KERASCV_SCHEDULER = "kerascv"  # its only method, which our exports offer too
KERASCV_MULTIPLE = 128
KERASCV_SIZE = 512
KERASCV_MAX_STEPS = 1000
SD1_UNET_PARAMETERS = 859_520_964
ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

JOB, RESULT, LOG = "job.json", "result.json", "log.txt"
TIMED_RUNS = "sd_tf.bench: the timed runs begin"  # a line of the log
# Asked like this, TensorFlow logs one line for each cluster that XLA compiles.
LOG_COMPILATIONS = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "device_compilation_profiler=1"}
COMPILED = re.compile(
    r"device_compilation_profiler\.cc:\d+\] Compiled \S+ .*?compile time: (\d+) us"
)
LOG_LINES = 12


class BenchError(ValueError):
    """What cannot be measured: the rule and what was received."""


@dataclass(frozen=True)
class Options:
    export_dir: str | None = None
    jit_compile: bool = False
    kerascv: bool = False
    all: bool = False
    random_weights: bool = False
    prompt: str = DEFAULT_PROMPT
    num_steps: int = 50
    repeat: int = 3
    scheduler: str | None = None  # None: the export's own; beside KerasCV, KerasCV's
    guidance_scale: float = 7.5
    seed: int = 0
    height: int | None = None
    width: int | None = None
    batch_size: int | None = None
    compile_cache: str | None = None


@dataclass(frozen=True)
class Job:
    """One variant, as its process reads it."""

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

    @property
    def name(self) -> str:
        engine = {"saved_models": "SavedModels", "kerascv": "KerasCV"}[self.engine]
        return f"{engine} + XLA" if self.jit_compile else engine


@dataclass(frozen=True)
class LeftOut:
    name: str
    reason: str
    failed: bool  # it was tried


@dataclass(frozen=True)
class Plan:
    jobs: list[Job]
    left_out: list[LeftOut]


# What to measure


def plan(options: Options) -> Plan:
    """The variants in the order in which they run; wrong options are found before any of them."""
    _check(options)
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
        for name in "export_dir random_weights prompt num_steps repeat guidance_scale seed "
        "compile_cache".split()
    }
    jobs = [
        Job(
            engine=engine,
            jit_compile=jit_compile,
            scheduler=scheduler,
            model_calls=model_calls,
            precision=manifest.precision if engine == "saved_models" else "float32",
            **_geometry(manifest, options, engine),
            **shared,
        )
        for engine in engines
        for jit_compile in compiled
    ]
    return Plan(jobs, left_out)


def why_not_the_same_work(manifest: Manifest, options: Options) -> str | None:
    """KerasCV is SD 1.4's architecture, text to image, with one method. None: as this export."""
    ours = f"This export is {manifest.family}"
    if manifest.family != "sd1" or manifest.latent_inputs != "none":
        return f"KerasCV's pipeline is Stable Diffusion 1.4, text to image. {ours}."
    parameters = unet_parameters(manifest)
    if not math.isclose(parameters, SD1_UNET_PARAMETERS, rel_tol=0.05):
        return (
            f"KerasCV's UNet has {SD1_UNET_PARAMETERS / 1e6:.0f} M parameters and no other size; "
            f"this export's has about {parameters / 1e6:.1f} M."
        )
    if manifest.guidance != "classifier_free":
        return f"KerasCV always guides. {ours} without guidance."
    if manifest.height % KERASCV_MULTIPLE or manifest.width % KERASCV_MULTIPLE:
        return (
            f"KerasCV's sizes are multiples of {KERASCV_MULTIPLE}. "
            f"This export's is {manifest.height}×{manifest.width}."
        )
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
    """From the bytes of its variables."""
    files = manifest.components["diffusion_model"].files
    data = sum(known["size"] for name, known in files.items() if ".data-" in name)
    return data / ITEM_SIZES[manifest.precision]


def _check(options: Options) -> None:
    if options.kerascv and options.all:
        raise BenchError("--all includes KerasCV: give one of --all and --kerascv.")
    if options.all and options.jit_compile:
        raise BenchError("--all measures with and without XLA: give it without --jit_compile.")
    if options.export_dir is None and not options.kerascv:
        raise BenchError(
            "--export_dir is needed, unless --kerascv is measured alone. Make an export with "
            "serialize_savedmodels.py."
        )
    if options.random_weights and not (options.kerascv or options.all):
        raise BenchError("--random_weights are KerasCV's: give it with --kerascv or --all.")
    if options.kerascv and options.scheduler not in (None, KERASCV_SCHEDULER):
        raise BenchError(
            f"KerasCV has one method, --scheduler={KERASCV_SCHEDULER}. "
            f"Received: {options.scheduler!r}"
        )
    if options.kerascv and not 1 <= options.num_steps <= KERASCV_MAX_STEPS:
        raise BenchError(
            f"--num_steps is 1 to {KERASCV_MAX_STEPS} for KerasCV. Received: {options.num_steps}"
        )
    if options.repeat < 1:
        raise BenchError(f"--repeat is at least 1. Received: {options.repeat}")
    if not math.isfinite(options.guidance_scale):
        raise BenchError(f"--guidance_scale is a finite number. Received: {options.guidance_scale}")
    if not -(2**31) <= options.seed < 2**31:
        raise BenchError(f"--seed is a whole number of 32 bits. Received: {options.seed}")


def _model_calls(manifest: Manifest, scheduler: str, num_steps: int) -> int:
    try:
        return manifest.model_calls(scheduler, num_steps)
    except ValueError as error:
        raise BenchError(str(error)) from error


def _geometry(manifest: Manifest | None, options: Options, engine: str) -> dict[str, int]:
    names = ("batch_size", "height", "width")
    given = {name: getattr(options, name) for name in names}
    if manifest is not None:
        if wrong := [f"--{name}={value}" for name, value in given.items() if value is not None]:
            raise BenchError(
                f"The batch and the size are the export's: give --batch_size, --height and "
                f"--width without --export_dir. Received: {', '.join(wrong)}"
            )
        given = {name: getattr(manifest, name) for name in names}
    defaults = {"batch_size": 1, "height": KERASCV_SIZE, "width": KERASCV_SIZE}
    geometry = {name: defaults[name] if v is None else v for name, v in given.items()}
    if geometry["batch_size"] < 1:
        raise BenchError(f"--batch_size is at least 1. Received: {geometry['batch_size']}")
    for name in ("height", "width"):
        value = geometry[name]
        if engine == "kerascv" and (value < 1 or value % KERASCV_MULTIPLE):
            raise BenchError(
                f"KerasCV's {name} is a positive multiple of {KERASCV_MULTIPLE}. Received: {value}"
            )
    return geometry


# Measuring


def run(planned: Plan, progress: Callable[[str], None] = lambda text: None) -> dict:
    """All jobs in turn. A variant that fails is left out and says so; none left is an error."""
    variants, left_out = [], list(planned.left_out)
    load_average = os.getloadavg()[0]  # of before, which tells of others at work
    for number, job in enumerate(planned.jobs, start=1):
        progress(f"[{number}/{len(planned.jobs)}] {job.name} …")
        try:
            variants.append(run_alone(job))
        except BenchError as error:
            left_out.append(LeftOut(job.name, str(error), failed=True))
            progress(f"{job.name} failed")
    if not variants:
        reasons = "\n".join(item.reason for item in left_out)
        raise BenchError(f"Nothing could be measured. {reasons}".strip())
    return {
        "load_average": load_average,
        "variants": variants,
        "left_out": [dataclasses.asdict(item) for item in left_out],
    }


def run_alone(job: Job) -> dict:
    """Measure in a new process, which is all that its memory peak and its compilations hold."""
    home = str(Path(sd_tf.__file__).parent.parent)
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        **LOG_COMPILATIONS,
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with tempfile.TemporaryDirectory(prefix="sd_tf_bench_") as name:
        folder = Path(name)
        (folder / JOB).write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        with open(folder / LOG, "wb") as log:
            command = [sys.executable, "-m", "sd_tf.bench.timing", str(folder)]
            status = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
        log = (folder / LOG).read_text(encoding="utf-8", errors="replace")
        if not (folder / RESULT).is_file():
            tail = "\n".join(log.splitlines()[-LOG_LINES:])
            raise BenchError(f"The process ended with status {status}. The end of its log:\n{tail}")
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        if "error" in result:
            raise BenchError(result["error"])
        result["pictures"] = [
            base64.b64encode(path.read_bytes()).decode() for path in sorted(folder.glob("*.png"))
        ]
    return {
        "name": job.name,
        **dataclasses.asdict(job),
        **result,
        "compilations": compilations(log, job.jit_compile),
    }


def compilations(log: str, expected: bool) -> dict | None:
    """How many clusters XLA compiled; None where it should have and TensorFlow did not tell."""
    first, timed = (
        [int(microseconds) / 1e6 for microseconds in COMPILED.findall(part)]
        for part in log.split(TIMED_RUNS)
    )
    if expected and not first:
        return None
    return {"first_call": len(first), "first_call_seconds": sum(first), "timed_runs": len(timed)}
