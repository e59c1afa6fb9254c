"""A checkpoint that learns: what is trained, on what, and the folder that comes of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import keras

from sd_tf.config import PipelineConfig
from sd_tf.tokenizer import ClipTokenizer
from sd_tf.training.batches import Batch
from sd_tf.training.hosts import this_host
from sd_tf.training.painter import Painter
from sd_tf.training.settings import Settings
from sd_tf.training.trainer import Run
from sd_tf.weights import save_folder


@dataclass(frozen=True)
class Lesson:
    config: PipelineConfig
    tokenizer: ClipTokenizer
    models: dict[str, keras.layers.Layer]
    loss: keras.layers.Layer
    batches: Callable[[int], Batch]

    @property
    def painter(self) -> Painter:
        return Painter(self.config, **self.models, tokenizer=self.tokenizer)

    def learn(
        self,
        settings: Settings,
        folder: Path,
        save_dtype: str | None,
        report: Callable[[str], None],
        sample: Callable[[int], None],
    ) -> Path:
        """Train, and write a checkpoint of all models; returns its folder."""
        Run(self.loss, self.batches, settings, folder, report, sample).train()
        target = folder / "checkpoint"
        if this_host().is_first:
            tokenizers = {"text_encoder": self.tokenizer}
            save_folder(target, self.config, self.models, tokenizers, save_dtype)
            report(f"saved {target}")
        return target
