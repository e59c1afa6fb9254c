"""The SavedModels' contents: one `tf.Module` per component, its endpoints and their signatures.

Every endpoint exists compiled by XLA and, under `plain_`, not compiled, on the same variables. The
compiled ones are traced with the target's rewrites, the plain ones as the models are written.
"""

import math
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from sd_tf.config import SAMPLERS, ConfigError, PipelineConfig, ScheduleConfig
from sd_tf.manifest import ExportError
from sd_tf.models.lowering import AS_WRITTEN, Rewrites, lowered, rewrites
from sd_tf.sampling import noise
from sd_tf.sampling.loop import denoise, empty_history, guide
from sd_tf.sampling.tables import HISTORY, steps

PLAIN = "plain_"


@dataclass(frozen=True)
class Geometry:
    """What is fixed at export."""

    batch_size: int
    height: int
    width: int
    latent_shape: tuple[int, int, int]
    max_steps: int
    guidance: str = "classifier_free"
    guidance_rescale: float = 0.0


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

    def endpoint(self, name, function, specs, jit=True, check=None):
        """`check` runs before the compiled part: XLA drops assertions."""

        def declare(name, body):
            def call(**inputs):
                with tf.control_dependencies(check(**inputs) if check is not None else []):
                    inputs = {key: tf.identity(value) for key, value in inputs.items()}
                return body(**inputs)

            specs_by_name = {key: tf.TensorSpec(s.shape, s.dtype, key) for key, s in specs.items()}
            self.endpoints[name] = tf.function(call, autograph=False).get_concrete_function(
                **specs_by_name
            )

        self.eager[name] = function
        plain = tf.function(function, autograph=False)
        if jit:
            declare(name, self.compiled(function))
            declare(PLAIN + name, plain)
        else:
            declare(name, plain)


def traced_once(function):
    """As one function of the graph for all plain endpoints, and one for all compiled ones."""
    traced = {}

    def call(*args):
        shared = traced.setdefault(rewrites(), tf.function(function, autograph=False))
        return shared(*args)

    return call


def spec(*shape, dtype="float32"):
    return tf.TensorSpec(shape, dtype)


class TextEncoder(Component):
    """tokens (N, 77) or SDXL's (N, 2, 77), N = 1 or B → both contexts (B, 77, D)."""

    def __init__(self, encoders, empty_tokens, config: PipelineConfig, batch_size, jit):
        super().__init__(encoders)
        several = len(encoders) > 1
        length = empty_tokens.shape[-1]
        shape = (None, len(encoders), length) if several else (None, length)
        negative = None if config.zero_empty_negative else tf.constant(empty_tokens)

        def encode(tokens):
            per_encoder = tf.unstack(tokens, axis=1) if several else [tokens]
            outputs = [model(part) for model, part in zip(encoders, per_encoder, strict=True)]
            result = {"context": tf.concat([o["context"] for o in outputs], axis=-1)}
            pooled = [o["pooled"] for o in outputs if "pooled" in o]
            if pooled:
                result["pooled"] = pooled[0]
            return {key: tf.cast(value, "float32") for key, value in result.items()}

        def to_batch(x):
            return tf.broadcast_to(x, (batch_size, *x.shape[1:]))

        def named(conditional, unconditional):
            outputs = {}
            for key, value in conditional.items():
                outputs[key] = to_batch(value)
                outputs[f"unconditional_{key}"] = to_batch(unconditional[key])
            return outputs

        def with_default(tokens):
            positive = encode(tokens)
            if negative is None:
                return named(positive, {key: tf.zeros_like(x) for key, x in positive.items()})
            return named(positive, encode(negative))

        def with_negative(tokens, negative_tokens):
            return named(encode(tokens), encode(negative_tokens))

        ids = spec(*shape, dtype="int32")
        self.endpoint("serving_default", with_default, {"tokens": ids}, jit)
        self.endpoint("encode", with_negative, {"tokens": ids, "negative_tokens": ids}, jit)


class SamplerTables(tf.Module):
    """All samplers and step counts in a few arrays, rows of one run behind one another."""

    def __init__(self, schedule: ScheduleConfig, max_steps: int):
        super().__init__()
        rows, starts, calls, scales, signals, sigmas = [], [], [], [], [], []
        offset = 0
        for sampler in SAMPLERS:
            for count in range(1, max_steps + 1):
                starts.append(offset)
                try:
                    run = steps(schedule, sampler, count)
                except ConfigError:  # not every sampler has every step count
                    calls.append(0)
                    scales.append(1.0)
                    continue
                calls.append(run.calls)
                scales.append(run.initial_scale)
                rows.append(run.rows)
                signals.append(run.signal)
                sigmas.append(run.sigma)
                offset += run.calls
        shape = (len(SAMPLERS), max_steps)

        def variable(values, name):
            return tf.Variable(values, trainable=False, name=name)

        self.rows = variable(np.concatenate(rows).astype("float32"), "rows")
        self.starts = tf.constant(np.reshape(starts, shape), "int32")
        self.calls = tf.constant(np.reshape(calls, shape), "int32")
        self.scales = tf.constant(np.reshape(scales, shape), "float32")
        self.signals = variable(np.concatenate(signals).astype("float32"), "signals")
        self.sigmas = variable(np.concatenate(sigmas).astype("float32"), "sigmas")

    def calls_by_sampler(self) -> dict[str, list[int]]:
        return dict(zip(SAMPLERS, self.calls.numpy().tolist(), strict=True))


class DiffusionModel(Component):
    """The whole loop. See the endpoints at the end for what each takes and gives."""

    def __init__(self, unet, config: PipelineConfig, geometry: Geometry, rewrites: Rewrites):
        super().__init__([unet], rewrites)
        self.tables = tables = SamplerTables(config.schedule, geometry.max_steps)
        batch, latent_shape = geometry.batch_size, geometry.latent_shape
        default_sampler = tf.constant(list(SAMPLERS).index(config.schedule.sampler))
        default_seeds = tf.range(batch)
        guided = geometry.guidance == "classifier_free"
        latents = spec(batch, *latent_shape)
        history = spec(HISTORY, batch, *latent_shape)
        scalar, seeds = spec(dtype="int32"), spec(batch, dtype="int32")

        conditions = condition_specs(config, batch, latent_shape)
        call = {**conditions, "num_steps": scalar, "unconditional_guidance_scale": spec()}
        chosen = {**call, "scheduler": scalar}

        def predict(conditions, scale):
            both = {key: _both_halves(conditions, key, guided) for key in MODEL_INPUTS}
            both = {key: value for key, value in both.items() if value is not None}
            beside = [conditions[key] for key in LATENT_INPUTS if key in conditions]
            if config.unet.guidance_embed_dim is not None:
                embedded = embed_guidance(scale, config.unet.guidance_embed_dim)
                both["guidance"] = tf.tile(embedded[None], (batch, 1))

            def output(x, timestep):
                x = tf.concat([x, *beside], axis=-1)
                x = tf.concat([x, x], axis=0) if guided else x
                timesteps = tf.fill([x.shape[0]], timestep)
                result = tf.cast(unet(x, timesteps, **both), "float32")
                if not guided:
                    return result
                return guide(*tf.split(result, 2), scale, geometry.guidance_rescale)

            return output

        def place(scheduler, num_steps):
            return tf.stack([scheduler, num_steps - 1])

        @traced_once
        def run(x, past, first, start, stop, seeds, scheduler, num_steps, scale, conditions):
            offset = tf.gather_nd(tables.starts, place(scheduler, num_steps))

            def rows(i, variant):
                return tf.gather(tf.gather(tables.rows, offset + i), variant)

            stop = tf.minimum(stop, tf.gather_nd(tables.calls, place(scheduler, num_steps)))
            return denoise(predict(conditions, scale), rows, x, past, first, start, stop, seeds)

        def initial_scale(scheduler, num_steps):
            return tf.gather_nd(tables.scales, place(scheduler, num_steps))

        def split(inputs):
            given = {key: inputs.pop(key) for key in conditions}
            scale = inputs.pop("unconditional_guidance_scale")
            return (
                given,
                scale,
                inputs.pop("num_steps"),
                inputs.pop("scheduler", default_sampler),
            )

        def whole_run(unit_noise, seeds, inputs):
            given, scale, num_steps, scheduler = split(inputs)
            x = unit_noise * initial_scale(scheduler, num_steps)
            stop = tf.gather_nd(tables.calls, place(scheduler, num_steps))
            past, zero = empty_history(x), tf.constant(0)
            x, _ = run(x, past, zero, zero, stop, seeds, scheduler, num_steps, scale, given)
            return {"latent": x}

        def from_noise(noise, **inputs):
            return whole_run(noise, default_seeds, inputs)

        def seeded(seed, **inputs):
            return whole_run(noise.normal(seed, noise.INITIAL, latent_shape), seed, inputs)

        def default(**inputs):
            return seeded(default_seeds, **inputs)

        def segment(latent, history, first, start, stop, seed, **inputs):
            given, scale, num_steps, scheduler = split(inputs)
            x, past = run(
                latent, history, first, start, stop, seed, scheduler, num_steps, scale, given
            )
            return {"latent": x, "history": past}

        def begin(noise, scheduler, num_steps):
            return {"latent": noise * initial_scale(scheduler, num_steps)}

        def begin_image(noise, image_latent, start, scheduler, num_steps):
            row = tf.gather_nd(tables.starts, place(scheduler, num_steps)) + start
            signal, sigma = tf.gather(tables.signals, row), tf.gather(tables.sigmas, row)
            return {"latent": signal * image_latent + sigma * noise}

        def check(num_steps, scheduler=default_sampler, first=0, start=0, **_):
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
                calls = tf.gather_nd(tables.calls, place(scheduler, num_steps))
            return [
                *valid,
                tf.debugging.assert_positive(calls, "this scheduler has no such num_steps"),
                tf.debugging.assert_non_negative(first, "first must not be negative"),
                tf.debugging.assert_less_equal(first, start, "start must not be before first"),
                tf.debugging.assert_less(
                    start, calls, "start must be below the number of model calls"
                ),
            ]

        steps_of = {"scheduler": scalar, "num_steps": scalar}
        self.endpoint("serving_default", default, call, check=check)
        self.endpoint("seeded", seeded, {**chosen, "seed": seeds}, check=check)
        self.endpoint("from_noise", from_noise, {**chosen, "noise": latents}, check=check)
        state = {"latent": latents, "history": history}
        bounds = {"first": scalar, "start": scalar, "stop": scalar}
        self.endpoint("segment", segment, {**chosen, **state, **bounds, "seed": seeds}, check=check)
        # A segment's start, from unit noise or from a picture: a few multiplications each.
        self.endpoint(
            "noise",
            lambda seed: {"noise": noise.normal(seed, noise.INITIAL, latent_shape)},
            {"seed": seeds},
            jit=False,
        )
        self.endpoint("begin", begin, {"noise": latents, **steps_of}, jit=False, check=check)
        image = {"noise": latents, "image_latent": latents, "start": scalar, **steps_of}
        self.endpoint("begin_image", begin_image, image, jit=False, check=check)


# Inputs of the loop that go to the UNet for both halves, by the UNet's names.
MODEL_INPUTS = ("context", "pooled", "time_ids")
# Inputs that are concatenated to the noisy latents, in the checkpoint's order of channels.
LATENT_INPUTS = ("mask", "masked_image_latent")


def condition_specs(config: PipelineConfig, batch, latent_shape):
    """What conditions the loop, beside steps and guidance: names and shapes by family."""
    context = spec(batch, 77, config.unet.context_dim)
    result = {"context": context, "unconditional_context": context}
    if config.unet.added is not None:
        pooled = spec(batch, config.unet.added.pooled_dim)
        ids = spec(batch, config.unet.added.num_time_ids)
        result |= {"pooled": pooled, "unconditional_pooled": pooled}
        result |= {"time_ids": ids, "unconditional_time_ids": ids}
    if config.latent_inputs == "mask_and_image":
        result["mask"] = spec(batch, *latent_shape[:2], 1)
        result["masked_image_latent"] = spec(batch, *latent_shape)
    elif config.latent_inputs != "none":
        raise ExportError(
            f"Exporting a UNet with {config.unet.in_channels} input channels "
            f"({config.family}) is not supported yet."
        )
    return result


def _both_halves(conditions, key, guided):
    """[negative, positive] in one batch; without guidance the positive one alone."""
    if key not in conditions:
        return None
    if not guided:
        return conditions[key]
    return tf.concat([conditions[f"unconditional_{key}"], conditions[key]], axis=0)


def embed_guidance(scale, width):
    """LCM's embedding of w = guidance scale - 1 (width,): sines, then cosines."""
    half = width // 2
    frequencies = tf.exp(tf.range(half, dtype="float32") * (-math.log(10000.0) / (half - 1)))
    angles = 1000.0 * (scale - 1.0) * frequencies
    return tf.concat([tf.sin(angles), tf.cos(angles)], axis=0)


def _present(*layers):
    """Only what a component runs is saved with it, not the VAE's other half."""
    return [layer for layer in layers if layer is not None]


class Decoder(Component):
    """latent (B, h, w, 4), scaled → pictures, as numbers or as PNG files."""

    def __init__(self, vae, config: PipelineConfig, geometry: Geometry, rewrites: Rewrites):
        super().__init__(_present(vae.post_quant_conv, vae.decoder), rewrites)
        latent = {"latent": spec(geometry.batch_size, *geometry.latent_shape)}
        model = traced_once(vae.decode)

        def decode(latent):
            images = tf.cast(model(latent / config.vae.scaling_factor), "float32")
            images = tf.round(255.0 * tf.clip_by_value(images / 2.0 + 0.5, 0.0, 1.0))
            return {"generated_images": tf.cast(images, "uint8")}

        def encode_png(images):
            encoded = [tf.io.encode_png(image) for image in tf.unstack(images)]
            return {"image_bytes": tf.stack(encoded)}

        self.endpoint("serving_default", decode, latent)
        png = {"png": self.compiled(decode), f"{PLAIN}png": decode}
        for name, run in png.items():
            self.endpoint(
                name,
                lambda latent, run=run: encode_png(run(latent=latent)["generated_images"]),
                latent,
                jit=False,
            )


class ImageEncoder(Component):
    """images (B, H, W, 3) in [-1, 1] → the posterior's mode, not scaled, and its deviation."""

    def __init__(self, vae, geometry: Geometry, rewrites: Rewrites):
        super().__init__(_present(vae.encoder, vae.quant_conv), rewrites)
        batch, height, width = geometry.batch_size, geometry.height, geometry.width
        model = traced_once(vae.encode)

        def encode(images):
            mean, log_variance = (tf.cast(x, "float32") for x in model(images))
            return {"latent": mean, "standard_deviation": tf.exp(0.5 * log_variance)}

        self.endpoint("serving_default", encode, {"images": spec(batch, height, width, 3)})
