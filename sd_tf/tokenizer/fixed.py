"""What every tokenizer here is: text → int32 ids of a fixed length, the same as transformers'."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tokenizers import Tokenizer

from sd_tf.files.objects import read_object
from sd_tf.tokenizer.errors import TokenizerError

logger = logging.getLogger(__name__)

NO_LIMIT = 10_000  # transformers writes a huge number where a tokenizer sets no limit


@dataclass(frozen=True)
class Encoding:
    """The ids of one text, at the fixed length, and the end of the text that was cut off."""

    ids: tuple[int, ...]
    cut: str


class FixedLengthTokenizer(ABC):
    """A tokenizer of the `tokenizers` library, whose ids are cut and padded to one length."""

    END: ClassVar[str]  # the token behind a text

    def __init__(self, backend: Tokenizer, pad_token: str, max_length: int):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.pad_token = pad_token
        self.max_length = max_length

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer of the `tokenizers` library."""
        return self._backend

    @property
    def end_token_id(self) -> int:
        return self._backend.token_to_id(self.END)

    @property
    def pad_token_id(self) -> int:
        return self._backend.token_to_id(self.pad_token)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> Encoding:
        """Encode one text; ids beyond the fixed length are cut off before the end token."""
        if not isinstance(text, str):
            raise TypeError(f"A prompt must be a str. Received: {text!r}")
        ids, starts = self._ids(text)
        cut = ""
        if len(ids) > self.max_length:
            last = self.max_length - 1
            cut = text[starts[last] :]
            ids = [*ids[:last], self.end_token_id]
        padding = [self.pad_token_id] * (self.max_length - len(ids))
        return Encoding((*ids, *padding), cut)

    @abstractmethod
    def _ids(self, text: str) -> tuple[list[int], list[int]]:
        """Return all ids of a text, special ones included, and where each begins in it."""

    def __call__(self, texts: str | Sequence[str]) -> np.ndarray:
        """Encode one text or several → int32 (N, max_length); log a warning for what is cut off."""
        texts = [texts] if isinstance(texts, str) else texts
        encodings = [self.encode(text) for text in texts]
        for encoding in encodings:
            warn_of_cut(encoding.cut, self.max_length)
        return np.array([e.ids for e in encodings], "int32").reshape(-1, self.max_length)


def warn_of_cut(cut: str, most: int) -> None:
    """Log a warning if a part of a prompt was cut off because it has more than `most` tokens."""
    if cut:
        logger.warning(
            "The prompt is longer than %d tokens; this part of it was cut: %r", most, cut
        )


def read_backend(file: Path) -> Tokenizer:
    """Read a tokenizer.json."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{file} cannot be read: {error}") from error


def object_or_empty(file: Path) -> dict[str, Any]:
    """Read an object of JSON; a file that is missing is an empty one."""
    return read_object(file, TokenizerError) if file.is_file() else {}


def length_of(folder: Path, settings: Mapping, default: int) -> int:
    """Return the length that the settings of a tokenizer's folder limit texts to."""
    length = settings.get("model_max_length", default)
    if not isinstance(length, int | float):
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: model_max_length must be a number. "
            f"Received: {length!r}"
        )
    return length if length <= NO_LIMIT else default
