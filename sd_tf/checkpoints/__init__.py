"""Checkpoints that need no download: seeded random weights in any architecture, and a tiny one."""

import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from sd_tf.config import FAMILIES, PipelineConfig
from sd_tf.models import MODEL_CLASSES, deferred_variables
from sd_tf.tokenizer import ClipTokenizer
from sd_tf.weights import layout, save_folder

NAME = "tiny"
VERSION = 1  # part of the folder's name: a change of sizes makes a new one

_SD1 = FAMILIES["sd1"]
CONFIG = PipelineConfig(
    text_encoder=replace(
        _SD1.text_encoder, hidden_size=64, intermediate_size=256, num_layers=4, num_heads=4
    ),
    unet=replace(
        _SD1.unet,
        channels=(32, 64, 96),
        num_heads=(2, 4, 6),
        down_depths=((1,), (1,), (0,)),
        mid_depth=1,
        up_depths=((0, 0), (1, 1), (1, 1)),
        context_dim=64,
        sample_size=16,
    ),
    vae=replace(_SD1.vae, channels=(32, 32, 64, 64), layers_per_block=1, sample_size=128),
    schedule=_SD1.schedule,
).check()


def tiny_folder() -> Path:
    """The tiny checkpoint's diffusers folder, made on first use in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sd_tf"
    folder = cache / f"{NAME}-{VERSION}"
    if not folder.is_dir():
        making = folder.with_name(f"{folder.name}.{os.getpid()}")
        make_random(CONFIG, making)
        try:
            making.rename(folder)
        except OSError:  # another process was faster; its result is the same
            if not folder.is_dir():
                raise
    return folder


def make_random(config: PipelineConfig, folder: Path, dtype: str = "float32") -> None:
    """A diffusers folder of this architecture; the weights depend on their names alone."""
    models = {}
    for name, part in config.components.items():
        with deferred_variables():
            models[name] = MODEL_CLASSES[type(part)](part, dtype=dtype)
        for path, slot in layout.slots(models[name]).items():
            seed = zlib.crc32(f"{name}.{path}".encode())
            slot.fill(lambda slot=slot, path=path, seed=seed: _random(path, slot.shape, seed))
    tokenizers = {
        name: ClipTokenizer.clip(part.pad_token_id) for name, part in config.text_encoders.items()
    }
    save_folder(folder, config, models, tokenizers)


def _random(path: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Scaled so that activations keep their size; norms start as identities."""
    if len(shape) == 1:
        is_scale = path.endswith("weight")
        return np.full(shape, 1.0 if is_scale else 0.0, "float32")
    scale = 0.5 if "embedding" in path else np.prod(shape[1:]) ** -0.5
    return np.random.default_rng(seed).standard_normal(shape, "float32") * np.float32(scale)
