"""The configuration of the autoencoder, and how its latents are scaled for the denoiser."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentScale:
    """Map the autoencoder's latents to the denoiser's, z = factor · (x − shift), and back.

    Works on NumPy arrays and on the backend's tensors alike.
    """

    factor: float = 1.0
    shift: float = 0.0

    def apply(self, latents):
        """Turn what the encoder gives into what the denoiser works on."""
        return (latents - self.shift) * self.factor if self.shift else latents * self.factor

    def undo(self, latents):
        """Turn what the denoiser gives into what the decoder takes."""
        return latents / self.factor + self.shift if self.shift else latents / self.factor


@dataclass(frozen=True)
class AutoencoderConfig:
    """The autoencoder between pictures and latents."""

    in_channels: int = 3
    out_channels: int = 3
    channels: tuple[int, ...] = (128, 256, 512, 512)
    layers_per_block: int = 2
    latent_channels: int = 4
    norm_groups: int = 32
    norm_eps: float = 1e-6
    mid_attention: bool = True
    quant_conv: bool = True
    post_quant_conv: bool = True
    scaling_factor: float = 0.18215
    shift_factor: float = 0.0
    force_upcast: bool = False  # overflows in float16: decode in float32
    sample_size: int = 512

    @property
    def latent_scale(self) -> LatentScale:
        return LatentScale(self.scaling_factor, self.shift_factor)

    @property
    def downscale(self) -> int:
        return 2 ** (len(self.channels) - 1)
