"""The options of an export, checked against the checkpoint before any work."""

from collections.abc import Sequence
from dataclasses import dataclass

from sd_tf.components import COMPONENTS
from sd_tf.components.geometry import Fixed, Geometry, geometry_of, refuse
from sd_tf.config import family_of
from sd_tf.models import lowering
from sd_tf.weights import Checkpoint

VERIFY = ("full", "fast", "off")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Fixed):
    jit_compile_text_encoder: bool = False
    target: str | None = None  # of lowering.TARGETS; None: this machine's best device
    disabled_rewrites: Sequence[str] = ()
    components: Sequence[str] = COMPONENTS
    text_to_image: bool = False  # add the SavedModel from prompts to PNG files
    verify: str = "full"
    overwrite: bool = False


def check(checkpoint: Checkpoint, options: ExportOptions) -> Geometry:
    """Check the options against the checkpoint; return the geometry that they ask for."""
    if unknown := [name for name in options.components if name not in COMPONENTS]:
        refuse(f"Components are {', '.join(COMPONENTS)}.", ", ".join(unknown))
    if not options.components:
        refuse(f"At least one component of {', '.join(COMPONENTS)} is exported.", "none")
    if checkpoint.embeddings and "text_encoder" not in options.components:
        refuse(
            "Embeddings change the text_encoder, so they are exported with it: add it to the "
            "components, or leave out the embeddings.",
            ", ".join(options.components),
        )
    if options.storage is not None and "text_encoder" not in options.components:
        refuse(
            "The storage is the text_encoder's, so it is exported with it: add it to the "
            "components, or leave out `storage`.",
            ", ".join(options.components),
        )
    if options.verify not in VERIFY:
        refuse(f"Verification is one of {', '.join(VERIFY)}.", options.verify)
    if options.target not in (None, *lowering.TARGETS):
        refuse(f"The target is one of {', '.join(lowering.TARGETS)}.", options.target)
    if unknown := [name for name in options.disabled_rewrites if name not in lowering.NAMES]:
        refuse(f"Rewrites are {', '.join(lowering.NAMES)}.", ", ".join(unknown))
    if options.text_to_image and set(options.components) != set(COMPONENTS):
        refuse("The text_to_image is exported with all components.", ", ".join(options.components))
    if options.text_to_image and checkpoint.config.t5_encoders:
        refuse(
            "The text_to_image is for checkpoints whose text encoders are all CLIP: T5's tokenizer "
            "has no form in TensorFlow's core operations.",
            ", ".join(checkpoint.config.t5_encoders),
        )
    if options.text_to_image and checkpoint.config.latent_inputs != "none":
        refuse(
            "The text_to_image is for checkpoints that draw from a prompt alone.",
            family_of(checkpoint.config),
        )
    if options.text_to_image and checkpoint.controlnets:
        refuse(
            "The text_to_image is for checkpoints that draw from a prompt alone.",
            f"a ControlNet, {checkpoint.controlnets[0]}",
        )
    if checkpoint.controlnets and "diffusion_model" not in options.components:
        refuse(
            "ControlNets are part of the diffusion_model, so they are exported with it: add it to "
            "the components, or leave out the ControlNets.",
            ", ".join(options.components),
        )
    return geometry_of(checkpoint.config, options)
