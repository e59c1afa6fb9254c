"""The tokenizer against transformers' CLIPTokenizer."""

import json
import logging
import random

import numpy as np
import pytest
from transformers import CLIPTokenizer

from sd_tf.config import END_TOKEN, START_TOKEN
from sd_tf.tokenizer.clip import ClipTokenizer, TokenizerError

FIXED_TEXTS = [
    "",
    " ",
    "\t \n",
    "a photo of an astronaut riding a horse on mars",
    "A PHOTO, of an Astronaut!!!",
    "it's we'll they've I'm you'd don't 'round 'tis '90s",
    "1234567890 3.14159 10,000 2nd ½ ² ٣ 四",
    "naïve café Ångström ﬁancé e\u0301 é İstanbul ǅ ß ẞ",
    "日本語のテキスト 中文字符 한국어 ไทย हिन्दी العربية עברית",
    "🙂🙃 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ❤️ ⭐",
    "semi;colon:dash—en–dash…ellipsis “quotes” ‘single’ «guillemets»",
    "tabs\tand\nnewlines\r\nand\u00a0nbsp\u3000ideographic\u200bzero\u200dwidth",
    "email@example.com https://example.com/a_b?c=d&e=f#g C:\\path\\file",
    "<|startoftext|> inside <|endoftext|> a prompt <|endoftext|>",
    "hello! hello ! !hello! !!",
    "(masterpiece:1.2), [ugly], {a|b}, <lora:x:0.8>",
    "under_score CamelCase snake-case x²+y²=z² a/b\\c ~`^°",
    "word " * 300,
    "!" * 200,
    "🙂" * 60,
    "antidisestablishmentarianism" * 20,
    "\x00control\x07characters\x1b[0m \ufeffbom \ufffd",
]


def varied_texts(count):
    rng = random.Random(7)
    pieces = [
        "a", "the", "red", "Cat", "isn't", "we've", "3", "42", "2024", ",", ".", "!", "?!", "…",
        "-", "—", "/", "\n", "\t", "  ", "é", "ü", "ñ", "ø", "Ω", "ж", "漢", "字", "🎨", "🚀",
        "👍🏽", "portrait", "of", "photorealistic", "8k", "#tag", "@user", "'quoted'", "\u0301",
        "\u200d",
    ]  # fmt: skip
    ranges = [(0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x52F), (0x4E00, 0x4FFF), (0x1F300, 0x1F6FF)]
    for _ in range(count // 2):
        yield rng.choice(["", " "]).join(rng.choices(pieces, k=rng.randint(1, 90)))
    for _ in range(count - count // 2):
        low, high = rng.choice(ranges)
        yield "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 60)))


@pytest.fixture(scope="module", params=["<|endoftext|>", "!"], ids=["sd1", "sd2"])
def both(request, tmp_path_factory):
    """transformers' tokenizer made from our files, and ours with the same padding."""
    folder = tmp_path_factory.mktemp("tokenizer")
    ClipTokenizer.clip().save(folder)
    (folder / "tokenizer.json").unlink()  # leaves it to transformers to build the rules
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, "pad_token": request.param}))
    reference = CLIPTokenizer.from_pretrained(folder)
    return reference, ClipTokenizer.clip(reference.pad_token_id)


def expected(reference, texts):
    return reference(
        list(texts), padding="max_length", truncation=True, max_length=77, return_tensors="np"
    ).input_ids


def test_equals_transformers(both):
    reference, ours = both
    texts = [*FIXED_TEXTS, *varied_texts(600)]
    ids = ours(texts)
    assert ids.dtype == np.int32
    assert ids.shape == (len(texts), 77)
    np.testing.assert_array_equal(ids, expected(reference, texts))


def test_counts_are_those_of_transformers(both):
    reference, ours = both
    lengths = [len(ids) - 2 for ids in reference(FIXED_TEXTS).input_ids]
    assert [ours.count(text) for text in FIXED_TEXTS] == lengths


def test_golden():
    ids = ClipTokenizer.clip()("a caterpillar smoking a hookah while sitting on a mushroom")[0]
    assert ids[:5].tolist() == [START_TOKEN, 320, 27111, 9038, 320]
    assert ids[-1] == END_TOKEN
    assert ClipTokenizer.clip().vocab_size == 49408


def test_padding_conventions():
    assert ClipTokenizer.clip(END_TOKEN)("")[0].tolist() == [START_TOKEN] + [END_TOKEN] * 76
    assert ClipTokenizer.clip(0)("")[0].tolist() == [START_TOKEN, END_TOKEN] + [0] * 75


def test_truncation_keeps_the_end_token_and_says_what_was_cut(caplog):
    words = [f"word{n}" for n in range(60)]
    tokenizer = ClipTokenizer.clip()
    encoding = tokenizer.encode(" ".join(words))
    assert len(encoding.ids) == 77
    assert encoding.ids[-1] == END_TOKEN
    kept = " ".join(words).removesuffix(encoding.cut)
    assert tokenizer.encode(kept).cut == ""
    assert tokenizer.encode(kept).ids == encoding.ids
    with caplog.at_level(logging.WARNING):
        tokenizer("short")
        assert not caplog.records
        tokenizer(" ".join(words))
    assert caplog.messages == [
        f"The prompt is longer than 77 tokens; this part of it was cut: {encoding.cut!r}"
    ]


def test_exactly_77_tokens_are_not_cut():
    encoding = ClipTokenizer.clip().encode("cat " * 75)
    assert encoding.cut == ""
    assert encoding.ids[-1] == END_TOKEN and encoding.ids[-2] == encoding.ids[1]
    assert ClipTokenizer.clip().encode("cat " * 76).cut == "cat "


@pytest.mark.parametrize("layout", ["tokenizer.json", "vocab.json"])
def test_reads_a_folder_with_added_tokens(tmp_path, layout):
    """As transformers and textual inversion leave it: a new token behind the vocabulary."""
    ClipTokenizer.clip().save(tmp_path / "base")
    reference = CLIPTokenizer.from_pretrained(tmp_path / "base")
    reference.add_tokens(["<Cat-Toy>", "<style-1>"])
    if layout == "tokenizer.json":
        folder = tmp_path / "saved"
        reference.save_pretrained(folder)
    else:
        folder = tmp_path / "base"
        (folder / "tokenizer.json").unlink()
        added = {"<Cat-Toy>": 49408, "<style-1>": 49409}
        (folder / "added_tokens.json").write_text(json.dumps(added))
    ours = ClipTokenizer.from_folder(folder)
    texts = ["a <Cat-Toy> in <style-1>", "<cat-toy><Style-1>", "<cat-to y>", "plain"]
    np.testing.assert_array_equal(ours(texts), expected(reference, texts))
    assert ours(texts)[0, 2] == 49408
    assert ours.vocab_size == 49410
    ours.save(tmp_path / "again")
    np.testing.assert_array_equal(
        ClipTokenizer.from_folder(tmp_path / "again")(texts), expected(reference, texts)
    )


def test_special_tokens_map_wins_over_the_tokenizer_config(tmp_path):
    ClipTokenizer.clip(pad_token_id=0).save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["pad_token"] = "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert CLIPTokenizer.from_pretrained(tmp_path).pad_token_id == 0
    assert ClipTokenizer.from_folder(tmp_path).pad_token_id == 0


def test_errors(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer.json, or vocab.json and merges.txt"):
        ClipTokenizer.from_folder(tmp_path)
    ClipTokenizer.clip().save(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer.json cannot be read"):
        ClipTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<late>": 49500}))
    with pytest.raises(TokenizerError, match=r"'<late>'.* must have id 49500.*is 49408"):
        ClipTokenizer.from_folder(tmp_path)
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"must hold a JSON object. Received: list"):
        ClipTokenizer.from_folder(tmp_path)
    with pytest.raises(TypeError, match=r"A prompt must be a str\. Received: 3"):
        ClipTokenizer.clip().encode(3)


def test_what_cannot_be_written_is_pythons_error(tmp_path):
    """The library raises a plain Exception."""
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(IsADirectoryError):
        ClipTokenizer.clip().save(tmp_path)
