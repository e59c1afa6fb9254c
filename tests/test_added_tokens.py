"""Tokens that stand for several vectors, in the tokenizer and in its graph, against diffusers."""

import logging
import random

import numpy as np
import pytest
import tensorflow as tf
from diffusers.loaders import TextualInversionLoaderMixin
from transformers import CLIPTokenizer

from sd_tf.export.tokenizer import GraphTokenizer
from sd_tf.tokenizer.clip import ClipTokenizer, TokenizerError
from sd_tf.tokenizer.prompts import encode, tokenize
from sd_tf.tokenizer.tables import tables_of
from tests.test_graph_tokenizer import CORE_OPERATIONS
from tests.test_tokenizer import expected, varied_texts

# Numbers of vectors. Diffusers replaces texts, so that no name may be a part of another.
COUNTS = {"<cat>": 4, "toy-x": 1, "é!": 3, "<Style>": 2, "zqxj": 9}
IDS = dict(zip(COUNTS, np.cumsum([49408, 4, 1, 3, 2]).tolist(), strict=True))
PIECES = [*COUNTS, "a photo", "s", " ", ",", "'s", "!", "8", "\n", "<", "_1", "é", "(", "漢"]


@pytest.fixture(scope="module")
def ours():
    return ClipTokenizer.clip().with_tokens(COUNTS)


@pytest.fixture(scope="module")
def folder(ours, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    ours.save(folder)
    return folder


def prompts(count, seed=5, pieces=PIECES):
    """Prompts that are full of tokens: in words, beside punctuation, and up to twice too long."""
    rng = random.Random(seed)
    return ["".join(rng.choices(pieces, k=rng.randint(0, 60))) for _ in range(count)]


def converted(reference, texts):
    """The ids that diffusers' pipelines give to a text encoder."""
    loader = TextualInversionLoaderMixin()
    return expected(reference, loader.maybe_convert_prompt(list(texts), reference))


def vectors(token, count=None):
    return list(range(IDS[token], IDS[token] + (count or COUNTS[token])))


def test_ids_are_those_of_diffusers(ours, folder):
    reference = CLIPTokenizer.from_pretrained(folder)
    # Diffusers replaces what it finds in the prompt, which has to be spelled as the token is, and
    # in lower case.
    pieces = [piece for piece in PIECES if piece not in ("<Style>", "_1", "é", "!")]
    texts = [*prompts(300, pieces=pieces), *varied_texts(50)]
    ids = ours(texts)
    np.testing.assert_array_equal(ids, converted(reference, texts))
    assert (ids[:300, -2] > 49407).sum() > 20, "vectors that are cut"
    torn = [row for row in ids if row[-2] in vectors("zqxj")[:-1]]
    assert torn, "a token's vectors that are cut in the middle"


def test_any_spelling_is_expanded_where_diffusers_has_the_first_vector_alone(ours, folder):
    reference = CLIPTokenizer.from_pretrained(folder)
    for text, token in (("<CAT>", "<cat>"), ("<Style>", "<Style>"), ("<style>", "<Style>")):
        assert ours(text)[0, 1 : 2 + COUNTS[token]].tolist() == [*vectors(token), 49407]
        assert converted(reference, [text])[0, 1:3].tolist() == [IDS[token], 49407]


def test_a_prompt_that_was_expanded_already_stays(ours, folder):
    reference = CLIPTokenizer.from_pretrained(folder)
    text = "a <cat> <cat>_1 <cat>_2 <cat>_3 here"
    assert TextualInversionLoaderMixin().maybe_convert_prompt("a <cat> here", reference) == text
    np.testing.assert_array_equal(ours(text), expected(reference, [text]))
    np.testing.assert_array_equal(ours("a <cat> here"), ours(text))
    assert ours("<cat>_2")[0, 1:3].tolist() == [IDS["<cat>"] + 2, 49407]


def test_a_folder_of_diffusers_expands(folder, tmp_path):
    """Tokens that `load_textual_inversion` adds, and `save_pretrained` saves."""
    ClipTokenizer.clip().save(tmp_path / "clip")
    reference = CLIPTokenizer.from_pretrained(tmp_path / "clip")
    reference.add_tokens([*(f"<cat>{end}" for end in ("", "_1", "_2", "_3")), "<alone>_1"])
    reference.save_pretrained(tmp_path / "saved")
    theirs = ClipTokenizer.from_folder(tmp_path / "saved")
    assert theirs.vectors == {49408: (49408, 49409, 49410, 49411)}
    assert theirs.tokens("<cat>")[3] == (49411, 0, 3)
    np.testing.assert_array_equal(theirs(["<cat> cat"]), converted(reference, ["<cat> cat"]))


@pytest.mark.parametrize("reader", ["tokenizer.json", "added_tokens.json"])
def test_saved_tokens_are_read(ours, folder, tmp_path, reader):
    ours.save(tmp_path)
    if reader == "added_tokens.json":
        (tmp_path / "tokenizer.json").unlink()
    again = ClipTokenizer.from_folder(tmp_path)
    assert again.vectors == ours.vectors and again.vocab_size == 49408 + sum(COUNTS.values())
    texts = prompts(50)
    np.testing.assert_array_equal(again(texts), ours(texts))
    reference = CLIPTokenizer.from_pretrained(folder)
    assert len(reference) == again.vocab_size
    assert reference.convert_tokens_to_ids(["<cat>", "<cat>_3", "<Style>_1"]) == [
        *(IDS["<cat>"], IDS["<cat>"] + 3, IDS["<Style>"] + 1)
    ]


def test_counts_and_what_is_cut(ours, caplog):
    assert ours.count("a <cat>s zqxj") == 1 + 4 + 1 + 9
    text = "word " * 70 + "zqxj, and more"
    for ids, cut in (
        (ours.encode(text).ids, ours.encode(text).cut),
        (encode(ours, text).ids, encode(ours, text).cut),
    ):
        assert list(ids[-6:]) == [*vectors("zqxj", 5), 49407]
        assert cut == "zqxj, and more"
    with caplog.at_level(logging.WARNING):
        ours(text)
    assert caplog.messages[0].endswith("was cut: 'zqxj, and more'")


# Weights and chunks.


def test_weights_are_those_of_all_vectors(ours):
    found = encode(ours, "a (<cat>:1.5), [é!]", weighted=True)
    assert found.ids[2:10] == (*vectors("<cat>"), 267, *vectors("é!"))
    assert found.weights[1:11] == (1.0, *[1.5] * 4, 1.0, *[pytest.approx(1 / 1.1)] * 3, 1.0)


@pytest.mark.parametrize("weighted", [False, True])
def test_vectors_move_on_into_the_next_chunk_together(ours, weighted):
    text = "word " * 70 + "zqxj dog"
    first, second = np.reshape(encode(ours, text, 2, weighted).ids, (2, 77))
    assert first[70:73].tolist() == [first[1], 49407, 49407]
    assert second[1:12].tolist() == [*vectors("zqxj"), ours.token_id("dog</w>"), 49407]
    fits = encode(ours, "word " * 66 + "zqxj dog", 2, weighted).ids
    assert list(fits[67:77]) == [*vectors("zqxj"), 49407]
    assert encode(ours, text, 1, weighted).ids[71:] == (*vectors("zqxj", 5), 49407)


def test_more_vectors_than_a_chunk_holds():
    many = ClipTokenizer.clip().with_tokens({"<big>": 100})
    chunks = np.reshape(encode(many, "a <big>", 3).ids, (3, 77))
    assert chunks[0, 1:3].tolist() == [320, 49407]
    assert chunks[1, 1:76].tolist() == [*range(49408, 49408 + 75)]
    assert chunks[2, 1:27].tolist() == [*range(49408 + 75, 49508), 49407]


# In a graph.


def graph_of(tokenizer, length=77, chunks=1):
    return GraphTokenizer(tables_of(tokenizer), length, chunks)


@pytest.mark.parametrize(("length", "chunks"), [(77, 1), (77, 3), (6, 4)])
def test_the_graph_gives_the_same_ids(ours, length, chunks):
    tokenizer = ClipTokenizer(ours.backend, max_length=length)
    graph = graph_of(tokenizer, length, chunks)
    explicit = ["<cat> <cat>_1 x", "<cat>", "<cat>_1", "", "<CAT><cat>", "<cat>_12 <cat> <cat>_2"]
    texts = [
        *explicit,
        *prompts(400),
        *varied_texts(60),
        *["word " * n + "zqxj" for n in range(80)],
    ]
    texts += ["a" * n + " " + "zqxj " * 30 for n in (0, 1, 5)]
    ids, _ = tokenize(tokenizer, texts, chunks, weighted=False)
    found = graph(tf.constant(texts)).numpy()
    wrong = [text for text, a, b in zip(texts, found, ids, strict=True) if (a != b).any()]
    assert not wrong, f"{len(wrong)} of {len(texts)}, among them {wrong[:3]}"
    np.testing.assert_array_equal(graph(tf.constant(texts[3:4])).numpy(), ids[3:4])
    assert graph(tf.constant([], "string")).shape == (0, length * chunks)


def test_the_graph_divides_more_vectors_than_a_chunk_holds():
    many = ClipTokenizer.clip().with_tokens({"<big>": 100, "<two>": 2})
    texts = ["a <big>", "<big><big>", "word " * 74 + "<two>", "<big> <two> " * 5, "plain"]
    for chunks in (1, 2, 4):
        ids, _ = tokenize(many, texts, chunks, weighted=False)
        found = graph_of(many, chunks=chunks)(tf.constant(texts))
        np.testing.assert_array_equal(found, ids)


def test_the_graph_is_of_core_operations(ours):
    function = graph_of(ours, chunks=2).tokenize
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    assert {node.op for node in nodes} <= CORE_OPERATIONS | {"StatelessIf", "UpperBound"}


# What is refused.


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"": 1}, r"must have characters, and no white space\. Received: ''\. Choose another"),
        ({"my cat": 1}, r"no white space\. Received: 'my cat'"),
        ({"cat": 1}, r"new to the tokenizer, in lower case, too\. Received: 'cat', which is read "
                     r"as 'cat</w>'\. Choose another token, such as '<my-style>'"),
        ({"Photograph": 2}, r"Received: 'Photograph', which is read as 'photograph</w>'"),
        ({"trafal": 1}, r"Received: 'trafal', which is read as 'trafal'"),
        ({"<CAT>": 1}, r"Received: '<CAT>', which is read as '<cat>'"),
        ({"<cat>_2": 1}, r"Received: '<cat>_2', which is read as '<cat>_2'"),
        ({"<new>": 1, "<new>_1": 1}, r"'<new>_1' would be read as a further vector of '<new>'"),
        ({"<cat>_4": 1}, r"'<cat>_4' would be read as a further vector of '<cat>', because .*"
                         r"TOKEN_1, TOKEN_2, …\. Choose another token"),
        ({"<|endoftext|>": 1}, r"Received: '<\|endoftext\|>', which is read as"),
    ],
)  # fmt: skip
def test_refuses_tokens(ours, tokens, message):
    with pytest.raises(TokenizerError, match=message):
        ours.with_tokens(tokens)
    assert ours.count("<new>") > 1, "left as it was"


def test_refuses_tokens_that_hold_the_padding():
    clip = ClipTokenizer.clip(pad_token_id=0)
    assert clip.pad_token == "!"
    message = r"not hold a special token.* Received: 'wow!', which is read as 'wow</w>', '!'\."
    with pytest.raises(TokenizerError, match=message):
        clip.with_tokens({"wow!": 1})
    assert ClipTokenizer.clip().with_tokens({"wow!": 1}).count("wow!") == 1


def test_refuses_ids_with_gaps(tmp_path):
    clip = ClipTokenizer.clip()
    rules = clip.backend.to_str().replace('"<|endoftext|>":49407', '"<|endoftext|>":49999')
    gap = ClipTokenizer(type(clip.backend).from_str(rules.replace('"id":49407', '"id":49999')))
    with pytest.raises(TokenizerError, match=r"number of its tokens, 49408\. Its next free id is"):
        gap.with_tokens({"<new>": 1})
