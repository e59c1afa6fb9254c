"""A checkpoint to be trained: its models, the loss over them, and the batches."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import keras

from sd_tf.config import PipelineConfig
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.training.batches import Batch
from sd_tf.training.conditions import tokenize_for
from sd_tf.training.hosts import this_host
from sd_tf.training.lora import FILE, Lora, branches_of
from sd_tf.training.origin import Record
from sd_tf.training.painter import Painter
from sd_tf.training.settings import Settings
from sd_tf.training.trainer import Run
from sd_tf.weights import save_folder


@dataclass(frozen=True)
class TrainingTask:
    """Everything that a run trains. `loss` reads the models; `batches` maps a step to its batch.

    With `lora`, the adapter alone is trained and saved.
    """

    base: str  # the name of the checkpoint that is trained
    config: PipelineConfig
    tokenizers: dict[str, ClipTokenizer]  # by text encoder
    models: dict[str, keras.layers.Layer]
    loss: keras.layers.Layer
    batches: Callable[[int], Batch]
    depends_on: Record  # what the run depends on, beside the settings
    lora: Lora | None = None

    @property
    def painter(self) -> Painter:
        tokenize = tokenize_for(self.tokenizers)
        return Painter(self.config, self.models, tokenize, branches_of(self.lora))

    def run(
        self,
        settings: Settings,
        folder: Path,
        save_dtype: str | None,
        report: Callable[[str], None],
        sample: Callable[[int], None],
    ) -> Path:
        """Train, then save a checkpoint of all models, or the adapter, in `folder`; return it."""
        given = (self.loss, self.batches, settings, folder, report, sample)
        Run(*given, depends_on=self.depends_on).train()
        target = folder / ("checkpoint" if self.lora is None else FILE)
        if not this_host().is_first:
            return target
        if self.lora is None:
            save_folder(target, self.config, self.models, self.tokenizers, save_dtype)
        else:
            weights = self.depends_on["checkpoint"]["weights"]
            self.lora.save(target, save_dtype, self.base, weights)
        report(f"saved {target}")
        return target
