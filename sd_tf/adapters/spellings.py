"""The names under which files keep a model's layers.

Names are never taken apart: where dots became underscores, `input_blocks_1` begins many names.
Every layer of the model is listed under each of its spellings, and a file's names are looked up.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sd_tf.adapters.errors import AdapterError
from sd_tf.config.original_names import original_names
from sd_tf.config.original_transformer_names import original_modules

Layers = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Component → its modules by diffusers' names → the shape of each one's weight, as PyTorch has it.

The component is "unet", "transformer" or a text encoder; a module is, for example,
"down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q".
"""

DENOISERS = ("unet", "transformer")
KOHYA = {  # component → the prefixes of its layers
    "unet": ("lora_unet_",),
    "transformer": ("lora_unet_", "lora_transformer_"),
    "text_encoder": ("lora_te_",),
    "text_encoder_2": ("lora_te2_",),
    "text_encoder_3": ("lora_te3_",),
}
KOHYA_FIRST_OF_TWO = ("lora_te1_",)
KOHYA_T5 = ("lora_te3_",)  # of Flux, too, whose T5 is the second encoder
T5_LAYERS = "encoder.block."
ORIGINAL = "diffusion_model."  # the prefix of a transformer's original names
PEFT_PREFIX = "base_model.model."
TEXT_PREFIX = "text_model."  # transformers 5 leaves it out
# Ends of modules' names, and what they were in diffusers' attention processors.
UNET_PROCESSORS = (
    (".to_q", ".processor.to_q"),
    (".to_k", ".processor.to_k"),
    (".to_v", ".processor.to_v"),
    (".to_out.0", ".processor.to_out"),
    (".to_out.0", ".to_out"),
)
TEXT_PROCESSORS = tuple(
    (f".self_attn.{name}_proj", f".self_attn.to_{name}") for name in ("q", "k", "v", "out")
)


class Place(NamedTuple):
    """A layer, or layers that are fused in the original release, and the convention of the name."""

    component: str
    modules: tuple[str, ...]
    convention: str


def spellings(layers: Layers, is_peft: bool = False) -> dict[str, Place]:
    """Return the layers by each of their spellings.

    Args:
        is_peft: PEFT's own names, which leave the component open; `layers` has only one, then.
    """
    found = {}

    def add(spelled: str, place: Place) -> None:
        other = found.setdefault(spelled, place)
        if other[:2] != place[:2]:
            raise AdapterError(f"{spelled} could be {other[:2]} or {place[:2]} of this model.")

    if is_peft:
        for component, modules in layers.items():
            for module in modules:
                for name in module_names(module):
                    add(PEFT_PREFIX + name, Place(component, (module,), "PEFT"))
        return found
    for component, modules in layers.items():
        prefixes = KOHYA.get(component, ())
        if component == "text_encoder" and "text_encoder_2" in layers:
            prefixes = KOHYA_FIRST_OF_TWO
        if any(module.startswith(T5_LAYERS) for module in modules):
            prefixes = KOHYA_T5

        def kohya(name, places, convention, component=component, prefixes=prefixes):
            for prefix in prefixes:
                add(prefix + name.replace(".", "_"), Place(component, places, convention))

        for module in modules:
            for name, convention in _dotted(component, module):
                add(name, Place(component, (module,), convention))
            kohya(module, (module,), "kohya")
        if component == "unet":
            for module, name in original_names(modules).items():
                kohya(name, (module,), "kohya, the UNet by its original names")
        if component == "transformer":
            for name, places in original_modules(modules).items():
                kohya(name, places, "kohya, the transformer by its original names")
                add(ORIGINAL + name, Place(component, places, "the original names"))
    return found


def module_names(module: str) -> tuple[str, ...]:
    """Return a module's name, and that without the prefix that some releases leave out."""
    short = module.removeprefix(TEXT_PREFIX)
    return (module,) if short == module else (module, short)


def _dotted(component: str, module: str) -> Iterator[tuple[str, str]]:
    is_unet = component == "unet"
    is_denoiser = component in DENOISERS
    for name in module_names(module):
        yield f"{component}.{name}", "diffusers"
        if is_denoiser:
            yield name, "diffusers without a component's name"
        for end, processor in UNET_PROCESSORS if is_unet else TEXT_PROCESSORS:
            if name.endswith(end):
                old = name.removesuffix(end) + processor
                yield f"{component}.{old}", "diffusers' attention processors"
                if is_unet:
                    yield old, "diffusers' attention processors"
