"""CLIP's byte-pair tokenizer: text → int32 ids of a fixed length.

Ids equal those of transformers' CLIPTokenizer, even in one surprising case: SD2 pads with "!",
which is therefore a special token and is recognised as such inside a prompt, too.
"""

import gzip
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from sd_tf.config import END_TOKEN, START_TOKEN
from sd_tf.files.objects import read_object
from sd_tf.tokenizer.added import Piece, Vectors, add_tokens, expanded, vectors_of
from sd_tf.tokenizer.disk import disk_errors
from sd_tf.tokenizer.errors import TokenizerError
from sd_tf.tokenizer.fixed import FixedLengthTokenizer, length_of, object_or_empty, read_backend

VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
START, END = "<|startoftext|>", "<|endoftext|>"
WORD_END = "</w>"
# Special tokens, contractions, runs of letters, single digits, runs of anything else.
WORDS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d"
    r"|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)


class ClipTokenizer(FixedLengthTokenizer):
    """Turns texts into ids of a fixed length: start token, text, end token, padding.

    An added token of several vectors becomes the ids of all of them, which `backend` does not know.
    """

    END = END

    def __init__(self, backend: Tokenizer, pad_token: str = END, max_length: int = 77):
        for token in (START, END, pad_token):
            if backend.token_to_id(token) is None:
                raise TokenizerError(f"The tokenizer's vocabulary has no token {token!r}.")
        backend.add_special_tokens([START, END, pad_token])
        super().__init__(backend, pad_token, max_length)
        self._vectors = vectors_of(backend)

    @classmethod
    def clip(cls, pad_token_id: int = END_TOKEN, max_length: int = 77) -> "ClipTokenizer":
        """Build the tokenizer of all Stable Diffusion releases from the packaged vocabulary."""
        backend = _clip_backend(*_shipped_vocabulary())
        return cls(backend, backend.id_to_token(pad_token_id), max_length)

    @classmethod
    def from_folder(cls, folder: str | Path, max_length: int | None = None) -> "ClipTokenizer":
        """Read a checkpoint's own tokenizer, with the tokens that textual inversion added to it.

        Args:
            max_length: None: that of tokenizer_config.json, or 77 if there is none.
        """
        folder = Path(folder)
        settings = {
            **object_or_empty(folder / "tokenizer_config.json"),
            **object_or_empty(folder / "special_tokens_map.json"),  # wins where the two disagree
        }
        if (folder / "tokenizer.json").is_file():
            backend = read_backend(folder / "tokenizer.json")
        else:
            backend = _read_vocabulary(folder)
            _add_tokens(backend, folder, settings)
        pad = settings.get("pad_token") or END
        pad = pad["content"] if isinstance(pad, dict) else pad
        if max_length is None:
            max_length = length_of(folder, settings, 77)
        return cls(backend, pad, max_length)

    def with_tokens(self, counts: Mapping[str, int]) -> "ClipTokenizer":
        """Return a tokenizer with further tokens, each with its number of vectors.

        Raises:
            TokenizerError: a token has white space, is known already, or would be read as a vector
                of another token.
        """
        backend = Tokenizer.from_str(self._backend.to_str())
        add_tokens(backend, counts)
        return ClipTokenizer(backend, self.pad_token, self.max_length)

    @property
    def vectors(self) -> Vectors:
        """The added tokens of several vectors: the first one's id → the ids of all."""
        return self._vectors

    @property
    def start_token_id(self) -> int:
        return self._backend.token_to_id(START)

    def _ids(self, text: str) -> tuple[list[int], list[int]]:
        pieces = self._pieces(text, add_special_tokens=True)
        return [piece.id for piece in pieces], [piece.start for piece in pieces]

    def token_id(self, token: str) -> int | None:
        """Return a token's id; None: the vocabulary has no such token."""
        return self._backend.token_to_id(token)

    def tokens(self, text: str) -> list[Piece]:
        """Return the ids of a text alone, however many, and where their tokens begin in it."""
        return self._pieces(text, add_special_tokens=False)

    def _pieces(self, text: str, add_special_tokens: bool) -> list[Piece]:
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return expanded(encoding.ids, [start for start, _ in encoding.offsets], self._vectors)

    def count(self, text: str) -> int:
        """Count a text's ids, those that are cut off included, start and end token not."""
        return len(self.tokens(text))

    def save(self, folder: str | Path) -> None:
        """Write the files that diffusers, transformers and `from_folder` read."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with disk_errors():
            self._backend.save(str(folder / "tokenizer.json"))
            # vocab.json, merges.txt and added_tokens.json, for older readers
            self._backend.model.save(str(folder))
        in_vocabulary = self._backend.get_vocab(with_added_tokens=False)
        added = {
            token.content: index
            for index, token in self._backend.get_added_tokens_decoder().items()
            if token.content not in in_vocabulary
        }
        if added:
            (folder / "added_tokens.json").write_text(json.dumps(added, indent=2))
        special = {
            "bos_token": START,
            "eos_token": END,
            "pad_token": self.pad_token,
            "unk_token": END,
        }
        settings = {
            **special,
            "model_max_length": self.max_length,
            "tokenizer_class": "CLIPTokenizer",
        }
        (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _clip_backend(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """Build a tokenizer with CLIP's rules from a vocabulary and its merges."""
    backend = Tokenizer(
        BPE(
            vocab=vocab,
            merges=merges,
            continuing_subword_prefix="",
            end_of_word_suffix=WORD_END,
            fuse_unk=False,
            unk_token=END,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.RobertaProcessing(
        (END, vocab.get(END, END_TOKEN)),
        (START, vocab.get(START, START_TOKEN)),
        trim_offsets=False,
        add_prefix_space=False,
    )
    return backend


def _shipped_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Read the packaged merges; the vocabulary is bytes, final bytes, merges, special tokens."""
    packed = resources.files("sd_tf").joinpath("data", VOCABULARY).read_bytes()
    lines = gzip.decompress(packed).decode("utf-8").split("\n")[1:]
    merge_count = START_TOKEN - 2 * 256
    merges = [tuple(line.split()) for line in lines[:merge_count]]
    alphabet = byte_alphabet().values()
    tokens = [*alphabet, *(char + WORD_END for char in alphabet)]
    tokens += ["".join(merge) for merge in merges] + [START, END]
    return {token: index for index, token in enumerate(tokens)}, merges


def byte_alphabet() -> dict[int, str]:
    """Return ByteLevel's character for each byte, in CLIP's order.

    Printable bytes stand for themselves and come first.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + n) for n, byte in enumerate(others)
    }


def _read_vocabulary(folder: Path) -> Tokenizer:
    vocab_file, merges_file = folder / "vocab.json", folder / "merges.txt"
    for file in (vocab_file, merges_file):
        if not file.is_file():
            raise TokenizerError(
                f"A tokenizer's folder must hold tokenizer.json, or vocab.json and merges.txt. "
                f"Missing: {file}"
            )
    vocab = read_object(vocab_file, TokenizerError)
    lines = merges_file.read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
    try:
        return _clip_backend(vocab, merges)
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(
            f"{vocab_file} and {merges_file} do not fit each other: {error}"
        ) from error


def _add_tokens(backend: Tokenizer, folder: Path, settings: dict) -> None:
    """Add the tokens beyond the vocabulary, each at its row of the checkpoint's embedding."""
    added = {
        entry["content"]: int(index)
        for index, entry in settings.get("added_tokens_decoder", {}).items()
    } | object_or_empty(folder / "added_tokens.json")
    for token, index in sorted(added.items(), key=lambda item: item[1]):
        if backend.token_to_id(token) is None:
            backend.add_tokens([AddedToken(token, normalized=True)])
        if backend.token_to_id(token) != index:
            raise TokenizerError(
                f"The added token {token!r} of {folder} must have id {index}, but the next free id "
                f"is {backend.token_to_id(token)}: tokens before it are missing."
            )
