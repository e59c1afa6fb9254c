"""TensorFlow Serving's REST API on `ModelServer`; see `http_rest_api_util.cc` in its source."""

import json
import re
from typing import Any
from urllib.parse import unquote

import tensorflow as tf
from google.protobuf import json_format
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_pb2,
    predict_pb2,
)

from sd_tf.serving.tf_serving.json_tensors import (
    as_columns,
    as_rows,
    from_columns,
    from_rows,
    shown,
)
from sd_tf.serving.tf_serving.predict import (
    DEFAULT_SIGNATURE,
    SIGNATURE_DEF,
    ModelError,
    ModelServer,
    invalid,
)

_MODEL = r"/v1/models/([^/:]+)(?:/versions/(\d+)|/labels/([^/:]+))?"
LONGEST_VERSION = 19  # digits of the largest one, 2⁶³ − 1
MORE_COMMAS = 100_000  # of a body, beside those between elements: in texts, for example
_POST = re.compile(_MODEL + ":(classify|regress|predict)", re.IGNORECASE | re.ASCII)
_GET = re.compile(_MODEL + "(?:/(metadata))?", re.IGNORECASE | re.ASCII)

HTTP_STATUS = {
    tf.errors.CANCELLED: 499,
    tf.errors.INVALID_ARGUMENT: 400,
    tf.errors.DEADLINE_EXCEEDED: 504,
    tf.errors.NOT_FOUND: 404,
    tf.errors.ALREADY_EXISTS: 409,
    tf.errors.PERMISSION_DENIED: 403,
    tf.errors.RESOURCE_EXHAUSTED: 429,
    tf.errors.FAILED_PRECONDITION: 400,
    tf.errors.ABORTED: 409,
    tf.errors.OUT_OF_RANGE: 400,
    tf.errors.UNIMPLEMENTED: 501,
    tf.errors.UNAVAILABLE: 503,
    tf.errors.UNAUTHENTICATED: 401,
}  # anything else: 500


def rest(server: ModelServer, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
    """Answer a request as TensorFlow Serving would: return the status code and the JSON text."""
    try:
        return 200, json.dumps(_answer(server, method, path.partition("?")[0], body))
    except RecursionError:
        return 400, json.dumps({"error": "JSON Parse error: nested too deeply"})
    except ModelError as error:
        return HTTP_STATUS.get(error.code, 500), json.dumps({"error": error.message})


def _answer(server: ModelServer, method: str, path: str, body: bytes) -> dict[str, Any]:
    pattern = {"POST": _POST, "GET": _GET}.get(method)
    match = pattern.fullmatch(path) if pattern is not None else None
    if match is None:
        raise invalid(f"Malformed request: {method} {path}")
    name, version, label, verb = match.groups()
    spec = model_pb2.ModelSpec(name=unquote(name))
    if version is not None:
        if len(version) > LONGEST_VERSION or int(version) >= 2**63:
            raise invalid(f"Failed to convert version: {version} to numeric.")
        spec.version.value = int(version)
    elif label is not None:
        spec.version_label = unquote(label)
    if method == "GET":
        return _metadata(server, spec) if verb else _status(server, spec)
    if verb.lower() != "predict":
        raise invalid(
            f"Expected {verb.lower()} signature method_name to be tensorflow/serving/"
            f"{verb.lower()}. Was: tensorflow/serving/predict"
        )
    return _predict(server, spec, body)


def _status(server: ModelServer, spec: model_pb2.ModelSpec) -> dict[str, Any]:
    request = get_model_status_pb2.GetModelStatusRequest(model_spec=spec)
    return _plain(server.status(request))


def _metadata(server: ModelServer, spec: model_pb2.ModelSpec) -> dict[str, Any]:
    request = get_model_metadata_pb2.GetModelMetadataRequest(
        model_spec=spec, metadata_field=[SIGNATURE_DEF]
    )
    response = server.metadata(request)
    signatures = get_model_metadata_pb2.SignatureDefMap()
    response.metadata[SIGNATURE_DEF].Unpack(signatures)
    metadata = {SIGNATURE_DEF: _plain(signatures)}
    return {"model_spec": _plain(response.model_spec), "metadata": metadata}


def _plain(message) -> dict[str, Any]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _predict(server: ModelServer, spec: model_pb2.ModelSpec, body: bytes) -> dict[str, Any]:
    _, servable = server.find(spec)
    # A comma for each element, and in `instances` at most as many between a row's inputs.
    most = 2 * servable.most_elements() + MORE_COMMAS
    if body.count(b",") > most:
        raise invalid(f"The body has more than {most} commas")
    content = _parse(body)
    name = content.get("signature_name", "")
    if not isinstance(name, str):
        raise invalid(
            f"JSON Value: {shown(content)} not formatted correctly. 'signature_name' key must "
            f"be a string value."
        )
    name = name or DEFAULT_SIGNATURE
    signature = servable.signature(name)
    if signature is None:
        raise invalid(f'Serving signature name: "{name}" not found in signature def')
    if "instances" in content and "inputs" in content:
        raise invalid(
            f"JSON Value: {shown(content)} Not formatted correctly expecting only one of "
            f"'inputs' or 'instances' keys to exist "
        )
    rows = "instances" in content
    if rows:
        shapes = servable.input_shapes(name)
        most_rows = max((shape[0] for shape in shapes if shape), default=1)
        arrays = from_rows(content, signature.inputs, most_rows)
    elif "inputs" in content:
        arrays = from_columns(content["inputs"], signature.inputs)
    else:
        raise invalid("Missing 'inputs' or 'instances' key")
    spec.signature_name = name
    request = predict_pb2.PredictRequest(model_spec=spec)
    for alias, array in arrays.items():
        value = tf.make_tensor_proto(array)
        request.inputs[alias].CopyFrom(value)
    response = server.predict(request)
    outputs = {alias: tf.make_ndarray(proto) for alias, proto in sorted(response.outputs.items())}
    return {"predictions": as_rows(outputs)} if rows else {"outputs": as_columns(outputs)}


def _parse(body: bytes) -> dict[str, Any]:
    if not body:
        raise invalid("JSON Parse error: The document is empty")
    try:
        content = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise invalid(f"JSON Parse error: {error}") from error
    if not isinstance(content, dict):
        raise invalid(f"JSON Value: {shown(content)} Is not object")
    return content
