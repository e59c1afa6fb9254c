"""A replica that serves one component of an export, to the front and TensorFlow Serving's API."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from sd_tf.errors import SdTfError
from sd_tf.runtime.manifest import FILE_NAME, Manifest
from sd_tf.runtime.runner import CALLED, PLAIN
from sd_tf.runtime.shapes import Shape
from sd_tf.serving.devices import see_reserved_gpus
from sd_tf.serving.ray_app.held import (
    HeldExports,
    check_state,
    export_digest,
    state_of,
    sweep,
)

LOOP = "diffusion_model"  # has signatures that take long to compile and that only clients call
LONGEST_RUN = 3600.0  # seconds that a device may work at one call: the most of a call's `timeout`

log = logging.getLogger("ray.serve")


class RestartError(SdTfError):
    """An export that the application cannot serve before it is started again."""


class ModelReplica:
    """Loads the component, compiles the signatures that will be called, and answers calls.

    Every call names the export that it is for by its digest, so that the calls which make one
    picture use one export, while another is loaded beside it.
    """

    def __init__(
        self,
        export_dir: str,
        component: str,
        jit_compile: bool,
        compile_cache: str | None,
        warm_up: Sequence[Shape] | None,
        warm_up_all: bool,
        keep_old: float,
        application: str,
    ):
        """Load the export that the application serves, or is to serve.

        Args:
            application: see `HeldExports`.
        """
        self._loaded: dict[str, Any] = {}  # digest of an export → its Servable
        see_reserved_gpus()
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if compile_cache is not None:
            from sd_tf.runtime.compile_cache import set_compile_cache

            set_compile_cache(compile_cache)
        self.folder, self.component = Path(export_dir), component
        self.jit_compile, self.keep_old = jit_compile, keep_old
        self.warm_up, self.warm_up_all = warm_up, warm_up_all
        sweep(self.folder)
        self._held = HeldExports(self.folder, application)
        self._descriptions: dict[str, dict[str, bytes]] = {}  # digest → see `description_of`
        self._releases: dict[str, asyncio.TimerHandle] = {}  # of exports that are served no more
        self._loading = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1)  # a device does one thing at a time
        self._begun: float | None = None  # when that thing was begun
        self._load_first()

    def __del__(self) -> None:
        """Let go of what is held; Ray calls this before it ends the process."""
        for digest in self._loaded:
            self._held.release(digest)

    def _load_first(self) -> None:
        """Load the export that is served: the folder may have one that cannot be, or is not yet."""
        if (digest := self._held.served()) is not None:
            try:
                self._loaded[digest] = self._load(digest)
                return
            except Exception as error:  # of any kind: its files may be damaged, too
                log.warning("the export that others hold cannot be loaded: %r", error)
        digest = export_digest(self.folder)
        self._loaded[digest] = self._load(digest)

    async def load(self, digest: str) -> None:
        """Load and warm up the export with this digest, beside those that are served."""
        async with self._loading:
            self._stay(digest)
            if digest not in self._loaded:  # in a thread of its own, so that calls go on
                self._loaded[digest] = await asyncio.to_thread(self._load, digest)

    async def keep(self, digest: str) -> None:
        """Release all but this export, which is served, when `keep_old` seconds have passed."""
        if digest not in self._loaded:
            return
        self._held.mark(digest)
        self._stay(digest)
        for old in self._loaded.keys() - {digest} - self._releases.keys():
            self._release_later(old)

    async def run(self, digest: str, signature: str, inputs: dict[str, np.ndarray]):
        """Run one signature of the export with this digest on arrays; return arrays."""
        await self._need(digest)
        self._prolong(digest)
        return await self._run(self._loaded[digest].run, signature, inputs)

    async def answer(self, digest: str, method: str, request: bytes) -> tuple[int, bytes | str]:
        """Answer a serialized request for a method of `ModelServer`, with gRPC's code.

        A request that names no version is for the export with this digest.
        """
        from tensorflow.errors import UNAVAILABLE

        from sd_tf.serving.tf_serving.predict import serialized

        try:
            server = await self._server(digest)
        except SdTfError as error:
            return UNAVAILABLE, str(error)
        call = self._run if method == "predict" else asyncio.to_thread
        return await call(serialized, server, method, request)

    async def rest(self, digest: str, method: str, path: str, body: bytes) -> tuple[int, str]:
        """Answer a request over REST, as `answer` does over gRPC."""
        from sd_tf.serving.tf_serving.rest import rest

        try:
            server = await self._server(digest)
        except SdTfError as error:
            return 503, json.dumps({"error": str(error)})
        call = self._run if method == "POST" else asyncio.to_thread
        return await call(rest, server, method, path, body)

    def check_health(self) -> None:
        """Raise if the device hangs; Ray calls this, and replaces a replica that raises."""
        begun = self._begun
        if begun is not None and time.monotonic() - begun > LONGEST_RUN:
            raise RuntimeError(f"A call has run for more than {LONGEST_RUN:g} seconds.")

    async def ready(self) -> str:
        return self.component

    async def served(self) -> list[str]:
        """Return the digests of the exports that are loaded to stay."""
        return [digest for digest in self._loaded if digest not in self._releases]

    async def description(self, digest: str) -> dict[str, bytes]:
        """Return what a front needs of an export, which the folder may no longer hold."""
        await self._need(digest)
        return self._descriptions[digest]

    async def _need(self, digest: str) -> None:
        """Load an export that is served, if this replica was not there when the others did."""
        if digest not in self._loaded:
            await self.load(digest)

    async def _server(self, digest: str):
        from sd_tf.serving.tf_serving.predict import ModelServer

        await self._need(digest)
        versions = {version_of(known): servable for known, servable in self._loaded.items()}
        return ModelServer({self.component: versions}, latest=version_of(digest))

    async def _run(self, work, *arguments):
        def timed():
            self._begun = time.monotonic()
            try:
                return work(*arguments)
            finally:
                self._begun = None

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)

    def _load(self, digest: str):
        folder = self._held.hold(digest)
        try:
            return self._read(folder, digest)
        except BaseException:
            self._held.release(digest)
            raise

    def _read(self, folder: Path, digest: str):
        from sd_tf.runtime.compile_cache import publish
        from sd_tf.runtime.graph_kernels import FixedWeightsError
        from sd_tf.serving.tf_serving.predict import load

        before = state_of(folder, digest)
        description = description_of(folder)
        try:
            servable = load(folder, [self.component], fixed_weights=True)[self.component]
        except FixedWeightsError as error:
            if not self._loaded:  # the environment says so, and not an export before
                raise
            raise RestartError(
                "It has places for adapters, which change weights, and an export before it had the "
                "models' processes take all weights for fixed. Start the application again."
            ) from error
        self._warm_up(folder, servable)
        publish()
        check_state(folder, digest, before)
        self._descriptions[digest] = description
        return servable

    def _warm_up(self, folder: Path, servable) -> None:
        """Run the signatures once, so that no caller waits for compilation."""
        from sd_tf.serving.tf_serving import warmup
        from sd_tf.serving.tf_serving.predict import ModelServer

        manifest = Manifest.read(folder)
        known = [name for name in servable.signature_defs if servable.signature(name) is not None]
        names = [
            name
            for name in warmup.wanted(sorted(known), self.jit_compile)
            if self._is_warmed_up(*manifest.shapes.endpoint_of(name))
        ]
        server = ModelServer({self.component: {1: servable}})
        for request in warmup.requests(
            servable.signature_defs, names, self.component, folder, manifest
        ):
            server.predict(request)

    def _is_warmed_up(self, endpoint: str, shape: Shape) -> bool:
        if self.warm_up is not None and shape not in self.warm_up:
            return False
        is_called = endpoint.removeprefix(PLAIN) in CALLED[self.component]
        return self.warm_up_all or self.component != LOOP or is_called

    def _prolong(self, digest: str) -> None:
        """Release an export that is still called `keep_old` seconds after this call."""
        if digest in self._releases:
            self._stay(digest)
            self._release_later(digest)

    def _release_later(self, digest: str) -> None:
        loop = asyncio.get_running_loop()
        self._releases[digest] = loop.call_later(self.keep_old, self._release, digest)

    def _stay(self, digest: str) -> None:
        """Do not release the export after all."""
        if (release := self._releases.pop(digest, None)) is not None:
            release.cancel()

    def _release(self, digest: str) -> None:
        del self._releases[digest], self._loaded[digest], self._descriptions[digest]
        self._held.release(digest)


def description_of(folder: Path) -> dict[str, bytes]:
    """Return the files of an export that are no models: its manifest and its tokenizers."""
    manifest = Manifest.read(folder)
    places = [folder / place for place in manifest.tokenizers.values()]
    files = [path for place in places for path in sorted(place.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in (folder / FILE_NAME, *files)
    }


def version_of(digest: str) -> int:
    """Return the version under which TensorFlow Serving's API offers an export.

    It follows from the export alone, so that all replicas agree, and JSON readers that know only
    double precision keep it exactly.
    """
    return int(digest[:13], 16)
