"""A front with its models in the test's process: real HTTP and gRPC servers, no Ray."""

import asyncio
import base64
import functools
import http.client
import io
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from PIL import Image

from sd_tf.bench.application import free_ports
from sd_tf.runtime.manifest import Manifest
from sd_tf.serving.ray_app.application import with_scales
from sd_tf.serving.ray_app.front import Front
from sd_tf.serving.ray_app.models import ModelReplica
from sd_tf.serving.ray_app.settings import Settings
from tests.exports import micro_export


class Handle:
    """Calls one replica as a deployment's handle would."""

    def __init__(self, replica: ModelReplica):
        self._replica = replica

    def __getattr__(self, method: str):
        return SimpleNamespace(remote=getattr(self._replica, method))

    def broadcast(self, method: str, *arguments):
        async def results(return_exceptions: bool = False) -> list:
            return [await getattr(self._replica, method)(*arguments)]

        return SimpleNamespace(results_async=results)


@functools.cache
def handles(folder: Path) -> dict[str, Handle]:
    """Of an export's models, without XLA; once for the process."""
    return {
        name: Handle(ModelReplica(str(folder), name, False, None, None, False, 60.0, "f"))
        for name in Manifest.read(folder).parts
    }


@dataclass(frozen=True)
class RunningFront:
    front: Front
    http: str  # host:port
    grpc: str  # host:port


@contextmanager
def running_front(folder: Path | None = None, **settings):
    """Yield a front with these settings, for the export in `folder` or the micro export."""
    folder = micro_export() if folder is None else folder
    http, grpc = free_ports(2)
    chosen = Settings(str(folder), http_port=http, grpc_port=grpc, jit_compile=False, **settings)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Front:
        front, models = object.__new__(Front), handles(folder)
        await front.__init__(with_scales(chosen, list(models)), models)
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


def ask(front: RunningFront, method: str, path: str, **body):
    """Send a request with a JSON body; return the status and the answer's content."""
    connection = http.client.HTTPConnection(front.http, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request(method, path, json.dumps(body) if body else None, headers)
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content


def generated(front: RunningFront, prompt: str, **body):
    """Ask for one picture; return it, and what the answer says of it."""
    status, content = ask(front, "POST", "/generate", prompt=prompt, **body)
    assert status == 200, content
    [image] = content["images"]
    file = io.BytesIO(base64.b64decode(image["png"]))
    return np.asarray(Image.open(file)), image


def events(answer):
    """(name, content) of a stream, as they come."""
    name = None
    for line in answer:
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def previews(front: RunningFront, prompt: str, **body) -> list[np.ndarray]:
    """Ask for a picture as a stream; return its previews."""
    connection = http.client.HTTPConnection(front.http, timeout=60)
    headers = {"content-type": "application/json", "accept": "text/event-stream"}
    connection.request("POST", "/generate", json.dumps({"prompt": prompt, **body}), headers)
    files = [
        content["png"] for name, content in events(connection.getresponse()) if name == "preview"
    ]
    connection.close()
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(file)))) for file in files]
