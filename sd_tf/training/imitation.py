"""Learn from a trained denoiser what it expects, in place of the noise that was drawn."""

from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from sd_tf.components.text_encoder import CLIP_TOKENS
from sd_tf.config import PipelineConfig
from sd_tf.models.layers import Block
from sd_tf.sampling.schedules import PREDICTIONS, Level, convert, training_levels
from sd_tf.training.losses import Denoising, freeze, of_each
from sd_tf.weights import Checkpoint


class Teacher(Block):
    """A checkpoint with one text encoder, and what it predicts at another schedule's levels.

    Both share latents and words; captions may be cut to fewer tokens than the checkpoint's.
    """

    def __init__(self, checkpoint: Checkpoint, pupil: PipelineConfig):
        super().__init__()
        config = checkpoint.config
        self.denoiser = freeze(checkpoint.build(config.denoiser.component))
        (name,) = config.text_encoders
        self.text_encoder = freeze(checkpoint.build(name))
        self.reads = config.text_encoders[name]
        self.empty = checkpoint.empty_text(name)
        self.tables = tables(config, pupil)

    def call(self, noisy, timesteps, tokens, guidance=1.0):
        """Predict what the pupil is to give.

        noisy: latents (B, h, w, C) at the pupil's levels; timesteps (B,), the pupil's; tokens
        (B, n), of the caption; guidance, the scale by which it is guided.
        """
        told, scale, p, q = (ops.take(ops.convert_to_tensor(x), timesteps) for x in self.tables)
        missing = self.reads.max_length - tokens.shape[-1]
        tokens = ops.pad(tokens, [[0, 0], [0, missing]], constant_values=self.reads.pad_token_id)
        output = self.predicted(of_each(scale) * noisy, told, tokens, guidance)
        return of_each(p) * noisy + of_each(q) * output

    def predicted(self, latents, told, tokens, guidance):
        """Predict as the checkpoint itself is asked for it."""
        if guidance == 1.0:
            return self.denoised(latents, told, self.text_encoder(tokens)["context"])
        count = tokens.shape[0]
        empty = ops.cast(ops.convert_to_tensor(self.empty), tokens.dtype)
        context = self.text_encoder(ops.concatenate([tokens, empty]))["context"]
        context = ops.concatenate([context[:count], ops.repeat(context[count:], count, axis=0)])
        told = ops.concatenate([told, told])
        output = self.denoised(ops.concatenate([latents, latents]), told, context)
        with_text, without = ops.split(output, 2)
        return without + guidance * (with_text - without)

    def denoised(self, latents, told, context):
        return ops.cast(self.denoiser(latents, told, ops.cast(context, "float32")), "float32")


def tables(teacher: PipelineConfig, pupil: PipelineConfig) -> tuple[np.ndarray, ...]:
    """Return (timestep, scale, p, q) of each of the pupil's timesteps, float32.

    There the teacher is told `timestep` and given scale · noisy; what the pupil is to predict is
    p · noisy + q · output. Where the pupil has more noise than the teacher knows, the teacher is
    told of its own noisiest level.
    """
    known, level = training_levels(teacher.schedule), training_levels(pupil.schedule)
    scale = 1.0 / np.hypot(*level)  # to the unit variance of a β schedule
    same = Level(level.signal * scale, level.noise * scale)
    told = np.interp(-same.log_snr, -known.log_snr, np.arange(len(known.signal)))
    epsilon, x0 = PREDICTIONS[pupil.schedule.prediction](level)
    p, q = convert(teacher.schedule.prediction, same, epsilon, x0, scale)
    return tuple(np.float32(np.broadcast_to(x, told.shape)) for x in (told, scale, p, q))


class Imitation(Denoising):
    """The squared error to a teacher's prediction of the same noisy latents.

    Noise that was drawn differs from what can be known of it, most where there is most; the teacher
    gives what can be known. So gradients vary less, and fewer steps are needed. What a guided
    teacher predicts depends on the caption the more, and its pupil needs less guidance of its own,
    which multiplies the pupil's errors.
    """

    def __init__(
        self,
        denoiser: keras.layers.Layer,
        text_encoders: Sequence[keras.layers.Layer],
        config: PipelineConfig,
        teacher: Teacher,
        guidance: float = 1.0,
    ):
        super().__init__(denoiser, text_encoders, config, min_snr=None)
        self.teacher, self.guidance = teacher, guidance

    def target(self, batch, noisy):
        tokens = batch[CLIP_TOKENS]
        first = tokens if len(tokens.shape) == 2 else tokens[:, 0]
        predicted = self.teacher(noisy, batch["timesteps"], first, guidance=self.guidance)
        return ops.stop_gradient(predicted)
