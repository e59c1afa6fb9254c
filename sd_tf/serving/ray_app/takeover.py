"""The export that the front draws with, and its change to the one that is in the folder now."""

import asyncio
import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_tf.errors import SdTfError
from sd_tf.runtime.chain import Chain, open_export
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.runner import Runner
from sd_tf.serving.ray_app.held import export_digest, place_of
from sd_tf.serving.ray_app.models import RestartError, version_of
from sd_tf.serving.ray_app.remote import LOST, ask, ask_all

ASK_WITHIN = 10.0  # seconds that the replicas have to tell what they serve
AGREE_EVERY = 30.0  # seconds, after which replicas that started since are told what is served
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 300.0  # seconds before an export that failed is tried again

log = logging.getLogger("ray.serve")


class TakeoverError(SdTfError):
    """The export in the folder cannot be taken up, so the one before it is served."""


@dataclass(frozen=True)
class Served:
    """An export whose components are loaded and warm in every replica."""

    digest: str
    manifest: Manifest
    chain: Chain

    @property
    def version(self) -> int:
        return version_of(self.digest)


@dataclass(frozen=True)
class Failure:
    """A folder whose export could not be taken up, and when it is tried again."""

    digest: str
    place: tuple[int, ...]  # see `place_of`
    message: str
    pause: float
    again: float  # of `time.monotonic`


class Takeover:
    """Changes from one export to the next: in all components, or in none."""

    def __init__(
        self,
        folder: Path,
        models: Mapping[str, Any],
        runner: Callable[[Manifest, str], Runner],
    ):
        """Prepare to serve the exports in a folder; `begin` takes up the first one.

        Args:
            models: the deployments' handles, by component.
            runner: makes the runner of an export from its manifest and its digest.
        """
        self.folder, self.models, self.runner = folder, models, runner
        self.served: Served
        self._changing = asyncio.Lock()
        self._agreed = -math.inf  # when all replicas were told what is served
        self._failed: Failure | None = None

    async def begin(self) -> None:
        """Serve the export that all replicas have loaded; if there is none, the one in the folder.

        A front that takes the place of another, which died, may find an export in the folder that
        the replicas do not have, or cannot have. `change` takes it up if they can. Where there is
        neither, it is one that each component has in some replica: the others can get it.
        """
        loaded = await asyncio.gather(*map(_served_by, self.models.values()))
        if digest := _in_common(loaded, set.intersection):
            self.served = await self._as_replicas(digest, loaded)
            return
        try:
            self.served = await asyncio.to_thread(self._of_folder)
        except (SdTfError, OSError):
            if (digest := _in_common(loaded, set.union)) is None:
                raise
            self.served = await self._as_replicas(digest, loaded)

    async def change(self) -> None:
        """Serve the export that is in the folder now, once every replica has it ready.

        If one replica fails, all stay with the export before; if one dies, the others keep what
        they have loaded, and its successor is asked. An export that failed is tried again after a
        pause, which doubles each time; until then this raises at once. One that needs another
        start of the application is not tried again.
        """
        async with self._changing:
            if time.monotonic() - self._agreed > AGREE_EVERY:
                await self._agree()
            digest, place = await asyncio.to_thread(self._seen)
            if digest == self.served.digest:
                self._failed = None
                return
            before = self._failed
            if before is not None and (before.digest, before.place) != (digest, place):
                before = None
            if before is not None and time.monotonic() < before.again:
                raise TakeoverError(before.message)
            try:
                served = await asyncio.to_thread(self._open, digest)
                for handle in self.models.values():
                    await ask_all(handle, "load", digest)
            except Exception as error:  # of any kind: the replicas' own, or Ray's if one died
                pause = min(LONGEST_PAUSE, 2 * before.pause) if before else FIRST_PAUSE
                if isinstance(_cause(error), RestartError):
                    pause = math.inf
                message = (
                    f"The export in {self.folder} cannot be served, so the one before it is: "
                    f"{said(error)}"
                )
                again = time.monotonic() + pause
                self._failed = Failure(digest, place, message, pause, again)
                await self._agree()
                raise TakeoverError(message) from error
            self.served, self._failed = served, None
            await self._agree()
            log.info("serving the export %s as version %d", digest, served.version)

    async def _as_replicas(self, digest: str, loaded: list[list[list[str]]]) -> Served:
        """Return an export that replicas have, as one of them describes it."""
        handle = next(h for h, answer in zip(self.models.values(), loaded, strict=True) if answer)
        files = await ask(handle, "description", digest)
        return await asyncio.to_thread(self._described, digest, files)

    def _described(self, digest: str, files: Mapping[str, bytes]) -> Served:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            return self._served(digest, *open_export(Path(folder)))

    def _of_folder(self) -> Served:
        """Return the export in the folder."""
        digest, _ = self._seen()
        return self._open(digest)

    def _check_components(self, manifest: Manifest) -> None:
        """Refuse an export with other components: each is a deployment of its own."""
        if manifest.parts.keys() != self.models.keys():
            raise RestartError(
                f"It has the components {', '.join(manifest.parts)}, and the application has "
                f"{', '.join(self.models)}. Start the application again."
            )

    def _seen(self) -> tuple[str, tuple[int, ...]]:
        """Return what tells the export in the folder, and its folder, from others."""
        try:
            return export_digest(self.folder), place_of(self.folder)
        except OSError as error:
            raise TakeoverError(f"{self.folder} holds no export: {error}") from error

    def _open(self, digest: str) -> Served:
        manifest, tokenizers = open_export(self.folder)
        self._check_components(manifest)
        manifest.check_files(self.folder)
        if self._seen()[0] != digest:
            raise TakeoverError(f"{self.folder} changed while it was read.")
        return self._served(digest, manifest, tokenizers)

    def _served(self, digest: str, manifest: Manifest, tokenizers) -> Served:
        chain = Chain(manifest, [self.runner(manifest, digest)], tokenizers, 0.0)
        return Served(digest, manifest, chain)

    async def _agree(self) -> None:
        """Have every replica load what is served, and release all else when calls with it ended.

        Some have not loaded it: those that started while another export was served, or held.
        """
        for component, handle in self.models.items():
            try:
                await ask_all(handle, "load", self.served.digest)
                await ask_all(handle, "keep", self.served.digest)
            except LOST:  # all are starting, and begin with what is served
                continue
            except Exception as error:  # of any kind: it is tried again
                log.warning("%s could not be told what is served: %s", component, said(error))
        self._agreed = time.monotonic()


async def _served_by(handle) -> list[list[str]]:
    """Return the digests that each replica of a deployment serves; none if no replica answers."""
    try:
        async with asyncio.timeout(ASK_WITHIN):
            await ask(handle, "ready")  # until the handle knows its replicas
            answers = await handle.broadcast("served").results_async(return_exceptions=True)
    except (TimeoutError, *LOST):
        return []
    return [answer for answer in answers if isinstance(answer, list)]


def _in_common(loaded: list[list[list[str]]], merged: Callable) -> str | None:
    """Return the digest of an export that all components which answered have loaded.

    Args:
        loaded: the digests of each replica of each component.
        merged: `set.intersection`: in all of their replicas; `set.union`: in one at least.
    """
    each = [merged(*map(set, replicas)) for replicas in loaded if replicas]
    known = [digest for replicas in loaded for digests in replicas for digest in digests]
    shared = set.intersection(*each) if each else set()
    return max(shared, key=lambda digest: (known.count(digest), -known.index(digest)), default=None)


def _cause(error: Exception) -> Exception:
    """Return a replica's error: Ray's wrapper around it is a traceback."""
    return getattr(error, "cause", None) or error


def said(error: Exception) -> str:
    """Return an error's own words."""
    cause = _cause(error)
    return str(cause) if isinstance(cause, ValueError) else repr(cause)
