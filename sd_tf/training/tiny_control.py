"""Train the embedded ControlNet, which puts things where an outline drawing has them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sd_tf.checkpoints import TINY_FOLDER
from sd_tf.runtime.pictures import contact_sheet
from sd_tf.training import world
from sd_tf.training.batches import Batch, LatentBatches
from sd_tf.training.conditions import tokenize_for
from sd_tf.training.control import NAME, new_net
from sd_tf.training.data import World
from sd_tf.training.latents import CACHE, cached_latents
from sd_tf.training.losses import HINT, Denoising, Steered, freeze
from sd_tf.training.origin import of_checkpoint
from sd_tf.training.painter import Painter
from sd_tf.training.settings import Averaging, Settings
from sd_tf.training.trainer import Run, alone_in
from sd_tf.weights import open_checkpoint, save_controlnet

LEVELS = 255
HOLLOWS = (0.7, 0.75, 0.8, 0.85, 0.9)  # thick lines and thin ones
SHOWN = 12  # pictures of a sample sheet, each beside its drawing


@dataclass(frozen=True)
class Recipe:
    """Everything that the net's weights depend on, beside the checkpoint that it steers."""

    scenes: int
    settings: Settings
    caption_dropout: float = 0.1


TINY_CONTROL = Recipe(
    scenes=12_000,
    settings=Settings(
        steps=2000,
        batch_size=32,
        learning_rate=1e-3,
        warm_up=50,
        averaging=Averaging(half_life=100),
        sample_every=500,
        save_every=250,
    ),
)


class OutlineBatches(LatentBatches):
    """Latents of scenes, with the scenes' outlines. No caption says where things are."""

    def __call__(self, step: int) -> Batch:
        batch = super().__call__(step)
        lines = [
            world.outline(self.source.scene(index), self.source.size, HOLLOWS[index % len(HOLLOWS)])
            for index, _ in self.examples(step)
        ]
        return {**batch, HINT: np.stack(lines).astype("float32") / LEVELS}


@dataclass(frozen=True)
class Unplaced(World):
    """The world's scenes, whose captions say neither where things are nor how large."""

    def caption(self, index: int, epoch: int) -> str:
        return world.unplaced(self.scene(index), self._number(index), self.seed + epoch)


def train(
    folder: Path, report: Callable[[str], None] = print, recipe: Recipe = TINY_CONTROL
) -> Path:
    """Train the net, resumed where it was stopped; return its folder."""
    with alone_in(folder):
        checkpoint = open_checkpoint(TINY_FOLDER)
        config = checkpoint.config
        source = Unplaced(recipe.scenes, config.default_size)
        begun = {"checkpoint": of_checkpoint(checkpoint), "data": source.record()}
        models = {name: freeze(checkpoint.build(name)) for name in config.components}
        latents = cached_latents(models["vae"], source, folder / CACHE, begun, report)
        net = new_net(checkpoint)
        tokenizers = {name: checkpoint.tokenizer(name) for name in config.text_encoders}
        tokenize = tokenize_for(tokenizers)
        encoders = [models[name] for name in config.text_encoders]
        loss = Denoising(Steered(models["unet"], net), encoders, config, min_snr=None)
        batches = OutlineBatches(
            source, recipe.settings, latents, config, tokenize, recipe.caption_dropout
        )
        steered = replace(config, controlnets={NAME: net.control})
        painter = Painter(steered, {**models, NAME: net}, tokenize)
        drawings = [world.outline(source.scene(i), source.size) for i in range(SHOWN)]
        captions = [source.caption(i, 0) for i in range(SHOWN)]

        def sample(step):
            pictures = painter.steer(captions, np.stack(drawings))
            both = np.stack([np.stack(drawings), pictures], axis=1)
            sheet = contact_sheet(both.reshape(-1, *pictures.shape[1:]))
            sheet.save(folder / f"{step:06d}.png")

        begun |= {"dropout": recipe.caption_dropout}
        Run(loss, batches, recipe.settings, folder, report, sample, depends_on=begun).train()
        target = folder / NAME
        save_controlnet(target, net.control, net, dtype="float16")
        report(f"saved {target}")
        return target
