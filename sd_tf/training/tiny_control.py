"""Train the embedded ControlNet, which puts things where an outline drawing has them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
from sd_tf.training.tiny import record_of
from sd_tf.training.trainer import Run, alone_in
from sd_tf.weights import open_checkpoint, save_controlnet

LEVELS = 255
HOLLOWS = (0.7, 0.75, 0.8, 0.85, 0.9)  # thick lines and thin ones
SHOWN = 12  # pictures of a sample sheet, each beside its drawing


@dataclass(frozen=True)
class Stage:
    """A part of the training."""

    settings: Settings
    relations: bool  # captions say how two things lie to one another
    caption_dropout: float = 0.1


@dataclass(frozen=True)
class Recipe:
    """Everything that the net's weights depend on, beside the checkpoint that it steers."""

    scenes: int
    stages: tuple[Stage, ...]


SETTINGS = Settings(
    steps=2000,
    batch_size=32,
    learning_rate=1e-3,
    warm_up=50,
    averaging=Averaging(half_life=100),
    sample_every=500,
    save_every=250,
)
TINY_CONTROL = Recipe(
    scenes=12_000,
    stages=(
        # Where things are, which only the drawing tells.
        Stage(SETTINGS, relations=False),
        # Which of two things is which: a relation tells whose the colours are.
        Stage(replace(SETTINGS, steps=1500, learning_rate=7e-4, sample_every=1500), relations=True),
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

    relations: bool = True  # they say how two things lie to one another

    def caption(self, index: int, epoch: int) -> str:
        number = self._number(index)
        return world.unplaced(self.scene(index), number, self.seed + epoch, self.relations)


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
        tokenize = tokenize_for(checkpoint.tokenizers())
        encoders = [models[name] for name in config.text_encoders]
        loss = Denoising(Steered(models["unet"], net), encoders, config, min_snr=None)
        steered = replace(config, controlnets={NAME: net.control})
        painter = Painter(steered, {**models, NAME: net}, tokenize)
        shown = range(min(SHOWN, recipe.scenes))
        drawings = np.stack([world.outline(source.scene(i), source.size) for i in shown])
        captions = [source.caption(i, 0) for i in shown]

        def sample(step, stage):
            pictures = painter.steer(captions, drawings)
            both = np.stack([drawings, pictures], axis=1)
            sheet = contact_sheet(both.reshape(-1, *pictures.shape[1:]))
            sheet.save(folder / stage / f"{step:06d}.png")

        for number, stage in enumerate(recipe.stages, start=1):
            name = f"net-{number}"
            of_stage = replace(source, relations=stage.relations)
            batches = OutlineBatches(
                of_stage, stage.settings, latents, config, tokenize, stage.caption_dropout
            )
            record = {
                "stages": record_of(recipe.stages[:number]),
                "scenes": recipe.scenes,
                "checkpoint": begun["checkpoint"],
            }
            Run(
                loss,
                batches,
                stage.settings,
                folder / name,
                report,
                partial(sample, stage=name),
                depends_on=record,
            ).train()
        target = folder / NAME
        save_controlnet(target, net.control, net, dtype="float16")
        report(f"saved {target}")
        return target
