"""Pictures from the models in training, without exporting them: slow, and enough to look at."""

import numpy as np
from keras import ops

from sd_tf.config import PipelineConfig
from sd_tf.pictures import to_model
from sd_tf.sampling import noise
from sd_tf.sampling.loop import denoise, empty_history, guide, guide_edit
from sd_tf.sampling.tables import steps


class Painter:
    """Draws with the models that it was given, as they are when it is called."""

    def __init__(self, config: PipelineConfig, text_encoder, unet, vae, tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self.text_encoder, self.unet, self.vae = text_encoder, unet, vae

    def draw(self, prompts, num_steps: int = 20, guidance_scale: float = 4.0) -> np.ndarray:
        """uint8 (N, H, W, 3); picture i has seed i."""
        count, side = len(prompts), self.config.unet.sample_size
        context = self._context([*[""] * count, *prompts])

        def predict(x, timestep):
            output = self._output(ops.concatenate([x, x]), timestep, context)
            return guide(*ops.split(output, 2), guidance_scale)

        return self._walk(predict, (count, side, side), num_steps)

    def edit(
        self,
        instructions,
        pictures: np.ndarray,
        num_steps: int = 20,
        guidance_scale: float = 7.5,
        image_guidance_scale: float = 1.5,
    ) -> np.ndarray:
        """uint8 (N, H, W, 3) of the same; picture i has seed i."""
        count = len(instructions)
        context = self._context([*instructions, *[""] * (2 * count)])
        before = self.vae.encode(ops.convert_to_tensor(to_model(pictures)))[0]
        before = ops.cast(before, "float32")
        beside = ops.concatenate([before, before, ops.zeros_like(before)])

        def predict(x, timestep):
            x = ops.concatenate([ops.concatenate([x] * 3), beside], axis=-1)
            outputs = ops.split(self._output(x, timestep, context), 3)
            return guide_edit(*outputs, guidance_scale, image_guidance_scale)

        return self._walk(predict, before.shape[:3], num_steps)

    def _context(self, texts):
        return self.text_encoder(ops.convert_to_tensor(self.tokenizer(texts)))["context"]

    def _output(self, x, timestep, context):
        timesteps = ops.full((x.shape[0],), timestep)
        return ops.cast(self.unet(x, timesteps, context), "float32")

    def _walk(self, predict, shape, num_steps) -> np.ndarray:
        """From noise to pictures; `shape`: (N, h, w) of the latents."""
        schedule = self.config.schedule
        run = steps(schedule, schedule.sampler, num_steps)
        rows = ops.convert_to_tensor(run.rows.astype("float32"))
        seeds = ops.arange(shape[0], dtype="int32")
        latent = (*shape[1:], self.config.vae.latent_channels)
        x = noise.normal(seeds, noise.INITIAL, latent) * run.initial_scale
        past = empty_history(x)
        # One step at a time: this is not compiled, and a loop need not be traced.
        for i in range(run.calls):
            x, past = denoise(predict, lambda j, k: rows[j, k], x, past, 0, i, i + 1, seeds)
        images = ops.cast(self.vae.decode(x / self.config.vae.scaling_factor), "float32")
        images = ops.convert_to_numpy(images)
        return np.round(255.0 * np.clip(images / 2.0 + 0.5, 0.0, 1.0)).astype("uint8")
