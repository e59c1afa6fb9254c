"""The files with the values of SavedModels' variables: shared by hard links, and changed in part.

A SavedModel's values are a bundle: an index of names, and one data file or more. Here each
SavedModel of an export has its weights in one data file, its places for adapters in another, and
its graph of objects in a third. A SavedModel that consists of others links their files, and other
adapters need new files for the places alone.
"""

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from sd_tf.files.publish import link
from sd_tf.runtime.manifest import ExportError
from sd_tf.runtime.mapped import VARIABLES, comes_last

OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
DATA = ".data-00000-of-00001"
WEIGHTS_INDEX = "weights.index"  # beside a divided SavedModel: its first data file is the weights'
PLACES = "_adapters"  # behind a component's name: the attribute with its places for adapters

Rows = Mapping[str, tuple[int, np.ndarray]]  # a variable's name → the first row, rows from there


@contextlib.contextmanager
def full_disk_told() -> Iterator[None]:
    """Raise Python's error of a full disk in place of TensorFlow's, while it writes."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise OSError(errno.ENOSPC, error.message) from error


def place_name(component: str, matrix: str) -> str:
    """Return the name that a matrix of a component's places has in bundles."""
    return f"{component}{PLACES}/{matrix.replace('.', '..')}/.ATTRIBUTES/VARIABLE_VALUE"


def share(parts: Sequence[Path], whole: Path) -> None:
    """Have the SavedModel `whole` use the values of the SavedModels `parts`, instead of its own.

    Raises:
        ExportError: the whole's variables are not those of the parts, by name and shape.
    """
    shapes = [_shapes(path) for path in parts]
    together = {name: shape for one in shapes for name, shape in one.items()}
    if together != _shapes(whole) or len(together) < sum(map(len, shapes)):
        raise ExportError(
            f"The variables of {whole.parent.name} are not those of "
            f"{', '.join(path.parent.name for path in parts)}: this is a defect of sd_tf."
        )
    rebuild(parts, whole)


def rebuild(parts: Sequence[Path], whole: Path | None = None, rows: Rows | None = None) -> None:
    """Divide the bundles of SavedModels, and have `whole` share their values.

    Args:
        rows: new values in the places for adapters.
    """
    with tempfile.TemporaryDirectory(dir=parts[0].parent) as name:
        folder = Path(name)
        values = [_divided(path, folder / str(i), rows or {}) for i, path in enumerate(parts)]
        for path, value in zip(parts, values, strict=True):
            index = path.parent / WEIGHTS_INDEX
            if not index.is_file():  # else the same, and perhaps another export's file, too
                shutil.copyfile(f"{value[0]}.index", index)
            _merge(value, path, folder)
        if whole is not None:
            _merge([one for value in values for one in value], whole, folder)


def _shapes(model: Path) -> dict[str, list[int]]:
    found = tf.train.load_checkpoint(str(model / VARIABLES)).get_variable_to_shape_map()
    return {name: shape for name, shape in found.items() if name != OBJECT_GRAPH}


def _names(model: Path) -> list[str]:
    """Return the names of a SavedModel's variables, in the order in which a file holds them."""
    dtypes = tf.train.load_checkpoint(str(model / VARIABLES)).get_variable_to_dtype_map()
    last = {
        name: comes_last(dtypes[name], tf.TensorShape(shape))
        for name, shape in _shapes(model).items()
    }
    return sorted(last, key=lambda name: (last[name], name))


def _divided(model: Path, folder: Path, rows: Rows) -> list[Path]:
    """Return bundles of a SavedModel's weights and of its places, if it has any.

    The weights are linked from a bundle that was divided before, else copied.
    """
    folder.mkdir()
    names = _names(model)
    places = [name for name in names if f"{PLACES}/" in name]
    weights = folder / "weights"
    index = model.parent / WEIGHTS_INDEX
    if index.is_file():
        shutil.copyfile(index, f"{weights}.index")
        first = min((model / VARIABLES).parent.glob("variables.data-*"))
        link(first, f"{weights}{DATA}")
    else:
        _copy(model / VARIABLES, weights, [name for name in names if name not in places])
    if not places:
        return [weights]
    _copy(model / VARIABLES, folder / "places", places, rows)
    return [weights, folder / "places"]


def _merge(values: Sequence[Path], model: Path, folder: Path) -> None:
    """Make a SavedModel's bundle of links to bundles of values and its own graph of objects."""
    prefix = model / VARIABLES
    with tempfile.TemporaryDirectory(dir=folder) as name:
        own = Path(name) / "graph"
        _copy(prefix, own, [OBJECT_GRAPH])
        linked = [Path(name) / str(i) for i in range(len(values))]
        for source, target in zip(values, linked, strict=True):
            shutil.copyfile(f"{source}.index", f"{target}.index")
            link(f"{source}{DATA}", f"{target}{DATA}")
        for path in prefix.parent.iterdir():
            path.unlink()
        with full_disk_told():
            tf.raw_ops.MergeV2Checkpoints(  # moves the data files
                checkpoint_prefixes=[str(one) for one in (*linked, own)],
                destination_prefix=str(prefix),
                delete_old_dirs=False,
            )


def _copy(source: Path, target: Path, names: Sequence[str], rows: Rows | None = None) -> None:
    """Copy some tensors of a bundle to a bundle of their own, with other rows where given."""
    dtypes = tf.train.load_checkpoint(str(source)).get_variable_to_dtype_map()
    slices = [""] * len(names)
    tensors = tf.raw_ops.RestoreV2(
        prefix=str(source),
        tensor_names=names,
        shape_and_slices=slices,
        dtypes=[dtypes[name] for name in names],
    )
    for i, name in enumerate(names):
        if rows and name in rows:
            first, changed = rows[name]
            where = tf.range(first, first + len(changed))[:, None]
            tensors[i] = tf.tensor_scatter_nd_update(tensors[i], where, changed)
    with full_disk_told():
        tf.raw_ops.SaveV2(
            prefix=str(target), tensor_names=names, shape_and_slices=slices, tensors=tensors
        )
