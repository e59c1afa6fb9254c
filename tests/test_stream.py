"""Safetensors files written tensor by tensor, against the library's own."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sd_tf.files.stream import write_safetensors
from sd_tf.files.tensors import DTYPES, StoredTensor


def stored(value):
    return StoredTensor(value.shape, value.dtype.name, lambda: value)


def random_values(names):
    rng = np.random.default_rng(0)
    values = {
        f"{'é' * number}{name}": rng.integers(0, 2, (number, 3)).astype(DTYPES[name])
        for number, name in enumerate(names)
    }
    return values | {"scalar": np.array(3, "float32"), "zeta": np.arange(7, dtype="uint8")}


def test_equals_the_library_s_file(tmp_path):
    """Byte for byte, where dtypes differ in width: a scalar, an empty tensor, names of UTF-8."""
    values, metadata = random_values(["F32", "F64", "BF16", "U8"]), {"format": "pt"}
    save_file(values, tmp_path / "theirs.safetensors", metadata)
    tensors = {name: stored(value) for name, value in values.items()}
    write_safetensors(tensors, tmp_path / "ours.safetensors", metadata)
    ours, theirs = (tmp_path / f"{name}.safetensors" for name in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_all_dtypes(tmp_path):
    values = random_values([name for name in DTYPES if not name.startswith("F8")])
    file = tmp_path / "file.safetensors"
    write_safetensors({name: stored(value) for name, value in values.items()}, file, {})
    found = load_file(file)
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((2, 2), "float32"), r"must be float32 \[4\]\. Received: float32 \[2, 2\]"),
        (np.zeros(4, "float64"), r"must be float32 \[4\]\. Received: float64 \[4\]"),
    ],
)
def test_a_tensor_that_is_not_what_it_says(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        write_safetensors(
            {"weight": StoredTensor((4,), "float32", lambda: value)}, tmp_path / "file", {}
        )
