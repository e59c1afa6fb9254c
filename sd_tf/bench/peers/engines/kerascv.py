"""KerasCV's pipeline with the checkpoint's weights, its models compiled by XLA or not."""

from collections.abc import Mapping

import keras
import keras_cv
import numpy as np
import tensorflow as tf
from keras_cv.src.models.stable_diffusion.clip_tokenizer import SimpleTokenizer

from sd_tf.bench.kerascv import MAX_PROMPT_LENGTH, PARTS, VOCABULARY, Stopwatch
from sd_tf.bench.peers import inputs as npz
from sd_tf.bench.peers.agreement import guided, pixels
from sd_tf.bench.peers.engine import GUIDANCE, NEGATIVE, PROMPT, Job, Loaded, Stage
from sd_tf.bench.plan import BenchError
from sd_tf.bench.timing import devices, peak_device_memory
from sd_tf.files.tensors import shortened
from sd_tf.weights import Checkpoint, StoredTensor, kerascv, open_checkpoint

kcv = keras_cv.models.stable_diffusion


def load(job: Job) -> Loaded:
    job.check_device("TensorFlow", bool(tf.config.list_physical_devices("GPU")))
    if job.precision != "float32":
        keras.config.set_dtype_policy(f"mixed_{job.precision}")
    compiles = job.engine == "kerascv"
    model = keras_cv.models.StableDiffusion(job.height, job.width, jit_compile=compiles)
    model._tokenizer = SimpleTokenizer(bpe_path=str(VOCABULARY))
    checkpoint = open_checkpoint(job.checkpoint)
    model._text_encoder = text_encoder(checkpoint)
    model._diffusion_model = diffusion_model(checkpoint, job.height, job.width)
    model._decoder = decoder(checkpoint, job.height, job.width)
    clocks = {name: Stopwatch(getattr(model, name), jit_compile=compiles) for name in PARTS}

    def draw(steps):
        for clock in clocks.values():
            clock.calls = []
        model.text_to_image(
            PROMPT,
            negative_prompt=NEGATIVE,
            batch_size=job.batch_size,
            num_steps=steps,
            unconditional_guidance_scale=GUIDANCE,
            seed=0,
        )
        first, _ = clocks["diffusion_model"].calls[0]
        decoding, _ = clocks["decoder"].calls[0]
        return (decoding - first) / steps

    return Loaded(
        _stages(model, npz.read(job.inputs)),
        draw,
        device_memory=peak_device_memory,
        devices=devices(),
    )


def _stages(model, given: dict[str, np.ndarray]) -> dict[str, Stage]:
    positions = np.arange(MAX_PROMPT_LENGTH, dtype="int32")[None].repeat(2, axis=0)
    tokens = {"tokens": given["tokens"], "positions": positions}
    latent = npz.pair(given["noise"])
    embedding = model._get_timestep_embedding(given["rows"][0, 0], len(latent))
    sample = {
        "latent": latent,
        "timestep_embedding": np.asarray(embedding),
        "context": given["context"],
    }
    return {
        "text_encoder": Stage(
            lambda: model.text_encoder.predict_on_batch(tokens), lambda context: context
        ),
        "unet_step": Stage(lambda: model.diffusion_model.predict_on_batch(sample), guided),
        "decoder": Stage(
            lambda: pixels(model.decoder.predict_on_batch(given["latent"])), lambda images: images
        ),
    }


# Load a checkpoint's weights into KerasCV's models: the inverse of `sd_tf.weights.kerascv`.


def text_encoder(checkpoint: Checkpoint):
    model = kcv.TextEncoder(MAX_PROMPT_LENGTH, download_weights=False)
    fill(kerascv.text_places(model, checkpoint.config), checkpoint.tensors("text_encoder"))
    return model


def diffusion_model(checkpoint: Checkpoint, height: int, width: int):
    model = kcv.DiffusionModel(height, width, MAX_PROMPT_LENGTH, download_weights=False)
    fill(kerascv.unet_places(model, checkpoint.config), checkpoint.tensors("unet"))
    return model


def decoder(checkpoint: Checkpoint, height: int, width: int):
    model = kcv.Decoder(height, width, download_weights=False)
    tensors = {
        name: tensor
        for name, tensor in checkpoint.tensors("vae").items()
        if name.startswith(("decoder.", "post_quant_conv."))
    }
    fill(kerascv.decoder_places(model, checkpoint.config), tensors)
    return model


def fill(places: kerascv.Places, tensors: Mapping[str, StoredTensor]) -> None:
    """Fill every variable from its tensor; every tensor must be used."""
    places = dict(places)
    if different := places.keys() ^ tensors.keys():
        raise BenchError(
            "The checkpoint must have exactly the tensors of KerasCV's model. "
            f"Without a counterpart: {shortened(different)}"
        )
    for name, place in places.items():
        if tensors[name].size != np.prod(place.shape):
            raise BenchError(
                f"{name} must have KerasCV's shape {place.shape}. Received: {tensors[name].shape}"
            )
        place.fill(tensors[name].read())
