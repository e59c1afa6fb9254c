"""A checkpoint to be trained: its models, the loss over them, and the batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import keras

from sd_tf.adapters.adapter import DIFFUSERS_FILE
from sd_tf.config import PipelineConfig
from sd_tf.files.tensors import StoredTensor
from sd_tf.models.controlnet import ControlNet
from sd_tf.tokenizer import Tokenizer
from sd_tf.training import inversion
from sd_tf.training.batches import Batch
from sd_tf.training.conditions import tokenize_for
from sd_tf.training.hosts import this_host
from sd_tf.training.inversion import Inversion
from sd_tf.training.lora import Lora, branches_of
from sd_tf.training.origin import Record
from sd_tf.training.painter import Painter
from sd_tf.training.settings import Settings
from sd_tf.training.trainer import Run
from sd_tf.weights import save_controlnet, save_folder


@dataclass(frozen=True)
class TrainingTask:
    """Everything that a run trains. `loss` reads the models; `batches` maps a step to its batch.

    With `lora`, `inversion` or `net`, these alone are trained and saved.
    """

    base: str  # the name of the checkpoint that is trained
    config: PipelineConfig
    tokenizers: dict[str, Tokenizer]  # by text encoder
    models: dict[str, keras.layers.Layer]
    loss: keras.layers.Layer
    batches: Callable[[int], Batch]
    depends_on: Record  # what the run depends on, beside the settings
    lora: Lora | None = None
    inversion: Inversion | None = None
    net: ControlNet | None = None
    # Tensors, by component, that are saved as they were.
    unchanged: Mapping[str, Mapping[str, StoredTensor]] = field(default_factory=dict)

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
        """Train, then save what was trained in `folder`; return its path."""
        given = (self.loss, self.batches, settings, folder, report, sample)
        Run(*given, depends_on=self.depends_on).train()
        target = folder / self._name
        if this_host().is_first:
            self._save(target, save_dtype)
            report(f"saved {target}")
        return target

    @property
    def _name(self) -> str:
        if self.lora is not None:
            return DIFFUSERS_FILE
        if self.net is not None:
            return self.net.control.component
        return "checkpoint" if self.inversion is None else inversion.FILE

    def _save(self, target: Path, dtype: str | None) -> None:
        if self.lora is not None:
            self.lora.save(target, dtype, self.base, self.depends_on["checkpoint"]["weights"])
        elif self.inversion is not None:
            self.inversion.save(target)
        elif self.net is not None:
            save_controlnet(target, self.net.control, self.net, dtype)
        else:
            given = (target, self.config, self.models, self.tokenizers, dtype)
            save_folder(*given, unchanged=self.unchanged)
