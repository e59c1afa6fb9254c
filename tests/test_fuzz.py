"""Damaged and hostile files: an error that says what is wrong, or a result; never anything else."""

import io
import json
import shutil
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from sd_tf.errors import SdTfError
from sd_tf.files.tensors import open_safetensors
from sd_tf.runtime.manifest import FILE_NAME, Manifest
from sd_tf.runtime.png import METADATA, read_parameters
from sd_tf.training.data import open_source
from sd_tf.weights import open_checkpoint
from tests.exports import micro_export, micro_folder
from tests.fuzz import FEW, MANY, changed, damaged


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def test_manifests(folder):
    content = json.loads((micro_export() / FILE_NAME).read_text())
    content["schedulers"] = dict(list(content["schedulers"].items())[:2])
    content["components"] = {"decoder": content["components"]["decoder"]}

    @MANY
    @given(st.data())
    def read(data):
        text = json.dumps(data.draw(changed(content))).encode()
        if data.draw(st.integers(0, 4)) == 0:
            text = data.draw(damaged(text))
        (folder / FILE_NAME).write_bytes(text)
        try:
            manifest = Manifest.read(folder)
        except SdTfError as error:
            assert str(folder) in str(error)
            return
        with pytest.raises(SdTfError, match=r"is missing|bytes"):
            manifest.check_files(folder)
            raise SdTfError("is missing: a manifest without files")

    read()


@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "unet/config.json",
        "vae/config.json",
        "text_encoder/config.json",
        "scheduler/scheduler_config.json",
    ],
)
def test_checkpoints(folder, name):
    copy = shutil.copytree(micro_folder(), folder / name.replace("/", "-"))
    content = json.loads((copy / name).read_text())

    @FEW
    @given(st.data())
    def opened(data):
        text = json.dumps(data.draw(changed(content))).encode()
        if data.draw(st.integers(0, 4)) == 0:
            text = data.draw(damaged(text))
        (copy / name).write_bytes(text)
        try:
            open_checkpoint(copy)
        except SdTfError as error:
            assert str(error)

    opened()


def test_safetensors(folder):
    path = folder / "model.safetensors"
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
    }

    @MANY
    @given(st.data())
    def read(data):
        text = json.dumps(data.draw(changed(header))).encode()
        content = struct.pack("<Q", len(text)) + text + bytes(22)
        if data.draw(st.booleans()):
            content = data.draw(damaged(content))
        path.write_bytes(content)
        try:
            tensors = open_safetensors(path)
        except SdTfError as error:
            assert str(path) in str(error)
            return
        for tensor in tensors.values():
            assert tensor.read().shape == tensor.shape

    read()


def test_pngs(folder):
    path = folder / "picture.png"
    parameters = {"prompt": "a", "seed": 1, "pictures": [], "checkpoint": {"unet": {"name": "x"}}}

    @MANY
    @given(st.data())
    def read(data):
        information = PngImagePlugin.PngInfo()
        text = json.dumps(data.draw(changed(parameters)))
        if data.draw(st.integers(0, 3)) == 0:
            text = data.draw(st.text(max_size=20))
        information.add_itxt(METADATA, text.encode("utf-8", "replace").decode())
        png = io.BytesIO()
        Image.fromarray(np.zeros((2, 2, 3), "uint8")).save(png, "PNG", pnginfo=information)
        content = png.getvalue()
        if data.draw(st.booleans()):
            content = data.draw(damaged(content))
        path.write_bytes(content)
        try:
            found, pictures = read_parameters(str(path))
        except (ValueError, OSError) as error:
            assert str(error)
            return
        assert isinstance(found, dict) and isinstance(pictures, dict)

    read()


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_captions(folder, name):
    data_folder = folder / name
    data_folder.mkdir()
    for number in range(2):
        Image.new("RGB", (8, 8)).save(data_folder / f"{number}.png")
    rows = [{"file_name": f"{number}.png", "text": "a"} for number in range(2)]
    good = "\n".join(map(json.dumps, rows)) if name.endswith("jsonl") else "file_name,text\n0.png,a"

    @FEW
    @given(st.data())
    def opened(data):
        content = good.encode()
        if name.endswith("jsonl") and data.draw(st.booleans()):
            lines = [data.draw(changed(row)) for row in rows]
            content = "\n".join(map(json.dumps, lines)).encode()
        content = data.draw(damaged(content))
        (data_folder / name).write_bytes(content)
        try:
            source = open_source(data_folder, 8, on_error="skip")
        except SdTfError as error:
            assert str(error)
            return
        for number in range(len(source)):
            assert source.picture(number).shape == (8, 8, 3)
            assert isinstance(source.caption(number, 0), str)

    opened()
