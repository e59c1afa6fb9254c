"""Control pictures through every door: Python, HTTP, batches, TensorFlow Serving's API."""

import base64
import contextlib
import io
import json
import subprocess

import numpy as np
import openai
import pytest
import tensorflow as tf
from PIL import Image
from playwright.sync_api import expect

from sd_tf.cli.main import main
from sd_tf.export import ExportOptions, export
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.parameter import Each
from sd_tf.runtime.png import read_parameters
from sd_tf.runtime.psnr import psnr
from sd_tf.serving.batch.rows import check_rows, check_settings, opened
from sd_tf.serving.client import Client
from sd_tf.weights import CheckpointError, open_checkpoint, open_controlnet
from tests.exports import (
    check_equal,
    micro_export,
    micro_folder,
    micro_net,
    pipeline_of,
    steered_export,
)
from tests.fronts import ask, generated, running_front
from tests.page_browser import artifacts, chromium
from tests.page_browser import opened as opened_page
from tests.test_serving_images import form, post

PROMPT, STEPS = "a red bicycle", 2
CALL = {"num_steps": STEPS, "seed": 3}


@pytest.fixture(scope="module")
def pipe():
    return pipeline_of(steered_export())


@pytest.fixture(scope="module")
def front():
    with running_front(steered_export(), num_steps=STEPS) as front:
        yield front


def picture(seed, size=(16, 16)):
    levels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3)).astype("uint8")
    return Image.fromarray(levels)


LINES, HILLS = picture(1), picture(2)


def file_of(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def coded(image):
    return base64.b64encode(file_of(image)).decode()


# The loop


def test_the_manifest_names_the_nets():
    manifest = Manifest.read(steered_export())
    assert [net.name for net in manifest.controls] == ["micro_net", "micro_net"]
    sha256 = manifest.components["diffusion_model"].checkpoint["sha256"]
    assert list(sha256) == ["unet", "controlnet", "controlnet_2"]
    assert manifest.verification["diffusion_model"]["saved_model"]["psnr_db"] >= 60


ADDING = ("controlnet_down_blocks.", "controlnet_mid_block.", "controlnet_cond_embedding.conv_out.")


@contextlib.contextmanager
def without_numbers(pipe):
    """Put NaN in place of the biases of the nets' last layers and of their pictures' last one."""
    model = pipe._replicas[0].component("diffusion_model")
    session, graph = model._session, model.graph
    tensors = open_controlnet(micro_net()).tensors
    biases = {
        tensors[name].read().tobytes()
        for name in tensors
        if name.startswith(ADDING) and name.endswith(".bias")
    }
    with graph.as_default():
        handles = [
            one.outputs[0]
            for one in graph.get_operations()
            if one.type == "VarHandleOp" and one.get_attr("dtype") == tf.float32
        ]
        values = session.run(
            [tf.raw_ops.ReadVariableOp(resource=h, dtype=tf.float32) for h in handles]
        )
        found = [(h, x) for h, x in zip(handles, values, strict=True) if x.tobytes() in biases]
        assert len(found) == 2 * len(biases), "of both nets"

        given = [tf.compat.v1.placeholder(x.dtype, x.shape) for _, x in found]
        writes = [
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            for (handle, _), value in zip(found, given, strict=True)
        ]
        assign = session.make_callable(tf.group(*writes), given)
    assign(*(np.full_like(x, np.nan) for _, x in found))
    try:
        yield
    finally:
        assign(*(x for _, x in found))


@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "compiled"])
def test_a_net_that_is_off_changes_nothing(jit_compile):
    """It is not even run, or else NaN would come into the picture, at any scale.

    The plain picture is that of an export without nets.
    """
    pipe = pipeline_of(steered_export(), jit_compile)
    plain, own = (one(PROMPT, **CALL).images for one in (pipeline_of(micro_export()), pipe))
    if jit_compile:
        assert psnr(own, plain, peak=255) >= 50
    else:
        check_equal(own, plain)
    with without_numbers(pipe):
        for off in (
            {"control_image": LINES, "control_scale": 0},
            {"control_image": [None, None]},
            {"control_image": LINES, "control_end": 0.3},  # ends within the first of 3 calls
        ):
            np.testing.assert_array_equal(pipe(PROMPT, **CALL, **off).images, own)
        made = pipe(PROMPT, control_image=LINES, control_scale=[0, 1], **CALL).images
        assert made.std() == 0, "without a number there is no picture"
    assert psnr(pipe(PROMPT, control_image=LINES, **CALL).images, plain, peak=255) < 40


def test_compiled_by_xla(pipe):
    """The condition in the compiled loop takes the same branches."""
    compiled = pipeline_of(steered_export(), jit_compile=True)
    for more in (
        {},
        {"control_image": LINES},
        {"control_image": [LINES, HILLS], "control_scale": [0.5, 1], "control_start": [0, 0.5]},
        {"control_image": [None, HILLS], "control_guess": True},
    ):
        ours, theirs = (one(PROMPT, **CALL, **more).images for one in (compiled, pipe))
        assert psnr(ours, theirs, peak=255) >= 50


def test_pictures_of_their_own(pipe):
    """Each prompt follows its own pictures, in any batch."""
    given = Each([[LINES, None], [HILLS, None], [LINES, None]])
    many = pipe([PROMPT] * 3, num_steps=STEPS, seed=[3, 3, 3], control_image=given).images
    check_equal(many[0], many[2])
    one = pipe(PROMPT, control_image=[HILLS, None], **CALL).images[0]
    assert psnr(many[1], one, peak=255) >= 50 > psnr(many[0], one, peak=255)


def test_from_a_picture(pipe):
    arguments = {**CALL, "image": picture(5), "strength": 0.5}
    plain, steered = (
        pipe(PROMPT, **arguments, **more).images for more in ({}, {"control_image": LINES})
    )
    assert psnr(plain, steered, peak=255) < 50


def test_no_text_to_image(tmp_path):
    options = ExportOptions(height=16, width=16, max_steps=2, text_to_image=True)
    with pytest.raises(Exception, match=r"draw from a prompt alone.*Received: a ControlNet"):
        export(open_checkpoint(micro_folder(), controlnet=[micro_net()]), tmp_path / "x", options)
    assert not (tmp_path / "x").exists()
    with pytest.raises(CheckpointError, match="No such file"):
        open_checkpoint(micro_folder(), controlnet=[tmp_path / "none"])


# Commands


def test_generate(load_once, pipe, tmp_path, capsys):
    LINES.save(tmp_path / "lines.png")
    command = ["generate", PROMPT, "--export_dir", str(steered_export()), "--num_steps", "2"]
    command += ["--seed", "3", "--nojit_compile", "--out", str(tmp_path)]
    flags = ["--control_image", str(tmp_path / "lines.png"), "--control_image="]
    assert main([*command, *flags, "--control_scale", "0.7,"]) == 0
    made = np.asarray(Image.open(tmp_path / "3.png"))
    expected = pipe(PROMPT, control_image=[LINES, None], control_scale=0.7, **CALL).images[0]
    assert psnr(made, expected, peak=255) >= 50
    parameters, pictures = read_parameters(tmp_path / "3.png")
    assert parameters["control_scale"] == [0.7, None] and pictures == {"control_image": [1, None]}
    one = ["--control_image", str(tmp_path / "lines.png"), "--control_scale", "0.7"]
    assert main([*command, *one, "--out", str(tmp_path / "one")]) == 0  # for both nets
    made = np.asarray(Image.open(tmp_path / "one" / "3.png"))
    expected = pipe(PROMPT, control_image=LINES, control_scale=0.7, **CALL).images[0]
    assert psnr(made, expected, peak=255) >= 50
    capsys.readouterr()
    repeat = ["generate", "--from_png", str(tmp_path / "3.png"), *command[2:-2]]
    for other in ([], flags[:2], ["--control_image=", *flags[:2]], ["--control_image="]):
        assert main([*repeat, *other]) == 1
        said = capsys.readouterr().err
        assert "give --control_image FILE --control_image= again." in said
    assert main([*repeat, *flags, "--out", str(tmp_path / "again")]) == 0
    again = np.asarray(Image.open(tmp_path / "again" / "3.png"))
    np.testing.assert_array_equal(again, np.asarray(Image.open(tmp_path / "3.png")))
    capsys.readouterr()
    assert main([*command, "--control_scale", "1"]) == 1
    assert "--control_scale goes with control_image" in capsys.readouterr().err


# HTTP


def test_http(front, pipe):
    more = {"control_scale": [0.7, None], "control_guess": True}
    picture, image = generated(front, PROMPT, control_image=[coded(LINES), None], **CALL, **more)
    expected = pipe(PROMPT, control_image=[LINES, None], **more, **CALL).images[0]
    assert psnr(picture, expected, peak=255) >= 50
    assert image["parameters"]["control_scale"] == [0.7, None]


LARGE, HUGE = Image.new("1", (4096, 4096)), Image.new("L", (10_000, 10_000))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"control_image": [coded(LINES)] * 3}, "for each prompt. Received: 3"),
        ({"control_image": coded(HUGE)}, "the picture has more than 16777216 pixels"),
        (
            {"control_image": [coded(LARGE)] * 8},
            "The pictures of a call have at most 67108864 pixels together. Received: 134217728",
        ),
        (
            {"control_image": [None, *[coded(LINES)] * 65]},
            "A call has at most 64 pictures. Received: 65",
        ),
        ({"control_image": "AAAA"}, "this is not a PNG, JPEG, WebP or AVIF picture"),
        ({"control_image": "?"}, "this is not base64"),
        ({"control_image": {"a": 1}}, "control_image"),
        ({"control_image": coded(LINES), "control_scale": [1, "x"]}, "control_scale"),
        ({"control_image": coded(LINES), "control_start": 1}, "control_end is above"),
        ({"control_scale": 1}, "control_scale goes with control_image"),
    ],
)
def test_http_refuses(front, body, message):
    status, content = ask(front, "POST", "/generate", prompt=PROMPT, **body)
    assert status == 422 and message in content["error"]


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "I;16", "CMYK"])
def test_pictures_of_every_mode(front, mode):
    image = LINES.convert("L").convert(mode) if mode in ("I;16", "LA") else LINES.convert(mode)
    file = io.BytesIO()
    image.save(file, "JPEG" if mode == "CMYK" else "PNG")
    body = base64.b64encode(file.getvalue()).decode()
    picture, _ = generated(front, PROMPT, control_image=body, **CALL)
    assert picture.shape == (16, 16, 3)


def test_the_images_api(front):
    client = openai.OpenAI(base_url=f"http://{front.http}/v1", api_key="none", max_retries=0)

    def made(response):
        return base64.b64decode(response.data[0].b64_json)

    more = {**CALL, "control_image": [coded(LINES), coded(HILLS)], "control_scale": [1, 0.5]}
    steered = made(client.images.generate(prompt=PROMPT, extra_body=more))
    _, image = generated(front, PROMPT, **more)
    assert base64.b64decode(image["png"]) == steered
    start = {"prompt": PROMPT, "image": ("a.png", file_of(HILLS))}
    body = {**CALL, "strength": 1, "control_image": coded(LINES), "control_scale": 0.5}
    edited = made(client.images.edit(**start, extra_body=body))
    _, image = generated(front, PROMPT, image=coded(HILLS), **body)
    assert base64.b64decode(image["png"]) == edited


@pytest.mark.parametrize(
    ("parts", "body"),
    [
        (
            [('control_image"; filename="lines.png', file_of(LINES))],
            {"control_image": coded(LINES)},
        ),
        (
            [
                ("control_image[]", b""),
                ('control_image[]"; filename="lines.png', file_of(LINES)),
                ("control_scale[]", b"1"),
                ("control_scale[]", b"0.5"),
            ],
            {"control_image": [None, coded(LINES)], "control_scale": [1, 0.5]},
        ),
    ],
    ids=["for all", "one left out"],
)
def test_a_form_with_files(front, parts, body):
    """The images API draws what the same pictures in base64 do."""
    start = [("prompt", PROMPT.encode()), ("image", file_of(HILLS)), ("strength", b"1")]
    values = [(name, str(value).encode()) for name, value in CALL.items()]
    status, content = post(front, form(*start, *values, *parts))
    assert status == 200, content
    _, image = generated(front, PROMPT, image=coded(HILLS), strength=1, **CALL, **body)
    assert content["data"][0]["b64_json"] == image["png"]


def test_the_forms_fields(front):
    _, content = ask(front, "GET", "/about")
    fields = {field["name"]: field for field in content["fields"]}
    assert fields["control_image-2"]["label"] == "Control picture: micro_net (2)"
    assert fields["control_scale-1"]["goes_with"] == "control_image-1"
    assert fields["control_guess"]["kind"] == "switch"


# Batches


def test_rows(tmp_path):
    manifest = Manifest.read(steered_export())
    LINES.save(tmp_path / "lines.png")
    (tmp_path / "text.png").write_text("no picture")
    settings = check_settings({"seed": 0, "num_steps": 2}, manifest)
    entries = [
        {"prompt": "a", "control_image": "lines.png,", "control_scale": "0.5,"},
        {"prompt": "b", "control_image": ["lines.png", "lines.png"]},
        {"prompt": "c", "image": "lines.png", "strength": 0.5},
        {"prompt": "one", "control_image": "lines.png", "control_scale": "0.5"},
        {"prompt": "d", "control_image": "none.png"},
        {"prompt": "e", "image": "text.png"},
        {"prompt": "f", "control_image": 5},
    ]
    rows, failures = check_rows(entries, settings, manifest, tmp_path)
    path = str(tmp_path / "lines.png")
    assert [row.call.control_image for row in rows] == [
        [path, None],
        [path, path],
        None,
        [path, path],
    ]
    assert rows[3].call.control_scale == (0.5, 0.5)
    assert rows[0].call.control_scale == (0.5, 1.0) and rows[2].call.image == path
    assert opened({"prompt": "c", "image": path})["image"].size == (16, 16)
    assert [failure.row for failure in failures] == [4, 5, 6]
    for failure, message in zip(
        failures,
        ["none.png cannot be read (No such file", "text.png: this is not a PNG", "is a path"],
        strict=True,
    ):
        assert message in failure.reason


def test_rows_that_flags_complete(tmp_path, monkeypatch):
    """Paths in flags begin at the working directory; scales are for rows with a picture."""
    manifest, here = Manifest.read(steered_export()), tmp_path / "here"
    here.mkdir()
    for path in (tmp_path / "lines.png", here / "hills.png", here / "a,b.png"):
        LINES.save(path)
    monkeypatch.chdir(here)

    def drawn(entry, **flags):
        given = {"seed": 0, "num_steps": 2, **flags}
        rows, failures = check_rows(
            [{"prompt": "a", **entry}], check_settings(given, manifest), manifest, tmp_path
        )
        assert failures == []
        return rows[0].call

    lines, hills = str(tmp_path / "lines.png"), str(here / "hills.png")
    assert drawn({}, control_scale=0.5).control_scale is None
    own = drawn({"control_image": "lines.png, "}, control_scale=0.5)
    assert own.control_image == [lines, None] and own.control_scale == (0.5, 0.5)
    both = drawn({}, control_image="hills.png, hills.png")
    assert both.control_image == [hills, hills]
    assert drawn({}, control_image=["", "hills.png"]).control_image == [None, hills]
    assert drawn({}, control_image="a,b.png").control_image == [str(here / "a,b.png")] * 2
    for nothing in ("", [None, None], ["", ""]):
        plain = drawn({"control_image": nothing}, control_image="hills.png", control_scale=0.5)
        assert plain.control_image is None
    assert drawn({}, control_image="").control_image is None


@pytest.mark.long
def test_a_batch(pipe, tmp_path):
    LINES.save(tmp_path / "lines.png")
    rows = [
        {"prompt": PROMPT, "seed": 3, "control_image": ["lines.png", None], "control_scale": 0.7},
        {"prompt": PROMPT, "seed": 3},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    command = ["serve", "batch", "--export_dir", str(steered_export()), "--num_steps", "2"]
    command += ["--prompts", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*command, "--nojit_compile", "--workers", "1"]) == 0
    files = sorted((tmp_path / "out").glob("**/*.png"))
    steered, plain = (np.asarray(Image.open(file)) for file in files)
    expected = pipe(PROMPT, control_image=[LINES, None], control_scale=0.7, **CALL).images[0]
    assert psnr(steered, expected, peak=255) >= 50 > psnr(steered, plain, peak=255)
    assert read_parameters(files[0])[0]["control_scale"] == [0.7, 0.7]


# TensorFlow Serving's API


def test_the_client(front, pipe):
    client = Client(f"grpc://{front.grpc}", steered_export(), jit_compile=False)
    arguments = {**CALL, "control_image": [LINES, HILLS], "control_end": [0.5, 1]}
    ours, theirs = (one(PROMPT, **arguments).images for one in (client, pipe))
    check_equal(ours, theirs)


# The page

DESCRIBED = """async (made) =>
    (await import(new URL('static/form.js', document.baseURI))).described(made)"""


def test_the_page(front, tmp_path):
    """A field, a preview and sliders for each net; what is sent, told, used again, and copied."""
    files = [tmp_path / "lines.png", tmp_path / "hills.png"]
    LINES.save(files[0])
    clear = Image.new("RGBA", HILLS.size, (255, 255, 255, 0))
    clear.paste((200, 0, 0, 100), (8, 0, 16, 16))
    clear.save(files[1])
    with chromium() as browser, opened_page(browser, f"http://{front.http}/") as (page, seen):
        expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
        page.fill("#prompt", PROMPT)
        page.uncheck("#random")
        page.fill("#seed", "3")
        page.set_input_files("#control_image-2", files[1])
        expect(page.locator("#control_image-2-seen")).to_be_visible()
        expect(page.locator("#control_image-1-seen")).to_be_hidden()
        shot = page.locator("#control_image-2-seen img").screenshot()
        levels = np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)
        near, far = (levels[levels.shape[0] // 2, levels.shape[1] * n // 4] for n in (1, 3))
        assert near.max() <= 2 and np.abs(far - (200, 0, 0)).max() <= 4, "without transparency"
        page.fill("#control_scale-2", "0.7")
        page.fill("#control_scale-1", "0.3")  # of a net without a picture: not sent
        page.check("#control_guess")
        with page.expect_request("**/generate") as request:
            page.click("#generate")
        body = request.value.post_data_json
        assert body["control_image"][0] is None
        assert base64.b64decode(body["control_image"][1]) == files[1].read_bytes()
        assert body["control_scale"] == [None, 0.7] and body["control_guess"] is True
        assert not [name for name in body if "-" in name]
        expect(page.locator("#state")).to_contain_text("Done in")
        page.screenshot(path=artifacts(tmp_path) / "control.png", full_page=True)
        page.fill("#control_scale-2", "1")
        page.uncheck("#control_guess")
        page.locator("#cards > li").first.get_by_text("Use again").click()
        expect(page.locator("#control_scale-2")).to_have_value("0.7")
        expect(page.locator("#control_scale-1")).to_have_value("1")
        made = {"control_scale": [None, 0.7], "width": 16, "height": 16}
        facts = page.evaluate(DESCRIBED, made)["facts"]
        assert [value for label, value in facts if label.startswith("Control: ")] == ["0.7"]
        expect(page.locator("#control_guess")).to_be_checked()
        page.evaluate("navigator.clipboard.writeText = (text) => (window.copied = text)")
        page.locator("#cards > li").first.get_by_text("curl").click()
        command = page.evaluate("window.copied")
        with page.expect_download() as download:
            page.locator("#cards > li").first.get_by_text("Download").click()
        first = np.asarray(Image.open(download.value.path()).convert("RGB"))
        page.fill("#control_end-2", "2")
        page.click("#generate")
        expect(page.locator("#control_end-2-error")).to_contain_text("A number from 0 to 1")
        assert not seen.errors
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    again = np.asarray(Image.open(tmp_path / "sd_tf-3.png").convert("RGB"))
    assert psnr(first, again, peak=255) >= 40
