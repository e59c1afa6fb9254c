"""The SavedModel from prompts to PNG files, run by TensorFlow alone, against the pipeline."""

import io
import json
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from sd_tf.checkpoints import make_random
from sd_tf.cli.main import main
from sd_tf.components import Endpoint
from sd_tf.export import ExportOptions, bundles, export, text_to_image
from sd_tf.runtime.chain import NEEDED
from sd_tf.runtime.manifest import TEXT_TO_IMAGE, ExportError, Manifest
from sd_tf.runtime.parameters import GUIDANCE, MOST_CHARACTERS
from sd_tf.runtime.psnr import psnr
from sd_tf.runtime.shapes import Shape
from sd_tf.weights import open_checkpoint
from tests import micro
from tests.exports import micro_export, micro_folder, pipeline_of, shaped_export

PROMPTS = [
    *("a large red star", "", "İstanbul at night", "e\u0301 and é", "漢字の星", "👩‍👩‍👧 🏳️‍🌈"),
    *("Straße, ΣΊΣΥΦΟΣ", "<|endoftext|> it's", "a " * 100, "8k, 4k!!", "\x00\ufffd", "it's a dog"),
]
NEGATIVE = "fog, œuvre"
DRAWN = {"num_steps": 2, "guidance_scale": 4.0, "scheduler": "euler_ancestral"}
# Calls in, pixels out, by what is installed beside sd_tf.
ALONE = """
import importlib.util, json, sys
sys.path.append(sys.argv[1])
import numpy as np
import tensorflow as tf

assert importlib.util.find_spec("sd_tf") is None
loaded, pictures = tf.saved_model.load(sys.argv[2]), {}
for number, (name, values) in enumerate(json.load(open(sys.argv[3]))):
    signature = loaded.signatures[name]
    specs = signature.structured_input_signature[1]
    inputs = {key: tf.constant(value, specs[key].dtype) for key, value in values.items()}
    files = signature(**inputs)["image_bytes"]
    pictures[str(number)] = np.stack([tf.io.decode_png(file) for file in files])
np.savez(sys.argv[4], **pictures)
assert not [name for name in sys.modules if name.startswith("sd_tf")]
"""


@pytest.fixture(scope="module")
def pipe():
    return pipeline_of(shaped_export())


@pytest.fixture(scope="module")
def loaded():
    return tf.saved_model.load(str(shaped_export() / TEXT_TO_IMAGE / "1"))


def alone(folder, calls, tmp_path):
    """The pixels of each call (signature, inputs), drawn without sd_tf."""
    (tmp_path / "calls.json").write_text(json.dumps(calls))
    arguments = [folder / TEXT_TO_IMAGE / "1", tmp_path / "calls.json", tmp_path / "pixels.npz"]
    command = [sys.executable, "-I", "-S", "-c", ALONE, sysconfig.get_paths()["purelib"]]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(tmp_path / "pixels.npz") as found:
        return [found[str(i)] for i in range(len(calls))]


def check_pixels(ours, theirs):
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == np.uint8
    assert psnr(ours, theirs, 255) >= 55
    assert np.abs(ours.astype(int) - theirs).max() <= 1


def inputs_of(prompts, **changes):
    """The inputs of `generate`."""
    inputs = {
        "prompt": list(prompts),
        "negative_prompt": [NEGATIVE] * len(prompts),
        "num_steps": DRAWN["num_steps"],
        "unconditional_guidance_scale": DRAWN["guidance_scale"],
        "seed": [3 + i for i in range(len(prompts))],
        "scheduler": DRAWN["scheduler"],
    }
    return {**inputs, **changes}


def run(loaded, name, **inputs):
    specs = loaded.signatures[name].structured_input_signature[1]
    given = {key: tf.constant(value, specs[key].dtype) for key, value in inputs.items()}
    files = loaded.signatures[name](**given)["image_bytes"].numpy()
    return np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files])


# Pictures


def test_tensorflow_alone_draws_what_the_pipeline_draws(pipe, tmp_path):
    calls, expected = [], []

    def call(signature, prompts, shape, inputs, **parameters):
        calls.append((signature, inputs))
        size = {"height": shape.height, "width": shape.width}
        expected.append(pipe(prompts, **size, **parameters).images)

    shapes = pipe.manifest.shapes
    for start in range(0, len(PROMPTS), 2):
        prompts, seeds = PROMPTS[start : start + 2], [start, 99 - start]
        given = inputs_of(prompts, seed=seeds)
        call(
            "generate", prompts, shapes.first, given, negative_prompt=NEGATIVE, seed=seeds, **DRAWN
        )
    compiled = Shape(1, 16, 24)
    for shape in (shapes.first, compiled):  # what lies between them takes a minute
        prompts = PROMPTS[2 : 2 + shape.batch_size]
        name = shapes.signature("generate", shape)
        parameters = {"negative_prompt": NEGATIVE, "seed": 3, **DRAWN}
        call(f"plain_{name}", prompts, shape, inputs_of(prompts), **parameters)
        name = shapes.signature("serving_default", shape)
        prefix = "" if shape == compiled else "plain_"
        call(prefix + name, prompts, shape, {"prompt": prompts}, num_steps=2, seed=0)
    for ours, theirs in zip(alone(shaped_export(), calls, tmp_path), expected, strict=True):
        check_pixels(ours, theirs)


def test_the_compiled_signatures_are_those_of_the_shapes(pipe):
    shapes = pipe.manifest.shapes
    names = [
        prefix + shapes.signature(endpoint, shape)
        for prefix in ("", "plain_")
        for endpoint in ("generate", "serving_default")
        for shape in shapes.all
    ]
    assert pipe.manifest.components[TEXT_TO_IMAGE].signatures == tuple(sorted(names))
    assert TEXT_TO_IMAGE not in pipe.manifest.parts


def test_empty_negative_prompts_are_those_of_a_prompt_alone(loaded):
    default = {"scheduler": Manifest.read(shaped_export()).default_sampler, "seed": [0, 1]}
    given = inputs_of(["a", "b"], negative_prompt=["", ""], **default)
    given["unconditional_guidance_scale"] = GUIDANCE
    ours = run(loaded, "plain_serving_default", prompt=["a", "b"])
    check_pixels(run(loaded, "plain_generate", **given), ours)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": "eular"}, r"scheduler must be one of ddim, .*euler.* Received.*eular"),
        ({"num_steps": 0}, r"num_steps must be .*\b0\b"),
        ({"num_steps": 3}, r"num_steps must be .*\b3\b"),
        (
            {"prompt": ["a", "b" * (MOST_CHARACTERS + 1)]},
            rf"at most {MOST_CHARACTERS} characters\. Received one with.*{MOST_CHARACTERS + 1}",
        ),
        ({"negative_prompt": ["b" * (MOST_CHARACTERS + 1), ""]}, "at most .* characters"),
    ],
)
def test_wrong_values_are_refused(loaded, changes, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s){message}"):
        run(loaded, "plain_generate", **inputs_of(["a", "b"], **changes))


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_prompts_is_refused(loaded, count):
    with pytest.raises((TypeError, tf.errors.InvalidArgumentError), match=r"\(?2,?\)?"):
        run(loaded, "plain_serving_default", prompt=["a"] * count)


# The folder


def test_the_values_are_on_the_disk_once(tmp_path):
    folder = shaped_export()
    whole = folder / TEXT_TO_IMAGE / "1" / "variables"
    linked = {}
    for part in NEEDED:
        parts = list((folder / part / "1" / "variables").glob("variables.data-*"))
        files = whole.glob("variables.data-*")
        (linked[part],) = (path for path in files if any(map(path.samefile, parts)))
    assert len(set(linked.values())) == len(NEEDED)
    own = [path for path in (folder / TEXT_TO_IMAGE).rglob("*") if path.is_file()]
    cost = sum(path.stat().st_size for path in own if path not in linked.values())
    graph = (folder / TEXT_TO_IMAGE / "1" / "saved_model.pb").stat().st_size
    assert cost < 1.5 * graph
    assert sum(path.stat().st_size for path in linked.values()) > 0
    Manifest.read(folder).check_files(folder)


@pytest.mark.long
def test_a_copy_without_links_draws(pipe, tmp_path):
    copy = shutil.copytree(shaped_export(), tmp_path / "copy")
    assert all(path.stat().st_nlink == 1 for path in copy.rglob("*") if path.is_file())
    Manifest.read(copy).check_files(copy)
    for name in NEEDED:
        shutil.rmtree(copy / name)
    (ours,) = alone(copy, [("plain_generate_1x16x24", inputs_of("a"))], tmp_path)
    theirs = pipe("a", NEGATIVE, width=24, seed=3, **DRAWN).images
    check_pixels(ours, theirs)


def test_other_variables_are_not_shared(tmp_path):
    export = shutil.copytree(shaped_export(), tmp_path / "export")
    parts = [export / name / "1" for name in NEEDED]
    for given in (parts[:2], [*parts, parts[0]]):
        with pytest.raises(ExportError, match="variables of text_to_image are not those of text_"):
            bundles.share(given, export / TEXT_TO_IMAGE / "1")
    Manifest.read(export).check_files(export)


@pytest.mark.parametrize("compiles_texts", [False, True])
def test_what_is_compiled(monkeypatch, compiles_texts):
    """The text encoder only where the export has XLA compile it."""
    seen = []
    monkeypatch.setattr(text_to_image, "compiled", lambda function, rewrites: seen.append(rewrites))
    names = ("serving_default", "encode", "seeded")
    endpoints = {name: Endpoint(lambda **inputs: inputs) for name in names}
    part = SimpleNamespace(
        endpoints=lambda *arguments: endpoints, places=SimpleNamespace(inputs={})
    )
    module = object.__new__(text_to_image.TextToImageModule)
    module._parts, module._rewrites = dict.fromkeys(NEEDED, part), {name: name for name in NEEDED}
    module.tables, module._traces = None, SimpleNamespace(shared=None)
    module._manifest = SimpleNamespace(jit_compiled_text_encoder=compiles_texts, time_ids=0)
    for is_compiled in (True, False):
        seen.clear()
        module._drawing(Shape(1, 16, 16), is_compiled)
        texts = ["text_encoder"] * 2 * compiles_texts  # with a negative prompt, and without
        assert seen == ([*texts, "diffusion_model", "decoder"] if is_compiled else [])


# What is refused


def test_its_components_are_replaced_together(tmp_path):
    options = ExportOptions(
        sizes=((16, 16), (16, 24)), batch_sizes=(2, 1), max_steps=2, components=("decoder",)
    )
    copy = shutil.copytree(shaped_export(), tmp_path / "copy")
    before = (copy / "pipeline.json").read_bytes()
    message = r"text_to_image shares the weights .* export all components\. Received: decoder"
    with pytest.raises(ExportError, match=message):
        export(open_checkpoint(micro_folder()), copy, options)
    assert (copy / "pipeline.json").read_bytes() == before


def test_it_is_exported_with_all_components(tmp_path, capsys):
    flags = ["--checkpoint", str(micro_folder()), "--out", str(tmp_path / "out")]
    assert main(["export", *flags, "--text_to_image", "--components", "decoder,text_encoder"]) == 1
    said = capsys.readouterr().err
    assert "--text_to_image is exported with all" in said or "text_to_image is exported" in said
    assert "Received: decoder, text_encoder" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("latent_inputs", "in_channels"), [("mask_and_image", 9), ("image", 8)])
def test_it_needs_a_checkpoint_that_draws_from_a_prompt(tmp_path, latent_inputs, in_channels):
    denoiser = replace(micro.CONFIG.denoiser, in_channels=in_channels)
    config = replace(micro.CONFIG, denoiser=denoiser, latent_inputs=latent_inputs).check()
    make_random(config, tmp_path / "checkpoint")
    options = ExportOptions(max_steps=2, text_to_image=True)
    with pytest.raises(ExportError, match="for checkpoints that draw from a prompt alone"):
        export(open_checkpoint(tmp_path / "checkpoint"), tmp_path / "out", options)


def test_saved_model_cli_shows_texts_and_files():
    tool = [sys.executable, "-m", "tensorflow.python.tools.saved_model_cli", "show"]
    folder = str(shaped_export() / TEXT_TO_IMAGE / "1")
    more = ["--dir", folder, "--tag_set", "serve", "--signature_def", "serving_default"]
    said = subprocess.run([*tool, *more], capture_output=True, text=True, check=True).stdout
    given, _, made = said.partition("outputs")
    for part, name in ((given, "prompt"), (made, "image_bytes")):
        assert f"['{name}'] tensor_info:" in part and "dtype: DT_STRING" in part
        assert "shape: (2)" in part


def test_an_export_has_it_only_if_asked_for():
    assert TEXT_TO_IMAGE not in Manifest.read(micro_export()).components
