"""The chain's models as Ray deployments."""

import asyncio
import random

import numpy as np
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from sd_tf.chain import Stages

ATTEMPTS = 6
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds, before random shortening
LOST = (RayActorError, DeploymentUnavailableError)


async def ask(handle, method: str, *arguments):
    """A call of a replica; if it dies, of another one: models keep nothing between two calls."""
    for attempt in range(ATTEMPTS):
        try:
            return await getattr(handle, method).remote(*arguments)
        except LOST:
            if attempt + 1 == ATTEMPTS:
                raise
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
    raise AssertionError("the last attempt returns or raises")


class Replicas(Stages):
    """Called from a thread; the deployments' handles live in the event loop."""

    def __init__(self, manifest, jit_compile: bool, handles, digest: str, loop):
        super().__init__(manifest, jit_compile)
        self._handles, self._digest, self._loop = handles, digest, loop

    def call(self, component: str, endpoint: str, **inputs) -> dict[str, np.ndarray]:
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        question = ask(
            self._handles[component],
            "run",
            self._digest,
            self.signature(component, endpoint),
            arrays,
        )
        return asyncio.run_coroutine_threadsafe(question, self._loop).result()
