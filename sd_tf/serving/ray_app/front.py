"""What clients talk to: pictures from prompts, the page, and TensorFlow Serving's API."""

import asyncio
import os
import re
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from fastapi import Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from ray import serve

from sd_tf.manifest import Manifest
from sd_tf.request import DEFAULT_IMAGE_GUIDANCE, DEFAULT_STRENGTH
from sd_tf.serving.ray_app.drawing import Drawing
from sd_tf.serving.ray_app.http import WEB, event_lines, make_app, read_body
from sd_tf.serving.ray_app.remote import LOST, ask
from sd_tf.serving.ray_app.settings import Settings
from sd_tf.serving.ray_app.wanted import RefusedError, Wanted

GENERATE_BODY = 24 << 20  # bytes: pictures come in it
READY_WITHIN = 2.0  # seconds
LONGEST_DETAILS = 4000  # characters of a gRPC error: it goes into a header
MODEL = re.compile(r"/v1/models/([^/:]+)")


def _use_of_image(manifest: Manifest) -> str | None:
    """What a picture that comes with the prompt is for; None: nothing."""
    if "image_encoder" not in manifest.components:
        return None
    return {"none": "start", "image": "edit", "mask_and_image": "paint"}[manifest.latent_inputs]


app = make_app()  # Ray copies it where the class is decorated: what routes call stands above


@serve.ingress(app)
class Front:
    def __init__(self, settings: Settings, models: dict[str, Any]):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        from sd_tf.serving.predict import ModelServer

        self.settings, self.models = settings, models
        self.nobody = ModelServer(settings.export_dir, components=[])  # for unknown models
        self.drawing = Drawing(settings, models)
        self.calls = 0  # of TensorFlow Serving's API, in flight

    def check_health(self) -> None:
        """Asked by Ray, which replaces a front that raises."""
        self.drawing.check_health()

    # The page

    @app.get("/")
    async def page(self) -> Response:
        return FileResponse(WEB / "index.html")

    @app.get("/about")
    async def about(self) -> Response:
        manifest, settings = self.drawing.served.manifest, self.settings
        most_steps = {
            name: max(number for number, count in enumerate(calls, start=1) if count)
            for name, calls in manifest.calls.items()
        }
        return JSONResponse(
            {
                "family": manifest.family,
                "checkpoint": manifest.checkpoint,
                "export": self.drawing.served.digest,
                "width": manifest.width,
                "height": manifest.height,
                "batch_size": manifest.batch_size,
                "max_steps": manifest.max_steps,
                "schedulers": most_steps,
                "default_scheduler": manifest.default_sampler,
                "guidance": manifest.guidance == "classifier_free",
                "image": _use_of_image(manifest),
                "defaults": {
                    "num_steps": self._num_steps(manifest),
                    "guidance_scale": settings.guidance_scale,
                    "strength": DEFAULT_STRENGTH.get(manifest.latent_inputs),
                    "image_guidance_scale": DEFAULT_IMAGE_GUIDANCE,
                },
                "max_count": settings.max_count,
                "examples": settings.examples,
            }
        )

    @app.get("/health")
    async def health(self) -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready(self) -> Response:
        """200 when every model answers."""
        asked = [ask(handle, "ready") for handle in self.models.values()]
        try:
            async with asyncio.timeout(READY_WITHIN):
                ready = await asyncio.gather(*asked)
        except (TimeoutError, *LOST) as error:
            return JSONResponse({"status": f"not ready: {error!r}"}, 503)
        return JSONResponse({"status": "ready", "models": ready})

    # Pictures

    @app.post("/generate")
    async def generate(self, request: Request) -> Response:
        manifest = self.drawing.served.manifest
        wanted = Wanted.read(await read_body(request, GENERATE_BODY))
        wanted = wanted.with_defaults(self._num_steps(manifest), self.settings.guidance_scale)
        streams = "text/event-stream" in request.headers.get("accept", "")
        most = self.settings.max_count
        jobs = await asyncio.to_thread(wanted.jobs, manifest, most, streams)  # it opens pictures
        await self.drawing.put(jobs)
        timeout = self.settings.timeout if wanted.timeout is None else wanted.timeout
        events = self.drawing.follow(jobs, timeout)
        if streams:
            return StreamingResponse(event_lines(events), media_type="text/event-stream")
        images = []
        try:
            async for name, content in events:
                if name == "error":
                    raise RefusedError(content["status"], content["error"])
                if name == "image":
                    images.append(content)
                if name == "done":
                    images.sort(key=lambda image: image["index"])
                    return JSONResponse({"images": images, **content})
        finally:
            await events.aclose()
        raise AssertionError("a call ends in done or in an error")

    def _num_steps(self, manifest: Manifest) -> int:
        return min(self.settings.num_steps, manifest.max_steps)

    # TensorFlow Serving's API

    @app.api_route("/v1/{path:path}", methods=["GET", "POST"])
    async def rest(self, request: Request) -> Response:
        from sd_tf.serving.rest import rest

        place = request.scope["raw_path"].decode("latin-1")
        body = await read_body(request, self.settings.max_body)
        found = MODEL.match(place)
        handle = self.models.get(unquote(found[1])) if found else None
        if handle is None:
            status, text = rest(self.nobody, request.method, place, body)
        else:
            with self._counted():
                try:
                    status, text = await ask(handle, "rest", request.method, place, body)
                except LOST as error:
                    raise RefusedError(503, "The model is not there at the moment.") from error
        return Response(text, status, media_type="application/json")

    async def Predict(self, request, grpc_context):  # noqa: N802, the service's name
        return await self._grpc("predict", request, grpc_context)

    async def GetModelMetadata(self, request, grpc_context):  # noqa: N802
        return await self._grpc("metadata", request, grpc_context)

    async def GetModelStatus(self, request, grpc_context):  # noqa: N802
        return await self._grpc("status", request, grpc_context)

    async def _grpc(self, method: str, request, context):
        import grpc

        from sd_tf.serving.predict import RESPONSES, serialized

        handle = self.models.get(request.model_spec.name)
        content = request.SerializeToString()
        try:
            if handle is None:
                code, answer = serialized(self.nobody, method, content)
            else:
                with self._counted():
                    code, answer = await ask(handle, "answer", method, content)
        except RefusedError as error:
            code, answer = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], error.message
        except LOST:
            code, answer = grpc.StatusCode.UNAVAILABLE.value[0], "The model is not there."
        if code:
            known = {status.value[0]: status for status in grpc.StatusCode}
            context.set_code(known[code])
            context.set_details(answer[:LONGEST_DETAILS])
            return RESPONSES[method]()
        return RESPONSES[method].FromString(answer)

    @contextmanager
    def _counted(self):
        """One call in flight; refused where there are too many."""
        most = self.settings.max_queue
        if self.calls >= most:
            raise RefusedError(429, f"{most} calls are in flight. Try again later.")
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
