"""The pictures without which an export can make nothing, and blank ones in their place."""

import numpy as np

from sd_tf.runtime.call import Call
from sd_tf.runtime.kinds import Kind
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.parameter import Parameter
from sd_tf.runtime.shapes import Size

GRAY, WHITE = 128, 255


def needed_pictures(manifest: Manifest) -> list[Parameter]:
    """Return the parameters of the pictures without which the export can make nothing."""
    known = Call.parameters().values()
    return [one for one in known if one.is_file and one.needed_by.holds(manifest)]


def blank_pictures(manifest: Manifest, shape: Size) -> dict[str, np.ndarray]:
    """Return a value for each needed picture: a gray one, a mask that lets all be painted."""
    blank = {
        Kind.PICTURE: np.full((*shape, 3), GRAY, "uint8"),
        Kind.MASK: np.full(shape, WHITE, "uint8"),
    }
    return {one.name: blank[one.kind] for one in needed_pictures(manifest)}
