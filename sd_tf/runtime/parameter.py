"""The description of one parameter of a call, and the checks that follow from it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import numpy as np
from PIL import Image

from sd_tf.errors import SdTfError
from sd_tf.runtime import pictures
from sd_tf.runtime.kinds import FILES, PARSERS, RANKS, READERS, WHOLES, Kind
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.shapes import Size

SHOWN = 60  # characters of a wrong value in a message
INFINITE = float("inf")


class Each(list):
    """A value of a parameter for each picture, where a list has one for each model."""


class CallError(SdTfError):
    """A value that a parameter does not take; a command puts the flag for its name."""

    def __init__(self, parameter: str, message: str):
        super().__init__(parameter, message)
        self.parameter, self.message = parameter, message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Condition:
    """A property of some exports; `whose` completes "… is only for" and "… is needed by"."""

    whose: str
    holds: Callable[[Manifest], bool]


ANY = Condition("any checkpoint", lambda manifest: True)
NONE = Condition("no checkpoint", lambda manifest: False)


@dataclass(frozen=True)
class Per:
    """Models of an export, for each of which a parameter may have a value of its own."""

    what: str  # such models, for messages
    names: Callable[[Manifest], Sequence[str]]
    most: Callable[[Manifest], int] | None = None  # pictures for each of them; None: one


Bound = float | Callable[[Manifest], float] | None


@dataclass(frozen=True)
class Parameter:
    """The description of a parameter, by which its values are checked, asked for and stored."""

    kind: Kind
    label: str  # on the page
    help: str
    least: Bound = None  # of a number
    above: Bound = None  # of a number: an excluded lower bound
    most: Bound = None  # of a number, or of each of a pair; of a text: characters
    # Least, most and step of the slider on the page; None: the bound.
    slider: tuple[float | None, float | None, float] | None = None
    # The values of a whole number and what the page, which offers them as a choice, calls each.
    named: Callable[[Manifest], Mapping[int, str]] | None = None
    # The values that a choice takes, the names of a mixture.
    choices: Callable[[Manifest], Sequence[str]] | None = None
    otherwise: Callable[[Manifest], Any] | None = None  # the default where the export decides it
    each: bool = False  # one value for all pictures, or one for each
    per: Per | None = None  # one value for all of these models, or a list with one for each
    is_prompt: bool = False  # of a picture: it is taken as the vision encoder takes it
    is_hint: bool = False  # of a picture: it is taken as a ControlNet takes it
    goes_with: str | None = None  # the parameter without which this one has no meaning
    taken_by: Condition = ANY
    needed_by: Condition = NONE
    shown_by: Condition = ANY  # exports for which the page asks for it
    in_python_only: bool = False
    name: str = ""  # of the dataclass's field
    default: Any = None  # of the field
    is_required: bool = False  # the field has no default

    @property
    def is_file(self) -> bool:
        return self.kind in FILES

    @property
    def fits_a_cell(self) -> bool:
        """Whether a cell of a table, and a PNG's metadata, can hold a value."""
        return not self.is_file and self.kind is not Kind.ARRAY

    def default_for(self, manifest: Manifest) -> Any:
        """Return the value to use where none is given; None: there is no default."""
        return self.default if self.otherwise is None else self.otherwise(manifest)

    def bounds(self, manifest: Manifest | None = None) -> tuple[Any, Any, Any]:
        """Return `least`, `above` and `most`: None where open, or where no export is given."""

        def of(bound):
            if callable(bound):
                return None if manifest is None else bound(manifest)
            return bound

        return of(self.least), of(self.above), of(self.most)

    def rule(self, manifest: Manifest | None = None) -> str:
        """Say what a value has to be, as the end of a sentence."""
        least, above, most = self.bounds(manifest)
        if self.kind is Kind.TEXT:
            return "a text" if most is None else f"a text of at most {most} characters"
        if self.kind is Kind.CHOICE:
            known = () if manifest is None else self.choices(manifest)
            return f"one of {', '.join(known)}" if known else "a text"
        if self.kind is Kind.PAIR:
            limit = "" if most is None else f" to {most}"
            return f"two whole numbers from 0{limit}, such as 512x768"
        if self.kind is Kind.SWITCH:
            return "yes or no"
        if self.kind is Kind.MIXTURE:
            numbers = f"a number from {least} to {most} for each name"
            if manifest is None:
                return numbers
            known = self.choices(manifest)
            return f"{numbers}, out of {', '.join(known) if known else 'none that are loaded'}"
        noun = "a whole number" if self.kind in WHOLES else "a number"
        rest = [] if most is None else [f"up to {most}"]
        if above is not None:
            return " ".join([noun, f"above {above},", *rest]).rstrip(",")
        if least is not None:
            limit = ", the export's limit" if callable(self.most) else ""
            return (
                f"{noun} of at least {least}"
                if most is None
                else (f"{noun} from {least} to {most}{limit}")
            )
        return " ".join([noun if rest or self.kind in WHOLES else "a finite number", *rest])

    def is_many(self, value: Any) -> bool:
        """Whether `value` holds one value for each picture, not one for all."""
        if isinstance(value, np.ndarray):
            return value.ndim == RANKS.get(self.kind, 0) + 1
        if self.per is not None:
            return isinstance(value, Each)
        return self.each and isinstance(value, Sequence) and not isinstance(value, str | bytes)

    def check(self, value: Any, manifest: Manifest | None = None, size: Size | None = None) -> Any:
        """Return one value as the models take it; CallError where it breaks the rule.

        What depends on an export is checked only where its manifest is given.

        Args:
            size: of the pictures; None: the export's first.
        """
        if self.per is not None:
            return self._of_models(value, manifest, size)
        return self._one(value, manifest, size)

    def gathered(self, values: Sequence) -> Sequence:
        """Put the values of several pictures together, one for each."""
        return [*values] if self.per is None else Each(values)

    def _of_models(self, value: Any, manifest: Manifest | None, size: Size | None) -> Any:
        """Return a checked value for each model; None where a list has none for it.

        Without a manifest, one value stays one. Where a model takes several pictures, a list for
        the only model may be these.
        """
        is_list = isinstance(value, list | tuple)
        if manifest is None:
            if not is_list:
                return self._one(value, None, size)
            return tuple(None if one is None else self._one(one, None, size) for one in value)
        names = self.per.names(manifest)
        values = self.for_models(value, manifest)
        if len(values) != len(names):
            raise CallError(
                self.name,
                f"{self.name} is one for all or one for each of the export's {self.per.what}, "
                f"{', '.join(names)}{self._of_prompts}. Received: {len(values)}",
            )
        otherwise = self.default_for(manifest)
        values = [otherwise if one is None else one for one in values]
        read = self._several if self.takes_several else self._one
        return tuple(None if one is None else read(one, manifest, size) for one in values)

    def for_models(self, value: Any, manifest: Manifest) -> Any:
        """Return a list of what is given for each model, where the parameter is one of models."""
        if self.per is None:
            return value
        return self._spread(value, len(self.per.names(manifest)))

    def counts(self, value: Any, models: int) -> list[int | None]:
        """Return how many pictures each of `models` models is given; None where it has none."""
        return [
            None if one is None else len(one) if isinstance(one, list | tuple) else 1
            for one in self._spread(value, models)
        ]

    def _spread(self, value: Any, models: int) -> Sequence:
        """Return a list of what is given for each of `models` models."""
        if not isinstance(value, list | tuple):
            return [value] * models
        if self.takes_several and models == 1:
            is_of_models = all(one is None or isinstance(one, list | tuple) for one in value)
            return value if is_of_models and len(value) == 1 else [value]
        return value

    @property
    def _of_prompts(self) -> str:
        """How one for each prompt is given, as a part of a message."""
        return "; in Python, Each([…]) has one for each prompt" if self.each else ""

    @property
    def takes_several(self) -> bool:
        """Whether each of several models may take several pictures."""
        return self.is_file and self.per is not None and self.per.most is not None

    def _several(self, value: Any, manifest: Manifest, size: Size | None) -> tuple:
        """Return a model's checked pictures, of which there may be several."""
        values, most = (
            value if isinstance(value, list | tuple) else [value],
            self.per.most(manifest),
        )
        if not 1 <= len(values) <= most:
            raise CallError(
                self.name,
                f"{self.name} is 1 to {most} pictures for each of the export's {self.per.what} "
                f"(--image_prompts){self._of_prompts}. Received: {len(values)}",
            )
        if empty := sum(one is None for one in values):
            raise CallError(
                self.name,
                f"{self.name} has no empty place among the pictures for one of the export's "
                f"{self.per.what}. Received: {len(values)}, of which {empty} empty",
            )
        return tuple(self._one(one, manifest, size) for one in values)

    def _one(self, value: Any, manifest: Manifest | None, size: Size | None) -> Any:
        if self.is_file or self.kind is Kind.ARRAY:
            return self._array(value, manifest, manifest.shapes.sizes[0] if size is None else size)
        checked = READERS[self.kind](value)
        if checked is None or not self._is_within(checked, manifest):
            raise self.refusal(value, manifest)
        return float(checked) if self.kind is Kind.NUMBER else checked

    def from_text(self, text: str) -> Any:
        """Parse a value from a command line or a cell of a table.

        In a list of one for each of several models, an empty part is None.
        """
        parse = PARSERS.get(self.kind, str)
        try:
            if self.per is not None and "," in text:
                return [parse(part) if part.strip() else None for part in text.split(",")]
            return parse(text)
        except (ValueError, KeyError) as error:
            raise self.refusal(text) from error

    def paths(self, given: Any, is_file: Callable[[str], bool]) -> Any:
        """Return the paths of pictures, as a command line or a cell of a table gives them.

        A text with commas, or a list, has one for each of several models; in such a list, a text
        with commas has those of a model that takes several. An empty one is None: no picture.

        Args:
            is_file: whether a text is a file's whole name, in which commas separate nothing.
        """

        def checked(one: Any) -> str | None:
            if one is not None and not isinstance(one, str):
                raise CallError(self.name, f"{self.name} is a path. Received: {one!r}")
            return one or None

        def divided(one: Any) -> Any:
            if isinstance(one, str) and "," in one and not is_file(one):
                return [part.strip() or None for part in one.split(",")]
            return checked(one)

        def of_model(one: Any) -> Any:
            if isinstance(one, list | tuple):
                return [checked(part) for part in one]
            return divided(one) if self.takes_several else checked(one)

        if self.per is None:
            return checked(given)
        return [of_model(one) for one in given] if isinstance(given, list) else divided(given)

    def open_file(self, source: bytes | str, most_pixels: float = INFINITE) -> Image.Image:
        """Open a picture's file as `check` takes it; PictureError where it is not a picture."""
        return (pictures.open_hint if self.is_hint else pictures.open_picture)(source, most_pixels)

    def refusal(self, value: Any, manifest: Manifest | None = None) -> CallError:
        """Make the error of a wrong value."""
        shown = repr(value)
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
        rule = self.rule(manifest)
        return CallError(self.name, f"{self.name} is {rule}. Received: {shown}")

    def _is_within(self, value: Any, manifest: Manifest | None) -> bool:
        least, above, most = self.bounds(manifest)
        if self.kind is Kind.CHOICE:
            return manifest is None or value in self.choices(manifest)
        if self.kind is Kind.SWITCH:
            return True
        if self.kind is Kind.PAIR:
            return most is None or max(value) <= most
        if self.kind is Kind.MIXTURE:
            known = None if manifest is None else self.choices(manifest)
            return all(
                least <= number <= most and (known is None or name in known)
                for name, number in value.items()
            )
        size = len(value) if self.kind is Kind.TEXT else value
        return (
            -INFINITE < size < INFINITE
            and (least is None or size >= least)
            and (above is None or size > above)
            and (most is None or size <= most)
        )

    def _array(self, value: Any, manifest: Manifest, size: Size) -> np.ndarray:
        try:
            if self.is_prompt:
                return pictures.middle(value, manifest.image_prompts.size)
            if self.is_hint:
                return pictures.hint(value, size[::-1])
            if self.kind is Kind.PICTURE:
                return pictures.levels(value, size[::-1])
            if self.kind is Kind.MASK:
                return pictures.grays(value, size[::-1])
        except ValueError as error:
            raise CallError(self.name, f"{self.name}: {error}") from error
        array, shape = np.asarray(value, "float32"), manifest.shapes.latent(size)
        if array.shape != shape:
            message = f"{self.name} has the shape {shape} for each picture"
            raise CallError(self.name, f"{message}. Received: {array.shape}")
        return array


def parameter(kind: Kind, label: str, help: str, default: Any = None, **known) -> Any:
    """Make a dataclass's field that is a parameter; `known`: more of its description."""
    return field(default=default, metadata={"parameter": Parameter(kind, label, help, **known)})


@functools.cache
def parameters_of(cls: type) -> dict[str, Parameter]:
    """Return the parameters of a dataclass whose fields are parameters, by name."""
    found = {}
    for one in fields(cls):
        is_required = one.default is MISSING
        default = None if is_required else one.default
        found[one.name] = replace(
            one.metadata["parameter"], name=one.name, default=default, is_required=is_required
        )
    return found
