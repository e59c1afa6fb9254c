"""Layers of models that stay in TensorFlow's graph: few kernels, and PyTorch's results."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.nn import functional

from sd_tf.config.rewrites import AS_WRITTEN, Rewrites
from sd_tf.models import layers
from sd_tf.models.branches import Branch, branches
from sd_tf.models.layers import ACTIVATIONS, GroupNorm, LayerNorm, dense
from sd_tf.models.lowering import lowered
from sd_tf.models.storage import stored_as
from tests.fresh import run_python

IN_GRAPH = Rewrites(graph_kernels=True)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def exactly(x):
    """What a bfloat16 tensor or variable holds, for PyTorch in float64."""
    return torch.tensor(tf.cast(tf.convert_to_tensor(x), tf.float64).numpy())


def called(layer, x, jit_compile=False, **options):
    """Call a layer with the rewrite that keeps it in the graph, or compiled as a whole."""

    @tf.function(jit_compile=jit_compile)
    def run(x):
        with lowered(IN_GRAPH):
            return layer(x, **options)

    return run(x)


def check(ours, theirs, bound=2**-8):
    """Compare with PyTorch's: by default, to rounding to bfloat16."""
    ours, theirs = tf.cast(ours, tf.float64).numpy(), theirs.numpy()
    assert np.abs(ours - theirs).max() <= bound * np.abs(theirs).max()


def operations(function, x):
    return {node.op for node in function.get_concrete_function(x).graph.as_graph_def().node}


# Norms


def varied(norm):
    """Give a norm weights that do something."""
    width = norm.scale.shape[0]
    norm.scale.assign(1 + 0.3 * normal(width, seed=2))
    norm.bias.assign(0.3 * normal(width, seed=3))
    return norm


def of_many_means(*shape):
    """bfloat16 x whose channels have other means and widths."""
    x = normal(*shape) * np.linspace(0.1, 3, shape[-1]) + np.linspace(-2, 4, shape[-1])
    return tf.cast(x, tf.bfloat16)


@pytest.mark.parametrize("shape", [(2, 9, 13, 48), (1, 32, 32, 32), (3, 1, 1, 16)])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_group_norm(monkeypatch, shape, jit_compile):
    monkeypatch.setattr(layers, "LARGE_MAP", 1)
    x = of_many_means(*shape)
    norm = varied(GroupNorm(shape[-1], 8, epsilon=1e-5, dtype="bfloat16"))
    theirs = functional.group_norm(
        exactly(x).moveaxis(-1, 1), 8, exactly(norm.scale), exactly(norm.bias), eps=1e-5
    )
    check(called(norm, x, jit_compile), theirs.moveaxis(1, -1))


@pytest.mark.parametrize("shape", [(2, 77, 48), (3, 1, 16), (5, 4, 4, 32)])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_layer_norm(shape, jit_compile):
    x = of_many_means(*shape)
    norm = varied(LayerNorm(shape[-1], epsilon=0.3, dtype="bfloat16"))
    weights = exactly(norm.scale), exactly(norm.bias)
    theirs = functional.layer_norm(exactly(x), shape[-1:], *weights, eps=0.3)
    check(called(norm, x, jit_compile), theirs, 2**-7)  # compiled, rounded before scale and bias


def test_where_the_graphs_norms_are_taken():
    """In bfloat16, in a model that stays in the graph; group norms, of large maps."""
    side = math.isqrt(layers.LARGE_MAP)

    def takes(norm, rewrites, shape, dtype):
        @tf.function
        def run(x):
            with lowered(rewrites):
                return norm(x)

        return "FusedBatchNormV3" in operations(run, tf.TensorSpec(shape, dtype))

    for norm, shape in (
        (GroupNorm(16, 4, epsilon=1e-5, dtype="bfloat16"), (1, side, side, 16)),
        (LayerNorm(16, epsilon=1e-5, dtype="bfloat16"), (1, side, 16)),
    ):
        assert takes(norm, IN_GRAPH, shape, "bfloat16")
        assert not takes(norm, IN_GRAPH, shape, "float32")
        assert not takes(norm, AS_WRITTEN, shape, "bfloat16")
    small = (1, side, side - 1, 16)
    assert not takes(GroupNorm(16, 4, 1e-5, dtype="bfloat16"), IN_GRAPH, small, "bfloat16")


# Activations


def product(width, outputs, dtype="bfloat16"):
    layer = dense(width, outputs, dtype=dtype)
    layer.kernel.assign(normal(width, outputs, seed=4) / width**0.5)
    layer.bias.assign(0.3 * normal(outputs, seed=5))
    return layer


def theirs_of(layer, x):
    return exactly(x) @ exactly(layer.kernel) + exactly(layer.bias)


GELU = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda h: functional.gelu(h, approximate="tanh"),
}


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_an_activation_of_a_product(name, jit_compile):
    layer, x = product(32, 48), tf.cast(normal(2, 10, 32), tf.bfloat16)
    theirs = {**GELU, "silu": functional.silu}[name](theirs_of(layer, x))
    check(called(layer, x, jit_compile, activation=ACTIVATIONS[name]), theirs, 2**-6)


@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize("name", list(GELU))
def test_a_gate(rows, name):
    """Two products of many rows; of few, one that is divided."""
    layer, x = product(32, 96), tf.cast(normal(2, rows // 2, 32), tf.bfloat16)

    @tf.function
    def run(x):
        with lowered(IN_GRAPH):
            return layer.gated(x, ACTIVATIONS[name])

    products = [
        n for n in run.get_concrete_function(x).graph.get_operations() if n.type == "MatMul"
    ]
    assert len(products) == (1 if rows == 2 else 2)
    value, gate = theirs_of(layer, x).chunk(2, dim=-1)
    check(run(x), value * GELU[name](gate), 2**-6)


def test_a_gate_with_an_adapters_branch():
    """The branch is added before the activation; in float32, since each step rounds in bfloat16."""
    layer, x = product(32, 96, "float32"), tf.constant(normal(2, 40, 32))
    a, b = normal(32, 4, seed=6) / 4, normal(4, 96, seed=6) / 4
    with lowered(IN_GRAPH), branches({layer: Branch(a, b, 0.5)}):
        ours = layer.gated(x, ACTIVATIONS["gelu"])
    more = exactly(x) @ exactly(a) @ exactly(b)
    value, gate = (theirs_of(layer, x) + 0.5 * more).chunk(2, dim=-1)
    check(ours, value * functional.gelu(gate), 2**-20)


def test_a_gate_with_a_stored_kernel():
    with stored_as("float16"):
        layer = product(32, 96)
    x = tf.cast(normal(2, 40, 32), tf.bfloat16)
    with lowered(IN_GRAPH):
        ours = layer.gated(x, ACTIVATIONS["gelu"])
    value, gate = theirs_of(layer, x).chunk(2, dim=-1)
    check(ours, value * functional.gelu(gate), 2**-6)


# What TensorFlow makes of them. In float32, which oneDNN computes on every x86 processor.

KERNELS = """
import json

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from sd_tf.config.rewrites import Rewrites
from sd_tf.models.graph_kernels import layer_norm
from sd_tf.models.layers import ACTIVATIONS, dense
from sd_tf.models.lowering import lowered

def kernels(run):
    run = tf.function(run)
    x = tf.constant(np.random.default_rng(0).standard_normal((2, 64, 32)), tf.float32)
    run(x)
    told = context.context().export_run_metadata()
    return sorted({node.op for graph in told.partition_graphs for node in graph.node})

def lowered_in_graph(call):
    def run(x):
        with lowered(Rewrites(graph_kernels=True)):
            return call(x)
    return run

context.context().enable_run_metadata()
scale, bias = tf.Variable(tf.ones(32)), tf.Variable(tf.zeros(32))
layer = dense(32, 128, dtype="float32")
print(json.dumps({
    "layer_norm": kernels(lambda x: layer_norm(x, scale, bias, 1e-5)),
    "gelu": kernels(lowered_in_graph(lambda x: layer(x, activation=ACTIVATIONS["gelu"]))),
    "gelu_tanh": kernels(lowered_in_graph(lambda x: layer(x, activation=ACTIVATIONS["gelu_tanh"]))),
    "gate": kernels(lowered_in_graph(lambda x: layer.gated(x, ACTIVATIONS["gelu"]))),
}))
"""


def test_the_kernels_that_the_optimizer_finds():
    """One for a norm, and one for a product with its bias and activation."""
    environment = {"KERAS_BACKEND": "tensorflow", "TF_ENABLE_ONEDNN_OPTS": "1"}
    found = json.loads(run_python("-c", KERNELS, **environment).splitlines()[-1])
    assert "_MklLayerNorm" in found["layer_norm"]
    assert not {"FusedBatchNormV3", "_MklNativeFusedBatchNormV3"} & set(found["layer_norm"])
    for name in ("gelu", "gelu_tanh", "gate"):
        assert "_MklNativeFusedMatMul" in found[name]
        assert not {"Erf", "Erfc", "Tanh", "BiasAdd"} & set(found[name])
