"""Run units on Ray's workers, each of which holds a pipeline."""

import contextlib
import dataclasses
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # also in a worker that another node started
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import ray.data

from sd_tf.runtime.call import Call
from sd_tf.runtime.png import metadata, png_bytes
from sd_tf.serving.batch import BatchError
from sd_tf.serving.batch.rows import Unit, opened
from sd_tf.serving.devices import see_reserved_gpus

ATTEMPTS = 5  # begun so often and never ended, a unit is taken to kill its worker
MOST_BLOCKS = 10_000  # Ray's own work grows with them; larger jobs have several units in a block


@dataclass(frozen=True)
class Resources:
    """Ray's address, the workers and what each reserves; None: chosen by what Ray finds."""

    address: str | None = None
    workers: int | None = None
    cpus_per_worker: float = 1
    gpus_per_worker: float | None = None


@dataclass(frozen=True)
class Loading:
    """How a worker loads the export."""

    export_dir: str
    jit_compile: bool
    compile_cache: str | None


@contextlib.contextmanager
def connected(wanted: Resources) -> Iterator[Resources]:
    """Start Ray for this process, or join a cluster; yield the chosen resources."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if wanted.address is None:  # also ignores RAY_ADDRESS
        asked = math.ceil((wanted.workers or 1) * wanted.cpus_per_worker)
        cpus = max(os.cpu_count() or 1, asked)
        options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    else:
        options["address"] = wanted.address
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "here" if wanted.address is None else f"at {wanted.address}"
        raise BatchError(f"Ray cannot be started or reached {where}: {error}") from error
    try:
        yield _chosen(wanted, ray.cluster_resources().get("GPU", 0))
    finally:
        ray.shutdown(wait_for_processes=True)


def _chosen(wanted: Resources, gpus: float) -> Resources:
    per_worker = wanted.gpus_per_worker
    if per_worker is None:
        per_worker = min(1, gpus)
    workers = wanted.workers
    if workers is None:
        fit = int(gpus / per_worker + 1e-6) if per_worker else 1  # 1 GPU has room for 5 × 0.2
        workers = max(1, fit)
    if wanted.address is None and workers * per_worker > gpus:
        raise BatchError(
            f"{workers} workers with {per_worker:g} GPUs each need more than the {gpus:g} that "
            f"Ray finds here. Lower `workers` or `gpus_per_worker`."
        )
    return dataclasses.replace(wanted, workers=workers, gpus_per_worker=per_worker)


def answers(
    units: list[Unit], model: Loading, resources: Resources
) -> Iterator[tuple[int, list[bytes], list[str]]]:
    """Yield a unit's index, and for each of its rows a PNG and a reason, as units are finished.

    One of the two is empty: the reason says why there is no PNG. Ray restarts a killed worker and
    repeats its unit; an error in a worker ends the job.
    """
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.max_consecutive_actor_init_deaths = 0
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors reach us as exceptions
    items = [
        {"unit": unit.index, "calls": json.dumps([_sent(row.call) for row in unit.rows])}
        for unit in units
    ]
    attempts = ray.remote(Attempts).options(num_cpus=0, max_restarts=-1, max_task_retries=-1)
    made = ray.data.from_items(items, override_num_blocks=min(len(items), MOST_BLOCKS)).map(
        Worker,
        fn_constructor_args=(model, resources, attempts.remote()),
        compute=ray.data.ActorPoolStrategy(size=min(resources.workers, len(items))),
        num_cpus=resources.cpus_per_worker,
        num_gpus=resources.gpus_per_worker,
    )
    try:
        for answer in made.iter_rows():
            if answer["problem"]:
                raise BatchError(f"A worker failed: {answer['problem']}")
            yield int(answer["unit"]), list(answer["pngs"]), list(answer["reasons"])
    except ray.exceptions.RayError as error:
        raise BatchError(f"Ray failed: {error}") from error


def _sent(call: Call) -> dict[str, Any]:
    """Return a row's call as JSON takes it, its pictures as paths."""
    return {**call.described(), **{name: getattr(call, name) for name in call.files()}}


class Attempts:
    """Counts how often each piece of work was begun since it last ended well."""

    def __init__(self):
        self.begun = Counter()

    def begin(self, name: str) -> int:
        self.begun[name] += 1
        return self.begun[name]

    def end(self, name: str) -> None:
        del self.begun[name]


class Worker:
    """A process with a pipeline. It returns errors, as Ray would wrap raised ones in its own."""

    def __init__(self, model: Loading, resources: Resources, attempts):
        self.attempts = attempts
        self.problem = None
        try:
            self.load(model, resources)
        except Exception as error:
            self.problem = described(error)

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        problem, pngs, reasons = self.problem, [], []
        if problem is None:
            try:
                self._begin(f"unit {item['unit']}", f"The unit {item['unit']}", ATTEMPTS)
                calls, reasons = read_calls(json.loads(item["calls"]))
                drawn = iter(self.draw(calls) if calls else [])
                pngs = [b"" if reason else next(drawn) for reason in reasons]
            except Exception as error:
                problem = described(error)
        return {"unit": item["unit"], "pngs": pngs, "reasons": reasons, "problem": problem or ""}

    def load(self, model: Loading, resources: Resources) -> None:
        self._begin("start", "Loading the export", ATTEMPTS * resources.workers)
        see_reserved_gpus()
        from sd_tf.runtime.pipeline import Pipeline

        self.pipe = Pipeline.load(
            model.export_dir,
            model.jit_compile,
            compile_cache=model.compile_cache,
            fixed_weights=True,
        )
        self.pipe.warm_up()
        ray.get(self.attempts.end.remote("start"))

    def draw(self, calls: list[Call]) -> list[bytes]:
        """Draw single pictures whose calls are alike; return their PNGs."""
        result = self.pipe(**Call.joined(calls).given())
        return [
            png_bytes(image, metadata(call, self.pipe.manifest))
            for call, image in zip(result.each, result.images, strict=True)
        ]

    def _begin(self, name: str, what: str, most: int) -> None:
        count = ray.get(self.attempts.begin.remote(name))
        if count > most:
            raise BatchError(
                f"{what} has ended its worker's process {count - 1} times, often a sign of too "
                f"little memory; see Ray's logs"
            )


def read_calls(rows: list[dict[str, Any]]) -> tuple[list[Call], list[str]]:
    """Open the pictures of rows; return the calls, and for each row why it has none, or "".

    A picture may be gone or damaged since the row was checked.
    """
    calls, reasons = [], []
    for values in rows:
        try:
            calls.append(Call(**opened(values)))
        except ValueError as error:
            reasons.append(str(error))
        else:
            reasons.append("")
    return calls, reasons


def described(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
