"""The comparison with peers, on real small runs: agreement, figures, report, and messages."""

import copy
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import diffusers
import keras
import numpy as np
import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel

from sd_tf.bench.peers import agreement, report, targets
from sd_tf.bench.peers.engine import GUIDANCE, KINDS, OURS, STAGES, Job
from sd_tf.bench.peers.engines import kerascv
from sd_tf.bench.peers.flops import unet_flops
from sd_tf.bench.peers.measure import (
    ComparisonOptions,
    Running,
    full_seconds,
    measure,
)
from sd_tf.bench.plan import BenchError
from sd_tf.cli.main import main
from sd_tf.config import ScheduleConfig
from sd_tf.sampling import tables
from sd_tf.sampling.rows import COLUMNS
from sd_tf.weights import StoredTensor, open_checkpoint
from sd_tf.weights import kerascv as kerascv_weights
from tests import commands, peers
from tests.exports import micro_folder
from tests.page_text import text_of

RAN = (
    "torch",
    "openvino",
    "openvino_default",
    "jax",
)  # PyTorch compiles minutes even for a small UNet


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """The command's text, its JSON and its page, of all peers."""
    folder = tmp_path_factory.mktemp("peers")
    command = [sys.executable, "-m", "sd_tf", "bench", "peers", f"--checkpoint={micro_folder()}"]
    command += [f"--work={folder}/work", f"--out={folder}", "--sizes=16"]
    command += ["--rounds=2", "--steps=2", f"--peers=kerascv,{','.join(RAN)}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr + result.stdout
    content = json.loads((folder / "peers.json").read_text(encoding="utf-8"))
    return result.stdout, content, (folder / "peers.html").read_text(encoding="utf-8")


COMPILED = """
import numpy as np
import openvino
from sd_tf.bench.peers.engines.openvino_ir import precision_of
ops = openvino.opset13
given = ops.parameter([1, 2], np.float32)
model = openvino.Model([ops.relu(given)], [given])
hint = {"INFERENCE_PRECISION_HINT": "f32"}
print(precision_of(openvino.Core().compile_model(model, "CPU", hint)))
"""


def test_an_engine_that_chooses_its_precision():
    """OpenVINO without a hint; and its label says what it took."""
    import openvino

    from sd_tf.bench.peers.engines.openvino_ir import precision_of, settings_for

    hint = "INFERENCE_PRECISION_HINT"
    assert settings_for(Job("openvino", 1, 2, precision="bfloat16"))[hint] == "bf16"
    settings = settings_for(Job("openvino_default", 1, 2, precision="bfloat16"))
    assert hint not in settings and settings["INFERENCE_NUM_THREADS"] == 2
    # It does not start under another allocator, which `make test` has.
    environment = {**os.environ, "LD_PRELOAD": ""}
    command = [sys.executable, "-c", COMPILED]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout == "float32\n", result.stderr
    on_another_cpu = SimpleNamespace(get_property={hint: openvino.Type.bf16}.get)
    assert precision_of(on_another_cpu) == "bfloat16"
    process = SimpleNamespace(job=Job("openvino_default", 1, 2))
    loaded = {"precision": "bfloat16", "devices": ["CPU"], "load_seconds": 1, "compile_seconds": 1}
    running = Running("openvino_default", process, loaded, {}, 1.0)
    assert running.described({})["label"] == "diffusers → OpenVINO by default, bfloat16"


@pytest.mark.long
def test_all_engines_agree(compared):
    _, content, _ = compared
    assert content["checkpoint"] == micro_folder().name
    assert content["flags"]["work"] == "work"
    [size] = content["sizes"]
    assert [engine["name"] for engine in size["engines"]] == ["sd_tf", *RAN]
    for peer in size["engines"][1:]:
        assert list(peer["stages"]) == list(STAGES)
        for stage, figures in peer["stages"].items():
            assert figures["psnr"] > (45 if stage == "decoder" else 60), (peer["name"], stage)


@pytest.mark.long
def test_figures(compared):
    _, content, _ = compared
    [size] = content["sizes"]
    ours, *peers = size["engines"]
    assert len(ours["stages"]["unet_step"]["seconds"]["values"]) == 2 * len(peers)
    for engine in size["engines"]:
        assert engine["load_seconds"] > 0 and engine["compile_seconds"] >= 0
        assert 1e8 < engine["peak_memory_bytes"] < 2e10
    for peer in peers:
        for part in (*peer["stages"].values(), peer["end_to_end"]):
            assert len(part["seconds"]["values"]) == len(part["ours"]["values"]) == 2
            ratio = np.median(part["seconds"]["values"]) / np.median(part["ours"]["values"])
            np.testing.assert_allclose(part["ratio"], ratio)
        for draw in peer["end_to_end"]["draws"]:
            assert 0 < draw["step_seconds"] < draw["seconds"]
    by_name = {engine["name"]: engine for engine in size["engines"]}
    assert by_name["openvino"]["conversion_seconds"] > 0
    assert by_name["openvino"]["compile_seconds"] > by_name["openvino"]["conversion_seconds"]
    assert set(size["matmul_gflops"]) == {
        f"{kind} {n}" for kind in ("xla", "graph") for n in (2048, 4096)
    }
    assert content["versions"]["openvino"] and content["hardware"]["cores"] >= 1
    assert len(content["load_average"]) == 3 and content["date"]


@pytest.mark.long
def test_kerascv_is_left_out_of_another_architecture(compared):
    text, content, _ = compared
    [left_out] = content["sizes"][0]["left_out"]
    assert left_out["name"] == "kerascv" and not left_out["failed"]
    assert "860 M parameters" in left_out["reason"]
    assert "KerasCV + XLA: left out. KerasCV's UNet has 860 M" in text


@pytest.mark.long
def test_report(compared):
    text, content, page = compared
    shown, lines = text_of(page), " ".join(text.split())
    for name in (*report.HEAD[1:], *(KINDS[engine].label for engine in ("sd_tf", *RAN))):
        assert name in text and name in shown
    assert "end to end is 20 steps, extrapolated from 2" in lines
    assert "Matmul, GFLOP/s: xla 2048 " in lines
    assert "targets" not in text  # which are of another size
    assert report.table(content) in text


def flag(command: list[str], name: str) -> str:
    return command[command.index(f"--{name}") + 1]


@pytest.mark.long
def test_bench_gpu_end_to_end(tmp_path):
    """On the CPU and a small model; those left out here compile for minutes, or are in `RAN`."""
    [command] = commands.of_make("bench-gpu", "bench peers")
    assert (flag(command, "device"), flag(command, "batch_size")) == ("gpu", "3")
    wanted = flag(command, "peers").split(",")
    assert set(wanted) == set(KINDS) - {"sd_tf", "openvino", "openvino_default"}
    changed = {"device": "cpu", "sizes": "16", "peers": "kerascv_plain,kerascv,plain,torch"}
    changed |= {"work": f"{tmp_path}/work", "out": str(tmp_path), "rounds": "1"}
    for name, value in changed.items():
        command[command.index(f"--{name}") + 1] = value
    command += ["--checkpoint", str(micro_folder()), "--steps", "2"]
    made = subprocess.run([sys.executable, "-m", "sd_tf", *command], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr + made.stdout
    assert "3 pictures at once, bfloat16, on the CPU" in " ".join(made.stdout.split())
    content = json.loads((tmp_path / "peers.json").read_text(encoding="utf-8"))
    [size] = content["sizes"]
    assert [engine["name"] for engine in size["engines"]] == ["sd_tf", "plain", "torch"]
    assert [left["name"] for left in size["left_out"]] == ["kerascv_plain", "kerascv"]
    for peer in size["engines"][1:]:
        assert all(figures["psnr"] > 25 for figures in peer["stages"].values()), peer["name"]


def test_targets_of_bfloat16():
    """OpenVINO's default is what is compared with, and memory has less room."""
    stages = {name: {"ratio": ratio} for name, ratio in (("unet_step", 1.0), ("decoder", 1.1))}
    engines = [
        {"name": OURS, "peak_memory_bytes": 4e9},
        {"name": "openvino", "stages": {}, "end_to_end": {"ratio": 9.0}},
        {"name": "openvino_default", "stages": stages, "end_to_end": {"ratio": 0.99}},
    ]
    flags = {"device": "cpu", "precision": "bfloat16"}
    content = {"flags": flags, "sizes": [{"size": targets.SIZE, "engines": engines}]}
    found = {entry["label"]: (entry["limit"], entry["met"]) for entry in targets.judged(content)}
    assert found == {
        "UNet step, OpenVINO / ours": ("≥ 1", True),
        "UNet step, PyTorch eager / ours": ("≥ 1.5", None),
        "decoder, OpenVINO / ours": ("≥ 1.2", False),
        "end to end, OpenVINO / ours": ("≥ 1", False),
        "peak memory of ours": ("≤ 4 GB", True),
    }
    assert targets.judged({**content, "flags": {**flags, "precision": "float16"}}) == []


@pytest.mark.long
def test_targets(compared):
    _, content, _ = compared
    content = copy.deepcopy(content)
    [size] = content["sizes"]
    size["size"] = targets.SIZE
    engines = {engine["name"]: engine for engine in size["engines"]}
    engines["openvino"]["stages"]["unet_step"]["ratio"] = 1.2
    engines["openvino"]["stages"]["decoder"]["ratio"] = 1.09
    engines["sd_tf"]["peak_memory_bytes"] = 9.1e9
    engines["sd_tf"]["stages"]["unet_step"]["seconds"]["median"] = 2.0
    size["unet_flops"], size["matmul_gflops"] = 400e9, {"xla 2048": 90.0, "graph 4096": 160.0}
    met = {entry["label"]: (entry["value"], entry["met"]) for entry in targets.judged(content)}
    assert met["UNet step, OpenVINO / ours"] == (1.2, True)
    assert met["decoder, OpenVINO / ours"] == (1.09, False)
    assert met["UNet step, KerasCV + XLA / ours"] == (None, None)
    assert met["peak memory of ours"] == (9.1, False)
    assert met["UNet step, share of the matmul peak"] == (125.0, True)
    text = report.table(content)
    assert re.search(r"UNet step, OpenVINO / ours +≥ 1\.2 +1\.20 +met", text)
    assert re.search(r"UNet step, KerasCV \+ XLA / ours +≥ 1\.6 +– +not measured", text)
    assert re.search(r"peak memory of ours +≤ 6\.5 GB +9\.10 GB +not met", text)
    assert "Targets, 512 px" in text_of(report.page(content))
    content["flags"]["device"] = "gpu"
    engines["torch"]["name"] = "torch_compile"
    engines["torch"]["end_to_end"]["ratio"] = 1.31
    met = {entry["label"]: (entry["value"], entry["met"]) for entry in targets.judged(content)}
    assert met == {
        "end to end, torch.compile / ours": (1.31, True),
        "end to end, KerasCV + XLA / ours": (None, None),
    }


# What is compared


def test_decibels():
    rng = np.random.default_rng(0)
    picture = rng.integers(1, 255, (1, 8, 8, 3)).astype("uint8")
    assert agreement.decibels(picture, picture) == agreement.IDENTICAL
    np.testing.assert_allclose(agreement.decibels(picture, picture + 1), 20 * np.log10(255))
    values = rng.standard_normal((2, 5), "float32")
    expected = 20 * np.log10(np.abs(values).max() / 0.5)
    np.testing.assert_allclose(agreement.decibels(values, values + 0.5), expected, rtol=1e-6)
    assert agreement.decibels(values, values * np.nan) == 0
    with pytest.raises(BenchError, match=r"have the shape \(2, 5\). Received: \(5, 2\)"):
        agreement.decibels(values, values.T)


def test_a_peer_that_does_other_work():
    agreement.check("OpenVINO", "decoder", 40.0, "float32", "float32")
    for coarse in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")):
        agreement.check("OpenVINO", "decoder", 12.0, *coarse)
    with pytest.raises(BenchError, match=r"Received: 39\.9 dB of OpenVINO in the stage decoder"):
        agreement.check("OpenVINO", "decoder", 39.9, "float32", "float32")


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_solved_against_diffusers_step(prediction):
    """diffusers' step from a peer's two predictions, and back again."""
    settings = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    scheduler = diffusers.DDIMScheduler(
        **settings,
        prediction_type=prediction,
        steps_offset=1,
        clip_sample=False,
        set_alpha_to_one=False,
    )
    scheduler.set_timesteps(4)
    rng = np.random.default_rng(0)
    x, pair = rng.standard_normal((1, 4, 4, 4)), rng.standard_normal((2, 4, 4, 4))
    guided = pair[:1] + GUIDANCE * (pair[1:] - pair[:1])
    schedule = ScheduleConfig(prediction=prediction, **settings)
    rows = tables.steps(schedule, "ddim", 4).rows[:, 0]
    columns = [COLUMNS.index(name) for name in ("timestep", "p", "q", "a", "b0")]
    for row, t in zip(rows[:, columns], scheduler.timesteps, strict=True):
        assert row[0] == t
        after = scheduler.step(torch.from_numpy(guided), t, torch.from_numpy(x)).prev_sample
        solved = agreement.solved(x, after.numpy(), row)
        np.testing.assert_allclose(solved, agreement.guided(pair), rtol=1e-4, atol=1e-4)


def test_pixels():
    values = np.array([[-2.0, -1.0, 0.0, 0.5, 1.0, 3.0]])
    assert agreement.pixels(values).tolist() == [[0, 0, 128, 191, 255, 255]]


def test_full_seconds():
    draw = {"seconds": 10.0, "step_seconds": 2.0}
    assert full_seconds(ComparisonOptions(), draw) == 42.0
    assert full_seconds(ComparisonOptions(full_steps=50), draw) == 102.0


def test_the_original_job():
    """3 pictures of 512 px and 50 steps; what it measures of them, it extrapolates."""
    [command] = commands.of_make("bench-gpu", "bench peers")
    names = ("device", "sizes", "batch_size", "full_steps")
    assert [flag(command, name) for name in names] == ["gpu", "512", "3", "50"]


def test_unet_flops(tmp_path):
    """SD1.5's, as counted by layer kinds: 801 + 467 + 252 + 87."""
    (tmp_path / "unet").mkdir()
    config = tmp_path / "unet" / "config.json"
    config.write_text('{"cross_attention_dim": 768}', encoding="utf-8")
    np.testing.assert_allclose(unet_flops(tmp_path, (64, 64, 4)) / 1e9, 1607, rtol=0.01)


# KerasCV with the checkpoint's weights


@pytest.fixture(scope="module")
def real_text_and_vae(tmp_path_factory):
    """SD1.5's text encoder and autoencoder, beside a small UNet."""
    text = CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
    )
    vae = diffusers.AutoencoderKL(**{**peers.VAE, "block_out_channels": (128, 256, 512, 512)})
    unet = diffusers.UNet2DConditionModel(**{**peers.SD1_UNET, "cross_attention_dim": 768})
    pipeline = diffusers.StableDiffusionPipeline(
        vae=peers.randomized(vae, 1),
        text_encoder=peers.randomized(CLIPTextModel(text), 2),
        tokenizer=peers.tokenizer(49407),
        unet=unet,
        scheduler=diffusers.DDIMScheduler(**peers.SCHEDULE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    folder = tmp_path_factory.mktemp("real")
    pipeline.save_pretrained(folder)
    return pipeline, open_checkpoint(folder)


def close(ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


def test_kerascv_text_encoder(real_text_and_vae):
    pipeline, checkpoint = real_text_and_vae
    tokens = checkpoint.tokenizer()(["", "a red bicycle"])
    with torch.no_grad():
        theirs = pipeline.text_encoder(torch.from_numpy(tokens).long())[0].numpy()
    positions = np.arange(77, dtype="int32")[None].repeat(2, axis=0)
    close(kerascv.text_encoder(checkpoint)([tokens, positions]), theirs)


def test_kerascv_decoder(real_text_and_vae):
    pipeline, checkpoint = real_text_and_vae
    latent = np.random.default_rng(0).standard_normal((1, 8, 8, 4), "float32")
    scaled = torch.from_numpy(np.moveaxis(latent, -1, 1)) / pipeline.vae.config.scaling_factor
    with torch.no_grad():
        theirs = np.moveaxis(pipeline.vae.decode(scaled).sample.numpy(), 1, -1)
    close(kerascv.decoder(checkpoint, 64, 64)(latent), theirs)


def test_fill_is_strict():
    layer = keras.layers.Dense(3)
    layer.build((None, 2))
    values = np.arange(6, dtype="float32").reshape(3, 2)

    def stored(array):
        return StoredTensor(array.shape, "float32", lambda: array)

    def places():
        return kerascv_weights._leaf("x", layer)

    kerascv.fill(places(), {"x.weight": stored(values), "x.bias": stored(values[:, 0])})
    np.testing.assert_array_equal(np.asarray(layer.kernel), values.T)
    np.testing.assert_array_equal(np.asarray(layer.bias), values[:, 0])
    with pytest.raises(BenchError, match=r"Without a counterpart: x\.bias, y\.bias"):
        kerascv.fill(places(), {"x.weight": stored(values), "y.bias": stored(values[:, 0])})
    with pytest.raises(
        BenchError, match=r"x\.bias must have KerasCV's shape \(3,\)\. Received: \(2,\)"
    ):
        kerascv.fill(places(), {"x.weight": stored(values), "x.bias": stored(values[0])})


# Flags


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": ("torch", "x")}, r"`peers` are of plain, kerascv_plain, .* Received: x"),
        ({"peers": ()}, r"`peers` names at least one, each once. Received: ''"),
        ({"peers": ("jax", "jax")}, r"each once. Received: 'jax,jax'"),
        ({"sizes": (64, 100)}, r"`sizes` are positive multiples of 8. Received: 100"),
        ({"batch_size": 0}, r"`batch_size` is at least 1. Received: 0"),
        ({"rounds": 0}, r"`rounds` is at least 1. Received: 0"),
        ({"steps": 1}, r"`steps` is 2 to 20: .* Received: 1"),
        ({"full_steps": 51}, r"`full_steps` is 2 to 50\. Received: 51"),
        ({"checkpoint": "/none"}, r"`checkpoint` is a diffusers folder. Received: '/none'"),
    ],
)
def test_wrong_options(tmp_path, options, message):
    with pytest.raises(BenchError, match=message):
        measure(ComparisonOptions(**{"work": str(tmp_path), **options}))


def test_wrong_flags(capsys):
    assert main(["bench", "peers", "--peers", "torch,x"]) == 1
    assert capsys.readouterr().err.startswith(
        "sd-tf bench peers: --peers are of plain, kerascv_plain,"
    )
    for flags, message in (
        (
            ["bench", "peers", "--sizes", "big"],
            "whole numbers with commas between. Received: 'big'",
        ),
        (["bench", "peers", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["bench", "none"], "invalid choice: 'none'"),
    ):
        with pytest.raises(SystemExit):
            main(flags)
        assert message in capsys.readouterr().err
