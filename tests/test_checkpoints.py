"""Random checkpoints: the same everywhere, and real checkpoints to diffusers."""

import diffusers
import numpy as np
import pytest
import torch

from sd_tf.checkpoints import CONFIG
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


def test_existing_folder(tmp_path, capsys):
    assert main(["checkpoints", "tiny", str(tmp_path)]) == 1
    assert f"{tmp_path} exists. Choose another folder." in capsys.readouterr().err
