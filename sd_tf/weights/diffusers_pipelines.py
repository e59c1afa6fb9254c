"""diffusers' pipeline classes: the components that they take, read from `model_index.json`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sd_tf.config import FluxConfig, MMDiTConfig, PipelineConfig
from sd_tf.files.objects import read_object
from sd_tf.files.tensors import CheckpointError
from sd_tf.weights.texts import LEFT_OUT, check_left_out

MODEL_INDEX = "model_index.json"
# Its defaults for parameters of a call; diffusers passes over names that begin with "_".
CALL_DEFAULTS = "_call_defaults"
TEXT_ENCODER = "text_encoder"  # how the names of all text encoders begin
CLIP, PROJECTED_CLIP, T5 = "CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"
CLIP_TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast")
T5_TOKENIZERS = ("T5TokenizerFast", "T5Tokenizer")
ENDS = {"vae": ("AutoencoderKL",), "scheduler": None}  # None: read_schedule decides


@dataclass(frozen=True)
class Pipelines:
    """Pipeline classes of diffusers that take the same components."""

    names: tuple[str, ...]
    components: Mapping[str, tuple[str, ...] | None]  # component → its classes
    required: tuple[str, ...]
    ignored: tuple[str, ...]  # components that take no part in computing pictures
    penultimate: bool = False  # CLIP's context is the penultimate layer's output
    # SDXL's: without the fields force_zeros_for_empty_prompt and force_upcast, both are on.
    zeros_and_upcast: bool = False
    pools_unprojected: bool = False  # CLIP's pooled output has no projection
    left_out: str | None = None  # the text encoder in place of which zeros may stand
    t5_length: int | None = None  # tokens of a prompt for T5, if a call does not say
    flow_spacing: str = "linspace"  # of the steps, for flow matching
    # Fields of a scheduler of β that the classes set, whatever is in its file.
    betas_fields: Mapping[str, Any] = field(default_factory=dict)
    # The classes raise a smaller sample_size of UNets that are older than diffusers 0.9 to it.
    old_sample_size: int | None = None

    @property
    def text_encoders(self) -> list[str]:
        """The text encoders, in the order in which their outputs are joined."""
        return [name for name in self.components if name.startswith(TEXT_ENCODER)]


UNET = Pipelines(
    names=("StableDiffusionInstructPix2PixPipeline", "LatentConsistencyModelPipeline"),
    components={
        "text_encoder": (CLIP, PROJECTED_CLIP),
        "text_encoder_2": (CLIP, PROJECTED_CLIP),
        "unet": ("UNet2DConditionModel",),
        **ENDS,
        "tokenizer": CLIP_TOKENIZERS,
        "tokenizer_2": CLIP_TOKENIZERS,
    },
    required=("unet", "vae"),
    # These check or watermark finished pictures.
    ignored=("safety_checker", "feature_extractor", "watermark"),
)
UNET_PLAIN = replace(
    UNET,
    names=("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline"),
    betas_fields={"steps_offset": 1, "clip_sample": False},
    old_sample_size=64,
)
UNET_INPAINT = replace(
    UNET_PLAIN,
    names=("StableDiffusionInpaintPipeline",),
    betas_fields={"steps_offset": 1, "skip_prk_steps": True},
)
UNET_XL = replace(
    UNET,
    names=(
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
        "StableDiffusionXLInstructPix2PixPipeline",
    ),
    penultimate=True,
    zeros_and_upcast=True,
)
IP_ADAPTER = ("image_encoder", "feature_extractor")  # they prepare pictures for an IP-Adapter alone
SD3 = Pipelines(
    names=("StableDiffusion3Pipeline", "StableDiffusion3Img2ImgPipeline"),
    components={
        "text_encoder": (PROJECTED_CLIP,),
        "text_encoder_2": (PROJECTED_CLIP,),
        LEFT_OUT: (T5,),
        "transformer": ("SD3Transformer2DModel",),
        **ENDS,
        "tokenizer": CLIP_TOKENIZERS,
        "tokenizer_2": CLIP_TOKENIZERS,
        "tokenizer_3": T5_TOKENIZERS,
    },
    required=("text_encoder", "text_encoder_2", "transformer", "vae"),
    ignored=IP_ADAPTER,
    penultimate=True,
    left_out=LEFT_OUT,
    t5_length=256,
)
FLUX = Pipelines(
    names=("FluxPipeline", "FluxImg2ImgPipeline"),
    components={
        "text_encoder": (CLIP,),
        "text_encoder_2": (T5,),
        "transformer": ("FluxTransformer2DModel",),
        **ENDS,
        "tokenizer": CLIP_TOKENIZERS,
        "tokenizer_2": T5_TOKENIZERS,
    },
    required=("text_encoder", "text_encoder_2", "transformer", "vae"),
    ignored=IP_ADAPTER,
    pools_unprojected=True,
    t5_length=512,
    flow_spacing="trailing",
)
KINDS = (UNET_PLAIN, UNET_INPAINT, UNET, UNET_XL, SD3, FLUX)
PIPELINES = {name: kind for kind in KINDS for name in kind.names}

_BLENDS = (
    "it blends a masked picture into every step, which is not supported for transformers; if its "
    "weights are those of text to image, name {plain} as its _class_name"
)
_FURTHER = "its transformer takes {inputs} beside the latents, which is not supported"
# Pipeline class → why it is refused.
REFUSED = {
    "StableDiffusion3InpaintPipeline": _BLENDS.format(plain=SD3.names[0]),
    "FluxInpaintPipeline": _BLENDS.format(plain=FLUX.names[0]),
    "FluxFillPipeline": _FURTHER.format(inputs="a mask and a masked picture"),
    "FluxKontextPipeline": _FURTHER.format(inputs="the tokens of a picture"),
    "FluxKontextInpaintPipeline": _FURTHER.format(inputs="the tokens of a picture"),
    **{
        f"FluxControl{kind}Pipeline": _FURTHER.format(inputs="a picture of edges or depths")
        for kind in ("", "Img2Img", "Inpaint")
    },
}


def read_index(folder: Path, without: Sequence[str] = ()) -> dict:
    """Read `model_index.json`, and check that its pipeline and its components are supported.

    Args:
        without: text encoders that are treated as absent.
    """
    path = folder / MODEL_INDEX
    index = read_object(path, CheckpointError)
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str):
        raise CheckpointError(f"{path} names no pipeline class. Received: {pipeline!r}")
    if pipeline in REFUSED:
        raise CheckpointError(f"{path}: {pipeline} is not supported: {REFUSED[pipeline]}.")
    if pipeline not in PIPELINES:
        raise CheckpointError(
            f"{path}: the pipeline class {pipeline!r} is not supported; supported: "
            f"{', '.join(PIPELINES)}."
        )
    if index.get("is_cosxl_edit"):
        raise CheckpointError(
            f"{path}: is_cosxl_edit={index['is_cosxl_edit']!r} is not supported: its UNet takes "
            f"the picture's latents at another scale."
        )
    kind = PIPELINES[pipeline]
    check_left_out(without, kind.left_out, f"a {pipeline}")
    for name in without:
        index |= {name: [None, None], tokenizer_of(name): [None, None]}
    for name, entry in components_of(index).items():
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(f"{path} points outside its folder: {name!r}")
        if name not in kind.components:
            raise CheckpointError(
                f"{path}: the component {name!r} ({entry[1]}) is not supported, and without it the "
                f"pipeline would compute something else. Supported: {', '.join(kind.components)}."
            )
        known = kind.components[name]
        if known is not None and entry[1] not in known:
            raise CheckpointError(f"{path}: {name} is a {entry[1]}, supported: {', '.join(known)}.")
    return index


def kind_of(index: Mapping) -> Pipelines:
    return PIPELINES[index["_class_name"]]


def components_of(index: Mapping) -> dict[str, list]:
    """Return the components that are present and compute pictures; [null, null] means absent."""
    ignored = kind_of(index).ignored
    return {
        name: entry
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and entry[1] is not None
        if name not in ignored
    }


def has_weights(component: str) -> bool:
    return not component.startswith("tokenizer") and component != "scheduler"


def tokenizer_of(text_encoder: str) -> str:
    return text_encoder.replace(TEXT_ENCODER, "tokenizer")


def pipeline_class(config: PipelineConfig) -> str:
    """Return the class that makes pictures from texts, or edits them as the denoiser does."""
    if isinstance(config.denoiser, MMDiTConfig):
        return SD3.names[0]
    if isinstance(config.denoiser, FluxConfig):
        return FLUX.names[0]
    is_xl = config.denoiser.added is not None
    kind = {
        "none": "Pipeline",
        "image": "InstructPix2PixPipeline",
        "mask_and_image": "InpaintPipeline",
    }[config.latent_inputs]
    if is_xl and "text_encoder" not in config.text_encoders:
        kind = "Img2ImgPipeline"  # the refiner
    return f"StableDiffusion{'XL' if is_xl else ''}{kind}"


def tokenizer_class(config: PipelineConfig, text_encoder: str) -> str:
    return (T5_TOKENIZERS if text_encoder in config.t5_encoders else CLIP_TOKENIZERS)[0]
