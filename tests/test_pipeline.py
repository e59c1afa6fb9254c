"""The runtime: what a call gives, and every way in which it can be wrong."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from sd_tf.cli.main import main
from sd_tf.runtime.capabilities import MIXING
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.pictures import contact_sheet
from sd_tf.runtime.pipeline import Pipeline, SavedModelRunner
from sd_tf.runtime.png import METADATA, png_bytes, read_parameters
from sd_tf.runtime.saved_model import SavedModel
from sd_tf.serving.tf_serving.predict import load
from tests.exports import micro_export, pipeline_of, shared_export, small_folder

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def exported():
    return shared_export()


@pytest.fixture(scope="module")
def pipe(exported):
    return pipeline_of(exported)


def test_result(pipe):
    result = pipe(["a", "b", "c"], num_steps=3, seed=5)
    assert result.images.shape == (3, 64, 64, 3) and result.images.dtype == np.uint8
    assert result.seeds == [5, 6, 7]
    assert [picture.size for picture in result.pil()] == [(64, 64)] * 3
    stages = {"text_encoder", "diffusion_model", "decoder", "total"}
    assert result.timings.keys() == stages
    parts = sum(seconds for name, seconds in result.timings.items() if name != "total")
    assert 0.9 * result.timings["total"] < parts <= result.timings["total"]


def test_chunks_padding_and_places_do_not_matter(pipe):
    together = pipe(["a", "b", "c", "a"], num_steps=3, seed=[1, 2, 3, 1])
    assert np.abs(together.images[0].astype(int) - together.images[3]).max() <= 1
    for index, (prompt, seed) in enumerate((("a", 1), ("b", 2), ("c", 3))):
        alone = pipe(prompt, num_steps=3, seed=seed).images[0].astype(int)
        assert np.abs(alone - together.images[index]).max() <= 1


def test_random_seeds_repeat(pipe):
    first = pipe("a", num_steps=2)
    again = pipe("a", num_steps=2, seed=first.seeds)
    np.testing.assert_array_equal(first.images, again.images)
    assert pipe("a", num_steps=2).seeds != first.seeds


def test_zero_is_a_value(pipe):
    """Guidance 0 shows the negative prompt alone, seed 0 is a seed."""
    ours = [pipe(p, "x", num_steps=2, guidance_scale=0.0, seed=0).images for p in ("a", "b")]
    assert np.abs(ours[0].astype(int) - ours[1]).max() <= 1
    assert pipe("a", num_steps=2, seed=0).seeds == [0]


def test_callback_sees_every_call_and_can_stop(pipe):
    seen = []
    whole = pipe("a", num_steps=4, seed=1, callback=lambda *state: seen.append(state))
    assert [state[:2] for state in seen] == [(n, 5) for n in range(1, 6)]  # pndm: one call more
    np.testing.assert_array_equal(pipe.decode(seen[-1][2])[0], whole.images[0])
    np.testing.assert_array_equal(whole.images, pipe("a", num_steps=4, seed=1).images)
    seen.clear()

    def stop(done, calls, latents):
        seen.append(latents)
        return done < 2

    stopped = pipe("a", num_steps=4, seed=1, callback=stop)
    assert len(seen) == 2
    np.testing.assert_array_equal(stopped.images[0], pipe.decode(seen[-1])[0])


def test_noise_in_place_of_seeds(pipe):
    noise = np.random.default_rng(0).standard_normal((1, 8, 8, 4))
    images = [pipe("a", num_steps=2, noise=noise, seed=seed).images for seed in (1, 2)]
    np.testing.assert_array_equal(*images)


def test_image_to_image(pipe):
    picture = pipe("a", num_steps=4, seed=1).pil()[0]
    for strength, calls in ((0.25, 2), (0.5, 4), (1.0, 8)):
        seen = []
        result = pipe(
            "b",
            num_steps=8,
            seed=2,
            image=picture,
            strength=strength,
            scheduler="euler",
            callback=lambda done, all_calls, _, seen=seen: seen.append((done, all_calls)),
        )
        assert seen == [(n + 1, calls) for n in range(calls)]
        assert "image_encoder" in result.timings
    larger = picture.resize((128, 128))
    assert pipe("b", num_steps=2, seed=1, image=larger).images.shape == (1, 64, 64, 3)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc keeps what is freed")
def test_loading_gives_freed_memory_back():
    code = """
import os, sys
from pathlib import Path
from sd_tf.runtime.pipeline import Pipeline
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
pieces = [bytes([i % 256]) * 4000 for i in range(200_000)]
kept = pieces[::100]  # between the others, so that the C library gives none back by itself
del pieces
before = resident()
pipe = Pipeline.load(sys.argv[1], jit_compile=False)
print(before - resident(), len(kept), pipe.manifest.shapes)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(micro_export())],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": ""},  # no other allocator
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[0]) > 200e6


def test_components_of_two_exports_are_not_mixed(tmp_path):
    """The image encoder is loaded when it is first needed; the folder may hold another one then."""
    folder = shutil.copytree(micro_export(), tmp_path / "export")
    pipe = Pipeline.load(folder, jit_compile=False)
    manifest = folder / "pipeline.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "family": "another"}))
    picture = np.zeros((2, 16, 16, 3), "uint8")
    message = (
        f"{folder} holds another export than when this pipeline was opened, and the image_encoder "
        f"is not loaded yet. Load the pipeline again."
    )
    for _ in range(2):
        with pytest.raises(ExportError) as caught:
            pipe.encode(picture)
        assert str(caught.value) == message
    manifest.write_text(json.dumps(content))
    assert pipe.encode(picture).shape[0] == 2


def test_a_tokenizer_that_was_changed(tmp_path):
    """It still parses, and would divide prompts otherwise."""
    folder = shutil.copytree(micro_export(), tmp_path / "export")
    path = folder / "tokenizer" / "merges.txt"
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    lines[:2] = lines[1::-1]
    path.write_text("\n".join([first, *lines, ""]), encoding="utf-8")
    with pytest.raises(ExportError, match=r"merges.txt of text_encoder is not the file that was e"):
        Pipeline.load(folder)


def test_a_component_that_is_loaded_keeps_no_other_waiting():
    pipe = Pipeline.load(micro_export(), jit_compile=False)
    [runner] = pipe._replicas
    begun, may_end, load = threading.Event(), threading.Event(), runner._load

    def slow(component):
        begun.set()
        assert may_end.wait(60)
        return load(component)

    runner._load = slow
    with ThreadPoolExecutor(2) as pool:
        pictures = np.zeros((2, 16, 16, 3), "uint8")
        encoded = [pool.submit(pipe.encode, pictures) for _ in range(2)]
        assert begun.wait(60)
        drawn = pipe("a star", num_steps=1, seed=1).images
        assert drawn.any() and not any(one.done() for one in encoded)
        may_end.set()
        first, second = (one.result() for one in encoded)
        np.testing.assert_array_equal(first, second)


def test_weights_of_what_a_batch_has_passed_may_go(pipe, monkeypatch):
    passed, loaded = [], pipe._replicas[0].loaded

    def let_go(model):
        passed.extend(name for name, one in loaded.items() if one is model)

    monkeypatch.setattr(SavedModel, "let_go", let_go)
    image = np.zeros((64, 64, 3), "uint8")
    pipe("a", num_steps=2)
    assert passed == ["text_encoder", "diffusion_model", "decoder"]
    pipe(["a", "b", "c"], num_steps=2, image=[image] * 3)
    once = ["text_encoder", "image_encoder", "diffusion_model", "decoder"]
    assert passed[3:] == 2 * once, "batches of two"


@pytest.mark.long
def test_several_devices():
    """One replica each, work divided: the pictures are those of one device."""
    code = """
import sys, numpy as np, tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
from sd_tf.runtime.pipeline import Pipeline, SavedModelRunner
prompts = list("abcdefg")
one = Pipeline.load(sys.argv[1])(prompts, num_steps=2, seed=1).images
assert len({picture.tobytes() for picture in one}) == 7
pipe = Pipeline.load(sys.argv[1], devices=["CPU:0", "CPU:1"])
used = [replica.device for replica in pipe._replicas]
placed = {
    op.device for r in pipe._replicas for op in r.loaded["decoder"].graph.get_operations()
    if op.type == "VarHandleOp"}
two = pipe(prompts, num_steps=2, seed=1).images
print(used, len(placed), np.abs(one.astype(int) - two).max() <= 1)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(micro_export())], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    assert "CPU:0" in result.stdout and "CPU:1" in result.stdout
    assert result.stdout.split()[-2:] == ["2", "True"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompt": []}, r"At least one prompt is needed"),
        (
            {"num_steps": 0},
            r"num_steps is a whole number from 1 to 8, .*Received: 0",
        ),
        ({"num_steps": 9}, r"from 1 to 8, the export's limit. Received: 9"),
        ({"num_steps": 2.5}, r"Received: 2.5"),
        (
            {"guidance_scale": float("nan")},
            r"guidance_scale is a number from .* 1000000. Received: nan",
        ),
        (
            {"guidance_scale": float("inf")},
            r"guidance_scale is a number from .* 1000000. Received: inf",
        ),
        ({"scheduler": "plms"}, r"scheduler is one of ddim, .*Received: 'plms'"),
        ({"seed": [1, 2]}, r"seed is one for all or one for each of 1 prompts. Received: 2"),
        (
            {"seed": 2**31},
            r"seed is a whole number from -2147483648 to .*Received: 2147483648",
        ),
        ({"seed": [0.5]}, r"2147483647. Received: 0.5"),
        ({"negative_prompt": ["a", "b"]}, r"one for each of 1 prompts. Received: 2"),
        ({"noise": np.zeros((2, 8, 8, 4))}, r"one for each of 1 prompts. Received: 2"),
        ({"noise": np.zeros((1, 8, 8, 3))}, r"shape \(8, 8, 4\) for each .*: \(8, 8, 3\)"),
        ({"image": np.zeros((8, 8, 3), "uint8")}, r"uint8 \(64, 64, 3\). Received: uint8 \(8, 8"),
        ({"image": np.zeros((64, 64, 3))}, r"Received: float64 \(64, 64, 3\)"),
        (
            {"mask": np.zeros((64, 64), "uint8")},
            r"mask is only for .* that paint .*; this one is sd1",
        ),
        ({"strength": 0.5}, r"strength goes with image: give both, or neither"),
        ({"prompt": 3}, r"prompt is a text of at most 10000 characters. Received: 3"),
        ({"target_size": (64, 64)}, r"target_size is only for checkpoints of the SDXL fam"),
    ],
)
def test_wrong_calls(pipe, call, message):
    with pytest.raises(ValueError, match=message):
        pipe(**{"prompt": "a", "num_steps": 2, **call})


def test_unknown_parameters(pipe):
    with pytest.raises(TypeError, match=r"no parameter steps. It takes prompt, negative_prompt, "):
        pipe("a", steps=2)


def test_wrong_strength(pipe):
    picture = np.zeros((64, 64, 3), "uint8")
    for strength, message in (
        (0.0, r"strength is a number above 0, up to 1. Received: 0.0"),
        (1.5, r"Received: 1.5"),
        (0.2, r"nothing is left to denoise. Received: num_steps=2, strength=0.2"),
    ):
        with pytest.raises(ValueError, match=message):
            pipe("a", num_steps=2, image=picture, strength=strength)


def test_wrong_devices(exported):
    for devices, message in (
        (["GPU:0"], r"A device is one of /device:CPU:0. Received: 'GPU:0'"),
        ([], r"At least one device is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            Pipeline.load(exported, devices=devices)


def test_an_export_for_another_device(monkeypatch, caplog):
    """A GPU that is only listed: what has the CPU's rewrites is loaded, and a warning says so."""
    exported = micro_export()
    listed = [
        tf.config.PhysicalDevice(f"/physical_device:{kind}:0", kind) for kind in ("CPU", "GPU")
    ]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: listed)
    Pipeline.load(exported, jit_compile=False)
    Pipeline.load(exported, devices=["CPU:0"])
    assert not caplog.records
    Pipeline.load(exported)
    assert "diffusion_model, decoder, image_encoder were exported for a cpu" in caplog.text
    assert "not for a gpu" in caplog.text and "export with --target gpu" in caplog.text
    caplog.clear()
    load(exported, ["text_encoder"])
    assert not caplog.records
    load(exported, ["decoder"])
    assert "The compiled signatures of decoder were exported for a cpu" in caplog.text


def test_missing_components(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "export")
    path = folder / "pipeline.json"
    manifest = json.loads(path.read_text())
    image = np.zeros((64, 64, 3), "uint8")
    for name, message in (
        ("image_encoder", r"no image_encoder, which an image needs. Export that component"),
        ("decoder", r"holds no decoder, which a pipeline needs"),
    ):
        components = {k: v for k, v in manifest["components"].items() if k != name}
        path.write_text(json.dumps({**manifest, "components": components}))
        with pytest.raises(ExportError, match=message):
            Pipeline.load(folder, jit_compile=False)("a", num_steps=2, image=image)


# The command


def test_which_exports_draw_the_negative_prompt_below_a_guidance_of_1(exported):
    """SD3 draws the prompt alone, Flux is told the scale, and without guidance there is none."""
    manifest = Manifest.read(exported)
    others = (
        replace(manifest, default_sampler="flow_euler"),
        replace(manifest, guidance="none"),
    )
    assert MIXING.holds(manifest) and not any(map(MIXING.holds, others))


def test_generate_and_repeat(load_once, exported, tmp_path, capsys):
    export = ["--export_dir", str(exported), "--nojit_compile"]
    prompts = ["a cat", "a dog"]
    flags = ["--num_steps", "3", "--seed", "7", "--scheduler", "euler", "--guidance_scale", "0"]
    assert main(["generate", *prompts, *export, *flags, "--out", str(tmp_path / "one")]) == 0
    warning = (
        "Warning: a guidance_scale of 0: 0 draws the negative prompt alone, 1 the prompt alone"
    )
    assert capsys.readouterr().err.count(warning) == 1
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["7.png", "8.png", "contact_sheet.png"]
    parameters, needed = read_parameters(str(tmp_path / "one/8.png"))
    assert needed == {}
    text = Image.open(tmp_path / "one/8.png").text[METADATA]
    assert str(small_folder().parent) not in text
    assert json.loads(text)["checkpoint"] == Manifest.read(exported).checkpoint
    assert parameters == {
        "prompt": "a dog",
        "height": 64,
        "width": 64,
        "num_steps": 3,
        "guidance_scale": 0.0,
        "seed": 8,
        "scheduler": "euler",
        "prompt_syntax": "plain",
    }
    again = ["--from_png", str(tmp_path / "one/8.png"), "--out", str(tmp_path / "two")]
    assert main(["generate", *again, *export]) == 0
    pictures = [np.asarray(Image.open(tmp_path / folder / "8.png")) for folder in ("one", "two")]
    assert np.abs(pictures[0].astype(int) - pictures[1]).max() <= 1
    assert main(["generate", *again, *export, "--seed", "9"]) == 0
    assert (tmp_path / "two/9.png").is_file()
    assert main(["generate", *again, *export]) == 0
    assert (tmp_path / "two/8-1.png").is_file(), "nothing is overwritten"

    image = ["--image", str(tmp_path / "one/7.png"), "--out", str(tmp_path / "three")]
    capsys.readouterr()
    assert main(["generate", "a fox", *export, *image, "--num_steps", "4", "--seed", "1"]) == 0
    assert "Warning" not in capsys.readouterr().err
    assert main(["generate", "--from_png", str(tmp_path / "three/1.png"), *export]) == 1
    assert "was made with image; to repeat it, give --image again" in capsys.readouterr().err


def test_generate_keeps_what_is_finished(pipe, exported, tmp_path, capsys, monkeypatch):
    """Each batch is saved when it is done; an error or Ctrl+C leaves it and names the rest."""
    decode, batches = SavedModelRunner.decode, []
    monkeypatch.setattr(Pipeline, "load", lambda *_, **__: pipe)

    def run(out, prompts, ending):
        def decode_first(runner, latents):
            batches.append(sorted(path.name for path in out.glob("*.png")))
            if len(batches) == 2:
                ending()
            return decode(runner, latents)

        batches.clear()
        monkeypatch.setattr(SavedModelRunner, "decode", decode_first)
        flags = ["--export_dir", str(exported), "--num_steps", "1", "--seed", "7"]
        status = main(["generate", *prompts, *flags, "--out", str(out)])
        said = capsys.readouterr()
        assert batches == [[], ["7.png", "8.png"]]
        assert [path.name for path in sorted(out.iterdir())] == ["7.png", "8.png"]
        assert f"{out}/7.png\n{out}/8.png\n" in said.out
        return status, said.err

    def fail():
        raise OSError("the power failed")

    status, error = run(tmp_path / "failed", ["a", "b", "a cat"], fail)
    missing = "2 of 3 pictures were saved in {}. Missing:\n  seed 9: a cat\n"
    assert status == 1 and error.endswith(
        missing.format(tmp_path / "failed") + "sd-tf generate: the power failed\n"
    )
    prompts = [f"number {index}" for index in range(14)]
    status, error = run(tmp_path / "left", prompts, lambda: signal.raise_signal(signal.SIGINT))
    assert status == 130
    assert "2 of 14 pictures were saved" in error and "  seed 18: number 11\n" in error
    assert error.endswith("number 11\n  and 2 more\nsd-tf generate: interrupted\n")


def test_generate_with_wrong_flags(exported, tmp_path, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "plain.png")
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "preview.png").write_bytes(png_bytes(np.zeros((8, 8, 3), "uint8"), {}))
    for name in ("icon.ico", "page.eps"):  # Pillow reads them, and runs Ghostscript for the second
        Image.new("RGB", (16, 16)).save(tmp_path / name)
    for flags, message in (
        (["a", "--export_dir", "/nowhere"], "/nowhere is not an export"),
        (["a", "--export_dir", str(exported), "--num_steps", "99"], "from 1 to 8"),
        (["--from_png", str(tmp_path / "plain.png"), "--export_dir", "x"], "holds no parameters"),
        (["--from_png", str(tmp_path / "text.png"), "--export_dir", "x"], "is not a PNG file"),
        (["--from_png", str(tmp_path / "preview.png"), "--export_dir", "x"], "is a preview, taken"),
        (["--from_png", "/nowhere.png", "--export_dir", "x"], "No such file"),
        (["--export_dir", "x"], "Give a prompt, or --from_png"),
        (["a", "--export_dir", "x", "--count", "0"], "--count is at least 1. Received: 0"),
        *(
            (
                ["a", "--export_dir", str(exported), "--image", str(tmp_path / name)],
                f"{name}: this is not a PNG, JPEG, WebP or AVIF picture.",
            )
            for name in ("icon.ico", "page.eps")
        ),
        (["a", "--export_dir", str(exported), "--image", str(tmp_path)], ": this is a folder."),
        (["a", "--mask", "m.png"], "No embedded checkpoint paints inside a mask"),
        (
            ["a", "--checkpoint", "sd15"],
            "The embedded checkpoints are tiny, tiny-edit, tiny-dit; ",
        ),
        (["a", "--export_dir", str(exported), "--strength", "1"], "--strength goes with image"),
    ):
        assert main(["generate", *flags]) == 1
        assert message in capsys.readouterr().err
    for flags, message in (
        (["a", "--num_steps", "x"], "--num_steps: a whole number of at least 1. Received: 'x'"),
        (["a", "--guidance_scale", "nan"], "from -1000000 to 1000000. Received: nan"),
    ):
        with pytest.raises(SystemExit):
            main(["generate", *flags])
        assert message in capsys.readouterr().err


def test_contact_sheet():
    images = np.zeros((3, 4, 6, 3), "uint8")
    images[2] = 200
    sheet = np.asarray(contact_sheet(images))
    assert sheet.shape == (2 * 4 + 3 * 8, 2 * 6 + 3 * 8, 3)
    assert (sheet[20:24, 8:14] == 200).all() and (sheet[20:24, 22:28] == 255).all()


@pytest.mark.long
def test_openvino_computes_the_same():
    """The plain signatures are ordinary graphs that another runtime reads."""
    import openvino as ov

    rng = np.random.default_rng(0)
    for component, inputs in (
        ("decoder", {"latent": rng.standard_normal((2, 8, 8, 4)).astype("float32")}),
        ("text_encoder", {"tokens": rng.integers(0, 49406, (2, 77)).astype("int32")}),
    ):
        loaded = tf.saved_model.load(str(micro_export() / component / "1"))
        name = "plain_serving_default" if component == "decoder" else "serving_default"
        signature = loaded.signatures[name]
        precise = {"INFERENCE_PRECISION_HINT": "f32"}  # else bfloat16 where the CPU has it
        model = ov.compile_model(ov.convert_model(signature), "CPU", precise)
        theirs = model(list(inputs.values()))
        ours = signature(**{key: tf.constant(value) for key, value in inputs.items()})
        outputs = theirs.to_tuple()
        assert len(outputs) == len(ours)
        for expected in ours.values():  # OpenVINO has names of its own for them
            expected = expected.numpy()
            errors = [
                np.abs(o.astype("float64") - expected.astype("float64")).max() for o in outputs
            ]
            tolerance = 1 if expected.dtype == np.uint8 else 1e-4 * np.abs(expected).max()
            assert min(errors) <= tolerance, name
