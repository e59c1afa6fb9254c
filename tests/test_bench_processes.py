"""Each engine works in a process of its own, whose failure is told and costs no other figures."""

import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from sd_tf.bench.application import command_line, descendants
from sd_tf.bench.peers import apart, folders, report
from sd_tf.bench.peers.engine import DENOISERS, KINDS, OURS, STAGES, Job, NoGpuError
from sd_tf.bench.peers.measure import (
    ComparisonOptions,
    Running,
    Size,
    failed,
    measure,
)
from sd_tf.bench.peers.process import KilledError, Process, environment
from sd_tf.bench.plan import BenchError
from tests.exports import micro_folder


def job(**changes) -> Job:
    fields = {"engine": "torch", "height": 64, "width": 64, "steps": 2, "threads": 1}
    return Job(**{**fields, "checkpoint": "/none", **changes})


def test_a_worker_says_what_failed(tmp_path):
    with Process(job(), tmp_path / "logs" / "log.txt") as process:
        with pytest.raises(BenchError, match=r"/none.*\(log: .*log\.txt\)"):
            process.ask("load")
        with pytest.raises(BenchError, match="AttributeError"):
            process.ask("nothing")
    assert "Traceback" in (tmp_path / "logs" / "log.txt").read_text(encoding="utf-8")


def test_a_worker_that_dies(tmp_path):
    process = Process(job(), tmp_path / "log.txt")
    process._process.kill()
    with process, pytest.raises(KilledError, match=r"the process of diffusers.*memory runs out"):
        process.ask("load")


def test_a_worker_that_is_told_to_end(tmp_path):
    process = Process(job(), tmp_path / "log.txt")
    process._process.terminate()
    with process, pytest.raises(BenchError, match="ended with status -15"):
        process.ask("load")


def test_a_worker_that_others_outlive(tmp_path, monkeypatch):
    """What it started holds its end of the pipe, here for half a minute."""
    start, dying = subprocess.Popen, ["sh", "-c", "sleep 30 & read request; exit 3"]
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(dying, **options))
    begun = time.monotonic()
    with (
        Process(job(), tmp_path / "log.txt") as process,
        pytest.raises(BenchError, match="The process ended with status 3"),
    ):
        process.ask("load")
    assert time.monotonic() - begun < 20


def test_a_worker_whose_caller_ends(tmp_path):
    """It ends while it works: what it would answer nobody reads, and a call may take minutes."""
    process = Process(job(), tmp_path / "log.txt")._process
    answer, _ = process.communicate(json.dumps({"do": "load"}) + "\n", timeout=60)
    assert process.returncode == 0 and answer == ""


def test_environment(monkeypatch):
    assert environment(job())["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given = environment(job(engine="jax", device="gpu", threads=3))
    assert "CUDA_VISIBLE_DEVICES" not in given
    assert (given["KERAS_BACKEND"], given["JAX_PLATFORMS"]) == ("jax", "cuda")
    assert given["OMP_NUM_THREADS"] == given["TF_NUM_INTRAOP_THREADS"] == "3"


@pytest.mark.parametrize("engine", ["sd_tf", "kerascv", "torch"])
def test_what_sees_no_gpu_measures_nothing(tmp_path, monkeypatch, engine):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    process = Process(job(engine=engine, device="gpu"), tmp_path / "log.txt")
    with process, pytest.raises(NoGpuError, match=r"`device` gpu needs a GPU that .* sees"):
        process.ask("load")


@pytest.mark.parametrize("error", [NoGpuError, BenchError])
def test_jax_replaces_ours_where_tensorflow_sees_no_gpu(tmp_path, monkeypatch, error):
    """And for no other reason."""
    started = []

    def start(self, name):
        started.append(name)
        if name == OURS:
            raise error("said why")
        return SimpleNamespace(process=contextlib.nullcontext())

    monkeypatch.setattr(Size, "_start", start)
    size = Size(ComparisonOptions(device="gpu"), tmp_path, tmp_path, 64, print)
    peers = ["torch", "jax"]
    if error is BenchError:
        with pytest.raises(BenchError, match="said why"), size._reference(peers):
            pass
        assert started == [OURS] and not size.left_out
        return
    with size._reference(peers):
        assert started == [OURS, "jax"] and peers == ["torch"]
    assert [entry["name"] for entry in size.left_out] == [OURS]


class Replies(contextlib.nullcontext):
    """A worker whose stages take a second, and whose pictures 10, of which a step takes 2."""

    def __init__(self, name):
        super().__init__()
        self.job = job(engine=name)

    def ask(self, do, **arguments):
        return {
            "run": {"seconds": 1.0},
            "draw": {"seconds": 10.0, "step_seconds": 2.0},
            "memory": {"peak_memory_bytes": 1},
        }[do]


@pytest.mark.parametrize(("name", "seconds"), [(OURS, 10.0 + 16 * 1.0), ("jax", 10.0 + 16 * 2.0)])
def test_whole_pictures(tmp_path, monkeypatch, name, seconds):
    """Drawn in as many turns as the stages; a stage is the loop's step for SavedModels alone."""

    def start(self, name):
        loaded = {"precision": None, "devices": [], "load_seconds": 1.0, "compile_seconds": 0.0}
        return Running(name, Replies(name), loaded, dict.fromkeys(STAGES, 1.0), 1.0)

    monkeypatch.setattr(Size, "_start", start)
    monkeypatch.setattr(Size, "_decibels", lambda *_: 60.0)
    size = Size(ComparisonOptions(rounds=3), tmp_path, tmp_path, 64, print)
    found = size._compare(start(size, name), "torch")["end_to_end"]
    assert found["seconds"]["values"] == [10.0 + 16 * 2.0] * 3
    assert found["ours"]["values"] == [seconds] * 3
    assert found["ratio"] == 42.0 / seconds


def test_a_size_that_fails_leaves_the_others_their_figures(tmp_path, monkeypatch):
    def measured(size):
        if size.size == 24:
            raise KilledError("The system ended the process of ours.")
        torch = {"label": "PyTorch", "reason": "No memory.", "failed": True}
        engines = [{"name": OURS, "devices": ["CPU"]}]
        return {"size": size.size, "engines": engines, "left_out": [torch]}

    monkeypatch.setattr(Size, "measure", measured)
    options = ComparisonOptions(str(micro_folder()), str(tmp_path), sizes=(16, 24, 32))
    said = []
    found = measure(options, said.append)
    assert [size["size"] for size in found["sizes"]] == [16, 32]
    killed = "The system ended the process of ours."
    assert f"24 px failed: {killed}" in said
    assert failed(found) == {
        "PyTorch, 16 px": "No memory.",
        "PyTorch, 32 px": "No memory.",
        "24 px": killed,
    }
    assert report.lost(found) == [f"24 px: failed. {killed}"]
    with pytest.raises(KilledError, match="ended the process of ours"):
        measure(dataclasses.replace(options, sizes=(24,)))


def test_labels():
    """XLA is not named where it compiles nothing."""
    for kinds, name in ((KINDS, "sd_tf SavedModels"), (DENOISERS, "sd_tf, TensorFlow")):
        label = kinds[OURS].label_in
        assert label("bfloat16") == f"{name} + graph kernels"
        assert label("float32") == label("bfloat16", "gpu") == f"{name} + XLA"
    assert KINDS["kerascv"].label_in("bfloat16") == "KerasCV + XLA"
    assert job(engine=OURS, precision="bfloat16").label == "sd_tf SavedModels + graph kernels"


def test_apart_says_what_failed():
    with pytest.raises(BenchError, match=r"sqrt: TypeError: "):
        apart(math.sqrt, "x")
    assert apart(math.sqrt, 4.0) == 2.0


def test_apart_ends_with_its_caller():
    code = "import time; from sd_tf.bench.peers import apart; apart(time.sleep, 600)"
    caller = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 60
    while len(started := descendants(caller.pid)) < 2:  # Python starts a helper of its own, too
        assert caller.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    caller.kill()
    caller.wait()
    while left := [pid for pid in started if command_line(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_what_was_made_is_used_again(tmp_path):
    made = []

    def make():
        made.append(1)
        (tmp_path / "folder").mkdir()

    for content, count in (("a", 1), ("a", 1), ("b", 2)):
        folders._once(tmp_path / "folder", content, make)
        assert len(made) == count


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    with pytest.raises(BenchError, match=r"openvino is not installed\."):
        folders.convert(tmp_path, tmp_path / "openvino")
