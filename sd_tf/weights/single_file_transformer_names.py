"""Give SD3's and Flux's original tensors diffusers' names, and divide those that are fused."""

from collections.abc import Mapping

from sd_tf.config.original_transformer_names import Names
from sd_tf.files.tensors import StoredTensor

LEAVES = {"scale": "weight"}  # of an RMS norm
POSITIONS = {"pos_embed": "pos_embed.pos_embed"}  # a table, which is no module's


def renamed(
    tensors: Mapping[str, StoredTensor], names: Names, width: int, swapped: set[str]
) -> dict[str, StoredTensor]:
    """Return a transformer's tensors by diffusers' names; unknown ones keep their own.

    Args:
        width: of the hidden states: the rows of each part of a fused tensor but the last.
        swapped: modules whose output is (shift, scale), while diffusers' is (scale, shift).
    """
    result = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if module in swapped:
            tensor = tensor.with_halves_swapped()
        found = names.of(module)
        leaf = LEAVES.get(leaf, leaf)
        if found is None:
            result[POSITIONS.get(name, name)] = tensor
        elif isinstance(found, str):
            result[f"{found}.{leaf}"] = tensor
        else:
            bounds = [*range(0, width * len(found), width), tensor.shape[0]]
            for part, start, stop in zip(found, bounds, bounds[1:], strict=False):
                result[f"{part}.{leaf}"] = tensor.rows(start, stop)
    return result
