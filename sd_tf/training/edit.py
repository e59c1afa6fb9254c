"""InstructPix2Pix: a checkpoint learns to follow instructions, from pairs of pictures."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from keras import ops
from PIL import Image

from sd_tf.config import PipelineConfig
from sd_tf.generate import contact_sheet
from sd_tf.pictures import to_model
from sd_tf.training.batches import Batch, Batches, noise_levels, spread_timesteps
from sd_tf.training.hosts import ALONE, this_host
from sd_tf.training.latents import posteriors
from sd_tf.training.lesson import Lesson
from sd_tf.training.losses import Denoising, Editing, freeze, recomputed
from sd_tf.training.pairs import Pairs
from sd_tf.training.settings import Settings, TrainingError
from sd_tf.training.surgery import with_picture_input
from sd_tf.weights import Checkpoint

SAMPLES = 6
CACHE = "precomputed"
TEXTS_FILE = "texts.json"
LATENTS = ("mode", "mean", "deviation")  # of the picture before; of the one after
AT_ONCE = 64  # instructions through the text encoder


@dataclass(frozen=True)
class Options:
    size: int
    resize: int | None = None  # to which pictures are scaled before a crop of `size`; None: `size`
    flip: float = 0.5  # how often both pictures are mirrored; 0 where instructions name sides
    dropout: float = 0.05  # of the text alone, of both, and of the picture alone
    precompute: bool = False  # latents once, and text states where the encoder stands still
    train_text_encoder: bool = False
    first_timestep: int = 0  # only noise levels from this one on
    save_dtype: str | None = None

    def check(self) -> "Options":
        """Refuse what cannot be meant; returns self."""
        if not 0.0 <= self.dropout <= 1.0 / 3.0:
            raise TrainingError(f"dropout is from 0 to 1/3. Received: {self.dropout}")
        if not 0.0 <= self.flip <= 1.0:
            raise TrainingError(f"flip is from 0 to 1. Received: {self.flip}")
        if self.resize is not None and self.resize < self.size:
            raise TrainingError(
                f"Pictures are scaled to resize, and size is cut out of them: it is not less. "
                f"Received: size={self.size}, resize={self.resize}"
            )
        if self.precompute and (self.flip or self.resize not in (None, self.size)):
            raise TrainingError(
                "Precomputed latents are of the pictures as they are: precompute goes with flip=0 "
                f"and without resize. Received: flip={self.flip}, resize={self.resize}"
            )
        return self


def dropped(r: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Which examples do without text and which without picture, by one number in [0, 1) each."""
    return r < 2 * share, (share <= r) & (r < 3 * share)


def prepared(picture: Image.Image, size: int, resize: int, place, is_flipped: bool) -> np.ndarray:
    """Scaled, cut out at `place` (x, y from 0 to 1), mirrored: uint8 (size, size, 3)."""
    if picture.size != (resize, resize):
        picture = picture.resize((resize, resize), Image.Resampling.LANCZOS)
    x, y = (round(share * (resize - size)) for share in place)
    pixels = np.asarray(picture.crop((x, y, x + size, y + size)))
    return pixels[:, ::-1] if is_flipped else pixels


class EditBatches(Batches):
    """Both pictures of a pair cut and mirrored alike; text and picture dropped by the table."""

    def __init__(
        self, pairs: Pairs, settings: Settings, options: Options, config, tokenize, host=ALONE
    ):
        batch_size = settings.batch_size // host.count
        super().__init__(pairs, batch_size, settings.seed, pairs.order, host)
        self.options, self.tokenize = options, tokenize
        self.timesteps = noise_levels(options.first_timestep, config)
        side = options.size // config.vae.downscale
        self.latent_shape = (side, side, config.vae.latent_channels)

    def __call__(self, step: int) -> Batch:
        draws, size = self.draws(step), self.batch_size
        indices = [index for index, _ in self.examples(step)]
        without_text, without_picture = dropped(draws.random(size), self.options.dropout)
        shape = (size, *self.latent_shape)
        batch = {
            "noise": draws.standard_normal(shape, "float32"),
            "posterior": draws.standard_normal(shape, "float32"),
            "timesteps": spread_timesteps(draws, size, self.timesteps),
            "has_picture": 1.0 - without_picture.astype("float32"),
        }
        return batch | self.inputs(indices, without_text, draws)

    def inputs(self, indices, without_text, draws) -> Batch:
        options = self.options
        places, flips = draws.random((len(indices), 2)), draws.random(len(indices)) < options.flip
        resize = options.resize or options.size
        pairs = [self.source.pair(index) for index in indices]

        def pictures(name):
            return to_model(
                np.stack(
                    [
                        prepared(getattr(pair, name), options.size, resize, place, is_flipped)
                        for pair, place, is_flipped in zip(pairs, places, flips, strict=True)
                    ]
                )
            )

        texts = [
            "" if without else pair.instruction
            for pair, without in zip(pairs, without_text, strict=True)
        ]
        return {
            "before": pictures("before"),
            "after": pictures("after"),
            "tokens": self.tokenize(texts),
        }


class PrecomputedBatches(EditBatches):
    """The same batches with latents from files, and text states too if the encoder stands still."""

    def __init__(self, pairs, settings, options, config, tokenize, folder: Path, host=ALONE):
        super().__init__(pairs, settings, options, config, tokenize, host)
        names = [*LATENTS, "places"]
        if not options.train_text_encoder:
            names.append("contexts")
        missing = [name for name in names if not (folder / f"{name}.npy").exists()]
        if missing:
            raise TrainingError(
                f"{folder} has no {', '.join(missing)}: it was made for a run with other options. "
                f"Choose another --out, or delete that folder."
            )
        self.arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names}
        self.texts = json.loads((folder / TEXTS_FILE).read_text(encoding="utf-8"))
        if len(self.arrays["places"]) != len(pairs):
            raise TrainingError(
                f"{folder} holds {len(self.arrays['places'])} pairs, the data has {len(pairs)}. "
                f"Choose another --out, or delete that folder."
            )

    def inputs(self, indices, without_text, draws) -> Batch:
        found = {name: self.arrays[name][indices].astype("float32") for name in LATENTS}
        places = np.where(without_text, 0, self.arrays["places"][indices])
        if "contexts" in self.arrays:
            return {**found, "context": self.arrays["contexts"][places].astype("float32")}
        return {**found, "tokens": self.tokenize([self.texts[place] for place in places])}


def precompute(pairs: Pairs, size: int, vae, text_encoder, tokenize, folder: Path, report) -> None:
    """Latents of every pair and every different instruction, the empty one first; its states too,
    unless there is no text encoder.
    """
    if folder.exists():
        return
    report(f"encoding {len(pairs)} pairs")
    unfinished = folder.with_suffix(".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    known, places = {"": 0}, np.zeros(len(pairs), "int32")

    @lru_cache(maxsize=1)
    def pictures(index):
        pair = pairs.pair(index)
        places[index] = known.setdefault(pair.instruction, len(known))
        return [prepared(p, size, size, (0, 0), False) for p in (pair.before, pair.after)]

    encoded = posteriors(vae, lambda i: pictures(i // 2)[i % 2], 2 * len(pairs))
    kept = zip(*([part.astype("float16") for part in parts] for parts in encoded), strict=True)
    means, deviations = (np.concatenate(parts) for parts in kept)
    for name, values in zip(LATENTS, (means[0::2], means[1::2], deviations[1::2]), strict=True):
        np.save(unfinished / f"{name}.npy", values)
    np.save(unfinished / "places.npy", places)
    texts = list(known)
    (unfinished / TEXTS_FILE).write_text(json.dumps(texts), encoding="utf-8")
    if text_encoder is not None:
        np.save(unfinished / "contexts.npy", _states(text_encoder, tokenize, texts))
    unfinished.rename(folder)


def _states(text_encoder, tokenize, texts: list[str]) -> np.ndarray:
    """float16 (N, 77, D); every call is of one size."""
    states = []
    for start in range(0, len(texts), AT_ONCE):
        tokens = tokenize((texts[start : start + AT_ONCE] + [""] * AT_ONCE)[:AT_ONCE])
        context = text_encoder(ops.convert_to_tensor(tokens))["context"]
        states.append(ops.convert_to_numpy(context).astype("float16"))
    return np.concatenate(states)[: len(texts)]


def prepare(
    checkpoint: Checkpoint,
    pairs: Pairs,
    settings: Settings,
    options: Options,
    cache: Path,
    report: Callable[[str], None] = print,
) -> Lesson:
    """`cache`: where `precompute` keeps what it made, and finds it again.

    On several hosts `pairs` are those of this one.
    """
    options.check()
    host = this_host()
    if settings.batch_size % host.count:
        raise TrainingError(
            f"batch_size is of all {host.count} hosts together, and divides among them. "
            f"Received: {settings.batch_size}"
        )
    if host.count > 1:
        cache = cache.with_name(f"{cache.name}-{host.number}")
    checkpoint = with_picture_input(checkpoint)
    config = checkpoint.config
    _check_family(config)
    tokenizer = checkpoint.tokenizer()
    vae = freeze(checkpoint.build("vae"))
    text_encoder = checkpoint.build("text_encoder", settings.precision)
    text_encoder.trainable = options.train_text_encoder
    given = (pairs, settings, options, config, tokenizer)
    has_states = options.precompute and not options.train_text_encoder
    if options.precompute:
        encoder = text_encoder if has_states else None
        precompute(pairs, options.size, vae, encoder, tokenizer, cache, report)
        batches = PrecomputedBatches(*given, cache, host)
    else:
        batches = EditBatches(*given, host)
    unet = checkpoint.build("unet", settings.precision)
    if settings.gradient_checkpointing:
        recomputed(unet)
    denoising = Denoising(unet, None if has_states else text_encoder, config.schedule, min_snr=None)
    loss = Editing(denoising, None if options.precompute else vae, config.vae.scaling_factor)
    models = {"text_encoder": text_encoder, "unet": unet, "vae": vae}
    return Lesson(config, tokenizer, models, loss, batches)


def train(
    checkpoint: Checkpoint,
    pairs: Pairs,
    settings: Settings,
    options: Options,
    folder: Path,
    report: Callable[[str], None] = print,
) -> Path:
    """Train the UNet; returns the folder of the checkpoint that edits."""
    lesson = prepare(checkpoint, pairs, settings, options, folder / CACHE, report)
    shown = [pairs.pair(i) for i in range(min(SAMPLES, len(pairs)))]

    def sample(step):
        size = options.size
        before = np.stack([prepared(pair.before, size, size, (0, 0), False) for pair in shown])
        after = lesson.painter.edit([pair.instruction for pair in shown], before)
        both = np.stack([before, after], axis=1).reshape(-1, *before.shape[1:])
        contact_sheet(both).save(folder / f"{step:06d}.png")

    return lesson.learn(settings, folder, options.save_dtype, report, sample)


def _check_family(config: PipelineConfig) -> None:
    if config.unet.added is not None:
        raise TrainingError(
            f"Editing is learnt by checkpoints with one text encoder (SD1, SD2). "
            f"Received: {config.family}"
        )
