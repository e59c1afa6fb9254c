"""Read a SavedModel's signatures from its protobuf, without loading or running it."""

import math
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from sd_tf.serving.tf_serving import ServingError
from sd_tf.serving.tf_serving.folder import SAVED_MODEL

SERVE = "serve"
INTERNAL = "__saved_model_"
COMPILED = "_XlaMustCompile"


def read(folder: Path) -> meta_graph_pb2.MetaGraphDef:
    """Read the graph that the server would load."""
    path = folder / SAVED_MODEL
    content = saved_model_pb2.SavedModel()
    try:
        content.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ServingError(f"{path} is damaged: {error}. Copy or export it again.") from error
    for graph in content.meta_graphs:
        if set(graph.meta_info_def.tags) == {SERVE}:
            return graph
    found = [list(graph.meta_info_def.tags) for graph in content.meta_graphs]
    raise ServingError(f"{path} has no graph with the tag {SERVE!r}, but {found}. Export it again.")


def names(graph: meta_graph_pb2.MetaGraphDef) -> list[str]:
    return sorted(name for name in graph.signature_def if not name.startswith(INTERNAL))


def tensors(graph: meta_graph_pb2.MetaGraphDef, name: str):
    """Return the inputs and outputs of a signature, as (key, TensorInfo)."""
    signature = graph.signature_def[name]
    return [*signature.inputs.items(), *signature.outputs.items()]


def is_in(graph: meta_graph_pb2.MetaGraphDef, tensor: meta_graph_pb2.TensorInfo) -> bool:
    """Tell whether a signature's tensor is made by a node of the graph."""
    source = tensor.name.partition(":")[0]
    return any(node.name == source for node in graph.graph_def.node)


def shape(tensor: meta_graph_pb2.TensorInfo) -> tuple[int, ...] | None:
    """Return a tensor's shape, -1 for any size; None if the rank is unknown."""
    if tensor.tensor_shape.unknown_rank:
        return None
    return tuple(dim.size for dim in tensor.tensor_shape.dim)


def largest_call(graph: meta_graph_pb2.MetaGraphDef, batch_size: int) -> int:
    """Return how many bytes the numbers have that a signature takes at most.

    `batch_size`: the size of dimensions that are open.
    """
    return max(
        sum(
            tf.as_dtype(tensor.dtype).size
            * math.prod(batch_size if size < 0 else size for size in shape(tensor) or ())
            for tensor in graph.signature_def[name].inputs.values()
        )
        for name in names(graph)
    )


def describe(tensor: meta_graph_pb2.TensorInfo) -> str:
    return f"{types_pb2.DataType.Name(tensor.dtype)[3:].lower()} {shape(tensor)}"


def compiled(graph: meta_graph_pb2.MetaGraphDef) -> set[str]:
    """Return the signatures that call, directly or not, a function that XLA must compile."""
    library = {f.signature.name: f for f in graph.graph_def.library.function}
    nodes = {node.name: node for node in graph.graph_def.node}
    known: dict[str, bool] = {}

    def compiles(name: str) -> bool:
        if name not in known:
            known[name] = False  # ends a recursion
            function = library.get(name)
            known[name] = function is not None and (
                function.attr[COMPILED].b or any(map(compiles, _called(function.node_def, library)))
            )
        return known[name]

    result = set()
    for name in names(graph):
        outputs = graph.signature_def[name].outputs.values()
        sources = [nodes[tensor.name.partition(":")[0]] for tensor in outputs]
        if any(map(compiles, _called(sources, library))):
            result.add(name)
    return result


def operations(graph: meta_graph_pb2.MetaGraphDef) -> set[str]:
    """Return every kind of op in the graph and its functions, except calls of functions."""
    library = graph.graph_def.library.function
    functions = {function.signature.name for function in library}
    found = {node.op for node in graph.graph_def.node}
    for function in library:
        found |= {node.op for node in function.node_def}
    return found - functions


def _called(nodes, library) -> Iterator[str]:
    for node in nodes:
        if node.op in library:
            yield node.op
        for value in node.attr.values():
            if value.HasField("func"):
                yield value.func.name
            for function in value.list.func:
                yield function.name
