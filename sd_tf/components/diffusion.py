"""The whole diffusion loop: sampler, guidance and UNet, from noise or a picture to latents."""

import math

import numpy as np
from keras import ops

from sd_tf.components import PROMPT_LENGTH, Endpoint, Spec, as_is
from sd_tf.components.fixed import Geometry
from sd_tf.config import SAMPLERS, PipelineConfig
from sd_tf.sampling import noise as noise_source
from sd_tf.sampling.loop import denoise, empty_history, guide, guide_edit
from sd_tf.sampling.tables import HISTORY

# Inputs of the loop that go to the UNet for every part of its batch, by the UNet's names.
MODEL_INPUTS = ("context", "pooled", "time_ids")
# Inputs that are concatenated to the noisy latents, in the checkpoint's order of channels.
LATENT_INPUTS = ("mask", "masked_image_latent", "conditioning_latent")


def diffusion_model(
    unet, tables, config: PipelineConfig, geometry: Geometry, shared=as_is
) -> dict[str, Endpoint]:
    """See the endpoints at the end for what each takes and gives.

    `tables` has the fields of `sampling.packed.Packed`, as whatever the backend computes with.
    """
    batch, latent_shape = geometry.batch_size, geometry.latent_shape
    default_seeds = np.arange(batch, dtype="int32")
    conditions = condition_specs(config, batch, latent_shape)
    edits = config.latent_inputs == "image"
    scales = guidance_scales(config)

    def predict(conditions, scale, image_scale):
        guided = geometry.guidance == "classifier_free"
        parts = 1 if not guided else 3 if edits else 2
        given = {name: _parts(conditions, name, parts) for name in MODEL_INPUTS}
        given = {name: value for name, value in given.items() if value is not None}
        beside = [_beside(conditions[k], k, parts) for k in LATENT_INPUTS if k in conditions]
        if config.unet.guidance_embed_dim is not None:
            embedded = embed_guidance(scale, config.unet.guidance_embed_dim)
            given["guidance"] = ops.tile(embedded[None], (batch, 1))

        def output(x, timestep):
            x = ops.concatenate([ops.concatenate([x] * parts, axis=0), *beside], axis=-1)
            timesteps = ops.broadcast_to(timestep, (parts * batch,))
            result = ops.cast(unet(x, timesteps, **given), "float32")
            if parts == 1:
                return result
            if parts == 3:
                return guide_edit(*ops.split(result, 3), scale, image_scale)
            return guide(*ops.split(result, 2), scale, geometry.guidance_rescale)

        return output

    def of_run(table, scheduler, num_steps):
        return ops.take(ops.take(table, scheduler, axis=0), num_steps - 1, axis=0)

    @shared
    def run(x, past, first, start, stop, seeds, scheduler, num_steps, scales, conditions):
        offset = of_run(tables.starts, scheduler, num_steps)

        def rows(i, variant):
            return ops.take(ops.take(tables.rows, offset + i, axis=0), variant, axis=0)

        stop = ops.minimum(stop, of_run(tables.calls, scheduler, num_steps))
        return denoise(predict(conditions, *scales), rows, x, past, first, start, stop, seeds)

    def split(inputs):
        given = {name: inputs.pop(name) for name in conditions}
        scale = inputs.pop("unconditional_guidance_scale")
        image_scale = inputs.pop("image_guidance_scale", None)
        scheduler = inputs.pop("scheduler", None)
        if scheduler is None:
            scheduler = ops.convert_to_tensor(default_sampler(config), "int32")
        return given, (scale, image_scale), inputs.pop("num_steps"), scheduler

    def whole_run(unit_noise, seeds, inputs):
        given, scales, num_steps, scheduler = split(inputs)
        x = unit_noise * of_run(tables.scales, scheduler, num_steps)
        stop = of_run(tables.calls, scheduler, num_steps)
        past, zero = empty_history(x), ops.convert_to_tensor(0, "int32")
        x, _ = run(x, past, zero, zero, stop, seeds, scheduler, num_steps, scales, given)
        return {"latent": x}

    def from_noise(noise, **inputs):
        return whole_run(noise, default_seeds, inputs)

    def seeded(seed, **inputs):
        return whole_run(unit_noise(seed)["noise"], seed, inputs)

    def default(**inputs):
        return seeded(default_seeds, **inputs)

    def segment(latent, history, first, start, stop, seed, **inputs):
        given, scales, num_steps, scheduler = split(inputs)
        x, past = run(
            latent, history, first, start, stop, seed, scheduler, num_steps, scales, given
        )
        return {"latent": x, "history": past}

    def unit_noise(seed):
        return {"noise": noise_source.normal(seed, noise_source.INITIAL, latent_shape)}

    def begin(noise, scheduler, num_steps):
        return {"latent": noise * of_run(tables.scales, scheduler, num_steps)}

    def begin_image(noise, image_latent, start, scheduler, num_steps):
        row = of_run(tables.starts, scheduler, num_steps) + start
        signal, sigma = ops.take(tables.signals, row), ops.take(tables.sigmas, row)
        return {"latent": signal * image_latent + sigma * noise}

    latents, history = Spec((batch, *latent_shape)), Spec((HISTORY, batch, *latent_shape))
    scalar, seeds = Spec(dtype="int32"), Spec((batch,), "int32")
    call = {**conditions, "num_steps": scalar, **scales}
    chosen = {**call, "scheduler": scalar}
    state = {"latent": latents, "history": history}
    bounds = {"first": scalar, "start": scalar, "stop": scalar}
    steps_of = {"scheduler": scalar, "num_steps": scalar}
    image = {"noise": latents, "image_latent": latents, "start": scalar, **steps_of}
    return {
        "serving_default": Endpoint(default, call),
        "seeded": Endpoint(seeded, {**chosen, "seed": seeds}),
        "from_noise": Endpoint(from_noise, {**chosen, "noise": latents}),
        "segment": Endpoint(segment, {**chosen, **state, **bounds, "seed": seeds}),
        # A segment's start, from unit noise or from a picture.
        "noise": Endpoint(unit_noise, {"seed": seeds}, compiled=False),
        "begin": Endpoint(begin, {"noise": latents, **steps_of}, compiled=False),
        "begin_image": Endpoint(begin_image, image, compiled=False),
    }


def default_sampler(config: PipelineConfig) -> int:
    """The checkpoint's own, by its place among all."""
    return list(SAMPLERS).index(config.schedule.sampler)


def condition_specs(config: PipelineConfig, batch, latent_shape) -> dict[str, Spec]:
    """What conditions the loop, beside steps and guidance: names and shapes by family."""
    context = Spec((batch, PROMPT_LENGTH, config.unet.context_dim))
    result = {"context": context, "unconditional_context": context}
    if config.unet.added is not None:
        pooled = Spec((batch, config.unet.added.pooled_dim))
        ids = Spec((batch, config.unet.added.num_time_ids))
        result |= {"pooled": pooled, "unconditional_pooled": pooled}
        result |= {"time_ids": ids, "unconditional_time_ids": ids}
    latents = Spec((batch, *latent_shape))
    beside = {
        "none": {},
        "image": {"conditioning_latent": latents},
        "mask_and_image": {
            "mask": Spec((batch, *latent_shape[:2], 1)),
            "masked_image_latent": latents,
        },
    }
    return result | beside[config.latent_inputs]


def guidance_scales(config: PipelineConfig) -> dict[str, Spec]:
    """One scale, and InstructPix2Pix's second, which holds on to the picture."""
    names = ["unconditional_guidance_scale"]
    if config.latent_inputs == "image":
        names.append("image_guidance_scale")
    return dict.fromkeys(names, Spec())


def _parts(conditions, name, parts):
    """[negative, positive] in one batch, [positive, negative, negative] for an edit."""
    if name not in conditions or parts == 1:
        return conditions.get(name)
    positive, negative = conditions[name], conditions[f"unconditional_{name}"]
    order = {2: [negative, positive], 3: [positive, negative, negative]}
    return ops.concatenate(order[parts], axis=0)


def _beside(value, name, parts):
    """What stands beside the latents; an edit's last part does without its picture."""
    copies = [value] * parts
    if name == "conditioning_latent" and parts == 3:
        copies[-1] = ops.zeros_like(value)
    return ops.concatenate(copies, axis=0)


def embed_guidance(scale, width):
    """LCM's embedding of w = guidance scale - 1 (width,): sines, then cosines."""
    half = width // 2
    frequencies = ops.exp(ops.arange(half, dtype="float32") * (-math.log(10000.0) / (half - 1)))
    angles = 1000.0 * (scale - 1.0) * frequencies
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=0)
