"""A branch beside a layer is what PyTorch computes with the weight W + scale·B·A."""

import keras
import numpy as np
import pytest
import torch
from keras import ops

from sd_tf.models import layers
from sd_tf.models.branches import Branch, branch_of, branches

pytestmark = pytest.mark.backend

RANK, SCALE = 3, 0.5


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype("float32")


def filled(layer):
    for variable in layer.weights:
        variable.assign(normal(*variable.shape))
    return layer


def check(ours, theirs):
    theirs = theirs.numpy()
    assert np.abs(ops.convert_to_numpy(ours) - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("make", [layers.dense, layers.pointwise_conv])
def test_linear(make):
    layer, x = filled(make(8, 10)), normal(2, 5, 8)
    a, b = normal(8, RANK), normal(RANK, 10)
    weight, bias = (np.array(w) for w in (layer.kernel, layer.bias))
    with branches({layer: Branch(a, b, SCALE)}):
        ours = layer(x)
    weight = torch.tensor((weight + SCALE * a @ b).T)
    check(ours, torch.nn.functional.linear(torch.tensor(x), weight, torch.tensor(bias)))


@pytest.mark.parametrize("kind", ["conv", "doubled", "strided"])
def test_convolutions(kind):
    layer = filled((layers.strided_conv if kind == "strided" else layers.conv)(8, 10))
    x, a, b = normal(2, 6, 6, 8), normal(3, 3, 8, RANK), normal(RANK, 10)
    with branches({layer: Branch(a, b, SCALE)}):
        ours = layer(x, doubled_to=(12, 12)) if kind == "doubled" else layer(x)
    weight = np.array(layer.kernel) + SCALE * np.einsum("hwir,ro->hwio", a, b)
    x = torch.tensor(x.transpose(0, 3, 1, 2))
    if kind == "doubled":
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    theirs = torch.nn.functional.conv2d(
        x,
        torch.tensor(weight.transpose(3, 2, 0, 1)),
        torch.tensor(np.array(layer.bias)),
        stride=2 if kind == "strided" else 1,
        padding=0 if kind == "strided" else 1,
    )
    check(ours, theirs.permute(0, 2, 3, 1))


def test_where_branches_are_in_force():
    """Only inside the context, only at the layers named; the inner one replaces the outer one."""
    one, other, x = filled(layers.dense(4, 4)), filled(layers.dense(4, 4)), normal(2, 4)
    plain = [ops.convert_to_numpy(layer(x)) for layer in (one, other)]
    branch = Branch(normal(4, RANK), normal(RANK, 4))
    with branches({one: branch}):
        assert branch_of(one) is branch and branch_of(other) is None
        assert np.abs(ops.convert_to_numpy(one(x)) - plain[0]).max() > 0.1
        np.testing.assert_array_equal(ops.convert_to_numpy(other(x)), plain[1])
        with branches({}):
            np.testing.assert_array_equal(ops.convert_to_numpy(one(x)), plain[0])
        assert branch_of(one) is branch
    assert branch_of(one) is None


def test_a_branch_is_cast_to_the_layers_precision():
    layer, x = filled(layers.dense(4, 4, dtype="mixed_bfloat16")), normal(2, 4)
    with branches({layer: Branch(keras.Variable(normal(4, RANK)), normal(RANK, 4))}):
        assert keras.backend.standardize_dtype(layer(x).dtype) == "bfloat16"
