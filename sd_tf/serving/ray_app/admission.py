"""Admit calls before their bodies are read, so that many or large ones cannot fill the memory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from sd_tf.serving.errors import RefusedError

BODIES = 8  # of the largest size, that there is room for


class Slots:
    """The places for calls; a call that finds none is refused."""

    def __init__(self, most: int, who: str = "calls are in progress"):
        """Make `most` places; a refusal says `who` has them."""
        self.most, self.who, self.count = most, who, 0

    @contextmanager
    def taken(self, others: int = 0) -> Iterator[None]:
        """Take a place until the block ends; `others` places are taken elsewhere."""
        if (taken := self.count + others) >= self.most:
            raise RefusedError(429, f"{taken} {self.who}. Try again later.")
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


class Room:
    """The memory for all bodies together; a body waits until there is room for it."""

    def __init__(self, most: int, within: float):
        """Make room for `most` bytes. A body that waits for `within` seconds is refused."""
        self.most, self.within, self.used = most, within, 0
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def held(self, size: int) -> AsyncIterator[Callable[[int], None]]:
        """Hold `size` bytes until the block ends; call the result to hold only so many from now."""
        try:
            async with asyncio.timeout(self.within):
                while self.used + size > self.most:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError as error:
            raise RefusedError(429, "Other bodies fill the memory. Try again later.") from error
        self.used += size

        def keep(fewer: int) -> None:
            nonlocal size
            self.used -= size - fewer
            size = fewer
            self._freed.set()

        try:
            yield keep
        finally:
            keep(0)
