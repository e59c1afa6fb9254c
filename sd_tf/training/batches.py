"""A run's batches as a function of the step: what is drawn, is drawn from (seed, step)."""

from collections.abc import Callable

import numpy as np

from sd_tf.config import PipelineConfig
from sd_tf.pictures import to_model
from sd_tf.training import world
from sd_tf.training.data import Source, World, shuffled
from sd_tf.training.hosts import ALONE, Host
from sd_tf.training.settings import Settings, TrainingError

Batch = dict[str, np.ndarray]
Order = Callable[[int, int], tuple[int, int]]  # position in the run, seed → index, epoch
DRAWS = 2  # stream of a seed; `data.ORDER` is another


class Batches:
    """Callable: step → batch. Where a run was killed makes no difference to what follows."""

    def __init__(
        self,
        source,
        batch_size: int,
        seed: int,
        order: Order | None = None,
        host: Host = ALONE,
    ):
        """`order`: the source's own, where it is not free to give any example at any time.

        On several hosts the source is this one's part, and so are `batch_size` and the batches.
        """
        self.source, self.batch_size, self.seed, self.host = source, batch_size, seed, host
        self._order = order or (lambda position, seed: shuffled(position, len(source), seed))

    def examples(self, step: int) -> list[tuple[int, int]]:
        """(index, epoch) of the step's examples."""
        first = step * self.batch_size
        return [self._order(first + place, self.seed) for place in range(self.batch_size)]

    def draws(self, step: int) -> np.random.Generator:
        turn = step * self.host.count + self.host.number
        return np.random.default_rng([self.seed, DRAWS, turn])


class PictureBatches(Batches):
    """For the autoencoder: pictures in [-1, 1], and noise for the latents."""

    def __init__(self, source, batch_size, seed, latent_shape):
        super().__init__(source, batch_size, seed)
        self.latent_shape = latent_shape

    def __call__(self, step: int) -> Batch:
        pictures = [self.source.picture(index) for index, _ in self.examples(step)]
        noise = self.draws(step).standard_normal((self.batch_size, *self.latent_shape), "float32")
        return {"images": to_model(np.stack(pictures)), "noise": noise}


class LatentBatches(Batches):
    """For the denoiser: latents computed beforehand, tokens of this epoch's captions."""

    def __init__(
        self,
        source: Source,
        settings: Settings,
        latents: np.ndarray,  # (N, h, w, C), as the encoder gives them
        config: PipelineConfig,
        tokenize: Callable[[list[str]], np.ndarray],
        caption_dropout: float = 0.1,
        first_timestep: int = 0,
    ):
        """`first_timestep`: only those from it on; the noisiest ones decide where things stand."""
        super().__init__(source, settings.batch_size, settings.seed)
        self.latents, self.tokenize = latents, tokenize
        self.scaling_factor = np.float32(config.vae.scaling_factor)
        self.timesteps = noise_levels(first_timestep, config)
        self.caption_dropout = caption_dropout

    def __call__(self, step: int) -> Batch:
        draws = self.draws(step)
        size = self.batch_size
        examples = self.examples(step)
        dropped = draws.random(size) < self.caption_dropout
        captions = [
            "" if without else self.source.caption(index, epoch)
            for (index, epoch), without in zip(examples, dropped, strict=True)
        ]
        timesteps = spread_timesteps(draws, size, self.timesteps)
        return {
            "latents": self.latents[[i for i, _ in examples]] * self.scaling_factor,
            "noise": draws.standard_normal((size, *self.latents.shape[1:]), "float32"),
            "timesteps": timesteps,
            "tokens": self.tokenize(captions),
        }


class ReadingBatches(Batches):
    """For the text encoder: tokens of this epoch's captions, and the scenes' answers."""

    def __init__(self, pictures: World, settings: Settings, tokenize):
        super().__init__(pictures, settings.batch_size, settings.seed)
        self.tokenize = tokenize

    def __call__(self, step: int) -> Batch:
        examples = self.examples(step)
        answers = [tuple(world.answers(self.source.scene(i)).values()) for i, _ in examples]
        captions = [self.source.caption(index, epoch) for index, epoch in examples]
        return {"tokens": self.tokenize(captions), "answers": np.array(answers, "int32")}


def noise_levels(first: int, config: PipelineConfig) -> range:
    """The timesteps from the first on."""
    levels = range(config.schedule.num_train_timesteps)
    if first not in levels:
        raise TrainingError(
            f"first_timestep is from 0 to {levels[-1]}, the noisiest. Received: {first}"
        )
    return levels[first:]


def spread_timesteps(draws: np.random.Generator, size: int, among: range) -> np.ndarray:
    """One from each of `size` equal parts of them, in any order: each is uniformly distributed,
    and the loss varies less from step to step than with independent draws.
    """
    places = (draws.permutation(size) + draws.random(size)) / size
    return (among.start + places * len(among)).astype("int32")
