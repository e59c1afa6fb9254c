"""Pictures in tiles: how sides are divided, what stays the same, and exports in tiles."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from sd_tf.components.autoencoder import decoder, image_encoder
from sd_tf.components.tiles import Cut, Tiles, in_tiles
from sd_tf.config.rewrites import REWRITES
from sd_tf.export import ExportOptions, export
from sd_tf.export.replacement import kept_from, merged
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.psnr import psnr
from sd_tf.runtime.runner import PLAIN
from sd_tf.runtime.saved_model import SavedModel
from sd_tf.runtime.shapes import Shape, Shapes
from sd_tf.weights import open_checkpoint, open_small_decoder
from tests.exports import check_equal, micro_decoder, micro_export, micro_folder, pipeline_of

ALONE = np.random.default_rng(0)


def normal(*shape):
    return ALONE.standard_normal(shape, "float32")


@pytest.mark.parametrize("most", [16, 17, 64, 128])
@pytest.mark.parametrize("tiles", [Tiles, lambda side: Tiles(side, reach=side)])
def test_a_side_is_covered(tiles, most):
    least = tiles(most).least_overlap
    assert least >= most // 4
    for side in range(1, 5 * most):
        cut = tiles(most).cut(side)
        assert cut == Cut.of(side, most, least)
        assert cut.tile <= most and (cut.starts[0], cut.starts[-1] + cut.tile) == (0, side)
        assert (len(cut.starts) == 1) is (side <= most)
        assert all(least <= overlap <= least + 2 for overlap in cut.overlaps)
        alone = zip(cut.starts, cut.starts[2:], strict=False)
        assert all(start + cut.tile <= after for start, after in alone)


def doubled(x):
    return ops.repeat(ops.repeat(x, 2, axis=1), 2, axis=2)


def halved(x):
    _, height, width, channels = x.shape
    x = ops.reshape(x, (-1, height // 2, 2, width // 2, 2, channels))
    return ops.mean(x, axis=(2, 4))


@pytest.mark.parametrize("size", [(20, 37), (37, 8), (8, 20)], ids=str)
@pytest.mark.backend
def test_what_sees_no_neighbour_stays_the_same(size):
    latents, pictures = normal(2, *size, 3), normal(2, 2 * size[0], 2 * size[1], 3)
    tiles = Tiles(16)
    found = in_tiles(
        doubled, ops.convert_to_tensor(latents), tiles, size, taken=1, given=2, channels=3
    )
    np.testing.assert_allclose(found, doubled(latents), rtol=1e-5, atol=1e-6)
    found = in_tiles(
        halved, ops.convert_to_tensor(pictures), tiles, size, taken=2, given=1, channels=3
    )
    np.testing.assert_allclose(found, halved(pictures), rtol=1e-5, atol=1e-6)


def test_outside_xla_one_tile_is_computed_at_a_time():
    """TensorFlow would begin others meanwhile, where none needs the last one's result."""
    begun, at_once = [], []

    def begin(tile):
        begun.append(tile)
        at_once.append(len(begun))
        return tile

    def end(tile):
        begun.pop()
        return tile

    def watched(tile):
        for step in (begin, end):
            told = tf.numpy_function(step, [tile], "float32", stateful=False)
            tile = 1.5 * tf.nn.avg_pool2d(tf.ensure_shape(told, tile.shape), 3, 1, "SAME")
        return tile

    @tf.function(autograph=False)
    def run(latents):
        return in_tiles(watched, latents, Tiles(16), (80, 80), taken=1, given=1, channels=3)

    run(tf.constant(normal(1, 80, 80, 3)))
    assert len(at_once) == 49 and set(at_once) == {1}


@pytest.mark.backend
def test_the_reach_of_a_small_decoder():
    """A changed latent shows within it, and at its very edge."""
    small = open_small_decoder(micro_decoder())
    model, side = small.build(), 2 * small.config.reach + 5
    latents = normal(1, side, side, 4)
    other = latents.copy()
    other[0, side // 2, side // 2] += 1.0
    changed = np.asarray(model.decode(latents)) != np.asarray(model.decode(other))
    rows = np.flatnonzero(changed.any(axis=(0, 2, 3)))
    reached = max(side // 2 - rows[0] // 2, rows[-1] // 2 - side // 2)
    assert reached == small.config.reach


@pytest.mark.backend
def test_a_small_decoder_in_wide_tiles_is_exact():
    small = open_small_decoder(micro_decoder())
    tiles, size = Tiles(49, small.config.reach), (70, 50)
    assert tiles.margin == small.config.reach
    shapes = Shapes(((140, 100),), (1,), 2, 4)
    run, whole = (
        decoder(small.build(), small.config.latent_scale, one, shapes, Shape(1, 140, 100))
        for one in (tiles, Tiles())
    )
    latents = ops.convert_to_tensor(normal(1, *size, 4))
    found, expected = (
        np.asarray(one["serving_default"].function(latents)["generated_images"], "int32")
        for one in (run, whole)
    )
    assert np.abs(found - expected).max() <= 1  # rounded from sums in another order
    assert Tiles(16, small.config.reach).margin == 0  # too narrow for it


@pytest.mark.backend
def test_the_autoencoder_in_tiles():
    """What its norms and its attention see is the tile: nearly the same pictures."""
    checkpoint = open_checkpoint("sd_tf/checkpoints/tiny")
    vae, scale = checkpoint.build("vae"), checkpoint.config.autoencoder.latent_scale
    shapes, shape = Shapes(((128, 96),), (1,), 4, 4), Shape(1, 128, 96)
    y, x = np.mgrid[:128, :96] / 128
    picture = np.stack([y, x, 0.5 * (np.hypot(y - 0.5, x - 0.4) < 0.3)], axis=-1)[None]
    images = ops.convert_to_tensor((2 * picture - 1).astype("float32"))
    whole, tiled = (
        image_encoder(vae, tiles, shapes, shape)["serving_default"].function(images)
        for tiles in (Tiles(), Tiles(16))
    )
    expected, found = (np.asarray(one["latent"]) for one in (whole, tiled))
    assert found.shape == (1, 32, 24, 4)
    assert 15 <= psnr(expected, found, peak=np.ptp(expected)) < 80
    latent = ops.convert_to_tensor(scale.apply(expected))
    expected, found = (
        np.asarray(
            decoder(vae, scale, tiles, shapes, shape)["serving_default"].function(latent)[
                "generated_images"
            ]
        )
        for tiles in (Tiles(), Tiles(16))
    )
    assert found.shape == (1, 128, 96, 3)
    assert 20 <= psnr(expected, found, peak=255) < 80


def test_an_export_in_tiles(tmp_path):
    """A size that fits in a tile is decoded whole; a larger one is not, compiled or plain."""
    options = {"sizes": ((16, 16), (32, 72)), "max_steps": 2, "disabled_rewrites": REWRITES}
    export(
        open_checkpoint(micro_folder()),
        tmp_path / "x",
        ExportOptions(**options, tile=32, verify="off"),
    )
    manifest = Manifest.read(tmp_path / "x")
    assert manifest.tile == 32 and Manifest.read(micro_export()).tile == 0
    pipe, plain = pipeline_of(tmp_path / "x"), pipeline_of(micro_export())
    small = pipe("a star", num_steps=2, seed=3).images
    np.testing.assert_array_equal(small, plain("a star", num_steps=2, seed=3).images)
    large = pipe("a star", num_steps=2, seed=3, height=32, width=72).images
    assert large.shape == (1, 32, 72, 3)
    decoder = SavedModel(tmp_path / "x", "decoder", optimize=False)
    latent = np.random.default_rng(0).standard_normal((1, 16, 36, 4), "float32")
    name = manifest.shapes.signature("serving_default", Shape(1, 32, 72))
    compiled, written = (
        decoder.run(prefix + name, {"latent": latent})["generated_images"] for prefix in ("", PLAIN)
    )
    check_equal(compiled, written)


@pytest.mark.parametrize("component", ["decoder", "image_encoder"])
def test_a_component_of_other_tiles_is_refused(component):
    """Both take the pictures that the manifest's one number divides."""
    manifest = Manifest.read(micro_export())
    tiled, replaced = dataclasses.replace(manifest, tile=32), [component]
    kept = kept_from(tiled, replaced)
    with pytest.raises(ExportError, match=r"one of the same tile: the export has 32\. Received: 0"):
        merged(manifest, tiled, kept, replaced)
    assert merged(tiled, tiled, kept, replaced).tile == 32
    assert merged(manifest, tiled, ["decoder", "image_encoder"], ["text_encoder"]).tile == 32
    assert merged(tiled, manifest, ["text_encoder"], ["decoder", "image_encoder"]).tile == 32


@pytest.mark.parametrize("tile", [-8, 30, 33])
def test_tiles_that_are_refused(tile, tmp_path):
    options = ExportOptions(height=16, width=16, max_steps=2, tile=tile)
    with pytest.raises(ExportError, match=r"A tile is 0 or a multiple of 2 from 32 on, in pixels"):
        export(open_checkpoint(micro_folder()), tmp_path / "x", options)
