"""OpenAI's images API of the Ray Serve application, asked by OpenAI's own client."""

import base64
import http.client
import io
import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import openai
import pytest
from hypothesis import given
from PIL import Image
from ray.serve.exceptions import DeploymentUnavailableError

from sd_tf.runtime.png import read_parameters
from sd_tf.runtime.shapes import Shapes
from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.access import Access, hash_of
from sd_tf.serving.ray_app.images_api.errors import error_answer
from sd_tf.serving.ray_app.images_api.files import ASCII, EXIF_FOLDER, USER_COMMENT, Format
from sd_tf.serving.ray_app.images_api.form import MOST_PARTS, read_form
from sd_tf.serving.ray_app.images_api.reading import read_size
from tests.exports import editing_export, micro_export, painting_export
from tests.fronts import running_front
from tests.fuzz import FEW, damaged

KEY = "a-key-for-the-tests-1234"
SITE = "https://pictures.example"
PROMPT = "a large red star"
MODEL = "micro_folder"  # the checkpoint's folder
BOUNDARY = "xyz"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


@pytest.fixture(scope="module")
def front():
    settings = {"num_steps": 2, "guidance_scale": 4.0, "allow_origin": (SITE,)}
    with running_front(micro_export(), **settings) as front:
        yield front


@pytest.fixture(scope="module")
def locked():
    settings = {"max_queue": 2, "max_count": 4, "api_key_hash": hash_of(KEY)}
    with running_front(micro_export(), num_steps=2, **settings) as front:
        yield front


@pytest.fixture(scope="module")
def painter():
    with running_front(painting_export(), num_steps=2) as front:
        yield front


@pytest.fixture(scope="module")
def editor():
    with running_front(editing_export(), num_steps=2) as front:
        yield front


def client_of(front, key="any", **settings):
    settings = {"max_retries": 0, **settings}
    return openai.OpenAI(base_url=f"http://{front.http}/v1", api_key=key, **settings)


@pytest.fixture(scope="module")
def client(front):
    return client_of(front)


def generate(front, **body):
    """The PNG files of POST /generate."""
    connection = http.client.HTTPConnection(front.http, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/generate", json.dumps(body), headers)
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    assert answer.status == 200, content
    return [base64.b64decode(image["png"]) for image in content["images"]]


def files_of(response):
    return [base64.b64decode(image.b64_json) for image in response.data]


def opened(file):
    return Image.open(io.BytesIO(file))


def picture_file(size=(20, 12), format="PNG", alpha=None, seed=0):
    """A picture of noise; `alpha`: an array (H, W)."""
    levels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), "uint8")
    image = Image.fromarray(levels)
    if alpha is not None:
        image.putalpha(Image.fromarray(alpha))
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def left_half(size=(20, 12), rest=255):
    alpha = np.full(size[::-1], rest, "uint8")
    alpha[:, : size[0] // 2] = 0
    return alpha


def coded(file):
    return base64.b64encode(file).decode()


# Pictures


def test_the_pictures_are_those_of_generate(front, client, tmp_path):
    more = {"seed": 7, "negative_prompt": "blue", "num_steps": 2, "scheduler": "ddim"}
    response = client.images.generate(prompt=PROMPT, n=3, extra_body=more)
    files = files_of(response)
    assert files == generate(front, prompt=PROMPT, count=3, **more)
    assert {opened(file).size for file in files} == {(16, 16)}
    assert len(set(files)) == 3
    (tmp_path / "one.png").write_bytes(files[1])
    parameters, _ = read_parameters(tmp_path / "one.png")
    expected = {"prompt": PROMPT, "guidance_scale": 4.0, **more, "seed": 8}
    expected |= {"height": 16, "width": 16, "prompt_syntax": "plain"}
    assert parameters == response.data[1].parameters == expected
    assert [image.seed for image in response.data] == [7, 8, 9]
    assert abs(response.created - time.time()) < 60
    known = (response.size, response.output_format, response.background, response.quality)
    assert known == ("16x16", "png", "opaque", None)
    usage = response.usage
    assert usage.input_tokens == usage.input_tokens_details.text_tokens == 5  # blue is one
    assert usage.input_tokens_details.image_tokens == 0
    assert usage.output_tokens == 3 * 8 * 8 and usage.total_tokens == usage.output_tokens + 5


def test_what_is_accepted_and_ignored(client):
    hints = {"quality": "high", "moderation": "low", "style": "natural", "user": "me"}
    hints |= {"background": "opaque", "response_format": "b64_json", "model": MODEL}
    more = {"seed": 1, "complexity": "low", "safety_identifier": "me"}
    with_hints = client.images.generate(prompt=PROMPT, extra_body=more, size="auto", **hints)
    plain = client.images.generate(prompt=PROMPT, extra_body={"seed": 1})
    nothing = {"seed": 1, "n": None, "size": None, "negative_prompt": None, "stream": None}
    with_nulls = client.images.generate(prompt=PROMPT, extra_body=nothing)
    assert files_of(with_hints) == files_of(plain) == files_of(with_nulls)


def test_a_size_is_width_by_height():
    manifest = SimpleNamespace(shapes=Shapes(((512, 768), (768, 512), (512, 512)), (1,), 8, 4))
    assert read_size("768x512", manifest) == read_size("auto", manifest) == (512, 768)
    assert read_size("512x768", manifest) == (768, 512)
    with pytest.raises(RefusedError, match="one of 768x512, 512x768, 512x512, or auto") as refused:
        read_size("1024x1024", manifest)
    assert refused.value.parameter == "size"


def test_one_seed_for_each_picture(front, client):
    response = client.images.generate(prompt=PROMPT, n=2, extra_body={"seed": [5, 3]})
    first, second = files_of(response)
    assert generate(front, prompt=PROMPT, seed=5) == [first]
    assert generate(front, prompt=PROMPT, seed=3) == [second]


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_other_formats(client, format):
    png = client.images.generate(prompt=PROMPT, extra_body={"seed": 4})
    asked = {"prompt": PROMPT, "output_format": format, "extra_body": {"seed": 4}}
    asked["size"] = "16x16"
    best, worst = (client.images.generate(**asked, output_compression=q) for q in (100, 0))
    assert best.output_format == format
    pixels = [np.asarray(opened(files_of(r)[0])).astype(int) for r in (png, best, worst)]
    image = opened(files_of(best)[0])
    assert (image.format, image.size, image.mode) == (format.upper(), (16, 16), "RGB")
    differences = [np.abs(other - pixels[0]).mean() for other in pixels[1:]]
    assert differences[0] < 8 < differences[1]
    comment = image.getexif().get_ifd(EXIF_FOLDER)[USER_COMMENT]
    content = json.loads(comment.removeprefix(ASCII))
    assert content == json.loads(opened(files_of(png)[0]).text["sd_tf"])


def test_a_jpeg_without_room_for_its_parameters(client):
    text = "星" * 10_000  # six letters each, as JSON in ASCII
    asked = {"prompt": text, "extra_body": {"negative_prompt": text, "num_steps": 1}}
    for format, has_room in (("jpeg", False), ("webp", True)):
        response = client.images.generate(**asked, output_format=format)
        exif = opened(files_of(response)[0]).getexif().get_ifd(EXIF_FOLDER)
        assert (USER_COMMENT in exif) == has_room
        assert response.data[0].parameters["prompt"] == text


# Edits


def test_a_start_from_a_picture(front, client):
    file, more = picture_file(), {"seed": 3, "strength": 0.9, "num_steps": 2}
    response = client.images.edit(image=file, prompt=PROMPT, n=2, extra_body=more)
    assert files_of(response) == generate(front, prompt=PROMPT, image=coded(file), count=2, **more)
    usage = response.usage
    assert (usage.input_tokens_details.image_tokens, usage.output_tokens) == (64, 128)
    many = client.images.edit(
        image=[("a.jpg", picture_file(format="JPEG"), "image/jpeg")],
        prompt=PROMPT,
        output_format="webp",
        input_fidelity="high",
        extra_body={"seed": [1, 2], "negative_prompt": "1"},
        n=2,
    )
    assert [image.parameters["seed"] for image in many.data] == [1, 2]
    assert many.data[0].parameters["negative_prompt"] == "1"
    assert opened(files_of(many)[0]).format == "WEBP"


def test_painting_by_a_mask(painter):
    client, more = client_of(painter), {"seed": 3, "guidance_scale": 2.0}
    alpha = left_half(rest=1)  # anything but 0 is kept
    file, mask = picture_file(), picture_file(alpha=alpha, seed=1)
    white = io.BytesIO()
    Image.fromarray(np.where(alpha == 0, 255, 0).astype("uint8")).save(white, "PNG")
    asked = {"prompt": PROMPT, "image": coded(file), "mask": coded(white.getvalue()), **more}
    expected = generate(painter, **asked)
    response = client.images.edit(image=file, mask=mask, prompt=PROMPT, extra_body=more)
    assert files_of(response) == expected
    everywhere = picture_file(alpha=np.zeros_like(alpha))
    response = client.images.edit(image=file, mask=everywhere, prompt=PROMPT, extra_body=more)
    assert files_of(response) != expected

    both = picture_file(alpha=left_half())
    response = client.images.edit(image=both, prompt=PROMPT, extra_body=more)
    assert files_of(response) == generate(painter, **{**asked, "image": coded(both)})


def test_an_edit_by_instruction(editor):
    client, file, more = client_of(editor), picture_file(), {"seed": 3, "image_guidance_scale": 2.0}
    response = client.images.edit(image=file, prompt="make it green", extra_body=more)
    expected = generate(editor, prompt="make it green", image=coded(file), **more)
    assert files_of(response) == expected
    assert response.data[0].parameters["image_guidance_scale"] == 2.0


OPAQUE = picture_file()
MASK = picture_file(alpha=left_half())
LARGE = io.BytesIO()
Image.new("LA", (4097, 4096)).save(LARGE, "PNG")
LARGE = LARGE.getvalue()


@pytest.mark.parametrize(
    ("kind", "asked", "param", "message"),
    [
        ("front", {"mask": MASK}, "mask", "mask is only for checkpoints that paint inside a mask"),
        ("front", {"mask": OPAQUE}, "mask", "mask has an alpha channel, which is 0 where to pai"),
        (
            "front",
            {"mask": picture_file((8, 8), alpha=left_half((8, 8)))},
            "mask",
            "mask has the size of the image, 20x12. Received: 8x8",
        ),
        ("front", {"mask": LARGE}, "mask", "mask: the picture has more than 16777216 pixels."),
        ("front", {"image": LARGE}, "image", "image: the picture has more than 16777216 pixels."),
        ("front", {"image": b"rubbish"}, "image", "image: this is not a PNG, JPEG, WebP or AVIF"),
        ("front", {"image": OPAQUE[:200]}, "image", "image: the picture is damaged"),
        ("front", {"image": [OPAQUE, OPAQUE]}, "image", "image is one file. Received: 2"),
        ("front", {"image_guidance_scale": 2}, "image_guidance_scale", "is only for checkpoints"),
        ("front", {"strength": 2}, "strength", "strength is a number above 0, up to 1"),
        ("front", {"n": 11}, "n", "n: Input should be less than or equal to 10"),
        ("front", {"num_steps": "many"}, "num_steps", "num_steps: Input should be a valid integer"),
        ("front", {"steps": 3}, "steps", "steps: there is no such parameter. There are prompt"),
        ("front", {"size": "20x12"}, "size", "size is WIDTHxHEIGHT, one of 16x16, or auto."),
        ("painter", {}, "mask", "mask is needed by checkpoints that paint inside a mask"),
        ("painter", {"image": OPAQUE}, "mask", "mask is needed by checkpoints that paint inside"),
        ("editor", {"mask": MASK}, "mask", "mask is only for checkpoints that paint inside a m"),
        ("editor", {"strength": 0.5}, "strength", "strength is only for checkpoints that start"),
    ],
)
def test_edits_that_are_refused(request, kind, asked, param, message):
    client = client_of(request.getfixturevalue(kind))
    asked = {"image": OPAQUE, "prompt": PROMPT, **asked}
    known = {name: asked.pop(name) for name in ("image", "mask", "prompt") if name in asked}
    with pytest.raises(openai.BadRequestError, match="400") as caught:
        client.images.edit(**known, extra_body=asked)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert message in caught.value.message


@pytest.mark.parametrize(("kind", "param"), [("painter", "image"), ("editor", "image")])
def test_a_generation_where_a_picture_is_needed(request, kind, param):
    client = client_of(request.getfixturevalue(kind))
    with pytest.raises(openai.BadRequestError, match="send this to /v1/images/edits") as caught:
        client.images.generate(prompt=PROMPT)
    assert caught.value.param == param


# Streams


def test_a_stream_of_a_generation(front, client):
    more = {"seed": 3, "num_steps": 2}
    asked = {"prompt": PROMPT, "n": 2, "stream": True, "extra_body": more}
    events = list(client.images.generate(**asked, partial_images=3))
    kinds = [event.type.removeprefix("image_generation.") for event in events]
    partial = [event for event in events if event.type.endswith("partial_image")]
    done = sorted(events[-2:], key=lambda event: event.index)
    assert kinds == ["partial_image"] * len(partial) + ["completed"] * 2
    numbers = [(event.index, event.partial_image_index) for event in partial]
    assert sorted(numbers) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]  # three model calls, the last is done
    finished = [base64.b64decode(event.b64_json) for event in done]
    assert finished == generate(front, prompt=PROMPT, count=2, **more)
    assert [event.seed for event in done] == [3, 4]
    assert done[0].usage.total_tokens == 64 + done[0].usage.input_tokens
    for event in events:
        assert opened(base64.b64decode(event.b64_json)).size == (16, 16)
        known = (event.size, event.quality, event.background, event.output_format)
        assert known == ("16x16", "auto", "opaque", "png")
        assert abs(event.created_at - time.time()) < 60
    (only,) = client.images.generate(prompt=PROMPT, stream=True, output_format="jpeg")
    assert opened(base64.b64decode(only.b64_json)).format == "JPEG"


def test_a_stream_of_an_edit(editor):
    client = client_of(editor)
    asked = {"image": OPAQUE, "prompt": PROMPT, "partial_images": 1, "stream": True}
    partial, done = client.images.edit(**asked, output_format="webp")
    assert (partial.type, partial.partial_image_index) == ("image_edit.partial_image", 0)
    assert (done.type, done.usage.input_tokens_details.image_tokens) == ("image_edit.completed", 64)
    for event in (partial, done):
        assert opened(base64.b64decode(event.b64_json)).format == "WEBP"


def test_an_error_in_a_stream(client):
    with pytest.raises(openai.APIError, match="were not ready in time") as caught:
        list(client.images.generate(prompt=PROMPT, stream=True, extra_body={"timeout": 1e-4}))
    assert (caught.value.code, caught.value.type) == ("timeout", "timeout_error")


# Models


def test_the_models(client):
    (model,) = client.models.list()
    known = (model.id, model.object, model.owned_by, model.sizes)
    assert known == (MODEL, "model", "sd_tf", ["16x16"])
    assert client.models.retrieve(MODEL) == model
    assert abs(model.created - time.time()) < 1000


def test_tensorflow_servings_models_stay(client):
    status = client.get("/models/decoder", cast_to=dict)
    assert status["model_version_status"][0]["state"] == "AVAILABLE"
    metadata = client.get("/models/decoder/metadata", cast_to=dict)
    assert "signature_def" in metadata["metadata"]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.response.json() == {"error": "Could not find any versions of model nobody"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/models", body={}, cast_to=dict)
    assert caught.value.response.json() == {"error": "Malformed request: POST /v1/models"}


def test_a_checkpoint_that_is_named_like_a_component(locked, monkeypatch):
    """The component's own answers stay, errors too."""
    name = "sd_tf.serving.ray_app.images_api.api.model_id"
    monkeypatch.setattr(name, lambda manifest: "decoder")
    assert "model_version_status" in client_of(locked, KEY).get("/models/decoder", cast_to=dict)
    with pytest.raises(openai.AuthenticationError) as caught:
        client_of(locked).models.retrieve("decoder")
    assert isinstance(caught.value.response.json()["error"], str)


# Errors


@pytest.mark.parametrize(
    ("asked", "kind", "code", "param", "message"),
    [
        ({"size": "32x32"}, 400, "invalid_value", "size", "one of 16x16, or auto. Received: '32x3"),
        ({"size": "16×16"}, 400, "invalid_value", "size", "size is WIDTHxHEIGHT, one of 16x16"),
        ({"n": 0}, 400, "invalid_value", "n", "n: Input should be greater than or equal to 1"),
        ({"n": "3"}, 400, "invalid_type", "n", "n: Input should be a valid integer"),
        ({"prompt": ["a"]}, 400, "invalid_type", "prompt", "prompt: Input should be a valid stri"),
        ({"prompt": "a" * 10_001}, 400, "invalid_value", "prompt", "at most 10000 characters"),
        ({"model": "gpt-image-2"}, 404, "model_not_found", "model", "There is 'micro_folder'."),
        ({"response_format": "url"}, 400, "invalid_value", "response_format", "so they have no U"),
        ({"background": "transparent"}, 400, "invalid_value", "background", "no alpha channel"),
        ({"output_format": "gif"}, 400, "invalid_value", "output_format", "'png', 'jpeg' or 'web"),
        ({"output_compression": 5}, 400, "invalid_value", "output_compression", "for jpeg and we"),
        ({"partial_images": 1}, 400, "invalid_value", "partial_images", "goes with stream: true"),
        ({"partial_images": 4}, 400, "invalid_value", "partial_images", "less than or equal to 3"),
        ({"steps": 3}, 400, "unknown_parameter", "steps", "there is no such parameter"),
        ({"image": "AAAA"}, 400, "unknown_parameter", "image", "there is no such parameter"),
        ({"height": 16}, 400, "unknown_parameter", "height", "there is no such parameter"),
        ({"svg": {"model": "x"}}, 400, "unknown_parameter", "svg", "there is no such parameter"),
        ({"seed": 2**31}, 400, "invalid_value", "seed", "seed is a whole number from -2147483648"),
        ({"seed": [1, 2]}, 400, "invalid_value", "seed", "one for each of 1 prompts. Received: 2"),
        ({"num_steps": 3}, 400, "invalid_value", "num_steps", "from 1 to 2, the export's limit"),
        ({"scheduler": "x"}, 400, "invalid_value", "scheduler", "scheduler is one of ddim"),
        ({"strength": 0.5}, 400, "invalid_value", "strength", "strength goes with image"),
        ({"target_size": [1, 2]}, 400, "invalid_value", "target_size", "only for checkpoints of"),
        ({"timeout": 0}, 400, "invalid_value", "timeout", "timeout is a number above 0"),
        ({"timeout": 1e-4}, 504, "timeout", None, "Give a larger timeout."),
    ],
)
def test_generations_that_are_refused(client, asked, kind, code, param, message):
    known = {400: openai.BadRequestError, 404: openai.NotFoundError}
    with pytest.raises(known.get(kind, openai.InternalServerError)) as caught:
        client.images.generate(prompt=PROMPT, extra_body=asked)
    error = caught.value
    assert (error.status_code, error.code, error.param) == (kind, code, param)
    assert error.type == ("timeout_error" if kind == 504 else "invalid_request_error")
    assert message in error.message


def test_what_is_needed(front):
    for body, kind, path, missing in (
        (b'{"n": 1}', "application/json", "generations", "prompt"),
        (form(("prompt", b"a")), FORM, "edits", "image"),
        (form(("image", OPAQUE)), FORM, "edits", "prompt"),
    ):
        status, content = post(front, body, f"/v1/images/{path}", kind)
        assert (status, content["error"]) == (
            400,
            {
                "message": f"{missing}: Field required",
                "type": "invalid_request_error",
                "param": missing,
                "code": "missing_required_parameter",
            },
        )


def test_json_that_is_none(front):
    for body, code in ((b"{", "invalid_json"), (b"[]", "invalid_type"), (b"", "invalid_json")):
        status, content = post(front, body, "/v1/images/generations", "application/json")
        assert (status, content["error"]["code"], content["error"]["param"]) == (400, code, None)
    many = b'{"prompt": "a", "seed": [' + b"1," * 100_001 + b"1]}"
    status, content = post(front, many, "/v1/images/generations", "application/json")
    assert (status, content["error"]["message"]) == (400, "The body has more than 100000 commas.")


def test_the_key(locked):
    for call in (
        lambda client: client.images.generate(prompt=PROMPT),
        lambda client: client.images.edit(image=OPAQUE, prompt=PROMPT),
        lambda client: client.models.list(),
        lambda client: client.models.retrieve(MODEL),
    ):
        with pytest.raises(openai.AuthenticationError, match="Send the server's key") as caught:
            call(client_of(locked, "wrong"))
        assert (caught.value.code, caught.value.type) == (
            "invalid_api_key",
            "invalid_request_error",
        )
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        call(client_of(locked, KEY))


def test_too_many_pictures(locked):
    client = client_of(locked, KEY)
    with pytest.raises(openai.BadRequestError, match="n is a whole number from 1 to 4"):
        client.images.generate(prompt=PROMPT, n=5)
    with pytest.raises(openai.RateLimitError, match="at most 2 may") as caught:
        client.images.generate(prompt=PROMPT, n=3)
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert caught.value.response.headers["retry-after"] == "2"


def test_what_does_not_reach_a_model(client):
    evil = {"origin": "https://evil.example"}
    for call, status, code in (
        (lambda: client.images.generate(prompt=PROMPT, extra_headers=evil), 403, "forbidden"),
        (
            lambda: client.images.edit(image=OPAQUE, prompt="a", extra_headers=evil),
            403,
            "forbidden",
        ),
        (lambda: client.get("/images/generations", cast_to=dict), 405, "method_not_allowed"),
        (lambda: client.get("/images/edits", cast_to=dict), 405, "method_not_allowed"),
        (
            lambda: client.delete("/models/micro_folder", cast_to=dict, body={}),
            405,
            "method_not_allowed",
        ),
        (lambda: client.post("/images/nothing", body={}, cast_to=dict), 404, "not_found"),
        (
            lambda: client.post("/images/edits", body={}, cast_to=dict),
            415,
            "unsupported_media_type",
        ),
        (lambda: client.images.create_variation(image=OPAQUE), 404, "not_found"),
        (lambda: client.images.generate(prompt="a" * (25 << 20)), 413, "request_too_large"),
        (lambda: client.images.edit(image=b"a" * (25 << 20), prompt="a"), 413, "request_too_large"),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            call()
        assert (caught.value.status_code, caught.value.code) == (status, code)


def test_failures(front, client, monkeypatch):
    def failing(error):
        async def draw(*_):
            raise error

        return draw

    for error, status, code, message in (
        (DeploymentUnavailableError(None), 503, "service_unavailable", "cannot be reached"),
        (RuntimeError("broken"), 500, "server_error", "broken"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(front.front.drawing, "_draw_with", failing(error))
            with pytest.raises(openai.InternalServerError, match=message) as caught:
                client.images.generate(prompt=PROMPT)
        known = (caught.value.status_code, caught.value.code, caught.value.type)
        assert known == (status, code, "server_error")
    with monkeypatch.context() as patch:
        patch.setattr(Format, "convert", lambda *_: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="The server failed") as caught:
            client.images.generate(prompt=PROMPT)
    assert (caught.value.status_code, caught.value.code) == (500, "server_error")


def test_every_status_has_a_kind():
    for status, kind in ((408, "timeout_error"), (429, "rate_limit_error"), (502, "server_error")):
        answer = error_answer(RefusedError(status, "Why."), {})
        content = json.loads(answer.body)["error"]
        assert (answer.status_code, content["type"], content["param"]) == (status, kind, None)
        assert content["message"] == "Why." and content["code"]


def test_the_client_repeats_no_call_that_was_too_slow(front):
    asked = []
    http_client = openai.DefaultHttpxClient(event_hooks={"request": [asked.append]})
    client = client_of(front, max_retries=2, http_client=http_client)
    with pytest.raises(openai.InternalServerError):
        client.images.generate(prompt=PROMPT, extra_body={"timeout": 1e-4})
    assert len(asked) == 1


def test_a_client_that_does_not_wait(front, client, monkeypatch):
    """Its pictures that are not begun are dropped, and the next client gets its own."""
    drawing, begun, may_go_on = front.front.drawing, [], threading.Event()
    chain = drawing.served.chain
    tokens = chain._tokens

    def held(*given):
        begun.append(given)
        may_go_on.wait(60)
        return tokens(*given)

    with monkeypatch.context() as patch:
        patch.setattr(chain, "_tokens", held)
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=1.0).images.generate(prompt=PROMPT, n=10)
        end = time.monotonic() + 20
        while len(drawing.batcher) or front.front.arriving.count:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert 1 <= len(begun) <= drawing.lanes
        may_go_on.set()
        assert len(client.images.generate(prompt=PROMPT).data) == 1
    assert len(begun) <= drawing.lanes + 1


# Who may send a form


def test_pages_of_other_sites_send_no_forms(front):
    """A browser sends a form of any page, with the page's origin and without `Authorization`."""
    body = form(("image", OPAQUE), ("prompt", PROMPT.encode()))
    bearer = {"authorization": "Bearer any"}
    for headers, status in (
        (bearer, 200),
        ({**bearer, "origin": SITE}, 200),
        ({**bearer, "origin": f"http://{front.http}"}, 200),
        ({"authorization": "bearer"}, 200),
        ({}, 401),
        ({"origin": f"http://{front.http}"}, 401),
        ({"authorization": "Basic YTpi"}, 401),
        ({**bearer, "origin": "null"}, 403),
        ({**bearer, "origin": "https://evil.example"}, 403),
        ({**bearer, "host": "evil.example"}, 403),
    ):
        found, content = post(front, body, headers=headers)
        assert found == status, (headers, content)
        if status != 200:
            assert content["error"]["message"] and content["error"]["type"]
    for path in ("/generate", "/v1/images/generations", "/v1/models/decoder:predict"):
        assert post(front, body, path, headers=bearer)[0] == 415


def test_variations_are_not_offered(front):
    """Whatever the body, the answer says what there is; nothing reads the body."""
    path, body = "/v1/images/variations", form(("image", OPAQUE))
    for kind, headers in ((FORM, None), (FORM, {}), ("application/json", {}), ("", {})):
        status, content = post(front, body, path, kind, headers)
        assert status == 404
        assert content["error"]["message"] == (
            "There is no /v1/images/variations. There are /v1/images/generations and "
            "/v1/images/edits."
        )
    assert post(front, body, path, FORM, {"origin": "https://evil.example"})[0] == 403


def test_forms_are_let_in_on_one_path():
    access = Access("127.0.0.1")
    known = {"host": "localhost", "authorization": "Bearer x"}
    access.check("POST", "/v1/images/edits", {**known, "content-type": FORM})
    for path in ("/v1/images/generations", "/generate", "/v1/models/decoder:predict"):
        with pytest.raises(RefusedError, match="Content-Type: application/json"):
            access.check("POST", path, {**known, "content-type": FORM})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json", ""):
        with pytest.raises(RefusedError, match="Content-Type: multipart/form-data"):
            access.check("POST", "/v1/images/edits", {**known, "content-type": kind})


# Damaged and hostile forms


def form(*parts, end=f"--{BOUNDARY}--\r\n"):
    lines = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode()
        + content
        + b"\r\n"
        for name, content in parts
    ]
    return b"".join(lines) + end.encode()


def post(front, body, path="/v1/images/edits", kind=FORM, headers=None):
    connection = http.client.HTTPConnection(front.http, timeout=60)
    headers = {"authorization": "Bearer any"} if headers is None else headers
    connection.request("POST", path, body, {"content-type": kind, **headers})
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    return answer.status, content


def black(*size):
    file = io.BytesIO()
    Image.new("1", size).save(file, "PNG")
    return file.getvalue()


LARGE = black(4096, 4096)
GOOD = form(("prompt", b"a red star " * 9), ("seed", b"1"), ("strength", b"1"), ("image", OPAQUE))


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (GOOD, "multipart/form-data", "names no boundary"),
        (GOOD, "multipart/form-data; boundary=", "names no boundary"),
        (GOOD, 'multipart/form-data; boundary=""', "names no boundary"),
        (GOOD, "multipart/form-data; boundary=other", "The form is damaged"),
        (
            GOOD,
            f"multipart/form-data; boundary={'x' * 300}",
            "The form is damaged: Boundary length",
        ),
        (GOOD[:-4], FORM, "The form is damaged: it ends before its last boundary."),
        (GOOD[: len(GOOD) // 2], FORM, "it ends before its last boundary."),
        (b"", FORM, "it ends before its last boundary."),
        (b"rubbish", FORM, "The form is damaged"),
        (form(), FORM, "image: Field required"),
        (form(*[("seed[]", b"1")] * 1000), FORM, "The form has more than 100 parts."),
        (form(*[(f"no{i}", b"1") for i in range(99)]), FORM, "there is no such parameter"),
        (form(("x" * 1_000_000, b"1")), FORM, "The form is damaged: Maximum header size exceeded"),
        (form(("x" * 3000, b"1")), FORM, "prompt: Field required; image: Field required; xxx"),
        (form(("prompt", b"a" * 70_000)), FORM, "prompt is longer than 65536 bytes."),
        (form(("prompt", b"\xff")), FORM, "prompt is not UTF-8."),
        (
            GOOD.replace(b'"seed"', b'"\xff"'),
            FORM,
            "A name is not UTF-8",
        ),
        (GOOD.replace(b'; name="seed"', b""), FORM, "Each part of a form has the header"),
        (GOOD.replace(b"form-data", b"attachment"), FORM, "Each part of a form has the header"),
        (form(("seed", b"1"), ("seed", b"2")), FORM, "seed is given twice. A list is sent as NAME"),
        (form(("seed", b"1"), ("seed[]", b"2")), FORM, "seed is given twice"),
        (form(("seed[]", b"1"), ("seed", b"2")), FORM, "seed is given twice"),
        (
            form(("image", OPAQUE), ("prompt[]", b"a")),
            FORM,
            "prompt: Input should be a valid string",
        ),
        (form(("image", OPAQUE), ("prompt", b"a"), ("o[k]", b"a")), FORM, "o: there is no such"),
        (
            form(("image", OPAQUE), ("prompt", b"a"), ("image_prompt[0]", OPAQUE)),
            FORM,
            "image_prompt is a file, or several as image_prompt[]. Received: image_prompt[0]",
        ),
        (
            form(("image", LARGE), ("prompt", b"a"), *[("control_image[]", LARGE)] * 4),
            FORM,
            "at most 67108864 pixels together. Received: 83886080",
        ),
        (
            form(("image[]", OPAQUE), ("prompt", b"a"), ("n", b"")),
            FORM,
            "n: Input should be a valid",
        ),
        (form(("image", OPAQUE), ("prompt", b"a"), ("n", b"1" * 5000)), FORM, "n: "),
        (
            form(("image", OPAQUE), ("prompt", b"a"), ("guidance_scale", b"nan")),
            FORM,
            "guidance_scale",
        ),
    ],
)
def test_bad_forms(front, body, kind, message):
    status, content = post(front, body, kind=kind)
    assert status == 400, content
    assert message in content["error"]["message"]
    assert len(content["error"]["message"]) < 6000
    assert front.front.room.used == 0 and front.front.arriving.count == 0


def test_fuzzed_forms(front):
    """Damaged outside the picture, of which every byte has a checksum."""
    kinds, picture = set(), GOOD.index(OPAQUE)

    @FEW
    @given(damaged(GOOD[:picture]))
    def ask(head):
        status, content = post(front, head + GOOD[picture:])
        kinds.add(status)
        assert status == 200 or (status == 400 and content["error"]["message"]), content

    ask()
    assert kinds == {200, 400}
    assert front.front.room.used == 0 and front.front.arriving.count == 0


def test_a_form_as_it_is_read():
    assert read_form(form(("a", b"1\r\n--xy"), ("b[]", b""), ("b[]", "é".encode())), FORM) == {
        "a": "1\r\n--xy",
        "b": ["", "é"],
    }
    many = form(*[("b[]", b"1")] * MOST_PARTS)
    assert len(read_form(many, FORM)["b"]) == MOST_PARTS
