"""Read and check the body of POST /generate: a call's parameters, and how to deliver pictures."""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Annotated, Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from sd_tf.runtime.call import Call
from sd_tf.runtime.kinds import Kind
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.parameter import NONE, Parameter, parameter, parameters_of
from sd_tf.runtime.pictures import PictureError, count_pixels
from sd_tf.runtime.request import read_request
from sd_tf.runtime.shapes import Shapes
from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.batching import Events, Job, Together

MOST_PREVIEWS = 20
MOST_PICTURES = 64  # of a body
MOST_PIXELS = 16 << 20  # of a picture that is sent
MOST_TOGETHER = 64 << 20  # pixels of all pictures of a body
MOST_COUNT = 10_000
LONGEST_TIMEOUT = 3600.0
MOST_COMMAS = 100_000  # of a body; they bound the number of its values before it is parsed
MOST_PROBLEMS, LONGEST_PROBLEM = 10, 400  # of a body that are reported, and characters of each


@dataclass(frozen=True)
class Delivery:
    """The parameters of a body beside the call: how many pictures, and how to deliver them."""

    _: KW_ONLY
    count: int | None = parameter(
        Kind.WHOLE, "Pictures", "pictures for each prompt", default=1, least=1, most=MOST_COUNT
    )
    previews: int | None = parameter(
        Kind.WHOLE,
        "Previews",
        "unfinished pictures, sent on the way in a stream of events",
        default=0,
        least=0,
        most=MOST_PREVIEWS,
        shown_by=NONE,  # the page decides for itself
    )
    timeout: float | None = parameter(
        Kind.NUMBER,
        "Timeout",
        "seconds after which the server gives up (default: the server's)",
        above=0,
        most=LONGEST_TIMEOUT,
        shown_by=NONE,
    )


DELIVERY = parameters_of(Delivery)


def body_parameters() -> dict[str, Parameter]:
    """Return all parameters that a body can have, by name."""
    calls = {n: known for n, known in Call.parameters().items() if not known.in_python_only}
    return {**calls, **DELIVERY}


TYPES = {
    Kind.TEXT: str,
    Kind.WHOLE: int,
    Kind.NUMBER: float,
    Kind.SEED: int,
    Kind.CHOICE: str,
    Kind.PAIR: list[int],
    Kind.MIXTURE: dict[str, float],
    Kind.PICTURE: str,
    Kind.MASK: str,
    Kind.SWITCH: bool,
}
# What pydantic adds to the place of a problem, where a value may be of several types.
_NAMES = {kind.__name__ if isinstance(kind, type) else str(kind) for kind in TYPES.values()}
TYPE_NAMES = _NAMES | {f"list[{name}]" for name in _NAMES}


def field_of(known: Parameter) -> tuple[Any, Any]:
    """Return a parameter's type and pydantic field; its bounds are checked by the call itself."""
    kind = TYPES[known.kind]
    if known.per is not None:
        one = kind if known.per.most is None or not known.is_file else kind | list[kind]
        kind = kind | Annotated[list[one | None], Field(fail_fast=True)]
    elif known.each and not known.is_file:
        kind = kind | Annotated[list[kind], Field(fail_fast=True)]
    least, above, most = known.bounds()
    largest = "maxLength" if known.kind is Kind.TEXT else "maximum"
    limits = {"minimum": least, "exclusiveMinimum": above, largest: most}
    extra = {name: bound for name, bound in limits.items() if bound is not None}
    text = f"{known.help} (a file in base64)" if known.is_file else known.help
    described = {"title": known.label, "description": text, "json_schema_extra": extra}
    if known.is_required:
        return kind, Field(**described)
    is_servers = known.name not in DELIVERY  # the server has its default, which /about tells
    return kind | None, Field(None if is_servers else known.default, **described)


Body = create_model(
    "Body",
    __config__=ConfigDict(extra="forbid", strict=True, json_schema_extra={"title": "Pictures"}),
    __module__=__name__,
    **{name: field_of(known) for name, known in body_parameters().items()},
)


def values_of(body: bytes) -> dict[str, Any]:
    """Return the values that a body gives, checked by type."""
    check_commas(body)
    try:
        read = Body.model_validate_json(body)
    except ValidationError as error:
        raise RefusedError(422, problems(error, Body)) from error
    return given_values(read)


def check_commas(body: bytes) -> None:
    """Refuse a body of so many values that parsing it would cost much."""
    if body.count(b",") > MOST_COMMAS:
        raise RefusedError(422, f"The body has more than {MOST_COMMAS} commas.")


def given_values(read: BaseModel) -> dict[str, Any]:
    """Return the values that a body gives, by name; null is as good as nothing."""
    values = {name: getattr(read, name) for name in read.model_fields_set}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class GenerateRequest:
    """The pictures that a body asks for."""

    call: Mapping[str, Any]  # the parameters that are given; pictures are opened
    delivery: Delivery

    @classmethod
    def read(cls, body: bytes, defaults: Mapping[str, Any]) -> "GenerateRequest":
        """Read a body; `defaults` are the server's values for parameters that it does not give."""
        values = {**defaults, **values_of(body)}
        delivery = {name: values.pop(name) for name in DELIVERY if name in values}
        try:
            checked = {name: DELIVERY[name].check(value) for name, value in delivery.items()}
        except ValueError as error:
            raise RefusedError(422, str(error)) from error
        return cls(opened(values), Delivery(**checked))

    def jobs(self, manifest: Manifest, export: str, most: int, streams: bool) -> list[Job]:
        """Return a job for each picture, all with one queue of events, or refuse the call.

        `export` is the digest of the export with this manifest.
        """
        given = self.call["prompt"]
        given = [given] if isinstance(given, str) else given
        count = len(given) * self.delivery.count
        if not 1 <= count <= most:
            raise RefusedError(422, f"One call gives 1 to {most} pictures. Received: {count}")
        prompts = [prompt for prompt in given for _ in range(self.delivery.count)]
        try:
            request = read_request(manifest, Call(**{**self.call, "prompt": prompts}))
        except (ExportError, ValueError) as error:
            wrong = getattr(error, "parameter", None)
            raise RefusedError(422, str(error), wrong) from error
        calls = request.model_calls - request.start
        together = Together(export, request.shared.alike(), calls)
        events = Events()
        return [
            Job(
                index=index,
                call=call,
                together=together,
                events=events,
                every_step=streams,
                previews=self.delivery.previews,
            )
            for index, call in enumerate(request.each)
        ]


def form_fields(
    manifest: Manifest, defaults: Mapping[str, Any], most_count: int
) -> list[dict[str, Any]]:
    """Describe the fields of the page's form, for the script that builds them."""
    has_encoder = "image_encoder" in manifest.components
    fields = []
    for name, known in body_parameters().items():
        is_encoded = "image" in (name, known.goes_with)
        is_asked = known.taken_by.holds(manifest) and known.shown_by.holds(manifest)
        if not is_asked or (is_encoded and not has_encoder):
            continue
        least, above, most = known.bounds(manifest)
        field = {
            "name": name,
            "kind": known.kind,
            "label": known.label,
            "help": known.help,
            "least": least,
            "above": above,
            "most": most_count if name == "count" else most,
            "slider": known.slider,
            "default": defaults.get(name, known.default_for(manifest)),
            "required": known.is_required or known.needed_by.holds(manifest),
            "goes_with": known.goes_with,
            "per_model": known.per is not None,
            "is_prompt": known.is_prompt,
        }
        if known.choices is not None:
            field["choices"] = list(known.choices(manifest))
        if known.takes_several:
            field["most_files"] = known.per.most(manifest)
        if known.named is not None:
            field["named"] = list(known.named(manifest).items())
        fields += [field] if known.per is None else _of_models(field, known.per.names(manifest))
    if len(manifest.shapes.sizes) > 1:
        fields.append(_size_field(manifest.shapes))
    return fields


def _of_models(field: dict[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a field for each of several models, which the page sends as one list."""
    if len(names) == 1:
        return [field]

    def numbered(name: str | None, number: int) -> str | None:
        return None if name is None else f"{name}-{number}"

    def label(model: str, number: int) -> str:
        place = f" ({number})" if names.count(model) > 1 else ""
        return f"{field['label']}: {model}{place}"

    return [
        {
            **field,
            "name": numbered(field["name"], number),
            "goes_with": numbered(field["goes_with"], number),
            "label": label(model, number),
        }
        for number, model in enumerate(names, start=1)
    ]


def _size_field(shapes: Shapes) -> dict[str, Any]:
    """Describe the page's choice among sizes, which it sends as height and width."""
    return {
        "name": "size",
        "kind": "size",
        "label": "Size",
        "help": "width × height in pixels",
        "choices": shapes.sizes,
        "default": "{}x{}".format(*shapes.sizes[0]),
        "required": True,
        "goes_with": None,
        "per_model": False,
        "is_prompt": False,
    }


def opened(values: Mapping[str, Any], others: Sequence[Image.Image] = ()) -> dict[str, Any]:
    """Return a call's values with its pictures opened, which are files in base64.

    None is decoded before the pixels of all are counted.

    Args:
        others: pictures of the same body that are opened already.
    """
    known = Call.parameters()
    given = {name: value for name, value in values.items() if known[name].is_file}
    if (count := len(others) + sum(map(_count, given.values()))) > MOST_PICTURES:
        raise RefusedError(422, f"A call has at most {MOST_PICTURES} pictures. Received: {count}")
    pixels = sum(math.prod(picture.size) for picture in others)

    def counted(name: str, text: str) -> bytes:
        nonlocal pixels
        content = _file(name, text)
        pixels += _read(name, content, how=count_pixels)
        return content

    files = {name: _for_each(name, value, counted) for name, value in given.items()}
    if pixels > MOST_TOGETHER:
        raise RefusedError(
            422,
            f"The pictures of a call have at most {MOST_TOGETHER} pixels together. "
            f"Received: {pixels}",
        )
    pictures = {
        name: _for_each(name, value, partial(_read, how=known[name].open_file))
        for name, value in files.items()
    }
    return {**values, **pictures}


def _count(value: Any) -> int:
    """Return the number of pictures in a value, whose lists may have empty places."""
    if isinstance(value, list | tuple):
        return sum(map(_count, value))
    return value is not None


def _for_each(name: str, value: Any, read: Callable[[str, Any], Any]) -> Any:
    """Return what `read` makes of a picture, or of each of a list's, in which None stays None."""
    if isinstance(value, list | tuple):
        return [None if one is None else _for_each(name, one, read) for one in value]
    return read(name, value)


def _file(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # also for letters beyond ASCII
        raise RefusedError(422, f"{name}: this is not base64 ({error}).") from error


def _read(name: str, content: bytes, how: Callable) -> Any:
    try:
        return how(content, MOST_PIXELS)
    except PictureError as error:
        raise RefusedError(422, f"{name}: {error}.") from error


def problems(error: ValidationError, body: type[BaseModel]) -> str:
    """Return the first problems of a body as one text."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    shown = [_problem(one, body)[:LONGEST_PROBLEM] for one in errors[:MOST_PROBLEMS]]
    more = len(errors) - len(shown)
    return "; ".join([*shown, f"and {more} more"] if more else shown)


def _problem(error: dict, body: type[BaseModel]) -> str:
    place = ".".join(
        str(part) for i, part in enumerate(error["loc"]) if i == 0 or part not in TYPE_NAMES
    )
    if error["type"] == "extra_forbidden":
        return f"{place}: there is no such parameter. There are {', '.join(body.model_fields)}."
    return f"{place}: {error['msg']}" if place else error["msg"]
