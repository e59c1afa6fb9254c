"""The configuration of a whole pipeline: text encoders, denoiser, autoencoder and schedule."""

from collections.abc import Mapping
from dataclasses import dataclass

from sd_tf.config.autoencoder import AutoencoderConfig
from sd_tf.config.errors import ConfigError
from sd_tf.config.schedule import SAMPLERS, ScheduleConfig
from sd_tf.config.text import TextEncoderConfig
from sd_tf.config.unet import UNetConfig

AUTOENCODER = "vae"  # the component's name in a checkpoint

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

    text_encoders: Mapping[str, TextEncoderConfig]
    denoiser: UNetConfig
    autoencoder: AutoencoderConfig
    schedule: ScheduleConfig
    latent_inputs: str = "none"  # beside the noisy latents: none | image | mask_and_image
    zero_empty_negative: bool = False  # SDXL: no negative prompt is encoded as zeros, not as ""

    @property
    def components(self) -> dict[str, TextEncoderConfig | UNetConfig | AutoencoderConfig]:
        """The checkpoint's components by name."""
        return {
            **self.text_encoders,
            self.denoiser.component: self.denoiser,
            AUTOENCODER: self.autoencoder,
        }

    @property
    def default_size(self) -> int:
        """The height and width in pixels for which the model was trained."""
        return self.denoiser.sample_size * self.autoencoder.downscale

    def check(self) -> "PipelineConfig":
        """Raise if the parts do not fit one another; return self."""
        width = sum(encoder.hidden_size for encoder in self.text_encoders.values())
        if width != self.denoiser.context_dim:
            raise ConfigError(
                f"The denoiser's context must be as wide as the text encoders' outputs together. "
                f"Received: context_dim={self.denoiser.context_dim} (cross_attention_dim), but the "
                f"text encoders give {width}"
            )
        if self.denoiser.added is not None:
            pooled = [e.projection_dim for e in self.text_encoders.values() if e.projection_dim]
            if pooled != [self.denoiser.added.pooled_dim]:
                raise ConfigError(
                    f"The denoiser needs exactly one pooled text embedding, of width "
                    f"{self.denoiser.added.pooled_dim}. The text encoders give: {pooled}"
                )
        found = latent_inputs_of(self.denoiser, self.autoencoder)
        if found != self.latent_inputs:
            raise ConfigError(
                f"latent_inputs must be what the denoiser's in_channels are for. Received: "
                f"latent_inputs={self.latent_inputs!r}, but in_channels="
                f"{self.denoiser.in_channels}, which is for {found!r}"
            )
        if self.schedule.sampler not in SAMPLERS:
            raise ConfigError(
                f"Unknown scheduler {self.schedule.sampler!r}. Known: {', '.join(SAMPLERS)}."
            )
        return self


def latent_inputs_of(denoiser: UNetConfig, autoencoder: AutoencoderConfig) -> str:
    """Tell the kind of input beside the latents by the channel counts, as no file names it."""
    channels = autoencoder.latent_channels
    known = {channels + extra(channels): name for name, extra in LATENT_INPUTS.items()}
    if denoiser.in_channels not in known:
        raise ConfigError(
            f"With {channels} latent channels, in_channels must be one of "
            f"{', '.join(map(str, known))}. Received: in_channels={denoiser.in_channels}"
        )
    return known[denoiser.in_channels]
