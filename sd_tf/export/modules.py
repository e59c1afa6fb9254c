"""The SavedModels' contents: one `tf.Module` per component, with the component's signatures.

Every endpoint exists compiled by XLA and, under `plain_`, not compiled, on the same variables. The
compiled ones are traced with the target's rewrites, the plain ones as the models are written.
"""

import tensorflow as tf

from sd_tf.components import Endpoint, Spec
from sd_tf.components.diffusion import default_sampler, diffusion_model
from sd_tf.components.fixed import Geometry
from sd_tf.components.pictures import decoder, image_encoder
from sd_tf.components.text import text_encoder
from sd_tf.config import SAMPLERS, PipelineConfig
from sd_tf.models.lowering import AS_WRITTEN, Rewrites, lowered, rewrites
from sd_tf.sampling.packed import pack

PLAIN = "plain_"


class Component(tf.Module):
    """A module whose endpoints are declared once and come out compiled and plain."""

    def __init__(self, models, rewrites: Rewrites = AS_WRITTEN):
        super().__init__()
        self._model_variables = [v.value for model in models for v in model.variables]
        self._rewrites = rewrites
        self.endpoints = {}  # name → concrete function, the signatures of the SavedModel
        self.eager = {}  # name → the same as a Python function

    def compiled(self, function):
        """For XLA, with the target's rewrites."""

        def rewritten(**inputs):
            with lowered(self._rewrites):
                return function(**inputs)

        return tf.function(rewritten, jit_compile=True, autograph=False)

    def declare(self, endpoints: dict[str, Endpoint], check=None) -> None:
        """`check` sees inputs that count steps, before the compiled part: XLA drops assertions."""
        for name, endpoint in endpoints.items():
            function = endpoint.function
            self.eager[name] = function
            checked = check if "num_steps" in endpoint.inputs else None
            plain = tf.function(function, autograph=False)
            if endpoint.compiled:
                self._sign(name, self.compiled(function), endpoint.inputs, checked)
                self._sign(PLAIN + name, plain, endpoint.inputs, checked)
            else:
                self._sign(name, plain, endpoint.inputs, checked)

    def _sign(self, name, body, inputs: dict[str, Spec], check):
        def call(**inputs):
            with tf.control_dependencies(check(**inputs) if check is not None else []):
                inputs = {key: tf.identity(value) for key, value in inputs.items()}
            return body(**inputs)

        specs = {key: tf.TensorSpec(s.shape, s.dtype, key) for key, s in inputs.items()}
        self.endpoints[name] = tf.function(call, autograph=False).get_concrete_function(**specs)


def traced_once(function):
    """As one function of the graph for all plain endpoints, and one for all compiled ones."""
    traced = {}

    def call(*args):
        shared = traced.setdefault(rewrites(), tf.function(function, autograph=False))
        return shared(*args)

    return call


class TextEncoder(Component):
    def __init__(self, encoders, empty_tokens, config: PipelineConfig, batch_size, jit):
        super().__init__(encoders)
        endpoints = text_encoder(encoders, empty_tokens, config, batch_size)
        self.declare({k: Endpoint(e.function, e.inputs, jit) for k, e in endpoints.items()})


class SamplerTables(tf.Module):
    """`sampling.packed.Packed` in TensorFlow; what is large is saved as variables."""

    def __init__(self, schedule, max_steps: int):
        super().__init__()
        packed = pack(schedule, max_steps)
        self.rows = tf.Variable(packed.rows, trainable=False, name="rows")
        self.starts = tf.constant(packed.starts)
        self.calls = tf.constant(packed.calls)
        self.scales = tf.constant(packed.scales)
        self.signals = tf.Variable(packed.signals, trainable=False, name="signals")
        self.sigmas = tf.Variable(packed.sigmas, trainable=False, name="sigmas")


class DiffusionModel(Component):
    def __init__(self, unet, config: PipelineConfig, geometry: Geometry, rewrites: Rewrites):
        super().__init__([unet], rewrites)
        self.tables = tables = SamplerTables(config.schedule, geometry.max_steps)

        def check(num_steps, scheduler=None, first=0, start=0, **_):
            if scheduler is None:
                scheduler = tf.constant(default_sampler(config))
            count = len(SAMPLERS)
            valid = [
                tf.debugging.assert_less(
                    tf.cast(scheduler, "uint32"),
                    tf.constant(count, "uint32"),
                    f"scheduler must be 0…{count - 1}",
                ),
                tf.debugging.assert_less(
                    tf.cast(num_steps - 1, "uint32"),
                    tf.constant(geometry.max_steps, "uint32"),
                    f"num_steps must be 1…{geometry.max_steps}",
                ),
            ]
            with tf.control_dependencies(valid):
                calls = tf.gather_nd(tables.calls, tf.stack([scheduler, num_steps - 1]))
            return [
                *valid,
                tf.debugging.assert_positive(calls, "this scheduler has no such num_steps"),
                tf.debugging.assert_non_negative(first, "first must not be negative"),
                tf.debugging.assert_less_equal(first, start, "start must not be before first"),
                tf.debugging.assert_less(
                    start, calls, "start must be below the number of model calls"
                ),
            ]

        self.declare(diffusion_model(unet, tables, config, geometry, traced_once), check)


def _present(*layers):
    """Only what a component runs is saved with it, not the VAE's other half."""
    return [layer for layer in layers if layer is not None]


class Decoder(Component):
    """Pictures as numbers, or as PNG files."""

    def __init__(self, vae, config: PipelineConfig, geometry: Geometry, rewrites: Rewrites):
        super().__init__(_present(vae.post_quant_conv, vae.decoder), rewrites)
        endpoints = decoder(vae, config, geometry, traced_once)
        self.declare(endpoints)

        def encode_png(images):
            encoded = [tf.io.encode_png(image) for image in tf.unstack(images)]
            return {"image_bytes": tf.stack(encoded)}

        decode = endpoints["serving_default"]
        png = {"png": self.compiled(decode.function), f"{PLAIN}png": decode.function}
        for name, run in png.items():

            def as_png(latent, run=run):
                return encode_png(run(latent=latent)["generated_images"])

            self.declare({name: Endpoint(as_png, decode.inputs, compiled=False)})


class ImageEncoder(Component):
    def __init__(self, vae, geometry: Geometry, rewrites: Rewrites):
        super().__init__(_present(vae.encoder, vae.quant_conv), rewrites)
        self.declare(image_encoder(vae, geometry, traced_once))
