"""A small T5 vocabulary with the normalization of the releases'.

It is trained on captions and the licence, which do not change: a test knows its pieces.
"""

import functools
import io
from pathlib import Path

import sentencepiece

from sd_tf.tokenizer.t5 import T5Tokenizer
from sd_tf.training.world.captions import prompts

ROOT = Path(__file__).parent.parent
# Beside English: what the vocabulary should know some of, so that not all is unknown.
OTHER = ["naïve café Ångström über ñ ø ß", "日本語のテキスト 中文字符", "ж д и", "½ 2² ① ﬁ …"]


@functools.cache
def spiece_model() -> bytes:
    """Train a vocabulary of 500 pieces, as T5's was, in 0.1 s; return its file's content."""
    file = io.BytesIO()
    texts = [caption for caption, _ in prompts(400)]
    texts += (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines() + OTHER * 3
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=file,
        vocab_size=500,
        model_type="unigram",
        normalization_rule_name="nmt_nfkc",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return file.getvalue()


def small_t5(folder: Path, max_length: int = 64) -> T5Tokenizer:
    """Write the vocabulary's spiece.model to a folder, and read it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spiece.model").write_bytes(spiece_model())
    return T5Tokenizer.from_folder(folder, max_length)
