"""One attempt of a call to a server that speaks TensorFlow Serving's API, over gRPC or REST.

gRPC's protos import TensorFlow; REST needs only NumPy and the standard library.
"""

import base64
import email.utils
import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import SplitResult, quote, urlsplit

import numpy as np

UNAVAILABLE, DEADLINE_EXCEEDED = "UNAVAILABLE", "DEADLINE_EXCEEDED"
BUSY = 429  # HTTP's status
TOO_LARGE = "message larger than max"  # in gRPC's own words
CODE_OF_STATUS = {  # HTTP's status → gRPC's code, the inverse of the server's mapping
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
DTYPES = {"DT_FLOAT": "float32", "DT_UINT8": "uint8", "DT_INT32": "int32"}
CHUNK = 1 << 20


class AttemptError(Exception):
    """One attempt that failed; `client.ServerRunner` decides whether to try again.

    `is_busy` says that the server has no room at the moment, `retry_after` after how many seconds
    it asks to come back. Without it, `RESOURCE_EXHAUSTED` says that the message is too large.
    """

    def __init__(
        self, code: str, message: str, is_busy: bool = False, retry_after: float | None = None
    ):
        super().__init__(message)
        self.code, self.message = code, message
        self.is_busy, self.retry_after = is_busy, retry_after


class Grpc:
    def __init__(self, url: SplitResult, headers, ca_file):
        import grpc
        from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc

        if url.path.strip("/"):
            raise ValueError(f"A gRPC server is given without a path. Received: {url.geturl()}")
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        if url.scheme == "grpcs":
            roots = Path(ca_file).read_bytes() if ca_file is not None else None
            credentials = grpc.ssl_channel_credentials(roots)
            self._channel = grpc.secure_channel(url.netloc, credentials, options)
        else:
            self._channel = grpc.insecure_channel(url.netloc, options)
        self._stub = prediction_service_pb2_grpc.PredictionServiceStub(self._channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)
        self._metadata = tuple(headers.items())

    def versions(self, model: str, timeout: float) -> list[int]:
        """Return the versions of a model that can be called, the latest first."""
        from tensorflow_serving.apis import get_model_status_pb2

        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = model
        answer = self._send(self._models.GetModelStatus, request, timeout)
        states = get_model_status_pb2.ModelVersionStatus
        return [v.version for v in answer.model_version_status if v.state == states.AVAILABLE]

    def named(self, model: str, label: str, timeout: float) -> int:
        """Return the version of a model that has this label."""
        from tensorflow_serving.apis import get_model_metadata_pb2

        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name, request.model_spec.version_label = model, label
        return self._send(self._stub.GetModelMetadata, request, timeout).model_spec.version.value

    def predict(self, model, version: int, signature, inputs, timeout: float):
        import tensorflow as tf
        from tensorflow_serving.apis import predict_pb2

        request = predict_pb2.PredictRequest()
        request.model_spec.name, request.model_spec.signature_name = model, signature
        request.model_spec.version.value = version
        for name, array in inputs.items():
            if array.size > 1 and not any(array.strides):  # one value, seen as an array of it
                value = tf.make_tensor_proto(array.flat[0], shape=array.shape)
            else:
                value = tf.make_tensor_proto(array)  # arrays as tensor_content
            request.inputs[name].CopyFrom(value)
        response = self._send(self._stub.Predict, request, timeout)
        return {name: tf.make_ndarray(proto) for name, proto in response.outputs.items()}

    def _send(self, method: Callable, request, timeout: float):
        import grpc

        try:
            return method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            is_exhausted = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            message = error.details() or ""
            is_busy = is_exhausted and TOO_LARGE not in message
            raise AttemptError(error.code().name, message, is_busy) from error

    def close(self) -> None:
        self._channel.close()


class Rest:
    """Calls in column format, over one connection for each thread, kept between calls."""

    def __init__(self, url: SplitResult, headers, ca_file):
        self._url = url
        self._headers = {"content-type": "application/json", **headers}
        self._tls = None
        if url.scheme == "https":
            self._tls = ssl.create_default_context(cafile=ca_file and str(ca_file))
        self._signatures = {}  # (model, version) → signatures: a response names no types
        self._local = threading.local()  # `connection`: of the thread
        self._open: set[http.client.HTTPConnection] = set()  # of all threads
        self._lock = threading.Lock()

    def versions(self, model: str, timeout: float) -> list[int]:
        """Return the versions of a model that can be called, the latest first."""
        answer = self._send("GET", model, None, time.monotonic() + timeout)
        with _understood():
            known = answer["model_version_status"]
            return [int(one["version"]) for one in known if one["state"] == "AVAILABLE"]

    def named(self, model: str, label: str, timeout: float) -> int:
        """Return the version of a model that has this label."""
        place = f"{model}/labels/{quote(label, safe='')}/metadata"
        answer = self._send("GET", place, None, time.monotonic() + timeout)
        with _understood():
            return int(answer["model_spec"]["version"])

    def predict(self, model, version: int, signature, inputs, timeout: float):
        deadline = time.monotonic() + timeout
        place = f"{model}/versions/{version}"
        if (model, version) not in self._signatures:
            found = self._send("GET", f"{place}/metadata", None, deadline)
            with _understood():
                known = found["metadata"]["signature_def"]["signature_def"]
            self._signatures[model, version] = known
        signatures = self._signatures[model, version]
        values = {name: array.tolist() for name, array in inputs.items()}
        body = {"signature_name": signature, "inputs": values}
        if signature not in signatures:
            raise AttemptError("FAILED_PRECONDITION", f"it has no signature {signature!r}")
        answer = self._send("POST", f"{place}:predict", body, deadline)
        with _understood():
            outputs, known = answer["outputs"], signatures[signature]["outputs"]
            if len(known) == 1:  # a single one comes without its name
                outputs = dict.fromkeys(known, outputs)
            return {name: _array(outputs[name], info["dtype"]) for name, info in known.items()}

    def _send(self, method: str, path: str, body, deadline: float) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            status, content, retry_after = self._exchange(method, path, data, deadline)
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
        raise AttemptError(
            code, said or f"HTTP status {status}", status == BUSY, _seconds(retry_after)
        )

    def _exchange(self, method, path, data, deadline) -> tuple[int, bytes, str | None]:
        """Send a request over the thread's connection, which stays open for the next one.

        Return the answer's status, its body and its header `Retry-After`.
        """
        connection = getattr(self._local, "connection", None)
        if connection is None or connection.sock is None:
            self._drop()
            connection = self._local.connection = self._connect(_left(deadline))
        connection.sock.settimeout(_left(deadline))
        place = f"{self._url.path.rstrip('/')}/v1/models/{path}"
        connection.request(method, place, data, self._headers)
        sock = connection.sock
        response = connection.getresponse()
        parts = []
        while not response.isclosed():
            sock.settimeout(_left(deadline))  # limits the whole answer, however slowly it comes
            part = response.read1(CHUNK)
            if not part:
                break
            parts.append(part)
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        response.close()  # frees the connection for the next request
        return response.status, b"".join(parts), response.getheader("retry-after")

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self._url.hostname, self._url.port
        if self._tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        connection.connect()
        with self._lock:
            self._open.add(connection)
        return connection

    def _drop(self) -> None:
        """Close the thread's connection."""
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None
            with self._lock:
                self._open.discard(connection)

    def close(self) -> None:
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open.clear()


TRANSPORTS: dict[str, Callable] = {"grpc": Grpc, "grpcs": Grpc, "http": Rest, "https": Rest}


def _array(value: Any, dtype: str) -> np.ndarray:
    """Return a JSON value as an array; files come in base64."""
    if dtype == "DT_STRING":
        return np.array([base64.b64decode(one["b64"]) for one in value], object)
    return np.array(value, DTYPES[dtype])


@contextmanager
def _understood():
    """Report JSON that does not have TensorFlow Serving's form as the server's failure."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"an answer unlike TensorFlow Serving's: {error!r}"
        raise AttemptError("UNKNOWN", message) from error


def _seconds(retry_after: str | None) -> float | None:
    """Read `Retry-After`, a whole number of seconds or a date; None where it is neither."""
    text = (retry_after or "").strip()
    if text.isdecimal():
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, moment.timestamp() - time.time())


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def split(server: str) -> SplitResult:
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
