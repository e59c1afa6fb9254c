"""Read a request to the images API into the jobs that draw its pictures."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image
from pydantic import ValidationError

from sd_tf.runtime.call import Call
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.needed_pictures import needed_pictures
from sd_tf.runtime.parameter import CallError
from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.batching import Job
from sd_tf.serving.ray_app.body import (
    DELIVERY,
    Delivery,
    GenerateRequest,
    check_commas,
    given_values,
    opened,
)
from sd_tf.serving.ray_app.images_api.errors import refusal
from sd_tf.serving.ray_app.images_api.fields import (
    CALL_FIELDS,
    ENCODED,
    MOST_PICTURES,
    Edit,
    Generation,
    Request,
    check_fields,
)
from sd_tf.serving.ray_app.images_api.files import BEST, Format, open_pictures
from sd_tf.serving.ray_app.images_api.form import in_base64, read_form
from sd_tf.serving.ray_app.settings import Settings
from sd_tf.serving.ray_app.takeover import Served

AUTO = "auto"
SHOWN = 60  # characters of a wrong value in a message
GENERATION, EDIT = "image_generation", "image_edit"  # how the names of their events begin


@dataclass(frozen=True)
class Answering:
    """How a request's pictures are answered."""

    kind: str  # GENERATION or EDIT
    format: Format
    size: str  # WIDTHxHEIGHT
    streams: bool
    timeout: float
    text_tokens: int  # of the prompts
    image_tokens: int  # of the picture that was sent
    picture_tokens: int  # of a picture that is made


@dataclass(frozen=True)
class Reader:
    """Reads bodies for the export that is served now."""

    served: Served
    settings: Settings

    def generation(self, body: bytes) -> tuple[list[Job], Answering]:
        """Read the JSON of a generation."""
        check_commas(body)
        try:
            asked = Generation.model_validate_json(body)
        except ValidationError as error:
            raise refusal(error, Generation) from error
        self._check(asked)
        for needed in needed_pictures(self.served.manifest):
            raise RefusedError(
                422,
                f"{needed.name} is needed by {needed.needed_by.whose}: send this to "
                f"/v1/images/edits.",
                needed.name,
            )
        return self._read(GENERATION, asked, {})

    def edit(self, body: bytes, content_type: str) -> tuple[list[Job], Answering]:
        """Read the form of an edit."""
        values = read_form(body, content_type)
        for name in ("image", "mask"):
            if isinstance(values.get(name), list):
                values[name] = _only(name, values[name])
        for name in ENCODED:
            if name in values:
                values[name] = in_base64(name, values[name])
        try:  # not strictly: a form has texts alone
            asked = Edit.model_validate(values, strict=False)
        except ValidationError as error:
            raise refusal(error, Edit) from error
        self._check(asked)
        pictures = open_pictures(asked.image, asked.mask, self.served.manifest)
        return self._read(EDIT, asked, pictures)

    def _check(self, asked: Request) -> None:
        check_model(asked.model, self.served.manifest)
        check_fields(asked)

    def _read(
        self, kind: str, asked: Request, pictures: Mapping[str, Image.Image]
    ) -> tuple[list[Job], Answering]:
        manifest, settings = self.served.manifest, self.settings
        most = min(MOST_PICTURES, settings.max_count)
        count = 1 if asked.n is None else asked.n
        if count > most:
            raise RefusedError(422, f"n is a whole number from 1 to {most}. Received: {count}", "n")
        given = given_values(asked)
        height, width = read_size(given.get("size", AUTO), manifest)
        own = {name: value for name, value in given.items() if name in CALL_FIELDS}
        call = {
            **settings.call_defaults(manifest),
            **opened(own, [*pictures.values()]),
            **pictures,
            "prompt": asked.prompt,
        }
        call |= {"height": height, "width": width}
        delivery = Delivery(
            count=count,
            previews=given.get("partial_images", 0),
            timeout=_timeout(given.get("timeout")),
        )
        streams = given.get("stream", False)
        jobs = GenerateRequest(call, delivery).jobs(
            manifest, self.served.digest, settings.max_count, streams
        )
        compression = given.get("output_compression", BEST)
        places = math.prod(manifest.shapes.latent((height, width))[:2])  # of a picture's latent
        return jobs, Answering(
            kind=kind,
            format=Format(given.get("output_format", "png"), compression),
            size=written(height, width),
            streams=streams,
            timeout=settings.timeout if delivery.timeout is None else delivery.timeout,
            text_tokens=sum(map(self.served.chain.count_tokens, _texts(jobs[0].call))),
            image_tokens=places if "image" in pictures else 0,
            picture_tokens=places,
        )


def model_id(manifest: Manifest) -> str:
    """Return the id of the model that an export is: its diffusion model's checkpoint."""
    return manifest.checkpoint["diffusion_model"]["name"]


def check_model(model: str | None, manifest: Manifest) -> None:
    """Refuse a request that names another model."""
    known = model_id(manifest)
    if model not in (None, known):
        raise RefusedError(
            404,
            f"The model {model[:SHOWN]!r} is not served. There is {known!r}.",
            "model",
            "model_not_found",
        )


def read_size(size: str, manifest: Manifest) -> tuple[int, int]:
    """Return the height and the width that a size names; the export's first where it is auto."""
    if size == AUTO:
        return manifest.shapes.sizes[0]
    known = {written(*one): one for one in manifest.shapes.sizes}
    if size not in known:
        raise RefusedError(
            422,
            f"size is WIDTHxHEIGHT, one of {', '.join(known)}, or auto. Received: {size[:SHOWN]!r}",
            "size",
        )
    return known[size]


def written(height: int, width: int) -> str:
    """Write a size as the API has it."""
    return f"{width}x{height}"


def _texts(call: Call) -> list[str]:
    return [text for text in (call.prompt, call.negative_prompt) if text is not None]


def _timeout(seconds: Any) -> float | None:
    try:
        return None if seconds is None else DELIVERY["timeout"].check(seconds)
    except CallError as error:
        raise RefusedError(422, str(error), "timeout") from error


def _only(name: str, files: list[bytes]) -> bytes:
    if len(files) > 1:
        raise RefusedError(422, f"{name} is one file. Received: {len(files)}", name)
    return files[0]
