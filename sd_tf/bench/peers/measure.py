"""Measure our engine and its peers in turn, at each size."""

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from sd_tf.bench.peers import agreement, apart, folders, inputs
from sd_tf.bench.peers.engine import KINDS, OURS, PEERS, SELDOM, STAGES, Job, NoGpuError
from sd_tf.bench.peers.flops import unet_flops
from sd_tf.bench.peers.process import Process
from sd_tf.bench.plan import BenchError, BenchOptions, why_not_the_same_work
from sd_tf.bench.report import hardware, versions_of, without_folders
from sd_tf.bench.timing import summary
from sd_tf.runtime.manifest import Manifest

FORMAT_VERSION = 1
FULL_STEPS = 20  # steps of the pictures in the report, where no others are asked for
WARM_STEPS = 2  # steps of the picture before the timed ones
MAX_STEPS = 50  # most steps of our exports
LIBRARIES = (
    *("tensorflow", "keras", "keras-cv", "jax", "jaxlib", "torch", "diffusers", "transformers"),
    *("openvino", "numpy"),
)
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ComparisonOptions:
    """The peers and sizes to compare, and how."""

    checkpoint: str | None = None
    work: str = "out/peers"
    sizes: tuple[int, ...] = (256, 512)
    batch_size: int = 1
    peers: tuple[str, ...] = tuple(name for name in PEERS if name not in SELDOM)
    rounds: int = 3
    steps: int = 4
    full_steps: int = FULL_STEPS
    precision: str = "float32"
    device: str = "cpu"

    def check(self) -> "ComparisonOptions":
        if unknown := [name for name in self.peers if name not in PEERS]:
            raise BenchError(f"`peers` are of {', '.join(PEERS)}. Received: {', '.join(unknown)}")
        for name in ("sizes", "peers"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                given = ",".join(map(str, values))
                raise BenchError(f"`{name}` names at least one, each once. Received: {given!r}")
        if wrong := [size for size in self.sizes if size < 8 or size % 8]:
            raise BenchError(f"`sizes` are positive multiples of 8. Received: {wrong[0]}")
        if self.batch_size < 1:
            raise BenchError(f"`batch_size` is at least 1. Received: {self.batch_size}")
        if self.rounds < 1:
            raise BenchError(f"`rounds` is at least 1. Received: {self.rounds}")
        if not WARM_STEPS <= self.full_steps <= MAX_STEPS:
            raise BenchError(
                f"`full_steps` is {WARM_STEPS} to {MAX_STEPS}. Received: {self.full_steps}"
            )
        if not WARM_STEPS <= self.steps <= self.full_steps:
            raise BenchError(
                f"`steps` is {WARM_STEPS} to {self.full_steps}: between two lies what one takes. "
                f"Received: {self.steps}"
            )
        return self


def measure(options: ComparisonOptions, progress: Progress = lambda text: None) -> dict:
    """Measure all sizes.

    A peer that fails is left out, with its reason, and so is a size at which our own engine fails;
    the others go on.
    """
    options.check()
    work = Path(options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    load_average = os.getloadavg()  # before measuring: the load of other programs
    progress("checkpoint …")
    checkpoint = folders.checkpoint(options.checkpoint, work).resolve()
    sizes, errors = [], {}
    for size in options.sizes:
        try:
            sizes.append(Size(options, work, checkpoint, size, progress).measure())
        except BenchError as error:
            progress(f"{size} px failed: {error}")
            errors[size] = error
    if not sizes:
        raise next(iter(errors.values()))
    return {
        "format_version": FORMAT_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "flags": without_folders(asdict(options)),
        "checkpoint": checkpoint.name,
        "hardware": {**hardware(), "devices": sizes[0]["engines"][0]["devices"]},
        "versions": versions(),
        "load_average": load_average,
        "full_steps": options.full_steps,
        "sizes": sizes,
        "failed_sizes": {f"{size} px": str(error) for size, error in errors.items()},
    }


def versions() -> dict[str, str]:
    return versions_of(LIBRARIES)


class Size:
    """The comparison at one size: our worker runs throughout, the peers' one after another."""

    def __init__(
        self, options: ComparisonOptions, work: Path, checkpoint: Path, size: int, progress
    ):
        self.options, self.work, self.checkpoint, self.size = options, work, checkpoint, size
        self.progress = lambda text: progress(f"{size} px: {text}")
        self.run_folder = work / "run" / str(size)
        self.run_folder.mkdir(parents=True, exist_ok=True)
        batch = "" if options.batch_size == 1 else f"-{options.batch_size}"
        self.export_dir = work / "exports" / f"{size}-{options.precision}{batch}"
        self.left_out: list[dict] = []

    def measure(self) -> dict:
        self.progress("export …")
        flags = {"height": self.size, "width": self.size, "max_steps": MAX_STEPS}
        flags |= {"precision": self.options.precision, "target": self.options.device}
        flags["batch_size"] = self.options.batch_size
        export_seconds = folders.export(self.checkpoint, self.export_dir, flags)
        self.manifest = manifest = Manifest.read(self.export_dir)
        latent_shape = manifest.shapes.latent(manifest.shapes.first.size)
        if manifest.family != "sd1" or manifest.latent_inputs != "none":
            raise BenchError(
                f"Peers are compared on Stable Diffusion 1, text to image. "
                f"Received: {manifest.family}"
            )
        apart(
            inputs.write,
            self.run_folder / "inputs.npz",
            str(self.checkpoint),
            latent_shape,
            self.options.batch_size,
            self.options.steps,
        )
        peers = list(self.options.peers)
        with self._reference(peers) as ours:
            memory = ours.process.ask("memory")  # before the matrix products, which would add to it
            matmul = [ours.process.ask("matmul")]
            pairs = [pair for name in peers if (pair := self._try(ours, name)) is not None]
            matmul.append(ours.process.ask("matmul"))
            if not pairs:
                reasons = "\n".join(f"{item['label']}: {item['reason']}" for item in self.left_out)
                raise BenchError(f"Nothing could be compared at {self.size} px.\n{reasons}")
            engines = [{**_ours(ours, pairs), **memory}, *pairs]
        return {
            "size": self.size,
            "export_seconds": export_seconds,
            "unet_flops": self.options.batch_size
            * apart(unet_flops, self.checkpoint, latent_shape),
            "matmul_gflops": {name: max(found[name] for found in matmul) for name in matmul[0]},
            "engines": engines,
            "left_out": self.left_out,
        }

    @contextmanager
    def _reference(self, peers: list[str]) -> Iterator["Running"]:
        """Start our SavedModels, or our models on JAX if TensorFlow sees no GPU.

        In that case, JAX is not among the peers.
        """
        try:
            ours = self._start(OURS)
        except NoGpuError as error:
            if "jax" not in peers:
                raise
            self._leave_out(OURS, str(error), failed=False)
            peers.remove("jax")
            ours = self._start("jax")
        with ours.process:
            yield ours

    def _start(self, name: str) -> "Running":
        """Start an engine and call every stage once."""
        self.progress(f"{self._label(name)} …")
        log = self.work / "logs" / f"{name}-{self.size}.log"
        with ExitStack() as stack:
            process = stack.enter_context(Process(self._job(name), log))
            loaded = process.ask("load")
            firsts = {stage: self._ask(process, stage, save=True) for stage in STAGES}
            first_draw = process.ask("draw", steps=WARM_STEPS)["seconds"]
            stack.pop_all()  # the process goes on; the caller ends it
        return Running(name, process, loaded, firsts, first_draw)

    def _job(self, name: str) -> Job:
        options = self.options
        return Job(
            engine=name,
            height=self.size,
            width=self.size,
            batch_size=options.batch_size,
            steps=options.steps,
            threads=len(os.sched_getaffinity(0)),
            device=options.device,
            precision=options.precision,
            checkpoint=str(self.checkpoint),
            export_dir=str(self.export_dir),
            ir_dir=str(self.work / "openvino"),
            inputs=str(self.run_folder / "inputs.npz"),
        )

    def _output(self, name: str, stage: str) -> Path:
        return self.run_folder / f"{name}-{stage}.npy"

    def _ask(self, process: Process, stage: str, save: bool = False) -> float:
        path = str(self._output(process.job.engine, stage)) if save else None
        return process.ask("run", stage=stage, save=path)["seconds"]

    def _try(self, ours: "Running", name: str) -> dict | None:
        if reason := self._why_not(name):
            self._leave_out(name, reason, failed=False)
            return None
        try:
            return self._compare(ours, name)
        except BenchError as error:
            self._leave_out(name, str(error), failed=True)
            self.progress(f"{self._label(name)} failed: {error}")
            return None

    def _why_not(self, name: str) -> str | None:
        kind, options = KINDS[name], self.options
        if options.device not in kind.devices:
            return f"It is measured on {', '.join(kind.devices)} only."
        if options.precision not in kind.precisions:
            return f"It computes in {', '.join(kind.precisions)} only."
        if KINDS[name].module == KINDS["kerascv"].module:
            return why_not_the_same_work(self.manifest, BenchOptions())
        return None

    def _leave_out(self, name: str, reason: str, failed: bool) -> None:
        label = self._label(name)
        self.left_out.append({"name": name, "label": label, "reason": reason, "failed": failed})

    def _label(self, name: str) -> str:
        return KINDS[name].label_in(self.options.precision, self.options.device)

    def _compare(self, ours: "Running", name: str) -> dict:
        conversion_seconds = 0.0
        if KINDS[name].module == KINDS["openvino"].module:
            conversion_seconds = folders.convert(self.checkpoint, self.work / "openvino")
        peer = self._start(name)
        with peer.process:
            decibels = {stage: self._decibels(ours, peer, stage) for stage in STAGES}
            timed = {stage: self._alternate(ours, peer, stage) for stage in STAGES}
            draws = self._alternate_draws(ours, peer)
            memory = peer.process.ask("memory")
        stages = {
            stage: {
                "first": peer.firsts[stage],
                "seconds": summary(theirs),
                "ours": summary(mine),
                "ratio": statistics.median(theirs) / statistics.median(mine),
                "psnr": decibels[stage],
            }
            for stage, (mine, theirs) in timed.items()
        }
        mine, theirs = draws
        at_full = [full_seconds(self.options, draw) for draw in theirs]
        # A step of the SavedModels' loop is the stage itself. That of another engine in our place
        # is not: its draw has the update between two calls, too.
        loop = {"step_seconds": stages["unet_step"]["ours"]["median"]} if ours.name == OURS else {}
        ours_at_full = [full_seconds(self.options, draw | loop) for draw in mine]
        return {
            **peer.described(stages, conversion_seconds),
            "stages": stages,
            "end_to_end": {
                "first": peer.first_draw,
                "draws": theirs,
                "ours_draws": mine,
                "seconds": summary(at_full),
                "ours": summary(ours_at_full),
                "ratio": statistics.median(at_full) / statistics.median(ours_at_full),
            },
            **memory,
        }

    def _decibels(self, ours: "Running", peer: "Running", stage: str) -> float:
        outputs = [np.load(self._output(engine.name, stage)) for engine in (ours, peer)]
        decibels = agreement.decibels(*outputs)
        theirs = peer.loaded["precision"] or self.options.precision
        agreement.check(peer.label, stage, decibels, self.options.precision, theirs)
        return decibels

    def _alternate(self, ours: "Running", peer: "Running", stage: str):
        turns = [
            (self._ask(ours.process, stage), self._ask(peer.process, stage))
            for _ in range(self.options.rounds)
        ]
        return tuple(map(list, zip(*turns, strict=True)))

    def _alternate_draws(self, ours: "Running", peer: "Running"):
        steps = self.options.steps
        turns = [
            (ours.process.ask("draw", steps=steps), peer.process.ask("draw", steps=steps))
            for _ in range(self.options.rounds)
        ]
        return tuple(map(list, zip(*turns, strict=True)))


@dataclass(frozen=True)
class Running:
    """A loaded engine, and the seconds of its first calls."""

    name: str
    process: Process
    loaded: dict
    firsts: dict[str, float]
    first_draw: float

    @property
    def label(self) -> str:
        precision = self.loaded["precision"]
        return self.process.job.label + ("" if precision is None else f", {precision}")

    def described(self, stages: dict[str, dict], conversion_seconds: float = 0.0) -> dict:
        loops = KINDS[self.name].module == KINDS[OURS].module
        calls = {"unet_step": self.process.job.steps - 1 if loops else 1}
        compiling = [
            (self.firsts[name] - stage["seconds"]["median"]) * calls.get(name, 1)
            for name, stage in stages.items()
        ]
        before = self.loaded["compile_seconds"]
        return {
            "name": self.name,
            "label": self.label,
            "devices": self.loaded["devices"],
            "load_seconds": self.loaded["load_seconds"],
            "conversion_seconds": conversion_seconds,
            "compile_seconds": max(sum(compiling), 0.0) + before + conversion_seconds,
        }


def _ours(running: Running, pairs: list[dict]) -> dict:
    """Return our row: a summary of everything that was measured in turn with any peer."""

    def values(part):
        return [value for pair in pairs for value in part(pair)["ours"]["values"]]

    stages = {
        name: {
            "first": running.firsts[name],
            "seconds": summary(values(lambda pair, name=name: pair["stages"][name])),
        }
        for name in STAGES
    }
    return {
        **running.described(stages),
        "stages": stages,
        "end_to_end": {
            "first": running.first_draw,
            "seconds": summary(values(lambda pair: pair["end_to_end"])),
        },
    }


def full_seconds(options: ComparisonOptions, draw: dict[str, float]) -> float:
    """Extrapolate a picture of fewer steps to all of them by the seconds of one step."""
    return draw["seconds"] + (options.full_steps - options.steps) * draw["step_seconds"]


def failed(results: dict) -> dict[str, str]:
    """Return why engines and whole sizes failed, by their labels."""
    engines = {
        f"{item['label']}, {size['size']} px": item["reason"]
        for size in results["sizes"]
        for item in size["left_out"]
        if item["failed"]
    }
    return engines | results["failed_sizes"]
