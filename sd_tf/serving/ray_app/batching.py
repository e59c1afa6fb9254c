"""Put the pictures of several callers together into batches of the exported size."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sd_tf.runtime.call import Call

MOST_PREVIEWS_WAITING = 8  # of one call, for a client that does not read


class BusyError(Exception):
    """The queue is full; nothing was put into it."""


@dataclass(frozen=True)
class Together:
    """The values that all pictures of a batch must share."""

    export: str  # digest of the export that the call was checked against
    alike: tuple  # see `Call.alike`
    model_calls: int


class Events:
    """The events of one call, as (name, content). Previews that nobody takes are dropped."""

    def __init__(self):
        self._queue: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._previews = 0  # that wait to be taken

    @property
    def takes_previews(self) -> bool:
        return self._previews < MOST_PREVIEWS_WAITING

    def put(self, name: str, content: Any) -> None:
        if name == "preview":
            if not self.takes_previews:
                return
            self._previews += 1
        self._queue.put_nowait((name, content))

    async def get(self) -> tuple[str, Any]:
        name, content = await self._queue.get()
        self._previews -= name == "preview"
        return name, content


@dataclass(eq=False)
class Job:
    """One picture to draw; its progress is reported as events."""

    index: int  # among those of its caller
    call: Call
    together: Together  # equal for all jobs of a batch
    events: Events  # of all jobs of its caller
    every_step: bool = False  # report every step: the caller watches
    previews: int = 0
    wanted: bool = True

    def preview_steps(self, calls: int) -> set[int]:
        """Return the model calls to preview after: evenly spaced, without the last one."""
        count = min(self.previews, calls - 1)
        return {round(calls * k / (count + 1)) for k in range(1, count + 1)}


class Batcher:
    """A bounded queue that returns jobs in batches of those that fit together.

    The oldest job comes first. While its batch waits for more, complete batches of other jobs, of
    another size for instance, go ahead.
    """

    def __init__(self, size: int, wait: float, limit: int):
        """Make a queue for batches of `size`.

        Args:
            size: jobs in a complete batch.
            wait: seconds that an incomplete batch waits for more jobs.
            limit: the most jobs that may wait.
        """
        self.size, self.wait, self.limit = size, wait, limit
        self._waiting: list[Job] = []
        self._oldest: Job | None = None  # whose batch waits for more, and until when
        self._until = 0.0
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    async def put(self, jobs: Sequence[Job]) -> None:
        """Add all of the jobs, or raise BusyError and add none."""
        async with self._changed:
            if len(self._waiting) + len(jobs) > self.limit:
                raise BusyError(
                    f"{len(self._waiting)} pictures are waiting, at most {self.limit} may. "
                    f"Try again later."
                )
            self._waiting.extend(jobs)
            self._changed.notify_all()

    def drop(self, jobs: Sequence[Job]) -> None:
        """Remove jobs that nobody waits for any more, and mark those that are being drawn."""
        for job in jobs:
            job.wanted = False
        self._waiting = [job for job in self._waiting if job.wanted]

    async def take(self) -> list[Job]:
        """Return the next batch once it is complete, or its oldest job has waited long enough."""
        async with self._changed:
            while True:
                await self._changed.wait_for(lambda: self._waiting)
                if batch := self._next():
                    self._waiting = [job for job in self._waiting if job not in batch]
                    return batch
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self._until - time.monotonic())

    def _next(self) -> list[Job]:
        """Return the batch that is to be drawn now, or none while the oldest waits for more."""
        oldest = self._waiting[0]
        if oldest is not self._oldest:
            self._oldest, self._until = oldest, time.monotonic() + self.wait
        batches: dict[Together, list[Job]] = {}
        for job in self._waiting:
            batches.setdefault(job.together, []).append(job)
        if time.monotonic() >= self._until:
            return batches[oldest.together][: self.size]
        return next((jobs[: self.size] for jobs in batches.values() if len(jobs) >= self.size), [])
