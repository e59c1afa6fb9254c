"""Pictures from the models in training, without exporting them: slow, and enough to look at."""

import numpy as np
from keras import ops

from sd_tf.config import PipelineConfig
from sd_tf.sampling import noise
from sd_tf.sampling.loop import denoise, empty_history, guide
from sd_tf.sampling.tables import steps


class Painter:
    """Draws with the models that it was given, as they are when it is called."""

    def __init__(self, config: PipelineConfig, text_encoder, unet, vae, tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self.text_encoder, self.unet, self.vae = text_encoder, unet, vae

    def draw(self, prompts, num_steps: int = 20, guidance_scale: float = 4.0) -> np.ndarray:
        """uint8 (N, H, W, 3); picture i has seed i."""
        schedule = self.config.schedule
        run = steps(schedule, schedule.sampler, num_steps)
        count, side = len(prompts), self.config.unet.sample_size
        shape = (side, side, self.config.vae.latent_channels)
        texts = [*[""] * count, *prompts]
        context = self.text_encoder(ops.convert_to_tensor(self.tokenizer(texts)))["context"]

        def predict(x, timestep):
            timesteps = ops.full((2 * count,), timestep)
            output = ops.cast(self.unet(ops.concatenate([x, x]), timesteps, context), "float32")
            return guide(*ops.split(output, 2), guidance_scale)

        rows = ops.convert_to_tensor(run.rows.astype("float32"))
        seeds = ops.arange(count, dtype="int32")
        x = noise.normal(seeds, noise.INITIAL, shape) * run.initial_scale
        past = empty_history(x)
        # One step at a time: this is not compiled, and a loop need not be traced.
        for i in range(run.calls):
            x, past = denoise(predict, lambda j, k: rows[j, k], x, past, 0, i, i + 1, seeds)
        images = ops.cast(self.vae.decode(x / self.config.vae.scaling_factor), "float32")
        images = ops.convert_to_numpy(images)
        return np.round(255.0 * np.clip(images / 2.0 + 0.5, 0.0, 1.0)).astype("uint8")
