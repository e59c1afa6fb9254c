"""What a Stable Diffusion pipeline is, as data: frozen dataclasses and the named families.

Every number that tells one family from another stands here. Reading and writing the JSON files of
a diffusers folder is the business of `sd_tf.weights.diffusers_config`.
"""

from dataclasses import dataclass, replace

START_TOKEN, END_TOKEN = 49406, 49407
SCALED_LINEAR = "scaled_linear"


class ConfigError(ValueError):
    """A configuration that this package cannot compute, named by field and value."""


@dataclass(frozen=True)
class TextEncoderConfig:
    """A CLIP text transformer; the defaults are SD1's ViT-L."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    activation: str = "quick_gelu"  # quick_gelu | gelu | gelu_tanh
    vocab_size: int = 49408
    max_length: int = 77
    layer_norm_eps: float = 1e-5
    context_layer: int = 1  # counted from the end: 1 is the last layer, 2 the penultimate
    context_norm: bool = True  # the final LayerNorm applied to the context
    projection_dim: int | None = None  # width of the pooled output; None: no pooled output
    eos_token_id: int | None = END_TOKEN  # None: the row of the highest id is pooled
    pad_token_id: int = END_TOKEN

    def skip(self, clip_skip: int) -> "TextEncoderConfig":
        """The same encoder, its context taken `clip_skip` layers earlier."""
        layer = self.context_layer + clip_skip
        if clip_skip < 0 or layer > self.num_layers:
            raise ConfigError(
                f"clip_skip must be between 0 and {self.num_layers - self.context_layer} for a "
                f"text encoder of {self.num_layers} layers. Received: {clip_skip}"
            )
        return replace(self, context_layer=layer)


@dataclass(frozen=True)
class AddedConditioning:
    """SDXL's second embedding: pooled text and six (or five) size numbers, beside the timestep."""

    num_time_ids: int = 6
    time_embed_dim: int = 256
    pooled_dim: int = 1280

    @property
    def input_dim(self) -> int:
        return self.pooled_dim + self.num_time_ids * self.time_embed_dim


@dataclass(frozen=True)
class UNetConfig:
    """The denoiser; the defaults are SD1's.

    A depth is the number of transformer layers behind a resnet, 0 where there is no attention:
    `down_depths[level][resnet]`. `mid_depth` None means that there is no middle block at all.
    """

    in_channels: int = 4
    out_channels: int = 4
    channels: tuple[int, ...] = (320, 640, 1280, 1280)
    num_heads: tuple[int, ...] = (8, 8, 8, 8)
    down_depths: tuple[tuple[int, ...], ...] = ((1, 1), (1, 1), (1, 1), (0, 0))
    mid_depth: int | None = 1
    up_depths: tuple[tuple[int, ...], ...] = ((0, 0, 0), (1, 1, 1), (1, 1, 1), (1, 1, 1))
    context_dim: int = 768
    linear_projection: bool = False
    upcast_attention: bool = False
    added: AddedConditioning | None = None
    guidance_embed_dim: int | None = None  # LCM's embedding of the guidance scale
    sample_size: int = 64  # native latent height and width
    norm_groups: int = 32
    resnet_norm_eps: float = 1e-5
    transformer_norm_eps: float = 1e-6
    geglu: str = "gelu"  # gelu | gelu_tanh

    @property
    def time_embed_dim(self) -> int:
        return 4 * self.channels[0]


@dataclass(frozen=True)
class VAEConfig:
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
    force_upcast: bool = False  # overflows in float16: decode in float32
    sample_size: int = 512

    @property
    def downscale(self) -> int:
        return 2 ** (len(self.channels) - 1)


@dataclass(frozen=True)
class SamplerSpec:
    """A way to walk the noise schedule: the update rule and how its timesteps are chosen."""

    method: str
    spacing: str = "leading"  # leading | linspace | trailing
    karras: bool = False


SAMPLERS = {
    "ddim": SamplerSpec("ddim"),
    "ddim_trailing": SamplerSpec("ddim", "trailing"),
    "pndm": SamplerSpec("pndm"),
    "euler": SamplerSpec("euler"),
    "euler_linspace": SamplerSpec("euler", "linspace"),
    "euler_trailing": SamplerSpec("euler", "trailing"),
    "euler_ancestral": SamplerSpec("euler_ancestral"),
    "euler_ancestral_linspace": SamplerSpec("euler_ancestral", "linspace"),
    "euler_ancestral_trailing": SamplerSpec("euler_ancestral", "trailing"),
    "dpmpp_2m": SamplerSpec("dpmpp_2m", "linspace"),
    "dpmpp_2m_karras": SamplerSpec("dpmpp_2m", "linspace", karras=True),
    "lms": SamplerSpec("lms", "linspace"),
    "lcm": SamplerSpec("lcm"),
    "kerascv": SamplerSpec("kerascv"),
    "kerascv-2022": SamplerSpec("kerascv-2022"),
}


@dataclass(frozen=True)
class ScheduleConfig:
    """The noise schedule that the model was trained with, and the sampler its makers chose."""

    num_train_timesteps: int = 1000
    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: str = SCALED_LINEAR  # scaled_linear | linear
    prediction: str = "epsilon"  # epsilon | v_prediction
    sampler: str = "pndm"
    steps_offset: int = 1
    set_alpha_to_one: bool = False


@dataclass(frozen=True)
class PipelineConfig:
    """A whole checkpoint. SDXL has a second text encoder; its refiner has that one alone."""

    text_encoder: TextEncoderConfig | None
    unet: UNetConfig
    vae: VAEConfig
    schedule: ScheduleConfig
    text_encoder_2: TextEncoderConfig | None = None
    zero_empty_negative: bool = (
        False  # SDXL: no negative prompt means zeros, not the encoding of ""
    )

    @property
    def text_encoders(self) -> dict[str, TextEncoderConfig]:
        """The text encoders that are there, by component name, in the order of concatenation."""
        both = {"text_encoder": self.text_encoder, "text_encoder_2": self.text_encoder_2}
        return {name: config for name, config in both.items() if config is not None}

    @property
    def components(self) -> dict[str, TextEncoderConfig | UNetConfig | VAEConfig]:
        return {**self.text_encoders, "unet": self.unet, "vae": self.vae}

    @property
    def latent_inputs(self) -> str:
        """What the UNet is given beside the noisy latents: `none`, `image` or `mask_and_image`."""
        return LATENT_INPUTS[self.unet.in_channels - self.vae.latent_channels]

    @property
    def default_size(self) -> int:
        """Height and width in pixels that the model was made for."""
        return self.unet.sample_size * self.vae.downscale

    def check(self) -> "PipelineConfig":
        """Refuse parts that do not fit one another; returns self."""
        width = sum(encoder.hidden_size for encoder in self.text_encoders.values())
        if width != self.unet.context_dim:
            raise ConfigError(
                f"The UNet attends to a context of width {self.unet.context_dim} "
                f"(cross_attention_dim), but the text encoders give {width}."
            )
        if self.unet.added is not None:
            pooled = [e.projection_dim for e in self.text_encoders.values() if e.projection_dim]
            if pooled != [self.unet.added.pooled_dim]:
                raise ConfigError(
                    f"The UNet wants one pooled text embedding of width "
                    f"{self.unet.added.pooled_dim}, but the text encoders give {pooled}."
                )
        extra = self.unet.in_channels - self.vae.latent_channels
        if extra not in LATENT_INPUTS:
            known = ", ".join(str(self.vae.latent_channels + n) for n in LATENT_INPUTS)
            raise ConfigError(
                f"A UNet takes {known} "
                f"input channels beside a VAE of {self.vae.latent_channels} latent channels. "
                f"Received: in_channels={self.unet.in_channels}"
            )
        if self.schedule.sampler not in SAMPLERS:
            raise ConfigError(
                f"Unknown scheduler {self.schedule.sampler!r}. Known: {', '.join(SAMPLERS)}."
            )
        return self

    @property
    def family(self) -> str:
        """The name of the nearest family; sizes may differ (`is_named_family` tells)."""
        if self.latent_inputs == "mask_and_image":
            return "inpaint"
        if self.latent_inputs == "image":
            return "instruct-pix2pix" if self.unet.added is None else "sdxl-instruct-pix2pix"
        if self.unet.added is not None:
            return "sdxl-base" if self.text_encoder is not None else "sdxl-refiner"
        if self.schedule.prediction == "v_prediction":
            return "sd2-v"
        return "sd2-base" if self.unet.linear_projection else "sd1"

    @property
    def is_named_family(self) -> bool:
        """Whether the weights have exactly the named family's sizes."""
        named = FAMILIES[self.family]
        return all(
            replace(ours, sample_size=theirs.sample_size) == theirs
            for ours, theirs in ((self.unet, named.unet), (self.vae, named.vae))
        ) and tuple(e.hidden_size for e in self.text_encoders.values()) == tuple(
            e.hidden_size for e in named.text_encoders.values()
        )


# Input channels beside the latents: an image's latents, and for inpainting a mask too.
LATENT_INPUTS = {0: "none", 4: "image", 5: "mask_and_image"}

CLIP_L = TextEncoderConfig()
OPENCLIP_H = TextEncoderConfig(
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=23,  # already the penultimate of 24
    num_heads=16,
    activation="gelu",
    pad_token_id=0,
)
SDXL_CLIP_L = replace(CLIP_L, context_layer=2, context_norm=False)
SDXL_OPENCLIP_G = TextEncoderConfig(
    hidden_size=1280,
    intermediate_size=5120,
    num_layers=32,
    num_heads=20,
    activation="gelu",
    context_layer=2,
    context_norm=False,
    projection_dim=1280,
    pad_token_id=0,
)

SD1_UNET = UNetConfig()
SD2_UNET = replace(SD1_UNET, num_heads=(5, 10, 20, 20), context_dim=1024, linear_projection=True)
SDXL_UNET = UNetConfig(
    channels=(320, 640, 1280),
    num_heads=(5, 10, 20),
    down_depths=((0, 0), (2, 2), (10, 10)),
    mid_depth=10,
    up_depths=((10, 10, 10), (2, 2, 2), (0, 0, 0)),
    context_dim=2048,
    linear_projection=True,
    added=AddedConditioning(),
    sample_size=128,
)
SDXL_REFINER_UNET = UNetConfig(
    channels=(384, 768, 1536, 1536),
    num_heads=(6, 12, 24, 24),
    down_depths=((0, 0), (4, 4), (4, 4), (0, 0)),
    mid_depth=4,
    up_depths=((0, 0, 0), (4, 4, 4), (4, 4, 4), (0, 0, 0)),
    context_dim=1280,
    linear_projection=True,
    added=AddedConditioning(num_time_ids=5),  # an aesthetic score in place of the target size
    sample_size=128,
)

SD_VAE = VAEConfig()
SDXL_VAE = VAEConfig(scaling_factor=0.13025, force_upcast=True, sample_size=1024)

SD_SCHEDULE = ScheduleConfig()
SDXL_SCHEDULE = replace(SD_SCHEDULE, sampler="euler")

SD1 = PipelineConfig(CLIP_L, SD1_UNET, SD_VAE, SD_SCHEDULE)
SDXL_BASE = PipelineConfig(
    SDXL_CLIP_L, SDXL_UNET, SDXL_VAE, SDXL_SCHEDULE, SDXL_OPENCLIP_G, zero_empty_negative=True
)

FAMILIES = {
    "sd1": SD1,
    "sd2-base": PipelineConfig(OPENCLIP_H, SD2_UNET, SD_VAE, SD_SCHEDULE),
    "sd2-v": PipelineConfig(
        OPENCLIP_H,
        replace(SD2_UNET, upcast_attention=True, sample_size=96),
        replace(SD_VAE, sample_size=768),
        replace(SD_SCHEDULE, prediction="v_prediction", sampler="ddim"),
    ),
    "sdxl-base": SDXL_BASE,
    "sdxl-refiner": replace(
        SDXL_BASE, text_encoder=None, unet=SDXL_REFINER_UNET, zero_empty_negative=False
    ),
    "instruct-pix2pix": replace(SD1, unet=replace(SD1_UNET, in_channels=8)),
    "sdxl-instruct-pix2pix": replace(SDXL_BASE, unet=replace(SDXL_UNET, in_channels=8)),
    "inpaint": replace(SD1, unet=replace(SD1_UNET, in_channels=9)),
}


def with_kerascv_numerics(config: PipelineConfig) -> PipelineConfig:
    """The same pipeline with the epsilons and the approximate gelu that KerasCV computes with."""
    text_encoder = replace(config.text_encoder, pad_token_id=END_TOKEN)
    if text_encoder.activation == "gelu":
        text_encoder = replace(text_encoder, activation="gelu_tanh")
    return replace(
        config,
        text_encoder=text_encoder,
        unet=replace(config.unet, transformer_norm_eps=1e-5, geglu="gelu_tanh"),
        vae=replace(config.vae, norm_eps=1e-5),
        schedule=replace(config.schedule, sampler="kerascv"),
    )
