"""The configuration of a whole pipeline: text encoders, denoiser, autoencoder and schedule."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sd_tf.config.autoencoder import AutoencoderConfig
from sd_tf.config.controlnet import ControlNetConfig
from sd_tf.config.errors import ConfigError
from sd_tf.config.flux import FluxConfig
from sd_tf.config.image_prompts import (
    ImageAttentionConfig,
    ImageProjectionConfig,
    ImagePromptsConfig,
    VisionEncoderConfig,
)
from sd_tf.config.mmdit import MMDiTConfig
from sd_tf.config.schedule import SAMPLERS, ScheduleConfig
from sd_tf.config.small_decoder import SmallDecoderConfig
from sd_tf.config.text import T5EncoderConfig, TextEncoderConfig
from sd_tf.config.unet import UNetConfig

TextConfig = TextEncoderConfig | T5EncoderConfig
DenoiserConfig = UNetConfig | MMDiTConfig | FluxConfig
ImagePromptConfig = VisionEncoderConfig | ImageProjectionConfig | ImageAttentionConfig
ComponentConfig = (
    TextConfig
    | DenoiserConfig
    | ControlNetConfig
    | AutoencoderConfig
    | ImagePromptConfig
    | SmallDecoderConfig
)

AUTOENCODER = "vae"  # the component's name in a checkpoint

# Parameters of a call for which a checkpoint may have a default of its own → whether it takes one.
SUITABLE = {
    "num_steps": lambda value: value >= 1 and value % 1 == 0,
    "guidance_scale": math.isfinite,
    "image_guidance_scale": math.isfinite,
    "strength": lambda value: 0 < value <= 1,
}

# Kind of input beside the noisy latents → the channels that it adds, given the latent channels.
LATENT_INPUTS = {
    "none": lambda channels: 0,
    "image": lambda channels: channels,
    "mask_and_image": lambda channels: channels + 1,
}


@dataclass(frozen=True)
class PipelineConfig:
    """The configuration of a pipeline's parts.

    Text encoders are keyed by component name, in the order in which their outputs are concatenated.
    """

    text_encoders: Mapping[str, TextConfig]
    denoiser: DenoiserConfig
    autoencoder: AutoencoderConfig
    schedule: ScheduleConfig
    latent_inputs: str = "none"  # beside the noisy latents: none | image | mask_and_image
    zero_empty_negative: bool = False  # SDXL: no negative prompt is encoded as zeros, not as ""
    zero_tokens: int = 0  # SD3: zeros at the end of the context, in place of a T5 that is left out
    # ControlNets that steer the denoiser, in the order in which calls give their pictures.
    controlnets: Mapping[str, ControlNetConfig] = field(default_factory=dict)
    image_prompts: ImagePromptsConfig | None = None  # pictures beside the prompt
    # Those in place of the autoencoder's decoder, by the names of exported components.
    small_decoders: Mapping[str, SmallDecoderConfig] = field(default_factory=dict)
    # Defaults for parameters of a call that suit these weights better than the family's.
    suited: Mapping[str, float] = field(default_factory=dict)

    @property
    def components(self) -> dict[str, ComponentConfig]:
        """The checkpoint's components by name."""
        return {
            **self.text_encoders,
            self.denoiser.component: self.denoiser,
            **self.controlnets,
            **({} if self.image_prompts is None else self.image_prompts.components),
            AUTOENCODER: self.autoencoder,
            **self.small_decoders,
        }

    @property
    def default_size(self) -> int:
        """The height and width in pixels for which the model was trained."""
        return self.denoiser.sample_size * self.autoencoder.downscale

    @property
    def clip_encoders(self) -> dict[str, TextEncoderConfig]:
        return {k: v for k, v in self.text_encoders.items() if isinstance(v, TextEncoderConfig)}

    @property
    def t5_encoders(self) -> dict[str, T5EncoderConfig]:
        return {k: v for k, v in self.text_encoders.items() if isinstance(v, T5EncoderConfig)}

    @property
    def size_multiple(self) -> int:
        """The number of pixels of which a picture's sides are multiples."""
        return self.autoencoder.downscale * self.denoiser.patch_size

    def patches(self, size: tuple[int, int]) -> int:
        """Return the number of patches of a picture of that height and width."""
        height, width = size
        return (height // self.size_multiple) * (width // self.size_multiple)

    def check(self) -> "PipelineConfig":
        """Raise if the parts do not fit one another; return self."""
        CONDITIONERS[self.denoiser.conditioner](self)
        found = latent_inputs_of(self.denoiser, self.autoencoder)
        if found != self.latent_inputs:
            raise ConfigError(
                f"latent_inputs must be what the denoiser's in_channels are for. Received: "
                f"latent_inputs={self.latent_inputs!r}, but in_channels="
                f"{self.denoiser.latent_channels}, which is for {found!r}"
            )
        if self.schedule.sampler not in SAMPLERS:
            raise ConfigError(
                f"Unknown scheduler {self.schedule.sampler!r}. Known: {', '.join(SAMPLERS)}."
            )
        self.schedule.check_kind_of(self.schedule.sampler)
        for net in self.controlnets.values():
            _check_control(self, net)
        if self.image_prompts is not None:
            _check_beside_unet(self, "IP-Adapters")
            self.image_prompts.check_fits(self.denoiser)
        _check_suited(self.suited)
        return self


def _check_suited(suited: Mapping[str, float]) -> None:
    """Check that the defaults are for known parameters, and numbers that these take."""
    for name, value in suited.items():
        if name not in SUITABLE:
            raise ConfigError(
                f"A checkpoint has defaults of its own for {', '.join(SUITABLE)}. "
                f"Received: {name!r}"
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not SUITABLE[name](value):
            raise ConfigError(f"{value!r} cannot be the default of {name}.")


def _check_clip(config: PipelineConfig) -> None:
    """Check that the contexts fill the denoiser's side by side, and one text is pooled."""
    encoders, denoiser = config.text_encoders.values(), config.denoiser
    width = sum(encoder.hidden_size for encoder in encoders)
    if width != denoiser.context_dim:
        raise ConfigError(
            f"The denoiser's context must be as wide as the text encoders' outputs together. "
            f"Received: context_dim={denoiser.context_dim} (cross_attention_dim), but the "
            f"text encoders give {width}"
        )
    if denoiser.pooled_dim is not None:
        pooled = [encoder.pooled_dim for encoder in encoders if encoder.pooled_dim]
        if pooled != [denoiser.pooled_dim]:
            raise ConfigError(
                f"The denoiser needs exactly one pooled text embedding, of width "
                f"{denoiser.pooled_dim}. The text encoders give: {pooled}"
            )


def _check_sd3(config: PipelineConfig) -> None:
    """Check that CLIP's contexts fit into the denoiser's, T5's fill it, and all CLIPs are pooled.

    What the tokens of a T5 that is left out would be, zeros are.
    """
    _check_latents(config)
    clips, denoiser = config.clip_encoders.values(), config.denoiser
    width = sum(encoder.hidden_size for encoder in clips)
    if width > denoiser.context_dim:
        raise ConfigError(
            f"The outputs of the CLIP text encoders together are at most as wide as the denoiser's "
            f"context. Received: context_dim={denoiser.context_dim} (joint_attention_dim), but "
            f"they give {width}"
        )
    _check_t5(config, most=1)
    if bool(config.zero_tokens) == bool(config.t5_encoders):
        raise ConfigError(
            f"A context ends with T5's tokens, or with zeros in their place. Received: "
            f"{len(config.t5_encoders)} T5 encoders and {config.zero_tokens} zero tokens"
        )
    _check_pooled(config)


def _check_flux(config: PipelineConfig) -> None:
    """Check that T5 gives the denoiser's context and CLIP the pooled text."""
    _check_latents(config)
    _check_t5(config, least=1)
    _check_pooled(config)


def _check_latents(config: PipelineConfig) -> None:
    """Check that a transformer takes latents and nothing beside them, and gives latents."""
    denoiser, channels = config.denoiser, config.autoencoder.latent_channels
    patch = denoiser.in_channels // denoiser.latent_channels
    if (denoiser.in_channels, denoiser.out_channels) != (channels * patch, channels * patch):
        raise ConfigError(
            f"A transformer takes and gives the {channels} channels of the latents alone, so "
            f"in_channels and out_channels must be {channels * patch}. Pictures, masks or edges "
            f"beside them are not supported. Received: in_channels={denoiser.in_channels}, "
            f"out_channels={denoiser.out_channels}"
        )


def _check_t5(config: PipelineConfig, least: int = 0, most: int = 1) -> None:
    widths = [encoder.hidden_size for encoder in config.t5_encoders.values()]
    if not least <= len(widths) <= most or set(widths) - {config.denoiser.context_dim}:
        raise ConfigError(
            f"The denoiser takes {'a' if least else 'at most one'} T5 encoder, as wide as its "
            f"context: {config.denoiser.context_dim} (joint_attention_dim). Received: "
            f"{', '.join(map(str, widths)) or 'none'}"
        )


def _check_pooled(config: PipelineConfig) -> None:
    widths = [encoder.pooled_dim or 0 for encoder in config.clip_encoders.values()]
    if not all(widths) or sum(widths) != config.denoiser.pooled_dim:
        raise ConfigError(
            f"The pooled texts of the CLIP text encoders together are as wide as the denoiser's "
            f"pooled_projection_dim, {config.denoiser.pooled_dim}. Received: "
            f"{', '.join(map(str, widths)) or 'none'}"
        )


def _check_control(config: PipelineConfig, net: ControlNetConfig) -> None:
    """Check that a ControlNet steers this pipeline's denoiser."""
    _check_beside_unet(config, "ControlNets")
    autoencoder = config.autoencoder
    net.check_fits(config.denoiser, autoencoder.latent_channels, autoencoder.downscale)


def _check_beside_unet(config: PipelineConfig, what: str) -> None:
    """Check that the pipeline's denoiser is one that takes more than a prompt."""
    if not isinstance(config.denoiser, UNetConfig):
        raise ConfigError(
            f"{what} are for checkpoints with a UNet. Received: one with "
            f"{type(config.denoiser).__name__.removesuffix('Config')}"
        )
    if config.latent_inputs == "image":
        raise ConfigError(
            f"{what} are not for checkpoints that edit pictures (InstructPix2Pix): leave them out."
        )


# How texts become a denoiser's conditions → the check that its parts can.
CONDITIONERS = {"clip": _check_clip, "sd3": _check_sd3, "flux": _check_flux}


def latent_inputs_of(denoiser: DenoiserConfig, autoencoder: AutoencoderConfig) -> str:
    """Tell the kind of input beside the latents by the channel counts, as no file names it."""
    channels = autoencoder.latent_channels
    known = {channels + extra(channels): name for name, extra in LATENT_INPUTS.items()}
    if denoiser.latent_channels not in known:
        raise ConfigError(
            f"With {channels} latent channels, in_channels must be one of "
            f"{', '.join(map(str, known))}. Received: in_channels={denoiser.latent_channels}"
        )
    return known[denoiser.latent_channels]
