"""Small adapter files of `micro`'s layers, under every spelling that files have."""

import numpy as np
from safetensors.numpy import save_file

from sd_tf.weights import layers_of
from tests import micro

TO_Q = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
TO_OUT = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0"
CONV = "down_blocks.0.resnets.0.conv1"
Q_PROJ = "text_model.encoder.layers.0.self_attn.q_proj"
OUT_PROJ = "text_model.encoder.layers.0.self_attn.out_proj"
LAYERS = layers_of(micro.CONFIG)
ONE = {"lora_A.weight": np.ones((2, 16), "float32"), "lora_B.weight": np.ones((16, 2), "float32")}
KOHYA = {"lora_down.weight": ONE["lora_A.weight"], "lora_up.weight": ONE["lora_B.weight"]}


def written(folder, tensors, metadata=None, name="one.safetensors"):
    save_file({key: np.asarray(value) for key, value in tensors.items()}, folder / name, metadata)
    return folder / name


def keyed(prefix, tensors, joint="."):
    return {f"{prefix}{joint}{end}": tensor for end, tensor in tensors.items()}


def ends(down, up):
    return {down: ONE["lora_A.weight"], up: ONE["lora_B.weight"]}


PROCESSOR = ends("_lora.down.weight", "_lora.up.weight")
ATTENTION = TO_Q.removesuffix(".to_q")
SPELLED = {  # the file's names → the layer that they mean
    "peft": (keyed(f"unet.{TO_Q}", ONE), ("unet", TO_Q)),
    "lora-down": (
        keyed(f"unet.{TO_Q}", ends("lora.down.weight", "lora.up.weight")),
        ("unet", TO_Q),
    ),
    "processor": (keyed(f"unet.{ATTENTION}.processor.to_q", PROCESSOR, ""), ("unet", TO_Q)),
    "processor-out": (keyed(f"unet.{ATTENTION}.processor.to_out", PROCESSOR, ""), ("unet", TO_OUT)),
    "without-unet": (keyed(f"{ATTENTION}.processor.to_out", PROCESSOR, ""), ("unet", TO_OUT)),
    "text": (keyed(f"text_encoder.{Q_PROJ}", ONE), ("text_encoder", Q_PROJ)),
    "text-transformers-5": (
        keyed(f"text_encoder.{Q_PROJ.removeprefix('text_model.')}", ONE),
        ("text_encoder", Q_PROJ),
    ),
    "text-linear-layer": (
        keyed(
            f"text_encoder.{Q_PROJ}",
            ends("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
        ),
        ("text_encoder", Q_PROJ),
    ),
    "text-oldest": (
        keyed("text_encoder.text_model.encoder.layers.0.self_attn.to_out", PROCESSOR, ""),
        ("text_encoder", OUT_PROJ),
    ),
    "kohya": (keyed(f"lora_unet_{TO_Q.replace('.', '_')}", KOHYA), ("unet", TO_Q)),
    "kohya-original": (
        keyed("lora_unet_input_blocks_3_1_transformer_blocks_0_attn1_to_q", KOHYA),
        ("unet", TO_Q),
    ),
    "kohya-text": (
        keyed(f"lora_te_{Q_PROJ.replace('.', '_')}", KOHYA),
        ("text_encoder", Q_PROJ),
    ),
}


def lora(folder, name, tensors):
    return written(folder, tensors, name=f"{name}.safetensors")
