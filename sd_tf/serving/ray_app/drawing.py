"""Batches drawn with the models' replicas, always with the export that is in the folder."""

import asyncio
import base64
import logging
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ray.util.metrics import Counter, Gauge, Histogram

from sd_tf.chain import Chain, open_export
from sd_tf.generate import described, png_bytes
from sd_tf.manifest import ExportError, Manifest
from sd_tf.serving.ray_app.batching import Batcher, BusyError, Job
from sd_tf.serving.ray_app.models import StaleError, export_digest
from sd_tf.serving.ray_app.remote import LOST, Replicas
from sd_tf.serving.ray_app.settings import Settings
from sd_tf.serving.ray_app.wanted import RefusedError

STOP_WITHIN = 5  # model calls between two looks whether anybody still waits, where nobody watches
PING = 10.0  # seconds without an event before a ping

log = logging.getLogger("ray.serve")

Event = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Served:
    """The export that new batches are drawn with."""

    digest: str
    manifest: Manifest
    chain: Chain


class Drawing:
    """Made inside the event loop in which the deployments' handles live."""

    def __init__(self, settings: Settings, models: dict[str, Any]):
        self.settings, self.models = settings, models
        self.folder = Path(settings.export_dir)
        self.loop = asyncio.get_running_loop()
        self.served = self._open()
        # One more than there are diffusion models: while one draws, another batch is decoded.
        lanes = settings.scales["diffusion_model"].most + 1
        size = self.served.manifest.batch_size
        self.batcher = Batcher(size, settings.batch_wait, settings.max_queue)
        self.pool = ThreadPoolExecutor(lanes)
        self.pictures = Counter("sd_tf_pictures", "by what became of them", ("outcome",))
        self.waiting = Gauge("sd_tf_waiting", "pictures that wait for their batch")
        self.filled = Histogram("sd_tf_batch_fill", "wanted share of a batch", [0.25, 0.5, 0.75, 1])
        bounds = [0.01 * 2**i for i in range(16)]
        self.seconds = Histogram("sd_tf_stage_seconds", "of a batch", bounds, ("stage",))
        self.tasks = [asyncio.create_task(self._lane()) for _ in range(lanes)]
        if settings.watch:
            self.tasks.append(asyncio.create_task(self._watch()))

    def check_health(self) -> None:
        for task in self.tasks:
            if task.done():
                raise RuntimeError(f"a task ended: {task.exception()!r}")

    async def put(self, jobs: list[Job]) -> None:
        try:
            await self.batcher.put(jobs)
        except BusyError as error:
            self.pictures.inc(len(jobs), {"outcome": "refused"})
            raise RefusedError(429, str(error)) from error
        self.waiting.set(len(self.batcher))

    async def follow(self, jobs: list[Job], timeout: float) -> AsyncIterator[Event]:
        """What becomes of the jobs of one call, until all are there or one failed.

        Closing it, as when the client is gone, takes back what is not drawn yet.
        """
        start, missing, outcome = time.monotonic(), len(jobs), "stopped"
        calls = jobs[0].together.calls
        images = [{"index": job.index, "prompt": job.prompt, "seed": job.seed} for job in jobs]
        try:
            yield "accepted", {"id": uuid.uuid4().hex, "images": images, "calls": calls}
            while missing:
                left = start + timeout - time.monotonic()
                try:
                    name, content = await asyncio.wait_for(jobs[0].events.get(), min(left, PING))
                except TimeoutError:
                    if left > PING:
                        yield "ping", {}
                        continue
                    message = "The pictures were not there in time. Give a larger timeout."
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
            self.pictures.inc(len(jobs), {"outcome": outcome})

    # Batches

    async def _lane(self) -> None:
        """Batch after batch."""
        while True:
            jobs = await self.batcher.take()
            self.waiting.set(len(self.batcher))
            self.filled.observe(len(jobs) / self.batcher.size)
            try:
                await self._draw(jobs)
            except Exception as error:  # told to who waits for it; the lane goes on
                status, message = _explained(error)
                if status >= 500:
                    log.exception("a batch failed")
                for job in jobs:
                    job.events.put_nowait(("error", {"status": status, "error": message}))

    async def _draw(self, jobs: list[Job]) -> None:
        try:
            await self._draw_with(self.served, jobs)
        except StaleError:  # exported again meanwhile: with the new one, from the start
            await self._switch()
            await self._draw_with(self.served, jobs)

    async def _draw_with(self, served: Served, jobs: list[Job]) -> None:
        together = jobs[0].together
        inputs = {name: [job.inputs[name] for job in jobs] for name in together.given}

        def send(job: Job, name: str, **content) -> None:
            event = (name, {"index": job.index, **content})
            self.loop.call_soon_threadsafe(job.events.put_nowait, event)

        def on_the_way(done: int, calls: int, latents: np.ndarray) -> bool:
            watched = [(i, job) for i, job in enumerate(jobs) if job.every_step and job.wanted]
            for _, job in watched:
                send(job, "progress", done=done, calls=calls)
            due = [(i, job) for i, job in watched if done in job.preview_steps(calls)]
            if due:
                pictures = served.chain.decode(latents)
                for i, job in due:
                    send(job, "preview", done=done, png=_encoded(png_bytes(pictures[i], {})))
            return any(job.wanted for job in jobs)

        def draw() -> None:
            result = served.chain(
                [job.prompt for job in jobs],
                seed=[job.seed for job in jobs],
                callback=on_the_way,
                callback_every=1 if any(job.every_step for job in jobs) else STOP_WITHIN,
                **inputs,
                **together.parameters,
            )
            for stage, seconds in result.timings.items():
                self.seconds.observe(seconds, {"stage": stage})
            for job, image in zip(jobs, result.images, strict=True):
                told = {"prompt": job.prompt, **together.parameters, "seed": job.seed}
                if "negative_prompt" in together.given:
                    told["negative_prompt"] = job.inputs["negative_prompt"]
                pictures = sorted(together.given & {"image", "mask"})
                png = _encoded(png_bytes(image, described(served.manifest, pictures, **told)))
                send(job, "image", seed=job.seed, png=png, parameters=told)

        await self.loop.run_in_executor(self.pool, draw)

    # The export

    def _open(self) -> Served:
        digest = export_digest(self.folder)
        manifest, tokenizers = open_export(self.folder)
        replicas = Replicas(manifest, self.settings.jit_compile, self.models, digest, self.loop)
        return Served(digest, manifest, Chain(manifest, [replicas], tokenizers, 0.0))

    async def _watch(self) -> None:
        """Take up a new export in the folder, without a pause for anybody."""
        said = None
        while True:
            await asyncio.sleep(self.settings.watch)
            try:
                if export_digest(self.folder) != self.served.digest:
                    await self._switch()
                    log.info("serving the export %s", self.served.digest)
                said = None
            except Exception as error:  # half copied, or broken: what is loaded goes on
                if repr(error) != said:
                    log.warning("%s is not taken up: %r", self.folder, error)
                    said = repr(error)

    async def _switch(self) -> None:
        """First the models everywhere, then who calls them."""
        served = self._open()
        for handle in self.models.values():
            digests = await handle.broadcast("load").results_async()
            if set(digests) - {served.digest}:
                raise ExportError(f"{self.folder} changed again while it was loaded.")
        self.served = served
        self.batcher.size = served.manifest.batch_size


def _explained(error: Exception) -> tuple[int, str]:
    """HTTP's status, and what a client is told."""
    if isinstance(error, LOST):
        return 503, "The models are not there at the moment. Try again later."
    return (400 if isinstance(error, ValueError) else 500), str(error)


def _encoded(png: bytes) -> str:
    return base64.b64encode(png).decode()
