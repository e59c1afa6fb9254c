"""Read a form (multipart/form-data) from memory, within limits."""

import base64
import logging
import re
from dataclasses import dataclass, field
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from sd_tf.runtime.call import Call
from sd_tf.serving.errors import RefusedError

# The parser would log each damaged form; the answer says it, and a log is not for clients to fill.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

MOST_PARTS = 100
LONGEST_VALUE = 1 << 16  # bytes of a field that is no file
FILES = frozenset(name for name, known in Call.parameters().items() if known.is_file)
# The names of fields with several values: NAME[] for each value of a list, NAME[KEY] by key.
MANY = re.compile(r"([^\[\]]+)\[([^\[\]]*)\]")


def read_form(body: bytes, content_type: str) -> dict[str, Any]:
    """Return a form's fields by name: files as bytes, others as texts; lists and objects of them.

    Raises:
        RefusedError: the form is damaged, has too many parts, or a field twice.
    """
    values: dict[str, Any] = {}
    for given, content in _parts(body, content_type):
        name, key = match.groups() if (match := MANY.fullmatch(given)) else (given, None)
        value = content if name in FILES else _text(name, content)
        if key == "" and isinstance(values.setdefault(name, []), list):
            values[name].append(value)
        elif key and isinstance(values.setdefault(name, {}), dict) and key not in values[name]:
            values[name][key] = value
        elif name in values:
            raise RefusedError(
                422, f"{name[:100]} is given twice. A list is sent as NAME[], once for each value."
            )
        else:
            values[name] = value
    return values


def in_base64(name: str, content: bytes | list[bytes] | dict[str, bytes]) -> str | list[str | None]:
    """Return files, or texts in base64, as texts in base64; None for an empty one of a list."""
    if isinstance(content, dict):
        raise RefusedError(
            422,
            f"{name} is a file, or several as {name}[]. Received: {name}[{min(content)[:100]}]",
            name,
        )
    if isinstance(content, list):
        return [in_base64(name, one) if one else None for one in content]
    try:
        base64.b64decode(content, validate=True)
    except ValueError:
        return base64.b64encode(content).decode()
    return content.decode()


@dataclass
class _Part:
    name: bytearray = field(default_factory=bytearray)  # of the header that is being read
    value: bytearray = field(default_factory=bytearray)
    disposition: bytes = b""
    content: bytearray = field(default_factory=bytearray)


@dataclass
class _Reader:
    """Collects the parts that the parser finds; its methods are the parser's callbacks."""

    part: _Part = field(default_factory=_Part)
    found: list[tuple[str, bytes]] = field(default_factory=list)
    is_complete: bool = False

    def on_part_begin(self) -> None:
        if len(self.found) == MOST_PARTS:
            raise RefusedError(422, f"The form has more than {MOST_PARTS} parts.")
        self.part = _Part()

    def on_header_begin(self) -> None:
        self.part.name, self.part.value = bytearray(), bytearray()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self.part.name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self.part.value += data[start:end]

    def on_header_end(self) -> None:
        if self.part.name.lower() == b"content-disposition":
            self.part.disposition = bytes(self.part.value)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.part.content += data[start:end]

    def on_part_end(self) -> None:
        kind, options = parse_options_header(self.part.disposition)
        if kind != b"form-data" or b"name" not in options:
            raise RefusedError(
                422, 'Each part of a form has the header `Content-Disposition: form-data; name="…"`'
            )
        self.found.append((_text("A name", options[b"name"]), bytes(self.part.content)))

    def on_end(self) -> None:
        self.is_complete = True

    def callbacks(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in dir(self) if name.startswith("on_")}


def _parts(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Return the name and the content of each part."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise RefusedError(
            422, "The header `Content-Type: multipart/form-data; boundary=…` names no boundary."
        )
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise RefusedError(422, f"The form is damaged: {error}.") from error
    if not reader.is_complete:
        raise RefusedError(422, "The form is damaged: it ends before its last boundary.")
    return reader.found


def _text(name: str, content: bytes) -> str:
    shown = name[:100]
    if len(content) > LONGEST_VALUE:
        raise RefusedError(422, f"{shown} is longer than {LONGEST_VALUE} bytes.", shown)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RefusedError(422, f"{shown} is not UTF-8.", shown) from error
