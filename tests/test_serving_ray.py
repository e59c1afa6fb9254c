"""The Ray Serve application, started by its command: pictures, TensorFlow Serving's API, faults."""

import asyncio
import base64
import http.client
import io
import json
import random
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import any_pb2
from PIL import Image
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from sd_tf.bench.application import kill
from sd_tf.bench.peers import apart
from sd_tf.bench.soak import SoakOptions
from sd_tf.bench.soak import exports as soaked
from sd_tf.bench.soak.clients import Target
from sd_tf.bench.soak.soak import attack, until_drawn
from sd_tf.bench.soak.tally import Tally
from sd_tf.checkpoints import TINY_FOLDER
from sd_tf.cli.main import main
from sd_tf.config.rewrites import REWRITES
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.png import read_parameters
from sd_tf.serving.client.client import Client
from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.held import export_digest
from sd_tf.serving.ray_app.http import read_body
from sd_tf.serving.ray_app.models import version_of
from sd_tf.weights import open_checkpoint
from tests.background import in_background
from tests.exports import check_equal
from tests.fronts import events

PROMPT = "a large red star on a dark blue background"
OTHER = "a small green ring on a gray background"
CALL = {"num_steps": 4, "guidance_scale": 4.0}
LATENT = np.random.default_rng(0).standard_normal((4, 16, 16, 4)).astype("float32")
CODES = grpc.StatusCode


@pytest.fixture(scope="module")
def pipe(served):
    return Pipeline.load(served.export_dir, jit_compile=False)


@pytest.fixture(scope="module")
def channel(served):
    limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(served.grpc, limits) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel):
    return prediction_service_pb2_grpc.PredictionServiceStub(channel)


def send(served, path="/generate", body=None, **headers):
    """The open answer, whatever its status."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    headers = {"content-type": "application/json", **headers}
    request = urllib.request.Request(served.url + path, data, headers)
    try:
        return urllib.request.urlopen(request, timeout=120)
    except urllib.error.HTTPError as error:
        return error


def generate(served, prompt=PROMPT, **body):
    with send(served, body={"prompt": prompt, **CALL, **body}) as answer:
        content = json.loads(answer.read())
    assert answer.status == 200, content
    return content


def pixels(image):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(image["png"]))))


def stream(served, **body):
    return send(served, body={"prompt": PROMPT, **CALL, **body}, accept="text/event-stream")


# Pictures


def test_the_pictures_are_the_pipelines(served, pipe, tmp_path):
    content = generate(served, [PROMPT, OTHER], seed=7, count=2, negative_prompt="blue")
    images = content["images"]
    assert [(image["index"], image["seed"]) for image in images] == [(i, 7 + i) for i in range(4)]
    expected = pipe([PROMPT] * 2 + [OTHER] * 2, "blue", seed=7, **CALL).images
    check_equal(np.stack([pixels(image) for image in images]), expected)

    path = tmp_path / "one.png"
    path.write_bytes(base64.b64decode(images[2]["png"]))
    parameters, needed = read_parameters(path)
    assert parameters == images[2]["parameters"] and not needed
    assert parameters == {
        "prompt": OTHER,
        "negative_prompt": "blue",
        "seed": 9,
        "scheduler": "ddim",
        "prompt_syntax": "plain",
        "height": 64,
        "width": 64,
        **CALL,
    }


def picture_file(mode="RGB", size=(64, 64), **options):
    levels = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), "uint8")
    file = io.BytesIO()
    Image.fromarray(levels).convert(mode).save(file, "PNG", **options)
    return file.getvalue()


def test_pictures_from_a_picture(served, pipe):
    """Two callers with pictures of their own in one batch; one of them turned by its camera."""
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    files = [picture_file(), picture_file("L", (96, 64), exif=exif)]
    upright = [Image.open(io.BytesIO(files[0])), Image.open(io.BytesIO(files[1])).rotate(180)]
    call = {**CALL, "strength": 0.5}
    expected = pipe([PROMPT] * 2, seed=[3, 3], image=upright, **call).images
    with ThreadPoolExecutor(2) as pool:
        bodies = [{"image": base64.b64encode(file).decode(), "strength": 0.5} for file in files]
        answers = list(pool.map(lambda body: generate(served, seed=3, **body), bodies))
    for answer, image in zip(answers, expected, strict=True):
        check_equal(pixels(answer["images"][0]), image)
        assert answer["images"][0]["parameters"]["strength"] == 0.5
    with stream(served, image=bodies[0]["image"], strength=0.5, seed=3) as answer:
        seen = list(events(answer))
    assert seen[0][1]["calls"] == 2
    assert [content["done"] for name, content in seen if name == "progress"] == [1, 2]


def test_several_callers_share_a_batch(served, pipe):
    """Each gets the picture of its own seed, whatever its place; settings are never mixed."""
    asked = [(seed, steps) for seed in range(8) for steps in (2, 3)]
    expected = {
        steps: pipe([PROMPT] * 8, seed=0, num_steps=steps, guidance_scale=4.0).images
        for steps in (2, 3)
    }
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda pair: generate(served, seed=pair[0], num_steps=pair[1]), asked)
        )
    for (seed, steps), answer in zip(asked, answers, strict=True):
        difference = pixels(answer["images"][0]).astype(int) - expected[steps][seed]
        assert np.abs(difference).max() <= 1, (seed, steps)


def test_a_stream_with_previews(served, pipe):
    with stream(served, seed=3, count=2, previews=2) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        seen = list(events(answer))
    names = [name for name, _ in seen]
    assert names[0] == "accepted" and names[-1] == "done"
    assert seen[0][1]["calls"] == 4
    assert [image["seed"] for image in seen[0][1]["images"]] == [3, 4]
    latents = []
    pipe([PROMPT] * 2, seed=3, callback=lambda *args: latents.append(args[2]), **CALL)
    for index in (0, 1):
        mine = [(name, content) for name, content in seen if content.get("index") == index]
        assert [c["done"] for name, c in mine if name == "progress"] == [1, 2, 3, 4]
        assert [c["done"] for name, c in mine if name == "preview"] == [1, 3]
        preview = next(content for name, content in mine if name == "preview")
        check_equal(pixels(preview), pipe.decode(latents[0])[index])
        assert mine[-1][0] == "image"


def of_one_colour(*size):
    file = io.BytesIO()
    Image.new("L", size).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


SMALL, LARGE = of_one_colour(8, 8), of_one_colour(4097, 4096)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 422, "Invalid JSON"),
        (b"[]", 422, "Input should be an object"),
        ({}, 422, "prompt: Field required"),
        ({"prompt": 1}, 422, "prompt: Input should be a valid string"),
        ({"prompt": "a", "seed": "x"}, 422, "seed: Input should be a valid integer"),
        ({"prompt": []}, 422, "One call gives 1 to 16 pictures. Received: 0"),
        ({"prompt": "a", "count": 17}, 422, "One call gives 1 to 16 pictures. Received: 17"),
        ({"prompt": "a", "count": 0}, 422, "count is a whole number from 1 to 10000. Received: 0"),
        ({"prompt": "a" * 10_001}, 422, "prompt is a text of at most 10000 characters. Received"),
        ({"prompt": "a", "num_steps": 101}, 422, "num_steps is a whole number from 1 to 100"),
        ({"prompt": "a", "num_steps": True}, 422, "num_steps: Input should be a valid integer"),
        ({"prompt": "a", "scheduler": "x"}, 422, "scheduler is one of ddim, "),
        (
            {"prompt": "a", "seed": 2**31},
            422,
            "seed is a whole number from -2147483648 to",
        ),
        ({"prompt": "a", "seed": [1, 2]}, 422, "seed is one for all or one for each of 1 prompts"),
        (
            {"prompt": "a", "guidance_scale": 1e9},
            422,
            "guidance_scale is a number from -1000000 to",
        ),
        (b'{"prompt": "a", "guidance_scale": NaN}', 422, "guidance_scale"),
        ({"prompt": "a", "timeout": 0}, 422, "timeout is a number above 0, up to 3600.0"),
        (
            {"prompt": "a", "steps": 3},
            422,
            "steps: there is no such parameter. There are prompt",
        ),
        (b" " * (25 << 20), 413, "The body is longer than 25165824 bytes."),
        ({"prompt": "a", "image": "?"}, 422, "image: this is not base64"),
        (
            {"prompt": "a", "image": "AAAA"},
            422,
            "image: this is not a PNG, JPEG, WebP or AVIF picture.",
        ),
        ({"prompt": "a", "image": LARGE}, 422, "image: the picture has more than 16777216 pixels."),
        (
            {"prompt": "a", "image": SMALL, "strength": 2.0},
            422,
            "strength is a number above 0",
        ),
        ({"prompt": "a", "mask": SMALL}, 422, "mask is only for checkpoints that paint inside"),
        (
            {"prompt": "a", "image_guidance_scale": 1.5},
            422,
            "is only for checkpoints that edit",
        ),
        ({"prompt": "a", "num_steps": 100, "timeout": 0.05}, 504, "Give a larger timeout."),
    ],
)
def test_what_is_refused(served, body, status, message):
    answer = send(served, body=body)
    assert answer.status == status
    assert message in json.loads(answer.read())["error"]


def test_pages_and_paths(served):
    for path, status in (
        ("/", 200),
        ("/static/page.js", 200),
        ("/docs", 200),
        ("/openapi.json", 200),
        ("/health", 200),
        ("/ready", 200),
        ("/static/../ray_app/front.py", 404),
        ("/static/%2e%2e/ray_app/front.py", 404),
        ("/static//etc/passwd", 404),
        ("/..%2f..%2fetc/passwd", 404),
    ):
        answer = send(served, path)
        assert answer.status == status, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    about = json.loads(send(served, "/about").read())
    assert {part["name"] for part in about["checkpoint"].values()} == {"tiny"}
    assert str(TINY_FOLDER.parent) not in json.dumps(about)
    assert (about["width"], about["batch_size"], len(about["examples"])) == (64, 4, 0)
    assert about["schedulers"]["lcm"] == 50 and about["use_of_picture"] == "start"
    fields = {field["name"]: field for field in about["fields"]}
    assert fields["guidance_scale"]["default"] == 4.0 and "mask" not in fields
    assert (fields["num_steps"]["default"], fields["num_steps"]["most"]) == (20, 100)
    assert (fields["strength"]["default"], fields["strength"]["goes_with"]) == (0.8, "image")
    body = json.loads(send(served, "/openapi.json").read())["paths"]["/generate"]["post"]
    schema = body["requestBody"]["content"]["application/json"]["schema"]
    assert fields.keys() < schema["properties"].keys() and schema["required"] == ["prompt"]


def test_metrics(served):
    generate(served, seed=1)
    end = time.monotonic() + 30
    while True:  # Ray reports every few seconds
        text = urllib.request.urlopen(served.metrics, timeout=20).read().decode()
        if "sd_tf_pictures" in text and "sd_tf_stage_seconds" in text and "sd_tf_waiting" in text:
            break
        assert time.monotonic() < end
        time.sleep(1)
    assert any(
        line.startswith("ray_sd_tf_pictures") and 'outcome="done"' in line
        for line in text.splitlines()
    )


# TensorFlow Serving's API

STEPS = {"num_steps": np.int32(3), "scheduler": np.int32(0)}
PREDICTED = [
    ("text_encoder", "serving_default", {"tokens": np.full((1, 77), 7, "int32")}),
    ("text_encoder", "plain_serving_default", {"tokens": np.full((4, 77), 9, "int32")}),
    ("diffusion_model", "noise", {"seed": np.arange(4, dtype="int32")}),
    ("diffusion_model", "begin", {"noise": LATENT, **STEPS}),
    ("decoder", "serving_default", {"latent": LATENT}),
    ("decoder", "png", {"latent": LATENT}),
    (
        "image_encoder",
        "serving_default",
        {"images": np.tanh(LATENT[..., :3].repeat(4, 1).repeat(4, 2))},
    ),
]


def request_of(model, signature="", inputs=None, version=None):
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, signature
    if version is not None:
        request.model_spec.version.value = version
    for name, value in (inputs or {}).items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    return request


def known_signature(served, model, signature):
    content = (served.export_dir / model / "1" / "saved_model.pb").read_bytes()
    signatures = saved_model_pb2.SavedModel.FromString(content).meta_graphs[0].signature_def
    return signature if signature in signatures else signature.removeprefix("plain_")


@pytest.mark.parametrize(("model", "signature", "inputs"), PREDICTED)
def test_predict_is_the_saved_model(served, stub, model, signature, inputs):
    signature = known_signature(served, model, signature)
    response = stub.Predict(request_of(model, signature, inputs), timeout=60)
    function = tf.saved_model.load(str(served.export_dir / model / "1")).signatures[signature]
    expected = function(**{name: tf.constant(value) for name, value in inputs.items()})
    assert response.outputs.keys() == expected.keys()
    for name, value in expected.items():
        ours = tf.make_ndarray(response.outputs[name])
        check_equal(ours, value.numpy())
    spec = response.model_spec
    known = model, version_of(export_digest(served.export_dir)), signature
    assert (spec.name, spec.version.value, spec.signature_name) == known


def test_metadata_and_status(served, stub, channel):
    for model in ("text_encoder", "diffusion_model", "decoder", "image_encoder"):
        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = model
        answer: any_pb2.Any = stub.GetModelMetadata(request).metadata["signature_def"]
        signatures = get_model_metadata_pb2.SignatureDefMap()
        assert answer.Unpack(signatures)
        content = (served.export_dir / model / "1" / "saved_model.pb").read_bytes()
        file = saved_model_pb2.SavedModel.FromString(content).meta_graphs[0].signature_def
        assert dict(signatures.signature_def) == dict(file)

        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = model
        status = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(request)
        (entry,) = status.model_version_status
        version = json.loads(send(served, "/about").read())["version"]
        assert (entry.version, entry.State.Name(entry.state)) == (version, "AVAILABLE")


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        (("vae",), CODES.NOT_FOUND, "Servable not found for request: Latest(vae)"),
        (
            ("decoder", "", None, 7),
            CODES.NOT_FOUND,
            "Servable not found for request: Specific(decoder, 7)",
        ),
        (("",), CODES.INVALID_ARGUMENT, "ModelSpec has no name specified."),
        (
            ("decoder", "x"),
            CODES.FAILED_PRECONDITION,
            'Serving signature key "x" not found.',
        ),
        (
            ("decoder", "", {"images": LATENT}),
            CODES.INVALID_ARGUMENT,
            "input tensor alias not found in signature: images. "
            "Inputs expected to be in the set {latent}.",
        ),
        (
            ("decoder", "", {"latent": LATENT.astype("float64")}),
            CODES.INVALID_ARGUMENT,
            "Expects arg[0] to be float but double is provided",
        ),
        (
            ("decoder", "", {"latent": LATENT[:3]}),
            CODES.INVALID_ARGUMENT,
            "Input latent has the shape [3,16,16,4], its signature takes [4,16,16,4].",
        ),
    ],
)
def test_grpc_errors(stub, asked, code, message):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(request_of(*asked), timeout=30)
    assert (caught.value.code(), caught.value.details()) == (code, message)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_our_client(served, pipe, scheme):
    server = f"grpc://{served.grpc}" if scheme == "grpc" else served.url
    with Client(server, served.export_dir, jit_compile=False) as client:
        ours = client([PROMPT] * 2, "green", seed=5, num_steps=2).images
    check_equal(ours, pipe([PROMPT] * 2, "green", seed=5, num_steps=2).images)


def test_rest_errors(served):
    for path, body, status, message in (
        ("/v1/models/vae:predict", b"{}", 404, "Servable not found for request: Latest(vae)"),
        ("/v1/models/decoder:predict", b"{", 400, "JSON Parse error"),
        ("/v1/models/..%2f..%2fetc:predict", b"{}", 404, "Servable not found"),
        ("/v1/models", b"{}", 400, "Malformed request: POST /v1/models"),
    ):
        answer = send(served, path, body)
        assert answer.status == status, path
        assert message in json.loads(answer.read())["error"]


@pytest.mark.long
def test_fuzzed_requests(served):
    """Two thousand of them: always an answer that says what is wrong, and it goes on."""
    source = random.Random(0)
    url = urlsplit(served.url)
    valid = json.dumps({"prompt": PROMPT, "num_steps": 1, "seed": 1, "previews": 1}).encode()
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    statuses = set()
    for index in range(1500):
        body = source.randbytes(source.randint(0, 200))
        if index % 3:
            place = source.randrange(len(valid))
            body = valid[:place] + source.randbytes(source.randint(1, 3)) + valid[place + 1 :]
        path = source.choice(["/generate", "/v1/models/decoder:predict", "/v1/models/x:predict"])
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        content = json.loads(answer.read())
        statuses.add(answer.status)
        assert answer.status == 200 or content["error"], (path, body)
    connection.close()
    assert statuses <= {200, 400, 404, 422} and {400, 404, 422} <= statuses

    request = request_of("decoder", "", {"latent": LATENT}).SerializeToString()
    with grpc.insecure_channel(served.grpc) as channel:
        raw = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        codes = set()
        for _ in range(500):
            place = source.randrange(120)
            content = request[:place] + source.randbytes(2) + request[place + 2 :]
            try:
                raw(content, timeout=30)
                codes.add(CODES.OK)
            except grpc.RpcError as error:
                codes.add(error.code())
    assert codes <= {
        CODES.OK,
        CODES.NOT_FOUND,
        CODES.INVALID_ARGUMENT,
        CODES.FAILED_PRECONDITION,
    }
    assert generate(served, seed=1)["images"]


# Load and faults


def test_busy_is_said_at_once(served):
    """More than may wait is refused, what was accepted is drawn."""
    body = {"num_steps": 5, "count": 16, "seed": 1}
    with ThreadPoolExecutor(8) as pool:
        start = time.monotonic()
        answers = list(pool.map(lambda _: finished(served, body), range(8)))
    refused = [(answer, taken) for answer, _, taken in answers if answer.status == 429]
    drawn = [content for answer, content, _ in answers if answer.status == 200]
    assert len(refused) + len(drawn) == 8 and refused and drawn
    assert all(len(content["images"]) == 16 for content in drawn)
    for answer, taken in refused:
        assert taken < 0.5 * (time.monotonic() - start)
        assert int(answer.headers["retry-after"]) > 0


def finished(served, body):
    start = time.monotonic()
    answer = send(served, body={"prompt": PROMPT, **body})
    return answer, json.loads(answer.read()), time.monotonic() - start


def test_work_stops_when_the_client_leaves(served):
    long = {"num_steps": 100, "count": 4}
    start = time.monotonic()
    generate(served, **long)
    whole = time.monotonic() - start

    def leave_at_the_first_step():
        answer = stream(served, **long)
        for name, _ in events(answer):
            if name == "progress":
                break
        answer.close()

    start = time.monotonic()
    for _ in range(3):
        leave_at_the_first_step()
    generate(served, num_steps=1)
    assert time.monotonic() - start < whole


def test_slow_clients_hold_up_nobody(served):
    """One that stops in the middle of its body, one that does not read what it is sent."""
    url = urlsplit(served.url)
    body = json.dumps({"prompt": PROMPT, **CALL, "count": 16, "previews": 4}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: {url.netloc}\r\nAccept: text/event-stream\r\n"
        f"Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    with socket.socket() as sends, socket.socket() as reads:
        for one, content in ((sends, body[:10]), (reads, body)):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(60)
            one.connect((url.hostname, url.port))
            one.sendall(head + content)
        for seed in range(4):
            generate(served, seed=seed)
        stream = b"".join(iter(lambda: reads.recv(1 << 16), b""))
    assert stream.count(b"event: image\n") == 16 and b"event: done\n" in stream


def test_a_body_that_does_not_come():
    class Stalled:
        async def stream(self):
            yield b"{"
            await asyncio.sleep(60)

    with pytest.raises(RefusedError, match=r"not received in 0\.01 seconds") as refused:
        asyncio.run(read_body(Stalled(), 100, within=0.01))
    assert refused.value.status == 408


def test_a_replica_killed_in_the_middle(served):
    expected = pixels(generate(served, num_steps=30, seed=2)["images"][0])
    answer = stream(served, num_steps=30, seed=2)
    last, images = None, []
    for name, content in events(answer):
        if name == "progress" and content["done"] == 3:
            (pid,) = served.replicas("diffusion_model")
            kill(pid)
        if name == "image":
            images.append(content)
        last = name, content
    if last[0] == "error":  # fails cleanly, if the new one is not there soon enough
        assert last[1]["status"] == 503
    else:
        check_equal(pixels(images[0]), expected)
    end = time.monotonic() + 200
    while True:  # comes back by itself
        answer, content, _ = finished(served, {"num_steps": 30, "seed": 2, "guidance_scale": 4.0})
        if answer.status == 200:
            break
        assert answer.status in (503, 429) and time.monotonic() < end, content
        time.sleep(1)
    check_equal(pixels(content["images"][0]), expected)


@pytest.mark.long
def test_an_export_swapped_under_load(served, pipe, tiny_exports):
    """No request fails, and then the new export draws; a client can go on with the old one."""
    old, new = served.export_dir, tiny_exports(2)
    aside = old.with_name("aside")
    lock, answers = threading.Lock(), []

    def ask(stop):
        while not stop.is_set():
            answer, content, _ = finished(served, {"num_steps": 2, "seed": 1, "count": 3})
            with lock:
                answers.append((answer.status, content))

    def about():
        return json.loads(send(served, "/about").read())

    before = about()["version"]
    with in_background(ask), in_background(ask):
        for place, size in ((new, 2), (aside, 4)):
            old.rename(aside if size == 2 else new)
            place.rename(old)
            end = time.monotonic() + 400  # the new one compiles beside the requests
            while about()["batch_size"] != size:
                assert time.monotonic() < end
                time.sleep(0.5)
            if size == 2:
                with Client(
                    f"grpc://{served.grpc}", aside, jit_compile=False, version=before
                ) as client:
                    images = client(PROMPT, seed=1, **CALL).images
                check_equal(images, pipe(PROMPT, seed=1, **CALL).images)
            time.sleep(1)
    assert about()["version"] == before
    assert len(answers) > 10
    assert {status for status, _ in answers} == {200}, answers[-1]


@pytest.mark.long
def test_a_short_soak(served, tiny_exports, tmp_path):
    """One kill and one replacement, under clients that also leave and send rubbish."""
    from sd_tf.export import ExportOptions, export

    first = shutil.copytree(served.export_dir, tmp_path / "first")
    soaked.make_checkpoints(tmp_path / "made")
    options = ExportOptions(batch_size=4, verify="off", disabled_rewrites=REWRITES)
    export(open_checkpoint(tmp_path / "made" / "second"), tmp_path / "second", options)
    exports = {"first": first, "second": tmp_path / "second"}
    cache = served.process.args[served.process.args.index("--compile_cache") + 1]
    expected = apart(soaked.expected, exports, cache)

    options = SoakOptions(minutes=9 / 60, clients=8, kill_every=6, replacements=1)
    figures = attack(served, exports, expected, options, print)
    soaked.put(first, served.export_dir)
    assert figures["broken"] == [] and figures["outcomes"]["right"] > 0, figures
    assert figures["killed"] == {"diffusion_model": 1}
    assert until_drawn(Target(urlsplit(served.url), first, Tally(expected)), "first")


# The command


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--export_dir", "nowhere"], "nowhere is not an export"),
        (["--detach"], "--detach goes with --address"),
        (["--max_queue", "0"], "--max_queue is at least 1. Received: 0"),
        (["--timeout", "-1"], "--timeout is at least 0. Received: -1.0"),
        (["--timeout", "0"], "--timeout is above 0. Received: 0"),
        (["--max_body", "2048"], "--max_body is at most 2047. Received: 2048"),
        (["--guidance_scale", "nan"], "--guidance_scale is a number from -1000000 to 1000000."),
        (["--num_steps", "0"], "--num_steps is a whole number from 1 to 100, the export's"),
        (["--max_queue", "8"], "--max_count is at most --max_queue, 8: larger calls would"),
        (["--keep_old", "-1"], "--keep_old is at least 0. Received: -1.0"),
        (["--replicas", "vae=1"], "There is no deployment vae. There are front, "),
        (["--replicas", "decoder=3-1"], "MIN not above MAX"),
        (["--replicas", "decoder=x"], "decoder: invalid literal"),
        (["--replicas", "front=1-2"], "front has a fixed number of replicas"),
        (["--max_body", "0"], "--max_body is at least 1. Received: 0"),
        (["--allow_origin", "*"], "--allow_origin is http://HOST or https://HOST, perhaps with"),
        (["--api_key_file", "nowhere.key"], "nowhere.key"),
        (["--examples", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_wrong_flags(served, capsys, flags, message):
    exported = [] if "--export_dir" in flags else ["--export_dir", str(served.export_dir)]
    assert main(["serve", "ray", *exported, *flags]) == 1
    assert message in capsys.readouterr().err


def test_the_load_command(served, tmp_path, capsys):
    path = tmp_path / "load.json"
    arguments = ["--url", served.url, "--clients", "1", "3", "--seconds", "3", "--num_steps", "1"]
    assert main(["serve", "load", *arguments, "--json", str(path)]) == 0
    records = json.loads(path.read_text())
    assert [record["clients"] for record in records] == [1, 3]
    for record in records:
        assert record["pictures"] > 0 and record["wrong"] == record["failed"] == 0
        assert 0 < record["p50"] < 60
        assert (record["p95"] is None) == (record["pictures"] < 20)
    assert "pictures/s" in capsys.readouterr().out
    assert main(["serve", "load", "--url", "ftp://x"]) == 1
    assert "--url is http://host:port" in capsys.readouterr().err
    assert main(["serve", "load", "--clients", "0"]) == 1
    assert "--clients are 1 to 256 each. Received: 0" in capsys.readouterr().err
