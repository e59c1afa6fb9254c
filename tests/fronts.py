"""A front with its models in the test's process: real HTTP and gRPC servers, no Ray."""

import asyncio
import functools
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

from sd_tf.bench.application import free_ports
from sd_tf.serving.ray_app.application import with_scales
from sd_tf.serving.ray_app.front import Front
from sd_tf.serving.ray_app.models import ModelReplica
from sd_tf.serving.ray_app.settings import Settings
from tests.exports import micro_export

COMPONENTS = ("text_encoder", "diffusion_model", "decoder")


class Handle:
    """Calls one replica as a deployment's handle would."""

    def __init__(self, replica: ModelReplica):
        self._replica = replica

    def __getattr__(self, method: str):
        return SimpleNamespace(remote=getattr(self._replica, method))


@functools.cache
def handles() -> dict[str, Handle]:
    """Of the micro export's models, without XLA; once for the process."""
    return {
        name: Handle(ModelReplica(str(micro_export()), name, False, None, None, False, 60.0))
        for name in COMPONENTS
    }


@dataclass(frozen=True)
class RunningFront:
    front: Front
    http: str  # host:port
    grpc: str  # host:port


@contextmanager
def running_front(**settings):
    """Yield a front with these settings."""
    http, grpc = free_ports(2)
    chosen = Settings(
        str(micro_export()), http_port=http, grpc_port=grpc, jit_compile=False, **settings
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Front:
        front = object.__new__(Front)
        await front.__init__(with_scales(chosen, list(COMPONENTS)), handles())
        return front

    async def stop(front: Front) -> None:
        await front.__del__()
        for task in front.drawing.tasks:
            task.cancel()

    def run(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    try:
        front = run(start())
        yield RunningFront(front, f"127.0.0.1:{http}", f"127.0.0.1:{grpc}")
        run(stop(front))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
