"""A call: the parameters of the pictures that are to be made, completed and divided."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sd_tf.runtime.capabilities import (
    GUIDED,
    WEIGHTED,
    check_image_encoder,
    check_vision_encoder,
    check_weights,
)
from sd_tf.runtime.kinds import Kind
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.parameter import CallError, Parameter, parameters_of
from sd_tf.runtime.parameters import Parameters
from sd_tf.runtime.shapes import ShapeError, Size

SIDES = ("height", "width")


@dataclass(frozen=True)
class Call(Parameters):
    """A call for one picture or more, one for each prompt."""

    @classmethod
    def parameters(cls) -> dict[str, Parameter]:
        """Return the parameters by name, in order."""
        return parameters_of(cls)

    @classmethod
    def of(cls, *values, **parameters) -> "Call":
        """Make a call from values by place or name; refuse an unknown name with the known ones."""
        known = cls.parameters()
        if unknown := [name for name in parameters if name not in known]:
            raise TypeError(
                f"A call has no parameter {', '.join(unknown)}. It takes {', '.join(known)}."
            )
        return cls(*values, **parameters)

    def given(self) -> dict[str, Any]:
        """Return the values that are not None, by name."""
        values = {name: getattr(self, name) for name in self.parameters()}
        return {name: value for name, value in values.items() if value is not None}

    def described(self) -> dict[str, Any]:
        """Return a complete call's values that JSON and the cells of a table can hold, by name.

        In a list for several models, None stands for one without a picture, which is not run.
        """
        known = self.parameters()
        return {
            name: self._of_shown(known[name], value)
            for name, value in self.given().items()
            if known[name].fits_a_cell
        }

    def _of_shown(self, known: Parameter, value: Any) -> Any:
        if known.per is None or known.goes_with is None:
            return value
        pictures = getattr(self, known.goes_with)
        return [
            None if picture is None else one for one, picture in zip(value, pictures, strict=True)
        ]

    def files(self) -> list[str]:
        """Return the names of the pictures that are given."""
        known = self.parameters()
        return [name for name in self.given() if known[name].is_file]

    def picture_counts(self) -> dict[str, list[int | None] | None]:
        """Return the names of a complete call's pictures, with how many each of several models has.

        None stands for a model without one, and for a parameter that is one picture.
        """
        known = self.parameters()
        given = {name: getattr(self, name) for name in self.files()}
        return {
            name: None if known[name].per is None else known[name].counts(value, len(value))
            for name, value in given.items()
        }

    def completed(self, manifest: Manifest) -> "Call":
        """Return the call with defaults filled in, each value checked against the export."""
        size = self.size_for(manifest)
        values = {**self._with_defaults(manifest), **dict(zip(SIDES, size, strict=True))}
        known = self.parameters()
        checked = {name: _checked(known[name], values, manifest, size) for name in known}
        if self.image is not None:
            check_image_encoder(manifest)
        if self.image_prompt is not None:
            check_vision_encoder(manifest)
        if checked["prompt_syntax"] == WEIGHTED:
            check_weights(manifest)
        _check_negative_prompt(checked, manifest)
        _check_shares(
            _given(known["control_image"], checked["control_image"]),
            *(checked[name] for name in ("control_start", "control_end")),
        )
        try:
            manifest.model_calls(checked["scheduler"], checked["num_steps"])
        except ExportError as error:
            raise CallError("num_steps", str(error)) from error
        for name, one in known.items():
            if one.is_file and one.per is not None and not any(_given(one, checked[name])):
                checked |= {
                    other: None for other in known if name in (other, known[other].goes_with)
                }
        return replace(self, **checked)

    def size_for(self, manifest: Manifest) -> Size:
        """Return the size that an export draws for this call; CallError if it does not have it."""
        known = self.parameters()
        sides = {
            name: None if value is None else known[name].check(value)
            for name in SIDES
            for value in [getattr(self, name)]
        }
        try:
            return manifest.shapes.size_of(**sides)
        except ShapeError as error:
            wrong = "width" if sides["height"] is None else "height"
            raise CallError(wrong, str(error)) from error

    def _with_defaults(self, manifest: Manifest) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.parameters()}
        for name, known in self.parameters().items():
            has_meaning = known.goes_with is None or values[known.goes_with] is not None
            if values[name] is None and has_meaning and known.taken_by.holds(manifest):
                values[name] = known.default_for(manifest)
        return values

    def divided(self) -> list["Call"]:
        """Return a call for each picture: its own prompt and seed, and the shared values."""
        prompt = self.parameters()["prompt"]
        prompts = self.prompt if prompt.is_many(self.prompt) else [self.prompt]
        if not len(prompts):
            raise CallError("prompt", "At least one prompt is needed. Received: none")
        own = {
            name: _spread(known, getattr(self, name), len(prompts))
            for name, known in self.parameters().items()
            if known.each
        }
        return [
            replace(self, **{name: values[i] for name, values in own.items()})
            for i in range(len(prompts))
        ]

    def alike(self) -> tuple:
        """Return the values that single pictures must share to be made in one batch.

        Of those that may differ, only whether there is one, for each of several models.
        """

        def shared(known: Parameter):
            value = getattr(self, known.name)
            if not known.each:
                return value
            if known.per is not None and isinstance(value, list | tuple):
                return tuple(one is not None for one in value)
            return value is not None

        return tuple(shared(known) for known in self.parameters().values())

    @classmethod
    def joined(cls, calls: Sequence["Call"]) -> "Call":
        """Make one call from those of single pictures that are `alike`."""
        known = cls.parameters()
        own = {
            name: known[name].gathered([getattr(call, name) for call in calls])
            for name in calls[0].given()
            if known[name].each
        }
        return replace(calls[0], **own)


def signature(*more: inspect.Parameter) -> inspect.Signature:
    """Return the signature of a method that takes a call's parameters, and `more` by name."""
    own = inspect.signature(Call).parameters.values()
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return inspect.Signature([first, *own, *more])


def documentation() -> str:
    """Return a line about each parameter, for the Args of a docstring."""
    return "\n".join(
        f"            {name}: {known.help}{_counts(known)}."
        for name, known in Call.parameters().items()
    )


def _counts(known: Parameter) -> str:
    """Say what a list is for, as the end of a sentence."""
    if known.per is None:
        return "; one for all or one for each" if known.each else ""
    of_prompts = ", or `Each([…])` with such a value for each prompt" if known.each else ""
    return f"; one for all or a list with one for each of the export's {known.per.what}{of_prompts}"


def _checked(known: Parameter, values: dict[str, Any], manifest: Manifest, size: Size) -> Any:
    """Return a parameter's checked value; CallError if the export or another value forbids it."""
    value = values[known.name]
    if value is None:
        if known.is_required:
            raise known.refusal(value, manifest)
        if known.needed_by.holds(manifest):
            message = f"{known.name} is needed by {known.needed_by.whose}; this one is"
            raise CallError(known.name, f"{message} {manifest.family}.")
        return None
    if not known.taken_by.holds(manifest):
        message = f"{known.name} is only for {known.taken_by.whose}; this one is"
        raise CallError(known.name, f"{message} {manifest.family}.")
    if known.goes_with is not None and values[known.goes_with] is None:
        message = f"{known.name} goes with {known.goes_with}: give both, or neither."
        raise CallError(known.name, message)
    if known.each and known.is_many(value):
        checked = [known.check(one, manifest, size) for one in value]
        uses = {tuple(x is None for x in one) for one in checked} if known.per else set()
        if len(uses) > 1:
            message = f"{known.name} is for the same {known.per.what} in all pictures of a call."
            raise CallError(known.name, message)
        return known.gathered(checked)
    return known.check(value, manifest, size)


def _given(known: Parameter, value: Any) -> list[bool]:
    """Tell for each of several models whether a checked value has a picture; None: for none."""
    if value is None:
        return []
    of_each = value if known.is_many(value) else [value]
    return [any(one is not None for one in of_model) for of_model in zip(*of_each, strict=True)]


def _check_negative_prompt(checked: dict[str, Any], manifest: Manifest) -> None:
    """Refuse a negative prompt that no guidance takes, and guidance by one that is not there."""
    negative, scale = checked["negative_prompt"], checked["true_guidance_scale"]
    if scale is not None and scale > 1 and negative is None:
        message = "true_guidance_scale above 1 goes with negative_prompt: give both."
        raise CallError("true_guidance_scale", message)
    texts = [negative] if negative is None or isinstance(negative, str) else negative
    if not any(texts):  # "" asks for nothing
        return
    if not GUIDED.holds(manifest):
        message = f"negative_prompt is only for {GUIDED.whose}; this one was made without."
        raise CallError("negative_prompt", message)
    if scale is not None and scale <= 1:
        message = "negative_prompt goes with true_guidance_scale above 1: give both, or neither."
        raise CallError("negative_prompt", message)


def _check_shares(
    given: Sequence[bool], starts: Sequence[float] | None, ends: Sequence[float] | None
) -> None:
    """Refuse a share of the steps that ends before it begins, of a ControlNet with a picture."""
    if not any(given):
        return
    for is_given, start, end in zip(given, starts, ends, strict=True):
        if is_given and start >= end:
            message = f"control_end is above control_start, {start:g}. Received: {end:g}"
            raise CallError("control_end", message)


def _spread(known: Parameter, value: Any, count: int) -> Sequence:
    """Return a value for each of `count` pictures."""
    if known.is_many(value):
        if len(value) != count:
            raise CallError(
                known.name,
                f"{known.name} is one for all or one for each of {count} prompts. "
                f"Received: {len(value)}",
            )
        return value
    if known.kind is Kind.SEED:
        if value is None:
            return [int.from_bytes(os.urandom(4), "little") >> 1 for _ in range(count)]
        return [known.check(value + i) for i in range(count)]
    return [value] * count
