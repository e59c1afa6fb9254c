"""The embedded checkpoints: tiny trained ones, which need no download."""

from dataclasses import replace
from pathlib import Path

from sd_tf.config import FAMILIES, MMDiTConfig, PipelineConfig
from sd_tf.files.tensors import CheckpointError

TINY, EDITOR, DIT = "tiny", "tiny-edit", "tiny-dit"
FOLDER = Path(__file__).parent
EMBEDDED = {name: FOLDER / name for name in (TINY, EDITOR, DIT)}
TINY_FOLDER = EMBEDDED[TINY]  # trained by `sd-tf train tiny`
EDITOR_FOLDER = EMBEDDED[EDITOR]  # trained further, to follow instructions
DIT_FOLDER = EMBEDDED[DIT]  # a transformer, trained by `sd-tf train tiny_dit`
ADAPTERS = ("outline", "moon")  # of `tiny`, trained by `sd-tf train tiny_adapter`
DECODERS = ("preview",)  # of `tiny`'s latents, trained by `sd-tf train small_decoder`
CONTROLNETS = ("drawing",)  # for `tiny`, trained by `sd-tf train tiny_control`


def embedded_adapter(name: str) -> Path:
    """Return the file of an adapter of `tiny`, which may be named with a prefix: `tiny:outline`."""
    return FOLDER / "adapters" / f"{_known(name, ADAPTERS, 'adapters')}.safetensors"


def embedded_controlnet(name: str) -> Path:
    """Return the folder of a ControlNet for `tiny`, with or without the prefix: `tiny:drawing`."""
    return FOLDER / "controlnets" / _known(name, CONTROLNETS, "ControlNets")


def embedded_decoder(name: str) -> Path:
    """Return the folder of a small decoder for `tiny`, with or without the prefix."""
    return FOLDER / "decoders" / _known(name, DECODERS, "small decoders")


def _known(name: str, names: tuple[str, ...], what: str) -> str:
    known = name.removeprefix(f"{TINY}:")
    if known not in names:
        raise CheckpointError(
            f"The embedded {what} are {', '.join(f'{TINY}:{one}' for one in names)}. "
            f"Received: {name!r}"
        )
    return known


_SD1 = FAMILIES["sd1"]
CONFIG = PipelineConfig(
    {
        "text_encoder": replace(
            _SD1.text_encoders["text_encoder"],
            hidden_size=96,
            intermediate_size=384,
            num_layers=3,
            num_heads=4,
        )
    },
    denoiser=replace(
        _SD1.denoiser,
        channels=(48, 96, 128),
        num_heads=(2, 4, 4),
        down_depths=((0,), (1,), (1,)),
        mid_depth=1,
        up_depths=((1, 1), (1, 1), (0, 0)),
        context_dim=96,
        sample_size=16,
        norm_groups=16,
    ),
    autoencoder=replace(
        _SD1.autoencoder, channels=(24, 48, 64), layers_per_block=1, norm_groups=8, sample_size=64
    ),
    schedule=replace(_SD1.schedule, prediction="v_prediction", sampler="ddim"),
    suited={"guidance_scale": 4.0},  # docs/tiny.md has the measurements
).check()

# The transformer has the texts and latents of `tiny`. diffusers gives it the outputs of two text
# encoders, each of which has a layer above the one that the context is taken from, and a projection
# of the pooled text: the first one's change nothing, and the second encoder's outputs are zeros.
_TEXT, _CAPTION = CONFIG.text_encoders["text_encoder"], 32  # no caption has more than 23 tokens
_SD3_TEXT = replace(_TEXT, context_layer=2, context_norm=False, max_length=_CAPTION)
_NO_TEXT = replace(
    _SD3_TEXT, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=1, projection_dim=4
)
DIT_CONFIG = PipelineConfig(
    {
        "text_encoder": replace(_SD3_TEXT, num_layers=4, projection_dim=96),
        "text_encoder_2": _NO_TEXT,
    },
    denoiser=MMDiTConfig(
        in_channels=4,
        out_channels=4,
        num_layers=7,
        num_heads=4,
        head_dim=32,
        context_dim=100,
        pooled_dim=100,
        max_patches=8,
        qk_norm=True,
        sample_size=16,
    ),
    autoencoder=CONFIG.autoencoder,  # its scaling factor depends on the weights
    schedule=replace(FAMILIES["sd3-medium"].schedule, shift=2.0),
    zero_tokens=256,
    suited={"guidance_scale": 1.33},
).check()
