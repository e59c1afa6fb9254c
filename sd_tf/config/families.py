"""The named families of checkpoints, with every number that distinguishes them."""

from collections.abc import Callable
from dataclasses import replace

from sd_tf.config.autoencoder import AutoencoderConfig
from sd_tf.config.flux import FluxConfig
from sd_tf.config.mmdit import MMDiTConfig
from sd_tf.config.pipeline import PipelineConfig
from sd_tf.config.schedule import DynamicShift, ScheduleConfig
from sd_tf.config.text import END_TOKEN, T5EncoderConfig, TextEncoderConfig
from sd_tf.config.unet import AddedConditioning, UNetConfig

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

SD_VAE = AutoencoderConfig()
SDXL_VAE = AutoencoderConfig(scaling_factor=0.13025, force_upcast=True, sample_size=1024)

SD_SCHEDULE = ScheduleConfig()
SDXL_SCHEDULE = replace(SD_SCHEDULE, sampler="euler")
SD3_MEDIUM = MMDiTConfig()
SD35_MEDIUM = replace(
    SD3_MEDIUM,
    max_patches=384,
    dual_layers=tuple(range(13)),
    qk_norm=True,
    skip_layers=(7, 8, 9),
)
SD35_LARGE = replace(SD3_MEDIUM, num_layers=38, num_heads=38, pooled_dim=2048, qk_norm=True)
SD3_VAE = AutoencoderConfig(
    latent_channels=16,
    quant_conv=False,
    post_quant_conv=False,
    scaling_factor=1.5305,
    shift_factor=0.0609,
    sample_size=1024,
)
SD3_SCHEDULE = ScheduleConfig(
    kind="flow", prediction="flow", sampler="flow_euler", shift=3.0, spacing="linspace"
)
SD3_TEXTS = {
    "text_encoder": replace(SDXL_CLIP_L, projection_dim=768),
    "text_encoder_2": SDXL_OPENCLIP_G,
    "text_encoder_3": T5EncoderConfig(),
}
FLUX_VAE = replace(SD3_VAE, scaling_factor=0.3611, shift_factor=0.1159)
FLUX_TEXTS = {
    "text_encoder": replace(CLIP_L, pools_unprojected=True),
    "text_encoder_2": T5EncoderConfig(max_length=512),
}
FLUX_SCHEDULE = replace(SD3_SCHEDULE, shift=1.0, spacing="trailing")

SD1 = PipelineConfig({"text_encoder": CLIP_L}, SD1_UNET, SD_VAE, SD_SCHEDULE)
SDXL_BASE = PipelineConfig(
    {"text_encoder": SDXL_CLIP_L, "text_encoder_2": SDXL_OPENCLIP_G},
    SDXL_UNET,
    SDXL_VAE,
    SDXL_SCHEDULE,
    zero_empty_negative=True,
)

FAMILIES = {
    "sd1": SD1,
    "sd2-base": PipelineConfig({"text_encoder": OPENCLIP_H}, SD2_UNET, SD_VAE, SD_SCHEDULE),
    "sd2-v": PipelineConfig(
        {"text_encoder": OPENCLIP_H},
        replace(SD2_UNET, upcast_attention=True, sample_size=96),
        replace(SD_VAE, sample_size=768),
        replace(SD_SCHEDULE, prediction="v_prediction", sampler="ddim"),
    ),
    "sdxl-base": SDXL_BASE,
    "sdxl-refiner": replace(
        SDXL_BASE,
        text_encoders={"text_encoder_2": SDXL_OPENCLIP_G},
        denoiser=SDXL_REFINER_UNET,
        zero_empty_negative=False,
    ),
    "instruct-pix2pix": replace(
        SD1, denoiser=replace(SD1_UNET, in_channels=8), latent_inputs="image"
    ),
    "sdxl-instruct-pix2pix": replace(
        SDXL_BASE, denoiser=replace(SDXL_UNET, in_channels=8), latent_inputs="image"
    ),
    "inpaint": replace(
        SD1, denoiser=replace(SD1_UNET, in_channels=9), latent_inputs="mask_and_image"
    ),
    "sd3-medium": PipelineConfig(SD3_TEXTS, SD3_MEDIUM, SD3_VAE, SD3_SCHEDULE),
    "sd3.5-medium": PipelineConfig(SD3_TEXTS, SD35_MEDIUM, SD3_VAE, SD3_SCHEDULE),
    "sd3.5-large": PipelineConfig(SD3_TEXTS, SD35_LARGE, SD3_VAE, SD3_SCHEDULE),
    "flux-schnell": PipelineConfig(FLUX_TEXTS, FluxConfig(), FLUX_VAE, FLUX_SCHEDULE),
    "flux-dev": PipelineConfig(
        FLUX_TEXTS,
        FluxConfig(guidance_embeds=True),
        FLUX_VAE,
        replace(FLUX_SCHEDULE, shift=3.0, dynamic_shift=DynamicShift()),
    ),
}

# The traits that distinguish families, whatever the sizes of their weights.
TRAITS: dict[str, Callable[[PipelineConfig], object]] = {
    "denoiser": lambda config: type(config.denoiser),
    "latent_inputs": lambda config: config.latent_inputs,
    "added": lambda config: config.denoiser.num_time_ids > 0,
    "text_encoders": lambda config: tuple(config.text_encoders),
    "prediction": lambda config: config.schedule.prediction,
    "linear_projection": lambda config: config.denoiser.linear_projection,
    "qk_norm": lambda config: config.denoiser.qk_norm,
    "dual": lambda config: bool(config.denoiser.dual_layers),
    "told_guidance": lambda config: config.denoiser.is_told_guidance,
}
# Family → the traits that identify it; a checkpoint's family is the first whose traits all agree.
KNOWN_BY = {
    "sd3-medium": ("denoiser", "qk_norm"),
    "sd3.5-medium": ("denoiser", "dual"),
    "sd3.5-large": ("denoiser",),
    "flux-dev": ("denoiser", "told_guidance"),
    "flux-schnell": ("denoiser",),
    "inpaint": ("latent_inputs",),
    "instruct-pix2pix": ("latent_inputs", "added"),
    "sdxl-instruct-pix2pix": ("latent_inputs", "added"),
    "sdxl-base": ("added", "text_encoders"),
    "sdxl-refiner": ("added",),
    "sd2-v": ("prediction",),
    "sd2-base": ("linear_projection",),
    "sd1": (),
}


def family_of(config: PipelineConfig) -> str:
    """Look up the name of a pipeline's family. Sizes may differ: see `has_named_sizes`."""

    def agrees(family: str) -> bool:
        named = FAMILIES[family]
        return all(TRAITS[trait](config) == TRAITS[trait](named) for trait in KNOWN_BY[family])

    return next(family for family in KNOWN_BY if agrees(family))


# Family → the parameters of a call that its makers recommend, where they are not everyone's.
_SD3_SUITED = {"num_steps": 28, "guidance_scale": 7.0, "strength": 0.6}
SUITED = {
    "sd3-medium": _SD3_SUITED,
    "sd3.5-medium": _SD3_SUITED,
    "sd3.5-large": _SD3_SUITED,
    "flux-schnell": {"num_steps": 4, "guidance_scale": 1.0, "strength": 0.6},
    "flux-dev": {"num_steps": 28, "guidance_scale": 3.5, "strength": 0.6},
}


def suited_to(config: PipelineConfig) -> dict[str, float]:
    """Return the defaults of the checkpoint and its family for parameters of a call, by name."""
    return {**SUITED.get(family_of(config), {}), **config.suited}


def has_named_sizes(config: PipelineConfig) -> bool:
    """Tell whether the networks have exactly the named family's sizes; one may be left out."""
    named = FAMILIES[family_of(config)]
    return all(
        replace(ours, sample_size=theirs.sample_size) == theirs
        for ours, theirs in (
            (config.denoiser, named.denoiser),
            (config.autoencoder, named.autoencoder),
        )
    ) and all(
        name in named.text_encoders and encoder.hidden_size == named.text_encoders[name].hidden_size
        for name, encoder in config.text_encoders.items()
    )


def with_kerascv_numerics(config: PipelineConfig) -> PipelineConfig:
    """Return the pipeline with KerasCV's epsilons, approximate gelu, padding and sampler."""
    text_encoders = {
        name: replace(
            encoder,
            pad_token_id=END_TOKEN,
            activation="gelu_tanh" if encoder.activation == "gelu" else encoder.activation,
        )
        for name, encoder in config.text_encoders.items()
    }
    return replace(
        config,
        text_encoders=text_encoders,
        denoiser=replace(config.denoiser, transformer_norm_eps=1e-5, geglu="gelu_tanh"),
        autoencoder=replace(config.autoencoder, norm_eps=1e-5),
        schedule=replace(config.schedule, sampler="kerascv"),
    )
