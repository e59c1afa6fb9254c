"""The names of the original releases' tensors, and what diffusers calls them."""

import re
from collections.abc import Mapping
from pathlib import Path

from sd_tf.config import PipelineConfig, TextEncoderConfig
from sd_tf.config.original_names import RESNET, UNET_ENDS
from sd_tf.files.tensors import CheckpointError, StoredTensor, shortened
from sd_tf.weights.diffusers import canonical_name

Tensors = Mapping[str, StoredTensor]

UNET, VAE = "model.diffusion_model.", "first_stage_model."
CLIP_L, OPENCLIP = "cond_stage_model.transformer.", "cond_stage_model.model."
XL_FIRST, XL_SECOND = "conditioner.embedders.0.", "conditioner.embedders.1."

# The noise schedule's constants and bookkeeping, which repeat what the configuration says.
BUFFERS = re.compile(
    r"(sqrt_|log_)?(one_minus_)?(recip_|recipm1_)?(alphas|alphas_cumprod(_prev)?|betas)$"
    r"|sqrt_recip_alphas_cumprod|sqrt_recipm1_alphas_cumprod|posterior_.*|scale_factor|logvar"
    r"|lvlb_weights|denoiser\.(sigmas|log_sigmas)|model_ema\..*|v_pred$"
)
TEXT_BUFFERS = re.compile(r"(.*\.)?position_ids$|logit_scale$|attn_mask$|.*\.attn_mask$")

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


def under(tensors: Tensors, prefix: str) -> dict[str, StoredTensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def shape_of(name: str, other: str, tensors: Tensors, path: Path) -> tuple[int, ...]:
    """Return the shape of a tensor that tells a size of the model in a file.

    Args:
        other: its name in the other layout, of the original's and diffusers'.
    """
    if name not in tensors:
        raise CheckpointError(
            f"{path} is incomplete: it lacks {name} (in the other layout {other}), which tells a "
            f"size of the model."
        )
    return tensors[name].shape


def text_prefixes(config: PipelineConfig) -> dict[str, str]:
    """Map each text encoder to the prefix of its tensors in the file."""
    if "text_encoder_2" not in config.text_encoders:
        is_openclip = config.text_encoders["text_encoder"].activation == "gelu"
        return {"text_encoder": OPENCLIP if is_openclip else CLIP_L}
    if "text_encoder" not in config.text_encoders:
        return {"text_encoder_2": f"{XL_FIRST}model."}
    return {"text_encoder": f"{XL_FIRST}transformer.", "text_encoder_2": f"{XL_SECOND}model."}


def unet_modules(tensors: Tensors) -> tuple[dict[str, str], dict[str, tuple]]:
    """Map the original blocks to diffusers' modules; also return the depths of each level."""

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


def split(tensors: Tensors, config: PipelineConfig, path: Path) -> dict[str, Tensors]:
    """Map each component to its tensors under diffusers' names.

    Raises:
        CheckpointError: a tensor belongs to no component and is not known to be unused.
    """
    parts = {
        "unet": unet_names(under(tensors, UNET)),
        "vae": vae_names(under(tensors, VAE), config),
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
            f"{path} holds {len(surplus)} tensors that belong to no known component; without them "
            f"the model may compute something else: {shortened(surplus)}"
        )
    return {name: parts[name] for name in config.components}


def unet_names(tensors: Tensors) -> dict[str, StoredTensor]:
    """Give a UNet's tensors diffusers' names; those of other modules keep theirs."""
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


def vae_names(tensors: Tensors, config: PipelineConfig) -> dict[str, StoredTensor]:
    deepest = len(config.autoencoder.channels) - 1

    def renamed(name):
        name = re.sub(r"\.down\.(\d+)\.block\.", r".down_blocks.\1.resnets.", name)
        name = re.sub(r"\.down\.(\d+)\.downsample\.", r".down_blocks.\1.downsamplers.0.", name)
        name = re.sub(  # the original numbers the decoder's levels from the picture's side
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
        if not name.startswith("loss.")  # the discriminator of the VAE's training
    }


def _openclip_names(tensors: Tensors, config: TextEncoderConfig) -> dict[str, StoredTensor]:
    result = {}
    for name, tensor in tensors.items():
        layer = re.match(r"transformer\.resblocks\.(\d+)\.(.+)\.(weight|bias)$", name)
        fused = re.match(r"transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)$", name)
        number = int((layer or fused)[1]) if layer or fused else -1
        if number >= config.num_layers:
            continue  # the original SD2's last layer, which is never computed
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
