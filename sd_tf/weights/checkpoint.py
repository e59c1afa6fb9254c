"""A checkpoint of any format: its configuration, its tensors by component, its tokenizers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import keras

from sd_tf.config import PipelineConfig
from sd_tf.tokenizer import ClipTokenizer
from sd_tf.weights import layout
from sd_tf.weights.tensors import CheckpointError, StoredTensor

TensorReader = Callable[[], dict[str, StoredTensor]]


@dataclass(frozen=True)
class Checkpoint:
    """What a format module gives. The tensors carry diffusers' names, whatever the format."""

    source: str
    format: str
    config: PipelineConfig
    readers: dict[str, TensorReader]  # component → its tensors
    tokenizer_readers: dict[str, Callable[[], ClipTokenizer]] = field(default_factory=dict)

    def tensors(self, component: str) -> dict[str, StoredTensor]:
        if component not in self.readers:
            raise CheckpointError(
                f"{self.source} has no component {component!r}; it has {', '.join(self.readers)}."
            )
        return self.readers[component]()

    def files(self, component: str) -> list[Path]:
        """What the component's tensors are read from; nothing where KerasCV downloads them."""
        files = {tensor.file for tensor in self.tensors(component).values()}
        return sorted(file for file in files if file is not None)

    def build(self, component: str, dtype: str = "float32") -> keras.layers.Layer:
        """The component's model with its weights, loaded strictly and one tensor at a time."""
        tensors = self.tensors(component)
        where = f"{component} of {self.source}"
        return layout.load(self.config.components[component], tensors, dtype, where)

    def tokenizer(self, text_encoder: str = "text_encoder") -> ClipTokenizer:
        """The checkpoint's own tokenizer, else the shipped one with the family's padding."""
        config = self.config.text_encoders[text_encoder]
        if text_encoder not in self.tokenizer_readers:
            return ClipTokenizer.clip(config.pad_token_id, config.max_length)
        tokenizer = self.tokenizer_readers[text_encoder]()
        if tokenizer.vocab_size > config.vocab_size:
            raise CheckpointError(
                f"The tokenizer of {self.source} knows {tokenizer.vocab_size} tokens, but its "
                f"{text_encoder} has embeddings for {config.vocab_size}."
            )
        return tokenizer
