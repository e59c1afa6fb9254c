"""TensorFlow Serving's API over an export's SavedModels, whatever carries the requests.

Requests and responses are the server's own protos, or JSON (`rest`). Checks, their order, codes
and messages follow the server's source (`predict_util.cc`, `server_core.cc`,
`get_model_status_impl.cc`, `get_model_metadata_impl.cc`, `http_rest_api_util.cc`,
`json_tensor.cc`), so that its clients see no difference.
Stricter in one place: shapes are compared with the signature before anything runs, where the
server leaves that to whichever operation stumbles first. Outputs come as `tensor_content`, as with
the server's --enable_serialization_as_tensor_content.
"""

import base64
import binascii
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow.core.framework import tensor_pb2, types_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_pb2,
    predict_pb2,
)

from sd_tf.manifest import VERSION_FOLDER, ExportError, Manifest
from sd_tf.saved_model import SavedModel, message_of

DEFAULT_SIGNATURE = "serving_default"
SIGNATURE_DEF = "signature_def"  # the only metadata field that there is

_MODEL = r"/v1/models/([^/:]+)(?:/versions/(\d+)|/labels/([^/:]+))?"
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

JSON_TYPES = {
    type(None): "Null",
    bool: "Bool",
    dict: "Object",
    list: "Array",
    str: "String",
    int: "Number",
    float: "Number",
}
SHOWN = 200  # characters of a value in an error


class ModelError(Exception):
    """A request that cannot be answered: gRPC's code (a number, as in `tf.errors`) and why."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code, self.message = code, message


def invalid(message: str) -> ModelError:
    return ModelError(tf.errors.INVALID_ARGUMENT, message)


class Servable:
    """One loaded SavedModel and what its file says about its signatures."""

    def __init__(self, folder: Path, name: str):
        # What XLA compiles is nearly all that is asked of the others.
        self._loaded = SavedModel(folder, name, optimize=name == "text_encoder")

    @property
    def signature_defs(self) -> dict[str, meta_graph_pb2.SignatureDef]:
        return self._loaded.signatures

    def signature(self, name: str) -> meta_graph_pb2.SignatureDef | None:
        return self.signature_defs[name] if self._loaded.runs(name) else None

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        try:
            return self._loaded.run(signature, inputs)
        except tf.errors.OpError as error:
            raise ModelError(error.error_code, message_of(error)) from error


class ModelServer:
    """{model: {version: Servable}}; a model for each component of an export."""

    def __init__(
        self,
        export_dir: str | Path,
        components: Iterable[str] | None = None,
        labels: Mapping[str, int] | None = None,
    ):
        """`components`: those to load, None: all; `labels`: names of versions, of every model."""
        folder = Path(export_dir)
        manifest = Manifest.read(folder)
        manifest.check_files(folder)
        names = list(manifest.components if components is None else components)
        if unknown := [name for name in names if name not in manifest.components]:
            raise ExportError(
                f"{folder} holds no {', '.join(unknown)}. It holds "
                f"{', '.join(manifest.components)}."
            )
        self.batch_size = manifest.batch_size
        self.labels = dict(labels or {})
        version = int(VERSION_FOLDER)
        self.models = {name: {version: Servable(folder, name)} for name in names}

    def predict(self, request: predict_pb2.PredictRequest) -> predict_pb2.PredictResponse:
        spec = _spec(request)
        version, servable = self.find(spec)
        name = spec.signature_name or DEFAULT_SIGNATURE
        signature = servable.signature(name)
        if signature is None:
            raise ModelError(
                tf.errors.FAILED_PRECONDITION, f'Serving signature key "{name}" not found.'
            )
        inputs = self._inputs(signature, request.inputs)
        wanted = _outputs(signature, request.output_filter)
        outputs = servable.run(name, inputs)
        response = predict_pb2.PredictResponse()
        response.model_spec.CopyFrom(_answered(spec.name, version, name))
        for alias in wanted:
            value = tf.make_tensor_proto(outputs[alias])
            response.outputs[alias].CopyFrom(value)
        return response

    def metadata(
        self, request: get_model_metadata_pb2.GetModelMetadataRequest
    ) -> get_model_metadata_pb2.GetModelMetadataResponse:
        spec = _spec(request)
        if not request.metadata_field:
            raise invalid("GetModelMetadataRequest must specify at least one metadata_field")
        for name in request.metadata_field:
            if name != SIGNATURE_DEF:
                raise invalid(f"Metadata field {name} is not supported")
        version, servable = self.find(spec)
        signatures = get_model_metadata_pb2.SignatureDefMap()
        for name, signature in servable.signature_defs.items():
            signatures.signature_def[name].CopyFrom(signature)
        response = get_model_metadata_pb2.GetModelMetadataResponse()
        response.model_spec.CopyFrom(_answered(spec.name, version))
        response.metadata[SIGNATURE_DEF].Pack(signatures)
        return response

    def status(
        self, request: get_model_status_pb2.GetModelStatusRequest
    ) -> get_model_status_pb2.GetModelStatusResponse:
        """Of the version asked for, or of all; a label is not looked at, as in the server."""
        spec = _spec(request)
        versions = self.models.get(spec.name, {})
        if spec.HasField("version"):
            version = spec.version.value
            missing = f"Could not find version {version} of model {spec.name}"
            versions = [version] if version in versions else []
        else:
            missing = f"Could not find any versions of model {spec.name}"
        if not versions:
            raise ModelError(tf.errors.NOT_FOUND, missing)
        response = get_model_status_pb2.GetModelStatusResponse()
        for version in sorted(versions, reverse=True):
            entry = response.model_version_status.add(version=version)
            entry.state = get_model_status_pb2.ModelVersionStatus.AVAILABLE
            entry.status.SetInParent()  # OK
        return response

    def find(self, spec: model_pb2.ModelSpec) -> tuple[int, Servable]:
        if not spec.name:
            raise invalid("ModelSpec has no name specified.")
        choice = spec.WhichOneof("version_choice")
        version = spec.version.value if choice == "version" else None
        if choice == "version_label":
            if spec.version_label not in self.labels:
                raise invalid(f"Unrecognized servable version label: {spec.version_label}")
            version = self.labels[spec.version_label]
        versions = self.models.get(spec.name, {})
        asked = f"Latest({spec.name})" if version is None else f"Specific({spec.name}, {version})"
        if version is None and versions:
            version = max(versions)
        if version not in versions:
            raise ModelError(tf.errors.NOT_FOUND, f"Servable not found for request: {asked}")
        return version, versions[version]

    def _inputs(self, signature, given: Mapping[str, tensor_pb2.TensorProto]):
        names, known = sorted(given), sorted(signature.inputs)
        if len(names) != len(known):
            extra = [name for name in names if name not in known]
            missing = [name for name in known if name not in names]
            raise invalid(
                f"input size does not match signature: {len(names)}!={len(known)} "
                f"len({_set(names)}) != len({_set(known)}). Sent extra: {_set(extra)}. "
                f"Missing but required: {_set(missing)}."
            )
        for name in names:
            if name not in known:
                raise invalid(
                    f"input tensor alias not found in signature: {name}. "
                    f"Inputs expected to be in the set {_set(known)}."
                )
        return {
            name: self._tensor(index, name, signature.inputs[name], given[name])
            for index, name in enumerate(known)
        }

    def _tensor(self, index, name, info, proto: tensor_pb2.TensorProto) -> np.ndarray:
        """Checked before it is built: a few bytes can claim to be a tensor of any size."""
        dims = [dim.size for dim in proto.tensor_shape.dim]
        known = proto.dtype in types_pb2.DataType.values()
        if (
            not known
            or not proto.dtype
            or proto.tensor_shape.unknown_rank
            or min(dims, default=0) < 0
        ):
            raise invalid(f"tensor parsing error: {name}")
        if proto.dtype != info.dtype:
            raise invalid(
                f"Expects arg[{index}] to be {dtype_name(info.dtype)} but "
                f"{dtype_name(proto.dtype)} is provided"
            )
        expected = [dim.size for dim in info.tensor_shape.dim]
        free = (1, self.batch_size)  # what an export's free dimension may be
        fits = len(dims) == len(expected) and all(
            size == want or (want < 0 and size in free)
            for size, want in zip(dims, expected, strict=True)
        )
        if not fits:
            wanted = ",".join(
                str(size) if size >= 0 else "|".join(map(str, free)) for size in expected
            )
            raise invalid(
                f"Input {name} has the shape [{','.join(map(str, dims))}], its signature takes "
                f"[{wanted}]."
            )
        try:  # the server's own reading of a proto: content, values, or fewer values repeated
            return tf.io.parse_tensor(proto.SerializeToString(), tf.as_dtype(info.dtype)).numpy()
        except (tf.errors.OpError, TypeError) as error:
            raise invalid(f"tensor parsing error: {name}") from error


# ModelServer's methods and their messages.
REQUESTS = {
    "predict": predict_pb2.PredictRequest,
    "metadata": get_model_metadata_pb2.GetModelMetadataRequest,
    "status": get_model_status_pb2.GetModelStatusRequest,
}
RESPONSES = {
    "predict": predict_pb2.PredictResponse,
    "metadata": get_model_metadata_pb2.GetModelMetadataResponse,
    "status": get_model_status_pb2.GetModelStatusResponse,
}


def serialized(server: ModelServer, method: str, request: bytes) -> tuple[int, bytes | str]:
    """gRPC's code, and the serialized response or the message."""
    try:
        response = getattr(server, method)(REQUESTS[method].FromString(request))
    except ModelError as error:
        return error.code, error.message
    return 0, response.SerializeToString()


def dtype_name(dtype: int) -> str:
    """As the server writes it: float, int32, string."""
    return types_pb2.DataType.Name(dtype).removeprefix("DT_").lower()


def _spec(request) -> model_pb2.ModelSpec:
    if not request.HasField("model_spec"):
        raise invalid("Missing ModelSpec")
    return request.model_spec


def _answered(name: str, version: int, signature: str = "") -> model_pb2.ModelSpec:
    spec = model_pb2.ModelSpec(name=name, signature_name=signature)
    spec.version.value = version
    return spec


def _outputs(signature, wanted) -> list[str]:
    known = sorted(signature.outputs)
    for index, alias in enumerate(wanted):
        if alias not in known:
            raise invalid(
                f"output tensor alias not found in signature: {alias} "
                f"Outputs expected to be in the set {_set(known)}."
            )
        if alias in wanted[:index]:
            raise invalid(f"duplicate output tensor alias: {alias}")
    return list(wanted) or known


def _set(names: Iterable[str]) -> str:
    return "{" + ",".join(names) + "}"


# The REST API


def rest(server: ModelServer, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
    """The status code and the JSON text with which TensorFlow Serving would answer."""
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
        if int(version) >= 2**63:
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
    content = _parse(body)
    name = content.get("signature_name", "")
    if not isinstance(name, str):
        raise invalid(
            f"JSON Value: {_shown(content)} not formatted correctly. 'signature_name' key must "
            f"be a string value."
        )
    _, servable = server.find(spec)
    name = name or DEFAULT_SIGNATURE
    signature = servable.signature(name)
    if signature is None:
        raise invalid(f'Serving signature name: "{name}" not found in signature def')
    if "instances" in content and "inputs" in content:
        raise invalid(
            f"JSON Value: {_shown(content)} Not formatted correctly expecting only one of "
            f"'inputs' or 'instances' keys to exist "
        )
    rows = "instances" in content
    if rows:
        arrays = _from_rows(content, signature.inputs)
    elif "inputs" in content:
        arrays = _from_columns(content["inputs"], signature.inputs)
    else:
        raise invalid("Missing 'inputs' or 'instances' key")
    spec.signature_name = name
    request = predict_pb2.PredictRequest(model_spec=spec)
    for alias, array in arrays.items():
        value = tf.make_tensor_proto(array)
        request.inputs[alias].CopyFrom(value)
    response = server.predict(request)
    outputs = {alias: tf.make_ndarray(proto) for alias, proto in sorted(response.outputs.items())}
    return {"predictions": _as_rows(outputs)} if rows else {"outputs": _as_columns(outputs)}


def _parse(body: bytes) -> dict[str, Any]:
    if not body:
        raise invalid("JSON Parse error: The document is empty")
    try:
        content = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise invalid(f"JSON Parse error: {error}") from error
    if not isinstance(content, dict):
        raise invalid(f"JSON Value: {_shown(content)} Is not object")
    return content


# JSON → arrays


def _from_rows(content, infos) -> dict[str, np.ndarray]:
    """Every element is one row of the input, or an object with one row of each input."""
    instances = content["instances"]
    if not isinstance(instances, list):
        raise invalid(f"JSON Value: {_shown(content)} Excepting 'instances' to be an list/array")
    if not instances:
        raise invalid(f"JSON Value: {_shown(content)} No values in 'instances' array")
    if not isinstance(instances[0], dict) and len(infos) > 1:
        raise invalid(
            "instances is a plain list, but expecting list of objects as multiple input tensors "
            "required as per tensorinfo_map"
        )
    named = _is_named(instances[0])
    columns = {alias: [] for alias in sorted(infos)}
    for index, element in enumerate(instances):
        if _is_named(element) != named:
            wanted, got = ("object", "list") if named else ("value/list", "object")
            raise invalid(f"Expecting {wanted} but got {got} at item {index} of input list")
        if named and element.keys() != columns.keys():
            raise invalid(
                f"Failed to process element: {index} of 'instances' list. JSON object: "
                f"{_shown(element)} keys must be equal to: {','.join(columns)}"
            )
        for alias, column in columns.items():
            try:
                column.append(_array(element[alias] if named else element, infos[alias].dtype))
                if column[0].shape != column[-1].shape:
                    raise invalid(
                        f"Expecting shape {_shape(column[0])} but got: {_shape(column[-1])}"
                    )
            except ModelError as error:
                key = f" key: {alias}" if named else ""
                raise invalid(
                    f"Failed to process element: {index}{key} of 'instances' list. Error: "
                    f"{error.message}"
                ) from error
    return {alias: np.stack(column) for alias, column in columns.items()}


def _from_columns(inputs, infos) -> dict[str, np.ndarray]:
    """An object with all inputs, or the value of the only one."""
    if not _is_named(inputs):
        if len(infos) > 1:
            raise invalid(
                "inputs is a plain value/list, but expecting an object as multiple input tensors "
                "required as per tensorinfo_map"
            )
        inputs = dict.fromkeys(infos, inputs)
    arrays = {}
    for alias, info in sorted(infos.items()):
        if alias not in inputs:
            raise invalid(f"Missing named input: {alias} in 'inputs' object.")
        arrays[alias] = _array(inputs[alias], info.dtype)
    return arrays


def _is_named(value) -> bool:
    return isinstance(value, dict) and not _is_binary(value)


def _is_binary(value) -> bool:
    return isinstance(value, dict) and value.keys() == {"b64"} and isinstance(value["b64"], str)


def _array(value, dtype: int) -> np.ndarray:
    """Nested lists of one depth and shape → an array; the first elements tell the shape."""
    shape, first = [], value
    while isinstance(first, list):
        shape.append(len(first))
        first = first[0] if first else None
    flat = [value]
    for level, size in enumerate(shape):
        for item in flat:
            if not isinstance(item, list):
                raise invalid(
                    f"JSON Value: {_shown(item)} found at incorrect level: {level + 1} in the "
                    f"JSON DOM. Expected at level: {len(shape)}"
                )
            if len(item) != size:
                raise invalid(
                    f"Encountered list at unexpected size: {len(item)} at level: {level} "
                    f"expected size: {size}"
                )
        flat = list(itertools.chain.from_iterable(flat))
    if list in set(map(type, flat)):
        raise invalid(f"Encountered list at unexpected level: {len(shape)} expected < {len(shape)}")
    target = tf.as_dtype(dtype).as_numpy_dtype
    array = np.array(_values(flat, dtype, target), target)
    try:
        return array.reshape(shape)
    except ValueError as error:  # more dimensions than NumPy has
        raise invalid(f"A tensor of {len(shape)} dimensions") from error


def _values(flat: list, dtype: int, target) -> list:
    """The leaves, each of the input's type; Python's numbers are wider than JSON's."""
    if dtype == types_pb2.DT_STRING:
        return [_bytes(value) for value in flat]
    if dtype == types_pb2.DT_BOOL:
        allowed, low, high = {bool}, False, True
    elif np.issubdtype(target, np.integer):
        allowed, low, high = {int}, np.iinfo(target).min, np.iinfo(target).max
    elif dtype in (types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE):
        return _decimals(flat, dtype, target)
    else:
        raise ModelError(
            tf.errors.UNIMPLEMENTED,
            f"Conversion of JSON Value: {_shown(flat[:1])} to type: {dtype_name(dtype)}",
        )
    for value in flat:
        if type(value) not in allowed or not low <= value <= high:
            raise _type_error(value, dtype)
    return flat


def _decimals(flat: list, dtype: int, target) -> list:
    largest_whole = 2 ** (np.finfo(target).nmant + 1) - 1
    largest = float(np.finfo(target).max)
    for value in flat:
        if type(value) not in (int, float):
            raise _type_error(value, dtype)
        bound = largest_whole if type(value) is int else largest
        if abs(value) > bound and value not in (float("inf"), -float("inf")):
            raise invalid(
                f"Cannot convert JSON value: {_shown(value)} to {dtype_name(dtype)} without loss "
                f"of precision."
            )
    return flat


def _bytes(value) -> bytes:
    if _is_binary(value):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise invalid("Unable to base64 decode") from error
    if isinstance(value, dict):
        raise invalid(f"JSON Value: {_shown(value)} not formatted correctly for base64 data")
    if not isinstance(value, str):
        raise _type_error(value, types_pb2.DT_STRING)
    return value.encode("utf-8", errors="replace")


def _type_error(value, dtype: int) -> ModelError:
    return invalid(
        f"JSON Value: {_shown(value)} Type: {JSON_TYPES[type(value)]} is not of expected type: "
        f"{dtype_name(dtype)}"
    )


def _shown(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _shape(array: np.ndarray) -> str:
    return f"[{','.join(map(str, array.shape))}]"


# Arrays → JSON


def _as_rows(outputs: dict[str, np.ndarray]) -> list:
    size = None
    for alias, array in outputs.items():
        if not array.ndim:
            raise invalid(f"Tensor name: {alias} has no shape information ")
        if size is not None and len(array) != size:
            raise invalid(
                f"Tensor name: {alias} has inconsistent batch size: {len(array)} expecting: {size}"
            )
        size = len(array)
    columns = {alias: _nested(alias, array) for alias, array in outputs.items()}
    if len(columns) == 1:
        return next(iter(columns.values()))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _as_columns(outputs: dict[str, np.ndarray]):
    columns = {alias: _nested(alias, array) for alias, array in outputs.items()}
    return next(iter(columns.values())) if len(columns) == 1 else columns


def _nested(alias: str, array: np.ndarray):
    if array.dtype == object:
        binary = alias.endswith("_bytes")

        def text(value: bytes):
            if binary:
                return {"b64": base64.b64encode(value).decode()}
            return value.decode("utf-8", errors="replace")

        return np.array([text(value) for value in array.flat], object).reshape(array.shape).tolist()
    return (_shortened(array) if array.dtype == np.float32 else array).tolist()


def _shortened(array: np.ndarray) -> np.ndarray:
    """float32 as the server writes it: six digits where they give the number back, else nine."""
    values = array.ravel().tolist()
    short = np.array([float(f"{value:g}") for value in values])
    exact = np.array([float(f"{value:.9g}") for value in values])
    with np.errstate(over="ignore"):
        return np.where(short.astype("float32") == array.ravel(), short, exact).reshape(array.shape)
