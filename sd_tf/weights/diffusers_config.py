"""Translate the JSON files of a diffusers folder's models to `sd_tf.config` and back.

Every field is either read, or required to have the one value that our models compute, or known to
have no effect. Any other field is refused by its name and value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sd_tf.config import (
    START_TOKEN,
    AddedConditioning,
    AutoencoderConfig,
    ConfigError,
    TextEncoderConfig,
    UNetConfig,
    VisionEncoderConfig,
)

CONFIG = "config.json"  # the file's name in a model's folder

# diffusers' class of a block → whether the block has attention.
DOWN_BLOCKS = {"CrossAttnDownBlock2D": True, "DownBlock2D": False}
UP_BLOCKS = {"CrossAttnUpBlock2D": True, "UpBlock2D": False}
MID_BLOCKS = {"UNetMidBlock2DCrossAttn": True, "UNetMidBlock2D": False, None: None}

ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}

# Fields of transformers' configurations that this model does not read: bookkeeping, training, and
# the settings of text generation that old releases wrote into every file.
TRANSFORMERS_HARMLESS = """
    architectures attention_dropout bos_token_id chunk_size_feed_forward dropout dtype
    gradient_checkpointing id2label initializer_factor initializer_range is_encoder_decoder
    label2id model_type output_attentions output_hidden_states pad_token_id problem_type
    projection_dim return_dict tie_word_embeddings torch_dtype torchscript transformers_version
    use_bfloat16 use_cache
    add_cross_attention bad_words_ids cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size finetuning_task
    forced_bos_token_id forced_eos_token_id is_decoder length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix
    pruned_heads remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k
    top_p typical_p
""".split()

# Fields of a UNet that only its training reads; the last ones are those of diffusers' EMAModel.
TRUNK_HARMLESS = """
    dropout addition_embed_type_num_heads
    decay inv_gamma min_decay optimization_step power update_after_step use_ema_warmup
""".split()
FIRST_WITH_SIZES = (0, 9)  # diffusers' release from which sample_size is right


@dataclass
class Fields:
    """A JSON object that is read field by field; `finish` refuses the fields that were not read."""

    raw: Mapping[str, Any]
    where: str

    def __post_init__(self):
        self.rest = {k: v for k, v in self.raw.items() if not k.startswith("_")}

    def take(self, name: str, default):
        return self.rest.pop(name, default)

    def choose(self, name: str, choices: Mapping, default):
        value = self.take(name, default)
        if value not in choices:
            raise self.unsupported(name, value, choices)
        return choices[value]

    def require(self, name: str, *allowed, default):
        value = self.take(name, default)
        if value not in allowed:
            raise self.unsupported(name, value, allowed)

    def unsupported(self, name, value, allowed) -> ConfigError:
        return ConfigError(
            f"{self.where}: {name}={value!r} is not supported; "
            f"supported: {', '.join(repr(choice) for choice in allowed)}."
        )

    def finish(self, harmless=()):
        for name, value in self.rest.items():
            if name not in harmless and value is not None:
                raise ConfigError(
                    f"{self.where}: the field {name}={value!r} is not supported; ignoring it could "
                    f"change what the model computes."
                )


def read_text_encoder(raw, where: str, projected: bool, penultimate: bool) -> TextEncoderConfig:
    """Read a text encoder's `config.json`.

    Args:
        projected: whether its class also gives a pooled, projected output.
        penultimate: whether the context is the penultimate layer's output, as in SDXL.
    """
    fields = Fields(raw, where)
    fields.require("model_type", "clip_text_model", default="clip_text_model")
    eos = fields.take("eos_token_id", 2)
    width = fields.take("hidden_size", 512)
    config = TextEncoderConfig(
        hidden_size=width,
        intermediate_size=fields.take("intermediate_size", 2048),
        num_layers=fields.take("num_hidden_layers", 12),
        num_heads=fields.take("num_attention_heads", 8),
        activation=fields.choose("hidden_act", ACTIVATIONS, "quick_gelu"),
        vocab_size=fields.take("vocab_size", 49408),
        max_length=fields.take("max_position_embeddings", 77),
        layer_norm_eps=fields.take("layer_norm_eps", 1e-5),
        context_layer=2 if penultimate else 1,
        context_norm=not penultimate,
        projection_dim=fields.take("projection_dim", 512) if projected else None,
        # The value 2 is an old mistake in published files; it means the highest id of the prompt.
        eos_token_id=None if eos == 2 else eos,
    )
    fields.finish(TRANSFORMERS_HARMLESS)
    return config


def write_text_encoder(config: TextEncoderConfig) -> dict:
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    projected = config.projection_dim is not None
    return {
        "architectures": ["CLIPTextModelWithProjection" if projected else "CLIPTextModel"],
        "model_type": "clip_text_model",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": names[config.activation],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_length,
        "layer_norm_eps": config.layer_norm_eps,
        "projection_dim": config.projection_dim if projected else config.hidden_size,
        "bos_token_id": START_TOKEN,
        "eos_token_id": 2 if config.eos_token_id is None else config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def read_vision_encoder(raw, where: str) -> VisionEncoderConfig:
    """Read the `config.json` of CLIP's vision encoder."""
    fields = Fields(raw, where)
    fields.require("model_type", "clip_vision_model", default="clip_vision_model")
    fields.require("num_channels", 3, default=3)
    config = VisionEncoderConfig(
        hidden_size=fields.take("hidden_size", 768),
        intermediate_size=fields.take("intermediate_size", 3072),
        num_layers=fields.take("num_hidden_layers", 12),
        num_heads=fields.take("num_attention_heads", 12),
        patch_size=fields.take("patch_size", 32),
        image_size=fields.take("image_size", 224),
        projection_dim=fields.take("projection_dim", 512),
        activation=fields.choose("hidden_act", ACTIVATIONS, "quick_gelu"),
        layer_norm_eps=fields.take("layer_norm_eps", 1e-5),
    )
    fields.finish(TRANSFORMERS_HARMLESS)
    return config


def read_unet(
    raw, where: str, pooled_dim: int | None = None, old_sample_size: int | None = None
) -> UNetConfig:
    """Read the UNet's `config.json`.

    Args:
        pooled_dim: the width of the pooled text, if there is one.
        old_sample_size: the least `sample_size` of files older than diffusers 0.9. Those of SD1
            were published with the size of their first training.
    """
    fields = Fields(_with_size(raw, old_sample_size), where)
    up_types = fields.take("up_block_types", ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3)
    up_depths = fields.take("reverse_transformer_layers_per_block", None)
    out_channels = fields.take("out_channels", 4)
    trunk, resnets, depths = read_trunk(fields, pooled_dim)
    up_resnets = [count + 1 for count in resnets[::-1]]
    up_depths = up_depths or depths[::-1]
    return replace(
        trunk,
        out_channels=out_channels,
        up_depths=_depths(fields, "up_block_types", up_types, UP_BLOCKS, up_resnets, up_depths),
    )


def _with_size(raw: Mapping, least: int | None) -> Mapping:
    """Return an old UNet's fields with at least this `sample_size`, as diffusers takes them."""
    size, version = raw.get("sample_size"), raw.get("_diffusers_version")
    if least is None or not isinstance(size, int) or size >= least or version is None:
        return raw
    major, minor = map(int, version.split(".")[:2])
    return {**raw, "sample_size": least} if (major, minor) < FIRST_WITH_SIZES else raw


def read_trunk(
    fields: Fields, pooled_dim: int | None
) -> tuple[UNetConfig, tuple[int, ...], tuple[int | list[int], ...]]:
    """Read all fields that remain: a UNet without a way up, and its levels' resnets and depths."""
    where = fields.where
    channels = tuple(fields.take("block_out_channels", (320, 640, 1280, 1280)))
    levels = len(channels)
    down_types = fields.take("down_block_types", ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"])
    resnets = _per_level(fields, "layers_per_block", 2, levels)
    depths = _per_level(fields, "transformer_layers_per_block", 1, levels)
    mid = fields.choose("mid_block_type", MID_BLOCKS, "UNetMidBlock2DCrossAttn")
    context_dim = fields.take("cross_attention_dim", 1280)
    if not isinstance(context_dim, int):
        if len(set(context_dim)) != 1:
            raise ConfigError(
                f"{where}: cross_attention_dim must be the same at all levels. "
                f"Received: {context_dim!r}"
            )
        context_dim = context_dim[0]
    sample_size = fields.take("sample_size", None) or 64
    if not isinstance(sample_size, int):
        sample_size = max(sample_size)

    config = UNetConfig(
        in_channels=fields.take("in_channels", 4),
        channels=channels,
        # "attention_head_dim" is diffusers' historical name for the number of heads.
        num_heads=_per_level(fields, "attention_head_dim", 8, levels),
        down_depths=_depths(fields, "down_block_types", down_types, DOWN_BLOCKS, resnets, depths),
        mid_depth=mid and _layers(depths[-1], 1)[0] if mid is not False else 0,
        up_depths=(),
        context_dim=context_dim,
        linear_projection=fields.take("use_linear_projection", False),
        upcast_attention=bool(fields.take("upcast_attention", False)),
        added=_read_added(fields, pooled_dim),
        guidance_embed_dim=fields.take("time_cond_proj_dim", None),
        sample_size=sample_size,
        norm_groups=fields.take("norm_num_groups", 32),
        resnet_norm_eps=fields.take("norm_eps", 1e-5),
    )
    for name, *allowed in (
        ("act_fn", "silu", "swish"),
        ("attention_type", "default"),
        ("center_input_sample", False),
        ("class_embed_type", None),
        ("class_embeddings_concat", False),
        ("conv_in_kernel", 3),
        ("conv_out_kernel", 3),
        ("cross_attention_norm", None),
        ("downsample_padding", 1),
        ("dual_cross_attention", False),
        ("encoder_hid_dim", None),
        ("encoder_hid_dim_type", None),
        ("flip_sin_to_cos", True),
        ("freq_shift", 0),
        ("mid_block_only_cross_attention", None, False),
        ("mid_block_scale_factor", 1),
        ("num_attention_heads", None),
        ("num_class_embeds", None),
        ("only_cross_attention", False),
        ("resnet_out_scale_factor", 1),
        ("resnet_skip_time_act", False),
        ("resnet_time_scale_shift", "default"),
        ("time_embedding_act_fn", None),
        ("time_embedding_dim", None),
        ("time_embedding_type", "positional"),
        ("timestep_post_act", None),
    ):
        fields.require(name, *allowed, default=allowed[0])
    fields.finish(TRUNK_HARMLESS)
    return config, resnets, depths


def _read_added(fields: Fields, pooled_dim: int | None) -> AddedConditioning | None:
    kind = fields.choose("addition_embed_type", {None: False, "text_time": True}, None)
    time_dim = fields.take("addition_time_embed_dim", None)
    input_dim = fields.take("projection_class_embeddings_input_dim", None)
    if not kind:
        return None
    count, rest = divmod((input_dim or 0) - (pooled_dim or 0), time_dim or 1)
    if not (input_dim and time_dim and pooled_dim) or count not in (5, 6) or rest:
        raise ConfigError(
            f"{fields.where}: addition_embed_type='text_time' needs a text encoder with a "
            f"projection, and projection_class_embeddings_input_dim must be its width + 6 "
            f"(refiner: 5) × addition_time_embed_dim. "
            f"Received: {input_dim!r}, {pooled_dim!r}, {time_dim!r}"
        )
    return AddedConditioning(count, time_dim, pooled_dim)


def _per_level(fields: Fields, name: str, default: int, levels: int) -> tuple:
    value = fields.take(name, default)
    if isinstance(value, int):
        return (value,) * levels
    if len(value) != levels:
        raise ConfigError(
            f"{fields.where}: {name} must be one number, or a list of {levels}, one a level. "
            f"Received: {value!r}"
        )
    return tuple(value)


def _layers(depth, resnets: int) -> tuple[int, ...]:
    """Expand a level's depth, one number or a list, to one depth for each of its resnets."""
    depths = (depth,) * resnets if isinstance(depth, int) else tuple(depth)
    return depths[:resnets]


def _depths(fields, name, types, known, resnets, depths):
    if len(types) != len(resnets):
        raise ConfigError(
            f"{fields.where}: {name} must have as many entries as block_out_channels, "
            f"{len(resnets)}. Received: {len(types)}"
        )
    result = []
    for kind, count, depth in zip(types, resnets, depths, strict=True):
        if kind not in known:
            raise fields.unsupported(name, kind, known)
        result.append(_layers(depth, count) if known[kind] else (0,) * count)
    return tuple(result)


def _collapsed(depths: tuple[int, ...]) -> int | list[int]:
    """Invert `_layers`. For a level without attention any number but 0 would do: it is 1."""
    return max(depths[0], 1) if len(set(depths)) == 1 else list(depths)


def write_unet(config: UNetConfig) -> dict:
    trunk = write_trunk(config)
    depths = trunk["transformer_layers_per_block"]
    attends = [any(depths) for depths in config.down_depths]
    up_depths = [_collapsed(depths) for depths in config.up_depths]
    mirrored = all(
        not attention or up == down
        for attention, down, up in zip(attends[::-1], depths[::-1], up_depths, strict=True)
    )
    return {
        "_class_name": "UNet2DConditionModel",
        "sample_size": config.sample_size,
        "out_channels": config.out_channels,
        "up_block_types": [
            "CrossAttnUpBlock2D" if any(depths) else "UpBlock2D" for depths in config.up_depths
        ],
        "reverse_transformer_layers_per_block": None if mirrored else up_depths,
        "time_cond_proj_dim": config.guidance_embed_dim,
        **trunk,
    }


def write_trunk(config: UNetConfig) -> dict:
    """Return the fields of the way down and the middle, which a ControlNet's file has, too."""
    attends = [any(depths) for depths in config.down_depths]
    depths = [_collapsed(depths) for depths in config.down_depths]
    if not attends[-1]:
        depths[-1] = config.mid_depth or 1  # where diffusers looks for the middle block's depth
    mid = "UNetMidBlock2DCrossAttn" if config.mid_depth else "UNetMidBlock2D"
    added = config.added
    return {
        "in_channels": config.in_channels,
        "block_out_channels": list(config.channels),
        "down_block_types": ["CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attends],
        "mid_block_type": None if config.mid_depth is None else mid,
        "layers_per_block": [len(depths) for depths in config.down_depths],
        "transformer_layers_per_block": depths,
        "attention_head_dim": list(config.num_heads),
        "cross_attention_dim": config.context_dim,
        "use_linear_projection": config.linear_projection,
        "upcast_attention": config.upcast_attention,
        "norm_num_groups": config.norm_groups,
        "norm_eps": config.resnet_norm_eps,
        "addition_embed_type": None if added is None else "text_time",
        "addition_time_embed_dim": None if added is None else added.time_embed_dim,
        "projection_class_embeddings_input_dim": None if added is None else added.input_dim,
        "act_fn": "silu",
        "flip_sin_to_cos": True,
        "freq_shift": 0,
    }


def read_vae(
    raw, where: str, of_transformer: bool = False, upcasts: bool = False
) -> AutoencoderConfig:
    """Read the autoencoder's `config.json`.

    Args:
        of_transformer: whether its pipeline shifts latents, and ignores `force_upcast`, as those
            of SD3 and Flux do.
        upcasts: what an absent `force_upcast` means.
    """
    fields = Fields(raw, where)
    channels = tuple(fields.take("block_out_channels", (64,)))
    for name, kind in (
        ("down_block_types", "DownEncoderBlock2D"),
        ("up_block_types", "UpDecoderBlock2D"),
    ):
        fields.require(name, [kind] * len(channels), default=[kind])
    for name, *allowed in (
        ("act_fn", "silu", "swish"),
        ("latents_mean", None),
        ("latents_std", None),
        *(() if of_transformer else (("shift_factor", None, 0),)),
    ):
        fields.require(name, *allowed, default=allowed[0])
    shift, upcast = fields.take("shift_factor", None), bool(fields.take("force_upcast", upcasts))
    config = AutoencoderConfig(
        in_channels=fields.take("in_channels", 3),
        out_channels=fields.take("out_channels", 3),
        channels=channels,
        layers_per_block=fields.take("layers_per_block", 1),
        latent_channels=fields.take("latent_channels", 4),
        norm_groups=fields.take("norm_num_groups", 32),
        mid_attention=fields.take("mid_block_add_attention", True),
        quant_conv=fields.take("use_quant_conv", True),
        post_quant_conv=fields.take("use_post_quant_conv", True),
        scaling_factor=fields.take("scaling_factor", 0.18215),
        shift_factor=0.0 if shift is None else shift,
        force_upcast=upcast and not of_transformer,
        sample_size=fields.take("sample_size", 512),
    )
    fields.finish()
    return config


def write_vae(config: AutoencoderConfig) -> dict:
    levels = len(config.channels)
    return {
        "_class_name": "AutoencoderKL",
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "block_out_channels": list(config.channels),
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
        "layers_per_block": config.layers_per_block,
        "latent_channels": config.latent_channels,
        "norm_num_groups": config.norm_groups,
        "mid_block_add_attention": config.mid_attention,
        "use_quant_conv": config.quant_conv,
        "use_post_quant_conv": config.post_quant_conv,
        "scaling_factor": config.scaling_factor,
        "shift_factor": config.shift_factor,
        "force_upcast": config.force_upcast,
        "sample_size": config.sample_size,
        "act_fn": "silu",
    }
