"""Several sizes and batches over one set of weights."""

import json

import numpy as np
import pytest
import tensorflow as tf

from sd_tf.cli.main import main
from sd_tf.export import ExportOptions, export
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.parameter import CallError
from sd_tf.runtime.pipeline import Pipeline, SavedModelRunner
from sd_tf.runtime.png import read_parameters
from sd_tf.runtime.psnr import psnr
from sd_tf.runtime.shapes import Shape, ShapeError, Shapes, parse_shapes, parse_sizes
from sd_tf.weights import open_checkpoint
from tests.exports import micro_export, micro_folder, pipeline_of, shaped_export

SHAPES = Shapes(((16, 16), (16, 24)), (2, 1), 2, 4)
DRAWN = {"num_steps": 2, "seed": 5, "scheduler": "euler_ancestral"}


@pytest.fixture(scope="module")
def pipe():
    return pipeline_of(shaped_export(), jit_compile=True)


def images_of(pipe, prompts, **parameters):
    return pipe(prompts, **{**DRAWN, **parameters}).images


# Names


def test_signatures_of_shapes():
    named = [SHAPES.signature("segment", shape) for shape in SHAPES.all]
    assert named == ["segment", "segment_1x16x16", "segment_2x16x24", "segment_1x16x24"]
    assert [SHAPES.endpoint_of(name) for name in named] == [("segment", s) for s in SHAPES.all]
    assert SHAPES.endpoint_of("plain_begin_image") == ("plain_begin_image", SHAPES.first)
    with pytest.raises(ShapeError, match=r"is one of 2x16x16, .*, 1x16x24\. Received: 4x16x16"):
        SHAPES.signature("segment", Shape(4, 16, 16))


def test_sizes_are_height_by_width():
    assert parse_sizes("16x24,32x8") == ((16, 24), (32, 8))
    assert parse_shapes("4x16x24") == (Shape(4, 16, 24),)
    for text in ("", "16", "16x24,", "0x8", "16×24", "axb"):
        with pytest.raises(ShapeError, match="Sizes are HEIGHTxWIDTH with commas between"):
            parse_sizes(text)
    with pytest.raises(ShapeError, match=r"is BATCHxHEIGHTxWIDTH.* Received: '16x24'"):
        parse_shapes("16x24")


def test_a_size_is_chosen_by_what_tells_it():
    assert SHAPES.size_of(None, None) == (16, 16)
    assert SHAPES.size_of(None, 24) == SHAPES.size_of(16, 24) == (16, 24)
    for sides, rule in (
        ((16, None), "Several of the export's sizes fit: 16x16,16x24 (HxW). Received: height 16"),
        ((None, 8), "The export has no such size: 16x16,16x24 (HxW). Received: width 8"),
        ((24, 16), "The export has no such size: 16x16,16x24 (HxW). Received: 24x16"),
    ):
        with pytest.raises(ShapeError) as refused:
            SHAPES.size_of(*sides)
        assert str(refused.value) == rule


@pytest.mark.parametrize(
    ("batch_sizes", "count", "expected"),
    [
        ((4,), 6, [4, 4]),
        ((1, 4), 1, [1]),
        ((1, 4), 2, [1, 1]),
        ((1, 4), 3, [4]),  # three calls cost more than one wasted picture
        ((1, 4), 6, [4, 1, 1]),
        ((4, 1), 8, [4, 4]),
        ((2, 8, 16), 23, [16, 8]),
        ((2, 8, 16), 27, [16, 8, 2, 2]),
    ],
)
def test_pictures_are_divided_over_the_batches_that_cost_least(batch_sizes, count, expected):
    assert Shapes(((16, 16),), batch_sizes, 8, 4).divided(count) == expected


# The export


def test_every_shape_is_exported(pipe):
    manifest = Manifest.read(shaped_export())
    assert manifest.shapes == SHAPES
    for name, component in manifest.components.items():
        endpoints = {SHAPES.endpoint_of(signature) for signature in component.signatures}
        once = {endpoint for endpoint, _ in endpoints}
        assert endpoints == {(endpoint, shape) for endpoint in once for shape in SHAPES.all}, name
        assert manifest.verification[name]["saved_model"]["psnr_db"] >= 60


@pytest.mark.long
def test_the_variables_are_stored_once(tmp_path):
    def stored(folder):
        """The names and shapes of the variables' values; the graph of objects is a text."""
        found = tf.train.list_variables(str(folder / "diffusion_model/1/variables/variables"))
        return [one for one in found if one[0] != "_CHECKPOINTABLE_OBJECT_GRAPH"]

    alone = tmp_path / "alone"
    export(open_checkpoint(micro_folder()), alone, only((16, 16), 2))
    assert stored(shaped_export()) == stored(alone)


def only(size, batch_size):
    height, width = size
    return ExportOptions(
        batch_size=batch_size, height=height, width=width, max_steps=2, verify="off"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": (1, 0)}, r"The batch size is at least 1\. Received: 0"),
        ({"batch_sizes": (1, 1)}, r"Each batch size is given once\. Received: \(1, 1\)"),
        ({"sizes": ((16, 16), (16, 21))}, r"The width is a positive multiple of 2\. Received: 21"),
        ({"sizes": ((16, 16), (16, 16))}, r"Each size is given once"),
        ({"sizes": ((16, 16),), "height": 16}, r"Give `height` and `width`, or `sizes`\."),
        ({"batch_sizes": (1,), "batch_size": 2}, r"Give `batch_size` or `batch_sizes`\."),
    ],
)
def test_wrong_shapes_are_refused(tmp_path, options, message):
    with pytest.raises(ExportError, match=message):
        export(open_checkpoint(micro_folder()), tmp_path / "x", ExportOptions(**options))
    assert not (tmp_path / "x").exists()


def test_a_component_is_replaced_by_one_of_the_same_shapes(tmp_path):
    options = ExportOptions(
        sizes=((16, 16), (16, 24)), batch_sizes=(2, 1), max_steps=2, components=("decoder",)
    )
    message = r"same shapes: .* 16x16 px in batches of 2\. Received: 16x16,16x24 px in .* of 2, 1"
    with pytest.raises(ExportError, match=message):
        export(open_checkpoint(micro_folder()), micro_export(), options)


# Pictures


def test_one_seed_is_one_picture_in_every_batch(pipe):
    pairs = images_of(pipe, ["a", "b"])
    singles = [images_of(pipe, prompt, seed=5 + i)[0] for i, prompt in enumerate("ab")]
    assert psnr(pairs, np.stack(singles), 255) >= 55
    assert np.abs(pairs.astype(int) - np.stack(singles)).max() <= 1
    three = images_of(pipe, ["a", "b", "c"])
    assert psnr(three[:2], pairs, 255) >= 55


def test_a_shape_draws_what_an_export_made_for_it_draws(pipe, tmp_path):
    alone = tmp_path / "alone"
    export(open_checkpoint(micro_folder()), alone, only((16, 24), 1))
    picture = np.random.default_rng(0).integers(0, 255, (16, 24, 3)).astype("uint8")
    alone = Pipeline.load(alone)
    for given in ({}, {"image": picture, "strength": 0.9}, {"negative_prompt": "blue"}):
        ours = images_of(pipe, "a", width=24, **given)
        assert ours.shape == (1, 16, 24, 3)
        assert psnr(ours, images_of(alone, "a", **given), 255) >= 55


@pytest.mark.long
def test_plain_twins_exist_for_every_shape(pipe):
    plain = pipeline_of(shaped_export())
    for size in SHAPES.sizes:
        sides = dict(zip(("height", "width"), size, strict=True))
        assert psnr(images_of(plain, "abc"[:1], **sides), images_of(pipe, "a", **sides), 255) >= 55


@pytest.mark.long
def test_only_what_is_asked_for_is_called():
    class Recording(SavedModelRunner):
        def call(self, component, endpoint, shape, **inputs):
            seen.add(shape)
            return super().call(component, endpoint, shape, **inputs)

    def see(done, calls, latents):
        previews.append(recorded.decode(latents))

    seen, previews = set(), []
    loaded = pipeline_of(shaped_export(), jit_compile=True)
    replica = Recording(shaped_export(), loaded.manifest, True, None)
    recorded = Pipeline(loaded.manifest, [replica], loaded._tokenizers, 0.0)
    for prompts, shape in ((["a", "b"], Shape(2, 16, 24)), (["a"], Shape(1, 16, 24))):
        seen.clear()
        recorded(prompts, width=24, callback=see, **DRAWN)
        assert seen == {shape}
        assert previews.pop().shape == (len(prompts), 16, 24, 3)
    seen.clear()
    assert recorded.warm_up([Shape(1, 16, 16), Shape(1, 16, 24)])["total"] > 0
    assert seen == {Shape(1, 16, 16), Shape(1, 16, 24)}
    with pytest.raises(ShapeError, match=r"Received: 3x16x16"):
        recorded.warm_up([Shape(3, 16, 16)])


def test_an_unknown_size_is_refused_with_the_known_ones(pipe):
    with pytest.raises(CallError, match=r"16x16,16x24 \(HxW\)\. Received: height 32") as refused:
        images_of(pipe, "a", height=32)
    assert refused.value.parameter == "height"
    with pytest.raises(CallError, match="height is a whole number of at least 1"):
        images_of(pipe, "a", height=0)


def test_the_command_line_takes_sizes(load_once, tmp_path, capsys):
    flags = ["--export_dir", str(shaped_export()), "--num_steps", "2", "--seed", "3"]
    assert main(["generate", "a", *flags, "--width", "24", "--out", str(tmp_path)]) == 0
    parameters, _ = read_parameters(tmp_path / "3.png")
    assert (parameters["height"], parameters["width"]) == (16, 24)
    again = ["--from_png", str(tmp_path / "3.png"), "--out", str(tmp_path / "again")]
    assert main(["generate", "--export_dir", str(shaped_export()), *again]) == 0
    assert (tmp_path / "again" / "3.png").read_bytes() == (tmp_path / "3.png").read_bytes()
    assert main(["generate", "a", *flags, "--height", "17", "--out", str(tmp_path)]) == 1
    assert "16x16,16x24 (HxW). Received: --height 17" in capsys.readouterr().err


@pytest.mark.long
def test_a_benchmark_measures_a_shape(tmp_path):
    flags = ["--export_dir", str(shaped_export()), "--num_steps", "1", "--repeat", "1"]
    out = tmp_path / "report"
    shape = ["--batch_size", "1", "--width", "24"]
    assert main(["benchmark", *flags, *shape, "--out", str(out)]) == 0
    (variant,) = json.loads(out.with_suffix(".json").read_text())["variants"]
    assert [variant[name] for name in ("batch_size", "height", "width")] == [1, 16, 24]
