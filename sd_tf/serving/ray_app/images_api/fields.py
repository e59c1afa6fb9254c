"""The fields of a request to the images API: the API's own, and those of a call."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from sd_tf.runtime.call import Call
from sd_tf.runtime.parameters import MOST_CHARACTERS
from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.body import DELIVERY, field_of
from sd_tf.serving.ray_app.images_api.files import BEST

MOST_PICTURES = 10  # of one request
MOST_PARTIAL = 3
LONGEST_TEXT = 200  # characters of the API's own texts, the prompt aside
# Parameters of a call that the API has a field of its own for.
OWN = ("prompt", "image", "mask", "height", "width")
IGNORED = "accepted and ignored"


def _field(description: str, default: Any = None, **known) -> Any:
    return Field(default, description=description, **known)


class Request(BaseModel):
    """The fields that the API has for generations and for edits alike."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(description="what the picture shows", max_length=MOST_CHARACTERS)
    model: str | None = _field("the served model's id (default: that model)")
    n: int | None = _field("number of pictures, 1 to 10", 1, ge=1, le=MOST_PICTURES)
    size: str | None = _field("WIDTHxHEIGHT, a size of the export, or auto: its first", "auto")
    response_format: Literal["b64_json", "url"] | None = _field("b64_json alone", "b64_json")
    output_format: Literal["png", "jpeg", "webp"] | None = _field("png, jpeg or webp", "png")
    output_compression: int | None = _field(
        "quality of a jpeg or webp, 0 to 100", BEST, ge=0, le=BEST
    )
    background: Literal["auto", "opaque", "transparent"] | None = _field("auto or opaque", "auto")
    stream: bool | None = _field("send events, each picture as soon as it is made", False)
    partial_images: int | None = _field(
        "unfinished pictures, 0 to 3, sent on the way in a stream", 0, ge=0, le=MOST_PARTIAL
    )
    quality: str | None = _field(f"{IGNORED}: give num_steps", max_length=LONGEST_TEXT)
    style: str | None = _field(f"{IGNORED}: the prompt says it", max_length=LONGEST_TEXT)
    complexity: str | None = _field(IGNORED, max_length=LONGEST_TEXT)
    moderation: str | None = _field(f"{IGNORED}: there is none", max_length=LONGEST_TEXT)
    user: str | None = _field(IGNORED, max_length=LONGEST_TEXT)
    safety_identifier: str | None = _field(IGNORED, max_length=LONGEST_TEXT)


CALL_FIELDS = {
    name: field_of(known)
    for name, known in Call.parameters().items()
    if name not in OWN and not known.in_python_only
}
# Those of them that are files, which a form may also have as texts in base64.
ENCODED = tuple(name for name in CALL_FIELDS if Call.parameters()[name].is_file)
MORE = {**CALL_FIELDS, "timeout": field_of(DELIVERY["timeout"])}

Generation = create_model("Generation", __base__=Request, __module__=__name__, **MORE)


def _file(description: str) -> dict[str, Any]:
    described = {"type": "string", "format": "binary"}
    return {"description": description, "json_schema_extra": described}


Edit = create_model(
    "Edit",
    __base__=Request,
    __module__=__name__,
    image=(bytes, Field(**_file("the picture: a file in PNG, JPEG, WebP or AVIF"))),
    mask=(
        bytes | None,
        Field(None, **_file("where to paint: a PNG of the picture's size with alpha 0 there")),
    ),
    input_fidelity=(
        str | None,
        _field(f"{IGNORED}: give strength or image_guidance_scale", max_length=LONGEST_TEXT),
    ),
    **MORE,
)


def check_fields(asked: Request) -> None:
    """Refuse what the API offers, and this server does not."""
    if asked.response_format == "url":
        raise RefusedError(
            422,
            "response_format is b64_json: this server keeps no pictures, so they have no URLs.",
            "response_format",
        )
    if asked.background == "transparent":
        raise RefusedError(
            422, "background is auto or opaque: the pictures have no alpha channel.", "background"
        )
    if asked.output_format in (None, "png") and asked.output_compression not in (None, BEST):
        raise RefusedError(
            422,
            f"output_compression is for jpeg and webp: PNG loses nothing. Received: "
            f"{asked.output_compression}",
            "output_compression",
        )
    if asked.partial_images and not asked.stream:
        raise RefusedError(422, "partial_images goes with stream: true.", "partial_images")
