"""`sd-tf bench scaling`: the points that are measured, and what is extrapolated from them."""

import json

import numpy as np
import pytest

from sd_tf.bench.peers import scaling
from sd_tf.bench.plan import BenchError
from sd_tf.cli.main import main
from tests.exports import micro_folder
from tests.page_text import text_of


def test_points():
    cross = [(p.batch, p.size) for p in scaling.points((2, 1), (256, 64, 128), "cross")]
    assert cross == [(1, 64), (1, 128), (1, 256), (2, 64)]
    assert len(scaling.points((1, 2), (64, 128, 256), "full")) == 6
    for arguments, message in (
        (((0,), (64,)), "`batches` are at least 1. Received: 0"),
        (((1,), (65,)), "`sizes` are positive multiples of 8. Received: 65"),
    ):
        with pytest.raises(BenchError, match=message):
            scaling.points(*arguments, "full")


def test_steps_of_scaling(capsys):
    assert main(["bench", "scaling", "--steps=20"]) == 1
    assert "--steps is 1 to 19. Received: 20" in capsys.readouterr().err
    assert main(["bench", "scaling", "--rounds=0"]) == 1
    assert "--rounds is at least 1. Received: 0" in capsys.readouterr().err


def test_extrapolated():
    """By the medians of the turns, of which one was disturbed."""
    pairs = [(2.0, 3.0), (2.2, 9.0), (1.9, 2.7)]
    found = scaling.extrapolated(4, pairs, steps=2)
    step = found["step_seconds"]
    np.testing.assert_allclose(step["values"], [0.5, 3.4, 0.4])
    assert (step["median"], step["max"]) == (0.5, 3.4)
    np.testing.assert_allclose(found["full_seconds"], 2.0 + 19 * 0.5)
    np.testing.assert_allclose(found["images_per_second"], 4 / 11.5)
    with pytest.raises(BenchError, match=r"of 3 steps takes longer .*: 0\.300 s and 0\.310 s"):
        scaling.extrapolated(1, [(0.31, 0.3), (0.31, 0.3), (0.2, 0.4)], steps=2)


@pytest.mark.long
def test_scaling(tmp_path, capsys):
    flags = [f"--checkpoint={micro_folder()}", f"--work={tmp_path}/work", f"--out={tmp_path}"]
    flags += ["--batches=2", "--sizes=16", "--steps=10", "--rounds=2"]
    assert main(["bench", "scaling", *flags]) == 0
    content = json.loads((tmp_path / "scaling.json").read_text(encoding="utf-8"))
    assert content["checkpoint"] == micro_folder().name and str(tmp_path) not in str(content)
    [point] = content["points"]
    assert (point["batch"], point["size"]) == (2, 16)
    short, long = (np.array(point[f"{name}_seconds"]["values"]) for name in ("short", "long"))
    assert len(short) == len(long) == 2
    expected = 2 / (np.median(short) + 19 * np.median(long - short) / 10)
    np.testing.assert_allclose(point["images_per_second"], expected)
    assert not (tmp_path / "work" / "exports" / "scaling").exists()
    assert "20 steps, extrapolated from 1 and 11, medians of 2 turns" in capsys.readouterr().out
    content["points"] += [{**point, "batch": 4}, {**point, "size": 32}]
    shown = text_of(scaling.page(content))
    assert "pictures in a batch" in shown and "pixels of a picture" in shown
