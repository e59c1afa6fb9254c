"""Translate the `config.json` of SD3's and Flux's transformers, and of T5, and back."""

from collections.abc import Sequence

from sd_tf.config import ConfigError, FluxConfig, MMDiTConfig, T5EncoderConfig
from sd_tf.weights.diffusers_config import TRANSFORMERS_HARMLESS
from sd_tf.weights.diffusers_fields import Fields

# The blocks that 3.5-medium's makers chose for skip-layer guidance.
SKIPPED = (7, 8, 9)

# Fields of T5's configuration that its encoder does not read.
T5_HARMLESS = """
    classifier_dropout dropout_rate n_positions num_decoder_layers output_past
    scale_decoder_outputs
""".split()


def read_mmdit(raw, where: str) -> MMDiTConfig:
    """Read the `config.json` of an SD3Transformer2DModel."""
    fields = Fields(raw, where)
    heads, head_dim = fields.take("num_attention_heads", 18), fields.take("attention_head_dim", 64)
    fields.require("caption_projection_dim", heads * head_dim, default=1152)
    in_channels, layers = fields.take("in_channels", 16), fields.take("num_layers", 18)
    dual = fields.take("dual_attention_layers", ())
    dual = tuple(layer for layer in range(layers) if layer in dual)
    config = MMDiTConfig(
        in_channels=in_channels,
        out_channels=_out_channels(fields, in_channels, default=16),
        patch_size=fields.take("patch_size", 2),
        num_layers=layers,
        num_heads=heads,
        head_dim=head_dim,
        context_dim=fields.take("joint_attention_dim", 4096),
        pooled_dim=fields.take("pooled_projection_dim", 2048),
        max_patches=fields.take("pos_embed_max_size", 96),
        dual_layers=dual,
        qk_norm=fields.choose("qk_norm", {None: False, "rms_norm": True}, None),
        sample_size=fields.take("sample_size", 128),
        skip_layers=skip_layers(dual, layers),
    )
    fields.finish()
    return config


def skip_layers(dual_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the blocks that skip-layer guidance leaves out; no file names them."""
    return SKIPPED if dual_layers and num_layers > max(SKIPPED) else ()


def write_mmdit(config: MMDiTConfig) -> dict:
    return {
        "_class_name": "SD3Transformer2DModel",
        "sample_size": config.sample_size,
        "patch_size": config.patch_size,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "num_layers": config.num_layers,
        "attention_head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "joint_attention_dim": config.context_dim,
        "caption_projection_dim": config.hidden_size,
        "pooled_projection_dim": config.pooled_dim,
        "pos_embed_max_size": config.max_patches,
        "dual_attention_layers": list(config.dual_layers),
        "qk_norm": "rms_norm" if config.qk_norm else None,
    }


def read_flux(raw, where: str) -> FluxConfig:
    """Read the `config.json` of a FluxTransformer2DModel."""
    fields = Fields(raw, where)
    fields.require("patch_size", 1, default=1)  # its input is packed already
    in_channels, head_dim = fields.take("in_channels", 64), fields.take("attention_head_dim", 128)
    axes = tuple(fields.take("axes_dims_rope", (16, 56, 56)))
    if len(axes) != 3 or sum(axes) != head_dim or any(size % 2 for size in axes):
        raise ConfigError(
            f"{where}: axes_dims_rope must be three even numbers that sum to attention_head_dim. "
            f"Received: {list(axes)} and {head_dim}"
        )
    config = FluxConfig(
        in_channels=in_channels,
        out_channels=_out_channels(fields, in_channels, default=None),
        num_layers=fields.take("num_layers", 19),
        num_single_layers=fields.take("num_single_layers", 38),
        num_heads=fields.take("num_attention_heads", 24),
        head_dim=head_dim,
        context_dim=fields.take("joint_attention_dim", 4096),
        pooled_dim=fields.take("pooled_projection_dim", 768),
        guidance_embeds=bool(fields.take("guidance_embeds", False)),
        rope_axes=axes,
    )
    fields.finish()
    return config


def write_flux(config: FluxConfig) -> dict:
    return {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "num_layers": config.num_layers,
        "num_single_layers": config.num_single_layers,
        "attention_head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "joint_attention_dim": config.context_dim,
        "pooled_projection_dim": config.pooled_dim,
        "guidance_embeds": config.guidance_embeds,
        "axes_dims_rope": list(config.rope_axes),
    }


def _out_channels(fields: Fields, in_channels: int, default: int | None) -> int:
    given = fields.take("out_channels", default)
    return in_channels if given is None else given


def read_t5(raw, where: str, max_length: int) -> T5EncoderConfig:
    """Read the `config.json` of a T5EncoderModel, which does not say how long prompts are."""
    fields = Fields(raw, where)
    fields.require("model_type", "t5", default="t5")
    fields.require("feed_forward_proj", "gated-gelu", default="relu")
    for name, value in (("is_gated_act", True), ("dense_act_fn", "gelu_new"), ("eos_token_id", 1)):
        fields.require(name, value, default=value)
    config = T5EncoderConfig(
        hidden_size=fields.take("d_model", 512),
        intermediate_size=fields.take("d_ff", 2048),
        num_layers=fields.take("num_layers", 6),
        num_heads=fields.take("num_heads", 8),
        head_dim=fields.take("d_kv", 64),
        vocab_size=fields.take("vocab_size", 32128),
        num_buckets=fields.take("relative_attention_num_buckets", 32),
        max_distance=fields.take("relative_attention_max_distance", 128),
        norm_eps=fields.take("layer_norm_epsilon", 1e-6),
        max_length=max_length,
        pad_token_id=fields.take("pad_token_id", 0),
    )
    fields.finish((*TRANSFORMERS_HARMLESS, *T5_HARMLESS))
    return config


def write_t5(config: T5EncoderConfig) -> dict:
    return {
        "architectures": ["T5EncoderModel"],
        "model_type": "t5",
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "d_ff": config.intermediate_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "d_kv": config.head_dim,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": "gated-gelu",
        "eos_token_id": 1,
        "pad_token_id": config.pad_token_id,
    }


# diffusers' class of a transformer → the reader of its configuration.
READERS = {"SD3Transformer2DModel": read_mmdit, "FluxTransformer2DModel": read_flux}
