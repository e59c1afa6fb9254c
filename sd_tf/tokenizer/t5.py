"""T5's Unigram tokenizer: text → int32 ids of a fixed length, the same as transformers'.

The ids are the text's, an end token and padding; there is no start token.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram

from sd_tf.files.objects import read_object
from sd_tf.tokenizer.clip import Encoding, warn_of_cut
from sd_tf.tokenizer.errors import TokenizerError
from sd_tf.tokenizer.spiece import Vocabulary, read_spiece

SPECIAL = PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # a vocabulary begins with them
EXTRA_IDS = 100  # behind the pieces of a spiece.model
SPACE = "▁"
STRANGE = "\ue000"  # a character for private use, which no vocabulary has
MAX_LENGTH = 512  # where a tokenizer's files set no limit


class T5Tokenizer:
    """Turns texts into ids of a fixed length: text, end token, padding."""

    def __init__(self, backend: Tokenizer, max_length: int, source: str | Path = "the tokenizer"):
        """Take a tokenizer of the `tokenizers` library; `source` is what errors call it."""
        _check(backend, source)
        if max_length < 1:
            raise TokenizerError(f"max_length must be at least 1. Received: {max_length}")
        backend.no_truncation()
        backend.no_padding()
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_special_tokens([token for token in SPECIAL if token not in known])
        self._backend = backend
        self.pad_token = PAD
        self.max_length = max_length

    @classmethod
    def from_folder(cls, folder: str | Path, max_length: int | None = None) -> "T5Tokenizer":
        """Read a checkpoint's tokenizer: tokenizer.json, or else spiece.model.

        Args:
            max_length: None: that of tokenizer_config.json, or 512 if there is none.
        """
        folder = Path(folder)
        file, spiece = folder / "tokenizer.json", folder / "spiece.model"
        if file.is_file():
            try:
                backend = Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises nothing narrower
                raise TokenizerError(f"{file} cannot be read: {error}") from error
        elif spiece.is_file():
            file, backend = spiece, unigram(read_spiece(spiece), spiece)
        else:
            raise TokenizerError(
                f"The folder of a T5 tokenizer must hold tokenizer.json or spiece.model. "
                f"Missing: {file}"
            )
        return cls(backend, _length(folder) if max_length is None else max_length, file)

    def with_length(self, max_length: int) -> "T5Tokenizer":
        """Return the tokenizer with another fixed length."""
        return T5Tokenizer(self._backend, max_length)

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer of the `tokenizers` library."""
        return self._backend

    @property
    def end_token_id(self) -> int:
        return self._backend.token_to_id(END)

    @property
    def pad_token_id(self) -> int:
        return self._backend.token_to_id(PAD)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> Encoding:
        """Encode one text; ids beyond the fixed length are cut off before the end token."""
        if not isinstance(text, str):
            raise TypeError(f"A prompt must be a str. Received: {text!r}")
        encoding = self._backend.encode(text, add_special_tokens=False)
        most = self.max_length - 1
        cut = text[encoding.offsets[most][0] :] if len(encoding.ids) > most else ""
        ids = [*encoding.ids[:most], self.end_token_id]
        padding = [self.pad_token_id] * (self.max_length - len(ids))
        return Encoding((*ids, *padding), cut)

    def count(self, text: str) -> int:
        """Count a text's ids, those that are cut off included, the end token not."""
        return len(self._backend.encode(text, add_special_tokens=False).ids)

    def __call__(self, texts: str | Sequence[str]) -> np.ndarray:
        """Encode one text or several → int32 (N, max_length); log a warning for what is cut off."""
        texts = [texts] if isinstance(texts, str) else texts
        encodings = [self.encode(text) for text in texts]
        for encoding in encodings:
            warn_of_cut(encoding.cut, self.max_length)
        return np.array([e.ids for e in encodings], "int32").reshape(-1, self.max_length)

    def save(self, folder: str | Path) -> None:
        """Write the files that diffusers, transformers and `from_folder` read."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
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


def _length(folder: Path) -> int:
    """Return the length that the settings limit texts to.

    Transformers writes a huge number for no limit.
    """
    file = folder / "tokenizer_config.json"
    settings = read_object(file, TokenizerError) if file.is_file() else {}
    length = settings.get("model_max_length", MAX_LENGTH)
    if not isinstance(length, int | float):
        raise TokenizerError(f"{file}: model_max_length must be a number. Received: {length!r}")
    return length if length <= 10_000 else MAX_LENGTH
