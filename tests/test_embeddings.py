"""Files of textual inversion: what is read, what a checkpoint has with them, what is refused."""

import dataclasses
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch

from sd_tf.config import FAMILIES
from sd_tf.training.origin import of_checkpoint
from sd_tf.weights import Checkpoint, CheckpointError, open_checkpoint, save_folder
from sd_tf.weights.added_tokens import TABLE, with_embeddings
from sd_tf.weights.embeddings import read_embedding
from tests.embeddings import vectors, write
from tests.exports import micro_folder

WIDTH = 16  # of the smallest checkpoint's text encoder


@pytest.fixture
def files(tmp_path):
    one, several = vectors(WIDTH), vectors(3, WIDTH, seed=1)
    return {
        "<cat>": write(tmp_path / "learned_embeds.safetensors", **{"<cat>": one}),
        "Bad-Hand": write(tmp_path / "Bad-Hand.safetensors", emb_params=several),
    }


@pytest.mark.parametrize(
    ("tensors", "token", "shapes"),
    [
        ({"<cat>": vectors(4)}, "<cat>", [(1, 4)]),
        ({"<cat>": vectors(3, 4)}, "<cat>", [(3, 4)]),
        ({"emb_params": vectors(3, 4)}, "file", [(3, 4)]),
        ({"*": vectors(1, 4)}, "file", [(1, 4)]),
        ({"clip_l": vectors(2, 4)}, "file", [(2, 4)]),
        ({"clip_l": vectors(2, 4), "clip_g": vectors(2, 6)}, "file", [(2, 6), (2, 4)]),
    ],
)
def test_formats(tmp_path, tensors, token, shapes):
    path = write(tmp_path / "file.safetensors", **tensors)
    found = read_embedding(path)
    assert (found.token, found.file, found.count) == (token, path, shapes[0][0])
    assert sorted(t.shape for t in found.tensors.values()) == sorted(shapes)
    for name, tensor in found.tensors.items():
        np.testing.assert_array_equal(tensor.read(), tensors[name].reshape(tensor.shape))
    assert read_embedding(f"<other>={path}").token == "<other>"


def test_a_path_may_have_an_equals_sign(tmp_path):
    path = write(tmp_path / "lr=1.safetensors", **{"<cat>": vectors(4)})
    assert read_embedding(path).token == "<cat>"
    assert read_embedding(f"<b>={path}").file == path


def test_the_checkpoint_follows(files):
    plain = open_checkpoint(micro_folder())
    checkpoint = open_checkpoint(
        micro_folder(), embeddings=[files["<cat>"], f"<bad>={files['Bad-Hand']}"]
    )
    assert checkpoint.config.text_encoders["text_encoder"].vocab_size == 49412
    tokenizer = checkpoint.tokenizer()
    assert tokenizer("<cat> <BAD>")[0, 1:6].tolist() == [49408, 49409, 49410, 49411, 49407]
    table = np.asarray(
        checkpoint.build("text_encoder").text_model.embeddings.token_embedding.weights[0]
    )
    np.testing.assert_array_equal(table[:49408], plain.tensors("text_encoder")[TABLE].read())
    np.testing.assert_array_equal(table[49408], vectors(WIDTH))
    np.testing.assert_array_equal(table[49409:], vectors(3, WIDTH, seed=1))
    assert checkpoint.files("text_encoder") == plain.files("text_encoder")
    assert plain.tokenizer().vocab_size == 49408
    further = with_embeddings(checkpoint, [f"<again>={files['<cat>']}"])
    assert [one.token for one in further.embeddings] == ["<cat>", "<bad>", "<again>"]
    assert further.tensors("text_encoder")[TABLE].shape == (49413, WIDTH)


def test_halves_and_floats_are_joined_as_floats(tmp_path, files):
    half = write(tmp_path / "half.safetensors", **{"<half>": vectors(WIDTH).astype("float16")})
    table = open_checkpoint(micro_folder(), embeddings=[half]).tensors("text_encoder")[TABLE]
    assert table.dtype == "float32" == table.read().dtype
    np.testing.assert_array_equal(table.read()[-1], vectors(WIDTH).astype("float16"))


def test_rows_without_tokens_make_room(files):
    """A table may be longer than the vocabulary, to a round number for example."""
    plain = open_checkpoint(micro_folder())
    encoder = dataclasses.replace(plain.config.text_encoders["text_encoder"], vocab_size=49472)
    tensors = plain.tensors("text_encoder")
    padding = dataclasses.replace(
        tensors[TABLE], shape=(49472, WIDTH), read=lambda: np.zeros((49472, WIDTH))
    )
    longer = dataclasses.replace(
        plain,
        config=dataclasses.replace(plain.config, text_encoders={"text_encoder": encoder}),
        readers={**plain.readers, "text_encoder": lambda: {**tensors, TABLE: padding}},
    )
    found = with_embeddings(longer, [files["<cat>"]])
    assert found.config.text_encoders["text_encoder"].vocab_size == 49409
    np.testing.assert_array_equal(found.tensors("text_encoder")[TABLE].read()[-1], vectors(WIDTH))


def test_a_saved_checkpoint_keeps_them(files, tmp_path):
    checkpoint = open_checkpoint(micro_folder(), embeddings=files.values())
    models = {name: checkpoint.build(name) for name in checkpoint.config.components}
    save_folder(tmp_path, checkpoint.config, models, {"text_encoder": checkpoint.tokenizer()})
    saved = open_checkpoint(tmp_path)
    assert saved.config.text_encoders == checkpoint.config.text_encoders
    assert saved.tokenizer().vectors == checkpoint.tokenizer().vectors
    ids = saved.tokenizer()("a <cat>, bad-hand")
    np.testing.assert_array_equal(ids, checkpoint.tokenizer()("a <cat>, bad-hand"))
    ours, theirs = (one.build("text_encoder")(ids)["context"] for one in (saved, checkpoint))
    np.testing.assert_array_equal(ours, theirs)


def test_training_records_them(files):
    plain, inverted = (
        of_checkpoint(open_checkpoint(micro_folder(), embeddings=given))
        for given in ((), [files["<cat>"]])
    )
    assert plain["embeddings"] == {} and [*inverted["embeddings"]] == ["<cat>"]


# What is refused.


def refused(message, *embeddings, family=None):
    with pytest.raises(CheckpointError, match=message) as error:
        if family is None:
            open_checkpoint(micro_folder(), embeddings=embeddings)
        else:  # from shapes alone
            checkpoint = Checkpoint(family, family, "shapes", FAMILIES[family], {})
            with_embeddings(checkpoint, embeddings)
    return str(error.value)


SD1, SDXL = vectors(2, 768), {"clip_l": vectors(2, 768), "clip_g": vectors(2, 1280)}


@pytest.mark.parametrize(
    ("family", "tensors", "message"),
    [
        ("sd1", {"<a>": vectors(1024)}, r"text_encoder of sd1 has 768\. Received: 1024, .*a\.saf"
                                        r"etensors\. That width fits sd2-base, sd2-v\."),
        ("sd2-v", {"<a>": SD1}, r"has 1024\. Received: 768, .* That width fits sd1, instruct-pix"),
        ("sd1", {"<a>": vectors(7)}, r"has 768\. Received: 7, .*a\.safetensors\.$"),
        ("sd1", SDXL, r"holds clip_l and clip_g, an embedding for SDXL's two text encoders\. sd1 "
                      r"is sd1: give one that was made for that"),
        ("sdxl-base", {"<a>": SD1}, r"has two text encoders, so .* must hold two tensors, clip_l "
                                    r"and clip_g\. Received: <a>, .*a\.safetensors.*join them"),
        ("sdxl-base", {"clip_g": vectors(2, 1280)}, r"Received: clip_g, .*join them: python -c"),
        ("sdxl-base", {"clip_l": vectors(2, 768), "clip_g": vectors(2, 1024)},
         r"text_encoder_2 of sdxl-base has 1280\. Received: 1024"),
        (None, {"clip_l": SD1, "clip_g": vectors(3, 1280)},
         r"as many vectors for each text encoder\. Received: {.*'clip_g': 3.*a\.safetensors"),
        (None, {"<a>": vectors(2, 2, WIDTH)},
         r"numbers of shape \(D\) or \(n, D\)\. .*a\.safetensors: '<a>' is float32 \[2, 2, 16\]"),
        (None, {"<a>": vectors()}, r"'<a>' is float32 \[\]"),
        (None, {"<a>": vectors(0, WIDTH)}, r"'<a>' is float32 \[0, 16\]"),
        (None, {"<a>": np.ones(WIDTH, "int64")}, r"'<a>' is int64 \[16\]\. Is the file something"),
        (None, {"<a>": vectors(WIDTH), "<b>": vectors(WIDTH)},
         r"must hold one token, or clip_l and clip_g\. .*a\.safetensors has <a>, <b>\. Write a "
         r"file for each token: python -c"),
        (None, {"clip_l": SD1, "t5": SD1}, r"a\.safetensors has clip_l, t5"),
        (None, {"cat": vectors(WIDTH)}, r"The embedding .*a\.safetensors cannot be added: A token "
                                        r"must be new .*'cat</w>'.* Give it as TOKEN=.*a\.safe"),
        (None, {"a cat": vectors(WIDTH)}, r"no white space\. Received: 'a cat'"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit(tmp_path, family, tensors, message):
    refused(message, write(tmp_path / "a.safetensors", **tensors), family=family)


def test_two_embeddings_with_one_token(files, tmp_path):
    again = write(tmp_path / "again.safetensors", **{"<CAT>": vectors(WIDTH)})
    message = r"a token of its own, .*'<CAT>' for .*learned_embeds\.safetensors and .*again\.saf"
    refused(message, files["<cat>"], again)
    message = r"'<cat>_1' would be read as a further vector of '<cat>'"
    refused(message, files["<cat>"], f"<cat>_1={again}")


def test_no_such_file():
    refused(r"No such file: nowhere\.safetensors", "<a>=nowhere.safetensors")


def run(command, folder):
    words = shlex.split(command.replace("python", sys.executable, 1))
    subprocess.run(words, cwd=folder, check=True)


def test_the_command_for_several_tokens_writes_one_each(tmp_path):
    path = write(tmp_path / "a.safetensors", **{"<a>": vectors(WIDTH), "<b>": vectors(WIDTH)})
    run(re.search(r"python -c .*", refused("one token", path))[0], tmp_path)
    found = [read_embedding(tmp_path / f"a-{number}.safetensors").token for number in (0, 1)]
    assert sorted(found) == ["<a>", "<b>"]


def test_the_command_for_halves_joins_them(tmp_path):
    first = write(tmp_path / "clip_l.safetensors", **{"<a>": vectors(2, 768)})
    write(tmp_path / "clip_g.safetensors", **{"<a>": vectors(2, 1280)})
    run(re.search(r"python -c .*", refused("join", first, family="sdxl-base"))[0], tmp_path)
    found = read_embedding(tmp_path / "both.safetensors")
    both = found.vectors(FAMILIES["sdxl-base"], "sdxl")
    assert {name: one.shape for name, one in both.items()} == {
        "text_encoder": (2, 768),
        "text_encoder_2": (2, 1280),
    }
    refiner = found.vectors(FAMILIES["sdxl-refiner"], "sdxl-refiner")
    assert {name: one.shape for name, one in refiner.items()} == {"text_encoder_2": (2, 1280)}


@pytest.mark.parametrize("kind", ["diffusers", "web UI"])
def test_pickles_are_refused_with_the_command_that_converts(tmp_path, kind):
    values = torch.from_numpy(vectors(2, WIDTH))
    content = {"<cat>": values}
    if kind == "web UI":
        parameters = {"*": values.requires_grad_()}
        content = {"string_to_token": {"*": 265}, "string_to_param": parameters, "name": "<cat>"}
    torch.save(content, tmp_path / "cat.pt")
    message = refused(r"cat\.pt is a pickle, .*safetensors only", tmp_path / "cat.pt")
    run(re.search(r"python -c .*", message)[0], tmp_path)
    found = read_embedding(tmp_path / "cat.safetensors")
    assert found.token == ("<cat>" if kind == "diffusers" else "cat")
    np.testing.assert_array_equal(
        found.tensors[next(iter(found.tensors))].read(), vectors(2, WIDTH)
    )
