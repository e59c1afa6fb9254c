"""One component of an export is replaced by another checkpoint's, if it fits the others."""

import dataclasses
import shutil

import pytest

from sd_tf.checkpoints import make_random
from sd_tf.export import ExportOptions, export
from sd_tf.runtime.manifest import FILE_NAME, ExportError, Manifest, file_hash
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.weights import open_checkpoint
from tests import micro
from tests.exports import micro_export, micro_folder


@pytest.fixture
def micro_copy(tmp_path):
    return shutil.copytree(micro_export(), tmp_path / "copy")


def test_replace_one_component(micro_copy):
    before = Manifest.read(micro_copy)
    checkpoint, size = open_checkpoint(micro_folder()), {"height": 16, "width": 16}
    options = {**size, "components": ("decoder",)}
    export(checkpoint, micro_copy, ExportOptions(batch_size=2, **options, verify="fast"))
    after = Manifest.read(micro_copy)
    after.check_files(micro_copy)
    assert after.max_steps == before.max_steps == 2 and after.schedulers == before.schedulers
    assert after.verification["decoder"]["level"] == "fast"
    assert after.verification["diffusion_model"] == before.verification["diffusion_model"]
    pipe = Pipeline.load(micro_copy, jit_compile=False)
    assert pipe("a", num_steps=1).images.shape == (1, 16, 16, 3)
    with pytest.raises(
        ExportError,
        match=r"same shapes: the export has 16x16 px in batches of 2\. Received: .* of 3",
    ):
        export(checkpoint, micro_copy, ExportOptions(batch_size=3, **options, verify="off"))


def replace_in(folder, components, checkpoint, report=None):
    size = {"batch_size": 2, "height": 16, "width": 16}
    options = ExportOptions(**size, max_steps=2, components=components, verify="off")
    return export(open_checkpoint(checkpoint), folder, options, report)


def tokenizer_of(folder):
    return {path.name: path.read_bytes() for path in (folder / "tokenizer").iterdir()}


def other_checkpoint(folder, text_encoder=None, **changes):
    """The micro checkpoint with some other fields, and weights in another file."""
    config = dataclasses.replace(micro.CONFIG, **changes)
    if text_encoder is not None:
        (name, part), *_ = config.text_encoders.items()
        changed = {name: dataclasses.replace(part, **text_encoder)}
        width = changed[name].hidden_size
        denoiser = dataclasses.replace(config.denoiser, context_dim=width)
        config = dataclasses.replace(config, text_encoders=changed, denoiser=denoiser)
    make_random(config, folder, "bfloat16")
    return folder


def test_each_component_keeps_what_belongs_to_it(micro_copy, tmp_path):
    """Tokenizer, family, prediction and hashes stay with the components that they serve."""
    schedule = dataclasses.replace(micro.CONFIG.schedule, prediction="v_prediction")
    other = other_checkpoint(tmp_path / "other", {"pad_token_id": 0}, schedule=schedule)
    before, words = Manifest.read(micro_copy), tokenizer_of(micro_copy)
    replace_in(micro_copy, ("decoder",), other)
    after = Manifest.read(micro_copy)
    assert tokenizer_of(micro_copy) == words
    assert (after.family, after.prediction) == (before.family, before.prediction)
    file = other / "vae" / "diffusion_pytorch_model.safetensors"
    assert after.checkpoint.pop("decoder") == {
        "name": "other",
        "format": "diffusers folder",
        "sha256": {"vae": {file.name: file_hash(file)}},
    }
    assert after.checkpoint | {"decoder": before.checkpoint["decoder"]} == before.checkpoint
    assert str(tmp_path) not in (micro_copy / FILE_NAME).read_text()


def test_a_text_encoder_brings_its_tokenizer_alone(micro_copy, tmp_path):
    vae = dataclasses.replace(micro.CONFIG.autoencoder, scaling_factor=0.5)
    other = other_checkpoint(tmp_path / "other", {"pad_token_id": 0}, autoencoder=vae)
    words = tokenizer_of(micro_copy)
    replace_in(micro_copy, ("text_encoder",), other)
    assert tokenizer_of(micro_copy) != words
    assert Manifest.read(micro_copy).scaling_factor == micro.CONFIG.autoencoder.scaling_factor


def test_a_component_that_does_not_fit(micro_copy, tmp_path):
    """It is refused before any work, and the export stays as it was."""
    vae = dataclasses.replace(micro.CONFIG.autoencoder, scaling_factor=0.5)
    other_checkpoint(tmp_path / "scaled", autoencoder=vae)
    other_checkpoint(tmp_path / "wide", {"hidden_size": 32})
    manifest = (micro_copy / FILE_NAME).read_bytes()
    for components, checkpoint, message in (
        (("decoder",), "scaled", r"the same scaling_factor: the export has 0.18215. Received: 0.5"),
        (("diffusion_model",), "scaled", r"the same scaling_factor: .* Received: 0.5"),
        (("text_encoder",), "wide", r"takes, {'context': \(2, 77, 16\)}: .*\(2, 77, 32\)}"),
        (("diffusion_model",), "wide", r"takes, {'context': \(2, 77, 32\)}: .*\(2, 77, 16\)}"),
    ):
        with pytest.raises(ExportError, match=message):
            replace_in(micro_copy, components, tmp_path / checkpoint, pytest.fail)
    assert (micro_copy / FILE_NAME).read_bytes() == manifest
