"""Plain servers around `sd_tf.serving.tf_serving.predict`, for tests: gRPC and HTTP."""

import functools
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
from tensorflow_serving.apis import (
    model_service_pb2_grpc,
    prediction_service_pb2_grpc,
)

from sd_tf.runtime.manifest import Manifest
from sd_tf.serving.tf_serving.predict import ModelError, ModelServer, load
from sd_tf.serving.tf_serving.rest import rest
from tests.exports import once, shared_export

SCHEMES = ("grpc", "http")
CODES = {code.value[0]: code for code in grpc.StatusCode}
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@functools.cache
def served_models() -> tuple[Path, ModelServer]:
    """The shared export and its models, once for the process."""
    models = load(shared_export(), Manifest.read(shared_export()).components)
    return shared_export(), ModelServer(
        {name: {1: servable} for name, servable in models.items()}, labels={"stable": 1}
    )


@once
def light_export(folder):
    """What a client needs of the shared export: no models."""
    folder.mkdir()
    shutil.copy(shared_export() / "pipeline.json", folder)
    shutil.copytree(shared_export() / "tokenizer", folder / "tokenizer")


class Predictions(prediction_service_pb2_grpc.PredictionServiceServicer):
    """`before(context)` sees every request first, and may abort it."""

    def __init__(self, models: ModelServer, before=lambda context: None):
        self.models, self.before = models, before

    def Predict(self, request, context):  # noqa: N802
        self.before(context)
        return answered(self.models.predict, request, context)

    def GetModelMetadata(self, request, context):  # noqa: N802
        return answered(self.models.metadata, request, context)


class Models(model_service_pb2_grpc.ModelServiceServicer):
    def __init__(self, models: ModelServer):
        self.models = models

    def GetModelStatus(self, request, context):  # noqa: N802
        return answered(self.models.status, request, context)


def answered(method, request, context):
    try:
        return method(request)
    except ModelError as error:
        return context.abort(CODES[error.code], error.message)


@contextmanager
def grpc_server(models: ModelServer, before=lambda context: None, credentials=None):
    """Yields host:port."""
    server = grpc.server(ThreadPoolExecutor(4), options=UNLIMITED)
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
        Predictions(models, before), server
    )
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(Models(models), server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextmanager
def http_server(models: ModelServer | None, before=lambda handler, body: None, tls=None):
    """Yields host:port. `before(handler, body)` may answer itself.

    It returns (status, text), or (status, text, headers).
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def answer(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            given = before(self, body)
            if given is None:
                given = rest(models, self.command, self.path, body)
            status, text, *more = given
            content = text.encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = answer  # noqa: N815

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
