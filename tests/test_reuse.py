"""Exports whose deep features serve several model calls: exact where nothing is reused."""

from dataclasses import replace

import numpy as np
import pytest
from keras import ops
from playwright.sync_api import expect

from sd_tf.cli.main import main
from sd_tf.config.image_prompts import places
from sd_tf.export import ExportOptions, export
from sd_tf.models.unet import UNet
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.png import read_parameters
from sd_tf.runtime.reuse import ReuseRecord, named_reuses
from sd_tf.runtime.shapes import Shape
from sd_tf.serving.client import Client, transports
from sd_tf.serving.ray_app import settings
from sd_tf.weights import layout, open_checkpoint
from tests import micro
from tests.exports import micro_export, micro_folder, micro_net, pipeline_of, replace_in_micro
from tests.fronts import ask, generated, running_front
from tests.page_browser import artifacts, chromium, opened
from tests.peer_pipelines import check_pictures, psnr

CALL = {"num_steps": 6, "seed": 3, "guidance_scale": 4.0, "scheduler": "euler"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a net, whose part in the shallow layers is kept, too."""
    folder = tmp_path_factory.mktemp("reuse") / "export"
    checkpoint = open_checkpoint(micro_folder(), controlnet=[micro_net()])
    replace_in_micro(folder, checkpoint, ("diffusion_model",), max_steps=6, reuse=3, verify="full")
    return folder


@pytest.fixture(scope="module")
def pipe(folder):
    return Pipeline.load(folder, jit_compile=False)


@pytest.fixture(scope="module")
def picture():
    return np.random.default_rng(0).integers(0, 256, (16, 16, 3), "uint8")


def test_the_manifest_says_what_reuse_gives(folder):
    manifest = Manifest.read(folder)
    # 8 channels of the first way down, as many of each of the two shallow skip connections.
    assert manifest.reuse == ReuseRecord(most=3, parts=2, channels=16 + 2 * 8)
    figures = manifest.verification["diffusion_model"]
    for label in ("saved_model", "saved_model_xla"):
        assert figures[label]["psnr_db"] >= 60, label
    assert figures["reuse 1"]["psnr_db"] == 999.0
    assert 10 < figures["reuse 3"]["psnr_db"] < figures["reuse 2"]["psnr_db"] + 3 < 100
    assert figures["reuse 3"]["num_steps"] == 6 and figures["reuse 3"]["seconds"] > 0
    assert Manifest.read(micro_export()).reuse.most == 1


def test_without_reuse_pictures_are_exact(pipe):
    call = {**CALL, "num_steps": 2}
    plain = pipeline_of(micro_export())("a star", **call).images
    np.testing.assert_array_equal(pipe("a star", **call).images, plain)
    np.testing.assert_array_equal(pipe("a star", **call, reuse=1).images, plain)
    assert (pipe("a star", **call, reuse=2).images != plain).mean() > 0.1


def test_segments_keep_what_a_whole_run_keeps(pipe, picture):
    """A callback divides the run into segments of one call, whatever is reused in them."""
    for every in (2, 3):
        call = {**CALL, "reuse": every, "control_image": picture}
        whole = pipe("a star", **call).images
        parts = pipe("a star", **call, callback=lambda done, *_: done < 9).images
        np.testing.assert_array_equal(parts, whole)


def test_a_picture_to_start_from(pipe, picture):
    """The first call that is made is computed whole, whatever its number."""
    call = {**CALL, "image": picture, "strength": 0.5}
    exact = pipe("a star", **call).images
    assert 20 < psnr(exact, pipe("a star", **call, reuse=2).images) < 60


def test_nets_are_kept_with_the_features(pipe, picture):
    """What a net adds to the shallow layers is that of the last whole call."""
    call = {**CALL, "num_steps": 2, "reuse": 2}
    with_net = pipe("a star", **call, control_image=picture, control_scale=1.0).images
    without = pipe("a star", **call).images
    assert np.abs(with_net.astype(int) - without).max() > 2
    # In the second of two calls, which reuses, a net whose share is the second one does nothing.
    late = pipe("a star", **call, control_image=picture, control_start=0.5).images
    np.testing.assert_array_equal(late, without)


def test_compiled(folder, pipe):
    compiled = Pipeline.load(folder)
    for every in (1, 3):
        ours = compiled("a star", **CALL, reuse=every).images
        check_pictures(ours, pipe("a star", **CALL, reuse=every).images)


def test_everywhere(folder, pipe, tmp_path, capsys):
    """The command line, its PNG file, and HTTP, whose page learns how much may be reused."""
    expected = pipe("a star", **CALL, reuse=2).images[0]
    flags = [f"--export_dir={folder}", "--num_steps=6", "--seed=3", "--guidance_scale=4"]
    flags += ["--scheduler=euler", f"--out={tmp_path}", "--nojit_compile"]
    assert main(["generate", "a star", *flags, "--reuse=2"]) == 0
    assert read_parameters(tmp_path / "3.png")[0]["reuse"] == 2
    assert main(["generate", "a star", *flags, "--reuse=4"]) == 1
    assert "--reuse" in capsys.readouterr().err
    with running_front(folder) as front:
        drawn, _ = generated(front, "a star", **CALL, reuse=2)
        status, about = ask(front, "GET", "/about")
        [field] = [field for field in about["fields"] if field["name"] == "reuse"]
    assert field["named"] == [list(one) for one in named(folder).items()]
    assert (status, field["least"], field["most"], field["default"]) == (200, 1, 3, 1)
    assert np.abs(drawn.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_client_of_the_server(folder, pipe, picture, monkeypatch, scheme):
    """A call has the features in it, for which the server makes room; the first, none."""
    monkeypatch.setattr(settings, "USUAL_BODY", 0)
    monkeypatch.setattr(settings, "MORE_BODY", 20_000 if scheme == "grpc" else 1 << 20)
    sent, send = [], transports.Grpc._send

    def recorded(self, method, request, timeout):
        if "features" in getattr(request, "inputs", ()):
            sent.append(request.ByteSize())
        return send(self, method, request, timeout)

    monkeypatch.setattr(transports.Grpc, "_send", recorded)
    features = 4 * np.prod(
        Manifest.read(folder).reuse.shape(Shape(2, 16, 16), pipe.manifest.shapes)
    )
    with running_front(folder) as front:
        address = f"{scheme}://{getattr(front, scheme)}"
        with Client(address, folder, jit_compile=False) as client:
            for more in ({}, {"callback": lambda *state: None}):
                call = {**CALL, "reuse": 2, "control_image": picture}
                expected = pipe("a star", **call).images.astype(int)
                assert np.abs(client("a star", **call, **more).images - expected).max() <= 1
        assert front.front.predictions.most - settings.MORE_BODY > features
    if scheme == "grpc":
        whole, first, *others = sent
        assert whole == first and len(others) == 5 and min(others) > first + features - 100


def named(folder):
    manifest = Manifest.read(folder)
    return named_reuses(manifest.reuse, manifest.verification)


def test_what_values_are_called(folder):
    """By what the export's verification measured, where it did."""
    figures = {
        "reuse 1": {"seconds": 3.0, "psnr_db": 999.0},
        "reuse 2": {"seconds": 2.0, "psnr_db": 26.6},
    }
    record = ReuseRecord(most=3, parts=2, channels=8)
    assert named_reuses(record, {"diffusion_model": figures}) == {
        1: "exact",
        2: "2: 1.5 × as fast, 27 dB",
        3: "3: faster, less exact",
    }
    assert all(" × as fast, " in name for every, name in named(folder).items() if every > 1)


def test_the_page(folder, tmp_path):
    with (
        running_front(folder) as front,
        chromium() as browser,
        opened(browser, f"http://{front.http}/") as (page, seen),
    ):
        expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
        assert page.locator("#reuse option").all_inner_texts() == list(named(folder).values())
        page.fill("#prompt", "a star")
        for every in (1, 2):  # the first is what it is without a choice
            if every > 1:
                page.select_option("#reuse", str(every))
            with page.expect_request("**/generate") as request:
                page.click("#generate")
            assert request.value.post_data_json["reuse"] == every
            expect(page.locator("#state")).to_contain_text("Done in")
        page.screenshot(path=artifacts(tmp_path) / "reuse.png", full_page=True)
        assert not seen.errors


def test_refusals(tmp_path):
    with pytest.raises(ExportError, match=r"`reuse`, .* is 1…20: .* Received: 0"):
        export(open_checkpoint(micro_folder()), tmp_path / "x", ExportOptions(reuse=0))


# The model: with the same inputs, features give the very output that they were returned with.


@pytest.mark.backend
@pytest.mark.parametrize("layers", [1, 2])
def test_features_stand_for_the_deep_layers(layers):
    """With ControlNets' additions and the keys of pictures, of which each layer takes its own."""
    config = replace(
        micro.CONFIG.denoiser,
        down_depths=((1,) * layers, (1,) * layers),
        up_depths=((1,) * (layers + 1),) * 2,
    )
    unet, random = UNet(config), np.random.default_rng(0)
    for slot in layout.slots(unet).values():
        slot.fill(lambda slot=slot: random.standard_normal(slot.shape).astype("float32") * 0.2)

    def some(*shape):
        return ops.convert_to_tensor(random.standard_normal(shape).astype("float32"))

    latents, times, context = some(1, 8, 8, 4), ops.convert_to_tensor([5]), some(1, 77, 16)
    down, up, middle = places(config)
    widths = [*down, *middle, *up]
    pictures = [[(some(1, 4, w), some(1, 4, w), ops.zeros((1, 1, 1, 4)))] for w in widths]
    added = [some(*shape) for shape in unet.shapes(latents.shape)]
    inputs = {"pictures": pictures, "control": added}
    exact = unet(latents, times, context, **inputs)
    kept, features = unet(latents, times, context, **inputs, keeps=True)
    assert features.shape == (1, 8, 8, config.feature_channels)
    inputs["control"] = added[: config.shallow_skips]
    reused = unet(latents, times, context, **inputs, features=features)
    largest = np.abs(ops.convert_to_numpy(exact)).max()
    for output in (kept, reused):
        differ = np.abs(ops.convert_to_numpy(output - exact)).max()
        assert differ <= 1e-6 * largest
    other = [[(k, 2 * v, mask) for k, v, mask in one] for one in pictures]
    changed = unet(latents, times, context, **{**inputs, "pictures": other}, features=features)
    assert np.abs(ops.convert_to_numpy(changed - exact)).max() > 1e-3 * largest
