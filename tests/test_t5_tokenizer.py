"""T5's tokenizer against transformers' and SentencePiece, and who gets it."""

import json
import logging
import random
import re
import struct
import unicodedata

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, T5TokenizerFast, TokenizersBackend

from sd_tf.config import FAMILIES, T5EncoderConfig
from sd_tf.errors import SdTfError
from sd_tf.files.tensors import CheckpointError
from sd_tf.runtime.chain import open_export
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.text_inputs import text_inputs
from sd_tf.tokenizer import ClipTokenizer, T5Tokenizer, TokenizerError, open_tokenizer
from sd_tf.tokenizer.spiece import Vocabulary, read_spiece
from sd_tf.tokenizer.t5 import unigram
from sd_tf.weights.checkpoint import Checkpoint
from tests.t5_tokenizers import small_t5, spiece_model
from tests.test_call import manifest
from tests.test_tokenizer import FIXED_TEXTS, varied_texts

LENGTH = 64
SPACES = "\t\n\v\f\r \x1c\x85\xa0\u1680\u2002\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
TEXTS = [
    "a </s> b</s>c <pad> <unk> <extra_id_0><extra_id_99> </S> < /s>",
    "▁ a▁b ▁▁ ▁a",
    "one two  three   four    ",
    *(f"a{space}b{space}{space}c{space}" for space in SPACES),
    # What the `tokenizers` library reads otherwise than SentencePiece: marks that combine.
    "ｶﾞ \u1100\u1161\u11a8 a\u0301\u0327 …\u0301a q\u0307\u0323",
    "Ａ Ⅷ ㎏ ㍿ ﷺ ℌ x² ½ ﬁ ｶ 각 \ufeff a",
    "word " * 300,
    " ".join(f"w{n}" for n in range(300)),
]


def mixed_texts(count):
    """Captions with anything between their words."""
    rng = random.Random(3)
    words = "a large red star on the background of it's 1,000 naïve 日本語 🙂 … </s>".split()
    for _ in range(count):
        parts = rng.choices(words, k=rng.randint(0, 40))
        yield "".join(word + rng.choice([" ", " ", "  ", "", rng.choice(SPACES)]) for word in parts)


def all_texts():
    return [*FIXED_TEXTS, *TEXTS, *varied_texts(1200), *mixed_texts(900)]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return small_t5(tmp_path_factory.mktemp("spiece"), LENGTH)


@pytest.fixture(scope="module")
def saved(ours, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    ours.save(folder)
    return folder


def expected(reference, texts, length=LENGTH):
    return reference(
        list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="np"
    ).input_ids


# The ids


def test_equals_transformers_on_the_files_that_it_saves(ours, saved):
    reference = AutoTokenizer.from_pretrained(saved)
    assert isinstance(reference, T5TokenizerFast)
    assert (reference.model_max_length, len(reference)) == (LENGTH, ours.vocab_size)
    texts = all_texts()
    ids = ours(texts)
    assert (ids.dtype, ids.shape) == (np.int32, (len(texts), LENGTH))
    assert len(texts) > 2000
    np.testing.assert_array_equal(ids, expected(reference, texts))
    np.testing.assert_array_equal(ids, T5Tokenizer.from_folder(saved)(texts))
    assert [ours.count(text) for text in texts] == [
        len(ids) - 1 for ids in reference(texts).input_ids
    ]


def test_equals_transformers_on_a_spiece_model(ours, tmp_path):
    (tmp_path / "spiece.model").write_bytes(spiece_model())
    reference = T5TokenizerFast.from_pretrained(tmp_path)
    assert len(reference) == ours.vocab_size == 600
    texts = all_texts()
    np.testing.assert_array_equal(ours(texts), expected(reference, texts))


def stands_alone(character):
    """Whether it forms no cluster with another: the `tokenizers` library loses some that do."""
    is_mark = unicodedata.category(character).startswith("M") or character in "\u200d\uff9e"
    is_jamo = "\u1100" <= character <= "\u11ff"
    return not (is_mark or is_jamo or "\U0001f3fb" <= character <= "\U0001f3ff")


def test_equals_sentencepiece(ours):
    reference = sentencepiece.SentencePieceProcessor(model_proto=spiece_model())
    special = re.compile(r"</?\w+>|\x85")  # tokens for us, and a space for us alone
    backend = ours.backend
    for text in all_texts():
        text = special.sub("", "".join(filter(stands_alone, text)))
        assert backend.encode(text, add_special_tokens=False).ids == reference.encode(text), text
        words = backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))
        normalized = reference.normalize(text).replace(" ", "▁")
        assert "".join(word for word, _ in words) == normalized


def test_reads_what_transformers_saves(ours, saved, tmp_path):
    reference = AutoTokenizer.from_pretrained(saved)
    reference(["a"], padding="max_length", truncation=True, max_length=9)  # leaves traces
    reference.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    assert stored["truncation"]["max_length"] == 9 and stored["padding"] is not None
    texts = all_texts()
    np.testing.assert_array_equal(T5Tokenizer.from_folder(tmp_path, LENGTH)(texts), ours(texts))


def test_a_tokenizer_json_is_taken_as_it_is(ours, tmp_path):
    """Releases of transformers before 5 wrote other rules for spaces."""
    backend = Tokenizer.from_str(ours.backend.to_str())
    more = [normalizers.Strip(left=False, right=True), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([backend.normalizer, *more])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    reference = TokenizersBackend(
        tokenizer_file=str(tmp_path / "tokenizer.json"), pad_token="<pad>", eos_token="</s>"
    )
    texts = all_texts()
    ids = T5Tokenizer.from_folder(tmp_path, LENGTH)(texts)
    np.testing.assert_array_equal(ids, expected(reference, texts))
    assert (ids != ours(texts)).any()


def test_special_tokens(ours):
    assert (ours.pad_token_id, ours.end_token_id, ours.pad_token) == (0, 1, "<pad>")
    assert ours("")[0].tolist() == [1] + [0] * 63
    assert ours("</s>")[0, :3].tolist() == [1, 1, 0]
    assert ours("\U0001f9ff")[0, 1] == 2  # unknown, behind the space
    assert ours("<extra_id_0>")[0, 0] == 599
    assert ours("<extra_id_99>")[0, 0] == 500


def test_truncation_keeps_the_end_token_and_says_what_was_cut(ours, caplog):
    text = " ".join(f"word{n}" for n in range(60))
    encoding = ours.encode(text)
    assert len(encoding.ids) == LENGTH and encoding.ids[-1] == 1
    kept = text.removesuffix(encoding.cut)
    assert kept != text and ours.encode(kept).cut == ""
    with caplog.at_level(logging.WARNING):
        ours("short")
        assert not caplog.records
        ours(text)
    assert caplog.messages == [
        f"The prompt is longer than 64 tokens; this part of it was cut: {encoding.cut!r}"
    ]


def test_what_fits_is_not_cut(ours):
    text = "a " * 63
    assert ours.count(text) == 63
    assert (ours.encode(text).cut, ours.encode(text).ids[-1]) == ("", 1)
    assert ours.encode(text + "a").cut == "a"


def test_lengths(ours, saved, tmp_path):
    assert T5Tokenizer.from_folder(saved).max_length == LENGTH
    assert T5Tokenizer.from_folder(saved, 256)("a").shape == (1, 256)
    assert ours.with_length(1)("a star").tolist() == [[1]]
    assert ours.max_length == LENGTH
    (tmp_path / "spiece.model").write_bytes(spiece_model())
    assert T5Tokenizer.from_folder(tmp_path).max_length == 512
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30}))
    assert T5Tokenizer.from_folder(tmp_path).max_length == 512
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": "long"}))
    rule = r"tokenizer_config\.json: model_max_length must be a number\. Received: 'long'"
    with pytest.raises(TokenizerError, match=rule):
        T5Tokenizer.from_folder(tmp_path)
    with pytest.raises(TokenizerError, match=r"max_length must be at least 1\. Received: 0"):
        ours.with_length(0)


# Files that are not T5's


def test_errors(tmp_path, ours):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json or spiece\.model\. Missing: .*json"):
        T5Tokenizer.from_folder(tmp_path)
    with pytest.raises(TypeError, match=r"A prompt must be a str\. Received: 3"):
        ours.encode(3)
    file = tmp_path / "tokenizer.json"
    file.write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read: "):
        T5Tokenizer.from_folder(tmp_path)
    Tokenizer(BPE()).save(str(file))
    with pytest.raises(TokenizerError, match=r"must be Unigram\. Received: BPE in .*/tokenizer\.j"):
        T5Tokenizer.from_folder(tmp_path)
    stored = json.loads(ours.backend.to_str())
    stored["model"]["vocab"][:2] = reversed(stored["model"]["vocab"][:2])
    file.write_text(json.dumps({**stored, "added_tokens": []}))
    rule = r"must begin with <pad>, </s>, <unk>\. Received: </s>, <pad>, <unk> in .*/tokenizer\.j"
    with pytest.raises(TokenizerError, match=rule):
        T5Tokenizer.from_folder(tmp_path)
    stored = json.loads(ours.backend.to_str())
    for unknown, found in ((None, "Encountered an unknown token.*"), (0, r"\[5, 0\]")):
        stored["model"]["unk_id"] = unknown
        file.write_text(json.dumps(stored))
        rule = rf"unknown characters as <unk>, 2\. Received: {found} in .*/tokenizer\.json"
        with pytest.raises(TokenizerError, match=rule):
            T5Tokenizer.from_folder(tmp_path)
    rule = r"begin with .*Received: a, <extra_id_99>, .* in the vocabulary"
    with pytest.raises(TokenizerError, match=rule):
        unigram(Vocabulary([("a", 0.0)], b""))


def message(number, value):
    """A field of a protobuf: a message, a text, a float or a whole number."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    return bytes([number << 3 | 2, len(value)]) + value


def piece(text, score=0.0, kind=1):
    return message(1, message(1, text.encode()) + message(2, score) + message(3, kind))


PIECES = piece("<pad>", kind=3) + piece("</s>", kind=3) + piece("<unk>", kind=2) + piece("a", -1.5)


def test_a_protobuf(tmp_path):
    """Fields that are not needed are skipped, whatever their wire type, and come in any order."""
    path = tmp_path / "spiece.model"
    unused = message(4, b"test") + bytes([9 << 3 | 1]) + bytes(8)
    trainer = message(2, message(3, 1) + message(1, b"texts") + message(7, 0.5))
    path.write_bytes(message(3, message(2, b"map")) + unused + PIECES + trainer)
    scores = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "a": -1.5}
    assert read_spiece(path) == Vocabulary(list(scores.items()), b"map")


BROKEN = [
    (b"", r"is not a SentencePiece model: it has no pieces\."),
    (b"\x0a", r"is not a SentencePiece model: "),
    (PIECES[:-1], r"is not a SentencePiece model: it ends within a field\."),
    (b"{}", r"is not a SentencePiece model: a field has the wire type 3\."),
    (b"\x0a\x02\x08\x01", r"is not a SentencePiece model: a field is int, not bytes\."),
    (b"\x08\x01", r"is not a SentencePiece model: a field is int, not bytes\."),
    (PIECES + message(3, message(2, b"map")), r"The charsmap of .*Cannot parse"),
    (PIECES + message(2, message(3, 2)), r"trainer_spec\.model_type must be 1\. Received: 2"),
    (PIECES + message(3, message(3, 0)), r"add_dummy_prefix must be 1\. Received: 0"),
    (PIECES + message(3, message(4, 0)), r"remove_extra_whitespaces must be 1\. Received: 0"),
    (PIECES + piece("b", kind=4), r"piece's type must be 1 \(normal\).* Received: 4 for 'b'"),
    (piece("a") + PIECES, r"must begin with <pad>, </s>, <unk>\. Received: a, <pad>, </s> in "),
]


@pytest.mark.parametrize(("content", "rule"), BROKEN)
def test_files_that_are_no_vocabulary_of_t5(tmp_path, content, rule):
    (tmp_path / "spiece.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=rule) as raised:
        T5Tokenizer.from_folder(tmp_path)
    assert str(tmp_path / "spiece.model") in str(raised.value)


def test_any_broken_byte_is_an_error_or_another_vocabulary(tmp_path):
    rng, path = random.Random(5), tmp_path / "spiece.model"
    settings = message(2, message(3, 1)) + message(3, message(3, 1) + message(2, b"map"))
    for _ in range(1000):
        broken = bytearray(PIECES + settings)
        broken[rng.randrange(len(broken))] = rng.randrange(256)
        path.write_bytes(broken)
        try:
            read_spiece(path)
        except SdTfError as error:
            assert str(path) in str(error)


# Who gets it


def test_open_tokenizer(ours, saved, tmp_path):
    clip, t5 = tmp_path / "clip", tmp_path / "t5"
    ClipTokenizer.clip().save(clip)
    small_t5(t5)
    for folder in (saved, t5):
        opened = open_tokenizer(folder, 32)
        assert isinstance(opened, T5Tokenizer) and opened.max_length == 32
    assert open_tokenizer(saved).max_length == LENGTH
    assert isinstance(open_tokenizer(clip), ClipTokenizer)
    assert open_tokenizer(clip).max_length == 77
    for name in ("vocab.json", "merges.txt"):  # as transformers 5 leaves it
        (clip / name).unlink()
    opened = open_tokenizer(clip, 20)
    assert isinstance(opened, ClipTokenizer) and opened("a").shape == (1, 20)
    with pytest.raises(TokenizerError, match=r"T5's spiece\.model\. Received: .*empty, which hold"):
        open_tokenizer(tmp_path / "empty")


def checkpoint(**tokenizers):
    encoder = T5EncoderConfig(max_length=20, vocab_size=600)
    config = FAMILIES["sd1"]
    config = type(config)(
        {**config.text_encoders, "text_encoder_2": encoder},
        *(config.denoiser, config.autoencoder, config.schedule),
    )
    readers = {name: lambda one=one: one for name, one in tokenizers.items()}
    return Checkpoint("tiny", "tiny/folder", "diffusers folder", config, {}, readers)


def test_a_checkpoint_gives_the_length_of_its_configuration(ours):
    found = checkpoint(text_encoder_2=ours).tokenizer("text_encoder_2")
    np.testing.assert_array_equal(found("a star"), ours.with_length(20)("a star"))
    assert isinstance(checkpoint().tokenizer("text_encoder"), ClipTokenizer)


def test_the_ids_of_no_text(ours):
    np.testing.assert_array_equal(ours.empty(LENGTH), ours(""))
    assert ours.empty(1).tolist() == [[1]]


def test_a_checkpoint_without_t5s_tokenizer(ours):
    with pytest.raises(CheckpointError, match=r"tiny/folder has no tokenizer for its text_encoder"):
        checkpoint().tokenizer("text_encoder_2")
    rule = r"for its text_encoder_2 must be a T5Tokenizer\. Received: a ClipTokenizer"
    with pytest.raises(CheckpointError, match=rule):
        checkpoint(text_encoder_2=ClipTokenizer.clip()).tokenizer("text_encoder_2")
    with pytest.raises(CheckpointError, match=r"must be a ClipTokenizer\. Received: a T5Tokenizer"):
        checkpoint(text_encoder=ours).tokenizer()
    pieces = ["<pad>", "</s>", "<unk>", *(f"p{n}" for n in range(600))]
    larger = unigram(Vocabulary([(piece, 0.0) for piece in pieces], b""))
    with pytest.raises(CheckpointError, match=r"has 703 tokens.*embeddings for 600"):
        checkpoint(text_encoder_2=T5Tokenizer(larger, 20)).tokenizer("text_encoder_2")


def test_an_export_opens_each_tokenizer_as_what_it_is(ours, tmp_path, monkeypatch):
    places = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
    ClipTokenizer.clip(pad_token_id=0).save(tmp_path / "tokenizer")
    ours.with_length(33).save(tmp_path / "tokenizer_2")
    known = manifest(tokenizers=places, prompt_chunks=1)
    monkeypatch.setattr(Manifest, "read", lambda folder: known)
    _, tokenizers = open_export(tmp_path)
    clip, t5 = tokenizers.values()
    assert tokenizers.keys() == places.keys()
    assert isinstance(clip, ClipTokenizer) and clip.pad_token == "!"
    np.testing.assert_array_equal(t5("a star"), ours.with_length(33)("a star"))


# The inputs of the text encoders


PROMPTS, NEGATIVES = ["a star", "a (red) ring"], ["", "blue"]
CLIP, PADDED = ClipTokenizer.clip(), ClipTokenizer.clip(pad_token_id=0)


@pytest.mark.parametrize("chunks", [1, 2])
def test_inputs_of_two_clips_and_t5(ours, chunks):
    by = manifest(prompt_chunks=chunks)
    inputs = text_inputs(by, [CLIP, PADDED, ours], PROMPTS, NEGATIVES)
    assert {name: value.shape for name, value in inputs.items()} == {
        "tokens": (2, 2, 77 * chunks),
        "t5_tokens": (2, LENGTH),
        "negative_tokens": (2, 2, 77 * chunks),
        "negative_t5_tokens": (2, LENGTH),
    }
    assert {str(value.dtype) for value in inputs.values()} == {"int32"}
    np.testing.assert_array_equal(inputs["t5_tokens"], ours(PROMPTS))
    np.testing.assert_array_equal(inputs["negative_t5_tokens"], ours(NEGATIVES))
    np.testing.assert_array_equal(inputs["tokens"][:, 0, :77], CLIP(PROMPTS))
    np.testing.assert_array_equal(inputs["tokens"][:, 1, :77], PADDED(PROMPTS))
    np.testing.assert_array_equal(inputs["negative_tokens"][:, 1, :77], PADDED(NEGATIVES))


def test_inputs_of_one_clip_and_t5(ours):
    inputs = text_inputs(manifest(prompt_chunks=1), [CLIP, ours], PROMPTS)
    assert {name: value.shape for name, value in inputs.items()} == {
        "tokens": (2, 77),
        "t5_tokens": (2, LENGTH),
    }


def test_inputs_of_clip_alone():
    inputs = text_inputs(manifest(prompt_chunks=1), [CLIP], PROMPTS, weighted=True)
    assert {name: value.shape for name, value in inputs.items()} == dict.fromkeys(
        ("tokens", "negative_tokens", "token_weights", "negative_token_weights"), (2, 77)
    )


def test_weights_are_for_clip(ours):
    rule = r"Weights are for pipelines whose text encoders are all CLIP\."
    with pytest.raises(ValueError, match=rule):
        text_inputs(manifest(prompt_chunks=1), [CLIP, ours], PROMPTS, weighted=True)
