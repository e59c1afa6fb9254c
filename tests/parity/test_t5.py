"""T5's encoder against transformers'."""

import keras
import numpy as np
import pytest
import torch
from transformers import T5Config, T5EncoderModel
from transformers.models.t5.modeling_t5 import T5Attention

from sd_tf.config import T5EncoderConfig
from sd_tf.files.tensors import CheckpointError, StoredTensor, open_safetensors
from sd_tf.models.t5 import T5Encoder, buckets
from sd_tf.weights import layout
from sd_tf.weights.t5 import ALIAS, TABLE, t5_names
from tests import peers

pytestmark = pytest.mark.backend

# The heads together are wider than the model, and have a width that no default has.
CONFIG = T5EncoderConfig(
    hidden_size=48, intermediate_size=80, num_layers=3, num_heads=5, head_dim=12, vocab_size=200
)
LENGTHS = [9, 300]  # 300 tokens: all buckets


def tokens_of(length, batch=2):
    rng = np.random.default_rng(length)
    tokens = rng.integers(2, CONFIG.vocab_size, (batch, length)).astype("int32")
    tokens[0, length // 2 :] = 0  # padding, which is attended to
    return tokens


def peer(**changes):
    return peers.randomized(T5EncoderModel(peers.t5_config(CONFIG, **changes)), 11)


def stored(module):
    return {
        name: StoredTensor(tuple(value.shape), "float32", value.numpy)
        for name, value in module.state_dict().items()
    }


def in_half_precision(module, dtype, folder):
    module.save_pretrained(folder)
    return T5EncoderModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def to_numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def run(module, tokens):
    with torch.no_grad():
        return module(torch.from_numpy(tokens)).last_hidden_state.float().numpy()


def error(ours, theirs):
    assert ours.shape == theirs.shape
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


@pytest.fixture(scope="module")
def both():
    module = peer()
    return module, layout.load(CONFIG, t5_names(stored(module)), "float32", "test")


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_transformers(both, length):
    module, model = both
    tokens = tokens_of(length)
    outputs = model(tokens)
    assert outputs.keys() == {"context"}
    assert error(to_numpy(outputs["context"]), run(module, tokens)) <= 1e-4


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(8, 20), (64, 200)])
def test_other_buckets(num_buckets, max_distance):
    module = peer(
        relative_attention_num_buckets=num_buckets, relative_attention_max_distance=max_distance
    )
    config = T5EncoderConfig(
        **{**vars(CONFIG), "num_buckets": num_buckets, "max_distance": max_distance}
    )
    model = layout.load(config, t5_names(stored(module)), "float32", "test")
    tokens = tokens_of(300, batch=1)
    assert error(to_numpy(model(tokens)["context"]), run(module, tokens)) <= 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(both, dtype, tmp_path):
    """As near to float32 as transformers' half precision; with float16, too, `wo` is float32."""
    module, _ = both
    half = in_half_precision(module, dtype, tmp_path)
    model = layout.load(CONFIG, t5_names(stored(module)), dtype, "test")
    dtypes = {name: str(value.dtype) for name, value in half.named_parameters()}
    expected = {name: f"torch.{slot.variable.dtype}" for name, slot in layout.slots(model).items()}
    assert dtypes == expected
    tokens = tokens_of(300)
    context = model(tokens)["context"]
    assert keras.backend.standardize_dtype(context.dtype) == dtype
    exact = run(module, tokens)
    ours, theirs = (
        np.sqrt(np.mean(np.square(x - exact))) for x in (to_numpy(context), run(half, tokens))
    )
    assert ours <= 1.5 * theirs  # theirs sums differently on different processors


def test_float16_beyond_its_range(tmp_path):
    """What overflows in the first attention is clamped, and what `wo` gives is float32."""
    module = peer()
    with torch.no_grad():
        module.encoder.block[0].layer[0].SelfAttention.o.weight *= 1e5
        for block in module.encoder.block:
            block.layer[1].DenseReluDense.wo.weight *= 1e6
    model = layout.load(CONFIG, t5_names(stored(module)), "float16", "test")
    tokens = tokens_of(20)
    theirs = run(in_half_precision(module, "float16", tmp_path), tokens)
    ours = to_numpy(model(tokens)["context"])
    assert np.isfinite(theirs).all()
    assert error(ours, theirs) <= 0.02


def test_buckets():
    distances = np.arange(-600, 601)
    found = buckets(601, 32, 128)
    ours = np.concatenate([found[::-1, 0][:-1], found[0]])  # of the distances −600 … 600
    theirs = T5Attention._relative_position_bucket(torch.from_numpy(distances))
    np.testing.assert_array_equal(ours, theirs.numpy())
    at = dict(zip(distances.tolist(), ours.tolist(), strict=True))
    assert [at[d] for d in (1, 8, 64, -16)] == [17, 24, 30, 10]


def test_the_table_of_tokens_may_be_stored_twice(both):
    module, _ = both
    tensors = stored(module)
    assert {TABLE, ALIAS} <= tensors.keys()
    one = {name: tensor for name, tensor in tensors.items() if name != ALIAS}
    other = {name: tensor for name, tensor in tensors.items() if name != TABLE}
    for found in (tensors, one, other):
        named = t5_names(found)
        assert named.keys() == one.keys()
        np.testing.assert_array_equal(named[TABLE].read(), tensors[TABLE].read())


def test_files_of_transformers(both, tmp_path):
    module, model = both
    module.save_pretrained(tmp_path)
    tensors = t5_names(open_safetensors(tmp_path / "model.safetensors"))
    again = layout.load(CONFIG, tensors, "float32", "test")
    for ours, theirs in zip(model.variables, again.variables, strict=True):
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))


def test_two_tables_that_differ(both):
    module, _ = both
    tensors = stored(module)
    table = tensors[TABLE]
    tensors[ALIAS] = StoredTensor(table.shape, table.dtype, lambda: table.read() + 1)
    rule = r"one table of tokens: shared\.weight and encoder\.embed_tokens\.weight must be equal"
    with pytest.raises(CheckpointError, match=rf"{rule}, but their values differ\."):
        t5_names(tensors)[TABLE].read()
    tensors[ALIAS] = table.rows(0, 3)
    with pytest.raises(CheckpointError, match=r"shapes are \[200, 48\] and \[3, 48\]\."):
        t5_names(tensors)


def test_names_and_shapes_of_the_largest():
    """The encoder of SD3 and Flux, T5 v1.1 XXL."""
    with torch.device("meta"):
        module = T5EncoderModel(T5Config(**peers.T5_XXL))
    expected = {name: tuple(value.shape) for name, value in module.named_parameters()}
    model = layout.abstract_model(T5EncoderConfig())
    slots = layout.slots(model)
    assert {name: slot.shape for name, slot in slots.items()} == expected
    assert len(slots) == 219
    assert sum(np.prod(slot.shape) for slot in slots.values()) == 4_762_310_656


def test_it_is_the_model_of_its_configuration():
    assert isinstance(layout.abstract_model(CONFIG), T5Encoder)
