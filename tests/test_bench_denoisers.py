"""`sd-tf bench denoisers`: the same prediction first, then times of all engines."""

import json
import os
import signal

import numpy as np
import pytest

from sd_tf.bench.peers.process import Process
from sd_tf.cli.main import main
from tests.exports import micro_folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("pipeline", "engines", "batch", "precision", "floor"),
    [
        ("sd3-without-t5", "torch,jax", 2, "float32", 90),
        ("flux-schnell", "openvino", 1, "float32", 90),
        ("sd3-without-t5", "torch,openvino", 2, "bfloat16", 25),
    ],
)
def test_engines_in_turn(
    tmp_path, small_pipelines, capsys, pipeline, engines, batch, precision, floor
):
    _, folder = small_pipelines(pipeline)
    flags = ["--checkpoint", str(folder), "--size", "64", "--calls", "2", "--rounds", "1"]
    flags += ["--precision", precision]
    places = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "report")]
    assert main(["bench", "denoisers", *flags, *places, "--engines", engines]) == 0
    content = json.loads((tmp_path / "report" / "denoisers.json").read_text())
    found = content["engines"]
    assert list(found) == ["sd_tf", *engines.split(",")]
    assert content["shapes"]["latents"] == [batch, 8, 8, 16]
    for record in found.values():
        assert record["psnr"] >= floor and len(record["seconds"]) == 2, record["label"]
        ratios = np.divide(record["seconds"], found["sd_tf"]["seconds"])
        assert record["theirs_over_ours"] == pytest.approx(np.median(ratios))
    assert f"64 px, batch {batch}, {precision}" in capsys.readouterr().out


def test_engines_that_fail_leave_the_others_their_figures(
    tmp_path, small_pipelines, monkeypatch, capsys
):
    """One is killed, as where it needs more memory than there is, and one's library is missing."""
    _, folder = small_pipelines("sd3-without-t5")
    ask, asked = Process.ask, []

    def killing(self, do, **arguments):
        asked.append((self.job.engine, do))
        if (self.job.engine, do) == ("torch", "load"):
            os.kill(self._process.pid, signal.SIGKILL)
        if (self.job.engine, do) == ("openvino", "load"):
            do = "import_nothing"
        return ask(self, do, **arguments)

    monkeypatch.setattr(Process, "ask", killing)
    flags = ["--checkpoint", str(folder), "--size", "64", "--calls", "1", "--rounds", "2"]
    places = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "report")]
    assert main(["bench", "denoisers", *flags, *places, "--engines", "torch,openvino"]) == 1
    found = json.loads((tmp_path / "report" / "denoisers.json").read_text())["engines"]
    assert len(found["sd_tf"]["seconds"]) == 2 and found["sd_tf"]["theirs_over_ours"] == 1.0
    label = "diffusers, PyTorch eager"
    reason = f"The system ended the process of {label}, as it does when memory runs out."
    assert found["torch"] == {"label": label, "seconds": [], "failed": reason}
    assert "AttributeError: 'Worker' object has no attribute" in found["openvino"]["failed"]
    said = capsys.readouterr().out
    for name in ("torch", "openvino"):
        assert asked.count((name, "load")) == 1
        assert f"{found[name]['label']}: failed. {found[name]['failed']}\n" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--calls", "0"], "--calls is at least 1. Received: 0"),
        (["--size", "40"], "--size is a positive multiple of 16. Received: 40"),
        (
            ["--engines", "torch,flax"],
            "--engines are of sd_tf, jax, torch, torch_compile, openvino.",
        ),
        (["--checkpoint", "/none"], "--checkpoint is a diffusers folder. Received: '/none'"),
        ([], "Denoisers are compared on checkpoints of SD3 and Flux; `sd-tf bench peers` compares"),
    ],
)
def test_wrong_flags(tmp_path, flags, message, capsys):
    given = ["--checkpoint", str(micro_folder()), "--work", str(tmp_path), *flags]
    assert main(["bench", "denoisers", *given]) == 1
    assert message in capsys.readouterr().err
