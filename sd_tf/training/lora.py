"""LoRA: train low-rank branches beside frozen weights, and save them as diffusers' file.

The loss is computed with the branches beside the layers (`sd_tf.models.branches`), never with
merged weights, so that no gradient as large as a layer's weight arises.
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np

from sd_tf.adapters.peft_settings import METADATA
from sd_tf.files import atomic
from sd_tf.files.tensors import save_safetensors
from sd_tf.models.branches import Branch, Branches, branches
from sd_tf.models.layers import Block
from sd_tf.training.origin import Record
from sd_tf.training.settings import LoraOptions
from sd_tf.weights import layout


class Lora:
    """The branches of some models' layers: A random, B zeros, so that nothing changes at first."""

    def __init__(self, models: Mapping[str, keras.layers.Layer], options: LoraOptions, seed: int):
        """Freeze the models, by component, and create their branches."""
        self.options, self.components = options.check(), tuple(models)
        self.branches: dict[keras.layers.Layer, Branch] = {}
        self.slots: dict[str, layout.Slot] = {}  # by the tensors' names in the file
        for component, model in models.items():
            model.trainable = False
            ends = tuple(f".{end}" for end in options.targets(component))
            for path, layer in layout.layers(model).items():
                if path.endswith(ends):
                    self._add(f"{component}.{path}", layer, seed)

    def _add(self, name: str, layer: keras.layers.Layer, seed: int) -> None:
        *window_and_inputs, outputs = layer.kernel.shape
        # Kaiming's uniform distribution with a = √5, as in PEFT.
        bound = float(np.prod(window_and_inputs)) ** -0.5
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        rank = self.options.rank
        a = rng.uniform(-bound, bound, (*window_and_inputs, rank)).astype("float32")
        b = np.zeros((rank, outputs), "float32")
        a, b = (
            keras.Variable(value, dtype="float32", name=f"{name}.{part}")
            for part, value in (("lora_A", a), ("lora_B", b))
        )
        self.branches[layer] = Branch(a, b, self.options.scale)
        kernel = layout.slot_of_kernel(layer)
        is_convolution = len(kernel.shape) == 4
        self.slots[f"{name}.lora_A.weight"] = dataclasses.replace(kernel, variable=a)
        self.slots[f"{name}.lora_B.weight"] = layout.Slot(b, (1, 0), pointwise=is_convolution)

    @property
    def variables(self) -> list[keras.Variable]:
        return [slot.variable for slot in self.slots.values()]

    def save(self, path: Path, dtype: str | None, base: str, base_weights: Record) -> None:
        """Write the file that diffusers' `load_lora_weights` and PEFT's users read.

        Args:
            dtype: None: the variables' dtype, float32.
            base: the name of the checkpoint that the adapter was trained on.
            base_weights: what the checkpoint's weights are known by.
        """
        options, fields = self.options, {}
        for component in self.components:
            config = {
                "base_model_name_or_path": base,
                "lora_alpha": options.rank if options.alpha is None else options.alpha,
                "peft_type": "LORA",
                "r": options.rank,
                "target_modules": list(options.targets(component)),
            }
            fields |= {f"{component}.{name}": value for name, value in config.items()}
        metadata = {
            "format": "pt",
            METADATA: json.dumps(fields, indent=2, sort_keys=True),
            "base_weights": json.dumps(base_weights),
        }
        tensors = {name: slot.stored(dtype) for name, slot in self.slots.items()}
        with atomic.new_file(path) as part:
            save_safetensors(tensors, part, metadata)


class Adapted(Block):
    """A loss that is computed with an adapter's branches; only these are trained."""

    def __init__(self, loss: Block, lora: Lora):
        super().__init__()
        loss.trainable = False
        self.loss = loss
        self.adapter = lora.variables
        self._lora = lora

    def call(self, batch):
        with branches(self._lora.branches):
            return self.loss(batch)


def recorded(options) -> Record:
    """Record the options of a training, a dataclass with `lora` and `save_dtype`, by name."""
    every = dataclasses.asdict(options)
    del every["save_dtype"], every["lora"]
    return every if options.lora is None else {**every, **options.lora.record()}


def adapt(
    loss: Block,
    models: Mapping[str, keras.layers.Layer],
    options: LoraOptions | None,
    seed: int,
) -> tuple[Block, Lora | None]:
    """Return the loss with an adapter of the models, and the adapter; without options, as it is."""
    if options is None:
        return loss, None
    lora = Lora(models, options, seed)
    return Adapted(loss, lora), lora


def branches_of(lora: Lora | None) -> Branches:
    """Return an adapter's branches, none where there is no adapter."""
    return {} if lora is None else lora.branches
