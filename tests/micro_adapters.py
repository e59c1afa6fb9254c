"""Random LoRAs for the micro checkpoint, and an export whose places hold four of them."""

import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from sd_tf.export.adapters import write_adapters
from sd_tf.weights import layers_of
from tests import micro
from tests.exports import adapted_export, once

LAYERS = layers_of(micro.CONFIG)
RANKS = {"style": 2, "detail": 4, "third": 3, "fourth": 2}


def lora(path, seed, rank=2, size=0.5, chosen=lambda part, layer: True, model=LAYERS):
    """Write a random LoRA of the chosen layers of a model, in PEFT's names."""
    rng, tensors = np.random.default_rng(seed), {}
    for part, layers in model.items():
        for layer, shape in layers.items():
            if chosen(part, layer):
                down, up = (rank, *shape[1:]), (shape[0], rank, *[1] * (len(shape) - 2))
                for name, of in (("lora_A", down), ("lora_B", up)):
                    values = rng.standard_normal(of) * np.sqrt(size / np.prod(of[1:]))
                    tensors[f"{part}.{layer}.{name}.weight"] = values.astype("float32")
    save_file(tensors, path)
    return path


@functools.cache
def adapter_files() -> dict[str, Path]:
    """name → a LoRA's file; the names are those of `RANKS`."""
    folder = Path(tempfile.mkdtemp())
    return {
        name: lora(folder / f"{name}.safetensors", seed, rank)
        for seed, (name, rank) in enumerate(RANKS.items())
    }


@once
def written_export(folder):
    """`adapted_export` with all of `adapter_files` in its places."""
    shutil.copytree(adapted_export(), folder)
    write_adapters(folder, adapter_files())
