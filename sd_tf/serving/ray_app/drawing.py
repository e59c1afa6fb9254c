"""Draw batches with the models' replicas, and take up a new export in the folder."""

import asyncio
import base64
import logging
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from ray.util.metrics import Counter, Gauge, Histogram

from sd_tf.runtime.call import Call
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.parameter import CallError
from sd_tf.runtime.png import metadata, png_bytes
from sd_tf.runtime.request import read_request
from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.batching import Batcher, BusyError, Job
from sd_tf.serving.ray_app.held import StaleError
from sd_tf.serving.ray_app.models import RestartError
from sd_tf.serving.ray_app.remote import LOST, RayRunner
from sd_tf.serving.ray_app.settings import Settings
from sd_tf.serving.ray_app.takeover import Served, Takeover, TakeoverError, said

STOP_WITHIN = 5  # model calls between checks for waiting callers, if none watches
PING = 10.0  # seconds without an event before a ping

log = logging.getLogger("ray.serve")

Event = tuple[str, dict[str, Any]]


class Drawing:
    """Draws queued pictures, from `begin` on.

    Make it inside the event loop of the deployments' handles.
    """

    def __init__(self, settings: Settings, models: dict[str, Any]):
        self.settings, self.models = settings, models
        self.loop = asyncio.get_running_loop()
        self.takeover = Takeover(Path(settings.export_dir), models, self._runner)
        # One more than the diffusion models, so that a batch is decoded while the next is drawn.
        self.lanes = settings.scales["diffusion_model"].most + 1
        self.batcher = Batcher(1, settings.batch_wait, settings.max_queue)
        self.pool = ThreadPoolExecutor(self.lanes)
        self.pictures = Counter("sd_tf_pictures", "by what became of them", ("outcome",))
        self.waiting = Gauge("sd_tf_waiting", "pictures that wait for their batch")
        self.filled = Histogram("sd_tf_batch_fill", "wanted share of a batch", [0.25, 0.5, 0.75, 1])
        bounds = [0.01 * 2**i for i in range(16)]
        self.seconds = Histogram("sd_tf_stage_seconds", "of a batch", bounds, ("stage",))
        self.tasks: list[asyncio.Task] = []

    async def begin(self) -> None:
        """Take up the export, and draw what is put into the queue."""
        await self.takeover.begin()
        self.batcher.size = self.served.manifest.shapes.largest_batch
        self.tasks += [asyncio.create_task(self._lane()) for _ in range(self.lanes)]
        if self.settings.watch:
            self.tasks.append(asyncio.create_task(self._watch()))

    @property
    def served(self) -> Served:
        """The export that new batches are drawn with."""
        return self.takeover.served

    def check_health(self) -> None:
        for task in self.tasks:
            if task.done():
                raise RuntimeError(f"a task ended: {task.exception()!r}")

    async def put(self, jobs: list[Job]) -> None:
        try:
            await self.batcher.put(jobs)
        except BusyError as error:
            raise RefusedError(429, str(error)) from error
        self.waiting.set(len(self.batcher))

    async def follow(self, jobs: list[Job], timeout: float) -> AsyncIterator[Event]:
        """Yield the events of one call's jobs, until all pictures are made or one has failed.

        Closing the generator, as when the client disconnects, cancels the jobs not drawn yet.
        """
        start, missing, outcome = time.monotonic(), len(jobs), "stopped"
        calls = jobs[0].together.model_calls
        images = [
            {"index": job.index, "prompt": job.call.prompt, "seed": job.call.seed} for job in jobs
        ]
        try:
            # The export that the call was checked against, by which the page learns of another one.
            told = {"id": uuid.uuid4().hex, "export": jobs[0].together.export}
            yield "accepted", {**told, "images": images, "calls": calls}
            while missing:
                left = start + timeout - time.monotonic()
                try:
                    name, content = await asyncio.wait_for(jobs[0].events.get(), min(left, PING))
                except TimeoutError:
                    if left > PING:
                        yield "ping", {}
                        continue
                    message = "The pictures were not ready in time. Give a larger timeout."
                    name, content = "error", {"status": 504, "error": message}
                if name == "error":
                    outcome = "failed"
                missing -= name == "image"
                yield name, content
                if name == "error":
                    return
            outcome = "done"
            yield "done", {"seconds": round(time.monotonic() - start, 3)}
        finally:
            self.batcher.drop(jobs)
            self.waiting.set(len(self.batcher))
            self.pictures.inc(len(jobs), {"outcome": outcome})

    # Batches

    async def _lane(self) -> None:
        """Draw one batch after the other, without end."""
        while True:
            jobs = await self.batcher.take()
            self.waiting.set(len(self.batcher))
            try:
                await self._draw(jobs)
            except Exception as error:  # reported to the batch's callers; the lane goes on
                status, message = _explained(error)
                if status >= 500:
                    log.exception("a batch failed")
                for job in jobs:
                    job.events.put("error", {"status": status, "error": message})

    async def _draw(self, jobs: list[Job]) -> None:
        """Draw jobs that fit together, in batches of the export that is served by then."""
        is_again = False
        while jobs:
            served = self.served
            size = served.manifest.shapes.divided(len(jobs))[0]  # one batch, as previews need it
            batch = jobs[:size]
            try:
                await self._draw_with(served, batch)
            except StaleError:  # a new export is in place: draw with it from the start
                if is_again or not self.settings.watch:
                    raise
                await self._take_up()
                is_again = True
            else:
                self.filled.observe(len(batch) / size)
                jobs, is_again = jobs[size:], False

    async def _draw_with(self, served: Served, jobs: list[Job]) -> None:
        call = Call.joined([job.call for job in jobs])
        if jobs[0].together.export != served.digest:
            try:
                read_request(served.manifest, call)
            except (ExportError, ValueError) as error:
                raise RefusedError(
                    503,
                    f"Another export is served since the call came, which does not fit it: {error} "
                    f"Send it again.",
                ) from error

        def send(job: Job, name: str, **content) -> None:
            content = {"index": job.index, **content}
            self.loop.call_soon_threadsafe(job.events.put, name, content)

        def on_the_way(done: int, calls: int, latents: np.ndarray) -> bool:
            watched = [(i, job) for i, job in enumerate(jobs) if job.every_step and job.wanted]
            for _, job in watched:
                send(job, "progress", done=done, calls=calls)
            due = [
                (i, job)
                for i, job in watched
                if done in job.preview_steps(calls) and job.events.takes_previews
            ]
            if due:
                pictures = served.chain.preview(latents)
                for i, job in due:
                    send(job, "preview", done=done, png=_encoded(png_bytes(pictures[i], {})))
            return any(job.wanted for job in jobs)

        def draw() -> None:
            every_step = any(job.every_step for job in jobs)
            result = served.chain(
                **call.given(),
                callback=on_the_way,
                callback_every=1 if every_step else STOP_WITHIN,
            )
            for stage, seconds in result.timings.items():
                self.seconds.observe(seconds, {"stage": stage})
            for job, made, image in zip(jobs, result.each, result.images, strict=True):
                png = _encoded(png_bytes(image, metadata(made, served.manifest)))
                send(job, "image", seed=made.seed, png=png, parameters=made.described())

        await self.loop.run_in_executor(self.pool, draw)

    # The export

    def _runner(self, manifest: Manifest, digest: str) -> RayRunner:
        return RayRunner(manifest, self.settings.jit_compile, self.models, digest, self.loop)

    async def _take_up(self) -> None:
        await self.takeover.change()
        self.batcher.size = self.served.manifest.shapes.largest_batch

    async def _watch(self) -> None:
        """Take up each new export in the folder, without interrupting requests."""
        logged = None
        while True:
            await asyncio.sleep(self.settings.watch)
            try:
                await self._take_up()
                logged = None
            except TakeoverError as error:
                if str(error) != logged:
                    logged = str(error)
                    log.warning(logged)


def _explained(error: Exception) -> tuple[int, str]:
    """Return the HTTP status and the message for a client."""
    if isinstance(error, LOST):
        return 503, "The models cannot be reached at the moment. Try again later."
    if isinstance(error, RefusedError):
        return error.status, error.message
    if isinstance(error, StaleError | RestartError | TakeoverError | ExportError):
        return 503, said(error)
    return (422 if isinstance(error, CallError) else 500), said(error)


def _encoded(png: bytes) -> str:
    return base64.b64encode(png).decode()
