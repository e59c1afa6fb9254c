"""The tokenizer in TensorFlow's operations against transformers' CLIPTokenizer."""

import json
import os
import random
import subprocess
import sys
import unicodedata

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
from tokenizers import AddedToken, Tokenizer
from transformers import CLIPTokenizer

from sd_tf.export.tokenizer import GraphTokenizer
from sd_tf.runtime.shapes import Shapes
from sd_tf.serving.tf_serving.predict import ModelServer, Servable
from sd_tf.tokenizer import characters, prompts
from sd_tf.tokenizer.clip import ClipTokenizer, TokenizerError
from sd_tf.tokenizer.tables import tables_of
from tests.serving_server import grpc_server
from tests.test_tokenizer import FIXED_TEXTS, expected, varied_texts

SURROGATES = range(0xD800, 0xE000)
MARKS = [chr(code) for code in range(0x30000) if unicodedata.combining(chr(code))]
PIECES = [
    *"abistMDRE139.,!?#<>|'’_-+", *" \t\n\r\v\f\x85\u00a0\u2003\u2028\u3000\u200b\ufeff",
    "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'LL", "'tis", "!!", "?!", "...",
    "<|startoftext|>", "<|endoftext|>", "<|ENDOFTEXT|>", "<|StartOfText|>", "<|", "|>",
    "aaa", "zqxj", "antidisestablishmentarianism", "photo", "Astronaut", "8k", "½", "²", "٣", "Ⅷ",
    "İ", "I\u0307", "ı", "Σ", "ς", "ß", "ẞ", "ǅ", "ﬁ", "Å", "\u212b", "A\u030a", "Ω", "\u2126",
    "é", "e\u0301", "ệ", "e\u0302\u0323", "\u0344", "\u0340", "\u1fed", "\u0958", "\u09c7\u09be",
    "가", "각", "\u1100", "\u1161", "\u11a8", "\u1100\u1161\u11a8", "漢", "字", "の", "ไทย", "हि",
    "🙂", "👩‍👩‍👧", "🏳️‍🌈", "🇩🇪", "❤️", "👍🏽", "\U00010400", "\U0010ffff", "\ufffd", "\x00", "\x1b",
]  # fmt: skip
# Operations of TensorFlow's core that the tokenizer's functions consist of.
CORE_OPERATIONS = {
    *("Add", "AddV2", "All", "Any", "Assert", "BitwiseAnd", "BitwiseOr", "Cast", "ConcatV2"),
    *("Const", "Cumsum", "DecodeRaw", "DenseBincount", "Equal", "Fill", "FloorDiv", "FloorMod"),
    *("GatherV2", "Greater", "GreaterEqual", "HashTableV2", "Identity", "If", "LeftShift", "Less"),
    *("LessEqual", "LogicalAnd", "LogicalNot", "LogicalOr", "LookupTableFindV2"),
    *("LookupTableImportV2", "LowerBound", "Max", "Maximum", "MergeV2Checkpoints", "Minimum"),
    *("Mul", "Neg", "NoOp", "NotEqual", "OnesLike", "Pack", "PadV2", "Placeholder", "Prod"),
    *("RaggedTensorToTensor", "Range", "ReduceJoin", "Reshape", "RestoreV2", "RightShift"),
    *("SaveV2", "ScatterNd", "Select", "SelectV2", "Shape", "ShardedFilename", "Size", "Squeeze"),
    *("StatefulPartitionedCall", "StatelessWhile", "StaticRegexFullMatch", "StridedSlice"),
    *("StringJoin", "StringLength", "Sub", "Sum", "TensorScatterUpdate", "TopKV2"),
    *("UnicodeDecode", "UnicodeEncode", "UnsortedSegmentMin", "UnsortedSegmentSum", "Where"),
    *("While", "ZerosLike"),
}


def hard_texts(count):
    rng = random.Random(11)
    for _ in range(count):
        pieces = [*PIECES, *rng.choices(MARKS, k=rng.choice([0, 20]))]
        yield "".join(rng.choices(pieces, k=rng.randint(1, 60)))


TEXTS = [*FIXED_TEXTS, *varied_texts(800), *hard_texts(2400)]


def graph_of(tokenizer):
    return GraphTokenizer(tables_of(tokenizer), tokenizer.max_length)


@pytest.fixture(
    scope="module",
    params=["<|endoftext|>", pytest.param("!", marks=pytest.mark.long)],
    ids=["sd1", "sd2"],
)
def both(request, tmp_path_factory):
    """transformers' tokenizer, and ours in a graph, with the same padding."""
    folder = tmp_path_factory.mktemp("tokenizer")
    ClipTokenizer.clip().save(folder)
    (folder / "tokenizer.json").unlink()  # leaves it to transformers to build the rules
    reference = CLIPTokenizer.from_pretrained(folder, pad_token=request.param)
    return reference, graph_of(ClipTokenizer.clip(reference.pad_token_id))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An export's folder with one model, whose two signatures use one tokenizer."""
    folder = tmp_path_factory.mktemp("export")
    module = tf.Module()
    module.tokenizer = graph_of(ClipTokenizer.clip(0))

    @tf.function(autograph=False)
    def tokens(prompt):
        return {"tokens": module.tokenizer(prompt)}

    def signature(count):
        return tokens.get_concrete_function(tf.TensorSpec([count], "string", "prompt"))

    signatures = {"serving_default": signature(None), "four": signature(4)}
    tf.saved_model.save(module, str(folder / "text_encoder" / "1"), signatures)
    return folder


def grouped(pieces, count):
    return ["".join(pieces[i : i + count]) for i in range(0, len(pieces), count)]


def check(graph, texts, ids):
    found = graph(tf.constant(texts)).numpy()
    wrong = [text for text, a, b in zip(texts, found, ids, strict=True) if (a != b).any()]
    assert not wrong, f"{len(wrong)} of {len(texts)}, among them {wrong[:3]}"


def test_equals_transformers(both):
    reference, graph = both
    assert len(set(TEXTS)) > 3000
    check(graph, TEXTS, expected(reference, TEXTS))


def test_every_code_point_between_letters(both):
    reference, graph = both
    codes = [c for c in range(0x20000) if c not in SURROGATES]
    codes += [*range(0x2F800, 0x2FA20), *range(0xE0000, 0xE0200)]
    texts = grouped([f"a{chr(code)}b " for code in codes], 12)
    check(graph, texts, expected(reference, texts))


def test_marks_behind_every_character_that_they_may_join(both):
    reference, graph = both
    bases = [chr(c) for c in range(0x3200) if chr(c).isprintable()]
    bases += [chr(c) for c in (*range(0xAC00, 0xAC40), *range(0xF900, 0xFB50))]
    texts = grouped([f"{base}{mark} " for base in bases for mark in "\u0301\u0345\u0323"], 12)
    pairs = [f"e{one}{other} " for one in MARKS for other in MARKS[::40]]
    jamo = [
        chr(c) for c in (*range(0x1100, 0x1114), *range(0x1160, 0x1177), *range(0x11A7, 0x11C4))
    ]
    runs = random.Random(5).choices(jamo, k=6000)
    texts += [*grouped(pairs, 10), *grouped(runs, 24)]
    check(graph, texts, expected(reference, texts))


def test_equals_the_tokenizer_at_any_length():
    tables = tables_of(ClipTokenizer.clip())
    texts = ["", "a photo of a zqxjist", "it's " * 40, *TEXTS[::40]]
    for length in (2, 3, 300):
        graph = GraphTokenizer(tables, length)
        check(graph, texts, ClipTokenizer.clip(max_length=length)(texts))
        assert graph(tf.constant([], "string")).shape == (0, length)


def test_long_texts_fill_several_chunks():
    tokenizer = ClipTokenizer.clip()
    texts = ["", "a, b", "word " * 75, "word " * 76, "İstanbul, e\u0301 " * 30, "zqxj" * 40]
    texts += ["<|endoftext|> x " * 50, "a, " * 200, *TEXTS[::40]]
    for length, chunks in ((77, 2), (5, 3)):
        clip = ClipTokenizer.clip(max_length=length)
        graph = GraphTokenizer(tables_of(tokenizer), length, chunks)
        ids, weights = prompts.tokenize(clip, texts, chunks=chunks, weighted=False)
        assert ids.shape == (len(texts), length * chunks) and (weights == 1).all()
        check(graph, texts, ids)


def test_bytes_that_are_not_utf_8_are_replaced(both):
    reference, graph = both
    rng = random.Random(3)
    parts = [*(bytes([n]) for n in range(128, 256)), *(p.encode() for p in PIECES)]
    texts = [b"".join(rng.choices(parts, k=rng.randint(1, 12))) for _ in range(500)]
    check(graph, texts, expected(reference, [text.decode("utf-8", "replace") for text in texts]))


def test_the_longest_text(both):
    reference, graph = both
    longest = ["\U0001f642" * 10_000, "!" * 10_000, "e" + "\u0301" * 9_999]
    check(graph, longest, expected(reference, longest))
    rule = "A text must have at most 10000 characters. Received one with] [10001]"
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        graph(tf.constant(["a", "\U0001f642" * 10_001]))
    assert rule in error.value.message


def test_max_length_has_room_for_two_tokens():
    tables = tables_of(ClipTokenizer.clip())
    with pytest.raises(TokenizerError, match=r"`max_length` must be at least 2, .* Received: 1"):
        GraphTokenizer(tables, 1)


# Saved.

RELOAD = """
import json, sys, time
import numpy as np
import tensorflow as tf

folder, texts, out = sys.argv[1:]
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)
texts = json.load(open(texts, encoding="utf-8"))
tokens = tf.saved_model.load(folder).signatures["serving_default"]
ids = tokens(prompt=tf.constant(texts))["tokens"].numpy()
four = tf.saved_model.load(folder).signatures["four"](prompt=tf.constant(texts[:4]))["tokens"]
assert (four.numpy() == ids[:4]).all()
with tf.Graph().as_default(), tf.compat.v1.Session() as session:  # as TensorFlow Serving loads it
    loaded = tf.compat.v1.saved_model.load(session, ["serve"], folder).signature_def
    signature = loaded["serving_default"]
    names = signature.outputs["tokens"].name, signature.inputs["prompt"].name
    again = session.run(names[0], {names[1]: [text.encode() for text in texts]})
assert (again == ids).all()
batch = tf.constant([f"a photo of a red cat number {n}, highly detailed" for n in range(64)])
seconds = []
for _ in range(30):
    start = time.perf_counter()
    tokens(prompt=batch)
    seconds.append(time.perf_counter() - start)
modules = sorted({name.split(".")[0] for name in sys.modules})
np.savez(out, ids=ids, rate=64 / np.median(seconds), modules=modules)
"""


def test_saved_runs_without_our_code_and_fast(saved, tmp_path):
    texts = TEXTS[:1500] + TEXTS[-500:]
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    folder = saved / "text_encoder" / "1"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", RELOAD, folder, tmp_path / "texts.json", tmp_path / "out.npz"],
        cwd=tmp_path,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
    found = np.load(tmp_path / "out.npz")
    assert not {"sd_tf", "tokenizers", "transformers"} & set(found["modules"])
    tokenizer = ClipTokenizer.clip(0)
    np.testing.assert_array_equal(found["ids"], [tokenizer.encode(text).ids for text in texts])
    assert found["rate"] > 2000, "prompts a second, 64 at a time on one thread"


def test_saved_is_small_and_of_core_operations(saved):
    file = saved / "text_encoder" / "1" / "saved_model.pb"
    assert file.stat().st_size < 3e6
    graph = saved_model_pb2.SavedModel.FromString(file.read_bytes()).meta_graphs[0].graph_def
    functions = graph.library.function
    nodes = [*graph.node, *(node for function in functions for node in function.node_def)]
    assert {node.op for node in nodes} <= CORE_OPERATIONS
    # The saver's own function matches the name of a file with an expression; ours match none.
    matching = [f for f in functions if any("Regex" in node.op for node in f.node_def)]
    assert all("traced_save" in function.signature.name for function in matching)
    traced = [f.signature.name for f in functions if "_tokenize_" in f.signature.name]
    assert len(traced) == 1
    [placed] = [f for f in functions if f.signature.name in traced]
    assert all("CPU" in node.device for node in placed.node_def if node.op == "GatherV2")


def test_saved_behind_tensorflow_servings_api(saved):
    texts = [text for text in TEXTS[:40] if "\x00" not in text]
    servable = Servable(saved, "text_encoder", Shapes(((8, 8),), (len(texts),), 8, 4))
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "clip"
    request.inputs["prompt"].CopyFrom(tf.make_tensor_proto(texts))
    models = ModelServer({"clip": {1: servable}})
    with grpc_server(models) as address, grpc.insecure_channel(address) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        tokens = tf.make_ndarray(stub.Predict(request).outputs["tokens"])
        request.inputs["prompt"].CopyFrom(tf.make_tensor_proto(["a" * 10_001]))
        with pytest.raises(grpc.RpcError) as error:
            stub.Predict(request)
    tokenizer = ClipTokenizer.clip(0)
    np.testing.assert_array_equal(tokens, [tokenizer.encode(text).ids for text in texts])
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "A text must have at most 10000 characters" in error.value.details()


# Other tokenizers.


def test_a_small_vocabulary_with_unknown_bytes(tmp_path):
    tokens = [*"lowerstidn", "lo", "l</w>", "w</w>", "r</w>", "t</w>", "low</w>", "er</w>"]
    tokens += ["lowest</w>", "newer</w>", "wider", "<unk>", "<|startoftext|>", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nl o\nlo w</w>\ne r</w>\n")
    reference = CLIPTokenizer.from_pretrained(tmp_path)
    pieces = [*"lowerstidn  é!'", "lower", "newer", "low ", "<unk>", "<|endoftext|>"]
    rng = random.Random(2)
    texts = ["".join(rng.choices(pieces, k=rng.randint(0, 30))) for _ in range(1000)]
    graph = graph_of(ClipTokenizer.from_folder(tmp_path))
    check(graph, texts, expected(reference, texts))


def test_added_tokens(tmp_path):
    """Tokens in any case, in pieces of words, and one in another; see `test_added_tokens`, too."""
    added = ["<Cat-Toy>", "<Cat-Toy>_a", "<cat-toy>_ab", "sks", "ks<", "é!", "İx", "aa", "a\u0301b"]
    ClipTokenizer.clip().save(tmp_path)
    reference = CLIPTokenizer.from_pretrained(tmp_path)
    reference.add_tokens([AddedToken(token, normalized=True) for token in added])
    reference.add_tokens([AddedToken("Raw", normalized=False)])
    ours = ClipTokenizer(Tokenizer.from_str(reference.backend_tokenizer.to_str()))
    pieces = ["<cat-toy>", *added, *"_1sk<aé!İx b", "e\u0301", "i\u0307x", "Raw", "raw", "á"]
    rng = random.Random(4)
    texts = ["".join(rng.choices(pieces, k=rng.randint(0, 20))) for _ in range(3000)]
    ids = expected(reference, texts)
    assert {ours.backend.token_to_id(token) for token in [*added, "Raw"]} <= set(ids.ravel())
    check(graph_of(ours), texts, ids)


def test_a_file_of_transformers_4():
    """Its expression for words names no tokens."""
    rules = json.loads(ClipTokenizer.clip().backend.to_str())
    words = rules["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    words["Regex"] = words["Regex"].removeprefix(r"<\|startoftext\|>|<\|endoftext\|>|")
    ours = ClipTokenizer(Tokenizer.from_str(json.dumps(rules)))
    texts = ["<|ENDOFTEXT|>#", "<|endoftext|>#", *TEXTS[::8]]
    ids = [ours.encode(text).ids for text in texts]
    assert list(ids[0]) != ClipTokenizer.clip()(texts[0])[0].tolist()
    check(graph_of(ours), texts, ids)


def edited(**changes):
    """CLIP's tokenizer with other rules: a part's name → a function of that part."""
    rules = json.loads(ClipTokenizer.clip().backend.to_str())
    for part, change in changes.items():
        rules[part] = change(rules[part])
    return ClipTokenizer(Tokenizer.from_str(json.dumps(rules)))


def without_a_byte(model):
    """Return the model without the last character of ByteLevel's alphabet, and its merges."""
    merges = [pair for pair in model["merges"] if "Ń" not in "".join(pair)]
    vocab = {token: index for token, index in model["vocab"].items() if "Ń" not in token}
    return {**model, "vocab": vocab, "merges": merges, "unk_token": None}


ADDED = {"id": 49408, "single_word": False, "lstrip": False, "rstrip": False, "special": False}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"normalizer": lambda _: {"type": "Lowercase"}},
            r"normalizer must be that of CLIP, .*\"NFC\".* Received: {\"type\": \"Lowercase\"}\. "
            r"Without tokenizer\.json, vocab\.json and merges\.txt are read with CLIP's rules",
        ),
        ({"normalizer": lambda _: None}, r"normalizer must be .* Received: null"),
        (
            {"pre_tokenizer": lambda _: {"type": "Whitespace"}},
            r"pre_tokenizer must be that of CLIP.*Received: .*\"Whitespace\"",
        ),
        (
            {"model": lambda model: {**model, "ignore_merges": True}},
            r"model's ignore_merges must be that of CLIP, false\. Received: true",
        ),
        (
            {"post_processor": lambda _: None},
            r"post_processor must put one token before a text and '<\|endoftext\|>' after it\. "
            r"Received: \[320\] becomes \[320\]",
        ),
        (
            {"added_tokens": lambda old: [
                *old, {**ADDED, "content": "<x>", "normalized": True, "lstrip": True}
            ]},
            r"found anywhere in a text.*Received: '<x>', which has .* Add it without them",
        ),
        (
            {"added_tokens": lambda old: [*old, {**ADDED, "content": "a b", "normalized": True}]},
            r"must have no white space.*Received: 'a b'\. Rename it",
        ),
        (
            {"added_tokens": lambda old: [
                *old,
                {**ADDED, "content": "<x>", "normalized": True},
                {**ADDED, "id": 49409, "content": "<X>", "normalized": True},
            ]},
            r"differ from the others in lower case\. Received: '<X>'",
        ),
        (
            {"model": without_a_byte},
            r"a token for each byte, or an unknown token\. Missing: Ń, Ń</w>, .* None",
        ),
        (
            {"model": lambda model: {**model, "merges": model["merges"][::-1]}},
            r"A merge must come after all that make its parts.*Received: '.*stay outside the graph",
        ),
    ],
)  # fmt: skip
def test_refuses_other_rules(change, message):
    with pytest.raises(TokenizerError, match=message):
        tables_of(edited(**change))


def test_refuses_a_library_of_another_unicode(monkeypatch):
    class Threefold:
        def normalize_str(self, text):
            return text.replace("ß", "sss")

    monkeypatch.setattr(characters.normalizers, "Lowercase", Threefold)
    with pytest.raises(TokenizerError, match=r"installed tokenizers .*, U\+00DF is 3 characters"):
        characters.characters.__wrapped__()
