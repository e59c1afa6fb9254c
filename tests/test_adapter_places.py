"""Places for adapters: what they hold, what they refuse, and that nothing compiles anew."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

from sd_tf.adapters import AdapterError
from sd_tf.bench.run import COMPILED, LOG_COMPILATIONS
from sd_tf.cli.main import main
from sd_tf.components.build import component, empty_tokens_of
from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.export import ExportOptions, adapters, export
from sd_tf.export.adapters import write_adapters
from sd_tf.export.bundles import WEIGHTS_INDEX
from sd_tf.export.modules import TablesBySize, Traces, keep_variables
from sd_tf.export.replacement import merged
from sd_tf.runtime import chain
from sd_tf.runtime.adapter_places import NO_PLACES, AdapterPlaces
from sd_tf.runtime.adapters import LayerRecord, Layers, SwitchLock, opened, rows_of
from sd_tf.runtime.adapters import layers_of as layers_in
from sd_tf.runtime.chain import Chain
from sd_tf.runtime.manifest import TEXT_TO_IMAGE, VERSION_FOLDER, ExportError, Manifest
from sd_tf.runtime.parameter import CallError
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.png import read_parameters
from sd_tf.runtime.saved_model import SavedModel
from sd_tf.weights import layers_of, open_checkpoint
from tests import micro
from tests.exports import adapted_export, micro_export, micro_folder, pipeline_of
from tests.micro_adapters import adapter_files, lora, written_export

CALL = {"num_steps": 2, "seed": 3, "guidance_scale": 2.0}
TO_Q = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def files():
    return adapter_files()


@pytest.fixture(scope="module")
def written():
    return written_export()


@pytest.fixture(scope="module")
def pipe(written):
    return Pipeline.load(written)


def test_without_adapters_pictures_are_those_of_an_export_without_places(pipe):
    for call in (CALL, {**CALL, "negative_prompt": "fog"}):
        plain = pipeline_of(micro_export(), jit_compile=True)("a star", **call).images
        np.testing.assert_array_equal(pipe("a star", **call).images, plain)
        zero = pipe("a star", **call, adapters={"style": 0, "detail": 0.0}).images
        np.testing.assert_array_equal(zero, plain)
    assert pipe("a star", **CALL, adapters={"style": 1}).images.std() > 0


SWITCHING = """
import sys
import numpy as np
from sd_tf.runtime.pipeline import Pipeline

folder, style, detail = sys.argv[1:]
call = {"num_steps": 2, "seed": 3}
pipe = Pipeline.load(folder)
pipe("a star", **call, adapters={"style": 1})
print("SWITCHED", file=sys.stderr, flush=True)
pictures = [pipe("a star", **call, adapters={"style": 0.5, "detail": -1}).images]
pipe.unload_adapter("detail")
pipe.load_adapter("other", style)
pictures.append(pipe("a star", **call, adapters={"style": 0.5, "other": -1}).images)
pipe.unload_adapter("other")
pipe.load_adapter("detail", detail)
pictures.append(pipe("a star", **call, adapters={"detail": -1, "style": 0.5}).images)
assert np.array_equal(pictures[0], pictures[2])
assert np.abs(pictures[0].astype(int) - pictures[1]).max() > 5
"""


def test_other_adapters_and_scales_compile_nothing(written, files):
    """XLA logs what it compiles: some clusters at the first call, and none later."""
    arguments = [written, files["style"], files["detail"]]
    result = subprocess.run(
        [sys.executable, "-c", SWITCHING, *map(str, arguments)],
        env={**os.environ, **LOG_COMPILATIONS},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    before, after = result.stderr.split("SWITCHED")
    assert COMPILED.findall(before)
    assert not COMPILED.findall(after)


def compiled_loop(slots):
    """Return XLA's optimized code of the loop of a micro pipeline with places, by computation."""
    places = {"adapter_slots": slots, "adapter_rank": 4, "adapter_layers": "all"} if slots else {}
    fixed = Fixed(height=16, width=16, **places)
    checkpoint = open_checkpoint(micro_folder())
    geometry = geometry_of(checkpoint.config, fixed)
    part = component(
        "diffusion_model",
        checkpoint.config,
        geometry,
        "float32",
        empty_tokens_of(checkpoint),
        checkpoint.build,
    )
    module = tf.Module()
    keep_variables(module, part)
    endpoint = part.endpoints(geometry.shapes.first, TablesBySize(part), Traces().shared)["segment"]
    inputs = {
        name: tf.zeros([1 if n is None else n for n in spec.shape], spec.dtype)
        for name, spec in endpoint.inputs.items()
    }
    function = tf.function(endpoint.function, jit_compile=True, autograph=False)
    return function.experimental_get_compiler_ir(**inputs)(stage="optimized_hlo")


def test_merging_stays_out_of_the_loop():
    """The scales are read by the code before the loop alone, and the loop's code is as without."""

    def body_of(code):
        name = re.search(r"while\(.*?body=%?([\w.-]+)", code)[1]
        return re.search(rf"^%?{re.escape(name)} .*?^}}", code, re.DOTALL | re.MULTILINE)[0]

    def products(text):
        return len(re.findall(r"\b(?:dot|convolution|custom-call)\(", text))

    with_places, without = compiled_loop(4), compiled_loop(0)
    assert products(body_of(with_places)) == products(body_of(without)) > 20
    places = sum(len(layers) for layers in [layers_of(micro.CONFIG)["unet"]])
    merging = products(with_places) - products(body_of(with_places))
    assert merging - (products(without) - products(body_of(without))) >= places


def test_written_and_loaded_adapters_are_the_same(pipe, files):
    other = Pipeline.load(adapted_export())
    for name in ("detail", "style"):  # into the other's slots
        other.load_adapter(name, files[name])
    assert other.adapters == ["detail", "style"]
    assert pipe.adapters == ["style", "detail", "third", "fourth"]
    mixture = {"style": 0.7, "detail": -0.4}
    np.testing.assert_array_equal(
        other("a star", **CALL, adapters=mixture).images,
        pipe("a star", **CALL, adapters=mixture).images,
    )


def test_a_call_of_several_batches_and_segments(pipe):
    mixture = {"style": 0.7}
    whole = pipe(["a star"] * 3, **CALL, adapters=mixture)
    watched = pipe(["a star"] * 3, **CALL, adapters=mixture, callback=lambda *_: None)
    np.testing.assert_array_equal(whole.images, watched.images)
    assert whole.each[0].adapters == mixture


def test_prompts_to_files_take_scales(written, pipe):
    loaded = SavedModel(written, "text_to_image", optimize=False)
    inputs = {
        "prompt": np.array(["a star"] * 2),
        "negative_prompt": np.array([""] * 2),
        "num_steps": np.int32(2),
        "unconditional_guidance_scale": np.float32(2.0),
        "seed": np.array([3, 4], "int32"),
        "scheduler": np.array(pipe.manifest.default_sampler),
        "adapter_scales": np.array([0.7, -0.4, 0, 0], "float32"),
    }
    files = loaded.run("plain_generate", inputs)["image_bytes"]
    pictures = np.stack([tf.io.decode_png(file).numpy() for file in files])
    call = {**CALL, "adapters": {"style": 0.7, "detail": -0.4}}
    expected = pipe(["a star"] * 2, **call).images
    assert np.abs(pictures.astype(int) - expected).max() <= 1


def test_the_weights_are_not_copied(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "export")
    model = Path("diffusion_model", VERSION_FOLDER, "variables")
    weights = model / "variables.data-00000-of-00003"
    before = (folder / weights).stat().st_ino
    index = folder / "diffusion_model" / WEIGHTS_INDEX
    os.utime(index, (0, 0))
    os.link(index, tmp_path / "old.index")
    write_adapters(folder, {}, removed=["detail"])
    assert (tmp_path / "old.index").stat().st_mtime == 0, "a file of the old export was written"
    manifest = Manifest.read(folder)
    assert manifest.adapters.names == ["style", "third", "fourth"]
    manifest.check_files(folder)
    assert (folder / weights).stat().st_ino == before
    whole = folder / "text_to_image" / VERSION_FOLDER / "variables"
    assert before in {path.stat().st_ino for path in whole.iterdir()}


def test_what_was_written_before_the_lock_was_held_stays(files, tmp_path, monkeypatch):
    folder = shutil.copytree(adapted_export(), tmp_path / "export")
    staging = adapters.staging

    def later(*arguments):
        monkeypatch.setattr(adapters, "staging", staging)
        write_adapters(folder, {"style": files["style"]})
        return staging(*arguments)

    monkeypatch.setattr(adapters, "staging", later)
    write_adapters(folder, {"detail": files["detail"]})
    assert Manifest.read(folder).adapters.names == ["style", "detail"]
    Manifest.read(folder).check_files(folder)


def test_what_is_no_export_gets_no_lock(files, tmp_path):
    with pytest.raises(ExportError, match=r"is not an export: it has no pipeline\.json"):
        write_adapters(tmp_path / "none", {"style": files["style"]})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ({"other": 1}, "adapters is a number .* for each name, out of style, .*'other': 1"),
        ({"style": "much"}, "Received: {'style': 'much'}"),
        ({"style": 101}, "a number from -100 to 100 .*Received: {'style': 101}"),
        ({"style": float("nan")}, "Received: {'style': nan}"),
        ("style@0.8", "Received: 'style@0.8'"),
    ],
)
def test_mixtures_that_are_refused(pipe, mixture, message):
    with pytest.raises(CallError, match=message):
        pipe("a star", num_steps=2, adapters=mixture)


def test_an_export_without_places_refuses_adapters(files):
    pipe = pipeline_of(micro_export())
    with pytest.raises(CallError, match=r"adapters is only for exports with places"):
        pipe("a star", num_steps=2, adapters={"style": 1})
    with pytest.raises(ExportError, match="no places for adapters: export with --adapter_slots"):
        pipe.load_adapter("style", files["style"])


def test_an_adapter_that_cannot_be_read_changes_nothing(files, monkeypatch):
    """Also where its first layers, those of another component, could be read."""
    manifest, put = Manifest.read(adapted_export()), []
    runner = SimpleNamespace(put=lambda *written: put.append(written))
    pipe = Chain(manifest, [runner], {}, 0.0, layers_in(adapted_export(), manifest))

    def rows(adapter, layers, places):
        if adapter is not None and "unet" in layers.parts:
            raise AdapterError("a tensor is damaged")
        return rows_of(adapter, layers, places)

    monkeypatch.setattr(chain, "rows_of", rows)
    with pytest.raises(AdapterError, match="a tensor is damaged"):
        pipe.load_adapter("style", files["style"])
    assert not put and not pipe.adapters
    monkeypatch.undo()
    pipe.load_adapter("style", files["style"])
    assert [component for component, _, _ in put] == ["text_encoder", "diffusion_model"]
    assert pipe.adapters == ["style"]


def test_adapters_that_do_not_fit_are_refused(files, tmp_path):
    pipe = Pipeline.load(adapted_export(), jit_compile=False)
    high = lora(tmp_path / "high.safetensors", 5, rank=5)
    with pytest.raises(AdapterError, match=r"rank 5.*places have 4. Export with --adapter_rank=5"):
        pipe.load_adapter("high", high)
    with pytest.raises(AdapterError, match=r"no adapter 'style' in the export.*There is none"):
        pipe.unload_adapter("style")
    with pytest.raises(AdapterError, match=r"none of @,=. Received: 'a@b'"):
        pipe.load_adapter("a@b", files["style"])
    for name, file in files.items():
        pipe.load_adapter(name, file)
    with pytest.raises(AdapterError, match=r"style, .* have taken: .*--adapter_slots=5"):
        pipe.load_adapter("fifth", files["style"])
    assert pipe.adapters == list(files)


@pytest.mark.parametrize(
    ("chosen", "advice"),
    [
        ({"conv_in"}, r"unet\.conv_in; .*'attention'\. Export with --adapter_layers=all, or merge"),
        ({"text_projection"}, r"encoder\.text_projection; .*'attention'\. Merge it with --lora"),
        ({"conv_in", "text_projection"}, r"'attention'\. Merge it with --lora"),
    ],
)
def test_the_advice_for_layers_without_places(tmp_path, chosen, advice):
    """Text encoders have the same places in all exports."""
    shapes = {"text_encoder": {"text_projection": (4, 4)}, "unet": {"conv_in": (4, 4, 3, 3)}}
    records = {
        part: Layers({part: {name: LayerRecord(shape, False) for name, shape in found.items()}})
        for part, found in shapes.items()
    }
    layers = {"text_encoder": records["text_encoder"], "diffusion_model": records["unet"]}
    path = tmp_path / "some.safetensors"
    file = lora(path, 0, chosen=lambda part, layer: layer in chosen, model=shapes)
    with pytest.raises(AdapterError, match=advice):
        opened(file, layers, AdapterPlaces(1, 4, "attention"))


def test_a_component_with_places_is_replaced_by_one_with_the_same(written):
    full = Manifest.read(written)
    parts = {name: one for name, one in full.components.items() if name != TEXT_TO_IMAGE}
    full = replace(full, components=parts)
    empty = replace(full, adapters=replace(full.adapters, loaded={}))
    replaced, kept = ["text_encoder"], ["diffusion_model", "decoder", "image_encoder"]
    assert merged(empty, empty, kept, replaced).adapters == empty.adapters
    assert merged(empty, full, [*replaced, *kept[:1]], kept[1:]).adapters == full.adapters
    with pytest.raises(ExportError, match=r"EXPORT --remove NAME`\. The export has style, detail"):
        merged(empty, full, kept, replaced)
    for places, message in (
        (NO_PLACES, r"has 4 places of the rank 4 for layers of 'all'\. Received: no places"),
        (replace(empty.adapters, rank=2), r"Received: 4 places of the rank 2 for layers of 'all'"),
    ):
        with pytest.raises(ExportError, match=message):
            merged(replace(empty, adapters=places), full, kept, replaced)


@pytest.mark.long
def test_layers_without_places_and_other_kinds_are_refused(tmp_path, files):
    folder = tmp_path / "export"
    size = {"batch_size": 1, "height": 16, "width": 16, "max_steps": 2}
    options = ExportOptions(adapter_slots=1, adapter_layers="attention", verify="off", **size)
    export(open_checkpoint(micro_folder()), folder, options)
    pipe = Pipeline.load(folder, jit_compile=False)
    with pytest.raises(AdapterError, match=r"layers that have no place, such as .*'attention'"):
        pipe.load_adapter("style", files["style"])
    tensors = load_file(lora(tmp_path / "q.safetensors", 0, chosen=lambda p, name: name in TO_Q))
    dora = {**tensors, f"{TO_Q}.lora_magnitude_vector": np.ones(16, "float32")}
    save_file(dora, tmp_path / "dora.safetensors")
    with pytest.raises(AdapterError, match=r"has no factors of low rank. Merge it with --lora"):
        pipe.load_adapter("dora", tmp_path / "dora.safetensors")
    bias = {**tensors, f"{TO_Q}.lora_B.bias": np.ones(16, "float32")}
    save_file(bias, tmp_path / "bias.safetensors")
    with pytest.raises(AdapterError, match=r"also changes the bias. Merge it with --lora"):
        pipe.load_adapter("bias", tmp_path / "bias.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter_slots": -1}, "at least 0. Received: -1"),
        ({"adapter_slots": 1, "adapter_rank": 0}, "at least 1. Received: 0"),
        ({"adapter_layers": "some"}, "attention, transformer, all. Received: some"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ExportError, match=message):
        geometry_of(micro.CONFIG, Fixed(**options))


def test_commands(files, tmp_path, capsys):
    folder = shutil.copytree(adapted_export(), tmp_path / "export")
    assert main(["export-adapters", str(folder), f"style={files['style']}"]) == 0
    assert "3 of 4 places are free" in capsys.readouterr().out
    draw = ["generate", "a star", "--export_dir", str(folder), "--nojit_compile"]
    draw += ["--num_steps", "2", "--seed", "3"]
    mixture = ["--adapter=style@0.8", "--adapter=detail@-0.5"]
    load = [f"--load_adapter=detail={files['detail']}"]
    assert main([*draw, *mixture, *load, "--out", str(tmp_path / "one")]) == 0
    png = tmp_path / "one" / "3.png"
    assert read_parameters(str(png))[0]["adapters"] == {"style": 0.8, "detail": -0.5}
    again = ["generate", "--from_png", str(png), *draw[2:5], *load, "--out", str(tmp_path / "two")]
    assert main(again) == 0
    assert (tmp_path / "two" / "3.png").read_bytes() == png.read_bytes()
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main([*draw, "--adapter=style", "--adapter=style@2", "--out", str(tmp_path)])
    assert "style is given twice" in capsys.readouterr().err
    assert main([*draw, "--adapter=other", "--out", str(tmp_path)]) != 0
    assert "out of style" in capsys.readouterr().err
    assert main(["export-adapters", str(folder)]) != 0
    assert "at least one adapter" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["export-adapters", str(folder), "style"])
    assert "NAME=PATH. Received: 'style'" in capsys.readouterr().err


@pytest.mark.long
def test_a_swap_under_load_mixes_nothing(files):
    """While threads draw, the name changes its adapter: each picture is of one or the other."""
    pipe = Pipeline.load(adapted_export(), jit_compile=False)
    states, stopped, seen = [], threading.Event(), [[] for _ in range(4)]
    for name in ("style", "detail"):
        pipe.load_adapter("it", files[name])
        states.append(pipe("a star", **CALL, adapters={"it": 1}).images)
    assert np.abs(states[0].astype(int) - states[1]).max() > 3

    def draw(pictures):
        while not stopped.is_set():
            watched = {"callback": lambda *_: None, "callback_every": 1}  # a call for each step
            pictures.append(pipe("a star", **CALL, adapters={"it": 1}, **watched).images)

    threads = [threading.Thread(target=draw, args=(pictures,)) for pictures in seen]
    for thread in threads:
        thread.start()
    for name in ("style", "detail") * 5:
        pipe.load_adapter("it", files[name])
        time.sleep(0.1)
    stopped.set()
    for thread in threads:
        thread.join()
    found = {
        [np.array_equal(picture, state) for state in states].index(True)
        for pictures in seen
        for picture in pictures
    }
    assert found == {0, 1}


def test_a_change_waits_for_calls_and_goes_before_new_ones():
    lock, order = SwitchLock(), []

    def call(name, seconds):
        with lock.calling():
            order.append(name)
            time.sleep(seconds)

    def change():
        with lock.changing():
            order.append("changed")

    threads = [threading.Thread(target=call, args=("first", 0.3))]
    threads += [threading.Thread(target=change), threading.Thread(target=call, args=("later", 0))]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert order == ["first", "changed", "later"]
