"""A pipeline whose models run behind a server that speaks TensorFlow Serving's API.

Over gRPC or REST, against TensorFlow Serving itself or whatever else answers like it. The export's
`pipeline.json` and tokenizer have to be here, its models do not. gRPC's protos bring TensorFlow
along; REST needs only NumPy and the standard library.
"""

import http.client
import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import SplitResult, quote, urlsplit

import numpy as np

from sd_tf.chain import Chain, Stages, open_export
from sd_tf.manifest import Manifest

DEFAULT_TIMEOUT = 600.0  # seconds of one model call: the first one may compile
DEFAULT_RETRIES = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds, before random shortening

UNAVAILABLE, DEADLINE_EXCEEDED = "UNAVAILABLE", "DEADLINE_EXCEEDED"
CODE_OF_STATUS = {  # HTTP's status → gRPC's code, backwards from what the server does
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: UNAVAILABLE,
    504: DEADLINE_EXCEEDED,
}
MEND = {
    UNAVAILABLE: "Is the server running there, and has it loaded the model?",
    DEADLINE_EXCEEDED: "Give a larger timeout=...; a model's first call may compile it. "
    "TensorFlow Serving's REST API has a limit of its own, --rest_api_timeout_in_ms.",
    "NOT_FOUND": "The server has to serve each component under its name, in that version.",
    "INVALID_ARGUMENT": "Does the server serve the export whose pipeline.json is used here?",
    "FAILED_PRECONDITION": "Does the server serve the export whose pipeline.json is used here?",
    "UNAUTHENTICATED": "Give token=..., or ca_file=... for a certificate of your own authority.",
    "PERMISSION_DENIED": "Give token=..., or check the one given.",
    "RESOURCE_EXHAUSTED": "The server is overloaded, or it limits the size of messages.",
}
OTHERWISE = (
    "The server's log knows more. Where XLA is switched off in the server, give jit_compile=False."
)
DTYPES = {"DT_FLOAT": "float32", "DT_UINT8": "uint8", "DT_INT32": "int32"}
CHUNK = 1 << 20


class ServerError(RuntimeError):
    """What a server answered in place of a result: gRPC's code, its message, which model."""

    def __init__(self, code: str, message: str, model: str, server: str, attempts: int = 1):
        self.code, self.message, self.model, self.server = code, message, model, server
        tried = f" after {attempts} attempts" if attempts > 1 else ""
        mend = MEND.get(code, OTHERWISE)
        super().__init__(f"{model} at {server}: {code}{tried}: {message}. {mend}")


class AttemptError(Exception):
    """One failed attempt; `Remote` decides whether there is another."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code, self.message = code, message


class Client(Chain):
    """Called like a `Pipeline`, with the same result."""

    def __init__(
        self,
        server: str,
        export_dir: str | Path,
        *,
        jit_compile: bool = True,
        version: int | None = None,
        label: str | None = None,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        ca_file: str | Path | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
    ):
        """Nothing is sent before the first call.

        Args:
            server: grpc://host:port, grpcs://…, http://… or https://…, the last two perhaps with
                a path in front of TensorFlow Serving's /v1/models.
            export_dir: the export that is served, or a copy of its pipeline.json and tokenizer.
            jit_compile: call the signatures that XLA compiles; else their plain twins.
            version, label: of the models; None: the server's latest.
            token: sent as `authorization: Bearer …`. In clear over grpc:// and http://.
            headers: sent with every call (gRPC: metadata).
            ca_file: PEM file of who signed the server's certificate; None: the system's.
            timeout: seconds for one model call, repeated attempts included.
            retries: further attempts when the server is unavailable, and only then.
        """
        start = time.perf_counter()
        if version is not None and label is not None:
            raise ValueError(f"A version or a label. Received: {version!r} and {label!r}")
        if not timeout > 0 or retries < 0:
            raise ValueError(
                f"timeout is above 0, retries at least 0. Received: {timeout!r}, {retries!r}"
            )
        manifest, tokenizers = open_export(Path(export_dir))
        url = _split(server)
        sent = {key.lower(): value for key, value in (headers or {}).items()}
        if token is not None:
            sent["authorization"] = f"Bearer {token}"
        transport = TRANSPORTS[url.scheme](url, sent, ca_file, version, label)
        self._remote = Remote(manifest, jit_compile, transport, server, timeout, retries)
        super().__init__(manifest, [self._remote], tokenizers, time.perf_counter() - start)

    def close(self) -> None:
        self._remote.transport.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Remote(Stages):
    """The models behind a server."""

    def __init__(self, manifest: Manifest, jit_compile, transport, server, timeout, retries):
        super().__init__(manifest, jit_compile)
        self.transport = transport
        self.server, self.timeout, self.retries = server, timeout, retries

    def call(self, component: str, endpoint: str, **inputs) -> dict[str, np.ndarray]:
        signature = self.signature(component, endpoint)
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        deadline = time.monotonic() + self.timeout
        for attempt in range(self.retries + 1):
            left = deadline - time.monotonic()
            try:
                return self.transport.predict(component, signature, arrays, left)
            except AttemptError as error:
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * random.uniform(0.5, 1.0)
                last = attempt == self.retries or time.monotonic() + pause >= deadline
                if error.code != UNAVAILABLE or last:
                    raise ServerError(
                        error.code, error.message, component, self.server, attempt + 1
                    ) from error
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


class Grpc:
    def __init__(self, url: SplitResult, headers, ca_file, version, label):
        import grpc
        from tensorflow_serving.apis import prediction_service_pb2_grpc

        if url.path.strip("/"):
            raise ValueError(f"gRPC has no path. Received: {url.geturl()}")
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        if url.scheme == "grpcs":
            roots = Path(ca_file).read_bytes() if ca_file is not None else None
            credentials = grpc.ssl_channel_credentials(roots)
            self._channel = grpc.secure_channel(url.netloc, credentials, options)
        else:
            self._channel = grpc.insecure_channel(url.netloc, options)
        self._stub = prediction_service_pb2_grpc.PredictionServiceStub(self._channel)
        self._metadata = tuple(headers.items())
        self._version, self._label = version, label

    def predict(self, model, signature, inputs, timeout: float) -> dict[str, np.ndarray]:
        import grpc
        import tensorflow as tf
        from tensorflow_serving.apis import predict_pb2

        request = predict_pb2.PredictRequest()
        request.model_spec.name, request.model_spec.signature_name = model, signature
        if self._version is not None:
            request.model_spec.version.value = self._version
        elif self._label is not None:
            request.model_spec.version_label = self._label
        for name, array in inputs.items():
            value = tf.make_tensor_proto(array)  # arrays as tensor_content
            request.inputs[name].CopyFrom(value)
        try:
            response = self._stub.Predict(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise AttemptError(error.code().name, error.details()) from error
        return {name: tf.make_ndarray(proto) for name, proto in response.outputs.items()}

    def close(self) -> None:
        self._channel.close()


class Rest:
    """Column format; one kept connection for each thread."""

    def __init__(self, url: SplitResult, headers, ca_file, version, label):
        self._url = url
        self._headers = {"content-type": "application/json", **headers}
        self._tls = None
        if url.scheme == "https":
            self._tls = ssl.create_default_context(cafile=ca_file and str(ca_file))
        self._suffix = f"/versions/{version}" if version is not None else ""
        if label is not None:
            self._suffix = f"/labels/{quote(label, safe='')}"
        self._signatures = {}  # model → its signatures: a response names no types
        self._local = threading.local()

    def predict(self, model, signature, inputs, timeout: float) -> dict[str, np.ndarray]:
        deadline = time.monotonic() + timeout
        if model not in self._signatures:
            found = self._send("GET", f"{model}{self._suffix}/metadata", None, deadline)
            with _understood():
                self._signatures[model] = found["metadata"]["signature_def"]["signature_def"]
        values = {name: array.tolist() for name, array in inputs.items()}
        body = {"signature_name": signature, "inputs": values}
        answer = self._send("POST", f"{model}{self._suffix}:predict", body, deadline)
        if signature not in self._signatures[model]:
            raise AttemptError("FAILED_PRECONDITION", f"it has no signature {signature!r}")
        with _understood():
            outputs, known = answer["outputs"], self._signatures[model][signature]["outputs"]
            if len(known) == 1:  # a single one comes without its name
                outputs = dict.fromkeys(known, outputs)
            return {
                name: np.array(outputs[name], DTYPES[info["dtype"]]) for name, info in known.items()
            }

    def _send(self, method: str, path: str, body, deadline: float) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            status, content = self._exchange(method, path, data, deadline)
        except TimeoutError as error:
            self._drop()
            raise AttemptError(DEADLINE_EXCEEDED, "no answer in time") from error
        except ssl.SSLError as error:
            self._drop()
            raise AttemptError(
                "UNAUTHENTICATED", f"the connection is not trusted: {error}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            raise AttemptError(UNAVAILABLE, f"{type(error).__name__}: {error}") from error
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if status == 200:
            if not isinstance(answer, dict):
                raise AttemptError("UNKNOWN", "the answer is no JSON object")
            return answer
        said = answer.get("error") if isinstance(answer, dict) else None
        code = CODE_OF_STATUS.get(status, "UNKNOWN")
        raise AttemptError(code, said or f"HTTP status {status}")

    def _exchange(self, method, path, data, deadline) -> tuple[int, bytes]:
        """One request over the thread's connection, which is kept for the next one."""
        connection = getattr(self._local, "connection", None)
        if connection is None or connection.sock is None:
            connection = self._local.connection = self._connect(_left(deadline))
        connection.sock.settimeout(_left(deadline))
        place = f"{self._url.path.rstrip('/')}/v1/models/{path}"
        connection.request(method, place, data, self._headers)
        sock = connection.sock
        response = connection.getresponse()
        parts = []
        while True:
            sock.settimeout(_left(deadline))  # for the whole answer, however slowly it drips
            part = response.read1(CHUNK)
            if not part:
                break
            parts.append(part)
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        response.close()  # frees the connection for the next request
        return response.status, b"".join(parts)

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self._url.hostname, self._url.port
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        connection.connect()
        return connection

    def _drop(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None

    close = _drop


TRANSPORTS: dict[str, Callable] = {"grpc": Grpc, "grpcs": Grpc, "http": Rest, "https": Rest}


@contextmanager
def _understood():
    """An answer that is JSON but not TensorFlow Serving's is the server's failure."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"an answer unlike TensorFlow Serving's: {error!r}"
        raise AttemptError("UNKNOWN", message) from error


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _split(server: str) -> SplitResult:
    def refuse() -> NoReturn:
        raise ValueError(
            f"A server is given as grpc://host:port, grpcs://…, http://… or https://…. "
            f"Received: {server!r}"
        )

    try:
        url = urlsplit(server)
        needs_port = url.scheme.startswith("grpc")
        named = url.hostname and (url.port or not needs_port) and "@" not in url.netloc
    except ValueError:
        refuse()
    if url.scheme not in TRANSPORTS or not named or url.query or url.fragment:
        refuse()
    return url
