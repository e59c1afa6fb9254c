"""Values of variables that several SavedModels share on the disk, by hard links.

A SavedModel's values are a bundle: an index of names, and one data file or more. What is needed for
sharing are bundles that have a part's values alone: its data file is then linked into the bundle of
each SavedModel with that part, beside a small one with the SavedModel's own graph of objects.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from sd_tf.files.publish import link
from sd_tf.runtime.manifest import ExportError

OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
VARIABLES = "variables/variables"  # of a SavedModel
DATA = ".data-00000-of-00001"


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
    with tempfile.TemporaryDirectory(dir=whole.parent) as name:
        folder = Path(name)
        values = [_divided(path, folder / str(i), shapes[i]) for i, path in enumerate(parts)]
        for path, value in zip(parts, values, strict=True):
            _merge([value], path, folder)
        _merge(values, whole, folder)


def _shapes(model: Path) -> dict[str, list[int]]:
    found = tf.train.load_checkpoint(str(model / VARIABLES)).get_variable_to_shape_map()
    return {name: shape for name, shape in found.items() if name != OBJECT_GRAPH}


def _divided(model: Path, folder: Path, names: Sequence[str]) -> Path:
    """Copy the values of a SavedModel's variables, without its graph of objects, to a bundle."""
    folder.mkdir()
    _copy(model / VARIABLES, folder / "values", sorted(names))
    return folder / "values"


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
        tf.raw_ops.MergeV2Checkpoints(  # moves the data files
            checkpoint_prefixes=[str(one) for one in (*linked, own)],
            destination_prefix=str(prefix),
            delete_old_dirs=False,
        )


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    """Copy some tensors of a bundle to a bundle of their own."""
    dtypes = tf.train.load_checkpoint(str(source)).get_variable_to_dtype_map()
    slices = [""] * len(names)
    tensors = tf.raw_ops.RestoreV2(
        prefix=str(source),
        tensor_names=names,
        shape_and_slices=slices,
        dtypes=[dtypes[name] for name in names],
    )
    tf.raw_ops.SaveV2(
        prefix=str(target), tensor_names=names, shape_and_slices=slices, tensors=tensors
    )
