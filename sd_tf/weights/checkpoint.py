"""A checkpoint of any format: its configuration, tensors by component, and tokenizers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import keras

from sd_tf.config import PipelineConfig
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.weights import layout
from sd_tf.weights.embeddings import Embedding
from sd_tf.weights.tensors import CheckpointError, StoredTensor

TensorReader = Callable[[], dict[str, StoredTensor]]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Its tensors have diffusers' names, whatever the format of its files."""

    name: str  # what exports and pictures call it: without the folders that lead to it
    source: str
    format: str
    config: PipelineConfig
    readers: dict[str, TensorReader]  # component → its tensors
    tokenizer_readers: dict[str, Callable[[], ClipTokenizer]] = field(default_factory=dict)
    paths: dict[str, list[Path]] | None = None  # component → its files; None: tensors name them
    embeddings: tuple[Embedding, ...] = ()  # what was added to the tensors and tokenizers

    def tensors(self, component: str) -> dict[str, StoredTensor]:
        if component not in self.readers:
            raise CheckpointError(
                f"{self.source} has the components {', '.join(self.readers)}. "
                f"Received: {component!r}"
            )
        return self.readers[component]()

    def files(self, component: str) -> list[Path]:
        """List the files that hold the component's tensors; none if KerasCV downloads them."""
        if self.paths is not None:
            for path in self.paths[component]:
                if not path.is_file():
                    raise CheckpointError(f"No such file: {path}")
            return self.paths[component]
        files = {tensor.file for tensor in self.tensors(component).values()}
        return sorted(file for file in files if file is not None)

    def build(self, component: str, dtype: str = "float32") -> keras.layers.Layer:
        """Build the component's model and load its weights, strictly and one tensor at a time."""
        tensors = self.tensors(component)
        where = f"{component} of {self.source}"
        return layout.load(self.config.components[component], tensors, dtype, where)

    def tokenizer(self, text_encoder: str = "text_encoder") -> ClipTokenizer:
        """Return the checkpoint's own tokenizer, or the packaged one with the family's padding."""
        config = self.config.text_encoders[text_encoder]
        if text_encoder not in self.tokenizer_readers:
            return ClipTokenizer.clip(config.pad_token_id, config.max_length)
        tokenizer = self.tokenizer_readers[text_encoder]()
        if tokenizer.vocab_size > config.vocab_size:
            raise CheckpointError(
                f"The tokenizer of {self.source} has {tokenizer.vocab_size} tokens, but its "
                f"{text_encoder} has embeddings for {config.vocab_size} only."
            )
        return tokenizer
