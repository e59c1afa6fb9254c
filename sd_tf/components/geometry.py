"""The choices that compiling a pipeline fixes, checked against the checkpoint before any work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sd_tf.config import (
    AUTOENCODER,
    FLOAT16,
    STORAGES,
    PipelineConfig,
)
from sd_tf.config.rewrites import REWRITES
from sd_tf.runtime.adapter_places import (
    DEFAULT_LAYERS,
    DEFAULT_RANK,
    LAYERS,
    NO_PLACES,
    AdapterPlaces,
)
from sd_tf.runtime.manifest import ExportError
from sd_tf.runtime.shapes import Shapes, Size

PRECISIONS = ("float32", "bfloat16", "float16")
LEAST_TILE = 16  # latents: a fourth of it is what neighbours share
GUIDANCE = ("classifier_free", "none")
MOST_STEPS = 250  # the tables of all runs grow with its square: 150 MB here, 2.4 GB for 1000
MOST_REUSE = 20  # verification runs each number, on a run of 20 steps; pages offer each


@dataclass(frozen=True, kw_only=True)
class Fixed:
    batch_size: int = 1
    height: int | None = None  # None: the size that the model was made for
    width: int | None = None
    # Several, in place of the three above; the first of each is the default.
    batch_sizes: Sequence[int] = ()
    sizes: Sequence[Size] = ()  # (height, width)
    precision: str = "float32"
    # Of kernels: int8 or float16, with a colon and names of the checkpoint's parts, or for all but
    # the autoencoders. None: as they are computed.
    storage: str | None = None
    max_steps: int = 100
    guidance: str = "classifier_free"  # or none: Turbo and LCM, one model call per step
    guidance_rescale: float = 0.0
    prompt_chunks: int = 1  # chunks of 75 tokens that a prompt may fill
    adapter_slots: int = 0  # adapters that can be switched at run time
    adapter_rank: int = DEFAULT_RANK  # the highest rank that such an adapter may have
    adapter_layers: str = DEFAULT_LAYERS  # the denoiser's layers that they may change
    image_prompts: int = 4  # most pictures of a prompt for each IP-Adapter
    reuse: int = 1  # most model calls that one run of a UNet's deep layers may serve
    tile: int = 0  # most pixels of a side that are decoded or encoded at once; 0: all
    disabled_rewrites: Sequence[str] = ()  # of those for the hardware: see `config.rewrites`


@dataclass(frozen=True)
class Geometry:
    """The choices of `Fixed`, with every default filled in for a checkpoint."""

    shapes: Shapes
    storage: Mapping[str, str]  # the checkpoint's parts that are stored in fewer bits, and how
    max_steps: int
    guidance: str
    guidance_rescale: float
    prompt_chunks: int
    adapters: AdapterPlaces
    image_prompts: int  # most pictures of a prompt for each IP-Adapter
    reuse: int  # most model calls that one run of a UNet's deep layers may serve
    tile: int  # most latents of a side that are decoded or encoded at once; 0: all


def takes_weights(config: PipelineConfig) -> bool:
    """Whether prompts may have weights and several chunks: the context is CLIP's alone."""
    return config.denoiser.conditioner == "clip"


def refuse(rule: str, received) -> None:
    raise ExportError(f"{rule} Received: {received}")


def geometry_of(config: PipelineConfig, fixed: Fixed) -> Geometry:
    if fixed.precision not in PRECISIONS:
        refuse(f"The precision is one of {', '.join(PRECISIONS)}.", fixed.precision)
    if unknown := [name for name in fixed.disabled_rewrites if name not in REWRITES]:
        refuse(f"Rewrites are {', '.join(REWRITES)}.", ", ".join(unknown))
    if fixed.image_prompts < 1:
        refuse("A prompt has places for at least 1 picture.", fixed.image_prompts)
    if fixed.prompt_chunks < 1:
        refuse("A prompt has at least 1 chunk.", fixed.prompt_chunks)
    if fixed.prompt_chunks > 1 and not takes_weights(config):
        refuse(
            "Prompts of several chunks are for SD1, SD2 and SDXL: `prompt_chunks` must be 1.",
            fixed.prompt_chunks,
        )
    most_steps = min(MOST_STEPS, config.schedule.num_train_timesteps)
    if not 1 <= fixed.max_steps <= most_steps:
        refuse(f"max_steps is 1…{most_steps}.", fixed.max_steps)
    most_reuse = min(MOST_REUSE, fixed.max_steps)
    if not 1 <= fixed.reuse <= most_reuse:
        refuse(
            f"`reuse`, the model calls that a run of the deep layers serves, is 1…{most_reuse}: at "
            f"most {MOST_REUSE}, and `max_steps`.",
            fixed.reuse,
        )
    if fixed.reuse > 1 and config.denoiser.feature_channels is None:
        refuse(
            "Only a UNet has deep layers whose features later model calls can reuse: `reuse` must "
            "be 1 for a transformer.",
            fixed.reuse,
        )
    if not 0.0 <= fixed.guidance_rescale <= 1.0:
        refuse("The guidance rescale factor is between 0 and 1.", fixed.guidance_rescale)
    if fixed.guidance not in GUIDANCE:
        refuse(f"Guidance is {' or '.join(GUIDANCE)}.", fixed.guidance)
    is_clip = takes_weights(config)
    if fixed.guidance != "none" and is_clip and config.denoiser.is_told_guidance:
        refuse(
            "This checkpoint's denoiser is told the guidance scale (LCM), so `guidance` must be "
            "none.",
            fixed.guidance,
        )
    is_rescalable = fixed.guidance != "none" and config.latent_inputs != "image" and is_clip
    if fixed.guidance_rescale and not is_rescalable:
        refuse(
            "Only guidance by a negative prompt alone is rescaled; `guidance_rescale` must be 0 "
            "without guidance, and for checkpoints that edit pictures or have a transformer.",
            fixed.guidance_rescale,
        )
    return Geometry(
        shapes_of(config, fixed),
        storage_of(config, fixed),
        fixed.max_steps,
        fixed.guidance,
        fixed.guidance_rescale,
        fixed.prompt_chunks,
        adapters_of(fixed),
        fixed.image_prompts,
        fixed.reuse,
        tile_of(config, fixed),
    )


def tile_of(config: PipelineConfig, fixed: Fixed) -> int:
    """Return the side of a tile in latents, checked; 0: pictures are not divided."""
    scale = config.autoencoder.downscale
    least = LEAST_TILE * scale
    if fixed.tile and (fixed.tile < least or fixed.tile % scale):
        refuse(f"A tile is 0 or a multiple of {scale} from {least} on, in pixels.", fixed.tile)
    return fixed.tile // scale


def storage_of(config: PipelineConfig, fixed: Fixed) -> dict[str, str]:
    """Return the parts of the checkpoint that are stored in fewer bits, and how, checked."""
    if fixed.storage is None:
        return {}
    kind, _, names = fixed.storage.partition(":")
    if kind not in STORAGES:
        refuse(
            f"The storage is {' or '.join(STORAGES)}, for all parts but the autoencoders, or for "
            f"those named after a colon.",
            fixed.storage,
        )
    if kind == FLOAT16 and fixed.precision != "float32":
        refuse(
            f"{FLOAT16} is no narrower than {fixed.precision}, in which this is computed: leave "
            f"out `storage`, or store int8.",
            fixed.storage,
        )
    autoencoders = (AUTOENCODER, *config.small_decoders)
    parts = names.split(",") if names else [n for n in config.components if n not in autoencoders]
    if unknown := [name for name in parts if name not in config.components]:
        refuse(f"This checkpoint's parts are {', '.join(config.components)}.", ", ".join(unknown))
    adapted = (*config.clip_encoders, config.denoiser.component)
    if fixed.adapter_slots and (kept := [name for name in parts if name in adapted]):
        refuse(
            "Places for adapters add to kernels as they are computed, in the CLIP text encoders "
            "and the denoiser: store other parts, or leave out `storage` or `adapter_slots`.",
            ", ".join(kept),
        )
    return dict.fromkeys(parts, kind)


def adapters_of(fixed: Fixed) -> AdapterPlaces:
    """Return the places for adapters that are asked for, checked."""
    if fixed.adapter_slots < 0:
        refuse("The number of places for adapters is at least 0.", fixed.adapter_slots)
    if fixed.adapter_rank < 1:
        refuse("The rank of a place for an adapter is at least 1.", fixed.adapter_rank)
    if fixed.adapter_layers not in LAYERS:
        refuse(f"The layers of adapters are {', '.join(LAYERS)}.", fixed.adapter_layers)
    if not fixed.adapter_slots:
        if (fixed.adapter_rank, fixed.adapter_layers) != (DEFAULT_RANK, DEFAULT_LAYERS):
            refuse(
                "`adapter_rank` and `adapter_layers` are of places for adapters: give "
                "`adapter_slots`, too.",
                f"{fixed.adapter_rank}, {fixed.adapter_layers}",
            )
        return NO_PLACES
    return AdapterPlaces(fixed.adapter_slots, fixed.adapter_rank, fixed.adapter_layers)


def shapes_of(config: PipelineConfig, fixed: Fixed) -> Shapes:
    """Return the shapes that are asked for, checked."""
    if fixed.batch_sizes and fixed.batch_size != Fixed.batch_size:
        refuse("Give `batch_size` or `batch_sizes`.", f"{fixed.batch_size}, {fixed.batch_sizes}")
    if fixed.sizes and (fixed.height, fixed.width) != (None, None):
        refuse("Give `height` and `width`, or `sizes`.", f"{fixed.height}, {fixed.width}")
    batch_sizes = tuple(fixed.batch_sizes) or (fixed.batch_size,)
    if least := [size for size in batch_sizes if size < 1]:
        refuse("The batch size is at least 1.", least[0])
    default = config.default_size
    one = tuple(default if side is None else side for side in (fixed.height, fixed.width))
    sizes = tuple(map(tuple, fixed.sizes)) or (one,)
    scale, multiple = config.autoencoder.downscale, config.size_multiple
    most = config.denoiser.most_latents
    for size in sizes:
        for name, side in zip(("height", "width"), size, strict=True):
            if side < multiple or side % multiple:
                refuse(f"The {name} is a positive multiple of {multiple}.", side)
            if most is not None and side > most * scale:
                refuse(f"The {name} is at most {most * scale} for this checkpoint.", side)
    for name, values in (("batch size", batch_sizes), ("size", sizes)):
        if len(set(values)) < len(values):
            refuse(f"Each {name} is given once.", values)
    return Shapes(sizes, batch_sizes, scale, config.autoencoder.latent_channels)
