"""Random IP-Adapters in the format of those that were published, and their vision encoder."""

import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from sd_tf.weights import open_checkpoint
from tests import peers
from tests.exports import micro_folder, once, replace_in_micro

EMBED, WIDTH, SIDE = 24, 32, 32  # of the encoder: its embedding, its tokens, its pictures
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": SIDE,
    "projection_dim": EMBED,
    "hidden_act": "gelu",
}
HIDDEN, INNER = 48, 128  # of a resampler: its width, and its two heads of 64


def vision_encoder(seed=5):
    model = CLIPVisionModelWithProjection(CLIPVisionConfig(**VISION)).eval()
    return peers.randomized(model, seed)


def projection(kind, context):
    """Tensors that make tokens of an encoded picture: names and shapes as published."""

    def norm(name, width):
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    if kind == "base":
        return {"proj.weight": (4 * context, EMBED), "proj.bias": (4 * context,)} | norm(
            "norm", context
        )
    if kind == "full-face":
        return {
            "proj.0.weight": (WIDTH, WIDTH),
            "proj.0.bias": (WIDTH,),
            "proj.2.weight": (context, WIDTH),
            "proj.2.bias": (context,),
            **norm("proj.3", context),
        }
    shapes = {
        "latents": (1, 5, HIDDEN),
        "proj_in.weight": (HIDDEN, WIDTH),
        "proj_in.bias": (HIDDEN,),
        "proj_out.weight": (context, HIDDEN),
        "proj_out.bias": (context,),
        **norm("norm_out", context),
    }
    for layer in [f"layers.{number}" for number in range(4)]:  # as diffusers expects
        shapes |= {
            **norm(f"{layer}.0.norm1", HIDDEN),
            **norm(f"{layer}.0.norm2", HIDDEN),
            f"{layer}.0.to_q.weight": (INNER, HIDDEN),
            f"{layer}.0.to_kv.weight": (2 * INNER, HIDDEN),
            f"{layer}.0.to_out.weight": (HIDDEN, INNER),
            **norm(f"{layer}.1.0", HIDDEN),
            f"{layer}.1.1.weight": (4 * HIDDEN, HIDDEN),
            f"{layer}.1.3.weight": (HIDDEN, 4 * HIDDEN),
        }
    return shapes


def attention(unet):
    """Keys and values for each attention to the prompt, by its number among all attentions."""
    processors = list(unet.attn_processors)
    return {
        f"{number}.to_{letter}_ip.weight": tuple(
            unet.get_submodule(name.removesuffix(".processor")).to_k.weight.shape
        )
        for number, name in enumerate(processors)
        if "attn2" in name
        for letter in "kv"
    }


def save(path, kind, unet, seed=0):
    """Write an adapter's file."""
    shapes = {
        **{
            f"image_proj.{n}": s
            for n, s in projection(kind, unet.config.cross_attention_dim).items()
        },
        **{f"ip_adapter.{n}": s for n, s in attention(unet).items()},
    }
    generator = torch.Generator().manual_seed(seed)

    def values(name, shape):
        x = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            return x / shape[-1] ** 0.5
        return 1 + 0.2 * x if name.endswith("weight") else 0.2 * x

    save_file({name: values(name, shape) for name, shape in shapes.items()}, path)


@once
def micro_image_adapters(folder):
    """IP-Adapters for the smallest checkpoint, base.safetensors and plus.safetensors."""
    unet = UNet2DConditionModel.from_pretrained(micro_folder() / "unet")
    folder.mkdir(parents=True, exist_ok=True)
    vision_encoder().save_pretrained(folder / "image_encoder")
    for seed, kind in enumerate(("base", "plus")):
        save(folder / f"{kind}.safetensors", kind, unet, seed)


@once
def shown_export(folder):
    """Like `micro_export`, with an IP-Adapter that takes two pictures, and verified."""
    adapter = micro_image_adapters() / "plus.safetensors"
    checkpoint = open_checkpoint(micro_folder(), ip_adapter=[adapter])
    components = ("diffusion_model", "vision_encoder")
    replace_in_micro(folder, checkpoint, components, image_prompts=2, verify="fast")
