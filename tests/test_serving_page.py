"""The web page in a real browser, used as a person uses it, on the real server.

What a healthy server does not show (busy, lost, failing) is put in its place by the browser.
"""

import base64
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from sd_tf.runtime.controls import ControlRecord
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.png import METADATA
from sd_tf.serving.ray_app.body import form_fields
from sd_tf.training import world
from sd_tf.training.world.captions import Ask, AskedThing
from tests.page_browser import DESKTOP, PATIENCE, PHONE, artifacts, chromium, opened

PROMPT = "a large red star on a dark blue background"
ASK = Ask((AskedThing("star", "red", "large"),), "dark blue", position=None, relation=None)
MARKUP = """<img src=x onerror="document.title='run'"></script><script>alert(1)</script> "&amp;\""""
FOR_SHELLS = """it's "quoted" $HOME $(id) `id` \\n back\\slash !! %s\nsecond line, größer ★"""
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
)

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def url(served_url):
    return served_url.rstrip("/") + "/"


@pytest.fixture(scope="module")
def browser(url):
    with chromium() as started:
        yield started


@pytest.fixture
def visit(browser, url):
    with opened(browser, url, permissions=["clipboard-read", "clipboard-write"]) as (page, seen):
        yield page, seen


@pytest.fixture
def page(visit):
    return visit[0]


def draw(page, prompt=PROMPT, **values):
    fill(page, prompt, **values)
    page.keyboard.press("Control+Enter")


def fill(page, prompt=PROMPT, **values):
    expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
    page.fill("#prompt", prompt)
    if "seed" in values:
        page.uncheck("#random")
    for name, value in values.items():
        page.fill(f"#{name}", str(value))


def drawn(page, count=1):
    expect(page.locator("#state")).to_contain_text("Done in")
    expect(page.locator("#cards > li")).to_have_count(count)


def download(page, place=0) -> bytes:
    with page.expect_download() as download:
        page.locator("#cards > li").nth(place).get_by_text("Download").click()
    return Path(download.value.path()).read_bytes()


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def answer(page, **response):
    page.route("**/generate", lambda route: route.fulfill(**response))


def stream(page, *events):
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    answer(page, body=body, content_type="text/event-stream")


ACCEPTED = ("accepted", {"id": "1", "images": [{"index": 0, "prompt": "", "seed": 1}], "calls": 4})
PROGRESS = ("progress", {"index": 0, "done": 2, "calls": 4})
PREVIEW = ("preview", {"index": 0, "done": 2, "png": PIXEL})


def made(prompt="a", **parameters):
    """A run's events with one picture, of a server that is another one."""
    parameters = {"prompt": prompt, "height": 64, "width": 64, "seed": 1, **parameters}
    image = {"index": 0, "seed": 1, "png": PIXEL, "parameters": parameters}
    return ACCEPTED, ("image", image), ("done", {"seconds": 1.0})


def field(name, kind="picture", **values):
    """A field as a server describes it."""
    known = {"label": name, "help": "", "least": None, "above": None, "most": None}
    known |= {"slider": None, "default": None, "required": False, "goes_with": None}
    return {"name": name, "kind": kind, **known, "per_model": False, "is_prompt": False, **values}


# Drawing


def test_a_prompt_becomes_its_picture(visit, url, tmp_path):
    page, seen = visit
    fill(page, num_steps=20, guidance_scale=4, seed=1, count=4)
    page.evaluate(
        """() => {
          window.previews = 0;
          new MutationObserver((changes) => {
            window.previews += changes.filter((c) => c.target.src?.startsWith("data:")).length;
          }).observe(document.getElementById("tiles"),
            { subtree: true, attributes: true, attributeFilter: ["src"] });
        }"""
    )
    page.keyboard.press("Control+Enter")
    expect(page.locator("#tiles img[src^='data:']").first).to_be_visible()
    expect(page.locator("#stop")).to_be_visible()
    page.screenshot(path=artifacts(tmp_path) / "running.png")
    drawn(page, count=4)
    page.screenshot(path=artifacts(tmp_path) / "done.png")
    assert page.evaluate("window.previews") > 0

    right = []
    for place in range(4):
        png = download(page, place)
        content = json.loads(Image.open(io.BytesIO(png)).text[METADATA])
        del content["checkpoint"]
        assert content == {
            "prompt": PROMPT,
            "height": 64,
            "width": 64,
            "num_steps": 20,
            "guidance_scale": 4.0,
            "seed": 4 - place,
            "scheduler": page.locator("#scheduler").input_value(),
            "prompt_syntax": "plain",
            "pictures": {},
        }
        assert pixels(png).shape == (64, 64, 3)
        verdict = world.judge(world.read(pixels(png)), ASK)
        right.append(verdict["shape"] and verdict["colour"] and verdict["background"])
    assert sum(right) >= 3, right

    expect(page.locator("#cards .parameters").first).to_have_text(
        re.compile(r"20 steps · guidance 4 · \w+ · seed\s4")
    )
    assert not [r for r in seen.requests if not r.startswith((url, f"blob:{url[:8]}", "data:"))]
    assert seen.requests.count(f"{url}about") == 1, "the export is the one that the page knows"
    assert not seen.errors


def test_stopping_in_the_middle(visit):
    page, seen = visit
    most = page.locator("#count").get_attribute
    expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/generate")):
        draw(page, num_steps=50, count=most("max"))
        expect(page.locator("#tiles img").first).to_be_visible()
        page.keyboard.press("Escape")
    expect(page.locator("#state")).to_have_text("Stopped")
    expect(page.locator("#announcer")).to_have_text("Stopped")
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("#notice")).to_be_hidden()
    before = page.locator("#cards > li").count()
    draw(page, num_steps=2, count=1)
    drawn(page, count=before + 1)
    assert not seen.errors


def test_the_stop_button(page):
    draw(page, num_steps=50, count=16)
    page.locator("#stop").click()
    expect(page.locator("#state")).to_have_text("Stopped")
    expect(page.locator("#generate")).to_be_focused()


def test_without_previews(page):
    page.uncheck("#live")
    with page.expect_request("**/generate") as request:
        draw(page, num_steps=2)
    assert request.value.post_data_json["previews"] == 0
    drawn(page)


# The gallery


def test_the_gallery_survives_a_reload(page):
    draw(page, num_steps=3, count=2, seed=7, negative_prompt="a blue circle")
    drawn(page, count=2)
    before = download(page)
    page.reload()
    expect(page.locator("#cards > li")).to_have_count(2)
    expect(page.locator("#gallery-title")).to_have_text("This session (2)")
    assert download(page) == before
    expect(page.locator("#prompt")).to_have_value(PROMPT)
    expect(page.locator("#seed")).to_have_value("7")
    draw(page, num_steps=2, count=1)
    drawn(page, count=3)


def test_clearing_can_be_undone(page):
    draw(page, num_steps=2, count=2)
    drawn(page, count=2)
    page.click("#clear")
    expect(page.locator("#cards > li")).to_have_count(0)
    page.click("#undo")
    expect(page.locator("#cards > li")).to_have_count(2)
    page.wait_for_timeout(200)
    page.reload()
    expect(page.locator("#cards > li")).to_have_count(2)
    page.click("#clear")
    page.wait_for_timeout(200)
    page.reload()
    expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
    expect(page.locator("#gallery")).to_be_hidden()


@pytest.mark.parametrize("refusal", ["IDBObjectStore.prototype.add", "IDBFactory.prototype.open"])
def test_a_browser_that_stores_nothing(visit, refusal):
    page, seen = visit
    page.add_init_script(
        f"{refusal} = () => {{ throw new DOMException('full', 'QuotaExceededError'); }};"
    )
    page.reload()
    draw(page, num_steps=2)
    drawn(page)
    expect(page.locator("#notice")).to_be_hidden()
    assert not seen.errors


def test_parameters_are_used_again(page):
    draw(page, num_steps=3, guidance_scale=2.5, seed=-5, negative_prompt="a circle", count=2)
    drawn(page, count=2)
    fill(page, "something else", num_steps=9, seed=1, negative_prompt="")
    page.locator("#cards > li").nth(1).get_by_text("Use again").click()
    expected = {
        "prompt": PROMPT,
        "negative_prompt": "a circle",
        "num_steps": "3",
        "guidance_scale": "2.5",
        "seed": "-5",
        "count": "1",
    }
    for name, value in expected.items():
        expect(page.locator(f"#{name}")).to_have_value(value)
    expect(page.locator("#random")).not_to_be_checked()

    draw(page, seed=8, negative_prompt="")
    drawn(page, count=3)
    page.fill("#negative_prompt", "a square")
    page.locator("#cards > li").first.get_by_text("Use again").click()
    expect(page.locator("#negative_prompt")).to_have_value("")


def copied_command(page):
    page.locator("#cards").get_by_text("curl").click()
    expect(page.locator("#cards").get_by_text("Copied")).to_be_visible()
    return page.evaluate("navigator.clipboard.readText()")


def shell(command, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )


def test_the_curl_command_draws_the_same(page, tmp_path):
    draw(page, FOR_SHELLS, num_steps=2, seed=3)
    drawn(page)
    command = copied_command(page)
    assert shell(command, tmp_path).returncode == 0
    png = (tmp_path / "sd_tf-3.png").read_bytes()
    assert json.loads(Image.open(io.BytesIO(png)).text[METADATA])["prompt"] == FOR_SHELLS
    difference = pixels(png).astype(int) - pixels(download(page))
    assert abs(difference).max() <= 2
    refused = shell(command.replace('"num_steps":2', '"num_steps":0'), tmp_path)
    assert refused.returncode != 0
    assert "num_steps" in refused.stderr
    assert "Traceback" not in refused.stderr


# Errors


def test_wrong_values_are_said_at_their_fields(visit):
    page, seen = visit
    fill(page, " ", num_steps=900, guidance_scale="", count=0, seed=2**31)
    page.click("#generate")
    expect(page.locator("#prompt")).to_be_focused()
    for name, text in {
        "prompt": "Say what the picture shows.",
        "num_steps": "A whole number from 1 to",
        "guidance_scale": "A number from -1000000 to 1000000, such as 4.",
        "count": "A whole number from 1 to",
        "seed": "A whole number from -2147483648 to 2147483647.",
    }.items():
        expect(page.locator(f"#{name}-error")).to_contain_text(text)
        expect(page.locator(f"#{name}")).to_have_attribute("aria-invalid", "true")
    assert not [request for request in seen.requests if request.endswith("/generate")]
    page.fill("#num_steps", "5")
    expect(page.locator("#num_steps-error")).to_be_hidden()
    expect(page.locator("#num_steps")).not_to_have_attribute("aria-invalid", "true")


def test_a_schedulers_most_steps(page):
    page.route("**/about", altered_about(schedulers={"ddim": 20, "lcm": 8}))
    page.reload()
    fill(page, num_steps=20)
    page.select_option("#scheduler", "lcm")
    expect(page.locator("#num_steps-hint")).to_have_text("1 to 8")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#num_steps-error")).to_have_text("A whole number from 1 to 8, with lcm.")


def picture(folder, colour="red"):
    path = folder / "a scene.png"
    Image.new("RGB", (64, 64), colour).save(path)
    return path


def test_a_picture_to_start_from(visit, tmp_path):
    """It goes along, it shows, and the curl command sends it too."""
    page, seen = visit
    page.set_input_files("#image", picture(tmp_path))
    expect(page.locator("#given-picture")).to_be_visible()
    draw(page, num_steps=4, seed=3, strength=0.5)
    drawn(page)
    page.screenshot(path=artifacts(tmp_path) / "picture.png")
    expect(page.locator("#cards .parameters")).to_contain_text("strength 0.5")
    assert shell(copied_command(page), tmp_path).returncode == 0
    same = pixels((tmp_path / "sd_tf-3.png").read_bytes()).astype(int) - pixels(download(page))
    assert abs(same).max() <= 2

    page.click("#forget")
    expect(page.locator("#given")).to_be_hidden()
    with page.expect_request("**/generate") as request:
        draw(page, num_steps=2)
    assert not {"image", "strength"} & request.value.post_data_json.keys()
    assert not seen.errors


def test_what_is_entered_before_the_server_has_answered(page):
    page.fill("#prompt", "from before the reload")
    page.fill("#num_steps", "3")
    page.uncheck("#random")
    held = []
    page.route("**/about", lambda route: held.append(route))
    page.reload()
    page.fill("#prompt", PROMPT)
    held.pop().continue_()
    expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
    expect(page.locator("#prompt")).to_have_value(PROMPT)
    expect(page.locator("#num_steps")).to_have_value("3")
    expect(page.locator("#scheduler")).not_to_have_value("")
    expect(page.locator("#random")).not_to_be_checked()
    expect(page.locator("#seed")).to_be_enabled()


def test_a_file_that_is_no_picture(page, tmp_path):
    (tmp_path / "words.png").write_text("words")
    page.set_input_files("#image", tmp_path / "words.png")
    draw(page, num_steps=2)
    expect(page.locator("#image-error")).to_have_text(
        "image: this is not a PNG, JPEG, WebP or AVIF picture."
    )


def test_editing(page, tmp_path):
    """A checkpoint that follows instructions: a picture is needed, and how much of it stays."""
    page.route("**/about", edits)
    page.reload()
    expect(page.locator("#prompt-label")).to_have_text("Instruction")
    expect(page.locator("#strength")).to_be_hidden()
    expect(page.locator("#mask")).to_be_hidden()
    draw(page, "make the star green")
    expect(page.locator("#image-error")).to_have_text("Choose a file.")
    file = picture(tmp_path)
    page.set_input_files("#image", file)
    stream(page, ACCEPTED)
    with page.expect_request("**/generate") as request:
        draw(page, "make the star green", image_guidance_scale=1.8)
    sent = request.value.post_data_json
    assert base64.b64decode(sent["image"]) == file.read_bytes()
    assert sent["image_guidance_scale"] == 1.8 and "strength" not in sent
    page.screenshot(path=artifacts(tmp_path) / "edit.png")


def edits(route):
    """Answer as a server does whose checkpoint edits."""
    about = route.fetch().json()
    fields = {field["name"]: field for field in about["fields"]}
    fields["image"]["required"] = True
    strength = fields.pop("strength")
    fields["image_guidance_scale"] = {
        **strength,
        "name": "image_guidance_scale",
        "label": "Picture guidance",
        "help": "how much of the picture an edit keeps",
        "slider": [1, 4, 0.1],
        "default": 1.5,
        "above": None,
        "least": -100,
        "most": 100,
    }
    route.fulfill(json={**about, "use_of_picture": "edit", "fields": list(fields.values())})


def altered_about(without=(), **values):
    def handle(route):
        about = route.fetch().json()
        fields = [field for field in about["fields"] if field["name"] not in without]
        route.fulfill(json={**about, "fields": fields, **values})

    return handle


def test_a_checkpoint_without_guidance(page):
    page.route("**/about", altered_about(("guidance_scale", "negative_prompt"), examples=[]))
    page.reload()
    expect(page.locator("#guidance_scale")).to_be_hidden()
    expect(page.locator("#negative_prompt")).to_be_hidden()
    expect(page.locator("#examples")).to_be_hidden()
    stream(page, ACCEPTED)
    with page.expect_request("**/generate") as request:
        draw(page)
    assert not {"guidance_scale", "negative_prompt"} & request.value.post_data_json.keys()


def test_merged_adapters_are_named(page):
    part = {"name": "sd", "format": "single file", "sha256": {}}
    merged = {**part, "adapters": [{"name": "style", "scale": -0.5, "sha256": {}}]}
    parts = {"text_encoder": part, "diffusion_model": merged}
    page.route("**/about", altered_about(checkpoint=parts))
    page.reload()
    expect(page.locator("#facts")).to_contain_text(
        "sd (single file), sd (single file) + style at -0.5"
    )


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refusal_stands_beside_the_form(page, status):
    answer(page, status=status, json={"error": "Not like <b>this</b>."})
    draw(page)
    expect(page.locator("#form-notice")).to_have_text("Not like <b>this</b>.")
    expect(page.locator("#notice")).to_be_hidden()


def test_a_refusal_stands_at_the_field_that_it_names(page):
    answer(page, status=422, json={"error": "num_steps is at most 3. Received: 20"})
    draw(page)
    expect(page.locator("#num_steps-error")).to_have_text("num_steps is at most 3. Received: 20")
    expect(page.locator("#num_steps")).to_be_focused()


def test_a_server_with_a_key(page):
    """The page asks once for each tab; its calls have the key, the curl command a variable."""

    def guarded(route):
        if route.request.headers.get("authorization") == "Bearer the-right-one":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": "Send the server's key."})

    for place in ("**/about", "**/generate", "**/openapi.json"):
        page.route(place, guarded)
    page.reload()
    expect(page.locator("#key-error")).to_have_text("")
    page.fill("#key", "a—dash")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_contain_text("letters, digits and signs of ASCII")
    page.fill("#key", "a-wrong-one")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_have_text("The server does not know this key.")
    expect(page.locator("#key")).to_be_focused()
    page.fill("#key", " the-right-one ")
    page.keyboard.press("Enter")
    expect(page.locator("#key-form")).to_be_hidden()
    page.reload()
    draw(page, num_steps=2)
    drawn(page)
    assert '-H "authorization: Bearer $SD_TF_TOKEN"' in copied_command(page)
    page.click("footer a")
    expect(page.get_by_text("POST /generate")).to_be_visible()
    expect(page.locator("pre").first).to_contain_text("Bearer $SD_TF_TOKEN")


def test_a_busy_server(page, tmp_path):
    answer(
        page, status=429, headers={"Retry-After": "2"}, json={"error": "8 requests are waiting."}
    )
    draw(page, num_steps=2)
    expect(page.locator("#notice-text")).to_have_text("The server is busy. 8 requests are waiting.")
    again = page.locator("#again")
    expect(again).to_have_text(re.compile("Try again in [12] s"))
    expect(again).to_have_attribute("aria-disabled", "true")
    page.screenshot(path=artifacts(tmp_path) / "busy.png")
    page.unroute("**/generate")
    expect(again).to_have_text("Try again")
    again.click()
    drawn(page)
    expect(page.locator("#notice")).to_be_hidden()


@pytest.mark.parametrize("status", [500, 503, 504])
def test_a_failing_server(page, status):
    answer(page, status=status, body="<html>proxy</html>")
    draw(page)
    expect(page.locator("#notice-text")).to_contain_text(f"HTTP {status}")
    expect(page.locator("#again")).to_have_text("Try again")
    expect(page.locator("#state")).to_have_text("Not finished")


def test_the_connection_is_lost_in_the_middle(page, tmp_path):
    stream(page, ACCEPTED, PROGRESS, PREVIEW)
    draw(page)
    lost = "The connection to the server was lost. Finished pictures are kept."
    expect(page.locator("#notice-text")).to_have_text(lost)
    expect(page.locator("#tiles .unfinished img")).to_be_visible()
    page.screenshot(path=artifacts(tmp_path) / "lost.png")
    page.unroute("**/generate")
    page.route("**/generate", lambda route: route.abort())
    page.click("#again")
    expect(page.locator("#notice-text")).to_have_text(lost)


def test_the_server_fails_in_the_middle(page):
    stream(page, ACCEPTED, PROGRESS, ("error", {"status": 500, "error": "Out of <i>memory</i>."}))
    draw(page)
    expect(page.locator("#notice-text")).to_have_text(
        "The server could not do it: Out of <i>memory</i>."
    )


def test_a_stream_may_be_cut_anywhere_and_holds_comments(page):
    """One event in pieces of three bytes, comments between, and \\r\\n at the ends of lines."""
    page.add_init_script(
        """const real = fetch;
        window.fetch = async (address, options) => {
          const response = await real(address, options);
          const bytes = new Uint8Array(await response.arrayBuffer());
          const pieces = new ReadableStream({
            start(controller) {
              for (let i = 0; i < bytes.length; i += 3) controller.enqueue(bytes.slice(i, i + 3));
              controller.close();
            },
          });
          return new Response(pieces, response);
        };"""
    )
    page.reload()
    parameters = {"prompt": "größer ★", "num_steps": 4, "scheduler": "ddim", "seed": 1}
    image = {"index": 0, "seed": 1, "png": PIXEL, "parameters": parameters}
    text = ": ping\r\n\r\n"
    for name, data in (ACCEPTED, PREVIEW, ("image", image), ("done", {"seconds": 1.25})):
        content = json.dumps(data, ensure_ascii=False)
        text += f"event: {name}\r\ndata: {content}\r\n\r\n: ping\r\n\r\n"
    answer(page, body=text.encode(), content_type="text/event-stream")
    draw(page)
    drawn(page)
    expect(page.locator("#cards .prompt")).to_have_text("größer ★")


def test_a_server_that_does_not_answer(page):
    page.route("**/about", lambda route: route.abort())
    page.reload()
    expect(page.locator("#model")).to_have_text("The server does not answer.")
    page.unroute("**/about")
    page.click("#again")
    expect(page.locator("#model")).to_contain_text("64×64 px")


# What changes between runs


def test_files_that_a_picture_does_not_have_are_not_used_again(page, tmp_path):
    """And those that it has, and the form has not, are asked for."""
    again = page.locator("#cards > li").first.get_by_text("Use again")
    stream(page, *made())
    draw(page)
    drawn(page)
    page.set_input_files("#image", picture(tmp_path))
    again.click()
    expect(page.locator("#given")).to_be_hidden()
    expect(page.locator("#image")).to_have_value("")
    with page.expect_request("**/generate") as request:
        draw(page)
    assert not {"image", "strength"} & request.value.post_data_json.keys()
    drawn(page, count=2)

    page.set_input_files("#image", picture(tmp_path))
    draw(page)
    drawn(page, count=3)
    again.click()
    expect(page.locator("#given")).to_be_visible()
    page.click("#forget")
    again.click()
    expect(page.locator("#image-error")).to_have_text("Choose a scene.png again.")
    expect(page.locator("#prompt")).to_be_focused()
    page.set_input_files("#image", picture(tmp_path))
    expect(page.locator("#image-error")).to_have_text("")


def test_a_run_that_is_tried_again_keeps_the_names_of_its_files(page, tmp_path):
    """Whatever is chosen, and not sent, before it is."""
    other = tmp_path / "other.png"
    Image.new("RGB", (64, 64)).save(other)
    answer(page, status=429, headers={"Retry-After": "0"}, json={"error": "Too many."})
    page.set_input_files("#image", picture(tmp_path))
    draw(page)
    expect(page.locator("#notice-text")).to_contain_text("Too many.")
    page.set_input_files("#image", other)
    draw(page, "")
    expect(page.locator("#prompt-error")).to_contain_text("Say what")
    stream(page, *made())
    page.click("#again")
    drawn(page)
    command = copied_command(page)
    assert "'image' 'a scene.png'" in command
    assert "other.png" not in command


def test_an_export_that_is_taken_up_while_the_page_is_open(visit, tmp_path):
    """The form is that of the new one; what was entered stays, where it still has a field."""
    page, seen = visit
    page.set_input_files("#image", picture(tmp_path))
    fill(page, num_steps=9, negative_prompt="a circle", strength=0.25, seed=4)
    sizes = field("size", "size", choices=[[64, 64], [64, 96]], default="64x64")

    def changed(route):
        about = route.fetch().json()
        fields = [one for one in about["fields"] if one["name"] != "negative_prompt"]
        more = {"fields": [*fields, sizes], "sizes": [[64, 64], [64, 96]], "export": "b" * 64}
        route.fulfill(json={**about, **more, "schedulers": {"ddim": 20}})

    page.route("**/about", changed)
    name, data = ACCEPTED
    stream(page, (name, {**data, "export": "b" * 64}), *made()[1:])
    page.locator("#num_steps").press("Control+Enter")
    drawn(page)
    expect(page.locator("#size option")).to_have_text(["64 × 64", "96 × 64"])
    expect(page.locator("#num_steps")).to_be_focused()
    expect(page.locator("#model")).to_contain_text("64×64, 96×64 px")
    expect(page.locator("#facts")).to_contain_text("b" * 64)
    expect(page.locator("#num_steps-hint")).to_have_text("1 to 20")
    expect(page.locator("#negative_prompt")).to_have_count(0)
    expect(page.locator("#given")).to_be_visible()
    page.click("#generate")
    drawn(page, count=2)
    with page.expect_request("**/generate") as request:
        page.click("#generate")
    body = request.value.post_data_json
    assert base64.b64decode(body["image"]) == picture(tmp_path).read_bytes()
    expected = {"prompt": PROMPT, "num_steps": 9, "strength": 0.25, "seed": 4, "width": 64}
    assert {name: body[name] for name in expected} == expected
    assert [request.rpartition("/")[2] for request in seen.requests].count("about") == 2
    assert not seen.errors


def test_a_refusal_by_an_export_that_the_page_does_not_know(page):
    page.route("**/about", altered_about(schedulers={"ddim": 20}, export="b" * 64))
    answer(page, status=422, json={"error": "num_steps is at most 20. Received: 30"})
    draw(page, num_steps=30)
    expect(page.locator("#num_steps-hint")).to_have_text("1 to 20")
    expect(page.locator("#num_steps-error")).to_have_text("num_steps is at most 20. Received: 30")


def test_fields_of_several_nets(page, tmp_path):
    """They stand together; a refusal is shown at the right one; a list has a place for each net."""
    scene = picture(tmp_path)
    numbers = {"least": 0, "most": 2, "default": 1, "per_model": True}
    fields = [
        *(field(f"control_image-{n}", per_model=True) for n in (1, 2)),
        *(
            field(f"control_scale-{n}", "number", goes_with=f"control_image-{n}", **numbers)
            for n in (1, 2)
        ),
        field("image_prompt", per_model=True, is_prompt=True),
    ]

    def more(route):
        about = route.fetch().json()
        route.fulfill(json={**about, "fields": [*about["fields"], *fields]})

    page.route("**/about", more)
    page.reload()
    group = page.locator("#fields > .pair").filter(has=page.locator("#control_image-1"))
    for name, count in (("control_image-2", 1), ("control_scale-2", 1), ("image_prompt", 0)):
        expect(group.locator(f"#{name}")).to_have_count(count)
    first = page.locator("#fields > .pair").filter(has=page.locator("#image"))
    expect(first.locator("#strength")).to_have_count(1)
    expect(first.locator("#image_prompt")).to_have_count(0)

    page.set_input_files("#control_image-1", scene)
    for text, at in (
        ("image_prompt: A picture that is a prompt is at most 50 times as wide.", "image_prompt"),
        ("control_image: this is no picture", "control_image-1"),
        ("control_scale is one for all, as image_prompt is", "control_scale-1"),
    ):
        answer(page, status=422, json={"error": text})
        draw(page)
        expect(page.locator(f"#{at}-error")).to_have_text(text)
        expect(page.locator("#form p.error:not(:empty)")).to_have_count(1)
        expect(page.locator("#form-notice")).to_be_hidden()
    page.set_input_files("#control_image-2", scene)
    answer(page, status=422, json={"error": "control_image: this is no picture"})
    draw(page)
    expect(page.locator("#control_image-2-error")).to_have_text("control_image: this is no picture")
    expect(page.locator("#control_image-1-error")).to_have_text("control_image: this is no picture")

    page.set_input_files("#control_image-2", [])
    stream(page, *made(control_scale=[0.5, 1.0]))
    draw(page)
    drawn(page)
    command = copied_command(page)
    assert '"control_image":[null,null]' in command
    assert "'control_image-1' 'a scene.png'" in command and "control_image-2" not in command
    page.locator("#cards").get_by_text("Use again").click()
    expect(page.locator("#control_scale-1")).to_have_value("0.5")
    expect(page.locator("#control_image-1-seen")).to_be_visible()


def test_nets_of_one_name_are_told_apart(served):
    nets = (ControlRecord("canny", False), ControlRecord("depth", False))
    manifest = dataclasses.replace(Manifest.read(served.export_dir), controls=(*nets, nets[0]))
    labels = {one["name"]: one["label"] for one in form_fields(manifest, {}, 4)}
    assert [labels[f"control_image-{number}"] for number in (1, 2, 3)] == [
        "Control picture: canny (1)",
        "Control picture: depth",
        "Control picture: canny (3)",
    ]


def test_what_was_cleared_is_gone_although_another_picture_comes_at_once(page):
    expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
    kept = page.evaluate(
        """async (png) => {
          const gallery = await import("./static/gallery.js");
          const words = { line: "", facts: [] };
          const picture = (prompt) => ({ png: new Blob([png]), parameters: { prompt }, words });
          gallery.add(picture("first"));
          document.getElementById("clear").click();
          gallery.add(picture("second"));
          const store = await import("./static/store.js");
          let prompts = [];
          for (let tries = 0; tries < 100 && prompts.join() !== "second"; tries++) {
            await new Promise((resolve) => setTimeout(resolve, 50));
            prompts = (await store.load()).map(({ parameters }) => parameters.prompt);
          }
          return prompts;
        }""",
        PIXEL,
    )
    assert kept == ["second"]


# Safety


def test_markup_is_only_text(visit, url):
    page, seen = visit
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    draw(page, MARKUP, num_steps=2, negative_prompt=MARKUP)
    drawn(page)
    page.reload()
    expect(page.locator("#cards .prompt")).to_have_text(MARKUP)
    page.locator("#cards .open").click()
    expect(page.locator("#viewer-title")).to_have_text(MARKUP)
    expect(page.locator("#viewer-facts")).to_contain_text(MARKUP)
    assert page.locator("img[src=x]").count() == 0
    assert page.locator("body script").count() == 0
    assert page.title() == "sd_tf"
    assert f"{url}x" not in seen.requests
    assert not dialogs
    assert not seen.errors


# For everybody


def test_with_the_keyboard_alone(visit):
    page, seen = visit
    expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
    keyboard = page.keyboard
    tab_to(page, "prompt")
    keyboard.type(PROMPT)
    tab_to(page, "num_steps")
    keyboard.type("3")
    tab_to(page, "count")
    keyboard.type("2")
    keyboard.press("Control+Enter")
    drawn(page, count=2)

    focused = page.locator(":focus")
    while "Enlarge" not in (focused.get_attribute("aria-label") or ""):
        keyboard.press("Tab")
        assert is_marked(page), focused.evaluate("element => element.outerHTML")
    tab_to_class(page, "#cards > li:first-child .open")
    keyboard.press("Enter")
    expect(page.locator("#viewer")).to_be_visible()
    first = page.locator("#viewer-facts").inner_text()
    keyboard.press("ArrowRight")
    expect(page.locator("#viewer-facts")).not_to_have_text(first)
    keyboard.press("Escape")
    expect(page.locator("#viewer")).to_be_hidden()
    expect(page.locator("#cards > li:first-child .open")).to_be_focused()
    keyboard.press("Tab")
    expect(focused).to_have_text("Use again")
    keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#random")).not_to_be_checked()
    assert not seen.errors


def tab_to(page, name, most=30):
    tab_to_class(page, f"#{name}", most)


def tab_to_class(page, selector, most=30):
    for _ in range(most):
        if page.locator(selector).evaluate("element => element === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{selector} was not reached.")


def is_marked(page) -> bool:
    return page.evaluate(
        """() => document.activeElement === document.body ||
          getComputedStyle(document.activeElement).outlineStyle !== "none" """
    )


def test_every_control_has_a_name(page):
    draw(page, num_steps=2)
    drawn(page)
    page.locator("#cards .open").click()
    tree = page.locator("body").aria_snapshot() + page.locator("#viewer").aria_snapshot()
    nameless = re.compile(r"- (button|textbox|spinbutton|combobox|checkbox|link)(:|$| \[)", re.M)
    assert not nameless.findall(tree), tree


def test_screen_readers_hear_of_the_run(page):
    page.evaluate(
        """() => {
          window.said = [];
          const announcer = document.getElementById("announcer");
          new MutationObserver(() => window.said.push(announcer.textContent))
            .observe(announcer, { childList: true });
        }"""
    )
    draw(page, num_steps=30)
    drawn(page)
    expect(page.locator("#announcer")).to_contain_text("Done in")
    said = [text for text in page.evaluate("window.said") if text]
    assert said[0] == "Generating 1 picture."
    assert any(text.endswith(" percent") for text in said)
    assert len(said) <= 6


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_is_wider_than_the_screen(browser, url, size, scheme, tmp_path):
    folder = artifacts(tmp_path)
    name = f"{'phone' if size is PHONE else 'desktop'}-{scheme}"
    is_phone = size is PHONE
    options = {"viewport": size, "color_scheme": scheme, "has_touch": is_phone}
    options["reduced_motion"] = "reduce"  # the screenshots are not to show half a scroll
    with opened(browser, url, **options) as (page, seen):

        def look(state):
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= size["width"], (state, width)
            page.screenshot(path=folder / f"{name}-{state}.png")

        expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
        look("empty")
        draw(page, "an_endless_word_" * 20, num_steps=2, count=3)
        drawn(page, count=3)
        look("done")
        page.locator("#cards .open").first.click()
        look("viewer")
        page.keyboard.press("Escape")
        draw(page, "", num_steps=-1)
        look("wrong")
        assert not seen.errors


def test_small_pictures_keep_their_pixels(page):
    draw(page, num_steps=2)
    drawn(page)
    rendering = "image => getComputedStyle(image).imageRendering"
    assert page.locator("#cards img").evaluate(rendering) == "pixelated"
    page.locator("#cards .open").click()
    expect(page.locator("#viewer-picture")).to_have_class("small")
    width = page.locator("#viewer-picture").evaluate("image => image.clientWidth")
    assert width > 64
    assert width % 64 == 0


def test_large_pictures_are_smooth(page):
    data = io.BytesIO()
    Image.new("RGB", (512, 512), "teal").save(data, "PNG")
    page.evaluate(
        """async (bytes) => {
          const { picture } = await import("./static/dom.js");
          const blob = new Blob([new Uint8Array(bytes)], { type: "image/png" });
          document.getElementById("stage").append(picture(URL.createObjectURL(blob), "large"));
        }""",
        list(data.getvalue()),
    )
    expect(page.get_by_alt_text("large")).to_have_js_property("naturalWidth", 512)
    expect(page.get_by_alt_text("large")).not_to_have_class("small")


def test_reduced_motion(browser, url):
    with opened(browser, url, reduced_motion="reduce") as (page, _):
        page.route("**/generate", lambda route: None)
        draw(page)
        animation = page.locator("#tiles .waiting").evaluate(
            "element => getComputedStyle(element).animationName"
        )
        assert animation == "none"


def test_a_field_that_the_page_has_never_heard_of(page, tmp_path):
    """What the server describes is asked for, checked, sent and told."""
    field = {
        "name": "sharpness",
        "kind": "number",
        "label": "Sharpness",
        "help": "how sharp it is",
        "least": 0,
        "above": None,
        "most": 2,
        "slider": [0, 2, 0.1],
        "default": 1,
        "required": False,
        "goes_with": None,
    }

    def handle(route):
        about = route.fetch().json()
        route.fulfill(json={**about, "fields": [*about["fields"], field]})

    page.route("**/about", handle)
    page.reload()
    expect(page.get_by_label("Sharpness")).to_have_value("1")
    draw(page, sharpness=3)
    expect(page.locator("#sharpness-error")).to_have_text("A number from 0 to 2, such as 1.")
    parameters = {"prompt": "a", "sharpness": 0.5, "seed": 1}
    image = {"index": 0, "seed": 1, "png": PIXEL, "parameters": parameters}
    stream(page, ACCEPTED, ("image", image), ("done", {"seconds": 1.0}))
    with page.expect_request("**/generate") as request:
        draw(page, sharpness=0.5)
    assert request.value.post_data_json["sharpness"] == 0.5
    expect(page.locator("#cards .parameters")).to_have_text(re.compile("seed.1 · sharpness 0.5"))
    page.locator("#cards .open").click()
    expect(page.locator("#viewer-facts")).to_contain_text("Sharpness")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_page_about_the_api(browser, url, size, tmp_path):
    """Every parameter with its default, from the server alone."""
    with opened(browser, f"{url}docs", viewport=size) as (page, seen):

        def operation(path):
            title = page.get_by_role("heading", name=f"POST {path}", exact=True)
            return page.locator("section").filter(has=title)

        for path, names in (
            ("/generate", ("prompt", "strength", "seed", "count")),
            ("/v1/images/generations", ("prompt", "strength", "seed", "n")),
            ("/v1/images/edits", ("prompt", "image", "mask", "n")),
        ):
            row = (
                operation(path)
                .get_by_role("row")
                .filter(has=page.get_by_role("rowheader", name="num_steps", exact=True))
            )
            expect(row).to_contain_text("integer")
            expect(row).to_contain_text("20")
            for name in names:
                header = operation(path).get_by_role("rowheader", name=name, exact=True)
                expect(header).to_be_visible()
        several = operation("/generate").get_by_role("row", name="image_prompt string")
        expect(several.first).to_contain_text("string or list of strings or lists of strings")
        expect(page.locator("#operations")).not_to_contain_text("undefined")
        expect(operation("/v1/images/edits").locator("pre")).to_contain_text("-F image=@picture")
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        page.screenshot(path=artifacts(tmp_path) / f"docs-{size['width']}.png", full_page=True)
        assert not [request for request in seen.requests if not request.startswith(url)]
        assert not seen.errors
