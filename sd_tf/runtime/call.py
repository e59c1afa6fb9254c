"""A call: all parameters of the pictures that are to be made.

The fields of `Call` are the only list of the parameters. The Python signature, the command lines,
the HTTP body, the columns of batch files, the PNG's metadata and the page's form derive from it.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, replace
from typing import Any

import numpy as np

from sd_tf.runtime.capabilities import (
    ADAPTED,
    CONTROLNETS,
    EDITS,
    EDITS_OR_PAINTS,
    GUIDED,
    IP_ADAPTERS,
    PAINTS,
    PLAIN,
    REUSING,
    SHOWN_PICTURES,
    SIZED,
    SKIPPING,
    START,
    STARTS_OR_PAINTS,
    STEERED,
    SYNTAXES,
    TARGET_SIZED,
    TRULY_GUIDED,
    WEIGHING,
    WEIGHTED,
    check_image_encoder,
    check_vision_encoder,
    check_weights,
    use_of_picture,
)
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.parameter import (
    NONE,
    CallError,
    Condition,
    Kind,
    Parameter,
    parameter,
    parameters_of,
)
from sd_tf.runtime.shapes import ShapeError, Size

MOST_CHARACTERS = 10_000  # of a prompt
STEPS, GUIDANCE = 50, 7.5  # where the family has no default of its own
MOST_GUIDANCE = 1_000_000
MOST_ADAPTED = 100  # times an adapter
MOST_CONTROL = 100  # times what a ControlNet adds
MOST_IMAGE_PROMPT = 100  # times what an IP-Adapter adds
SIDES = ("height", "width")


def _suited(name: str, otherwise: Any) -> Callable[[Manifest], Any]:
    """Return the family's own default, or everyone's."""
    return lambda manifest: manifest.suited.get(name, otherwise)


STEERING = {"per": CONTROLNETS, "goes_with": "control_image", "taken_by": STEERED}
SHARE = {"least": 0, "most": 1, "slider": (0, 1, 0.05)}


def _of_models(label: str, help: str, otherwise: float, **known) -> Any:
    """Describe a number for each of several models, which goes with its picture."""
    return parameter(
        Kind.NUMBER,
        label,
        f"{help} (default: {otherwise:g})",
        otherwise=lambda manifest: otherwise,
        **{**STEERING, **known},
    )


@dataclass(frozen=True)
class Call:
    """The parameters of a call for one picture or more, one for each prompt.

    A parameter marked `each` takes one value for all pictures, or a list with one for each.
    """

    prompt: str | Sequence[str] = parameter(
        Kind.TEXT,
        "Prompt",
        "what the picture shows",
        default=MISSING,
        most=MOST_CHARACTERS,
        each=True,
    )
    negative_prompt: str | Sequence[str] | None = parameter(
        Kind.TEXT,
        "Negative prompt",
        "what it does not show",
        most=MOST_CHARACTERS,
        each=True,
        shown_by=GUIDED,
    )
    _: KW_ONLY
    image: Any = parameter(
        Kind.PICTURE,
        "Picture",
        "the picture to start from, to edit as the prompt says, or to paint in",
        each=True,
        needed_by=EDITS_OR_PAINTS,
    )
    mask: Any = parameter(
        Kind.MASK,
        "Mask",
        "white is painted anew",
        each=True,
        taken_by=PAINTS,
        needed_by=PAINTS,
    )
    strength: float | None = parameter(
        Kind.NUMBER,
        "Strength",
        "how far to leave the picture",
        above=0,
        most=1,
        slider=(0.05, 1, 0.05),
        otherwise=lambda manifest: (
            manifest.suited.get("strength", 0.8) if use_of_picture(manifest) == START else 1.0
        ),
        goes_with="image",
        taken_by=STARTS_OR_PAINTS,
    )
    image_guidance_scale: float | None = parameter(
        Kind.NUMBER,
        "Picture guidance",
        "how much of the picture an edit keeps",
        least=-MOST_GUIDANCE,
        most=MOST_GUIDANCE,
        slider=(1, 4, 0.1),
        otherwise=lambda manifest: 1.5,
        goes_with="image",
        taken_by=EDITS,
    )
    control_image: Any = parameter(
        Kind.PICTURE,
        "Control picture",
        "the picture that a ControlNet follows: edges, poses, whatever it was trained for",
        each=True,
        per=CONTROLNETS,
        taken_by=STEERED,
    )
    control_scale: float | Sequence[float] | None = _of_models(
        "Control",
        "how much of what a ControlNet adds is taken",
        1.0,
        least=-MOST_CONTROL,
        most=MOST_CONTROL,
        slider=(0, 2, 0.05),
    )
    control_start: float | Sequence[float] | None = _of_models(
        "Control from", "where a ControlNet's share of the steps begins", 0.0, **SHARE
    )
    control_end: float | Sequence[float] | None = _of_models(
        "Control to", "where its share of the steps ends", 1.0, **SHARE
    )
    control_guess: bool | None = parameter(
        Kind.SWITCH,
        "Guess",
        "let ControlNets recognize what their picture shows, also without a prompt (default: no)",
        otherwise=lambda manifest: False,
        goes_with="control_image",
        taken_by=STEERED,
    )
    image_prompt: Any = parameter(
        Kind.PICTURE,
        "Picture as a prompt",
        "a picture that says what to draw, beside the prompt (IP-Adapter); several, too",
        each=True,
        per=IP_ADAPTERS,
        is_prompt=True,
        taken_by=SHOWN_PICTURES,
    )
    image_prompt_scale: float | Sequence[float] | None = _of_models(
        "Weight of the picture",
        "how much of what an IP-Adapter adds is taken",
        1.0,
        least=-MOST_IMAGE_PROMPT,
        most=MOST_IMAGE_PROMPT,
        slider=(0, 1.5, 0.05),
        per=IP_ADAPTERS,
        goes_with="image_prompt",
        taken_by=SHOWN_PICTURES,
    )
    height: int | None = parameter(
        Kind.WHOLE,
        "Height",
        "pixels of the picture, one of the export's sizes (default: its first)",
        least=1,
        shown_by=NONE,  # the page asks for both sides at once
    )
    width: int | None = parameter(
        Kind.WHOLE,
        "Width",
        "pixels of the picture, see height",
        least=1,
        shown_by=NONE,
    )
    num_steps: int | None = parameter(
        Kind.WHOLE,
        "Steps",
        f"number of denoising steps; more take longer (default: the family's, mostly {STEPS})",
        otherwise=lambda manifest: min(
            int(manifest.suited.get("num_steps", STEPS)), manifest.max_steps
        ),
        least=1,
        most=lambda manifest: manifest.max_steps,
        slider=(1, None, 1),
    )
    guidance_scale: float | None = parameter(
        Kind.NUMBER,
        "Guidance",
        f"strength of the prompt (default: the family's, mostly {GUIDANCE})",
        otherwise=_suited("guidance_scale", GUIDANCE),
        least=-MOST_GUIDANCE,
        most=MOST_GUIDANCE,
        slider=(0, 15, 0.5),
        shown_by=GUIDED,
    )
    true_guidance_scale: float | None = parameter(
        Kind.NUMBER,
        "True guidance",
        "Flux: strength of the negative prompt; above 1 each step takes twice as long (default: 1)",
        least=1,
        most=MOST_GUIDANCE,
        slider=(1, 8, 0.5),
        otherwise=lambda manifest: 1.0,
        taken_by=TRULY_GUIDED,
    )
    skip_layer_guidance_scale: float | None = parameter(
        Kind.NUMBER,
        "Skip-layer guidance",
        "SD3.5: strength of the difference that some blocks make, in early steps (default: 0)",
        least=-MOST_GUIDANCE,
        most=MOST_GUIDANCE,
        slider=(0, 6, 0.1),
        otherwise=lambda manifest: 0.0,
        taken_by=SKIPPING,
    )
    scheduler: str | None = parameter(
        Kind.CHOICE,
        "Scheduler",
        "the sampler that walks from noise to the picture (default: the checkpoint's)",
        choices=lambda manifest: manifest.samplers,
        otherwise=lambda manifest: manifest.default_sampler,
    )
    reuse: int | None = parameter(
        Kind.WHOLE,
        "Reuse",
        "run the UNet's deep layers in every such model call only: faster, less exact (default: 1)",
        least=1,
        most=lambda manifest: manifest.reuse.most,
        slider=(1, None, 1),
        otherwise=lambda manifest: 1,
        taken_by=REUSING,
    )
    prompt_syntax: str | None = parameter(
        Kind.CHOICE,
        "Prompt syntax",
        "weighted: (word), (word:1.3), [word] and BREAK are read as weights and chunks",
        default=PLAIN,
        choices=lambda manifest: SYNTAXES,
        shown_by=WEIGHING,
    )
    adapters: Mapping[str, float] | None = parameter(
        Kind.MIXTURE,
        "Adapters",
        "how much of each adapter (LoRA) is added, by name",
        least=-MOST_ADAPTED,
        most=MOST_ADAPTED,
        slider=(-1, 2, 0.05),
        choices=lambda manifest: manifest.adapters.names,
        taken_by=ADAPTED,
        shown_by=Condition("exports with adapters", lambda manifest: bool(manifest.adapters.names)),
    )
    seed: int | Sequence[int] | None = parameter(
        Kind.SEED,
        "Seed",
        "number of the first picture's noise, the next ones count up (default: random)",
        least=-(2**31),
        most=2**31 - 1,
        each=True,
    )
    noise: np.ndarray | None = parameter(
        Kind.ARRAY,
        "Noise",
        "unit noise (N, h, w, 4) in place of what the seeds give",
        each=True,
        in_python_only=True,
    )
    original_size: tuple[int, int] | None = parameter(
        Kind.PAIR,
        "Original size",
        "SDXL: the size (height, width) that the picture is to look as if scaled from",
        taken_by=SIZED,
        shown_by=NONE,
    )
    crop_top_left: tuple[int, int] | None = parameter(
        Kind.PAIR,
        "Crop",
        "SDXL: the corner (top, left) that the picture is to look as if cropped at (default: 0x0)",
        taken_by=SIZED,
        shown_by=NONE,
    )
    target_size: tuple[int, int] | None = parameter(
        Kind.PAIR,
        "Target size",
        "SDXL: the size (height, width) that the picture is to look as if made for",
        taken_by=TARGET_SIZED,
        shown_by=NONE,
    )

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
        """Return the given values that JSON and the cells of a table can hold, by name."""
        known = self.parameters()
        return {name: value for name, value in self.given().items() if known[name].fits_a_cell}

    def files(self) -> list[str]:
        """Return the names of the pictures that are given."""
        known = self.parameters()
        return [name for name in self.given() if known[name].is_file]

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
        if (checked["true_guidance_scale"] or 1.0) > 1.0 and checked["negative_prompt"] is None:
            message = "true_guidance_scale above 1 goes with negative_prompt: give both."
            raise CallError("true_guidance_scale", message)
        _check_shares(checked["control_start"], checked["control_end"])
        manifest.model_calls(checked["scheduler"], checked["num_steps"])
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
        f"            {name}: {known.help}{'; one for all or one for each' if known.each else ''}."
        for name, known in Call.parameters().items()
    )


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


def _check_shares(starts: Sequence[float] | None, ends: Sequence[float] | None) -> None:
    """Refuse a ControlNet's share of the steps that ends before it begins."""
    for start, end in zip(starts or (), ends or (), strict=True):
        if start >= end:
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
