"""T5's Unigram tokenizer: text → int32 ids of a fixed length, the same as transformers'.

The ids are the text's, an end token and padding; there is no start token.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram

from sd_tf.tokenizer.disk import disk_errors
from sd_tf.tokenizer.errors import TokenizerError
from sd_tf.tokenizer.fixed import FixedLengthTokenizer, length_of, object_or_empty, read_backend
from sd_tf.tokenizer.spiece import Vocabulary, read_spiece

SPECIAL = PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # a vocabulary begins with them
EXTRA_IDS = 100  # behind the pieces of a spiece.model
SPACE = "▁"
STRANGE = "\ue000"  # a character for private use, which no vocabulary has
MAX_LENGTH = 512  # where a tokenizer's files set no limit


class T5Tokenizer(FixedLengthTokenizer):
    """Turns texts into ids of a fixed length: text, end token, padding."""

    END = END

    def __init__(self, backend: Tokenizer, max_length: int, source: str | Path = "the tokenizer"):
        """Take a tokenizer of the `tokenizers` library; `source` is what errors call it."""
        _check(backend, source)
        if max_length < 1:
            raise TokenizerError(f"max_length must be at least 1. Received: {max_length}")
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_special_tokens([token for token in SPECIAL if token not in known])
        super().__init__(backend, PAD, max_length)

    @classmethod
    def from_folder(cls, folder: str | Path, max_length: int | None = None) -> "T5Tokenizer":
        """Read a checkpoint's tokenizer: tokenizer.json, or else spiece.model.

        Args:
            max_length: None: that of tokenizer_config.json, or 512 if there is none.
        """
        folder = Path(folder)
        file, spiece = folder / "tokenizer.json", folder / "spiece.model"
        if file.is_file():
            backend = read_backend(file)
        elif spiece.is_file():
            file, backend = spiece, unigram(read_spiece(spiece), spiece)
        else:
            raise TokenizerError(
                f"The folder of a T5 tokenizer must hold tokenizer.json or spiece.model. "
                f"Missing: {file}"
            )
        if max_length is None:
            settings = object_or_empty(folder / "tokenizer_config.json")
            max_length = length_of(folder, settings, MAX_LENGTH)
        return cls(backend, max_length, file)

    @staticmethod
    def empty(max_length: int) -> np.ndarray:
        """Return the ids of "" → int32 (1, max_length), which every vocabulary gives alike."""
        ids = [SPECIAL.index(END), *[SPECIAL.index(PAD)] * (max_length - 1)]
        return np.array([ids], "int32")

    def with_length(self, max_length: int) -> "T5Tokenizer":
        """Return the tokenizer with another fixed length."""
        return T5Tokenizer(self._backend, max_length)

    def _ids(self, text: str) -> tuple[list[int], list[int]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets]
        return [*encoding.ids, self.end_token_id], [*starts, len(text)]

    def count(self, text: str) -> int:
        """Count a text's ids, those that are cut off included, the end token not."""
        return len(self._backend.encode(text, add_special_tokens=False).ids)

    def save(self, folder: str | Path) -> None:
        """Write the files that diffusers, transformers and `from_folder` read."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with disk_errors():
            self._backend.save(str(folder / "tokenizer.json"))
        extra = [token for token in self._backend.get_vocab() if token.startswith("<extra_id_")]
        settings = {
            "pad_token": PAD,
            "eos_token": END,
            "unk_token": UNKNOWN,
            "extra_ids": len(extra),
            "additional_special_tokens": sorted(extra, key=self._backend.token_to_id),
            "model_max_length": self.max_length,
            "tokenizer_class": "T5Tokenizer",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def unigram(vocabulary: Vocabulary, source: str | Path = "the vocabulary") -> Tokenizer:
    """Build a tokenizer with T5's rules from the pieces that come before its extra ids."""
    extra = [f"<extra_id_{number}>" for number in reversed(range(EXTRA_IDS))]
    pieces = [*vocabulary.pieces, *((token, 0.0) for token in extra)]
    _check_special([piece for piece, _ in pieces], source)
    backend = Tokenizer(Unigram(pieces, unk_id=SPECIAL.index(UNKNOWN), byte_fallback=False))
    if vocabulary.charsmap:
        try:
            backend.normalizer = normalizers.Precompiled(vocabulary.charsmap)
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"The charsmap of {source} cannot be read: {error}") from error
    spaces = {"replacement": SPACE, "prepend_scheme": "always", "split": True}
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**spaces)]
    )
    backend.decoder = decoders.Metaspace(**spaces)
    end = (END, SPECIAL.index(END))
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", END], pair=["$A", END, "$B", END], special_tokens=[end]
    )
    backend.add_special_tokens([*SPECIAL, *extra])
    return backend


def _check(backend: Tokenizer, source: str | Path) -> None:
    """Refuse a tokenizer that is not T5's."""
    if not isinstance(backend.model, Unigram):
        raise TokenizerError(
            f"The model of a T5 tokenizer must be Unigram. Received: "
            f"{type(backend.model).__name__} in {source}"
        )
    _check_special([backend.id_to_token(index) for index in range(len(SPECIAL))], source)
    try:
        found = backend.encode(STRANGE, add_special_tokens=False).ids
    except Exception as error:  # the library raises nothing narrower
        found = error
    unknown = SPECIAL.index(UNKNOWN)
    if isinstance(found, Exception) or unknown not in found:
        raise TokenizerError(
            f"A T5 tokenizer must read unknown characters as {UNKNOWN}, {unknown}. Received: "
            f"{found} in {source}"
        )


def _check_special(pieces: Sequence[str | None], source: str | Path) -> None:
    if (found := tuple(pieces[: len(SPECIAL)])) != SPECIAL:
        raise TokenizerError(
            f"A T5 vocabulary must begin with {', '.join(SPECIAL)}. Received: "
            f"{', '.join(map(str, found))} in {source}"
        )
