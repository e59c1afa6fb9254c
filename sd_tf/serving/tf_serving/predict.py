"""TensorFlow Serving's API on an export's SavedModels, independent of the transport.

Requests and responses are the server's own protos; `rest` has its JSON. Checks, their order, codes
and messages follow the server's source (`predict_util.cc`, `server_core.cc`,
`get_model_status_impl.cc`, `get_model_metadata_impl.cc`), so that clients see no difference. It is
stricter in one place: shapes are compared with the signature before anything runs, while in the
server the first operation that they do not fit fails. Outputs are sent as `tensor_content`, as with
the server's --enable_serialization_as_tensor_content.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework import tensor_pb2, types_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_pb2,
    predict_pb2,
)

from sd_tf.runtime.graph_kernels import (
    check_weights_change,
    is_in_graph,
    keep_weights,
    tell_widening,
)
from sd_tf.runtime.manifest import TEXT_TO_IMAGE, ExportError, Manifest
from sd_tf.runtime.saved_model import SavedModel, best_device, message_of, tell_misfit
from sd_tf.runtime.shapes import Shapes

DEFAULT_SIGNATURE = "serving_default"
SIGNATURE_DEF = "signature_def"  # the only metadata field


class ModelError(Exception):
    """Raised for a request that cannot be answered, with gRPC's code (as in `tf.errors`)."""

    def __init__(self, code: int, message: str):
        super().__init__(code, message)  # both, so that it travels between processes
        self.code, self.message = code, message

    def __str__(self) -> str:
        return self.message


def invalid(message: str) -> ModelError:
    return ModelError(tf.errors.INVALID_ARGUMENT, message)


class Servable:
    """One loaded SavedModel, and the signatures that its file describes."""

    def __init__(self, folder: Path, name: str, shapes: Shapes, in_graph: bool = False):
        # Requests to the other components run almost only code that XLA compiles, as a rule.
        is_plain = name in ("text_encoder", TEXT_TO_IMAGE) or in_graph
        self._loaded = SavedModel(folder, name, optimize=is_plain)
        self._shapes = shapes

    @property
    def signature_defs(self) -> dict[str, meta_graph_pb2.SignatureDef]:
        return self._loaded.signatures

    def signature(self, name: str) -> meta_graph_pb2.SignatureDef | None:
        return self.signature_defs[name] if self._loaded.runs(name) else None

    def batch_size(self, signature: str) -> int:
        """Return the batch of the shape that a signature serves."""
        _, shape = self._shapes.endpoint_of(signature)
        return shape.batch_size

    def input_shapes(self, signature: str) -> list[list[int]]:
        """Return the largest shapes that a signature's inputs can have."""
        batch_size = self.batch_size(signature)
        return [
            [batch_size if dim.size < 0 else dim.size for dim in info.tensor_shape.dim]
            for info in self.signature_defs[signature].inputs.values()
        ]

    def most_elements(self) -> int:
        """Return how many elements the inputs of one request can have together."""
        return max(
            sum(map(math.prod, self.input_shapes(name)))
            for name in self.signature_defs
            if self._loaded.runs(name)
        )

    def run(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        try:
            return self._loaded.run(signature, inputs)
        except tf.errors.OpError as error:
            raise ModelError(error.error_code, message_of(error)) from error


def load(
    export_dir: str | Path, components: Iterable[str], fixed_weights: bool = False
) -> dict[str, Servable]:
    """Check an export's files, and load some of its components.

    `fixed_weights`: as for `Pipeline.load`.
    """
    folder = Path(export_dir)
    manifest = Manifest.read(folder)
    manifest.check_files(folder)
    names = list(components)
    if unknown := [name for name in names if name not in manifest.components]:
        raise ExportError(
            f"`components` must be among those of {folder}, "
            f"{', '.join(manifest.components)}. Received: {', '.join(unknown)}"
        )
    if fixed_weights:
        keep_weights(manifest)
    check_weights_change(manifest)
    tell_widening(manifest)
    tell_misfit(manifest, best_device(), names)
    return {
        name: Servable(folder, name, manifest.shapes, is_in_graph(manifest, name)) for name in names
    }


class ModelServer:
    """Models by name and version, with methods for the API's requests."""

    def __init__(
        self,
        models: Mapping[str, Mapping[int, Servable]],
        latest: int | None = None,
        labels: Mapping[str, int] | None = None,
    ):
        """Serve loaded models.

        Args:
            latest: the version for requests that name none; None: the highest, as in the server.
            labels: names of versions, the same for every model.
        """
        self.models, self.latest = models, latest
        self.labels = dict(labels or {})

    def predict(self, request: predict_pb2.PredictRequest) -> predict_pb2.PredictResponse:
        spec = _spec(request)
        version, servable = self.find(spec)
        name = spec.signature_name or DEFAULT_SIGNATURE
        signature = servable.signature(name)
        if signature is None:
            raise ModelError(
                tf.errors.FAILED_PRECONDITION, f'Serving signature key "{name}" not found.'
            )
        inputs = self._inputs(signature, request.inputs, servable.batch_size(name))
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
        """Return the state of one version, or of all, the latest first.

        A label is ignored, as in the server.
        """
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
        for version in sorted(versions, key=lambda number: (number != self.latest, -number)):
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
            version = max(versions) if self.latest is None else self.latest
        if version not in versions:
            raise ModelError(tf.errors.NOT_FOUND, f"Servable not found for request: {asked}")
        return version, versions[version]

    def _inputs(self, signature, given: Mapping[str, tensor_pb2.TensorProto], batch_size: int):
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
            name: self._tensor(index, name, signature.inputs[name], given[name], batch_size)
            for index, name in enumerate(known)
        }

    def _tensor(
        self, index, name, info, proto: tensor_pb2.TensorProto, batch_size: int
    ) -> np.ndarray:
        """Check and build an input. Its size is checked first: a few bytes can claim any size."""
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
        free = (1, batch_size)  # the sizes that an export's free dimension may have
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
        try:  # reads protos as the server does: content, values, or fewer values to repeat
            return tf.io.parse_tensor(proto.SerializeToString(), tf.as_dtype(info.dtype)).numpy()
        except (tf.errors.OpError, TypeError) as error:
            raise invalid(f"tensor parsing error: {name}") from error


# ModelServer's methods, with the protos of their requests.
REQUESTS = {
    "predict": predict_pb2.PredictRequest,
    "metadata": get_model_metadata_pb2.GetModelMetadataRequest,
    "status": get_model_status_pb2.GetModelStatusRequest,
}


def serialized(server: ModelServer, method: str, request: bytes) -> tuple[int, bytes | str]:
    """Answer a serialized request with gRPC's code, and the serialized response or the message."""
    try:
        response = getattr(server, method)(REQUESTS[method].FromString(request))
    except ModelError as error:
        return error.code, error.message
    except DecodeError:
        return tf.errors.INVALID_ARGUMENT, "The message is not a request."
    return 0, response.SerializeToString()


def dtype_name(dtype: int) -> str:
    """Return the dtype's name as the server writes it: float, int32, string."""
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
