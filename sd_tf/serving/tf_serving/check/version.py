"""Check one version of a model: its SavedModel, its warm-up requests, its batching."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from sd_tf.runtime.runner import PLAIN
from sd_tf.runtime.shapes import parse_signature
from sd_tf.serving.tf_serving import ServingError, configs, signatures, warmup
from sd_tf.serving.tf_serving.check.finding import Finding
from sd_tf.serving.tf_serving.check.server import Server
from sd_tf.serving.tf_serving.folder import BATCHING_PARAMETERS, SAVED_MODEL, WARM_UP

LARGEST_PROTO = 2**31 - 1
PYTHON_OPS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


@dataclass(frozen=True)
class Version:
    """A served version of a model."""

    component: str
    path: Path
    file: str  # its path as findings name it


def check_version(version: Version, servers: list[Server], replay: bool) -> Iterator[Finding]:
    path, file = version.path, version.file
    model = path / SAVED_MODEL
    again = "export the component again, and write it as a new version"
    if not model.is_file():
        yield Finding(f"{file}/{SAVED_MODEL}", "a version is a SavedModel", "no such file", again)
        return
    if model.stat().st_size > LARGEST_PROTO:
        rule = "a protobuf has less than 2 GB"
        yield Finding(f"{file}/{SAVED_MODEL}", rule, f"{model.stat().st_size} bytes", again)
        return
    try:
        graph = signatures.read(path)
    except ServingError as error:
        rule = "it is a SavedModel to serve"
        yield Finding(f"{file}/{SAVED_MODEL}", rule, str(error), again)
        return
    names = signatures.names(graph)
    if not names:
        yield Finding(f"{file}/{SAVED_MODEL}", "a model has signatures", "none", again)
        return
    undeclared = [
        f"{key} of {name} has no dtype, or names no tensor"
        for name in names
        for key, tensor in signatures.tensors(graph, name)
        if not tensor.dtype or not signatures.is_in(graph, tensor)
    ]
    if undeclared:
        rule = "a signature's tensors are declared"
        for found in undeclared:
            yield Finding(f"{file}/{SAVED_MODEL}", rule, found, again)
        return
    yield from _operations(version, graph, again)
    yield from _batching(version, graph, servers)
    requests, problems = _requests(version, graph)
    yield from problems
    yield from _compiled(version, graph, requests, bool(problems), servers)
    yield from _load(version, graph, requests if replay and not problems else [])


def _operations(version: Version, graph, again: str) -> Iterator[Finding]:
    found = signatures.operations(graph)
    custom = sorted(op for op in found if not op.startswith("_") and not hasattr(tf.raw_ops, op))
    for ops, rule in (
        (sorted(found & PYTHON_OPS), "the server runs no Python"),
        (custom, "the server has TensorFlow's own ops alone"),
    ):
        if ops:
            yield Finding(f"{version.file}/{SAVED_MODEL}", rule, ", ".join(ops), again)


def _load(version: Version, graph, requests) -> Iterator[Finding]:
    """Load a version into a session, as the server does: import the graph, restore variables."""
    mend = "copy the version again, or export the component again"
    uses = any(node.op in ("VarHandleOp", "VariableV2") for node in graph.graph_def.node)
    index = "variables/variables.index"
    if uses and not (version.path / index).is_file():
        rule = "a graph with variables has their values"
        yield Finding(f"{version.file}/{index}", rule, "no such file", mend)
        return
    tf.get_logger().setLevel("ERROR")  # silences the warning that this loader is deprecated
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        try:
            tf.compat.v1.saved_model.load(session, [signatures.SERVE], str(version.path))
        except (tf.errors.OpError, ValueError, OSError, RuntimeError) as error:
            rule = "the SavedModel loads"
            yield Finding(version.file, rule, str(error).partition("\n")[0], mend)
            return
        for request in requests:
            try:
                warmup.replay(session, graph, request)
            except (tf.errors.OpError, ValueError) as error:
                name = request.model_spec.signature_name
                found = f"{name}: {str(error).partition(chr(10))[0]}"
                yield Finding(f"{version.file}/{WARM_UP}", "every request runs", found, mend)


# Warm-up


def _requests(version: Version, graph) -> tuple[list, list[Finding]]:
    path, file = version.path / WARM_UP, f"{version.file}/{WARM_UP}"
    mend = "copy the version again, or write the export as a new version"
    if not path.is_file():
        return [], []
    try:
        requests = list(warmup.read(path))
    except ServingError as error:
        rule = "warm-up requests are a TFRecord of PredictionLog with predict_log"
        return [], [Finding(file, rule, str(error), mend)]
    findings = []
    if len(requests) > warmup.MAX_RECORDS:
        rule = f"there are at most {warmup.MAX_RECORDS}"
        findings.append(Finding(file, rule, f"{len(requests)}", mend))
    for index, request in enumerate(requests):
        if mismatch := _mismatch(request, graph):
            name = request.model_spec.signature_name
            rule = "a request matches its signature"
            found = f"record {index}, {name!r}: {mismatch}"
            findings.append(Finding(file, rule, found, mend))
    return requests, findings


def _mismatch(request, graph) -> str | None:
    name = request.model_spec.signature_name
    if name not in graph.signature_def:
        return "the model has no such signature"
    inputs = graph.signature_def[name].inputs
    if surplus := set(request.inputs) ^ set(inputs):
        return f"inputs that only one of the two has: {', '.join(sorted(surplus))}"
    for key, tensor in inputs.items():
        value = request.inputs[key]
        expected, sizes = signatures.shape(tensor), [d.size for d in value.tensor_shape.dim]
        fits = expected is None or (
            len(expected) == len(sizes)
            and all(e in (-1, size) for e, size in zip(expected, sizes, strict=True))
        )
        if value.dtype != tensor.dtype or not fits:
            dtype = tf.dtypes.as_dtype(value.dtype).name
            return (
                f"{key} is {dtype} {tuple(sizes)}, the signature has {signatures.describe(tensor)}"
            )
        content, dtype = len(value.tensor_content), tf.dtypes.as_dtype(value.dtype)
        if content and content != math.prod(sizes) * dtype.size:
            return f"{key} holds {content} bytes for {dtype.name} {tuple(sizes)}"
    return None


def _compiled(version, graph, requests, damaged: bool, servers) -> Iterator[Finding]:
    """Check that compiled signatures are warmed up, and that the server's flags allow them."""
    compiled = signatures.compiled(graph)
    recorded = {request.model_spec.signature_name for request in requests}
    names = set(signatures.names(graph))
    for server in servers:
        if server.compiles:
            cold = {
                name
                for name in compiled - recorded
                if not name.startswith(PLAIN) and _is_chosen(name, recorded)
            }
            if cold and not damaged:
                yield Finding(
                    f"{version.file}/{WARM_UP}",
                    "every compiled signature is warmed up, or its first caller waits for XLA",
                    f"no request for {', '.join(sorted(cold))}",
                    "write the export as a new version",
                )
            continue
        refused = {n for n in compiled if n in recorded or PLAIN + n not in names}
        if refused:
            yield Finding(
                server.file,
                "compiled signatures need --xla_gpu_compilation_enabled or "
                "--xla_cpu_compilation_enabled",
                f"neither, and {version.file} warms up or has no plain twin of "
                f"{', '.join(sorted(refused))}",
                "add the flag, or write the folder anew without XLA",
            )


def _is_chosen(name: str, recorded: set[str]) -> bool:
    """Return whether a signature's shape is among those that are warmed up, or none is."""
    chosen = {parse_signature(one)[1] for one in recorded}
    return not chosen or parse_signature(name)[1] in chosen


# Batching


def _batching(version: Version, graph, servers: list[Server]) -> Iterator[Finding]:
    own = version.path / BATCHING_PARAMETERS
    for server in servers:
        if not server.is_on("enable_batching"):
            continue
        if server.is_on("enable_per_model_batching_parameters"):
            path, file = own, f"{version.file}/{BATCHING_PARAMETERS}"
            if not path.is_file():
                continue  # the server does not batch such a model
            mend = "remove the file"
        else:
            path, file = None, server.file
            mend = "add --enable_per_model_batching_parameters=true"
        problem = configs.batching_problem(graph)
        if problem:
            rule = "a batched model has inputs and outputs of the same rows"
            yield Finding(file, rule, f"{version.component}: {problem}", mend)
        elif path is not None and (problem := _sizes(path, configs.fixed_batch(graph))):
            mend = "set max_batch_size and allowed_batch_sizes to the batch"
            yield Finding(file, "the server's batch is the SavedModel's", problem, mend)


def _sizes(path: Path, batch: int) -> str | None:
    try:
        parameters = configs.read_batching(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return str(error)
    sizes = list(parameters.allowed_batch_sizes)
    if parameters.max_batch_size.value != batch or sizes != [batch]:
        return (
            f"max_batch_size {parameters.max_batch_size.value}, allowed_batch_sizes {sizes}, and a "
            f"fixed batch of {batch}"
        )
    return None
