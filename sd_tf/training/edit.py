"""InstructPix2Pix training: teach a checkpoint to follow instructions, from pairs of pictures."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from keras import ops
from PIL import Image

from sd_tf.config import PipelineConfig, family_of
from sd_tf.files import atomic
from sd_tf.runtime.pictures import contact_sheet, to_model
from sd_tf.training.batches import (
    Batch,
    Batches,
    check_run,
    noise_levels,
    part_of_batch,
    spread_timesteps,
)
from sd_tf.training.conditions import check_nothing_added, tokenize_for
from sd_tf.training.hosts import ALONE, by_itself, this_host
from sd_tf.training.latents import posteriors, write_parts
from sd_tf.training.lora import adapt, recorded
from sd_tf.training.losses import Denoising, Editing, freeze, recomputed
from sd_tf.training.origin import Record, check_cache, mark_cache, of_checkpoint
from sd_tf.training.pairs import Pairs
from sd_tf.training.picture_input import with_picture_input
from sd_tf.training.settings import LoraOptions, Settings, TrainingError, frozen_precision
from sd_tf.training.task import TrainingTask
from sd_tf.training.trainer import alone_in
from sd_tf.weights import Checkpoint

SAMPLES = 6
CACHE = "precomputed"
TEXTS_FILE = "texts.json"
LATENTS = ("mode", "mean", "deviation")  # mode of the picture before, the rest of the one after
AT_ONCE = 64  # instructions that the text encoder takes at once


@dataclass(frozen=True)
class EditOptions:
    """The options of a training to edit, beside the run's settings."""

    size: int
    resize: int | None = None  # pictures are scaled to this, then cropped to `size`; None: `size`
    flip: float = 0.5  # share of pairs that are mirrored; 0 if instructions name sides
    dropout: float = 0.05  # share without text, without both, and without picture, each
    precompute: bool = False  # compute latents once, and text states if that encoder is frozen
    train_text_encoder: bool = False
    first_timestep: int = 0  # train only noise levels from this one on
    save_dtype: str | None = None
    lora: LoraOptions | None = None  # train an adapter, not the weights

    def record(self) -> Record:
        """Return the options that a resumed run must repeat, by name."""
        return recorded(self)

    def check(self) -> "EditOptions":
        """Raise if a value is out of range; return self."""
        if not 0.0 <= self.dropout <= 1.0 / 3.0:
            raise TrainingError(f"`dropout` must be from 0 to 1/3. Received: {self.dropout}")
        check_cuts(self.flip, self.resize, self.size)
        if self.precompute and (self.flip or self.resize not in (None, self.size)):
            raise TrainingError(
                "Precomputed latents are those of unchanged pictures: `precompute` needs a `flip` "
                f"of 0 and no `resize`. Received: flip={self.flip}, resize={self.resize}"
            )
        return self


def check_cuts(flip: float, resize: int | None, size: int) -> None:
    """Refuse a share of mirrored pairs that is none, and pictures smaller than what is cut out."""
    if not 0.0 <= flip <= 1.0:
        raise TrainingError(f"`flip` must be from 0 to 1. Received: {flip}")
    if resize is not None and resize < size:
        raise TrainingError(
            f"Pictures are scaled to `resize` and cropped to `size`: `resize` must not be less "
            f"than `size`. Received: size={size}, resize={resize}"
        )


def dropped(r: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Choose by one number in [0, 1) for each example which lose their text or their picture."""
    return r < 2 * share, (share <= r) & (r < 3 * share)


def stretched(picture: Image.Image, size: int) -> Image.Image:
    """Scale a picture to a square, whatever its shape, as the published training does."""
    if picture.size == (size, size):
        return picture
    return picture.resize((size, size), Image.Resampling.LANCZOS)


def prepared(
    picture: Image.Image, size: int, resize: int, place, is_flipped: bool, scaled=stretched
) -> np.ndarray:
    """Scale, crop at `place` (x, y from 0 to 1) and mirror a picture: uint8 (size, size, 3)."""
    picture = scaled(picture, resize)
    x, y = (round(share * (resize - size)) for share in place)
    pixels = np.asarray(picture.crop((x, y, x + size, y + size)))
    return pixels[:, ::-1] if is_flipped else pixels


class EditBatches(Batches):
    """Batches of pairs, cropped and mirrored alike; `dropout` drops some texts and pictures."""

    scaled = staticmethod(stretched)

    def __init__(
        self, pairs: Pairs, settings: Settings, options: EditOptions, config, tokenize, host=ALONE
    ):
        size = part_of_batch(settings, host)
        super().__init__(pairs, size, settings.seed, pairs.order, host)
        self.options, self.config, self.tokenize = options, config, tokenize
        self.timesteps = noise_levels(options.first_timestep, config)
        side = options.size // config.autoencoder.downscale
        self.latent_shape = (side, side, config.autoencoder.latent_channels)

    def __call__(self, step: int) -> Batch:
        draws, size = self.draws(step), self.batch_size
        indices = [index for index, _ in self.examples(step)]
        without_text, more = self.dropped(draws.random(size))
        shape = (size, *self.latent_shape)
        batch = {
            "noise": draws.standard_normal(shape, "float32"),
            "posterior": draws.standard_normal(shape, "float32"),
            "timesteps": spread_timesteps(draws, size, self.timesteps),
            **more,
        }
        return batch | self.inputs(indices, without_text, draws)

    def dropped(self, r: np.ndarray) -> tuple[np.ndarray, Batch]:
        """Choose by one number in [0, 1) for each example which lose their text or picture."""
        without_text, without_picture = dropped(r, self.options.dropout)
        return without_text, {"has_picture": 1.0 - without_picture.astype("float32")}

    def inputs(self, indices, without_text, draws) -> Batch:
        options = self.options
        places, flips = draws.random((len(indices), 2)), draws.random(len(indices)) < options.flip
        size = options.size
        resize = size if options.resize is None else options.resize
        pairs = [self.source.pair(index) for index in indices]

        def pictures(name):
            return to_model(
                np.stack(
                    [
                        prepared(getattr(pair, name), size, resize, place, is_flipped, self.scaled)
                        for pair, place, is_flipped in zip(pairs, places, flips, strict=True)
                    ]
                )
            )

        texts = [
            "" if without else pair.text for pair, without in zip(pairs, without_text, strict=True)
        ]
        return {
            "before": pictures("before"),
            "after": pictures("after"),
            **self.tokenize(texts),
            **self.told(places, flips, resize),
        }

    def told(self, places: np.ndarray, flips: np.ndarray, resize: int) -> Batch:
        """Return what the denoiser is told of pictures scaled, cut at `places` and mirrored."""
        return {}


class PrecomputedBatches(EditBatches):
    """`EditBatches` with latents from files, and with text states if that encoder is frozen."""

    def __init__(self, pairs, settings, options, config, tokenize, folder: Path, host=ALONE):
        super().__init__(pairs, settings, options, config, tokenize, host)
        names = [*LATENTS, "places"]
        if not options.train_text_encoder:
            names.append("contexts")
        self.arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in names}
        self.texts = json.loads((folder / TEXTS_FILE).read_text(encoding="utf-8"))

    def inputs(self, indices, without_text, draws) -> Batch:
        found = {name: self.arrays[name][indices].astype("float32") for name in LATENTS}
        places = np.where(without_text, 0, self.arrays["places"][indices])
        if "contexts" in self.arrays:
            return {**found, "context": self.arrays["contexts"][places].astype("float32")}
        return {**found, **self.tokenize([self.texts[place] for place in places])}


def precompute(
    pairs: Pairs,
    size: int,
    vae,
    text_encoder,
    tokenizer,
    folder: Path,
    depends_on: Record,
    report: Callable[[str], None],
) -> None:
    """Write every pair's latents and the different instructions, the empty one first, to files.

    With a text encoder, the instructions' states are written, too. A folder that is there must have
    been made from the same.
    """
    states = None if text_encoder is None else text_encoder.dtype_policy.name
    depends_on = {**depends_on, "size": size, "text_states": states}
    if folder.exists():
        check_cache(folder, depends_on)
        return
    count = len(pairs)
    report(f"encoding {count} pairs")
    known, places = {"": 0}, np.zeros(count, "int32")

    def before(index):
        pair = pairs.pair(index)
        places[index] = known.setdefault(pair.text, len(known))
        return prepared(pair.before, size, size, (0, 0), False)

    def after(index):
        return prepared(pairs.pair(index).after, size, size, (0, 0), False)

    with atomic.new_folder(folder) as unfinished:
        mode, *posterior = (unfinished / f"{name}.npy" for name in LATENTS)
        write_parts(((mean,) for mean, _ in posteriors(vae, before, count)), count, [mode])
        write_parts(posteriors(vae, after, count), count, posterior)
        np.save(unfinished / "places.npy", places)
        texts = list(known)
        if text_encoder is not None:
            np.save(unfinished / "contexts.npy", _states(text_encoder, tokenizer, texts))
        (unfinished / TEXTS_FILE).write_text(json.dumps(texts), encoding="utf-8")
        mark_cache(unfinished, depends_on)


def _states(text_encoder, tokenizer, texts: list[str]) -> np.ndarray:
    """Encode texts → float16 (N, 77, D), in calls of one size, so that one shape is compiled."""
    states = []
    for start in range(0, len(texts), AT_ONCE):
        tokens = tokenizer((texts[start : start + AT_ONCE] + [""] * AT_ONCE)[:AT_ONCE])
        context = text_encoder(ops.convert_to_tensor(tokens))["context"]
        states.append(ops.convert_to_numpy(context).astype("float16"))
    return np.concatenate(states)[: len(texts)]


def prepare(
    checkpoint: Checkpoint,
    pairs: Pairs,
    settings: Settings,
    options: EditOptions,
    cache: Path,
    report: Callable[[str], None] = print,
) -> TrainingTask:
    """Build the models, loss and batches of a training to edit.

    Args:
        pairs: the data; on several hosts, this host's part of it.
        cache: the folder in which `precompute` keeps its files.
    """
    options.check()
    host = this_host()
    check_run(settings, host, options.first_timestep, checkpoint.config)
    if options.lora is not None and checkpoint.config.latent_inputs != "image":
        raise TrainingError(
            "An adapter is trained on a checkpoint that edits already: it has no part in the "
            "layer that takes the picture. Leave `lora_rank` out, or begin with an InstructPix2Pix "
            f"checkpoint. Received: {family_of(checkpoint.config)}"
        )
    check_family(checkpoint.config)
    begun = {"checkpoint": of_checkpoint(checkpoint), "data": pairs.record(), "hosts": host.count}
    checkpoint = with_picture_input(checkpoint)
    config = checkpoint.config
    precision = settings.precision
    if options.lora is not None:
        precision = frozen_precision(precision)
    tokenizers = checkpoint.tokenizers()
    has_states = options.precompute and not options.train_text_encoder
    with by_itself() if options.precompute else nullcontext():
        vae = freeze(checkpoint.build("vae"))
    with by_itself() if has_states else nullcontext():
        text_encoder = checkpoint.build("text_encoder", precision)
    text_encoder.trainable = options.train_text_encoder
    given = (pairs, settings, options, config, tokenize_for(tokenizers))
    if options.precompute:
        encoder = text_encoder if has_states else None
        cache = cache.with_name(host.named(cache.name))
        with by_itself():
            [tokenizer] = tokenizers.values()
            precompute(pairs, options.size, vae, encoder, tokenizer, cache, begun, report)
        batches = PrecomputedBatches(*given, cache, host)
    else:
        batches = EditBatches(*given, host)
    unet = checkpoint.build("unet", precision)
    if settings.gradient_checkpointing:
        recomputed(unet)
    encoders = [] if has_states else [text_encoder]
    denoising = Denoising(unet, encoders, config, min_snr=None)
    loss = Editing(denoising, None if options.precompute else vae, config.autoencoder.latent_scale)
    models = {"text_encoder": text_encoder, "unet": unet, "vae": vae}
    trained = {"unet": unet}
    if options.train_text_encoder:
        trained["text_encoder"] = text_encoder
    loss, lora = adapt(loss, trained, options.lora, settings.seed)
    begun |= options.record()
    return TrainingTask(checkpoint.name, config, tokenizers, models, loss, batches, begun, lora)


def train(
    checkpoint: Checkpoint,
    pairs: Pairs,
    settings: Settings,
    options: EditOptions,
    folder: Path,
    report: Callable[[str], None] = print,
) -> Path:
    """Train the UNet; return the folder of the checkpoint, which edits."""
    with alone_in(folder):
        task = prepare(checkpoint, pairs, settings, options, folder / CACHE, report)
        shown = [pairs.pair(i) for i in range(min(SAMPLES, len(pairs)))]

        def sample(step):
            size = options.size
            before = np.stack([prepared(pair.before, size, size, (0, 0), False) for pair in shown])
            after = task.painter.edit([pair.text for pair in shown], before)
            both = np.stack([before, after], axis=1).reshape(-1, *before.shape[1:])
            contact_sheet(both).save(folder / f"{step:06d}.png")

        return task.run(settings, folder, options.save_dtype, report, sample)


def check_family(config: PipelineConfig) -> None:
    """Refuse checkpoints that training from pairs does not know."""
    check_nothing_added(config)
    denoiser = config.denoiser
    if denoiser.conditioner != "clip" or denoiser.num_time_ids or denoiser.is_told_guidance:
        raise TrainingError(
            f"Training from pairs needs a checkpoint with one text encoder (SD1, SD2, but no LCM). "
            f"Received: {family_of(config)}"
        )
