"""The routes of the images API."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.access import FORM, JSON
from sd_tf.serving.ray_app.batching import Job
from sd_tf.serving.ray_app.drawing import Drawing
from sd_tf.serving.ray_app.http import event_lines, plain_error, unless_gone
from sd_tf.serving.ray_app.images_api.answers import answer, streamed
from sd_tf.serving.ray_app.images_api.errors import error_answer
from sd_tf.serving.ray_app.images_api.fields import Edit, Generation
from sd_tf.serving.ray_app.images_api.reading import Answering, Reader, model_id, written
from sd_tf.serving.ray_app.settings import Settings

IMAGES, MODELS = "/v1/images/", "/v1/models"
GENERATIONS, EDITS = IMAGES + "generations", IMAGES + "edits"

Admit = Callable[
    [Request, Callable[[bytes], tuple[list[Job], Answering]]],
    Awaitable[tuple[list[Job], Answering]],
]


class ImagesApi:
    """Answers clients of OpenAI's images API with pictures of the served export."""

    def __init__(
        self,
        drawing: Drawing,
        settings: Settings,
        admit: Admit,
        otherwise: Callable[[Request], Awaitable[Response]],
    ):
        """Prepare to answer.

        Args:
            admit: reads a request's body once there is room for it, with a function that gives
                the jobs to queue and how to answer them.
            otherwise: answers a request for a model that this API does not know.
        """
        self.drawing, self.settings = drawing, settings
        self.admit, self.otherwise = admit, otherwise
        self.begun = int(time.time())  # the models' date, as an export has none

    def add_routes(self, app: FastAPI) -> None:
        for path, reply, summary, kind, body in (
            (
                GENERATIONS,
                self.generations,
                "Make pictures, as OpenAI's clients ask",
                JSON,
                Generation,
            ),
            (EDITS, self.edits, "Make pictures of a picture, as OpenAI's clients ask", FORM, Edit),
        ):
            content = {kind: {"schema": body.model_json_schema()}}
            described = {"requestBody": {"required": True, "content": content}}
            app.post(path, summary=summary, openapi_extra=described)(reply)
        app.get(MODELS, summary="The served model, as OpenAI's clients ask")(self.models)
        app.get(MODELS + "/{name:path}", include_in_schema=False)(self.model)
        rest = IMAGES + "{rest:path}"
        app.api_route(rest, methods=["GET", "POST"], include_in_schema=False)(self.unknown)

    def error_answer(
        self, path: str, error: RefusedError, headers: Mapping[str, str]
    ) -> JSONResponse:
        """Answer a request for `path` that is refused: on this API's paths, in its shape."""
        name = path.removeprefix(f"{MODELS}/")
        if path == MODELS or path.startswith(IMAGES) or (name != path and self._is_own(name)):
            return error_answer(error, headers)
        return plain_error(path, error, headers)

    async def generations(self, request: Request) -> Response:
        reader = Reader(self.drawing.served, self.settings)
        return await self._answer(request, reader.generation)

    async def edits(self, request: Request) -> Response:
        reader = Reader(self.drawing.served, self.settings)
        kind = request.headers["content-type"]
        return await self._answer(request, lambda body: reader.edit(body, kind))

    async def models(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request, name: str) -> Response:
        """Describe the served model; other names are those of TensorFlow Serving's models."""
        if self._is_own(name):
            return JSONResponse(self._model())
        return await self.otherwise(request)

    async def unknown(self, request: Request) -> Response:
        """Answer for paths and methods that there are not."""
        path = request.scope["path"]
        if path in (GENERATIONS, EDITS):
            raise HTTPException(405, f"{path} takes POST.", {"Allow": "POST"})
        raise HTTPException(404, f"There is no {path[:100]}. There are {GENERATIONS} and {EDITS}.")

    async def _answer(self, request: Request, read) -> Response:
        jobs, how = await self.admit(request, read)
        events = self.drawing.follow(jobs, how.timeout)
        if how.streams:
            lines = event_lines(streamed(events, how))
            return StreamingResponse(lines, media_type="text/event-stream")
        return await unless_gone(request, answer(events, how))

    @property
    def _id(self) -> str:
        return model_id(self.drawing.served.manifest)

    def _is_own(self, name: str) -> bool:
        """Return whether a name is the model's id, and not that of a component as well."""
        return name == self._id and name not in self.drawing.models

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "model",
            "created": self.begun,
            "owned_by": "sd_tf",
            "sizes": [written(*size) for size in self.drawing.served.manifest.shapes.sizes],
        }
