"""The choices that compiling a pipeline fixes, checked against the checkpoint before any work."""

from dataclasses import dataclass

from sd_tf.config import PipelineConfig
from sd_tf.runtime.manifest import ExportError

PRECISIONS = ("float32", "bfloat16", "float16")
GUIDANCE = ("classifier_free", "none")


@dataclass(frozen=True, kw_only=True)
class Fixed:
    batch_size: int = 1
    height: int | None = None  # None: the size that the model was made for
    width: int | None = None
    precision: str = "float32"
    max_steps: int = 100
    guidance: str = "classifier_free"  # or none: Turbo and LCM, one model call per step
    guidance_rescale: float = 0.0
    prompt_chunks: int = 1  # chunks of 75 tokens that a prompt may fill


@dataclass(frozen=True)
class Geometry:
    """The choices of `Fixed`, with every default filled in for a checkpoint."""

    batch_size: int
    height: int
    width: int
    latent_shape: tuple[int, int, int]
    max_steps: int
    guidance: str
    guidance_rescale: float
    prompt_chunks: int


def refuse(rule: str, received) -> None:
    raise ExportError(f"{rule} Received: {received}")


def geometry_of(config: PipelineConfig, fixed: Fixed) -> Geometry:
    if fixed.precision not in PRECISIONS:
        refuse(f"The precision is one of {', '.join(PRECISIONS)}.", fixed.precision)
    if fixed.batch_size < 1:
        refuse("The batch size is at least 1.", fixed.batch_size)
    if fixed.prompt_chunks < 1:
        refuse("A prompt has at least 1 chunk.", fixed.prompt_chunks)
    if not 1 <= fixed.max_steps <= config.schedule.num_train_timesteps:
        refuse(f"max_steps is 1…{config.schedule.num_train_timesteps}.", fixed.max_steps)
    if not 0.0 <= fixed.guidance_rescale <= 1.0:
        refuse("The guidance rescale factor is between 0 and 1.", fixed.guidance_rescale)
    if fixed.guidance not in GUIDANCE:
        refuse(f"Guidance is {' or '.join(GUIDANCE)}.", fixed.guidance)
    if fixed.guidance != "none" and config.denoiser.guidance_embed_dim is not None:
        refuse(
            "This checkpoint's denoiser is told the guidance scale (LCM), so `guidance` must be "
            "none.",
            fixed.guidance,
        )
    if fixed.guidance_rescale and (fixed.guidance == "none" or config.latent_inputs == "image"):
        refuse(
            "Only guidance by a negative prompt alone is rescaled; `guidance_rescale` must be 0 "
            "without guidance, and for checkpoints that edit pictures.",
            fixed.guidance_rescale,
        )
    scale = config.autoencoder.downscale
    height = config.default_size if fixed.height is None else fixed.height
    width = config.default_size if fixed.width is None else fixed.width
    for name, size in (("height", height), ("width", width)):
        if size < scale or size % scale:
            refuse(f"The {name} is a positive multiple of {scale}.", size)
    return Geometry(
        fixed.batch_size,
        height,
        width,
        (height // scale, width // scale, config.autoencoder.latent_channels),
        fixed.max_steps,
        fixed.guidance,
        fixed.guidance_rescale,
        fixed.prompt_chunks,
    )
