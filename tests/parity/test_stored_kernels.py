"""Kernels stored in fewer bits: against NumPy and PyTorch, and whole pictures against diffusers."""

import keras
import numpy as np
import pytest
import torch

from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.config import FAMILIES, storage_text
from sd_tf.config.rewrites import TARGETS
from sd_tf.files.tensors import CheckpointError, StoredTensor
from sd_tf.models.branches import Branch, branches
from sd_tf.models.layers import conv, dense, strided_conv
from sd_tf.models.lowering import lowered
from sd_tf.models.storage import stored_as
from sd_tf.runtime.manifest import ExportError
from sd_tf.runtime.psnr import psnr
from sd_tf.weights import layout
from sd_tf.weights.int8 import CHUNK, rounded
from sd_tf.weights.t5 import t5_names
from tests import peer_transformers
from tests.parity.test_t5 import CONFIG, error, peer, run, stored, to_numpy, tokens_of
from tests.peer_pipelines import PROMPTS, channels_first, check_pictures, drawer

pytestmark = pytest.mark.backend

FLOOR = 30.0  # dB


def normal(*shape):
    return np.random.default_rng(3).standard_normal(shape).astype("float32")


def filled(weight, bias=None, dtype="float32", make=dense, storage="int8"):
    """A layer with these values, which stores its kernel so."""
    with stored_as(storage):
        layer = make(weight.shape[1], weight.shape[0], use_bias=bias is not None, dtype=dtype)
    found = layout.slots(layer)
    values = {".weight": weight, ".bias": bias}
    for name, slot in found.items():
        slot.fill(lambda name=name: values[name])
    return layer


@pytest.mark.parametrize("rows", [5, 3 * CHUNK // 1024 // 2])  # in one chunk, in two
def test_each_number_is_rounded_to_the_nearest(rows):
    weight = normal(rows, 1024) * np.linspace(0.01, 100, rows, dtype="float32")[:, None]
    values, scale = rounded(weight)
    assert (values.dtype, scale.dtype) == (np.int8, np.float32)
    np.testing.assert_allclose(scale, np.abs(weight).max(axis=1) / 127, rtol=1e-6)
    assert np.abs(values).max(axis=1).tolist() == [127] * rows
    assert (np.abs(values * scale[:, None] - weight) <= 0.5001 * scale[:, None]).all()


def test_rows_of_zeros_and_rows_that_are_not_finite():
    weight = normal(3, 8)
    weight[0], weight[1, 2] = 0, np.inf
    values, scale = rounded(weight)
    assert not values[0].any()
    assert scale[0] == 0
    assert not np.isfinite(scale[1])
    assert np.abs(values[2]).max() == 127


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 2e-3)]
)
def test_a_product(dtype, bound):
    """The product with the rounded kernel, and the exact one's within its rounding.

    The outputs divided by their scales are beyond float16's range.
    """
    weight, bias, x = 0.01 * normal(24, 96), normal(24), 30 * normal(7, 96)
    layer = filled(weight, bias, dtype)
    y = to_numpy(layer(keras.ops.convert_to_tensor(x, dtype)))
    values, scale = rounded(weight)
    assert error(y, x @ (values * scale[:, None]).T + bias) <= bound
    rounding = np.abs(x).sum(axis=1)[:, None] * scale / 2
    assert (np.abs(y - (x @ weight.T + bias)) <= rounding + bound * np.abs(y).max()).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("storage", ["int8", "float16"])
@pytest.mark.parametrize(
    ("make", "padding", "stride"),
    [(conv, 1, 1), (strided_conv, 0, 2)],
    ids=["conv", "strided"],
)
def test_a_convolution(make, padding, stride, storage, dtype):
    """That of PyTorch with the kernel that is stored; nothing is rounded but the kernel."""
    weight, bias, x = 0.01 * normal(24, 8, 3, 3), normal(24), normal(2, 9, 9, 8)
    layer = filled(weight, bias, dtype, make, storage)
    slot = layout.slots(layer)[".weight"]
    stored = slot.stored("float32")
    assert slot.shape == weight.shape
    assert (
        0
        < np.abs(stored - weight).max()
        <= np.abs(weight).max() / (250 if storage == "int8" else 2000)
    )
    y = to_numpy(layer(keras.ops.convert_to_tensor(x, dtype)))
    expected = torch.nn.functional.conv2d(
        torch.tensor(x).permute(0, 3, 1, 2),
        torch.tensor(stored),
        torch.tensor(bias),
        stride,
        padding,
    )
    bound = 1e-5 if dtype == "float32" else 3e-3
    assert error(y, expected.permute(0, 2, 3, 1).numpy()) <= bound


def test_a_doubling_convolution_in_a_compiled_rewrite():
    """A kernel that is widened in every call is not transformed beforehand."""
    weight, x = 0.01 * normal(64, 64, 3, 3), normal(2, 32, 32, 64)
    layer = filled(weight, make=conv)
    plain = to_numpy(layer(x, doubled_to=(64, 64)))
    with lowered(TARGETS["cpu"]):
        rewritten = to_numpy(layer(x, doubled_to=(64, 64)))
        same = to_numpy(layer(x))
    np.testing.assert_allclose(rewritten, plain, atol=1e-4)
    np.testing.assert_array_equal(same, to_numpy(layer(x)))


def test_an_adapter_beside_it():
    layer, x, a, b = filled(normal(6, 4)), normal(3, 4), normal(4, 2), normal(2, 6)
    alone = to_numpy(layer(x))
    with branches({layer: Branch(a, b, 0.5)}):
        both = to_numpy(layer(x))
    np.testing.assert_allclose(both - alone, 0.5 * x @ a @ b, rtol=1e-3, atol=1e-4)


def test_what_a_slot_stores_and_gives_back():
    weight = normal(6, 4)
    slot = layout.slots(filled(weight))[".weight"]
    assert slot.shape == (6, 4)
    assert np.abs(slot.stored() - weight).max() <= np.abs(weight).max() / 250


@pytest.fixture(scope="module")
def t5():
    module = peer()
    return module, t5_names(stored(module))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_t5_agrees_with_transformers(t5, dtype):
    module, tensors = t5
    model = layout.load(CONFIG, tensors, dtype, "test", "int8")
    tokens = tokens_of(300)
    reference = run(module, tokens)
    agreement = psnr(reference, to_numpy(model(tokens)["context"]), np.ptp(reference))
    print(f"{agreement:.1f} dB")
    assert agreement >= 38


def bytes_of(model):
    variables = [v for slot in layout.slots(model).values() for v in slot.variables.values()]
    sizes = {"int8": 1, "bfloat16": 2, "float32": 4}
    return sum(int(np.prod(v.shape)) * sizes[str(v.dtype)] for v in variables)


def test_bytes_of_the_largest_t5():
    config = FAMILIES["sd3.5-medium"].text_encoders["text_encoder_3"]
    as_computed, narrow = (
        bytes_of(layout.abstract_model(config, "bfloat16", storage)) for storage in (None, "int8")
    )
    print(f"{as_computed / 1e9:.2f} GB, {narrow / 1e9:.2f} GB")
    assert as_computed == 2 * 4_762_310_656
    assert 0.5 <= narrow / as_computed <= 0.52


def test_a_kernel_takes_a_quarter_of_float32():
    layer = filled(normal(64, 512))
    assert bytes_of(layer) == 64 * 512 + 4 * 64


def test_loading_is_strict(t5):
    _, tensors = t5
    name = "encoder.block.1.layer.1.DenseReluDense.wo.weight"
    wrong = StoredTensor((3, 3), "float32", lambda: normal(3, 3))
    missing = {key: tensor for key, tensor in tensors.items() if key != name}
    for changed, message in (
        (missing, f"1 tensors are missing: {name}"),
        ({**tensors, "more.weight": wrong}, "no place in the model: more.weight"),
        ({**tensors, name: wrong}, rf"{name} is \[3, 3\], the model wants \[48, 80\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            layout.load(CONFIG, changed, "float32", "test", "int8")


def test_a_model_whose_tensors_are_read_when_they_are_used(t5):
    _, tensors = t5
    read = []

    def counted(name, tensor):
        def values():
            read.append(name)
            return tensor.read()

        return StoredTensor(tensor.shape, tensor.dtype, values)

    counting = {name: counted(name, tensor) for name, tensor in tensors.items()}
    tokens = tokens_of(9)
    loaded = layout.load(CONFIG, tensors, "float32", "test")
    model = layout.abstract_model(CONFIG)
    with layout.read_when_used((model, counting)):
        context = to_numpy(model(tokens)["context"])
    np.testing.assert_array_equal(context, to_numpy(loaded(tokens)["context"]))
    assert set(read) == set(tensors)
    kernels = [name for name in read if name.endswith(("q.weight", "wo.weight"))]
    assert len(kernels) == len(set(kernels))


def storage_of(family, storage, **more):
    return geometry_of(FAMILIES[family], Fixed(storage=storage, **more)).storage


def test_what_can_be_stored():
    """All parts but the autoencoders, or those that are named."""
    assert storage_of("sd1", "int8") == dict.fromkeys(["text_encoder", "unet"], "int8")
    assert storage_of("flux-dev", "int8:text_encoder_2") == {"text_encoder_2": "int8"}
    assert storage_of("sd1", "float16:unet,vae") == {"unet": "float16", "vae": "float16"}
    assert storage_of("sd1", None) == {}
    assert storage_text(storage_of("sd1", "float16:unet,vae")) == "float16:unet,vae"
    assert storage_text({}) is None
    places = storage_of("sd3.5-medium", "int8:text_encoder_3", adapter_slots=1)
    assert places == {"text_encoder_3": "int8"}


@pytest.mark.parametrize(
    ("storage", "more", "message"),
    [
        ("int3", {}, r"The storage is int8 or float16, for all parts .*Received: int3"),
        ("int8:unit", {}, r"parts are text_encoder, unet, vae\. Received: unit"),
        ("float16", {"precision": "bfloat16"}, "no narrower than bfloat16, in which this is"),
        ("int8", {"adapter_slots": 2}, "`adapter_slots`. Received: text_encoder, unet"),
    ],
)
def test_what_cannot_be_stored(storage, more, message):
    with pytest.raises(ExportError, match=message):
        storage_of("sd1", storage, **more)


@pytest.mark.backend(long=True)
def test_whole_pictures(tmp_path):
    pipeline = peer_transformers.random_pipeline("sd3")
    pipeline.save_pretrained(tmp_path / "checkpoint")
    pipeline.set_progress_bar_config(disable=True)
    ours = drawer(
        tmp_path, {"max_sequence_length": 32}, height=64, width=64, batch_size=2, storage="int8"
    )
    stored = ("text_encoder", "text_encoder_2", "text_encoder_3", "transformer")
    assert ours.manifest.storage == dict.fromkeys(stored, "int8")
    noise = np.random.default_rng(0).standard_normal((2, 8, 8, 16)).astype("float32")
    theirs = pipeline(
        PROMPTS,
        output_type="np",
        max_sequence_length=32,
        latents=channels_first(noise),
        height=64,
        width=64,
        num_inference_steps=6,
        guidance_scale=4.0,
    ).images
    pictures = ours(PROMPTS, noise=noise, num_steps=6, guidance_scale=4.0).images
    check_pictures(pictures, (255 * theirs).round().astype("uint8"), FLOOR)
