"""KerasCV's own models with random weights, saved as its .h5 files and loaded by us."""

import gc

import h5py
import keras
import keras_cv
import numpy as np
import pytest
from keras.src.legacy.saving import legacy_h5_format
from keras_cv.src.models.stable_diffusion.diffusion_model import DiffusionModelV2

from sd_tf.models.layers import deferred_variables
from sd_tf.weights import CheckpointError, open_checkpoint
from sd_tf.weights.kerascv import RELEASES, VAE_FILES

pytestmark = pytest.mark.full_size
EACH_RELEASE = pytest.mark.parametrize(
    "release",
    [name if name == "sd1.4" else pytest.param(name, marks=pytest.mark.long) for name in RELEASES],
)
kcv = keras_cv.models.stable_diffusion
TOLERANCE = 1e-4


def random_model(build, *arguments, seed):
    """KerasCV's biases start at zero and its norms at one: neither would show a mistake."""
    with deferred_variables():
        model = build(*arguments, download_weights=False)
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        if len(variable.shape) == 1:
            value = 0.1 * rng.standard_normal(variable.shape, "float32")
            value += "gamma" in variable.name
        else:
            value = rng.random(variable.shape, "float32")
            value -= 0.5
            value *= (12 / np.prod(variable.shape[:-1])) ** 0.5
        variable._initialize(value)
    return model


def save_h5(model, path):
    """As the published files were made: Keras' legacy format, tensors by position."""
    with h5py.File(path, "w") as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, model)


def close(ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()


@pytest.fixture(autouse=True)
def free_memory():
    yield
    keras.backend.clear_session()
    gc.collect()


@pytest.fixture
def folder(tmp_path):
    """A folder that is recognised by its UNet's file, which the other parts do not open."""
    (tmp_path / "kcv_diffusion_model.h5").touch()
    return tmp_path


@EACH_RELEASE
def test_text_encoder(tmp_path, release):
    _, classes, files = RELEASES[release]
    (tmp_path / files["unet"]).touch()
    model = random_model(classes["text_encoder"], 77, seed=1)
    save_h5(model, tmp_path / files["text_encoder"])
    checkpoint = open_checkpoint(f"kerascv:{tmp_path}")
    tokens = checkpoint.tokenizer()(["a red bicycle", "word " * 90])
    positions = np.arange(77, dtype="int32")[None].repeat(2, 0)
    theirs = model([tokens, positions])
    close(checkpoint.build("text_encoder")(tokens)["context"], theirs)


def test_vae(folder):
    encoder = random_model(kcv.ImageEncoder, seed=2)
    decoder = random_model(kcv.Decoder, 64, 128, seed=3)
    save_h5(encoder, folder / VAE_FILES["encoder"])
    save_h5(decoder, folder / VAE_FILES["decoder"])
    checkpoint = open_checkpoint(f"kerascv:{folder}")
    vae, scaling = checkpoint.build("vae"), checkpoint.config.autoencoder.scaling_factor
    rng = np.random.default_rng(4)
    latents = rng.standard_normal((1, 8, 16, 4), "float32")
    close(vae.decode(latents / scaling), decoder(latents))
    images = rng.uniform(-1, 1, (1, 64, 128, 3)).astype("float32")
    close(vae.encode(images)[0] * scaling, encoder(images))


@EACH_RELEASE
def test_diffusion_model(tmp_path, release):
    family_class = {"sd1.4": kcv.DiffusionModel, "sd2.1": DiffusionModelV2}[release]
    model = random_model(family_class, 64, 128, 77, seed=5)
    path = tmp_path / RELEASES[release][2]["unet"]
    save_h5(model, path)
    rng = np.random.default_rng(6)
    checkpoint = open_checkpoint(f"kerascv:{tmp_path}")
    latents = rng.standard_normal((2, 8, 16, 4), "float32")
    context = rng.standard_normal((2, 77, checkpoint.config.denoiser.context_dim), "float32")
    timesteps = np.array([981, 1])
    embed = keras_cv.models.StableDiffusion._get_timestep_embedding
    embedding = np.concatenate([np.asarray(embed(None, t, 1)) for t in timesteps])
    inputs = {"latent": latents, "timestep_embedding": embedding, "context": context}
    theirs = np.asarray(model(inputs))
    del model
    gc.collect()
    close(checkpoint.build("unet")(latents, timesteps, context), theirs)


def test_errors(tmp_path, folder, monkeypatch):
    with pytest.raises(CheckpointError, match=r"a release \(sd1\.4, sd2\.1\), or by a folder"):
        open_checkpoint("kerascv:sd3")
    checkpoint = open_checkpoint(f"kerascv:{folder}")
    with pytest.raises(CheckpointError, match=r"No such file: .*kcv_encoder\.h5"):
        checkpoint.build("text_encoder")
    (folder / "kcv_encoder.h5").write_bytes(b"not HDF5")
    with pytest.raises(CheckpointError, match=r"kcv_encoder\.h5 cannot be read by KerasCV"):
        checkpoint.build("text_encoder")


def test_download_without_network(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"could not download.*put its \.h5 files into a fo"):
        open_checkpoint("kerascv:sd1.4").build("text_encoder")
