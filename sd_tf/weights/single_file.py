"""Single `.safetensors` files in the layout of the original releases: SD1, SD2, SDXL.

The family is told by the tensors' names, the sizes by their shapes. What shapes cannot tell follows
the family's convention: 8 heads in SD1's UNet, 64 channels a head elsewhere.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sd_tf.config import FAMILIES, PipelineConfig, TextEncoderConfig, UNetConfig, VAEConfig
from sd_tf.weights.checkpoint import Checkpoint
from sd_tf.weights.diffusers import canonical_name
from sd_tf.weights.tensors import CheckpointError, StoredTensor, open_safetensors, shortened

Tensors = Mapping[str, StoredTensor]

UNET, VAE = "model.diffusion_model.", "first_stage_model."
EMA = "model_ema."
CLIP_L, OPENCLIP = "cond_stage_model.transformer.", "cond_stage_model.model."
XL_FIRST, XL_SECOND = "conditioner.embedders.0.", "conditioner.embedders.1."
CHANNELS_PER_HEAD = 64

# Constants of the noise schedule and bookkeeping: they repeat what the configuration says.
BUFFERS = re.compile(
    r"(sqrt_|log_)?(one_minus_)?(recip_|recipm1_)?(alphas|alphas_cumprod(_prev)?|betas)$"
    r"|sqrt_recip_alphas_cumprod|sqrt_recipm1_alphas_cumprod|posterior_.*|scale_factor|logvar"
    r"|lvlb_weights|denoiser\.(sigmas|log_sigmas)|model_ema\..*|v_pred$"
)
TEXT_BUFFERS = re.compile(r"(.*\.)?position_ids$|logit_scale$|attn_mask$|.*\.attn_mask$")

RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
UNET_ENDS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "time_embed.cond_proj": "time_embedding.cond_proj",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
OPENCLIP_LAYER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
OPENCLIP_ENDS = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
VAE_ATTENTION = {
    "norm": "group_norm",
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "proj_out": "to_out.0",
}


def open_file(
    path: Path, family: str | None = None, scheduler: str | None = None, ema: bool = False
) -> Checkpoint:
    """`family` settles what names cannot: `sd2-base` or `sd2-v`. `ema` takes the averaged UNet."""
    tensors = open_safetensors(path)
    if ema:
        tensors = _with_ema(tensors, path)
    found = detect_family(tensors, path)
    family = _settled(found, family, path)
    config = read_config(tensors, family)
    if "v_pred" in tensors:
        config = replace(config, schedule=replace(config.schedule, prediction="v_prediction"))
    if scheduler is not None:
        config = replace(config, schedule=replace(config.schedule, sampler=scheduler))
    config.check()
    components = split(tensors, config, path)
    readers = {name: (lambda part=part: part) for name, part in components.items()}
    return Checkpoint(str(path), "single file", config, readers)


def detect_family(tensors: Tensors, path: Path) -> tuple[str, ...]:
    """The families that these names may be: one, or SD2's two."""
    probe = f"{UNET}input_blocks.0.0.weight"
    if probe not in tensors:
        raise CheckpointError(
            f"{path} is not a whole Stable Diffusion checkpoint in the original layout: it has no "
            f"{probe!r}. Its tensors begin with "
            f"{shortened({name.split('.')[0] for name in tensors}) or 'nothing'}."
        )
    in_channels = tensors[probe].shape[1]
    if any(name.startswith(XL_SECOND) for name in tensors):
        return ("sdxl-instruct-pix2pix" if in_channels == 8 else "sdxl-base",)
    if any(name.startswith(f"{XL_FIRST}model.") for name in tensors):
        return ("sdxl-refiner",)
    if any(name.startswith(OPENCLIP) for name in tensors):
        return ("sd2-base", "sd2-v")
    if any(name.startswith(CLIP_L) for name in tensors):
        return ({8: "instruct-pix2pix", 9: "inpaint"}.get(in_channels, "sd1"),)
    raise CheckpointError(
        f"{path} has a UNet but no text encoder under a known name ({CLIP_L}, {OPENCLIP}, "
        f"{XL_FIRST})."
    )


def _settled(found: tuple[str, ...], family: str | None, path: Path) -> str:
    if family is not None and family not in found:
        raise CheckpointError(
            f"{path} is {' or '.join(found)} by its tensors. Received: {family!r}"
        )
    if family is None and len(found) > 1:
        raise CheckpointError(
            f"{path} is an SD2 checkpoint. Nothing in the file tells the 512 px release that "
            f"predicts noise from the 768 px one that predicts v: say family='sd2-base' or "
            f"family='sd2-v'."
        )
    return family or found[0]


def _with_ema(tensors: Tensors, path: Path) -> dict[str, StoredTensor]:
    """The UNet's tensors replaced by their averages, which are stored under dotless names."""
    result = dict(tensors)
    for name in tensors:
        if name.startswith(UNET):
            average = EMA + name.removeprefix("model.").replace(".", "")
            if average not in tensors:
                raise CheckpointError(f"{path} holds no averaged weights: {average!r} is missing.")
            result[name] = tensors[average]
    return result


def under(tensors: Tensors, prefix: str) -> dict[str, StoredTensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def read_config(tensors: Tensors, family: str) -> PipelineConfig:
    """The family's configuration with the sizes that the tensors have."""
    named = FAMILIES[family]
    unet = _read_unet(under(tensors, UNET), named.unet)
    config = replace(named, unet=unet, vae=_read_vae(under(tensors, VAE), named.vae))
    for name, prefix in text_prefixes(config).items():
        part = under(tensors, prefix)
        read = _read_openclip if prefix.endswith("model.") else _read_clip
        config = replace(config, **{name: read(part, config.text_encoders[name])})
    if unet.added is not None and config.text_encoder_2 is not None:
        ids = named.unet.added.num_time_ids
        width = under(tensors, UNET)["label_emb.0.0.weight"].shape[1]
        pooled = config.text_encoder_2.projection_dim
        added = replace(unet.added, pooled_dim=pooled, time_embed_dim=(width - pooled) // ids)
        config = replace(config, unet=replace(unet, added=added))
    return config


def text_prefixes(config: PipelineConfig) -> dict[str, str]:
    """Text encoder → where its tensors stand in the file."""
    if config.text_encoder_2 is None:
        is_openclip = config.text_encoder.activation == "gelu"
        return {"text_encoder": OPENCLIP if is_openclip else CLIP_L}
    if config.text_encoder is None:
        return {"text_encoder_2": f"{XL_FIRST}model."}
    return {"text_encoder": f"{XL_FIRST}transformer.", "text_encoder_2": f"{XL_SECOND}model."}


def unet_modules(tensors: Tensors) -> tuple[dict[str, str], dict[str, tuple]]:
    """Original block → ours, and the depths that the blocks show."""

    def depth(block):
        return len(
            {
                match[1]
                for name in tensors
                if (match := re.match(rf"{block}\.1\.transformer_blocks\.(\d+)\.", name))
            }
        )

    def has(prefix):
        return any(name.startswith(f"{prefix}.") for name in tensors)

    modules, down, up = {}, [[]], [[]]
    index = 1
    while has(f"input_blocks.{index}"):
        block, level = f"input_blocks.{index}", len(down) - 1
        if has(f"{block}.0.op"):
            modules[f"{block}.0.op"] = f"down_blocks.{level}.downsamplers.0.conv"
            down.append([])
        else:
            place = len(down[level])
            modules[f"{block}.0"] = f"down_blocks.{level}.resnets.{place}"
            modules[f"{block}.1"] = f"down_blocks.{level}.attentions.{place}"
            down[level].append(depth(block))
        index += 1
    index = 0
    while has(f"output_blocks.{index}"):
        block, level = f"output_blocks.{index}", len(up) - 1
        place = len(up[level])
        modules[f"{block}.0"] = f"up_blocks.{level}.resnets.{place}"
        up[level].append(depth(block))
        sampler = f"{block}.{2 if up[level][-1] else 1}"
        if up[level][-1]:
            modules[f"{block}.1"] = f"up_blocks.{level}.attentions.{place}"
        if has(f"{sampler}.conv"):
            modules[f"{sampler}.conv"] = f"up_blocks.{level}.upsamplers.0.conv"
            up.append([])
        index += 1
    mid_depth = depth("middle_block")
    modules |= {
        "middle_block.0": "mid_block.resnets.0",
        "middle_block.1": "mid_block.attentions.0",
        "middle_block.2": "mid_block.resnets.1",
    }
    depths = {"down_depths": tuple(map(tuple, down)), "up_depths": tuple(map(tuple, up))}
    return modules, depths | {"mid_depth": mid_depth if has("middle_block.0") else None}


def _read_unet(tensors: Tensors, named: UNetConfig) -> UNetConfig:
    modules, depths = unet_modules(tensors)
    ours = {theirs: block for block, theirs in modules.items()}
    channels = tuple(
        tensors[f"{ours[f'down_blocks.{level}.resnets.0']}.out_layers.3.weight"].shape[0]
        for level in range(len(depths["down_depths"]))
    )
    heads = tuple(
        named.num_heads[0] if not named.linear_projection else max(width // CHANNELS_PER_HEAD, 1)
        for width in channels
    )
    context = {t.shape[1] for name, t in tensors.items() if name.endswith("attn2.to_k.weight")}
    condition = tensors.get("time_embed.cond_proj.weight")
    return replace(
        named,
        in_channels=tensors["input_blocks.0.0.weight"].shape[1],
        out_channels=tensors["out.2.weight"].shape[0] if "out.2.weight" in tensors else 4,
        channels=channels,
        num_heads=heads,
        context_dim=context.pop() if len(context) == 1 else named.context_dim,
        guidance_embed_dim=None if condition is None else condition.shape[1],
        **depths,
    )


def _read_vae(tensors: Tensors, named: VAEConfig) -> VAEConfig:
    blocks = [
        (int(match[1]), int(match[2]), tensor.shape[0])
        for name, tensor in tensors.items()
        if (match := re.fullmatch(r"encoder\.down\.(\d+)\.block\.(\d+)\.conv1\.weight", name))
    ]
    if not blocks:
        return named  # no VAE in the file: building it will say what is missing
    widths = {level: width for level, _, width in blocks}
    quant = tensors.get("post_quant_conv.weight")
    return replace(
        named,
        channels=tuple(widths[level] for level in sorted(widths)),
        layers_per_block=1 + max(block for _, block, _ in blocks),
        latent_channels=named.latent_channels if quant is None else quant.shape[0],
    )


def _count(tensors: Tensors, pattern: str) -> int:
    return len({match[1] for name in tensors if (match := re.match(pattern, name))})


def _read_clip(tensors: Tensors, named: TextEncoderConfig) -> TextEncoderConfig:
    tensors = {canonical_name("text_encoder", name): tensor for name, tensor in tensors.items()}
    embedding = tensors.get("text_model.embeddings.token_embedding.weight")
    fc1 = tensors.get("text_model.encoder.layers.0.mlp.fc1.weight")
    if embedding is None or fc1 is None:
        return named
    width = embedding.shape[1]
    return replace(
        named,
        vocab_size=embedding.shape[0],
        hidden_size=width,
        intermediate_size=fc1.shape[0],
        num_layers=_count(tensors, r"text_model\.encoder\.layers\.(\d+)\."),
        num_heads=max(width // CHANNELS_PER_HEAD, 1),
    )


def _read_openclip(tensors: Tensors, named: TextEncoderConfig) -> TextEncoderConfig:
    embedding = tensors.get("token_embedding.weight")
    fc1 = tensors.get("transformer.resblocks.0.mlp.c_fc.weight")
    if embedding is None or fc1 is None:
        return named
    width, layers = embedding.shape[1], _count(tensors, r"transformer\.resblocks\.(\d+)\.")
    projected = named.projection_dim is not None and "text_projection" in tensors
    return replace(
        named,
        vocab_size=embedding.shape[0],
        hidden_size=width,
        intermediate_size=fc1.shape[0],
        # SD2 reads the penultimate layer: the last one is in the file and takes no part.
        num_layers=layers if named.projection_dim is not None else layers - 1,
        num_heads=max(width // CHANNELS_PER_HEAD, 1),
        projection_dim=tensors["text_projection"].shape[1] if projected else named.projection_dim,
    )


def split(tensors: Tensors, config: PipelineConfig, path: Path) -> dict[str, Tensors]:
    """Component → its tensors under diffusers' names. Every tensor is used, or known to be idle."""
    parts = {
        "unet": _unet_names(under(tensors, UNET)),
        "vae": _vae_names(under(tensors, VAE), config),
    }
    prefixes = text_prefixes(config)
    for name, prefix in prefixes.items():
        part = under(tensors, prefix)
        part = {key: tensor for key, tensor in part.items() if not TEXT_BUFFERS.match(key)}
        if prefix.endswith("model."):
            parts[name] = _openclip_names(part, config.text_encoders[name])
        else:
            parts[name] = {canonical_name(name, key): tensor for key, tensor in part.items()}
    used = (UNET, VAE, *prefixes.values())
    if surplus := [k for k in tensors if not k.startswith(used) and not BUFFERS.match(k)]:
        raise CheckpointError(
            f"{path} holds {len(surplus)} tensors that belong to no component and may change what "
            f"it computes: {shortened(surplus)}"
        )
    return {name: parts[name] for name in config.components}


def _unet_names(tensors: Tensors) -> dict[str, StoredTensor]:
    modules, _ = unet_modules(tensors)

    def renamed(name):
        for theirs, ours in UNET_ENDS.items():
            if name.startswith(f"{theirs}."):
                return ours + name.removeprefix(theirs)
        parts = name.split(".")
        for length in (4, 3, 2):
            block, rest = ".".join(parts[:length]), ".".join(parts[length:])
            if block in modules:
                inner, _, leaf = rest.rpartition(".")
                if ".resnets." in modules[block]:
                    rest = f"{RESNET.get(inner, inner)}.{leaf}"
                return f"{modules[block]}.{rest}"
        return name

    return {renamed(name): tensor for name, tensor in tensors.items()}


def _vae_names(tensors: Tensors, config: PipelineConfig) -> dict[str, StoredTensor]:
    deepest = len(config.vae.channels) - 1

    def renamed(name):
        name = re.sub(r"\.down\.(\d+)\.block\.", r".down_blocks.\1.resnets.", name)
        name = re.sub(r"\.down\.(\d+)\.downsample\.", r".down_blocks.\1.downsamplers.0.", name)
        name = re.sub(  # the original counts the way up from the picture's side
            r"\.up\.(\d+)\.(block|upsample)\.",
            lambda m: (
                f".up_blocks.{deepest - int(m[1])}."
                + ("resnets." if m[2] == "block" else "upsamplers.0.")
            ),
            name,
        )
        name = re.sub(
            r"\.mid\.block_([12])\.", lambda m: f".mid_block.resnets.{int(m[1]) - 1}.", name
        )
        name = re.sub(
            r"\.mid\.attn_1\.(norm|q|k|v|proj_out)\.",
            lambda m: f".mid_block.attentions.0.{VAE_ATTENTION[m[1]]}.",
            name,
        )
        name = name.replace(".nin_shortcut.", ".conv_shortcut.")
        return re.sub(r"^(encoder|decoder)\.norm_out\.", r"\1.conv_norm_out.", name)

    return {
        renamed(name): tensor
        for name, tensor in tensors.items()
        if not name.startswith("loss.")  # the discriminator it was trained against
    }


def _openclip_names(tensors: Tensors, config: TextEncoderConfig) -> dict[str, StoredTensor]:
    result = {}
    for name, tensor in tensors.items():
        layer = re.match(r"transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)$", name)
        fused = re.match(r"transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)$", name)
        number = int((layer or fused)[1]) if layer or fused else -1
        if number >= config.num_layers:
            continue  # SD2's idle last layer
        if name == "text_projection":
            if config.projection_dim is not None:
                result["text_projection.weight"] = tensor.transposed()
        elif fused:
            width = config.hidden_size
            for row, part in enumerate("qkv"):
                key = f"text_model.encoder.layers.{number}.self_attn.{part}_proj.{fused[2]}"
                result[key] = tensor.rows(row * width, (row + 1) * width)
        elif layer and layer[2] in OPENCLIP_LAYER:
            inner = OPENCLIP_LAYER[layer[2]]
            result[f"text_model.encoder.layers.{number}.{inner}.{layer[3]}"] = tensor
        else:
            result[OPENCLIP_ENDS.get(name, name)] = tensor
    return result
