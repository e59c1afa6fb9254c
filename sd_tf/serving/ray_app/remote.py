"""Run models that are Ray deployments."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from sd_tf.runtime import retry
from sd_tf.runtime.runner import Runner
from sd_tf.runtime.shapes import Shape

RETRIES = 5
LOST = (RayActorError, DeploymentUnavailableError)


async def ask(handle, method: str, *arguments):
    """Call a replica; if it dies, call another, as models keep nothing between calls."""
    return await _unless_lost(lambda: getattr(handle, method).remote(*arguments))


async def ask_all(handle, method: str, *arguments) -> list:
    """Call every replica; if one dies, call all again, so the method must be safe to repeat."""
    return await _unless_lost(lambda: handle.broadcast(method, *arguments).results_async())


async def _unless_lost(call: Callable[[], Awaitable]) -> Any:
    pauses = retry.pauses(RETRIES)
    while True:
        try:
            return await call()
        except LOST:
            pause = next(pauses, None)
            if pause is None:
                raise
        await asyncio.sleep(pause)


class RayRunner(Runner):
    """Runs models on Ray. It is called from threads; the handles live in the event loop."""

    def __init__(self, manifest, jit_compile: bool, handles, digest: str, loop):
        super().__init__(manifest, jit_compile)
        self._handles, self._digest, self._loop = handles, digest, loop

    def call(self, component: str, endpoint: str, shape: Shape, **inputs) -> dict[str, np.ndarray]:
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        question = ask(
            self._handles[component],
            "run",
            self._digest,
            self.signature(component, endpoint, shape),
            arrays,
        )
        return asyncio.run_coroutine_threadsafe(question, self._loop).result()
