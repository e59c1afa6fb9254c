"""The whole diffusion loop: sampler, guidance and denoiser, from noise or a picture to latents."""

import math

import numpy as np
from keras import ops

from sd_tf.components.conditions import Conditions
from sd_tf.components.guidance import SCALE, Guidance
from sd_tf.components.places import KERNELS, Places
from sd_tf.components.spec import Endpoint, Spec, as_is
from sd_tf.sampling import noise as noise_source
from sd_tf.sampling.loop import denoise, empty_history
from sd_tf.sampling.rows import HISTORY


class DiffusionModel:
    """The loop around a denoiser. `endpoints` lists what can be called and with which inputs.

    Inputs that every call of the loop shares are passed on by name: `num_steps`, `scheduler` (its
    number), the guidance's scales, the conditions, and the adapters' scales where there are places
    for adapters.
    """

    def __init__(
        self,
        denoiser,  # (x, timesteps, **conditions) → its prediction; also `KERNELS` with places
        tables,  # the fields of `sampling.packed.Packed`, as the backend's arrays
        conditions: Conditions,
        guidance: Guidance,
        places: Places,
        latents: tuple[int, int, int, int],  # their shape (B, h, w, c)
        default_scheduler: int,
        guidance_embed_dim: int | None = None,  # LCM: the denoiser is told the guidance scale
        shared=as_is,
    ):
        self.denoiser = shared(denoiser, open_batch=True, fixed=(KERNELS,))
        self.tables, self.places = tables, places
        self._merged = shared(places.merged)
        self.conditions, self.guidance = conditions, guidance
        self.batch_size, *self.latent_shape = latents
        self.default_scheduler = default_scheduler
        self.guidance_embed_dim = guidance_embed_dim
        self._shared_walk = shared(self._walk)

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        latents = Spec((self.batch_size, *self.latent_shape))
        history = Spec((HISTORY, *latents.shape))
        scalar, seeds = Spec(dtype="int32"), Spec((self.batch_size,), "int32")
        call = {**self.conditions.inputs, "num_steps": scalar, **self.guidance.inputs}
        chosen = {**call, "scheduler": scalar, **self.places.inputs}
        state = {"latent": latents, "history": history}
        bounds = {"first": scalar, "start": scalar, "stop": scalar}
        steps = {"scheduler": scalar, "num_steps": scalar}
        image = {"noise": latents, "image_latent": latents, "start": scalar, **steps}
        return {
            "serving_default": Endpoint(self.default, call),
            "seeded": Endpoint(self.seeded, {**chosen, "seed": seeds}),
            "from_noise": Endpoint(self.from_noise, {**chosen, "noise": latents}),
            "segment": Endpoint(self.segment, {**chosen, **state, **bounds, "seed": seeds}),
            # How a segment's first state is made: from unit noise or from a picture.
            "noise": Endpoint(self.noise, {"seed": seeds}, compiled=False),
            "begin": Endpoint(self.begin, {"noise": latents, **steps}, compiled=False),
            "begin_image": Endpoint(self.begin_image, image, compiled=False),
        }

    # Whole runs

    def default(self, **inputs):
        """Draw with the default scheduler, without adapters; picture i has the seed i."""
        scheduler = ops.convert_to_tensor(self.default_scheduler, "int32")
        return self.seeded(self._default_seeds, scheduler=scheduler, **self.places.none(), **inputs)

    def seeded(self, seed, **inputs):
        return self._whole_run(self.noise(seed)["noise"], seed, **inputs)

    def from_noise(self, noise, **inputs):
        """Draw from the given unit noise; samplers that add noise take it from seed i."""
        return self._whole_run(noise, self._default_seeds, **inputs)

    def _whole_run(self, unit_noise, seeds, num_steps, scheduler, **inputs):
        x = unit_noise * self._of_run(self.tables.scales, scheduler, num_steps)
        stop = self._of_run(self.tables.calls, scheduler, num_steps)
        past, zero = empty_history(x), ops.convert_to_tensor(0, "int32")
        x, _ = self._run(x, past, zero, zero, stop, seeds, scheduler, num_steps, inputs)
        return {"latent": x}

    # Runs in segments

    def noise(self, seed):
        return {"noise": noise_source.normal(seed, noise_source.INITIAL, self.latent_shape)}

    def begin(self, noise, scheduler, num_steps):
        return {"latent": noise * self._of_run(self.tables.scales, scheduler, num_steps)}

    def begin_image(self, noise, image_latent, start, scheduler, num_steps):
        row = self._of_run(self.tables.starts, scheduler, num_steps) + start
        signal, sigma = ops.take(self.tables.signals, row), ops.take(self.tables.sigmas, row)
        return {"latent": signal * image_latent + sigma * noise}

    def segment(self, latent, history, first, start, stop, seed, scheduler, num_steps, **inputs):
        """Walk the rows [start, stop) of a run that began at row `first`."""
        x, past = self._run(latent, history, first, start, stop, seed, scheduler, num_steps, inputs)
        return {"latent": x, "history": past}

    # The loop

    def _run(self, x, past, first, start, stop, seeds, scheduler, num_steps, inputs):
        scales = tuple(inputs[name] for name in self.guidance.scales)
        conditions = {name: inputs[name] for name in self.conditions.inputs}
        adapters = {name: inputs[name] for name in self.places.inputs}
        return self._shared_walk(
            x, past, first, start, stop, seeds, scheduler, num_steps, scales, conditions, adapters
        )

    def _walk(
        self, x, past, first, start, stop, seeds, scheduler, num_steps, scales, conditions, adapters
    ):
        offset = self._of_run(self.tables.starts, scheduler, num_steps)

        def rows(i, variant):
            return ops.take(ops.take(self.tables.rows, offset + i, axis=0), variant, axis=0)

        stop = ops.minimum(stop, self._of_run(self.tables.calls, scheduler, num_steps))
        predict = self._predictor(conditions, scales, adapters)
        return denoise(predict, rows, x, past, first, start, stop, seeds)

    def _predictor(self, conditions, scales, adapters):
        """Return (x, timestep) → the guided output; what the steps share is computed here."""
        given = self.guidance.conditions(conditions, self.conditions.names)
        if adapters:
            given[KERNELS] = self._merged(**adapters)
        beside = self.guidance.beside(conditions, self.conditions.beside)
        batch = len(self.guidance.parts) * self.batch_size
        if self.guidance_embed_dim is not None:
            scale = scales[self.guidance.scales.index(SCALE)]
            embedded = embed_guidance(scale, self.guidance_embed_dim)
            given["guidance"] = ops.tile(embedded[None], (self.batch_size, 1))

        def predict(x, timestep):
            timesteps = ops.broadcast_to(timestep, (batch,))
            return self.guidance.predict(
                lambda x: self.denoiser(x, timesteps, **given), x, beside, scales
            )

        return predict

    @property
    def _default_seeds(self):
        return np.arange(self.batch_size, dtype="int32")

    @staticmethod
    def _of_run(table, scheduler, num_steps):
        return ops.take(ops.take(table, scheduler, axis=0), num_steps - 1, axis=0)


def embed_guidance(scale, width):
    """Embed w = guidance scale − 1 as LCM does (width,): sines, then cosines."""
    half = width // 2
    frequencies = ops.exp(ops.arange(half, dtype="float32") * (-math.log(10000.0) / (half - 1)))
    angles = 1000.0 * (scale - 1.0) * frequencies
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=0)
