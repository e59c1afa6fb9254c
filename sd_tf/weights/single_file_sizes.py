"""The sizes of an autoencoder and of CLIP, read from the shapes of a single file's tensors."""

import re
from dataclasses import replace

from sd_tf.config import AutoencoderConfig, TextEncoderConfig
from sd_tf.weights.diffusers import canonical_name
from sd_tf.weights.single_file_names import Tensors

CHANNELS_PER_HEAD = 64


def read_vae(tensors: Tensors, named: AutoencoderConfig) -> AutoencoderConfig:
    blocks = [
        (int(match[1]), int(match[2]), tensor.shape[0])
        for name, tensor in tensors.items()
        if (match := re.fullmatch(r"encoder\.down\.(\d+)\.block\.(\d+)\.conv1\.weight", name))
    ]
    if not blocks:
        return named  # the file has no VAE: loading it will report the missing tensors
    widths = {level: width for level, _, width in blocks}
    quant = tensors.get("post_quant_conv.weight")
    return replace(
        named,
        channels=tuple(widths[level] for level in sorted(widths)),
        layers_per_block=1 + max(block for _, block, _ in blocks),
        latent_channels=named.latent_channels if quant is None else quant.shape[0],
    )


def count(tensors: Tensors, pattern: str) -> int:
    return len({match[1] for name in tensors if (match := re.match(pattern, name))})


def read_clip(tensors: Tensors, named: TextEncoderConfig) -> TextEncoderConfig:
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
        num_layers=count(tensors, r"text_model\.encoder\.layers\.(\d+)\."),
        num_heads=max(width // CHANNELS_PER_HEAD, 1),
    )
