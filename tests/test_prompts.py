"""Weights in prompts and prompts of several chunks: the syntax, the pictures, and who takes them.

`parity/test_prompts` compares both with other people's code.
"""

import base64
import dataclasses
import io
import json
import logging
import shutil

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sd_tf.cli.main import main
from sd_tf.components.emphasis import emphasized
from sd_tf.runtime.call import Call
from sd_tf.runtime.manifest import FILE_NAME, ExportError, Manifest
from sd_tf.runtime.parameter import CallError
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.tokenizer.prompts import MOST_WEIGHT, encode, parse, tokenize
from tests.exports import MICRO, micro_export, micro_folder, once, pipeline_of
from tests.test_call import read

TOKENIZER = ClipTokenizer.clip()
PADDED = ClipTokenizer.clip(pad_token_id=0)  # SD2's: with "!"
START, END = TOKENIZER.start_token_id, TOKENIZER.end_token_id
MARKS = "()[]:\\.-10 BREAK"
DRAW = {"num_steps": 2, "seed": 1}


# The syntax


def runs(text):
    return [[(run.text, pytest.approx(run.weight)) for run in part] for part in parse(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", [("plain", 1)]),
        ("(word)", [("word", 1.1)]),
        ("[word]", [("word", 1 / 1.1)]),
        ("(word:1.3)", [("word", 1.3)]),
        ("( word : 1.3 )", [(" word ", 1.3)]),
        ("(word:-.5)", [("word", -0.5)]),
        ("((a) b)", [("a", 1.21), (" b", 1.1)]),
        ("([a])", [("a", 1)]),
        ("(a [b:1.5) c]", [("a ", 1.5), ("b", 1.5 / 1.1), (" c", 1 / 1.1)]),
        (r"\(a\) \[b\] \\", [(r"(a) [b] \ "[:-1], 1)]),
        (r"C:\d", [("C:d", 1)]),
        ("(a", [("a", 1.1)]),
        ("[a (b", [("a ", 1 / 1.1), ("b", 1)]),
        ("a) b]", [("a) b]", 1)]),
        ("(a:b)", [("a:b", 1.1)]),
        ("(a:1.2.3)", [("a:1.2.3", 1.1)]),
        ("a:1.5)", [("a:1.5)", 1)]),
        ("(a)(b)", [("ab", 1.1)]),
        ("un(necess)ary", [("un", 1), ("necess", 1.1), ("ary", 1)]),
        ("(a:999999)", [("a", MOST_WEIGHT)]),
        ("", []),
    ],
)
def test_weights(text, expected):
    assert runs(text) == [expected]


def test_break():
    assert runs("a BREAK (b)") == [[("a ", 1)], [(" ", 1), ("b", 1.1)]]
    assert runs("(a BREAK b)") == [[("a ", 1.1)], [(" b", 1.1)]]
    assert runs("BREAK") == [[], []]
    assert runs("BREAKS BREAK_ break") == [[("BREAKS BREAK_ break", 1)]]


@settings(max_examples=300, deadline=None)
@given(
    st.text(
        st.characters(exclude_categories=["Cs"]) | st.sampled_from("()[]:\\.-10 BREAK"),
        max_size=200,
    )
)
def test_any_text_is_a_prompt(text):
    for chunks in (1, 2):
        encoding = encode(TOKENIZER, text, chunks, weighted=True)
        assert len(encoding.ids) == len(encoding.weights) == 77 * chunks
        assert encoding.ids[::77] == (START,) * chunks and encoding.weights[::77] == (1.0,) * chunks
        assert np.isfinite(np.array(encoding.weights, "float32")).all()


def test_deep_brackets():
    for text in ("(" * 5000 + "a", "[" * 5000 + "a", "(" * 2500 + "a" + ":9)" * 2500):
        weights = encode(TOKENIZER, text, weighted=True).weights
        assert min(weights) >= 0 and max(weights) <= MOST_WEIGHT


# Chunks


NAMES = {TOKENIZER.token_id(f"{word}</w>"): word for word in "a b break cat dog bird ,".split()}


def words(encoding):
    """Return the words of each chunk."""
    chunks = np.reshape(encoding.ids, (-1, 77)).tolist()
    assert all(ids[0] == START for ids in chunks)
    return [[NAMES[one] for one in ids[1 : ids.index(END)]] for ids in chunks]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=400) | st.sampled_from(["word " * 75, "word " * 76, "word " * 300]))
def test_one_plain_chunk_is_what_the_tokenizer_gives(text):
    for tokenizer in (TOKENIZER, PADDED):
        expected, found = tokenizer.encode(text), encode(tokenizer, text)
        assert (found.ids, found.cut) == (expected.ids, expected.cut)
        assert set(found.weights) == {1.0}


def test_long_prompts():
    text = "cat " * 75 + "dog " * 75 + "bird"
    for weighted in (False, True):
        one, two, three = (encode(TOKENIZER, text, chunks, weighted) for chunks in (1, 2, 4))
        assert words(one) == [["cat"] * 75]
        assert words(two) == [["cat"] * 75, ["dog"] * 75]
        assert words(three) == [["cat"] * 75, ["dog"] * 75, ["bird"], []]
        assert (one.cut, two.cut, three.cut) == ("dog " * 75 + "bird", "bird", "")


def test_weights_go_with_their_tokens():
    found = encode(TOKENIZER, "(cat:2) " * 76, 2, weighted=True)
    assert found.weights == (1.0, *[2.0] * 75, 1.0, 1.0, 2.0, *[1.0] * 75)
    found = encode(TOKENIZER, "(cat:2) BREAK [dog]", 2, weighted=True)
    assert found.weights == (1.0, 2.0, *[1.0] * 76, pytest.approx(1 / 1.1), *[1.0] * 75)


def test_a_break_fills_the_chunk():
    assert words(encode(TOKENIZER, "a BREAK b", 3, weighted=True)) == [["a"], ["b"], []]
    assert words(encode(TOKENIZER, "BREAK a BREAK", 3, weighted=True)) == [[], ["a"], []]
    assert words(encode(TOKENIZER, "a BREAK b", 2)) == [["a", "break", "b"], []]
    found = encode(TOKENIZER, "(a) BREAK b (c:2) BREAK d", 1, weighted=True)
    assert found.cut == "b c BREAK d"


def test_what_follows_a_comma_moves_on_together():
    """They do if the chunk ends within 20 tokens of the comma, unless it is the last chunk."""

    def lengths(text, chunks, weighted=True):
        return [len(chunk) for chunk in words(encode(TOKENIZER, text, chunks, weighted))]

    near, far = "cat " * 60 + ", " + "dog " * 40, "cat " * 54 + ", " + "dog " * 40
    assert lengths(near, 2) == [61, 40]
    assert lengths(far, 2) == [75, 20]
    assert lengths(near, 1) == [75]
    assert lengths(near, 2, weighted=False) == [75, 26]
    assert lengths("cat " * 75 + ", dog", 2) == [75, 2]


def test_what_is_cut_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        tokenize(TOKENIZER, ["word " * 75, "(word) " * 75 + "BREAK (end:2)"], 1, weighted=True)
        tokenize(TOKENIZER, ["word " * 151], 2, weighted=False)
    assert [record.getMessage() for record in caplog.records] == [
        "The prompt is longer than 77 tokens; this part of it was cut: 'end'",
        "The prompt is longer than 154 tokens; this part of it was cut: 'word '",
    ]


# The contexts


@pytest.mark.backend
def test_a_mean_of_rounding_alone_is_not_restored():
    """What a norm that only normalizes gives: each row's mean is 0, up to rounding."""
    context = np.random.default_rng(0).standard_normal((2, 77, 64)).astype("float32")
    context -= context.mean(axis=-1, keepdims=True)
    weights = np.random.default_rng(1).uniform(0.5, 1.5, (2, 77)).astype("float32")
    found = keras.ops.convert_to_numpy(emphasized(keras.ops.convert_to_tensor(context), weights))
    np.testing.assert_allclose(found, context * weights[..., None], rtol=1e-6)


# The pictures


@once
def two_chunks(folder):
    """The micro checkpoint with room for two chunks; on TensorFlow an export."""
    from sd_tf.export import ExportOptions, export
    from sd_tf.weights import open_checkpoint

    options = ExportOptions(verify="off", prompt_chunks=2, **MICRO)
    export(open_checkpoint(micro_folder()), folder, options)


@pytest.fixture(scope="module", params=[1, 2], ids=["one chunk", "two chunks"])
def pipe(request):
    """A pipeline of the micro checkpoint on this backend."""
    if keras.backend.backend() == "jax":
        from sd_tf.jax import JaxPipeline, make_mesh

        return JaxPipeline.from_checkpoint(
            micro_folder(), make_mesh(), "float32", prompt_chunks=request.param, **MICRO
        )
    from sd_tf.runtime.pipeline import Pipeline

    folder = micro_export() if request.param == 1 else two_chunks()
    return Pipeline.load(folder, jit_compile=False)


@pytest.mark.backend
def test_pictures(pipe):
    def draw(*prompts, syntax="weighted"):
        return pipe(*prompts, prompt_syntax=syntax, **DRAW).images

    plain = draw("a cat, a dog", syntax="plain")
    assert np.array_equal(plain, pipe("a cat, a dog", **DRAW).images)
    assert np.array_equal(plain, draw("a cat, a (dog:1.0)"))
    assert not np.array_equal(plain, draw("a cat, a (dog:1.9)"))
    assert not np.array_equal(plain, draw("a cat, a (dog:1.9)", syntax="plain"))
    negative = draw("a cat", "a dog")
    assert np.array_equal(negative, draw("a cat", "a dog", syntax="plain"))
    assert not np.array_equal(negative, draw("a cat", "a (dog:1.9)"))


@pytest.mark.backend
@pytest.mark.parametrize("syntax", ["plain", "weighted"])
def test_pictures_of_long_prompts(pipe, syntax):
    chunks = pipe.manifest.prompt_chunks
    first, second, third = "cat " * 75, "dog " * 75, "bird " * 75
    ours = pipe([first, first + second, first + second + third], prompt_syntax=syntax, **DRAW)
    same = pipe([first] * 3, prompt_syntax=syntax, **DRAW).images
    differs = [not np.array_equal(*both) for both in zip(ours.images, same, strict=True)]
    assert differs == [False, chunks == 2, chunks == 2]
    assert np.array_equal(
        ours.images[2], pipe(first + second, prompt_syntax=syntax, num_steps=2, seed=3).images[0]
    )


# Who takes them


def test_an_export_of_an_older_sd_tf(tmp_path):
    """It has one chunk, and refuses weights before anything runs."""
    content = json.loads((micro_export() / FILE_NAME).read_text())
    content |= {"format_version": 4, "batch_size": 2, "latent_shape": [8, 8, 4]}
    content |= {"height": 16, "width": 16}
    del content["prompt_chunks"], content["shapes"]
    encoder = content["components"]["text_encoder"]
    encoder["signatures"].remove("weighted")
    (tmp_path / FILE_NAME).write_text(json.dumps(content))
    older = Manifest.read(tmp_path)
    assert older.prompt_chunks == 1 and older.shapes == Manifest.read(micro_export()).shapes
    assert read("a (cat:1.3)", by=older).shared.prompt_syntax == "plain"
    with pytest.raises(ExportError, match=r"no weights: SD3's .* an older sd_tf, .* made again"):
        read("a (cat:1.3)", by=older, prompt_syntax="weighted")


def test_a_wrong_syntax():
    with pytest.raises(CallError, match=r"prompt_syntax is one of plain, weighted. Received: 'x'"):
        read("a", prompt_syntax="x")
    assert read("a").shared.prompt_syntax == "plain"


def test_one_batch_has_one_syntax():
    plain, weighted = (Call("a", prompt_syntax=syntax) for syntax in ("plain", "weighted"))
    assert plain.alike() == Call("b", prompt_syntax="plain").alike() != weighted.alike()


def test_components_of_one_number_of_chunks(tmp_path):
    """Others than the text encoder keep it; a diffusion model of another one does not fit."""
    from sd_tf.export import ExportOptions, export
    from sd_tf.weights import open_checkpoint

    copy = shutil.copytree(two_chunks(), tmp_path / "copy")
    checkpoint = open_checkpoint(micro_folder())
    options = ExportOptions(verify="off", components=("decoder",), **MICRO)
    assert export(checkpoint, copy, options).prompt_chunks == 2
    options = dataclasses.replace(options, components=("diffusion_model",))
    with pytest.raises(ExportError, match=r"must give what the diffusion_model takes.*154"):
        export(checkpoint, copy, options)


def test_the_command_line(tmp_path):
    flags = ["--export_dir", str(micro_export()), "--out", str(tmp_path), "--nojit_compile"]
    flags += ["--num_steps", "2", "--seed", "1"]
    assert main(["generate", "a (cat:1.9)", *flags, "--prompt_syntax", "weighted"]) == 0
    (written,) = tmp_path.glob("*.png")
    parameters = json.loads(Image.open(written).text["sd_tf"])
    assert parameters["prompt_syntax"] == "weighted"


def test_http():
    """A request names the syntax; its picture is the pipeline's, and says so."""
    from tests.fronts import running_front
    from tests.test_serving_front import posted

    body = {"prompt": "a (cat:1.9)", **DRAW}
    with running_front() as front:
        status, content = posted(front, {**body, "prompt_syntax": "weighted"})
        refused = posted(front, {**body, "prompt_syntax": "other"})
    assert status == 200, content
    file = io.BytesIO(base64.b64decode(content["images"][0]["png"]))
    with Image.open(file) as picture:
        assert json.loads(picture.text["sd_tf"])["prompt_syntax"] == "weighted"
        found = np.asarray(picture)
    expected = pipeline_of(micro_export())("a (cat:1.9)", prompt_syntax="weighted", **DRAW)
    assert np.array_equal(found, expected.images[0])
    message = "prompt_syntax is one of plain, weighted. Received: 'other'"
    assert refused == (422, {"error": message})
