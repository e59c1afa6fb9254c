"""Convert the JSON of TensorFlow Serving's REST API to arrays and back, as its `json_tensor.cc`."""

import base64
import binascii
import itertools
import json

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from sd_tf.serving.tf_serving.predict import ModelError, dtype_name, invalid

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
MOST_DIMENSIONS = 32  # of a tensor; NumPy has 64


# JSON → arrays


def from_rows(content, infos, most: int) -> dict[str, np.ndarray]:
    """Read `instances`: each element is a row of the only input, or an object of rows by input.

    Args:
        most: the largest number of rows that the inputs take.
    """
    instances = content["instances"]
    if not isinstance(instances, list):
        raise invalid(f"JSON Value: {shown(content)} Excepting 'instances' to be an list/array")
    if not instances:
        raise invalid(f"JSON Value: {shown(content)} No values in 'instances' array")
    if len(instances) > most:
        raise invalid(f"'instances' has at most {most} rows. Received: {len(instances)}")
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
                f"{shown(element)} keys must be equal to: {','.join(columns)}"
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


def from_columns(inputs, infos) -> dict[str, np.ndarray]:
    """Read `inputs`: an object with all inputs, or the value of the only one."""
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
    """Turn nested lists into an array; the first elements tell the shape that all must have."""
    shape, first = [], value
    while isinstance(first, list):
        shape.append(len(first))
        first = first[0] if first else None
    if len(shape) > MOST_DIMENSIONS:
        raise invalid(f"A tensor of {len(shape)} dimensions")
    flat = [value]
    for level, size in enumerate(shape):
        for item in flat:
            if not isinstance(item, list):
                raise invalid(
                    f"JSON Value: {shown(item)} found at incorrect level: {level + 1} in the "
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
    return np.array(_values(flat, dtype, target), target).reshape(shape)


def _values(flat: list, dtype: int, target) -> list:
    """Check that each leaf has the input's type and fits into it."""
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
            f"Conversion of JSON Value: {shown(flat[:1])} to type: {dtype_name(dtype)}",
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
                f"Cannot convert JSON value: {shown(value)} to {dtype_name(dtype)} without loss "
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
        raise invalid(f"JSON Value: {shown(value)} not formatted correctly for base64 data")
    if not isinstance(value, str):
        raise _type_error(value, types_pb2.DT_STRING)
    return value.encode("utf-8", errors="replace")


def _type_error(value, dtype: int) -> ModelError:
    return invalid(
        f"JSON Value: {shown(value)} Type: {JSON_TYPES[type(value)]} is not of expected type: "
        f"{dtype_name(dtype)}"
    )


def shown(value) -> str:
    """Return the start of a value's JSON; the rest is not written at all."""
    text = ""
    for part in json.JSONEncoder().iterencode(value):
        text += part
        if len(text) > SHOWN:
            return text[:SHOWN] + "…"
    return text


def _shape(array: np.ndarray) -> str:
    return f"[{','.join(map(str, array.shape))}]"


# Arrays → JSON


def as_rows(outputs: dict[str, np.ndarray]) -> list:
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


def as_columns(outputs: dict[str, np.ndarray]):
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
    """Round float32 numbers as the server writes them: to six digits if exact, else to nine."""
    values = array.ravel().tolist()
    short = np.array([float(f"{value:g}") for value in values])
    exact = np.array([float(f"{value:.9g}") for value in values])
    with np.errstate(over="ignore"):
        return np.where(short.astype("float32") == array.ravel(), short, exact).reshape(array.shape)
