r"""Prompts with weights, and prompts longer than one chunk: text → ids and weights.

The syntax is that of Stable Diffusion web UIs:

    (word)      weight × 1.1          \( \) \[ \] \\   literal characters
    [word]      weight ÷ 1.1          BREAK            the rest goes into the next chunk
    (word:1.3)  weight × 1.3

Brackets multiply when they are nested. One that is never closed reaches to the end, one that was
never opened stands for itself, and so does a colon without a number and a bracket after it. Any
other backslash is dropped.

A chunk is what a text encoder reads at once: a start token, the text's tokens, an end token and
padding.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.tokenizer.fixed import warn_of_cut

MARKS = re.compile(
    r"\\(?P<literal>[\\()\[\]]?)"
    r"|:\s*(?P<weight>[+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*\)"
    r"|(?P<bracket>[()\[\]])"
    r"|(?P<fill>\bBREAK\b)"
)
OPENING = {")": "(", "]": "["}
FACTORS = {"(": 1.1, "[": 1 / 1.1}
MOST_WEIGHT = 1000.0  # keeps everything finite, whatever the text says
BREAK = "BREAK"
COMMA = ",</w>"
NEAR_END = 20  # a comma is looked for among so many last tokens of a chunk


class Run(NamedTuple):
    """A piece of text in which all tokens have one weight; it is tokenized by itself."""

    text: str
    weight: float = 1.0


class Token(NamedTuple):
    id: int
    weight: float
    start: int  # where it begins in the prompt without its brackets
    vector: int = 0  # its place among the ids of an added token


@dataclass(frozen=True)
class Encoding:
    """The ids and weights of one text for a number of chunks, and the text that was cut off."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    cut: str


def tokenize(
    tokenizer: ClipTokenizer, texts: Sequence[str], chunks: int, weighted: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Encode texts → int32 and float32 (N, chunks · 77); log a warning for what is cut off."""
    encodings = [encode(tokenizer, text, chunks, weighted) for text in texts]
    for encoding in encodings:
        warn_of_cut(encoding.cut, chunks * tokenizer.max_length)
    shape = (-1, chunks * tokenizer.max_length)
    ids = np.array([encoding.ids for encoding in encodings], "int32")
    weights = np.array([encoding.weights for encoding in encodings], "float32")
    return ids.reshape(shape), weights.reshape(shape)


def encode(
    tokenizer: ClipTokenizer, text: str, chunks: int = 1, weighted: bool = False
) -> Encoding:
    """Encode one text; what does not fit into the chunks is cut off.

    Args:
        weighted: read weights and BREAK; else every character stands for itself.
    """
    parts = parse(text) if weighted else [[Run(text)]]
    comma = tokenizer.token_id(COMMA) if weighted else None
    filled = _divide(_tokens(tokenizer, parts), tokenizer.max_length - 2, chunks, comma)
    left_out = [token for chunk in filled[chunks:] for token in chunk]
    filled = [*filled[:chunks], *([] for _ in range(chunks - len(filled)))]
    ids, weights = [], []
    for chunk in filled:
        padding = tokenizer.max_length - 2 - len(chunk)
        ids += [tokenizer.start_token_id, *(token.id for token in chunk), tokenizer.end_token_id]
        ids += [tokenizer.pad_token_id] * padding
        weights += [1.0, *(token.weight for token in chunk), *[1.0] * (padding + 1)]
    cut = _without_brackets(parts)[left_out[0].start :] if left_out else ""
    return Encoding(tuple(ids), tuple(weights), cut)


def parse(text: str) -> list[list[Run]]:
    """Read weights and BREAK: return the parts between one BREAK and the next, each in runs.

    Runs of one weight that follow each other are one run.
    """
    pieces: list[str] = []
    factors: list[tuple[int, int, float]] = []  # each with the range of pieces that it multiplies
    opened: dict[str, list[int]] = {"(": [], "[": []}
    fills, end = [0], 0

    def close(bracket: str, factor: float) -> None:
        factors.append((opened[bracket].pop(), len(pieces), factor))

    for mark in MARKS.finditer(text):
        pieces.append(text[end : mark.start()])
        end = mark.end()
        found, bracket = mark[0], mark["bracket"]
        if mark["literal"] is not None:
            pieces.append(mark["literal"])
        elif mark["fill"] is not None:
            fills.append(len(pieces))
        elif mark["weight"] is not None and opened["("]:
            close("(", float(mark["weight"]))
        elif bracket in opened:
            opened[bracket].append(len(pieces))
        elif bracket is not None and opened[OPENING[bracket]]:
            close(OPENING[bracket], FACTORS[OPENING[bracket]])
        else:
            pieces.append(found)
    pieces.append(text[end:])
    factors += [
        (start, len(pieces), FACTORS[bracket]) for bracket in opened for start in opened[bracket]
    ]

    weights = np.ones(len(pieces))
    for start, stop, factor in factors:
        factor = min(max(factor, -MOST_WEIGHT), MOST_WEIGHT)
        weights[start:stop] = np.clip(weights[start:stop] * factor, -MOST_WEIGHT, MOST_WEIGHT)
    return [
        _merged(pieces[start:stop], weights[start:stop].tolist())
        for start, stop in zip(fills, [*fills[1:], len(pieces)], strict=True)
    ]


def _merged(pieces: list[str], weights: list[float]) -> list[Run]:
    filled = [Run(*both) for both in zip(pieces, weights, strict=True) if both[0]]
    return [
        Run("".join(run.text for run in runs), weight)
        for weight, runs in groupby(filled, lambda run: run.weight)
    ]


def _tokens(tokenizer: ClipTokenizer, parts: list[list[Run]]) -> list[list[Token]]:
    """Tokenize each run by itself; return each part's tokens."""
    found, start = [], 0
    for runs in parts:
        found.append([])
        for run in runs:
            found[-1] += [
                Token(piece.id, run.weight, start + piece.start, piece.vector)
                for piece in tokenizer.tokens(run.text)
            ]
            start += len(run.text)
        start += len(BREAK)
    return found


def _without_brackets(parts: list[list[Run]]) -> str:
    return BREAK.join("".join(run.text for run in runs) for runs in parts)


def _divide(
    parts: list[list[Token]], room: int, chunks: int, comma: int | None
) -> list[list[Token]]:
    """Divide each part into chunks of at most `room` tokens, so that each begins a new one.

    Where a chunk ends, the tokens behind a comma shortly before move on into the next one, unless
    there is none: `chunks` is the number that is kept. So do the vectors of one token that would
    be divided.
    """
    filled = []
    for rest in parts:
        while True:
            is_last = len(filled) + 1 >= chunks
            end = room if is_last else _end(rest, room, comma)
            filled.append(rest[:end])
            rest = rest[end:]
            if not rest:
                break
    return filled


def _end(tokens: list[Token], room: int, comma: int | None) -> int:
    """Return the number of tokens that stay in a chunk."""
    if len(tokens) > room and tokens[room].id != comma:
        for place in range(room - 1, max(room - 1 - NEAR_END, -1), -1):
            if tokens[place].id == comma:
                return place + 1
    if len(tokens) > room:
        first = room - tokens[room].vector
        return first if first > 0 else room  # a whole chunk does not hold its vectors
    return room
