"""Pictures that several callers wait for, put together into batches of the exported size."""

import asyncio
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class BusyError(Exception):
    """The queue is full; nothing was put into it."""


@dataclass(eq=False)
class Job:
    """One picture. What happens to it comes as events (name, content)."""

    index: int  # among those of its caller
    prompt: str
    seed: int
    inputs: Mapping[str, Any]  # negative_prompt, image, mask: those that it has
    together: Hashable  # jobs of one batch have the same
    events: asyncio.Queue[tuple[str, Any]]
    every_step: bool = False  # somebody watches
    previews: int = 0
    wanted: bool = True

    def preview_steps(self, calls: int) -> set[int]:
        """After which model calls: evenly on the way, the last one apart."""
        count = min(self.previews, calls - 1)
        return {round(calls * k / (count + 1)) for k in range(1, count + 1)}


class Batcher:
    """A bounded queue that gives the oldest job and those that can go with it."""

    def __init__(self, size: int, wait: float, limit: int):
        """`wait`: seconds that an incomplete batch waits for more; `limit`: of waiting jobs."""
        self.size, self.wait, self.limit = size, wait, limit
        self._waiting: list[Job] = []
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    async def put(self, jobs: Sequence[Job]) -> None:
        """All of them or none."""
        async with self._changed:
            if len(self._waiting) + len(jobs) > self.limit:
                raise BusyError(
                    f"{len(self._waiting)} pictures are waiting, at most {self.limit} may. "
                    f"Try again later."
                )
            self._waiting.extend(jobs)
            self._changed.notify_all()

    def drop(self, jobs: Sequence[Job]) -> None:
        """Nobody waits for these any more."""
        for job in jobs:
            job.wanted = False
        self._waiting = [job for job in self._waiting if job.wanted]

    async def take(self) -> list[Job]:
        """The next batch: complete, or as it is when the oldest job has waited long enough."""
        async with self._changed:
            while True:
                await self._changed.wait_for(lambda: self._waiting)
                end = time.monotonic() + self.wait
                while 0 < len(self._batch()) < self.size and (left := end - time.monotonic()) > 0:
                    try:
                        await asyncio.wait_for(self._changed.wait(), left)
                    except TimeoutError:
                        break
                if batch := self._batch():
                    self._waiting = [job for job in self._waiting if job not in batch]
                    return batch

    def _batch(self) -> list[Job]:
        if not self._waiting:
            return []
        together = self._waiting[0].together
        return [job for job in self._waiting if job.together == together][: self.size]
