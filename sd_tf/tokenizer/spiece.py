"""SentencePiece's files of a vocabulary, `spiece.model`: a protobuf, of which little is needed.

Field numbers are those of sentencepiece_model.proto.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sd_tf.tokenizer.errors import TokenizerError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
PIECES, TRAINER, NORMALIZER = 1, 2, 3  # of the model
TEXT, SCORE, TYPE = 1, 2, 3  # of a piece
CHARSMAP = 2  # of the normalizer
NORMAL, UNKNOWN, CONTROL = 1, 2, 3  # types of pieces
# Message → its settings: field, name, default, and the value that the `tokenizers` library has.
SETTINGS = {
    TRAINER: (
        (3, "trainer_spec.model_type", 1, 1),  # Unigram
        (24, "trainer_spec.treat_whitespace_as_suffix", 0, 0),
        (35, "trainer_spec.byte_fallback", 0, 0),
    ),
    NORMALIZER: (
        (3, "normalizer_spec.add_dummy_prefix", 1, 1),
        (4, "normalizer_spec.remove_extra_whitespaces", 1, 1),
        (5, "normalizer_spec.escape_whitespaces", 1, 1),
    ),
}


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of a Unigram model with their scores, and what becomes of characters before."""

    pieces: list[tuple[str, float]]
    charsmap: bytes  # of the Precompiled normalizer; empty: texts are taken as they are


def read_spiece(path: Path) -> Vocabulary:
    """Read a model's file.

    Raises:
        TokenizerError: it is no such file, or asks for what is not computed here.
    """
    try:
        return _vocabulary(path.read_bytes(), path)
    except (ValueError, IndexError, struct.error) as error:  # what broken bytes lead to
        raise TokenizerError(f"{path} is not a SentencePiece model: {error}.") from error


def _vocabulary(data: bytes, path: Path) -> Vocabulary:
    pieces, messages = [], {TRAINER: {}, NORMALIZER: {}}
    for number, value in fields(data):
        if number == PIECES:
            pieces.append(_piece(dict(fields(_as(bytes, value))), path))
        elif number in messages:
            messages[number] |= dict(fields(_as(bytes, value)))
    if not pieces:
        raise ValueError("it has no pieces")
    for message, settings in SETTINGS.items():
        for number, name, default, wanted in settings:
            if (found := messages[message].get(number, default)) != wanted:
                raise TokenizerError(f"{path}: {name} must be {wanted}. Received: {found}")
    return Vocabulary(pieces, _as(bytes, messages[NORMALIZER].get(CHARSMAP, b"")))


def _piece(piece: dict, path: Path) -> tuple[str, float]:
    text = _as(bytes, piece.get(TEXT, b"")).decode()
    if (kind := piece.get(TYPE, NORMAL)) not in (NORMAL, UNKNOWN, CONTROL):
        raise TokenizerError(
            f"{path}: a piece's type must be {NORMAL} (normal), {UNKNOWN} (unknown) or {CONTROL} "
            f"(control). Received: {kind} for {text!r}"
        )
    return text, _as(float, piece.get(SCORE, 0.0))


def _as(kind: type, value: int | float | bytes):
    if not isinstance(value, kind):
        raise ValueError(f"a field is {type(value).__name__}, not {kind.__name__}")
    return value


def fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Give the fields of a protobuf message: their numbers and values."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, place = _varint(data, place)
        elif wire == BYTES:
            length, place = _varint(data, place)
            value, place = data[place : place + length], place + length
        elif wire in (FIXED32, FIXED64):
            kind = "<f" if wire == FIXED32 else "<d"
            [value] = struct.unpack_from(kind, data, place)
            place += struct.calcsize(kind)
        else:
            raise ValueError(f"a field has the wire type {wire}")
        if place > len(data):
            raise ValueError("it ends within a field")
        yield number, value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Read a whole number; return it and the place behind it."""
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
