"""Open a folder of tokenizer files as what it is: CLIP's or T5's."""

from pathlib import Path

from sd_tf.files.objects import read_object
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.tokenizer.errors import TokenizerError
from sd_tf.tokenizer.t5 import T5Tokenizer

Tokenizer = ClipTokenizer | T5Tokenizer


def open_tokenizer(folder: str | Path, max_length: int | None = None) -> Tokenizer:
    """Open a tokenizer; its files tell which.

    Args:
        max_length: the fixed length of a text; None: that of the folder's tokenizer_config.json.
    """
    folder = Path(folder)
    kind = T5Tokenizer if _is_t5(folder) else ClipTokenizer
    return kind.from_folder(folder, max_length)


def _is_t5(folder: Path) -> bool:
    if (folder / "merges.txt").is_file():
        return False
    file = folder / "tokenizer.json"
    if file.is_file():
        # A Unigram's vocabulary is a list of pieces and scores, all others are objects.
        model = read_object(file, TokenizerError).get("model")
        return isinstance(model, dict) and isinstance(model.get("vocab"), list)
    if (folder / "spiece.model").is_file():
        return True
    raise TokenizerError(
        f"A tokenizer's folder must hold tokenizer.json, CLIP's vocab.json and merges.txt, or T5's "
        f"spiece.model. Received: {folder}, which holds none of them."
    )
