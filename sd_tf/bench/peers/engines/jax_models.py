"""Our Keras models on the JAX backend, each compiled by `jax.jit` and driven by `walk`."""

from collections.abc import Callable
from functools import partial

import jax
import keras
import numpy as np

from sd_tf.bench.peers import inputs as npz
from sd_tf.bench.peers.agreement import guided, pixels
from sd_tf.bench.peers.engine import Job, Loaded, Stage
from sd_tf.bench.peers.walk import walk
from sd_tf.bench.plan import BenchError
from sd_tf.config.rewrites import AS_WRITTEN, TARGETS, Rewrites
from sd_tf.models.lowering import lowered
from sd_tf.weights import open_checkpoint


def load(job: Job) -> Loaded:
    if keras.backend.backend() != "jax":
        raise BenchError(f"KERAS_BACKEND must be jax. Received: {keras.backend.backend()}")
    given = npz.read(job.inputs)
    checkpoint = open_checkpoint(job.checkpoint)
    build = {name: checkpoint.build(name, job.precision) for name in checkpoint.config.components}
    encode_text = compiled(build["text_encoder"], lambda model, tokens: model(tokens)["context"])
    for_target = partial(compiled, rewrites=TARGETS[job.device])
    call_unet = for_target(build["unet"], lambda model, *inputs: model(*inputs))
    call_decoder = for_target(build["vae"], lambda model, latent: model.decode(latent))
    scale = checkpoint.config.autoencoder.latent_scale

    def unet(sample, timestep, context):
        return call_unet(
            sample.astype("float32"), np.full(len(sample), timestep, "float32"), context
        )

    def decode(latent):
        return pixels(call_decoder(scale.undo(latent)))

    pair, timestep = npz.pair(given["noise"]), given["rows"][0, 0]
    return Loaded(
        {
            "text_encoder": Stage(lambda: encode_text(given["tokens"]), lambda context: context),
            "unet_step": Stage(lambda: unet(pair, timestep, given["context"]), guided),
            "decoder": Stage(lambda: decode(given["latent"]), lambda images: images),
        },
        lambda steps: walk(given, steps, encode_text, unet, decode),
        device_memory=_peak,
        devices=[device.device_kind for device in jax.devices()],
    )


def compiled(
    model: keras.layers.Layer, function: Callable, rewrites: Rewrites = AS_WRITTEN
) -> Callable[..., np.ndarray]:
    """Compile `function(model, …)` with weights as arguments, so that XLA does not fold them."""
    variables = model.variables
    weights = [variable.value for variable in variables]

    @jax.jit
    def pure(weights, *inputs):
        scope = keras.StatelessScope(state_mapping=zip(variables, weights, strict=True))
        with lowered(rewrites), scope:
            return function(model, *inputs)

    return lambda *inputs: np.asarray(pure(weights, *inputs).astype("float32"))


def _peak() -> int | None:
    found = jax.devices()[0].memory_stats()
    return None if found is None else found["peak_bytes_in_use"]
