"""Exports with embeddings: what they hold, what they draw, and how components are replaced."""

import io
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from transformers import CLIPTokenizer

from sd_tf.cli.main import main
from sd_tf.config.rewrites import REWRITES
from sd_tf.runtime.manifest import TEXT_TO_IMAGE, Manifest, file_hash
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.psnr import psnr
from tests.embeddings import vectors, write
from tests.exports import micro_export, micro_folder, pipeline_of

WIDTH = 16
AS_WRITTEN = f"--disable_rewrites={','.join(REWRITES)}"  # nothing is compiled here
SIZE = ("--batch_size=2", "--height=16", "--width=16", "--max_steps=2", AS_WRITTEN)
DRAW = {"num_steps": 2, "seed": 3, "scheduler": "ddim"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embeddings")
    return {
        "<cat>": write(folder / "learned_embeds.safetensors", **{"<cat>": 3 * vectors(4, WIDTH)}),
        "bad-hand": write(folder / "bad-hand.safetensors", emb_params=3 * vectors(1, WIDTH)),
    }


@pytest.fixture(scope="module")
def folder(files, tmp_path_factory):
    """An export through the command, verified, with the SavedModel from prompts to pictures."""
    folder = tmp_path_factory.mktemp("export") / "out"
    embeddings = [f"--embedding={files['<cat>']}", f"--embedding=BadHand={files['bad-hand']}"]
    arguments = ["--checkpoint", str(micro_folder()), "--out", str(folder), *SIZE, *embeddings]
    more = ["--text_to_image", "--prompt_chunks=2", "--verify=fast"]
    assert main(["export", *arguments, *more]) == 0
    return folder


def exported(folder, *arguments):
    return main(["export", "--out", str(folder), *SIZE, "--verify=off", *map(str, arguments)])


def record(token, file, count):
    return {"token": token, "vectors": count, "file": file.name, "sha256": file_hash(file)}


def test_the_manifest_records_them(folder, files):
    manifest = Manifest.read(folder)
    expected = [record("<cat>", files["<cat>"], 4), record("BadHand", files["bad-hand"], 1)]
    for name, component in manifest.components.items():
        has_text = name in ("text_encoder", TEXT_TO_IMAGE)
        assert component.checkpoint.get("embeddings") == (expected if has_text else None)
    assert str(files["<cat>"].parent) not in (folder / "pipeline.json").read_text()


def test_its_tokenizer_has_the_tokens(folder):
    pipe = pipeline_of(folder)
    assert pipe.count_tokens("a <CAT>s badhand") == 1 + 4 + 1 + 1
    theirs = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    assert theirs.convert_tokens_to_ids(["<cat>", "<cat>_3", "BadHand"]) == [49408, 49411, 49412]


def test_a_token_draws_something_else(folder):
    pipe = pipeline_of(folder)
    plain, token, once, written = (
        pipe(prompt, **DRAW).images[0]
        for prompt in ("a cat", "a <cat>", "a <cat> <cat>_2", "a <cat> <cat>_1 <cat>_2 <cat>_3")
    )
    np.testing.assert_array_equal(token, written)
    assert (plain != token).any() and (once != token).any()
    weighted = pipe("a (<cat>:1.5)", prompt_syntax="weighted", **DRAW).images[0]
    assert (weighted != token).any()


def test_tensorflow_alone_draws_the_same(folder):
    """Prompts with vectors in words and at the end of a chunk, which move on into the next one."""
    pipe = pipeline_of(folder)
    signature = tf.saved_model.load(str(folder / TEXT_TO_IMAGE / "1")).signatures["plain_generate"]
    prompts = ["<Cat>s on a BADHAND", "word " * 73 + "<cat>, and more"]
    files = signature(
        prompt=tf.constant(prompts),
        negative_prompt=tf.constant(["<cat>_1"] * 2),
        num_steps=tf.constant(2),
        unconditional_guidance_scale=tf.constant(7.5),
        seed=tf.constant([3, 4]),
        scheduler=tf.constant("ddim"),
    )["image_bytes"]
    ours = np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files.numpy()])
    theirs = pipe(prompts, "<cat>_1", guidance_scale=7.5, **DRAW).images
    assert psnr(ours, theirs, 255) >= 55


def test_a_text_encoder_is_replaced_by_one_with_a_token(files, tmp_path):
    export = shutil.copytree(micro_export(), tmp_path / "export")
    before = Manifest.read(export)
    given = ("--checkpoint", micro_folder(), "--embedding", files["<cat>"])
    assert exported(export, *given, "--components=text_encoder") == 0
    after = Manifest.read(export)
    assert after.checkpoint["text_encoder"]["embeddings"] == [record("<cat>", files["<cat>"], 4)]
    assert after.components["diffusion_model"] == before.components["diffusion_model"]
    pipe, old = Pipeline.load(export, jit_compile=False), pipeline_of(micro_export())
    assert pipe.count_tokens("<cat>") == 4
    np.testing.assert_array_equal(pipe("a dog", **DRAW).images, old("a dog", **DRAW).images)
    # What replaces another component keeps the tokens.
    assert exported(export, "--checkpoint", micro_folder(), "--components=decoder") == 0
    assert Manifest.read(export).checkpoint["text_encoder"] == after.checkpoint["text_encoder"]
    assert Pipeline.load(export, jit_compile=False).count_tokens("<cat>") == 4


def test_an_embedding_without_its_text_encoder_is_refused(files, tmp_path, capsys):
    export = shutil.copytree(micro_export(), tmp_path / "export")
    before = (export / "pipeline.json").read_bytes()
    given = ("--checkpoint", micro_folder(), "--embedding", files["<cat>"])
    assert exported(export, *given, "--components=decoder") == 1
    said = capsys.readouterr().err
    assert "Embeddings change the text_encoder, so they are exported with it" in said
    assert "Received: decoder" in said
    assert (export / "pipeline.json").read_bytes() == before


def test_the_command_describes_and_refuses(files, tmp_path, capsys):
    given = ["weights", str(micro_folder()), "--embedding"]
    assert main([*given, str(files["<cat>"])]) == 0
    said = capsys.readouterr().out
    assert "49412 tokens" in said and "loads: every tensor has its place" in said
    wide = write(tmp_path / "wide.safetensors", **{"<cat>": vectors(768)})
    assert main([*given, str(wide)]) == 1
    assert "has 16. Received: 768" in capsys.readouterr().err


def test_a_manifest_keeps_to_its_format(folder):
    """Embeddings are a part of a component's origin: readers of this format know them already."""
    content = json.loads((folder / "pipeline.json").read_text())
    before = json.loads((micro_export() / "pipeline.json").read_text())
    assert content.keys() == before.keys()
    assert content["format_version"] == before["format_version"]
