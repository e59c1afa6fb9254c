"""Control pictures made from ordinary ones, as the published ControlNets were trained with them.

Only the kinds that need no network of their own. OpenCV is imported when it is first needed.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image

CANNY_LOW, CANNY_HIGH = 100, 200
BLURS = (0.5, 5.0)  # σ of the two blurs whose difference is a scribble
SCRIBBLE_THRESHOLD = 32
TILE_FACTOR = 4


def canny(image: Image.Image, low: int = CANNY_LOW, high: int = CANNY_HIGH) -> Image.Image:
    """Draw the edges that Canny's method finds, white on black."""
    import cv2

    return Image.fromarray(cv2.Canny(np.asarray(image), low, high)).convert("RGB")


def scribble(image: Image.Image, threshold: int = SCRIBBLE_THRESHOLD) -> Image.Image:
    """Draw thick lines where the picture is darker than around, white on black (XDoG)."""
    import cv2

    levels = np.asarray(image).astype("float32")
    fine, coarse = (cv2.GaussianBlur(levels, (0, 0), sigma) for sigma in BLURS)
    difference = (255 - np.min(coarse - fine, axis=2)).clip(0, 255).astype("uint8")
    lines = 2 * (255 - difference.astype("int32")) > threshold
    return Image.fromarray((255 * lines).astype("uint8")).convert("RGB")


def gray(image: Image.Image) -> Image.Image:
    """Take the colours away."""
    return image.convert("L").convert("RGB")


def tile(image: Image.Image, factor: int = TILE_FACTOR) -> Image.Image:
    """Take the details away: make the picture smaller by a factor, and as large again."""
    small = [max(side // factor, 1) for side in image.size]
    return image.resize(small, Image.Resampling.BOX).resize(image.size, Image.Resampling.BICUBIC)


KINDS: dict[str, Callable[..., Image.Image]] = {
    "canny": canny,
    "scribble": scribble,
    "gray": gray,
    "tile": tile,
}
