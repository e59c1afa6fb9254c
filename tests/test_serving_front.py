"""Who is let in to the Ray Serve application's front, and what one request may cost it."""

import asyncio
import base64
import http.client
import io
import json
import pickle
import re
import socket
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from fastapi.responses import StreamingResponse
from PIL import Image
from starlette.requests import ClientDisconnect
from tensorflow_serving.apis import (
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from sd_tf.bench.application import free_ports
from sd_tf.cli.main import main
from sd_tf.config import FAMILIES
from sd_tf.serving.client import Client, ServerError, transports
from sd_tf.serving.errors import RefusedError, ServingError
from sd_tf.serving.ray_app.access import Access, read_key, read_origin
from sd_tf.serving.ray_app.admission import Room, Slots
from sd_tf.serving.ray_app.batching import MOST_PREVIEWS_WAITING, Events
from sd_tf.serving.ray_app.http import WEB, make_app, read_body, unless_gone
from sd_tf.serving.ray_app.listen import HttpServer, check_free, open_socket
from sd_tf.serving.tf_serving.predict import ModelError
from tests.exports import micro_export
from tests.fronts import running_front

KEY = "a-key-for-the-tests-1234"
SITE = "https://pictures.example"
CALL = {"prompt": "a large red star", "num_steps": 1, "seed": 1}


@pytest.fixture(scope="module")
def front():
    with running_front(num_steps=1, allow_origin=(SITE,)) as front:
        yield front


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(f"{KEY}\n")
    with running_front(num_steps=1, max_queue=2, max_body=1, api_key_hash=read_key(file)) as front:
        yield front


def send(front, path="/generate", body=None, **headers):
    """Return the status, the headers and the content of an answer."""
    connection = http.client.HTTPConnection(front.http, timeout=60)
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if data is None else "POST", path, data, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, json.loads(content or b"null")


def posted(front, body, **headers):
    status, _, content = send(front, "/generate", body, content_type="application/json", **headers)
    return status, content


# Who gets in


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"content_type": "text/plain"}, 415, "Content-Type: application/json`. Received: 'text/"),
        ({}, 415, "Send the header `Content-Type: application/json`. Received: ''"),
        (
            {"origin": "https://evil.example"},
            403,
            "Pages of 'https://evil.example' may not call this server. To allow it, start the "
            "server with --allow_origin 'https://evil.example'.",
        ),
        ({"origin": "null"}, 403, "Pages of 'null' may not call"),
        ({"host": "evil.example"}, 403, "does not go by the name 'evil.example'"),
        ({"host": "localhost.evil.example:8000"}, 403, "does not go by the name"),
        ({"host": "["}, 403, "does not go by the name '['"),
    ],
)
def test_other_sites_draw_nothing(front, headers, status, message):
    if headers.keys() & {"origin", "host"}:
        headers = {"content_type": "application/json", **headers}
    for path, body in (("/generate", CALL), ("/v1/models/decoder:predict", {"inputs": []})):
        found, _, content = send(front, path, body, **headers)
        assert found == status
        assert message in content["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("DELETE", "/generate", 405),
        ("PUT", "/v1/images/generations", 405),
        ("PATCH", "/v1/models/decoder", 405),
        ("POST", "/health", 405),
        ("POST", "/nowhere", 404),
        ("POST", "/v1/images/nothing", 404),
        ("POST", "/v1/images/edits/", 404),
        ("POST", "//v1/images/edits", 404),
        ("POST", "/v1/nothing", 400),  # as TensorFlow Serving has it
    ],
)
@pytest.mark.parametrize("kind", [None, "text/plain", "multipart/form-data; boundary=x"])
def test_paths_and_methods_that_there_are_not(front, method, path, status, kind):
    """They are told as such, whatever the kind of a body that nothing reads."""
    connection = http.client.HTTPConnection(front.http, timeout=60)
    headers = {} if kind is None else {"content-type": kind}
    connection.request(method, path, b"{}", headers)
    answer = connection.getresponse()
    assert (answer.status, bool(json.loads(answer.read())["error"])) == (status, True)
    connection.request(method, path, b"{}", {**headers, "origin": "https://evil.example"})
    assert connection.getresponse().status == 403
    connection.close()


def test_every_path_that_takes_a_body_asks_for_its_kind(front):
    access, taken = Access("127.0.0.1"), 0
    for route in front.front.http._server.config.app.routes:
        if "POST" not in (getattr(route, "methods", None) or ()):
            continue
        if route.path == "/v1/images/{rest:path}":  # always refused
            continue
        path = route.path.replace("{path:path}", "models/decoder:predict")
        taken += 1
        with pytest.raises(RefusedError, match="Send the header `Content-Type: ") as refusal:
            access.check("POST", path, {"host": "localhost", "content-type": "text/plain"})
        assert refusal.value.status == 415
    assert taken == 4


def test_the_page_names_every_family():
    script = (WEB / "page.js").read_text()
    named = re.search(r"const FAMILIES = \{(.*?)\};", script, re.DOTALL).group(1)
    assert re.findall(r'^  "?([^":]+)"?: ".+",$', named, re.MULTILINE) == list(FAMILIES)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://{own}"},
        {"host": "localhost"},
        {"host": "192.0.2.7:8000", "origin": "http://192.0.2.7:8000"},
        {"host": "[::1]:8000"},
        {"origin": SITE},
        {"host": "pictures.example", "origin": SITE},
        {"content_type": "Application/JSON; charset=utf-8"},
    ],
)
def test_own_pages_and_programs_draw(front, headers):
    headers = {name: value.format(own=front.http) for name, value in headers.items()}
    status, _, content = send(
        front, "/generate", CALL, **{"content_type": "application/json", **headers}
    )
    assert status == 200, content
    assert len(content["images"]) == 1


def test_the_page_of_an_allowed_site(front):
    """Its browser asks first, without the key, and shows it the answer."""
    status, headers = ask_first(front, SITE)
    assert (status, headers["access-control-allow-origin"]) == (200, SITE)
    assert ask_first(front, "https://evil.example")[0] == 400
    _, headers, _ = send(front, "/generate", CALL, content_type="application/json", origin=SITE)
    assert headers["access-control-allow-origin"] == SITE
    _, headers, _ = send(front, "/about", origin="https://evil.example")
    assert "access-control-allow-origin" not in headers


def ask_first(front, origin):
    """Send the question that a browser asks before a page of that origin may send JSON."""
    connection = http.client.HTTPConnection(front.http, timeout=60)
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    connection.request("OPTIONS", "/generate", headers=headers)
    answer = connection.getresponse()
    connection.close()
    return answer.status, answer.headers


@pytest.mark.parametrize("given", [{}, {"authorization": "Bearer x"}, {"authorization": KEY[:-1]}])
def test_http_needs_the_key(locked, given):
    for path, body in (("/about", None), ("/generate", CALL), ("/v1/models/decoder", None)):
        status, headers, content = send(
            locked, path, body, **given, content_type="application/json"
        )
        assert (status, headers["www-authenticate"]) == (401, "Bearer"), path
        assert content["error"] == "Send the server's key as `Authorization: Bearer KEY`."
        right = {"authorization": f"Bearer {KEY}", "content_type": "application/json"}
        assert send(locked, path, body, **right)[0] == 200, path
    for path in ("/health", "/ready", "/openapi.json"):
        assert send(locked, path, **given)[0] == 200, path


def status_request():
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = "decoder"
    return request


def test_grpc_needs_the_key(locked):
    with grpc.insecure_channel(locked.grpc) as channel:
        models = model_service_pb2_grpc.ModelServiceStub(channel)
        for metadata in (None, [("authorization", "Bearer x")]):
            with pytest.raises(grpc.RpcError) as caught:
                models.GetModelStatus(status_request(), metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "Authorization: Bearer KEY" in caught.value.details()
        right = [("authorization", f"Bearer {KEY}")]
        (entry,) = models.GetModelStatus(status_request(), metadata=right).model_version_status
        assert entry.State.Name(entry.state) == "AVAILABLE"


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_our_client_has_the_key(locked, scheme):
    server = f"grpc://{locked.grpc}" if scheme == "grpc" else f"http://{locked.http}"
    refusal = pytest.raises(ServerError, match=r"UNAUTHENTICATED: .* Give a token")
    with Client(server, micro_export(), jit_compile=False) as client, refusal:
        client("a prompt", num_steps=1)
    with Client(server, micro_export(), jit_compile=False, token=KEY) as client:
        assert client("a prompt", num_steps=1).images.shape == (1, 16, 16, 3)


def test_the_load_command_has_the_key(locked, monkeypatch, capsys):
    arguments = ["--url", f"http://{locked.http}", "--clients", "1", "--seconds", "0.3"]
    monkeypatch.delenv("SD_TF_TOKEN", raising=False)
    assert main(["serve", "load", *arguments, "--num_steps", "1"]) == 1
    monkeypatch.setenv("SD_TF_TOKEN", KEY)
    assert main(["serve", "load", *arguments, "--num_steps", "1"]) == 0
    assert " 0 failed" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("key", ["", "short", "with spaces in between", "größer als gedacht war"])
def test_wrong_keys(tmp_path, key):
    (tmp_path / "key").write_text(key, encoding="utf-8")
    with pytest.raises(ServingError, match="`api_key_file` holds one key: at least 16 letters"):
        read_key(tmp_path / "key")


@pytest.mark.parametrize("origin", ["*", "example.org", "ftp://a", "http://a/b", "http://u@a"])
def test_wrong_origins(origin):
    with pytest.raises(ServingError, match=r"`allow_origin` is http://HOST or https://HOST"):
        read_origin(origin)


def test_a_port_that_is_taken():
    with open_socket("127.0.0.1", 0) as other:
        other.listen(1)
        port = other.getsockname()[1]
        with pytest.raises(ServingError, match=f"127.0.0.1, port {port}, cannot be listened on"):
            check_free("127.0.0.1", port)
        open_socket("127.0.0.1", port).close()  # by a second front


def test_both_servers_listen_on_the_host_asked_for_alone(front):
    for place in (front.http, front.grpc):
        port = int(place.rpartition(":")[2])
        loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
        # As an IPv6 socket lists it, too: gRPC opens one where the machine has IPv6.
        assert listening(port) <= {loopback, f"0000000000000000FFFF0000{loopback}"}
        assert listening(port)


def listening(port: int) -> set[str]:
    """Return the local addresses that anything listens on at that port, as the kernel has them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            address, _, number = fields[1].partition(":")
            if fields[3] == "0A" and int(number, 16) == port:
                found.add(address)
    return found


# What a small request can cost


def test_an_answer_about_many_wrong_values_is_short(front):
    for body in (
        b'{"prompt": [' + b"1," * 99_000 + b"1]}",
        b"{" + b",".join(b'"no%d": 1' % number for number in range(99_000)) + b"}",
        b'{"' + b"x" * 1_000_000 + b'": 1}',
    ):
        start = time.monotonic()
        status, content = posted(front, body)
        assert status == 422
        assert len(content["error"]) < 6000
        assert time.monotonic() - start < 20
    _, content = posted(front, {"prompt": "a", **{f"no{number}": 1 for number in range(12)}})
    assert content["error"].count("there is no such parameter") == 10
    assert content["error"].endswith("; and 2 more")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": [' + b'"",' * 100_001 + b'""]}', "The body has more than 100000 commas."),
        (b'{"prompt": "a", "count": 1' + b"0" * 4000 + b"}", "count is a whole number from 1 to"),
        (b'{"prompt": "a", "count": 10001}', "count is a whole number from 1 to 10000. Received"),
        (b'{"prompt": "a", "count": 10000}', "One call gives 1 to 16 pictures. Received: 10000"),
    ],
)
def test_a_count_or_a_list_without_end(front, body, message):
    status, content = posted(front, body)
    assert (status, message in content["error"]) == (422, True), content


def encoded(format: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(file, format)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("format", ["ICO", "EPS", "BMP", "GIF", "TIFF"])
def test_other_formats_are_not_decoded(front, format):
    status, content = posted(front, {**CALL, "image": encoded(format)})
    assert status == 422
    assert content["error"] == "image: this is not a PNG, JPEG, WebP or AVIF picture."


def test_a_message_over_the_limit(locked):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "decoder"
    request.inputs["latent"].tensor_content = b"\0" * (2 << 20)
    key = [("authorization", f"Bearer {KEY}")]
    with grpc.insecure_channel(locked.grpc) as channel:
        predictions = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            predictions.Predict(request, metadata=key)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        client = transports.Grpc(transports.split(f"grpc://{locked.grpc}"), dict(key), None)
        large = {"latent": np.arange(1 << 19, dtype="float32")}
        with pytest.raises(transports.AttemptError, match="larger than max") as refused:
            client.predict("decoder", 1, "serving_default", large, 60.0)
        assert not refused.value.is_busy
        client.close()
        raw = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        with pytest.raises(grpc.RpcError) as caught:
            raw(b"\xff\xff", metadata=key)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    headers = {"content_type": "application/json", "authorization": f"Bearer {KEY}"}
    status, _, content = send(locked, "/v1/models/decoder:predict", b" " * (2 << 20), **headers)
    assert (status, content["error"]) == (413, "The body is longer than 1048576 bytes.")
    assert locked.front.room.used == 0


def test_a_refusal_reaches_a_client_that_is_still_sending(front, locked):
    body = b" " * (25 << 20)
    headers = {"content_type": "application/json", "connection": "close"}
    status, _, content = send(front, "/generate", body, **headers)
    assert (status, content["error"]) == (413, "The body is longer than 25165824 bytes.")
    assert send(locked, "/generate", body, **headers)[0] == 401


class Pictures:
    """In place of the metric: the numbers of pictures by outcome."""

    def __init__(self):
        self.counts = Counter()

    def inc(self, count, tags):
        self.counts[tags["outcome"]] += count


def test_a_slot_is_taken_before_the_body_is_read(locked, monkeypatch):
    """Two callers that send nothing fill a queue of two; a third is refused at its header."""
    pictures = Pictures()
    monkeypatch.setattr(locked.front.drawing, "pictures", pictures)
    head = (
        f"POST /generate HTTP/1.1\r\nHost: {locked.http}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: 1000\r\n\r\n"
    ).encode()
    address = ("127.0.0.1", int(locked.http.rpartition(":")[2]))
    slots = locked.front.arriving
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        for place, connection in enumerate((first, second)):
            connection.sendall(head + b"{")
            wait_until(lambda place=place: slots.count == place + 1)
        with socket.create_connection(address, timeout=20) as third:
            third.sendall(head)
            answer = b""
            while b"\r\n\r\n{" not in answer and (part := third.recv(1 << 16)):
                answer += part
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"2 pictures are waiting or arriving. Try again later." in answer
    wait_until(lambda: slots.count == 0 and locked.front.room.used == 0)
    assert pictures.counts == {"refused": 1}


def test_all_pictures_of_a_call_without_room_are_refused(locked, monkeypatch):
    pictures = Pictures()
    monkeypatch.setattr(locked.front.drawing, "pictures", pictures)
    key = {"authorization": f"Bearer {KEY}"}
    status, content = posted(locked, {**CALL, "count": 3}, **key)
    assert status == 429 and "at most 2 may. Try again later." in content["error"]
    assert pictures.counts == {"refused": 3}
    assert posted(locked, {**CALL, "num_steps": 99}, **key)[0] == 422
    assert pictures.counts == {"refused": 3}


def test_a_place_that_a_model_call_does_not_find():
    slots = Slots(1)
    refused = pytest.raises(RefusedError, match=r"^1 calls are in progress\. Try again later\.$")
    with slots.taken(), refused, slots.taken():
        pass
    assert slots.count == 0


def wait_until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_bodies_wait_for_room():
    async def run():
        room, seen = Room(10, within=0.2), []

        async def body(size: int) -> None:
            async with room.held(size) as keep:
                seen.append(room.used)
                keep(1)
                await asyncio.sleep(0.05)

        await asyncio.gather(*(body(8) for _ in range(3)))
        async with room.held(8):
            with pytest.raises(RefusedError, match="Other bodies fill the memory") as refused:
                await body(8)
        return seen, refused.value.status, room.used

    assert asyncio.run(run()) == ([8, 9, 10], 429, 0)


def test_previews_that_nobody_takes_are_dropped():
    async def run():
        events = Events()
        for number in range(50):
            events.put("preview", number)
            events.put("progress", number)
        seen = [await events.get() for _ in range(50 + MOST_PREVIEWS_WAITING)]
        events.put("preview", "new")
        return seen, await events.get()

    seen, last = asyncio.run(run())
    previews = [content for name, content in seen if name == "preview"]
    assert previews == list(range(MOST_PREVIEWS_WAITING))
    assert last == ("preview", "new")


def test_a_client_that_does_not_read_is_disconnected():
    async def run():
        closed = asyncio.Event()

        async def parts():
            try:
                while True:
                    await asyncio.sleep(0.01)
                    yield b" " * (1 << 20)
            finally:
                closed.set()

        app = make_app(Access("127.0.0.1"))
        app.get("/much")(lambda: StreamingResponse(parts()))
        (port,) = free_ports(1)
        server = HttpServer(app, "127.0.0.1", port, read_within=0.5)
        _, writer = await connected(port)
        writer.write(b"GET /much HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(closed.wait(), 20)
        writer.close()
        await server.stop()

    asyncio.run(run())


def test_a_header_that_does_not_come():
    async def run():
        (port,) = free_ports(1)
        server = HttpServer(make_app(Access("127.0.0.1")), "127.0.0.1", port, begin_within=0.2)
        reader, writer = await connected(port)
        silent, other = await connected(port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: loc")
        assert await asyncio.wait_for(reader.read(), 20) == b""
        assert await asyncio.wait_for(silent.read(), 20) == b""
        writer.close()
        other.close()
        await server.stop()

    asyncio.run(run())


def test_a_header_without_end():
    async def run():
        (port,) = free_ports(1)
        server = HttpServer(make_app(Access("127.0.0.1")), "127.0.0.1", port)
        answers = []
        for start in (b"GET /", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "):
            reader, writer = await connected(port)
            writer.write(start + b"a" * (70 << 10))
            answers.append(await asyncio.wait_for(reader.read(), 20))
            writer.close()
        await server.stop()
        return answers

    for answer in asyncio.run(run()):
        assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_failure_is_answered_like_any_other_error():
    async def run():
        app = make_app(Access("127.0.0.1"))
        app.get("/broken")(lambda: 1 / 0)
        (port,) = free_ports(1)
        server = HttpServer(app, "127.0.0.1", port)
        found = []
        for path in (b"/broken", b"/nowhere"):
            reader, writer = await connected(port)
            lines = b"GET " + path + b" HTTP/1.1", b"Host: localhost", b"Connection: close", b""
            writer.write(b"".join(line + b"\r\n" for line in lines))
            head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
            assert b"x-content-type-options: nosniff" in head
            found.append((int(head.split()[1]), json.loads(body)))
            writer.close()
        await server.stop()
        return found

    assert asyncio.run(run()) == [
        (500, {"error": "The server failed. Its log says why."}),
        (404, {"error": "Not Found"}),
    ]


def test_a_client_that_leaves_while_it_sends():
    async def stream():
        yield b"{"
        raise ClientDisconnect

    with pytest.raises(RefusedError, match="The client closed the connection") as refusal:
        asyncio.run(read_body(SimpleNamespace(stream=stream), 100))
    assert refusal.value.status == 499


def test_a_model_s_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(ModelError(3, "no such input")))
    assert (str(error), error.code, error.message) == ("no such input", 3, "no such input")


def test_a_version_of_thousands_of_digits(front):
    for path in ("/v1/models/decoder/versions/", "/v1/models/nobody/versions/"):
        status, _, content = send(front, path + "1" * 5000)
        assert status == 400 and content["error"].startswith("Failed to convert version: 111")


def test_origins_are_written_as_browsers_write_them():
    assert read_origin("https://Pictures.example:443") == "https://pictures.example"
    assert read_origin("http://pictures.example:443/") == "http://pictures.example:443"
    assert read_origin("http://[::1]:80") == "http://[::1]"


async def connected(port: int):
    """Connect, with a reader that takes little, as soon as the server listens."""
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port, limit=1)
        except ConnectionRefusedError:
            await asyncio.sleep(0.01)


def test_work_ends_when_its_client_is_gone():
    async def run():
        cancelled = asyncio.Event()

        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.set()

        async def receive():
            await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        with pytest.raises(RefusedError, match="The client closed the connection"):
            await unless_gone(SimpleNamespace(receive=receive), work())
        await asyncio.wait_for(cancelled.wait(), 5)

    asyncio.run(run())
