"""The benchmark, on real small runs: figures, report, page, and the messages of wrong flags."""

import copy
import dataclasses
import html.parser
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sd_tf.bench import report, run, timing
from sd_tf.bench.plan import BenchError, BenchOptions, make_plan
from sd_tf.bench.starts import host_share
from sd_tf.cli.main import main
from sd_tf.config.rewrites import IN_GRAPH
from sd_tf.runtime.controls import ControlRecord
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.shapes import Shapes
from sd_tf.serving import load
from tests.exports import editing_export, micro_export, shared_export


def shapes(height):
    return Shapes(((height, 512),), (1,), 8, 4)


ROOT = Path(__file__).parent.parent
PROMPT = 'a <b>red</b> bicycle & "a hat"'


def run_script(*flags):
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmark.py"), *flags],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )


@pytest.fixture(scope="session")
def tiny_export():
    return shared_export()


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """The script's text, its JSON and its page, of all variants."""
    folder = tmp_path_factory.mktemp("bench_output")
    result = run_script(
        f"--export_dir={micro_export()}",
        "--all",
        "--num_steps=2",
        "--repeat=2",
        "--seed=7",
        f"--prompt={PROMPT}",
        f"--output={folder}/",
    )
    assert result.returncode == 0, result.stderr
    content = json.loads((folder / "benchmark.json").read_text(encoding="utf-8"))
    return result.stdout, content, (folder / "benchmark.html").read_text(encoding="utf-8")


# Figures


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 101])
def test_summary_against_numpy(count):
    values = np.random.default_rng(count).uniform(0.1, 2.0, count).tolist()
    figures = timing.summary(values)
    assert figures["values"] == values
    assert (figures["min"], figures["max"]) == (np.min(values), np.max(values))
    np.testing.assert_allclose(figures["median"], np.median(values), rtol=1e-12)
    if count < 20:
        assert figures["p95"] is None
    else:
        np.testing.assert_allclose(figures["p95"], np.percentile(values, 95), rtol=1e-12)


@pytest.mark.parametrize("count", [0, 19, 20, 31])
def test_the_loads_percentile(count, monkeypatch):
    """As the benchmark's: none of few pictures, and never their maximum."""
    values = np.random.default_rng(count).uniform(0.1, 2.0, count).tolist()
    monkeypatch.setattr(load, "_ask", lambda *arguments: arguments[-1].seconds.extend(values))
    record = load.measure("", load.LoadOptions(), 1, {})
    assert record["pictures"] == count
    if count < 20:
        assert record["p95"] is None
    else:
        np.testing.assert_allclose(record["p95"], np.percentile(values, 95), rtol=1e-12)


def test_since_start():
    """What runs before the first line of Python counts, too."""
    code = "from sd_tf.bench.timing import since_start; print(since_start())"
    command = ["sh", "-c", 'sleep 0.5; exec "$0" "$@"', sys.executable, "-c", code]
    before = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True)
    whole = time.monotonic() - before
    assert 0.5 <= float(result.stdout) <= whole + 0.02, result.stderr


def test_peak_memory():
    code = (
        "from sd_tf.bench.timing import peak_memory\n"
        "before = peak_memory(); block = b'x' * 2 * 10**8; del block\n"
        "print(peak_memory() - before)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 1.8e8 < int(result.stdout) < 2.2e8


def test_compilations():
    line = (
        "I0000 device_compilation_profiler.cc:113] Compiled __inference_segment_29695 1 times, "
        "compile time: {} us, cumulative: 99 us (10 s / 10.2 s)\n"
    )
    log = line.format(1_500_000) + line.format(500_000) + run.TIMED_RUNS + "\n"
    expected = {"first_call": 2, "first_call_seconds": 2.0, "timed_runs": 0}
    assert run.compilations(log, expected=True) == expected
    assert run.compilations(log + line.format(5), expected=True)["timed_runs"] == 1
    assert run.compilations(run.TIMED_RUNS, expected=True) is None
    assert run.compilations(run.TIMED_RUNS, expected=False)["first_call"] == 0


def test_measured(measured):
    text, content, _ = measured
    plain, compiled = content["variants"]
    assert [v["name"] for v in content["variants"]] == ["SavedModels", "SavedModels + XLA"]
    assert plain["compilations"] == {"first_call": 0, "first_call_seconds": 0, "timed_runs": 0}
    assert compiled["compilations"]["first_call"] >= 2  # the loop and the decoder
    assert compiled["compilations"]["timed_runs"] == 0
    for v in content["variants"]:
        values = v["warm"]["values"]
        assert len(values) == 2
        np.testing.assert_allclose(v["images_per_second"], 2 / np.median(values))
        stages = sum(np.array(stage["values"]) for stage in v["stages"].values())
        assert (stages <= values).all()
        assert stages.sum() > 0.9 * sum(values)
        calls = np.array(v["stages"]["diffusion_model"]["values"]) / v["model_calls"]
        np.testing.assert_allclose(v["per_model_call"]["values"], calls)
        startup = v["import_seconds"] + v["load_seconds"] + v["first_call_seconds"]
        assert startup <= v["first_image_seconds"] < startup + 5
        assert v["first_call_seconds"] > v["compilations"]["first_call_seconds"]
        assert 2e8 < v["peak_memory_bytes"] < 2e10
        assert v["same_pictures_in_all_runs"]
        assert "pictures" not in v
    [left_out] = content["left_out"]
    assert left_out["name"] == "KerasCV" and "860 M parameters" in left_out["reason"]
    assert content["flags"]["prompt"] == PROMPT
    assert content["flags"]["export_dir"] == micro_export().name
    assert str(micro_export().parent) not in json.dumps(content)
    assert content["versions"]["keras-cv"] == "0.9.0"
    assert content["hardware"]["cores"] >= 1 and "CPU" in content["hardware"]["devices"]
    assert re.search(r"warm run, median +\d", text)
    assert "KerasCV: left out. KerasCV's UNet has 860 M parameters" in text


@pytest.mark.long
def test_a_variant_is_its_own_process(tiny_export):
    """What fails takes nothing else along, and says why."""
    planned = make_plan(BenchOptions(export_dir=str(tiny_export), num_steps=2, repeat=1))
    [good] = planned.jobs
    bad = dataclasses.replace(good, scheduler="none such")
    results = run.run_plan(dataclasses.replace(planned, jobs=[bad, good]))
    assert [v["name"] for v in results["variants"]] == ["SavedModels"]
    assert len(results["variants"][0]["pictures"]) == 2
    [failed] = results["left_out"]
    assert failed["failed"] and "Received: 'none such'" in failed["reason"]
    with pytest.raises(BenchError, match="Nothing could be measured"):
        run.run_plan(dataclasses.replace(planned, jobs=[]))


# The plan


@pytest.fixture
def full_size_manifest(tiny_export):
    """As if the tiny export had the UNet of SD 1.4."""
    manifest = Manifest.read(tiny_export)
    files = {"diffusion_model/1/variables/variables.data-00000-of-00001": {"size": 3_438_167_540}}
    unet = dataclasses.replace(manifest.components["diffusion_model"], files=files)
    components = {**manifest.components, "diffusion_model": unet}
    return dataclasses.replace(manifest, components=components, shapes=shapes(512))


def plan_with(manifest, tmp_path, **options):
    manifest.write(tmp_path)
    return make_plan(BenchOptions(export_dir=str(tmp_path), num_steps=5, **options))


def test_plan_of_all(full_size_manifest, tmp_path):
    planned = plan_with(full_size_manifest, tmp_path, all=True)
    names = ["KerasCV", "KerasCV + XLA", "SavedModels", "SavedModels + XLA"]
    assert [job.name for job in planned.jobs] == names
    assert {(j.scheduler, j.model_calls, j.height) for j in planned.jobs} == {("kerascv", 5, 512)}
    assert not planned.left_out
    euler = plan_with(full_size_manifest, tmp_path, all=True, scheduler="euler")
    assert len(euler.jobs) == 4


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({"family": "sd2"}, {}, "This export is sd2"),
        ({"latent_inputs": "mask_and_image"}, {}, "text to image"),
        ({"guidance": "none"}, {}, "KerasCV always guides"),
        ({"shapes": shapes(320)}, {}, "multiples of 128. This one is 320×512"),
        ({"precision": "bfloat16"}, {}, "this export's has about 1719.1 M"),
        ({"storage": {"unet": "int8"}}, {}, "this export's has about 3438.2 M"),
        ({"controls": (ControlRecord("canny", False),)}, {}, "ControlNets or IP-Adapters. .*canny"),
        ({}, {"scheduler": "pndm"}, "calls its model 5 times for 5 steps, pndm 6 times"),
    ],
)
def test_not_the_same_work(full_size_manifest, tmp_path, change, options, reason):
    manifest = dataclasses.replace(full_size_manifest, **change)
    planned = plan_with(manifest, tmp_path, all=True, **options)
    assert [job.engine for job in planned.jobs] == ["saved_models"] * 2
    assert {job.scheduler for job in planned.jobs} == {"pndm"}
    [left_out] = planned.left_out
    assert re.search(reason, left_out.reason) and not left_out.failed


def test_what_is_stored_otherwise_is_the_same_work(full_size_manifest, tmp_path):
    """Fewer bits, and places for adapters in a file of their own."""
    record = full_size_manifest.components["diffusion_model"]
    data = "diffusion_model/1/variables/variables.data-0000{}-of-00003"
    files = {data.format(index): {"size": size} for index, size in enumerate((861e6, 3e9, 1e6))}
    parts = {"diffusion_model": dataclasses.replace(record, files=files)}
    changes = {"storage": {"unet": "int8"}, "components": full_size_manifest.components | parts}
    planned = plan_with(dataclasses.replace(full_size_manifest, **changes), tmp_path, all=True)
    assert len(planned.jobs) == 4 and not planned.left_out


def test_an_export_that_xla_does_not_compile(full_size_manifest, tmp_path):
    record = full_size_manifest.components["diffusion_model"]
    record = dataclasses.replace(record, rewrites=IN_GRAPH.names)
    parts = full_size_manifest.components | {"diffusion_model": record}
    changes = {"precision": "bfloat16", "components": parts}
    planned = plan_with(dataclasses.replace(full_size_manifest, **changes), tmp_path, all=True)
    assert [job.name for job in planned.jobs] == ["SavedModels", "SavedModels + graph kernels"]
    assert [job.in_graph for job in planned.jobs] == [True, True]


# Flags


WRONG = [
    (["--export_dir=/no/such"], "/no/such is not an export: it has no pipeline.json"),
    (["--export_dir={}", "--num_steps=9"], "is a whole number from 1 to 8, .* Received: 9"),
    (["--export_dir={}", "--num_steps=0"], "is a whole number from 1 to 8, .* Received: 0"),
    (["--export_dir={}", "--num_steps=2", "--scheduler=x"], "is one of ddim.* Received: 'x'"),
    (["--export_dir={}", "--repeat=0"], "--repeat is at least 1. Received: 0"),
    (["--export_dir={}", "--guidance_scale=nan"], "is a finite number. Received: nan"),
    (["--export_dir={}", "--seed=2147483648"], "of 32 bits. Received: 2147483648"),
    (["--export_dir={}", "--num_steps=2", "--height=65"], "64x64 .HxW.. Received: height 65"),
    (["--export_dir={}", "--num_steps=2", "--batch_size=1"], "of the export is one of 2x64x64"),
    (["--export_dir={}", "--random_weights"], "--random_weights are KerasCV's"),
    (["--all", "--kerascv"], "--all includes KerasCV"),
    (["--all", "--jit_compile"], "--all measures with and without XLA"),
    (["--kerascv", "--scheduler=euler"], "has one method, .* Received: 'euler'"),
    (["--kerascv", "--num_steps=1001"], "is 1 to 1000 for KerasCV. Received: 1001"),
    (["--kerascv", "--height=100"], "positive multiple of 128. Received: 100"),
    (["--kerascv", "--batch_size=0"], "--batch_size is at least 1. Received: 0"),
    (["surplus"], "Unknown arguments: surplus"),
]


def test_wrong_flags(tiny_export):
    """Each is refused before anything is exported or measured."""
    for flags, message in WRONG:
        result = run_script(*(flag.format(tiny_export) for flag in flags))
        output = result.stderr + result.stdout
        assert result.returncode == 1 and re.search(message, output), output
        assert "Traceback" not in output


# The report


class Balanced(html.parser.HTMLParser):
    """Every tag is closed where it has to be."""

    VOID = ("meta", "img")

    def __init__(self):
        super().__init__()
        self.open, self.text, self.images = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page(measured):
    _, content, page = measured
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    text = "".join(parser.text)
    assert PROMPT in text and "seeds 7 to 8" in text
    assert "<script" not in page and "http://" not in page and "https://" not in page
    assert "url(" not in page and "@import" not in page and "$" not in page
    assert len(parser.images) == 4
    for image in parser.images:
        assert image["src"].startswith("data:image/png;base64,iVBORw0KGgo")
    for v in content["variants"]:
        assert report.number(v["warm"]["median"]) in text


def test_remarks(measured):
    _, content, _ = measured
    content = copy.deepcopy(content)
    assert len(report.remarks(content)) == 1
    plain, compiled = content["variants"]
    plain["precision"] = "bfloat16"
    plain["same_pictures_in_all_runs"] = False
    compiled["compilations"]["timed_runs"] = 1
    text = report.table(content)
    assert "in different precisions: SavedModels bfloat16, SavedModels + XLA float32." in text
    assert "SavedModels: the runs did not all make the same pictures." in text
    assert "SavedModels + XLA: the timed runs compiled, so they were not warm." in text
    compiled["compilations"] = None
    assert "TensorFlow did not tell what it compiled" in report.table(content)


def test_output_paths(tmp_path):
    for output in (f"{tmp_path}", f"{tmp_path}/", f"{tmp_path}/benchmark.html"):
        paths = tmp_path / "benchmark.json", tmp_path / "benchmark.html"
        assert report.output_paths(output) == paths
    paths = tmp_path / "new" / "run1.5.json", tmp_path / "new" / "run1.5.html"
    assert report.output_paths(f"{tmp_path}/new/run1.5") == paths


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (None, "–"), (0.00123, "0.00123"), (0.5, "0.500"), (12.34, "12.3"), (123.4, "123")],
)
def test_number(value, text):
    assert report.number(value) == text


# KerasCV


@pytest.mark.full_size
@pytest.mark.long
def test_kerascv_with_random_weights(tmp_path):
    result = run_script(
        "--kerascv",
        "--random_weights",
        "--height=128",
        "--width=128",
        "--batch_size=2",
        "--num_steps=1",
        "--repeat=1",
        f"--output={tmp_path}/kerascv",
    )
    assert result.returncode == 0, result.stderr
    [variant] = json.loads((tmp_path / "kerascv.json").read_text(encoding="utf-8"))["variants"]
    assert variant["name"] == "KerasCV"
    # Keras 3 would have compiled, had it not been told otherwise.
    assert variant["compilations"] == {"first_call": 0, "first_call_seconds": 0, "timed_runs": 0}
    assert list(variant["stages"]) == ["text_encoder", "diffusion_model", "decoder"]
    stages = sum(figures["median"] for figures in variant["stages"].values())
    np.testing.assert_allclose(stages, variant["warm"]["median"], rtol=0.02)
    assert variant["peak_memory_bytes"] > 3.4e9  # the UNet alone
    assert (tmp_path / "kerascv.html").read_text(encoding="utf-8").count("data:image/png") == 2


# What comes before and around the compiled code


@pytest.mark.long
def test_starts(tmp_path, capsys):
    file = tmp_path / "starts.json"
    flags = ["--num_steps", "1", "--rounds", "1", "--calls", "2", "--json", str(file)]
    assert main(["bench", "starts", "--export_dir", str(micro_export()), *flags]) == 0
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert f"filled / without: {found['starts']['ratio']:.2f}" in printed
    assert f"host's share: {found['host']['percent']:.1f} %" in printed
    seconds = {name: found["starts"][name]["median"] for name in ("without", "filling", "filled")}
    assert min(seconds.values()) > 0.5, "a process that imports TensorFlow"
    assert 0 < found["host"]["compiled"]["median"] < min(seconds.values())


def test_the_hosts_share_of_an_edit():
    """An export that needs a picture gets one."""
    found = host_share(str(editing_export()), num_steps=1, calls=1)
    assert min(found[part]["median"] for part in ("call", "compiled")) > 0


def test_wrong_starts(capsys):
    assert main(["bench", "starts", "--export_dir", "x", "--calls", "0"]) == 1
    assert "--calls is at least 1. Received: 0" in capsys.readouterr().err
    assert main(["bench", "starts", "--export_dir", "/none"]) == 1
    assert "/none is not an export" in capsys.readouterr().err
