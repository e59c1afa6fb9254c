"""Pictures as they come, in any mode and turned any way, as upright 8-bit RGB."""

import io
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError


class PictureError(ValueError):
    """What is wrong with it, as the end of a sentence that names it."""


def open_picture(source: bytes | str | Path, most_pixels: float = math.inf) -> Image.Image:
    """Upright and RGB, of the file's own size."""
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if math.prod(image.size) > most_pixels:
                raise PictureError(f"the picture has more than {most_pixels} pixels")
            return to_rgb(ImageOps.exif_transpose(image))
    except (FileNotFoundError, PictureError):
        raise
    except UnidentifiedImageError as error:
        raise PictureError("this is not a picture") from error
    except Exception as error:  # Pillow has many ways to say damaged, or too large
        raise PictureError(f"the picture is damaged ({error})") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """What is transparent becomes white, 16 bits become 8; every other mode as Pillow has it."""
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype("float64")
        is_16_bit = image.mode != "I" or levels.max() > 255  # "I" has 32, its values any range
        scale = 255.0 / 65535.0 if is_16_bit else 1.0
        return Image.fromarray(np.round(levels * scale).clip(0, 255).astype("uint8")).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def square(image: Image.Image, size: int) -> Image.Image:
    """Its middle, scaled to `size`."""
    return ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)


def levels(picture, size: tuple[int, int]) -> np.ndarray:
    """A PIL image, scaled to `size` (width, height), or an array of it: uint8 (H, W, 3)."""
    if isinstance(picture, Image.Image):
        return _scaled(to_rgb(picture), size, Image.Resampling.LANCZOS)
    return _checked(picture, (size[1], size[0], 3))


def grays(picture, size: tuple[int, int]) -> np.ndarray:
    """The same of a mask: uint8 (H, W)."""
    if isinstance(picture, Image.Image):
        return _scaled(to_rgb(picture).convert("L"), size, Image.Resampling.NEAREST)
    return _checked(picture, (size[1], size[0]))


def _scaled(image: Image.Image, size: tuple[int, int], resample: Image.Resampling) -> np.ndarray:
    return np.asarray(image if image.size == size else image.resize(size, resample))


def _checked(picture, expected: tuple[int, ...]) -> np.ndarray:
    picture = np.asarray(picture)
    if picture.shape != expected or picture.dtype != np.uint8:
        raise ValueError(
            f"A picture is a PIL image, or an array of uint8 {expected}. "
            f"Received: {picture.dtype} {picture.shape}"
        )
    return picture


def to_model(pictures: np.ndarray) -> np.ndarray:
    """uint8 → float32 in [-1, 1]."""
    return pictures.astype("float32") / 127.5 - 1.0
