"""A model small enough to be trained in a test; `python -m tests.micro FOLDER [PAUSE]` does."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from keras import ops

from sd_tf.config import FAMILIES, PipelineConfig
from sd_tf.config.unet import AddedConditioning
from sd_tf.models import MODEL_CLASSES
from sd_tf.runtime.compile_cache import set_compile_cache
from sd_tf.training.initial_weights import initialize
from sd_tf.training.losses import Denoising
from sd_tf.training.settings import Averaging, Settings
from sd_tf.training.trainer import Run

_SD1 = FAMILIES["sd1"]
CONFIG = PipelineConfig(
    {
        "text_encoder": replace(
            _SD1.text_encoders["text_encoder"],
            hidden_size=16,
            intermediate_size=32,
            num_layers=1,
            num_heads=2,
        )
    },
    replace(
        _SD1.denoiser,
        channels=(8, 16),
        num_heads=(1, 2),
        down_depths=((0,), (1,)),
        up_depths=((1, 1), (0, 0)),
        context_dim=16,
        sample_size=8,
        norm_groups=4,
    ),
    replace(_SD1.autoencoder, channels=(8, 16), layers_per_block=1, norm_groups=4, sample_size=16),
    _SD1.schedule,
).check()
# Multiples of a TPU's 128 lanes: it pads what is narrower.
WIDE_CONFIG = replace(
    CONFIG,
    text_encoders={"text_encoder": replace(CONFIG.text_encoders["text_encoder"], hidden_size=256)},
    denoiser=replace(CONFIG.denoiser, channels=(128, 256), context_dim=256, norm_groups=32),
).check()
_SDXL = FAMILIES["sdxl-base"]
_ENCODER = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 2}
XL_CONFIG = replace(
    _SDXL,
    text_encoders={
        "text_encoder": replace(_SDXL.text_encoders["text_encoder"], **_ENCODER),
        "text_encoder_2": replace(
            _SDXL.text_encoders["text_encoder_2"], **_ENCODER, projection_dim=8
        ),
    },
    denoiser=replace(
        _SDXL.denoiser,
        channels=(8, 16),
        num_heads=(1, 2),
        down_depths=((0,), (1,)),
        mid_depth=1,
        up_depths=((1, 1), (0, 0)),
        context_dim=32,
        added=AddedConditioning(time_embed_dim=4, pooled_dim=8),
        sample_size=8,
        norm_groups=4,
    ),
    autoencoder=replace(CONFIG.autoencoder, scaling_factor=0.13025, force_upcast=True),
).check()
SETTINGS = Settings(
    steps=12,
    batch_size=4,
    learning_rate=1e-2,
    warm_up=2,
    averaging=Averaging(half_life=3.0),
    log_every=4,
    save_every=4,
    # Compiling takes longer than these few steps; the runs in processes of their own do it.
    jit_compile=keras.backend.backend() == "jax",
)


def build(name):
    part = CONFIG.components[name]
    model = MODEL_CLASSES[type(part)](part)
    initialize(model, name, seed=0)
    return model


def denoising() -> Denoising:
    return Denoising(build("unet"), [build("text_encoder")], CONFIG)


def latent_batch(config, size: int, step: int = 0):
    rng = np.random.default_rng(step)
    side = config.denoiser.sample_size
    shape = (size, side, side, config.autoencoder.latent_channels)
    return {
        "latents": rng.standard_normal(shape, "float32"),
        "noise": rng.standard_normal(shape, "float32"),
        "timesteps": rng.integers(0, 1000, size).astype("int32"),
        "tokens": rng.integers(0, 1000, (size, 77)).astype("int32"),
    }


def gradients_of(loss, batch):
    """By variable, and the loss; outside any optimizer."""
    variables = loss.trainable_variables
    if keras.backend.backend() == "jax":
        import jax

        def value_of(values):
            with keras.StatelessScope(list(zip(variables, values, strict=True))):
                return loss(batch)[0]

        value, gradients = jax.jit(jax.value_and_grad(value_of))([v.value for v in variables])
        return gradients, float(value)
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value, _ = loss({name: tf.constant(x) for name, x in batch.items()})
    gradients = tape.gradient(value, [v.value for v in variables])
    return [tf.convert_to_tensor(g) for g in gradients], float(value)


class Toy(keras.layers.Layer):
    """A loss of two variables, for what a run does whatever it trains."""

    def __init__(self):
        super().__init__()
        self.matrix = self.add_weight(shape=(4, 3), initializer="ones")
        self.vector = self.add_weight(shape=(3,), initializer="zeros")
        self.built = True

    def call(self, batch):
        loss = ops.mean(ops.square(batch["x"] @ self.matrix + self.vector))
        return loss, {"loss": loss}


def no_ids(texts):
    """A `Tokenize` where no text encoder reads."""
    return {}


def toy_batch(step: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(step).standard_normal((4, 4), "float32")}


def run(folder: Path, settings: Settings = SETTINGS, pause: float = 0.0) -> Run:
    def batches(step):
        time.sleep(pause)
        return latent_batch(CONFIG, settings.batch_size, step)

    return Run(denoising(), batches, settings, folder)


if __name__ == "__main__":
    devices = 1
    if keras.backend.backend() == "jax":
        devices = len(keras.distribution.list_devices())
        if devices > 1:
            keras.distribution.set_distribution(keras.distribution.DataParallel())
    else:
        set_compile_cache(Path(sys.argv[1]).parent / "compiled")  # the same program again and again
    print(devices, "devices")
    compiled = replace(SETTINGS, jit_compile=True)
    run(Path(sys.argv[1]), compiled, pause=float(sys.argv[2]) if len(sys.argv) > 2 else 0.0).train()
