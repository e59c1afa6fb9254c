"""What an export can do: the conditions by which it takes, needs or offers a call's parameters."""

from sd_tf.config import SAMPLERS
from sd_tf.runtime.image_prompts import VISION_ENCODER
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.parameter import Condition, Per

# The uses of a picture that comes with the prompt.
START, EDIT, PAINT = "start", "edit", "paint"
USE_OF_LATENT_INPUTS = {"none": START, "image": EDIT, "mask_and_image": PAINT}
# How prompts are read. The second is also the name of the text encoder's endpoint that it needs.
PLAIN, WEIGHTED = SYNTAXES = ("plain", "weighted")


def use_of_picture(manifest: Manifest) -> str:
    """Return what a picture that comes with the prompt is for: START, EDIT or PAINT."""
    return USE_OF_LATENT_INPUTS[manifest.latent_inputs]


def takes_weights(manifest: Manifest) -> bool:
    """Return whether the export's text encoder takes weights of a prompt's words."""
    text_encoder = manifest.components.get("text_encoder")
    return text_encoder is not None and WEIGHTED in text_encoder.signatures


def _used_to(whose: str, *uses: str) -> Condition:
    return Condition(whose, lambda manifest: use_of_picture(manifest) in uses)


STARTS_OR_PAINTS = _used_to(
    "checkpoints that start from a picture or paint inside a mask", START, PAINT
)
EDITS = _used_to("checkpoints that edit a picture by instruction (InstructPix2Pix)", EDIT)
PAINTS = _used_to("checkpoints that paint inside a mask (inpainting)", PAINT)
EDITS_OR_PAINTS = _used_to(
    "checkpoints that edit a picture by instruction or paint inside a mask", EDIT, PAINT
)
SIZED = Condition("checkpoints of the SDXL family", lambda manifest: manifest.time_ids > 0)
TARGET_SIZED = Condition(
    "checkpoints of the SDXL family, its refiner excepted", lambda manifest: manifest.time_ids == 6
)
WEIGHING = Condition("exports that take weights", takes_weights)
ADAPTED = Condition(
    "exports with places for adapters (--adapter_slots)",
    lambda manifest: manifest.adapters.slots > 0,
)
STEERED = Condition(
    "exports with ControlNets (--controlnet)", lambda manifest: bool(manifest.controls)
)
SHOWN_PICTURES = Condition(
    "exports with IP-Adapters (--ip_adapter)",
    lambda manifest: bool(manifest.image_prompts.adapters),
)
REUSING = Condition(
    "exports that may reuse deep features (--reuse)", lambda manifest: manifest.reuse.most > 1
)
CONTROLNETS = Per("ControlNets", lambda manifest: [net.name for net in manifest.controls])
IP_ADAPTERS = Per(
    "IP-Adapters",
    lambda manifest: manifest.image_prompts.names,
    most=lambda manifest: manifest.image_prompts.most,
)
GUIDED = Condition("exports with guidance", lambda manifest: manifest.guidance == "classifier_free")
MIXING = Condition(
    "exports that draw between the prompt and the negative prompt",
    lambda manifest: GUIDED.holds(manifest) and not SAMPLERS[manifest.default_sampler].is_flow,
)
TRULY_GUIDED = Condition(
    "Flux exports with guidance by a negative prompt",
    lambda manifest: "true_guidance_scale" in manifest.further_scales,
)
SKIPPING = Condition(
    "SD3.5 exports that can leave out blocks",
    lambda manifest: "skip_layer_guidance_scale" in manifest.further_scales,
)


def check_image_encoder(manifest: Manifest) -> None:
    """Refuse an export that cannot encode pictures."""
    if "image_encoder" not in manifest.components:
        raise ExportError(
            "The export has no image_encoder, which an image needs. Export that component, too."
        )


def check_vision_encoder(manifest: Manifest) -> None:
    """Refuse an export that cannot read the pictures of a prompt."""
    if VISION_ENCODER not in manifest.components:
        raise ExportError(
            f"The export has no {VISION_ENCODER}, which an image_prompt needs. Export that "
            f"component, too."
        )


def check_weights(manifest: Manifest) -> None:
    """Refuse an export whose text encoder takes no weights."""
    if not takes_weights(manifest):
        raise ExportError(
            "The export's text_encoder takes no weights: SD3's and Flux's do not, nor do exports "
            "by an older sd_tf, which have to be made again. Leave out `prompt_syntax`."
        )
