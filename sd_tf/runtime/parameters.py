"""The parameters of a call: one table, from which everything that takes them derives.

The Python signature, the command lines, the HTTP body, the columns of batch files, the PNG's
metadata and the page's form come from the fields of `Parameters`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass
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
    use_of_picture,
)
from sd_tf.runtime.kinds import Kind
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.parameter import NONE, Condition, parameter
from sd_tf.runtime.reuse import named_reuses

MOST_CHARACTERS = 10_000  # of a prompt
STEPS, GUIDANCE = 50, 7.5  # where neither the checkpoint nor its family has a default of its own
MOST_GUIDANCE = 1_000_000
MOST_SIDE = 1_000_000  # pixels of what SDXL is told about a picture
MOST_ADAPTED = 100  # times an adapter
MOST_CONTROL = 100  # times what a ControlNet adds
MOST_IMAGE_PROMPT = 100  # times what an IP-Adapter adds


def _suited(name: str, otherwise: Any) -> Callable[[Manifest], Any]:
    """Return the default of the checkpoint or its family, or everyone's."""
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
class Parameters:
    """The parameters of a call.

    One that is marked `each` takes a value for all prompts, or a list with one for each. With
    `per`, the list is for the export's models, and `Each([…])` for the prompts.
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
        otherwise=_suited("image_guidance_scale", 1.5),
        goes_with="image",
        taken_by=EDITS,
    )
    control_image: Any = parameter(
        Kind.PICTURE,
        "Control picture",
        "the picture that a ControlNet follows: edges, poses, whatever it was trained for",
        each=True,
        per=CONTROLNETS,
        is_hint=True,
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
        f"number of denoising steps; more take longer (default: the checkpoint's, mostly {STEPS})",
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
        f"strength of the prompt (default: the checkpoint's, mostly {GUIDANCE})",
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
        named=lambda manifest: named_reuses(manifest.reuse, manifest.verification),
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
        "unit noise (N, h, w, C) in place of what the seeds give",
        each=True,
        in_python_only=True,
    )
    original_size: tuple[int, int] | None = parameter(
        Kind.PAIR,
        "Original size",
        "SDXL: the size (height, width) that the picture is to look as if scaled from",
        most=MOST_SIDE,
        taken_by=SIZED,
        shown_by=NONE,
    )
    crop_top_left: tuple[int, int] | None = parameter(
        Kind.PAIR,
        "Crop",
        "SDXL: the corner (top, left) that the picture is to look as if cropped at (default: 0x0)",
        most=MOST_SIDE,
        taken_by=SIZED,
        shown_by=NONE,
    )
    target_size: tuple[int, int] | None = parameter(
        Kind.PAIR,
        "Target size",
        "SDXL: the size (height, width) that the picture is to look as if made for",
        most=MOST_SIDE,
        taken_by=TARGET_SIZED,
        shown_by=NONE,
    )
