"""The client on the wire: what it tries again, how long it waits, and what it says of errors."""

import email.utils
import http.client
import json
import random
import re
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from tensorflow_serving.apis import predict_pb2

from sd_tf.runtime import retry
from sd_tf.runtime.manifest import ExportError
from sd_tf.serving.client import client as client_module
from sd_tf.serving.client.client import Client, ServerError
from tests.serving_server import (
    SCHEMES,
    grpc_server,
    http_server,
    light_export,
    served_models,
)


@pytest.fixture(scope="module")
def light():
    return light_export()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)


def failing(scheme, failures, code="UNAVAILABLE", status=503, said="busy", **headers):
    """A server whose first answers are failures; counts what it is asked to predict."""
    asked = Counter()

    def count():
        asked["predict"] += 1
        return asked["predict"] <= failures

    def before_grpc(context):
        if count():
            context.abort(grpc.StatusCode[code], said)

    def before_http(handler, body):
        if handler.command == "POST" and count():
            return status, json.dumps({"error": said}), headers
        return None

    models = served_models()[1]
    if scheme == "grpc":
        return grpc_server(models, before_grpc), asked
    return http_server(models, before_http), asked


def tokens(client):
    """The cheapest call that there is."""
    shape, ids = client.manifest.shapes.first, np.zeros((1, 77), "int32")
    return client._replicas[0].call("text_encoder", "serving_default", shape, tokens=ids)["context"]


def test_closing_closes_the_connections_of_all_threads(light):
    server, _ = failing("http", 0)
    with server as address:
        client = Client(f"http://{address}", light)
        with ThreadPoolExecutor(2) as pool:
            both = threading.Barrier(2)
            list(pool.map(lambda _: (both.wait(), tokens(client)), range(2)))
        opened = [connection.sock for connection in client._remote.transport._open]
        assert len(opened) == 2 and None not in opened
        client.close()
        assert [one.fileno() for one in opened] == [-1, -1]
        assert tokens(client).shape == (2, 77, 64)  # it connects again
        client.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("code", "status", "mend"),
    [("UNAVAILABLE", 503, "Is the server run"), ("RESOURCE_EXHAUSTED", 429, "The server is over")],
)
def test_a_server_that_is_away_or_busy_is_tried_again(quick, light, scheme, code, status, mend):
    server, asked = failing(scheme, 2, code, status)
    with server as address, Client(f"{scheme}://{address}", light) as client:
        assert tokens(client).shape == (2, 77, 64)
    assert asked["predict"] == 3

    server, asked = failing(scheme, 99, code, status)
    with (
        server as address,
        Client(f"{scheme}://{address}", light, retries=2) as client,
        pytest.raises(ServerError, match=rf"{code} after 3 attempts: busy. {mend}"),
    ):
        tokens(client)
    assert asked["predict"] == 3


def test_retry_after_is_honoured(monkeypatch, quick, light):
    """It is waited for as often as the server asks, but never beyond the call's time limit."""
    pauses = []
    monkeypatch.setattr(random, "uniform", lambda least, most: least)
    monkeypatch.setattr(
        client_module, "time", SimpleNamespace(**{**vars(time), "sleep": pauses.append})
    )
    server, asked = failing("http", 3, status=429, **{"Retry-After": "7"})
    with server as address, Client(f"http://{address}", light, retries=0) as client:
        assert tokens(client).shape == (2, 77, 64)
    assert pauses == [7.0] * 3 and asked["predict"] == 4

    for at, least, most in (
        (time.time() + 60, 55, 60),
        (time.time() - 60, 0.01, 0.01),  # it may come back at once, which is no reason to hurry
    ):
        pauses.clear()
        date = email.utils.formatdate(at, usegmt=True)
        server, _ = failing("http", 1, **{"Retry-After": date})
        with server as address, Client(f"http://{address}", light, retries=0) as client:
            tokens(client)
        assert len(pauses) == 1 and least <= pauses[0] <= most

    pauses.clear()
    for text, retries, pause in (("601", 5, []), ("soon", 1, [0.005])):
        server, _ = failing("http", 99, status=429, **{"Retry-After": text})
        with (
            server as address,
            Client(f"http://{address}", light, retries=retries) as client,
            pytest.raises(ServerError, match=r"RESOURCE_EXHAUSTED.*: busy\. The server is over"),
        ):
            tokens(client)
        assert pauses == pause


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("code", "status", "mend"),
    [
        ("UNAUTHENTICATED", 401, "Give a token .`SD_TF_TOKEN` for the command"),
        ("INTERNAL", 500, "jit_compile=False"),
        ("INVALID_ARGUMENT", 400, "whose pipeline.json"),
    ],
)
def test_nothing_else_is(quick, light, scheme, code, status, mend):
    server, asked = failing(scheme, 1, code, status)
    with (
        server as address,
        Client(f"{scheme}://{address}", light) as client,
        pytest.raises(ServerError, match=f"{code}: busy. .*{mend}") as caught,
    ):
        tokens(client)
    assert asked["predict"] == 1 and caught.value.code == code


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_too_large_is_not_sent_again(quick, light, scheme):
    """In gRPC's own words, over HTTP by the status."""
    said = "Received message larger than max (22 vs. 11)"
    server, asked = failing(scheme, 99, "RESOURCE_EXHAUSTED", 413, said)
    message = rf"RESOURCE_EXHAUSTED: {re.escape(said)}. The message is too large .* --max_body"
    with (
        server as address,
        Client(f"{scheme}://{address}", light) as client,
        pytest.raises(ServerError, match=message),
    ):
        tokens(client)
    assert asked["predict"] == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nobody_there(quick, light, scheme):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{scheme}://127.0.0.1:{free.getsockname()[1]}"
    with (
        Client(address, light, retries=1) as client,
        pytest.raises(ServerError, match="UNAVAILABLE after 2 attempts"),
    ):
        tokens(client)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_deadlines(light, scheme):
    release = threading.Event()
    wait = {
        "grpc": lambda context: release.wait(10) and None,
        "http": lambda handler, body: release.wait(10) and None,
    }
    make = {"grpc": grpc_server, "http": http_server}[scheme]
    with make(served_models()[1], wait[scheme]) as address:
        start = time.monotonic()
        with Client(f"{scheme}://{address}", light, timeout=0.4) as client:
            with pytest.raises(ServerError, match=r"DEADLINE_EXCEEDED: .*larger `timeout`"):
                tokens(client)
            assert 0.3 < time.monotonic() - start < 2
        release.set()


def test_deadline_is_for_the_whole_answer(light):
    """A server that drips a byte now and then does not renew it."""

    def drip():
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n")
            try:
                for _ in range(50):
                    connection.sendall(b" ")
                    time.sleep(0.1)
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip)
        thread.start()
        start = time.monotonic()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            Client(address, light, timeout=0.5) as client,
            pytest.raises(ServerError, match="DEADLINE_EXCEEDED"),
        ):
            tokens(client)
        assert time.monotonic() - start < 2
        thread.join()


def test_a_connection_that_closes_with_its_answer(light, monkeypatch):
    """Python 3.13 closes it as soon as all is read."""
    read1 = http.client.HTTPResponse.read1

    def read_and_close(response, count):
        part = read1(response, count)
        if response.length == 0:
            response._close_conn()
        return part

    def answer():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
            )

    monkeypatch.setattr(http.client.HTTPResponse, "read1", read_and_close)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with Client(f"http://127.0.0.1:{listener.getsockname()[1]}", light) as client:
            transport, deadline = client._remote.transport, time.monotonic() + 20
            assert transport._exchange("GET", "m", None, deadline)[:2] == (200, b"{}")
        thread.join()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_token_and_headers_arrive(light, scheme):
    seen = []
    see = {
        "grpc": lambda context: seen.append(dict(context.invocation_metadata())),
        "http": lambda handler, body: seen.append(
            {key.lower(): value for key, value in handler.headers.items()}
        ),
    }
    make = {"grpc": grpc_server, "http": http_server}[scheme]
    with (
        make(served_models()[1], see[scheme]) as address,
        Client(f"{scheme}://{address}", light, token="abc", headers={"X-Who": "me"}) as client,
    ):
        tokens(client)
    for headers in seen:
        assert headers["authorization"] == "Bearer abc" and headers["x-who"] == "me"


def test_one_connection_for_all_calls(light):
    sockets = set()

    def see(handler, body):
        sockets.add(handler.client_address)

    with (
        http_server(served_models()[1], see) as address,
        Client(f"http://{address}", light) as client,
    ):
        for _ in range(3):
            tokens(client)
        assert len(sockets) == 1
        client._remote.transport._local.connection.sock.shutdown(socket.SHUT_RDWR)
        tokens(client)  # a connection that was closed meanwhile is opened again
        assert len(sockets) == 2


def test_large_messages(light):
    """gRPC's own limit is 4 MB."""

    def echo(request):
        response = predict_pb2.PredictResponse()
        response.outputs["x"].CopyFrom(request.inputs["x"])
        return response

    large = np.random.default_rng(0).standard_normal((3, 1 << 20)).astype("float32")
    with (
        grpc_server(SimpleNamespace(predict=echo)) as address,
        Client(f"grpc://{address}", light) as client,
    ):
        answer = client._remote.transport.predict("m", 1, "s", {"x": large}, 60.0)
    np.testing.assert_array_equal(answer["x"], large)

    outputs = {"s": {"outputs": {"x": {"dtype": "DT_FLOAT"}}}}
    metadata = {"metadata": {"signature_def": {"signature_def": outputs}}}

    def answer_http(handler, body):
        given = (
            metadata if handler.command == "GET" else {"outputs": json.loads(body)["inputs"]["x"]}
        )
        return 200, json.dumps(given)

    large = large[:, : 1 << 17]
    with (
        http_server(None, answer_http) as address,
        Client(f"http://{address}", light) as client,
    ):
        answer = client._remote.transport.predict("m", 1, "s", {"x": large}, 60.0)
    np.testing.assert_array_equal(answer["x"], large)


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("hello", 200, "UNKNOWN: the answer is no JSON object"),
        ("{}", 200, "UNKNOWN: an answer unlike TensorFlow Serving's: KeyError"),
        ("<html>", 502, "UNKNOWN: HTTP status 502"),
        ("<html>", 404, "NOT_FOUND: HTTP status 404"),
    ],
)
def test_something_else_answers(light, text, status, message):
    with (
        http_server(None, lambda handler, body: (status, text)) as address,
        Client(f"http://{address}/prefix", light) as client,
        pytest.raises(ServerError, match=message),
    ):
        tokens(client)


def test_tls(light, tmp_path, quick):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        + ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        + ["-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    models = served_models()[1]
    pair = [(key.read_bytes(), certificate.read_bytes())]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with (
        grpc_server(models, credentials=grpc.ssl_server_credentials(pair)) as first,
        http_server(models, tls=context) as second,
    ):
        for address, code in ((f"grpcs://{first}", "UNAVAILABLE"), (f"https://{second}", "UNAUTH")):
            with Client(address, light, ca_file=certificate, token="abc") as client:
                assert tokens(client).shape == (2, 77, 64)
            with (
                Client(address, light, retries=0) as client,
                pytest.raises(ServerError, match=code),
            ):
                tokens(client)


def test_wrong_arguments(light, tmp_path):
    for server in ("127.0.0.1:8500", "grpc://127.0.0.1", "ftp://a:1", "http://", "grpc://a:b"):
        with pytest.raises(ValueError, match=r"A server is given as grpc://host:port"):
            Client(server, light)
    for options, message in (
        ({"version": 1, "label": "x"}, "Give version or label, not both. Received: 1, 'x'"),
        ({"timeout": 0}, "timeout is above 0, retries at least 0. Received: 0, 5"),
        ({"retries": -1}, "Received: 600.0, -1"),
    ):
        with pytest.raises(ValueError, match=message):
            Client("http://a:1", light, **options)
    with pytest.raises(ValueError, match="A gRPC server is given without a path"):
        Client("grpc://a:1/b", light)
    with pytest.raises(ExportError, match="is not an export"):
        Client("http://a:1", tmp_path)
