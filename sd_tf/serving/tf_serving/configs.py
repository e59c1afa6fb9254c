"""Write and read the server's own files, protobuf text: models, batching, monitoring."""

from dataclasses import dataclass, field

from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    text_format,
    wrappers_pb2,
)
from google.protobuf.message import Message
from tensorflow_serving.config import model_server_config_pb2

from sd_tf.serving.tf_serving import ServingError, signatures
from sd_tf.serving.tf_serving.folder import MOUNTED_MODELS, Settings

STABLE, CANARY, PREVIOUS = "stable", "canary", "previous"
METRICS_PATH = "/monitoring/prometheus/metrics"
BATCH_TIMEOUT_MICROS = 5000  # longest wait of a request for others to fill its batch
BATCH_THREADS = 2
QUEUED_BATCHES = 64  # with more in its queue, the server answers UNAVAILABLE at once
HEADER = "# Written by `sd-tf serve tf_serving`, which keeps the labels it finds here.\n"


# Models and versions


@dataclass(frozen=True)
class ServedModel:
    """A component and the versions of it that the server loads."""

    component: str
    labels: dict[str, int] = field(default_factory=dict)  # label → version; all are served


def models_config(models: list[ServedModel], settings: Settings) -> str:
    """Write models.config. Only labelled versions are served: each takes memory for its weights."""
    config = model_server_config_pb2.ModelServerConfig()
    for model in models:
        entry = config.model_config_list.config.add()
        entry.name = settings.model_name(model.component)
        entry.base_path = f"{MOUNTED_MODELS}/{model.component}"
        entry.model_platform = "tensorflow"
        entry.model_version_policy.specific.versions.extend(sorted(set(model.labels.values())))
        for label, version in model.labels.items():
            entry.version_labels[label] = version
    return HEADER + text_format.MessageToString(config)


def read_models_config(text: str) -> model_server_config_pb2.ModelServerConfig:
    return _parse(text, model_server_config_pb2.ModelServerConfig())


# Batching and monitoring. Their protos are not in the package tensorflow-serving-api, so their
# fields are repeated here from session_bundle_config.proto and monitoring_config.proto. The text
# form has names and kinds only, so the fields' numbers do not matter.

_INTEGER, _TEXT, _BOOL = (f".google.protobuf.{name}Value" for name in ("Int64", "String", "Bool"))
_MESSAGES = {
    "BatchingParameters": {
        "max_batch_size": _INTEGER,
        "batch_timeout_micros": _INTEGER,
        "max_enqueued_batches": _INTEGER,
        "num_batch_threads": _INTEGER,
        "thread_pool_name": _TEXT,
        "allowed_batch_sizes": "repeated int64",
        "pad_variable_length_inputs": "bool",
        "enable_large_batch_splitting": _BOOL,
        "max_execution_batch_size": _INTEGER,
    },
    "PrometheusConfig": {"enable": "bool", "path": "string"},
    "MonitoringConfig": {"prometheus_config": ".sd_tf.PrometheusConfig"},
}


def _message_classes() -> dict[str, type[Message]]:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="sd_tf_serving.proto", package="sd_tf")
    file.syntax = "proto3"
    file.dependency.append(wrappers_pb2.DESCRIPTOR.name)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (key, kind) in enumerate(fields.items(), start=1):
            entry = message.field.add(name=key, number=number, label=kinds.LABEL_OPTIONAL)
            if kind.startswith("."):
                entry.type, entry.type_name = kinds.TYPE_MESSAGE, kind
                continue
            repeated, _, scalar = kind.rpartition(" ")
            entry.type = getattr(kinds, f"TYPE_{scalar.upper()}")
            if repeated:
                entry.label = kinds.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"sd_tf.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _message_classes()


def read_batching(text: str) -> Message:
    return _parse(text, _CLASSES["BatchingParameters"]())


def read_monitoring(text: str) -> Message:
    return _parse(text, _CLASSES["MonitoringConfig"]())


def monitoring_config() -> str:
    return HEADER + f'prometheus_config {{\n  enable: true\n  path: "{METRICS_PATH}"\n}}\n'


def batching_config() -> str:
    """Write the common batching file, of which the server uses only the thread pool.

    All else is read from each version's own parameters.
    """
    return HEADER + (
        "# With --enable_per_model_batching_parameters only the thread pool is read from here;\n"
        "# the rest is each version's batching_params.pbtxt. A model without one is not batched.\n"
        f"num_batch_threads {{ value: {BATCH_THREADS} }}\n"
        'thread_pool_name { value: "sd_tf_batches" }\n'
    )


def batching_parameters(batch: int) -> str:
    return (
        f"# The SavedModel computes exactly {batch} rows: smaller requests are put together, and\n"
        f"# what is missing is filled up with repeated rows and cut off again.\n"
        f"max_batch_size {{ value: {batch} }}\n"
        f"allowed_batch_sizes: {batch}\n"
        f"batch_timeout_micros {{ value: {BATCH_TIMEOUT_MICROS} }}\n"
        f"max_enqueued_batches {{ value: {QUEUED_BATCHES} }}\n"
    )


def batching_problem(graph) -> str | None:
    """Say why the server cannot batch a model's requests, or return None if it can.

    The server wraps a model's whole session, so that either all of its signatures are batched or
    none. It joins inputs along dimension 0, refuses scalars and inputs with different numbers of
    rows, and splits outputs by the rows of the inputs (ComputeTensorBatchSize, SplitOutputTensors
    in batching_session.cc).
    """
    sizes = {}
    for name in signatures.names(graph):
        signature = graph.signature_def[name]
        for kind, tensors in (("input", signature.inputs), ("output", signature.outputs)):
            for key, tensor in sorted(tensors.items()):
                shape = signatures.shape(tensor)
                if not shape:
                    return f"the {kind} {key} of {name} has no dimension 0"
                sizes.setdefault(shape[0], f"the {kind} {key} of {name}")
    if len(sizes) > 1:
        described = " and ".join(
            f"{'any number' if size < 0 else size} in {where}" for size, where in sizes.items()
        )
        return f"the rows differ: {described}"
    return None


def fixed_batch(graph) -> int:
    """Return the batch size of a model that has no `batching_problem`."""
    tensor = next(iter(graph.signature_def[signatures.names(graph)[0]].inputs.values()))
    return signatures.shape(tensor)[0]


def _parse(text: str, message: Message) -> Message:
    try:
        return text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise ServingError(f"it cannot be parsed as {message.DESCRIPTOR.name}: {error}") from error
