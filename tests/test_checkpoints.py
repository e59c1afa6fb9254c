"""Random checkpoints: the same everywhere, and real checkpoints to diffusers."""

import diffusers
import numpy as np
import pytest
import torch

from sd_tf.checkpoints import CONFIG, make_random
from sd_tf.cli.main import main
from sd_tf.weights import open_checkpoint

# The first of `conv_in`, written down once: the same numbers on every machine.
GOLDEN = [-0.0025526001, 0.40605408, -0.030545935]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_checkpoint(tmp_path, dtype):
    folder = tmp_path / "tiny"
    assert main(["checkpoints", "tiny", str(folder), "--dtype", dtype]) == 0
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == CONFIG
    loaded = diffusers.StableDiffusionPipeline.from_pretrained(
        folder, torch_dtype=getattr(torch, dtype), safety_checker=None
    )
    theirs = loaded.unet.state_dict()
    for name, tensor in checkpoint.tensors("unet").items():
        assert tensor.dtype == dtype
        ours = torch.from_numpy(tensor.read().astype("float32"))
        assert torch.equal(ours, theirs[name].float()), name
    first = checkpoint.tensors("unet")["conv_in.weight"].read().astype("float32").ravel()[:3]
    expected = np.array(GOLDEN, "float32")
    np.testing.assert_allclose(first, expected, rtol=0.01 if dtype == "bfloat16" else 1e-6)


def test_shards(small_pipelines, tmp_path):
    """Large components are divided as the library would, and read by diffusers."""
    _, source = small_pipelines("sd3.5")
    config = open_checkpoint(source).config
    make_random(config, tmp_path, "bfloat16", shard_bytes=400_000)
    loaded = diffusers.StableDiffusion3Pipeline.from_pretrained(
        tmp_path, torch_dtype=torch.bfloat16
    )
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == config
    for component in ("transformer", "text_encoder_3"):
        shards = list((tmp_path / component).glob("*-of-*.safetensors"))
        # A tensor that is larger than a shard has one for itself.
        largest = max(t.size * t.itemsize for t in checkpoint.tensors(component).values())
        assert len(shards) > 1
        assert all(path.stat().st_size < max(400_000, largest) + 20_000 for path in shards)
        theirs = getattr(loaded, component).state_dict()
        for name, tensor in checkpoint.tensors(component).items():
            ours = torch.from_numpy(tensor.read().astype("float32"))
            assert torch.equal(ours, theirs[name].float()), name
    prompt = "a photo of a lighthouse, at dusk!"
    ids = loaded.tokenizer_3(prompt, padding="max_length", max_length=256).input_ids
    np.testing.assert_array_equal(checkpoint.tokenizer("text_encoder_3")(prompt), [ids])


def test_one_tensor_at_a_time(monkeypatch, tmp_path):
    """Only shapes are made of a model; a tensor is drawn, written and dropped."""
    events = []

    class Watched(np.ndarray):
        def tofile(self, file):
            events.append("written")
            np.asarray(self).tofile(file)

    def draw(path, shape, dtype):
        events.append("drawn")
        return np.zeros(shape, dtype).view(Watched)

    monkeypatch.setattr("sd_tf.checkpoints.random._random", draw)
    make_random(CONFIG, tmp_path / "tiny")
    assert events == ["drawn", "written"] * (len(events) // 2) and len(events) > 200


@pytest.mark.parametrize("family", ["sd3.5-medium", "flux-schnell"])
def test_without(family, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sd_tf.cli.checkpoints.make_random", lambda config, *_: made.append(config))
    made = []
    status = main(["checkpoints", family, str(tmp_path / "new"), "--without", "text_encoder_3"])
    if family == "flux-schnell":
        assert status == 1
        assert "Received: text_encoder_3 for flux-schnell" in capsys.readouterr().err
    else:
        assert status == 0
        assert made[0].zero_tokens == 256 and not made[0].t5_encoders


def test_existing_folder(tmp_path, capsys):
    assert main(["checkpoints", "tiny", str(tmp_path)]) == 1
    assert f"{tmp_path} exists. Choose another folder." in capsys.readouterr().err
