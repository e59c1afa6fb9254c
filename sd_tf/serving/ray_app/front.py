"""The deployment that clients call: pictures, the page, and TensorFlow Serving's API."""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse

from sd_tf.errors import SdTfError
from sd_tf.runtime.capabilities import use_of_picture
from sd_tf.runtime.manifest import VERSION_FOLDER
from sd_tf.serving.devices import see_reserved_gpus
from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.access import Access
from sd_tf.serving.ray_app.admission import BODIES, Room, Slots
from sd_tf.serving.ray_app.batching import Job
from sd_tf.serving.ray_app.body import Body, GenerateRequest, form_fields
from sd_tf.serving.ray_app.drawing import Drawing
from sd_tf.serving.ray_app.http import (
    BODY_WITHIN,
    WEB,
    body_size,
    collected,
    event_lines,
    make_app,
    read_body,
    unless_gone,
)
from sd_tf.serving.ray_app.images_api.api import ImagesApi
from sd_tf.serving.ray_app.listen import STOP_WITHIN, HttpServer
from sd_tf.serving.ray_app.predictions import Predictions, start_grpc
from sd_tf.serving.ray_app.remote import LOST, ask
from sd_tf.serving.ray_app.settings import Settings

GENERATE_BODY = 24 << 20  # bytes; a body may hold pictures
READERS = 2  # bodies of POST /generate that are parsed, and their pictures decoded, at once
READY_WITHIN = 2.0  # seconds

log = logging.getLogger("ray.serve")

GENERATE = {
    "description": "Without `Accept: text/event-stream` the answer is JSON: `images`, each with "
    "`index`, `seed`, `png` (base64) and its `parameters`, and `seconds`. With it, events come as "
    "they happen: accepted, progress, preview, image, done or error. 422 says what is wrong with "
    "the body, 429 that too many pictures are waiting.",
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": Body.model_json_schema()}},
    },
}


class Front:
    """Listens for HTTP and gRPC itself, so that a slow or busy client is felt here.

    Ray's proxies would read bodies and keep answers without limit, and listen for gRPC on all
    interfaces.
    """

    async def __init__(self, settings: Settings, models: dict[str, Any]):
        see_reserved_gpus()
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        from sd_tf.serving.tf_serving.predict import ModelServer

        self.settings, self.models = settings, models
        self.http = self.grpc = None  # until it listens
        self.drawing = Drawing(settings, models)
        await self.drawing.begin()
        self.readers = ThreadPoolExecutor(READERS)
        self.arriving = Slots(settings.max_queue, "pictures are waiting or arriving")
        most = await asyncio.to_thread(self._most_body)
        self.room = Room(BODIES * max(most, GENERATE_BODY), BODY_WITHIN)
        access = Access(settings.host, settings.allow_origin, settings.api_key_hash)
        self.predictions = Predictions(
            ModelServer({}),
            models,
            lambda: self.drawing.served.digest,
            access,
            Slots(settings.max_queue),
            self.room,
            most,
        )
        self.images = ImagesApi(self.drawing, settings, self._admit, self.predictions.rest)
        self.http = HttpServer(self._app(access), settings.host, settings.http_port)
        self.grpc = await start_grpc(self.predictions, settings.host, settings.grpc_port)

    def _most_body(self) -> int:
        """Return how many bytes a TensorFlow Serving call can have."""
        from sd_tf.serving.tf_serving import signatures

        if self.settings.max_body is not None:
            return self.settings.most_body(0)
        folder, manifest = Path(self.settings.export_dir), self.drawing.served.manifest
        batch_size = manifest.shapes.largest_batch
        try:
            needed = max(
                signatures.largest_call(signatures.read(folder / name / VERSION_FOLDER), batch_size)
                for name in manifest.parts
            )
        except (SdTfError, OSError) as error:  # the replicas serve another export than is there
            log.warning("a call can have the usual size at most: %s", error)
            needed = 0
        return self.settings.most_body(needed)

    async def __del__(self) -> None:
        """Let calls in progress finish; Ray calls this before it ends the process."""
        if self.grpc is not None:
            await asyncio.gather(self.http.stop(), self.grpc.stop(STOP_WITHIN))

    def check_health(self) -> None:
        """Raise if a task has ended; Ray calls this, and replaces a front that raises."""
        self.drawing.check_health()
        if self.http.task.done():
            raise RuntimeError(f"the HTTP server ended: {self.http.task.exception()!r}")

    def node(self) -> str:
        """Return the address of the node that this front runs on."""
        return ray.util.get_node_ip_address()

    def _app(self, access: Access) -> FastAPI:
        app = make_app(access, self.images.error_answer)
        for path, answer, summary in (
            ("/", self.page, None),
            ("/docs", self.docs, None),
            ("/about", self.about, "The model, and the fields of a body with their defaults"),
            ("/health", self.health, "Whether the server answers"),
            ("/ready", self.ready, "Whether every model answers: 200, else 503"),
        ):
            app.get(path, summary=summary, include_in_schema=summary is not None)(answer)
        app.post("/generate", summary="Make pictures", openapi_extra=GENERATE)(self.generate)
        self.images.add_routes(app)
        api = app.api_route("/v1/{path:path}", methods=["GET", "POST"], include_in_schema=False)
        api(self.predictions.rest)
        return app

    # The page

    async def page(self) -> Response:
        return FileResponse(WEB / "index.html")

    async def docs(self) -> Response:
        return FileResponse(WEB / "docs.html")

    async def about(self) -> Response:
        manifest, settings = self.drawing.served.manifest, self.settings
        shapes = manifest.shapes
        most_steps = {name: scheduler.most_steps for name, scheduler in manifest.schedulers.items()}
        return JSONResponse(
            {
                "family": manifest.family,
                "checkpoint": manifest.checkpoint,
                "export": self.drawing.served.digest,
                "version": self.drawing.served.version,
                "width": shapes.first.width,
                "height": shapes.first.height,
                "batch_size": shapes.first.batch_size,
                "sizes": shapes.sizes,
                "batch_sizes": shapes.batch_sizes,
                "schedulers": most_steps,
                "use_of_picture": use_of_picture(manifest),
                "adapters": {name: one.file for name, one in manifest.adapters.loaded.items()},
                "fields": form_fields(
                    manifest, settings.call_defaults(manifest), settings.max_count
                ),
                "examples": settings.examples,
            }
        )

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        asked = [ask(handle, "ready") for handle in self.models.values()]
        try:
            async with asyncio.timeout(READY_WITHIN):
                ready = await asyncio.gather(*asked)
        except (TimeoutError, *LOST) as error:
            return JSONResponse({"status": f"not ready: {error!r}"}, 503)
        return JSONResponse({"status": "ready", "models": ready})

    # Pictures

    async def generate(self, request: Request) -> Response:
        streams = "text/event-stream" in request.headers.get("accept", "")
        jobs, timeout = await self._read(request, streams)
        events = self.drawing.follow(jobs, timeout)
        if streams:
            return StreamingResponse(event_lines(events), media_type="text/event-stream")
        images, done = await unless_gone(request, collected(events))
        return JSONResponse({"images": images, **done})

    async def _read(self, request: Request, streams: bool) -> tuple[list[Job], float]:
        """Read a body and queue its jobs; also return the seconds that they may take."""
        served, settings = self.drawing.served, self.settings

        def read(body: bytes) -> tuple[list[Job], float | None]:
            wanted = GenerateRequest.read(body, settings.call_defaults(served.manifest))
            jobs = wanted.jobs(served.manifest, served.digest, settings.max_count, streams)
            return jobs, wanted.delivery.timeout

        jobs, timeout = await self._admit(request, read)
        return jobs, settings.timeout if timeout is None else timeout

    async def _admit(
        self, request: Request, read: Callable[[bytes], tuple[list[Job], Any]]
    ) -> tuple[list[Job], Any]:
        """Have a body read once there is room for it, and queue the jobs that it asks for.

        Returns what `read` returned, which a thread calls: the jobs and what else is to be known.
        """
        jobs: list[Job] = []
        try:
            with self.arriving.taken(others=len(self.drawing.batcher)):
                async with self.room.held(body_size(request, GENERATE_BODY)):
                    body = await read_body(request, GENERATE_BODY)
                    loop = asyncio.get_running_loop()
                    jobs, more = await loop.run_in_executor(self.readers, read, body)
                    await self.drawing.put(jobs)
        except RefusedError as error:
            if error.status == 429:  # without a body, the number of pictures is not known
                self.drawing.pictures.inc(len(jobs) or 1, {"outcome": "refused"})
            raise
        return jobs, more
