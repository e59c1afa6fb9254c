"""Translate a UNet's JSON file in a diffusers folder to `sd_tf.config` and back."""

from collections.abc import Mapping
from dataclasses import replace

from sd_tf.config import AddedConditioning, ConfigError, UNetConfig
from sd_tf.weights.diffusers_fields import Fields

# diffusers' class of a block → whether the block has attention.
DOWN_BLOCKS = {"CrossAttnDownBlock2D": True, "DownBlock2D": False}
UP_BLOCKS = {"CrossAttnUpBlock2D": True, "UpBlock2D": False}
MID_BLOCKS = {"UNetMidBlock2DCrossAttn": True, "UNetMidBlock2D": False, None: None}

# Fields of a UNet that only its training reads; the last ones are those of diffusers' EMAModel.
TRUNK_HARMLESS = """
    dropout addition_embed_type_num_heads
    decay inv_gamma min_decay optimization_step power update_after_step use_ema_warmup
""".split()
FIRST_WITH_SIZES = (0, 9)  # diffusers' release from which sample_size is right


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
