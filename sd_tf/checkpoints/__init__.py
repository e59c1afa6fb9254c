"""Checkpoints that need no download: two tiny trained ones, and random ones of any architecture."""

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from sd_tf.config import FAMILIES, PipelineConfig
from sd_tf.tokenizer import ClipTokenizer
from sd_tf.weights import layout, save_folder

TINY, EDITOR = "tiny", "tiny-edit"
EMBEDDED = {name: Path(__file__).parent / name for name in (TINY, EDITOR)}
TINY_FOLDER = EMBEDDED[TINY]  # trained by `python -m sd_tf.training tiny`
EDITOR_FOLDER = EMBEDDED[EDITOR]  # the same, taught to follow instructions

_SD1 = FAMILIES["sd1"]
CONFIG = PipelineConfig(
    text_encoder=replace(
        _SD1.text_encoder, hidden_size=96, intermediate_size=384, num_layers=3, num_heads=4
    ),
    unet=replace(
        _SD1.unet,
        channels=(48, 96, 128),
        num_heads=(2, 4, 4),
        down_depths=((0,), (1,), (1,)),
        mid_depth=1,
        up_depths=((1, 1), (1, 1), (0, 0)),
        context_dim=96,
        sample_size=16,
        norm_groups=16,
    ),
    vae=replace(_SD1.vae, channels=(24, 48, 64), layers_per_block=1, norm_groups=8, sample_size=64),
    schedule=replace(_SD1.schedule, prediction="v_prediction", sampler="ddim"),
).check()


def make_random(config: PipelineConfig, folder: Path, dtype: str = "float32") -> None:
    """A diffusers folder of this architecture; the weights depend on their names alone."""
    models = {}
    for name, part in config.components.items():
        models[name] = layout.abstract_model(part, dtype)
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
