"""`sd_tf.bench training`: the same loss first, then figures of both."""

import argparse
import json

import numpy as np
import pytest

from sd_tf.bench.peers import training
from sd_tf.bench.plan import BenchError
from sd_tf.checkpoints import DIT_CONFIG, DIT_FOLDER, TINY_FOLDER, make_random
from sd_tf.cli import bench_denoisers, bench_peers, bench_scaling, bench_training
from sd_tf.cli.main import main
from tests.exports import micro_folder


@pytest.mark.long
def test_updates_in_turn(tmp_path, capsys):
    flags = ["--checkpoint", str(micro_folder()), "--batch_size", "2", "--rounds", "2"]
    places = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "report")]
    assert main(["bench", "training", *flags, *places, "--engines", "torch"]) == 0
    content = json.loads((tmp_path / "report" / "training.json").read_text())
    assert content["checkpoint"] == micro_folder().name
    ours, theirs = (content["engines"][name] for name in ("ours", "torch"))
    assert theirs["first_loss"] == pytest.approx(ours["first_loss"], rel=training.TOLERANCE)
    assert ours["theirs_over_ours"] == 1.0 and len(theirs["seconds"]) == 2
    ratios = np.divide(theirs["seconds"], ours["seconds"])
    assert theirs["theirs_over_ours"] == pytest.approx(np.median(ratios))
    assert ours["examples_per_second"] == pytest.approx(2 / np.median(ours["seconds"]))
    assert "diffusers, PyTorch eager" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "--rounds is at least 1. Received: 0"),
        (["--batch_size", "-1"], "--batch_size is at least 1. Received: -1"),
        (["--engines", "torch,flax"], "--engines are of ours, ours_jax, torch, "),
        (["--checkpoint", "/none"], "--checkpoint is a diffusers folder. Received: '/none'"),
    ],
)
def test_wrong_flags(flags, message, capsys):
    assert main(["bench", "training", *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [bench_training, bench_denoisers, bench_peers, bench_scaling])
def test_an_embedded_checkpoint_is_given_by_name(command):
    """In commands that measure checkpoints, as in those that draw with them."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for given, folder in (("tiny", TINY_FOLDER), ("tiny-dit", DIT_FOLDER), ("a/b", "a/b")):
        assert parser.parse_args(["--checkpoint", given]).checkpoint == str(folder)


def test_only_unets_that_take_latents_and_a_context(tmp_path):
    make_random(DIT_CONFIG, tmp_path, dtype="float16")
    with pytest.raises(BenchError, match="needs a text-to-image checkpoint of SD1 or SD2"):
        training.write_inputs(tmp_path / "inputs.npz", str(tmp_path), 1)
