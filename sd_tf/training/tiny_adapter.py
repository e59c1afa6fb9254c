"""Train the adapters of the embedded checkpoint: a style, and a shape that it cannot draw."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sd_tf.checkpoints import TINY_FOLDER
from sd_tf.files import atomic
from sd_tf.files.tensors import open_safetensors, read_metadata, save_safetensors
from sd_tf.training import world
from sd_tf.training.data import World
from sd_tf.training.finetune import FinetuneOptions, finetune
from sd_tf.training.settings import Averaging, LoraOptions, Settings, TrainingError
from sd_tf.weights import open_checkpoint


@dataclass(frozen=True)
class Outlined(World):
    """The world's scenes, whose shapes are drawn as outlines, with the captions that they have."""

    hollow: float = 0.6  # size of what is cut out of a shape's middle, as a share of the shape's

    def picture(self, index: int) -> np.ndarray:
        return world.draw(self.scene(index), self.size, self.hollow)


@dataclass(frozen=True)
class Moons(World):
    """The world's scenes, in which the first thing is a moon in one half of them."""

    shape: str = "moon"

    def scene(self, index: int) -> world.Scene:
        scene = super().scene(index)
        if index % 2:
            return scene
        first, *others = scene.things
        return replace(scene, things=(replace(first, shape=self.shape), *others))


@dataclass(frozen=True)
class Recipe:
    """Everything that an adapter's weights depend on."""

    source: Callable[..., World]  # (number of scenes, pixels) → captioned pictures
    settings: Settings
    lora: LoraOptions
    train_text_encoder: bool = False  # for a word that the checkpoint has not seen
    scenes: int = 4000
    left_out: tuple[str, ...] = ()  # layers with the smallest changes, to save space


SETTINGS = Settings(
    steps=1000,
    batch_size=16,
    learning_rate=3e-3,
    warm_up=50,
    averaging=Averaging(half_life=50),
    sample_every=250,
    save_every=250,
)
RECIPES = {
    "outline": Recipe(Outlined, SETTINGS, LoraOptions(rank=2, conv=True)),
    "moon": Recipe(
        Moons,
        replace(SETTINGS, steps=600, sample_every=200, save_every=200),
        LoraOptions(rank=2, conv=True),
        train_text_encoder=True,
        scenes=1500,
        left_out=(
            "unet.up_blocks.2.resnets.0.conv_shortcut",
            "unet.up_blocks.2.resnets.1.conv1",
            "unet.up_blocks.2.resnets.1.conv2",
            "unet.up_blocks.2.resnets.1.conv_shortcut",
        ),
    ),
}


def train(
    name: str, folder: Path, report: Callable[[str], None] = print, recipe: Recipe | None = None
) -> Path:
    """Train the adapter of that name; return its file, float16."""
    if recipe is None and name not in RECIPES:
        raise TrainingError(f"The adapters are {', '.join(RECIPES)}. Received: {name!r}")
    recipe = recipe or RECIPES[name]
    checkpoint = open_checkpoint(TINY_FOLDER)
    source = recipe.source(recipe.scenes, checkpoint.config.default_size)
    options = FinetuneOptions(
        recipe.train_text_encoder, save_dtype="float16", lora=recipe.lora, min_snr=None
    )
    file = finetune(checkpoint, source, recipe.settings, options, folder, report)
    _leave_out(file, recipe.left_out)
    return file


def _leave_out(file: Path, layers: tuple[str, ...]) -> None:
    """Rewrite an adapter's file without some layers."""
    kept = {
        name: tensor.read()
        for name, tensor in open_safetensors(file).items()
        if not name.startswith(tuple(f"{layer}." for layer in layers))
    }
    metadata = read_metadata(file)
    with atomic.new_file(file) as part:
        save_safetensors(kept, part, metadata)
