"""A checkpoint of any format: its configuration, tensors by component, and tokenizers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import keras
import numpy as np

from sd_tf.config import PipelineConfig, T5EncoderConfig
from sd_tf.files.tensors import CheckpointError, StoredTensor
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.tokenizer.open import Tokenizer
from sd_tf.tokenizer.t5 import T5Tokenizer
from sd_tf.weights import layout
from sd_tf.weights.embeddings import Embedding

TensorReader = Callable[[], dict[str, StoredTensor]]


@dataclass(frozen=True)
class MergedAdapter:
    """An adapter that was merged into a checkpoint's weights."""

    name: str
    scale: float
    files: tuple[Path, ...]
    components: tuple[str, ...]  # whose weights it changed


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Its tensors have diffusers' names, whatever the format of its files."""

    name: str  # what exports and pictures call it: without the folders that lead to it
    source: str
    format: str
    config: PipelineConfig
    readers: dict[str, TensorReader]  # component → its tensors
    tokenizer_readers: dict[str, Callable[[], Tokenizer]] = field(default_factory=dict)
    paths: dict[str, list[Path]] | None = None  # component → its files; None: tensors name them
    adapters: tuple[MergedAdapter, ...] = ()
    missing: tuple[str, ...] = ()  # components that the source lacks
    embeddings: tuple[Embedding, ...] = ()  # what was added to the tensors and tokenizers
    controlnets: tuple[str, ...] = ()  # the names of those that were added, in their order
    image_adapters: tuple[str, ...] = ()  # the names of IP-Adapters, likewise

    def tensors(self, component: str) -> dict[str, StoredTensor]:
        if component in self.missing:
            raise CheckpointError(f"{self.source} does not hold it.")
        if component not in self.readers:
            raise CheckpointError(
                f"{self.source} has the components {', '.join(self.readers)}. "
                f"Received: {component!r}"
            )
        return self.readers[component]()

    def with_parts(self, found: Mapping[str, Mapping[str, StoredTensor]]) -> "Checkpoint":
        """Return the checkpoint with the tensors of further components."""
        readers = {part: (lambda tensors=tensors: dict(tensors)) for part, tensors in found.items()}
        paths = self.paths
        if paths is not None:
            files = {part: {t.file for t in tensors.values()} for part, tensors in found.items()}
            paths = {**paths, **{part: sorted(names) for part, names in files.items()}}
        return replace(self, readers={**self.readers, **readers}, paths=paths)

    def check_complete(self) -> None:
        """Raise if the source lacks components that the pipeline needs."""
        if self.missing:
            raise CheckpointError(
                f"{self.source} lacks {', '.join(self.missing)}, without which it draws nothing: "
                f"open the same release as a diffusers folder, which has every component."
            )

    def files(self, component: str) -> list[Path]:
        """List the files that hold the component's tensors; none if KerasCV downloads them."""
        if self.paths is not None:
            for path in self.paths[component]:
                if not path.is_file():
                    raise CheckpointError(f"No such file: {path}")
            return self.paths[component]
        files = {tensor.file for tensor in self.tensors(component).values()}
        return sorted(file for file in files if file is not None)

    def build(
        self, component: str, dtype: str = "float32", storage: str | None = None
    ) -> keras.layers.Layer:
        """Build the component's model and load its weights, strictly and one tensor at a time.

        Args:
            storage: how its kernels are stored; None: in `dtype`.
        """
        tensors = self.tensors(component)
        where = f"{component} of {self.source}"
        config = self.config.components[component]
        return layout.load(config, tensors, dtype, where, storage)

    def empty_text(self, text_encoder: str) -> np.ndarray:
        """Return the ids of "" → int32 (1, length), for T5 without a tokenizer, too."""
        config = self.config.text_encoders[text_encoder]
        if isinstance(config, T5EncoderConfig):
            return T5Tokenizer.empty(config.max_length)
        return self.tokenizer(text_encoder)("")

    def tokenizers(self) -> dict[str, Tokenizer]:
        """Return the tokenizer of each text encoder."""
        return {name: self.tokenizer(name) for name in self.config.text_encoders}

    def tokenizer(self, text_encoder: str = "text_encoder") -> Tokenizer:
        """Return the checkpoint's own tokenizer, or CLIP's packaged one with the family's padding.

        T5's gives the length that the text encoder's configuration says.

        Raises:
            CheckpointError: the tokenizer is not the text encoder's, or there is none for T5, for
                which none is packaged.
        """
        config = self.config.text_encoders[text_encoder]
        is_t5 = isinstance(config, T5EncoderConfig)
        if text_encoder not in self.tokenizer_readers:
            if is_t5:
                raise CheckpointError(
                    f"{self.source} has no tokenizer for its {text_encoder}, a T5, and none comes "
                    f"with sd_tf. Give `t5_tokenizer`, a folder with its tokenizer.json or "
                    f"spiece.model, or open a diffusers folder, which has it."
                )
            return ClipTokenizer.clip(config.pad_token_id, config.max_length)
        tokenizer = self.tokenizer_readers[text_encoder]()
        wanted = T5Tokenizer if is_t5 else ClipTokenizer
        if not isinstance(tokenizer, wanted):
            raise CheckpointError(
                f"The tokenizer of {self.source} for its {text_encoder} must be a "
                f"{wanted.__name__}. Received: a {type(tokenizer).__name__}"
            )
        if tokenizer.vocab_size > config.vocab_size:
            raise CheckpointError(
                f"The tokenizer of {self.source} has {tokenizer.vocab_size} tokens, but its "
                f"{text_encoder} has embeddings for {config.vocab_size} only."
            )
        return tokenizer.with_length(config.max_length) if is_t5 else tokenizer
