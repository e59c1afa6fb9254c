"""The Ray Serve application and batch files with an export of several sizes and batches."""

import asyncio
import base64
import io
import json
from pathlib import Path

import numpy as np
import openai
import pytest
from PIL import Image
from playwright.sync_api import expect

from sd_tf.cli.main import main
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.psnr import psnr
from sd_tf.runtime.shapes import Shape, ShapeError
from sd_tf.serving.ray_app.application import build
from sd_tf.serving.ray_app.models import ModelReplica
from sd_tf.serving.ray_app.settings import Settings
from sd_tf.serving.tf_serving.predict import Servable
from tests.exports import pipeline_of, shaped_export
from tests.fronts import ask, running_front
from tests.page_browser import PATIENCE, chromium, opened

PROMPT = "a large red star"
CALL = {"num_steps": 2, "guidance_scale": 4.0, "scheduler": "euler"}

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def pipe():
    return pipeline_of(shaped_export())


@pytest.fixture(scope="module")
def front():
    with running_front(shaped_export(), num_steps=2, guidance_scale=4.0) as front:
        yield front


def pixels(files):
    return np.stack([np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files])


def check_pixels(ours, theirs):
    assert ours.shape == theirs.shape
    assert psnr(ours, theirs, 255) >= 55


# The application


@pytest.mark.parametrize("size", [{}, {"width": 24}, {"height": 16, "width": 24}])
def test_generate_takes_a_size(front, pipe, size):
    status, content = ask(
        front, "POST", "/generate", prompt=PROMPT, seed=3, count=3, **CALL, **size
    )
    assert status == 200
    files = [base64.b64decode(image["png"]) for image in content["images"]]
    check_pixels(pixels(files), pipe([PROMPT] * 3, seed=3, **CALL, **size).images)
    parameters = content["images"][2]["parameters"]
    known = (parameters["height"], parameters["width"], parameters["seed"])
    assert known == (16, size.get("width", 16), 5)


def test_generate_refuses_another_size(front):
    status, content = ask(front, "POST", "/generate", prompt=PROMPT, width=32)
    assert status == 422
    assert "16x16,16x24 (HxW). Received: width 32" in content["error"]


def test_about_tells_the_shapes(front):
    status, about = ask(front, "GET", "/about")
    assert status == 200
    assert about["sizes"] == [[16, 16], [16, 24]] and about["batch_sizes"] == [2, 1]
    assert (about["height"], about["width"], about["batch_size"]) == (16, 16, 2)
    (size,) = [field for field in about["fields"] if field["name"] == "size"]
    assert (size["kind"], size["default"]) == ("size", "16x16")
    assert size["choices"] == about["sizes"]
    assert not {"height", "width"} & {field["name"] for field in about["fields"]}


def test_openais_client_chooses_a_size(front, pipe):
    client = openai.OpenAI(base_url=f"http://{front.http}/v1", api_key="any", max_retries=0)
    for size, width in (("24x16", 24), ("16x16", 16), ("auto", 16)):
        response = client.images.generate(
            prompt=PROMPT, n=3, size=size, extra_body={"seed": 3, **CALL}
        )
        files = [base64.b64decode(image.b64_json) for image in response.data]
        theirs = pipe([PROMPT] * 3, seed=3, width=width, **CALL).images
        check_pixels(pixels(files), theirs)
        assert response.size == f"{width}x16"
        assert response.usage.output_tokens == 3 * 8 * width // 2
    with pytest.raises(openai.BadRequestError, match="one of 16x16, 24x16, or auto") as refused:
        client.images.generate(prompt=PROMPT, size="16x24")
    assert refused.value.param == "size"


def test_a_load_of_mixed_sizes(front, tmp_path):
    arguments = ["--url", f"http://{front.http}", "--num_steps", "1", "--seconds", "2"]
    path = tmp_path / "load.json"
    sizes = ["--sizes", "16x16,16x24", "--clients", "5", "--json", str(path)]
    assert main(["serve", "load", *arguments, *sizes]) == 0
    (record,) = json.loads(path.read_text())
    assert record["pictures"] >= 5 and record["wrong"] == record["failed"] == 0
    assert main(["serve", "load", *arguments, "--clients", "1", "--sizes", "16x32"]) == 1


def test_the_button_hides_no_field_in_use(front):
    """The size is seen at once, and a field that is reached by the keyboard scrolls up."""
    with chromium() as browser, opened(browser, f"http://{front.http}/") as (page, _):
        expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")

        def space_below(name):
            box = page.locator(name).bounding_box()
            return page.locator("#generate").bounding_box()["y"] - box["y"] - box["height"]

        assert space_below("#size") > 0
        page.locator("#random").uncheck()
        page.locator("#size").focus()
        while page.evaluate("document.activeElement.id") != "seed":
            page.keyboard.press("Tab")
        assert space_below("#seed") > 0


def test_only_the_chosen_shapes_are_warmed_up(monkeypatch):
    called = []
    run = Servable.run
    monkeypatch.setattr(
        Servable, "run", lambda self, name, inputs: called.append(name) or run(self, name, inputs)
    )
    chosen = (Shape(1, 16, 24),)
    replica = ModelReplica(str(shaped_export()), "decoder", False, None, chosen, False, 60.0, "f")
    assert asyncio.run(replica.ready()) == "decoder"
    assert called and all(name.endswith("_1x16x24") for name in called)
    called.clear()
    ModelReplica(str(shaped_export()), "diffusion_model", False, None, chosen, False, 60.0, "f")
    names = {name.removeprefix("plain_").removesuffix("_1x16x24") for name in called}
    assert names == {"noise", "begin", "begin_image", "segment"}


def test_an_unknown_shape_to_warm_up_is_refused():
    known = Manifest.read(shaped_export()).shapes
    settings = Settings(str(shaped_export()), warm_up=(known.first, Shape(4, 16, 16)))
    with pytest.raises(ShapeError, match=r"is one of 2x16x16, .* Received: 4x16x16"):
        build(settings)


def test_the_page_chooses_a_size(front):
    with (
        chromium() as browser,
        opened(browser, f"http://{front.http}/") as (page, seen),
    ):
        expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
        page.fill("#prompt", PROMPT)
        page.fill("#count", "1")
        assert page.locator("#size").input_value() == "16x16"
        page.select_option("#size", "16x24")
        page.locator("#prompt").press("Control+Enter")
        expect(page.locator("#state")).to_contain_text("Done in")
        card = page.locator("#cards > li").first
        expect(card.locator(".parameters")).to_contain_text("24 × 16")
        with page.expect_download() as download:
            card.get_by_text("Download").click()
        file = Path(download.value.path()).read_bytes()
        assert pixels([file]).shape == (1, 16, 24, 3)
        page.select_option("#size", "16x16")
        card.get_by_text("Use again").click()
        expect(page.locator("#size")).to_have_value("16x24")
        assert not seen.errors


# Batch files


@pytest.mark.long
def test_a_batch_file_has_widths(tmp_path, pipe):
    prompts = tmp_path / "p.csv"
    prompts.write_text("prompt,width,id\na,16,one\nb,24,two\nc,,three\nd,32,four\n")
    out = tmp_path / "out"
    flags = ["--export_dir", str(shaped_export()), "--prompts", str(prompts), "--out", str(out)]
    flags += ["--num_steps", "2", "--nojit_compile", "--seed", "3"]
    assert main(["serve", "batch", *flags]) == 1
    found = {path.stem: path for path in out.rglob("*.png")}
    assert found.keys() == {"one", "two", "three"}
    expected = {"one": ("a", 16, 3), "two": ("b", 24, 4), "three": ("c", 16, 5)}
    for name, (prompt, width, seed) in expected.items():
        theirs = pipe(prompt, num_steps=2, seed=seed, width=width).images
        check_pixels(pixels([found[name].read_bytes()]), theirs)
