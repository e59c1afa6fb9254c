"""The options of an export, checked against the checkpoint before any work."""

from collections.abc import Sequence
from dataclasses import dataclass

from sd_tf.components import VISION_ENCODER
from sd_tf.components.build import component_names
from sd_tf.components.geometry import Fixed, Geometry, geometry_of, refuse
from sd_tf.config import family_of
from sd_tf.config.rewrites import TARGETS
from sd_tf.runtime.manifest import serves
from sd_tf.weights import Checkpoint

VERIFY = ("full", "fast", "off")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Fixed):
    jit_compile_text_encoder: bool = False
    target: str | None = None  # of TARGETS; None: this machine's best device
    components: Sequence[str] | None = None  # fewer replace those of an export; None: all
    text_to_image: bool = False  # add the SavedModel from prompts to PNG files
    verify: str = "full"
    overwrite: bool = False


def check(checkpoint: Checkpoint, options: ExportOptions) -> tuple[Geometry, tuple[str, ...]]:
    """Check the options against the checkpoint; return the geometry and the components wanted."""
    known = component_names(checkpoint.config)
    wanted = known if options.components is None else tuple(options.components)
    if unknown := [name for name in wanted if name not in known]:
        refuse(f"Components are {', '.join(known)}.", ", ".join(unknown))
    if len(set(wanted)) < len(wanted):
        refuse("Each component is given once.", ", ".join(wanted))
    if not wanted:
        refuse(f"At least one component of {', '.join(known)} is exported.", "none")
    if checkpoint.embeddings and "text_encoder" not in wanted:
        refuse(
            "Embeddings change the text_encoder, so they are exported with it: add it to the "
            "components, or leave out the embeddings.",
            ", ".join(wanted),
        )
    for adapter in checkpoint.adapters:
        changed = [n for n in known if any(serves(n, part) for part in adapter.components)]
        if not set(changed) & set(wanted):
            refuse(
                f"{adapter.name} changes the {' and the '.join(changed)}: add it to the components "
                f"that are exported, or leave out the adapter.",
                ", ".join(wanted),
            )
    if unused := [name for name in checkpoint.config.small_decoders if name not in wanted]:
        refuse(
            f"A small decoder is the {unused[0]}: add it to the components that are exported, or "
            f"leave out the small decoder.",
            ", ".join(wanted),
        )
    if options.verify not in VERIFY:
        refuse(f"Verification is one of {', '.join(VERIFY)}.", options.verify)
    if options.target not in (None, *TARGETS):
        refuse(f"The target is one of {', '.join(TARGETS)}.", options.target)
    if options.text_to_image and set(wanted) != set(known):
        refuse("The text_to_image is exported with all components.", ", ".join(wanted))
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
    if options.text_to_image and checkpoint.image_adapters:
        refuse(
            "The text_to_image is for checkpoints that draw from a prompt alone.",
            f"an IP-Adapter, {checkpoint.image_adapters[0]}",
        )
    if checkpoint.image_adapters and not {"diffusion_model", VISION_ENCODER} <= set(wanted):
        refuse(
            f"IP-Adapters are part of the diffusion_model and the {VISION_ENCODER}, so they are "
            f"exported with both: add them to the components, or leave out the IP-Adapters.",
            ", ".join(wanted),
        )
    if checkpoint.controlnets and "diffusion_model" not in wanted:
        refuse(
            "ControlNets are part of the diffusion_model, so they are exported with it: add it to "
            "the components, or leave out the ControlNets.",
            ", ".join(wanted),
        )
    geometry = geometry_of(checkpoint.config, options)
    stored = geometry.storage
    if stored and not any(serves(name, part) for name in wanted for part in stored):
        refuse(
            f"The storage is of {', '.join(stored)}: export a component that computes with it, or "
            f"leave out `storage`.",
            ", ".join(wanted),
        )
    return geometry, wanted
