"""Adapters behind the Ray Serve application's front, TensorFlow Serving's API and batch files."""

import base64
import io
import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
from PIL import Image
from playwright.sync_api import expect

from sd_tf.cli.main import main
from sd_tf.export.adapters import write_adapters
from sd_tf.runtime.manifest import ExportError
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.serving.client import Client
from sd_tf.serving.load import MIXTURES, mixtures
from tests.fronts import ask, running_front
from tests.micro_adapters import adapter_files, written_export
from tests.page_browser import PATIENCE, chromium, opened

PROMPT = "a large red star"
CALL = {"num_steps": 2, "guidance_scale": 4.0, "scheduler": "euler"}
MIXTURE = {"style": 0.8, "detail": -0.5}
CLIENTS, REQUESTS = 16, 200

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def pipe():
    return Pipeline.load(written_export(), jit_compile=False)


@pytest.fixture(scope="module")
def front():
    settings = {"num_steps": 2, "guidance_scale": 4.0, "max_queue": REQUESTS}
    with running_front(written_export(), **settings) as front:
        yield front


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def differ(one, other):
    return np.abs(one.astype(int) - other).max()


def test_each_picture_of_a_load_has_its_own_mixture(front, pipe):
    """Requests share batches where they can; every picture is compared by its seed."""
    rng = random.Random(0)
    wanted = []
    for seed in range(REQUESTS):
        names = rng.sample(list(adapter_files()), rng.randint(0, 3))
        mixture = {name: rng.choice([-0.5, 0.5, 1]) for name in names}
        wanted.append((seed, mixture))

    def draw(job):
        seed, mixture = job
        status, content = ask(
            front, "POST", "/generate", prompt=PROMPT, seed=seed, adapters=mixture, **CALL
        )
        assert status == 200, content
        (image,) = content["images"]
        assert image["parameters"]["adapters"] == mixture
        return pixels(base64.b64decode(image["png"]))

    with ThreadPoolExecutor(CLIENTS) as pool:
        pictures = list(pool.map(draw, wanted))
    for (seed, mixture), picture in zip(wanted, pictures, strict=True):
        expected = pipe(PROMPT, seed=seed, adapters=mixture, **CALL).images[0]
        assert differ(picture, expected) <= 1, (seed, mixture)
    plain = pipe(PROMPT, seed=0, **CALL).images[0]
    assert differ(pipe(PROMPT, seed=0, adapters={"style": 0.5}, **CALL).images[0], plain) > 3


@pytest.mark.long
def test_the_load_command_asks_for_mixtures(front, tmp_path):
    """It finds nothing wrong with the export's own adapters, and something with others."""
    exchanged = shutil.copytree(written_export(), tmp_path / "exchanged")
    write_adapters(exchanged, {"style": adapter_files()["third"]})
    arguments = ["--url", f"http://{front.http}", "--num_steps", "2", "--seconds", "2"]
    arguments += ["--clients", "5", "--adapters", ",".join(adapter_files())]
    for folder, status in ((written_export(), 0), (exchanged, 1)):
        path = tmp_path / f"{folder.name}.json"
        compared = ["--export_dir", str(folder), "--json", str(path)]
        assert main(["serve", "load", *arguments, *compared]) == status
        (record,) = json.loads(path.read_text())
        assert 5 <= record["compared"] <= record["pictures"] and record["failed"] == 0
        assert (record["wrong"] > 0) == bool(status)
    assert main(["serve", "load", *arguments, "--adapters", "other", "--seconds", "1"]) == 1


def test_the_mixtures_of_a_load():
    found = mixtures(["one", "two"])
    assert found[0] == () and len(found) == MIXTURES == len(mixtures(["one", "two"]))
    assert found == mixtures(["one", "two"]) and mixtures([]) == [()]
    assert {name for mixture in found for name, _ in mixture} == {"one", "two"}
    assert {len(mixture) for mixture in found} == {0, 1, 2}


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        ({"other": 1}, "for each name, out of style, detail, third, fourth. Received: {'other'"),
        ({"style": 200}, "a number from -100 to 100"),
        ({"style": "much"}, "adapters.style: Input should be a valid number"),
        ("style", "adapters: Input should be an object"),
    ],
)
def test_mixtures_that_are_refused(front, adapters, message):
    status, content = ask(front, "POST", "/generate", prompt=PROMPT, adapters=adapters)
    assert status == 422
    assert message in content["error"]


def test_about_tells_the_adapters(front):
    status, about = ask(front, "GET", "/about")
    assert status == 200
    assert about["adapters"] == {name: path.name for name, path in adapter_files().items()}
    (field,) = [field for field in about["fields"] if field["name"] == "adapters"]
    assert field["kind"] == "mixture" and field["choices"] == list(adapter_files())


def test_openais_client_gives_adapters(front, pipe):
    client = openai.OpenAI(base_url=f"http://{front.http}/v1", api_key="any", max_retries=0)
    body = {"seed": 3, "adapters": MIXTURE, **CALL}
    response = client.images.generate(prompt=PROMPT, extra_body=body)
    picture = pixels(base64.b64decode(response.data[0].b64_json))
    assert differ(picture, pipe(PROMPT, seed=3, adapters=MIXTURE, **CALL).images[0]) <= 1


def test_a_client_of_tensorflow_serving_gives_adapters(front, pipe):
    for server in (f"grpc://{front.grpc}", f"http://{front.http}"):
        with Client(server, written_export(), jit_compile=False) as client:
            picture = client(PROMPT, seed=3, adapters=MIXTURE, **CALL).images[0]
        assert differ(picture, pipe(PROMPT, seed=3, adapters=MIXTURE, **CALL).images[0]) <= 1
        for change in (
            lambda client=client: client.load_adapter("new", adapter_files()["style"]),
            lambda client=client: client.unload_adapter("style"),
        ):
            with pytest.raises(ExportError, match="put others there with `sd-tf export-adapters`"):
                change()


def test_the_page_has_a_slider_for_each_adapter(front, pipe):
    with chromium() as browser, opened(browser, f"http://{front.http}/") as (page, seen):
        expect(page.locator("#generate")).to_have_attribute("aria-disabled", "false")
        assert page.locator("[data-mixture=adapters] [data-of]").count() == 4
        page.fill("#prompt", PROMPT)
        page.fill("#count", "1")
        page.uncheck("#random")
        page.fill("#seed", "3")
        page.select_option("#scheduler", "euler")
        page.fill("[data-of=style] [type=number]", "0.8")
        page.fill("[data-of=detail] [type=number]", "-0.5")
        assert page.locator("[data-of=style] [type=range]").input_value() == "0.8"
        page.locator("#prompt").press("Control+Enter")
        expect(page.locator("#state")).to_contain_text("Done in")
        card = page.locator("#cards > li").first
        expect(card.locator(".parameters")).to_contain_text("detail@-0.5,style@0.8")
        with page.expect_download() as download:
            card.get_by_text("Download").click()
        with open(download.value.path(), "rb") as file:
            picture = pixels(file.read())
        page.fill("[data-of=style] [type=number]", "0")
        expect(page.locator("#adapters")).to_have_value("detail@-0.5")
        card.get_by_text("Use again").click()
        expect(page.locator("[data-of=style] [type=number]")).to_have_value("0.8")
        page.fill("[data-of=style] [type=number]", "101")
        page.locator("#prompt").press("Control+Enter")
        expect(page.locator("#adapters-error")).to_have_text("Numbers from -100 to 100.")
        assert not seen.errors
    expected = pipe(PROMPT, seed=3, adapters=MIXTURE, **CALL).images[0]
    assert differ(picture, expected) <= 1


@pytest.mark.long
def test_a_batch_file_has_mixtures(tmp_path, pipe):
    prompts = tmp_path / "p.jsonl"
    rows = [
        {"prompt": PROMPT, "id": "one", "adapters": "style@0.8,detail@-0.5"},
        {"prompt": PROMPT, "id": "two", "adapters": MIXTURE, "seed": 9},
        {"prompt": PROMPT, "id": "three"},
        {"prompt": PROMPT, "id": "four", "adapters": "other@1"},
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    flags = ["--export_dir", str(written_export()), "--prompts", str(prompts), "--out", str(out)]
    flags += ["--num_steps", "2", "--nojit_compile", "--seed", "3", "--adapter=third@1"]
    flags += ["--scheduler", "euler", "--guidance_scale", "4"]
    assert main(["serve", "batch", *flags]) == 1  # the last row fails
    found = {path.stem: pixels(path.read_bytes()) for path in out.rglob("*.png")}
    expected = {"one": (MIXTURE, 3), "two": (MIXTURE, 9), "three": ({"third": 1}, 5)}
    assert found.keys() == expected.keys()
    for name, (mixture, seed) in expected.items():
        picture = pipe(PROMPT, seed=seed, adapters=mixture, **CALL).images[0]
        assert differ(found[name], picture) <= 1
