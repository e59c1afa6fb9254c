"""A run's batches as functions of the step; their random numbers depend on (seed, step) alone."""

from collections.abc import Callable

import numpy as np

from sd_tf.config import PipelineConfig
from sd_tf.runtime.pictures import to_model
from sd_tf.training import world
from sd_tf.training.conditions import Tokenize
from sd_tf.training.data import Source, World
from sd_tf.training.hosts import ALONE, Host, check_parts, check_settings, device_count
from sd_tf.training.order import shuffled
from sd_tf.training.settings import Settings, TrainingError

Batch = dict[str, np.ndarray]
Order = Callable[[int, int], tuple[int, int]]  # position in the run, seed → index, epoch
DRAWS = 2  # a seed's stream of random numbers; `order.ORDER` is another


class Batches:
    """Callable: step → batch, so that a resumed run sees the batches of an uninterrupted one."""

    def __init__(
        self,
        source,
        batch_size: int,
        seed: int,
        order: Order | None = None,
        host: Host = ALONE,
    ):
        """Set up the batches of this host.

        Args:
            source: the examples; on several hosts, this host's part of them.
            batch_size: examples in a batch; on several hosts, this host's part.
            order: the source's own order of examples. None: all are shuffled in every epoch.
        """
        self.source, self.batch_size, self.seed, self.host = source, batch_size, seed, host
        self._order = order or (lambda position, seed: shuffled(position, len(source), seed))

    def examples(self, step: int) -> list[tuple[int, int]]:
        """Return (index, epoch) of each of the step's examples."""
        first = step * self.batch_size
        return [self._order(first + place, self.seed) for place in range(self.batch_size)]

    def draws(self, step: int) -> np.random.Generator:
        turn = step * self.host.count + self.host.number
        return np.random.default_rng([self.seed, DRAWS, turn])


class PictureBatches(Batches):
    """Batches for the autoencoder: pictures in [-1, 1], and noise for the latents."""

    def __init__(self, source, batch_size, seed, latent_shape, host: Host = ALONE, order=None):
        super().__init__(source, batch_size, seed, order, host)
        self.latent_shape = latent_shape

    def __call__(self, step: int) -> Batch:
        pictures = [self.source.picture(index) for index, _ in self.examples(step)]
        noise = self.draws(step).standard_normal((self.batch_size, *self.latent_shape), "float32")
        return {"images": to_model(np.stack(pictures)), "noise": noise}


class LatentBatches(Batches):
    """Batches for the denoiser: latents computed beforehand, and tokens of the epoch's captions."""

    def __init__(
        self,
        source: Source,
        settings: Settings,
        latents: np.ndarray,  # (N, h, w, C), as the encoder gives them
        config: PipelineConfig,
        tokenize: Tokenize,
        caption_dropout: float = 0.1,
        first_timestep: int = 0,
        host: Host = ALONE,
        time_ids: np.ndarray | None = None,  # (N, 6), where the denoiser takes them
        uniform: bool | None = None,
    ):
        """Set up the batches.

        Args:
            first_timestep: the lowest noise level that is used.
            uniform: draw all noise levels equally often, not those in the middle more often. None:
                not for a flow (Esser et al. 2024, section 3.1), otherwise yes.
        """
        super().__init__(source, part_of_batch(settings, host), settings.seed, host=host)
        self.latents, self.tokenize = latents, tokenize
        self.scale = config.autoencoder.latent_scale
        self.timesteps = noise_levels(first_timestep, config)
        is_uniform = not config.schedule.is_flow if uniform is None else uniform
        self._spread = spread_timesteps if is_uniform else logit_normal_timesteps
        self.caption_dropout = caption_dropout
        self.time_ids, self.drops_to_zeros = time_ids, config.zero_empty_negative

    def __call__(self, step: int) -> Batch:
        draws = self.draws(step)
        size = self.batch_size
        examples = self.examples(step)
        dropped = draws.random(size) < self.caption_dropout
        captions = [
            "" if without else self.source.caption(index, epoch)
            for (index, epoch), without in zip(examples, dropped, strict=True)
        ]
        timesteps = self._spread(draws, size, self.timesteps)
        indices = [index for index, _ in examples]
        latents = self.latents[indices]
        batch = {
            "latents": self.scale.apply(latents.astype("float32")),
            "noise": draws.standard_normal((size, *self.latents.shape[1:]), "float32"),
            "timesteps": timesteps,
            **self.tokenize(captions),
        }
        if self.time_ids is not None:
            batch["time_ids"] = self.time_ids[indices]
        if self.drops_to_zeros:  # as pictures are drawn without a negative prompt
            batch["has_text"] = 1.0 - dropped.astype("float32")
        return batch


class PriorBatches:
    """Batches of examples, followed by as many of their class, whose losses have a weight.

    The loss is that of the examples plus `weight` times that of their class (DreamBooth).
    """

    def __init__(self, examples: Batches, of_class: Batches, weight: float):
        self.examples, self.of_class, self.weight = examples, of_class, weight

    def __call__(self, step: int) -> Batch:
        examples, of_class = self.examples(step), self.of_class(step)
        batch = {name: np.concatenate([x, of_class[name]]) for name, x in examples.items()}
        # The mean over both halves, times two, is the sum of their means.
        count = len(examples["timesteps"])
        batch["weights"] = np.repeat(np.array([2.0, 2.0 * self.weight], "float32"), count)
        return batch


class ReadingBatches(Batches):
    """Batches for the text encoder: tokens of the epoch's captions, and the scenes' answers."""

    def __init__(self, pictures: World, settings: Settings, tokenize):
        super().__init__(pictures, settings.batch_size, settings.seed)
        self.tokenize = tokenize

    def __call__(self, step: int) -> Batch:
        examples = self.examples(step)
        answers = [tuple(world.answers(self.source.scene(i)).values()) for i, _ in examples]
        captions = [self.source.caption(index, epoch) for index, epoch in examples]
        return {**self.tokenize(captions), "answers": np.array(answers, "int32")}


def part_of_batch(settings: Settings, host: Host) -> int:
    """Return how many examples of a batch are this host's."""
    for kind, count in (("hosts", host.count), ("devices", device_count())):
        if settings.batch_size % count:
            raise TrainingError(
                f"`batch_size` counts the examples of all {count} {kind} and must be a multiple of "
                f"that number. Received: {settings.batch_size}"
            )
    check_parts(settings, device_count())
    return settings.batch_size // host.count


def check_run(settings: Settings, host: Host, first_timestep: int, config: PipelineConfig) -> None:
    """Refuse settings that a run cannot keep on its hosts, before anything is computed for it."""
    check_settings(settings, host)
    part_of_batch(settings, host)
    noise_levels(first_timestep, config)


def noise_levels(first: int, config: PipelineConfig) -> range:
    """Return the timesteps from the first on."""
    levels = range(config.schedule.num_train_timesteps)
    if first not in levels:
        raise TrainingError(
            f"`first_timestep` must be from 0 to {levels[-1]}, the noisiest. Received: {first}"
        )
    return levels[first:]


def spread_timesteps(draws: np.random.Generator, size: int, among: range) -> np.ndarray:
    """Draw one timestep from each of `size` equal parts of the range, in random order.

    Each is uniformly distributed, and the loss varies less from step to step than with independent
    draws.
    """
    places = (draws.permutation(size) + draws.random(size)) / size
    return (among.start + places * len(among)).astype("int32")


def logit_normal_timesteps(draws: np.random.Generator, size: int, among: range) -> np.ndarray:
    """Draw timesteps from the range whose logits are normally distributed over its length."""
    places = 1.0 / (1.0 + np.exp(-draws.standard_normal(size)))
    return (among.start + places * len(among)).astype("int32")
