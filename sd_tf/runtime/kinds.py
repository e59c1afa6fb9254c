"""The kinds of values that a call has, and how a value of each is read."""

from collections.abc import Mapping
from enum import StrEnum
from numbers import Integral, Real
from typing import Any

import numpy as np


class Kind(StrEnum):
    """The kinds of values. Code that reads, shows or stores values has a table by kind."""

    TEXT = "text"
    WHOLE = "whole number"
    NUMBER = "number"
    SEED = "seed"  # one number stands for itself and the ones that follow it
    CHOICE = "choice"
    PAIR = "pair"  # two whole numbers, (height, width) or (top, left)
    PICTURE = "picture"
    MASK = "mask"
    ARRAY = "array"
    MIXTURE = "mixture"  # a number for each of some names
    SWITCH = "switch"  # yes or no


class Mixture(dict):
    """Numbers by name, in the names' order; not to be changed, as batches are compared by it."""

    def __init__(self, numbers: Mapping[str, float]):
        super().__init__(sorted(numbers.items()))

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __str__(self) -> str:
        return ",".join(f"{name}@{number:g}" for name, number in self.items())


FILES = (Kind.PICTURE, Kind.MASK)
WHOLES = (Kind.WHOLE, Kind.SEED)
RANKS = {Kind.PICTURE: 3, Kind.MASK: 2, Kind.ARRAY: 3}  # dimensions of one picture's array


# Readers: a value of the right type, or None.


def _text(value: Any) -> str | None:
    try:
        return value if isinstance(value, str) and value.encode() is not None else None
    except UnicodeEncodeError:  # half of a surrogate pair
        return None


def _whole(value: Any) -> int | None:
    """Return a whole number, also of a float: pandas makes floats of a column with gaps."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if isinstance(value, Integral):
        return int(value)
    return int(value) if float(value).is_integer() else None


def _number(value: Any) -> Real | None:
    return value if isinstance(value, Real) and not isinstance(value, bool) else None


def _pair(value: Any) -> tuple[int, int] | None:
    numbers = [_whole(one) for one in value] if isinstance(value, list | tuple) else []
    is_pair = len(numbers) == 2 and all(one is not None and one >= 0 for one in numbers)
    return tuple(numbers) if is_pair else None


def _mixture(value: Any) -> Mixture | None:
    if not isinstance(value, Mapping):
        return None
    numbers = {_text(name): _number(number) for name, number in value.items()}
    if None in numbers or None in numbers.values():
        return None
    try:
        return Mixture({name: float(number) for name, number in numbers.items()})
    except OverflowError:
        return None


def _switch(value: Any) -> bool | None:
    return bool(value) if isinstance(value, bool | np.bool_) else None


READERS = {
    Kind.TEXT: _text,
    Kind.WHOLE: _whole,
    Kind.NUMBER: _number,
    Kind.SEED: _whole,
    Kind.CHOICE: _text,
    Kind.PAIR: _pair,
    Kind.MIXTURE: _mixture,
    Kind.SWITCH: _switch,
}


def _parsed_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _parsed_pair(text: str) -> tuple[int, int]:
    first, second = text.lower().split("x")
    return int(first), int(second)


def _parsed_mixture(text: str) -> Mixture:
    """Parse "style@0.8,detail@-0.5"; a name alone has the number 1."""
    numbers = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.strip().partition("@")
        if not name or name in numbers:
            raise ValueError(text)
        numbers[name] = float(number) if number else 1.0
    return Mixture(numbers)


def _parsed_switch(text: str) -> bool:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
        text.strip().lower()
    ]


PARSERS = {
    Kind.WHOLE: _parsed_whole,
    Kind.NUMBER: float,
    Kind.SEED: _parsed_whole,
    Kind.PAIR: _parsed_pair,
    Kind.MIXTURE: _parsed_mixture,
    Kind.SWITCH: _parsed_switch,
}
