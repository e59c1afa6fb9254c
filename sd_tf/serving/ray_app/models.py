"""One component of an export in a replica: TensorFlow Serving's API and the front's own calls."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from sd_tf.manifest import FILE_NAME, Manifest, file_hash

# The signatures that a walk through the models calls; of the other components it is all of them.
WALKED = {"diffusion_model": ("noise", "begin", "begin_image", "segment")}
KEEP_OLD = 60.0  # seconds after a newer export was loaded: runs that were begun with it finish


class StaleError(Exception):
    """The export that a call was begun with is not here any more."""


class Model:
    """Loads the component, compiles what is going to be called, answers."""

    def __init__(
        self,
        export_dir: str,
        component: str,
        jit_compile: bool,
        compile_cache: str | None,
        warm_up_all: bool,
    ):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if compile_cache is not None:
            from sd_tf.compile_cache import set_compile_cache

            set_compile_cache(compile_cache)
        self.folder, self.component = Path(export_dir), component
        self.jit_compile, self.warm_up_all = jit_compile, warm_up_all
        self._servers: dict[str, Any] = {}  # digest of an export → its ModelServer, newest last
        self._loading = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1)  # a device does one thing at a time
        self._background: set[asyncio.Task] = set()
        self._load()

    async def load(self) -> str:
        """Take up the export that is in the folder now; its digest."""
        async with self._loading:
            digest, old = export_digest(self.folder), list(self._servers)
            if digest in self._servers:
                self._servers[digest] = self._servers.pop(digest)  # the newest again
            else:  # in a thread of its own: what is served goes on meanwhile
                digest = await asyncio.to_thread(self._load)
                task = asyncio.create_task(self._forget(old))
                self._background.add(task)
                task.add_done_callback(self._background.discard)
            return digest

    async def run(self, digest: str, signature: str, inputs: dict[str, np.ndarray]):
        """One signature of that export: arrays in, arrays out."""
        if digest not in self._servers:
            await self.load()
        if digest not in self._servers:
            raise StaleError(f"{self.component} was exported again.")
        (servable,) = self._servers[digest].models[self.component].values()

        return await self._run(servable.run, signature, inputs)

    async def answer(self, method: str, request: bytes) -> tuple[int, bytes | str]:
        """A serialized request for a method of `ModelServer`: gRPC's code and the answer."""
        from sd_tf.serving.predict import serialized

        call = self._run if method == "predict" else asyncio.to_thread
        return await call(serialized, self._newest, method, request)

    async def rest(self, method: str, path: str, body: bytes) -> tuple[int, str]:
        from sd_tf.serving.rest import rest

        call = self._run if method == "POST" else asyncio.to_thread
        return await call(rest, self._newest, method, path, body)

    async def ready(self) -> str:
        return self.component

    @property
    def _newest(self):
        return self._servers[next(reversed(self._servers))]

    async def _run(self, work, *arguments):
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _load(self) -> str:
        from sd_tf.compile_cache import publish
        from sd_tf.serving.predict import ModelServer

        digest = export_digest(self.folder)
        server = ModelServer(self.folder, [self.component])
        self._warm_up(server)
        publish()
        if export_digest(self.folder) != digest:
            raise StaleError(f"{self.folder} changed while it was loaded.")
        self._servers = {**self._servers, digest: server}
        return digest

    def _warm_up(self, server) -> None:
        """Compile before anybody waits for it."""
        from sd_tf.serving.tf_serving import warmup

        (servable,) = server.models[self.component].values()
        known = [name for name in servable.signature_defs if servable.signature(name) is not None]
        names = warmup.wanted(sorted(known), self.jit_compile)
        if not self.warm_up_all and self.component in WALKED:
            twins = {name.removeprefix(warmup.signatures.PLAIN): name for name in names}
            names = [twins[name] for name in WALKED[self.component] if name in twins]
        manifest = Manifest.read(self.folder)
        for request in warmup.requests(
            servable.signature_defs, names, self.component, self.folder, manifest
        ):
            server.predict(request)

    async def _forget(self, old: list[str]) -> None:
        await asyncio.sleep(KEEP_OLD)
        for digest in old:
            if digest != next(reversed(self._servers)):
                self._servers.pop(digest, None)


def export_digest(folder: Path) -> str:
    """What tells an export from another one in the same place."""
    return file_hash(folder / FILE_NAME)
