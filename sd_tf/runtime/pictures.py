"""Read pictures of any mode and orientation as upright 8-bit RGB."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sd_tf.errors import SdTfError

# The only formats that are decoded: Pillow has decoders that start programs, as EPS, and that fill
# the memory before the size of the picture is known, as ICO.
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF")
# Of the pictures that CLIP was trained with, by channel.
CLIP_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], "float32")
CLIP_STD = np.array([0.26862954, 0.26130258, 0.27577711], "float32")
MOST_RATIO = 50  # of the sides of a picture that is a prompt, which is scaled by its short one
MARGIN = 8  # pixels around each picture of a contact sheet


class PictureError(SdTfError):
    """A picture that cannot be used; the message ends a sentence that names the picture."""


def open_picture(source: bytes | str | Path, most_pixels: float = math.inf) -> Image.Image:
    """Open a picture, upright and RGB, in its own size."""
    return _opened(source, most_pixels, lambda image: to_rgb(ImageOps.exif_transpose(image)))


def open_hint(source: bytes | str | Path, most_pixels: float = math.inf) -> Image.Image:
    """Open a control picture, upright, in its own size and mode, which `hint` scales it in."""
    return _opened(source, most_pixels, ImageOps.exif_transpose)


def count_pixels(source: bytes | str | Path, most_pixels: float = math.inf) -> int:
    """Return the number of a picture's pixels, without decoding it."""
    return _opened(source, most_pixels, lambda image: math.prod(image.size))


def check_picture(source: str | Path) -> Image.Image:
    """Check that a whole picture can be read; return a black one, small, of its proportions."""

    def black(image: Image.Image) -> Image.Image:
        short = min(image.size)
        sides = [math.ceil(side / short) for side in image.size]
        image.draft(None, (1, 1))  # a JPEG is decoded at an eighth of its size
        to_rgb(ImageOps.exif_transpose(image))
        return Image.new("RGB", sides)

    return _opened(source, math.inf, black)


def open_alpha(source: bytes | str | Path, most_pixels: float = math.inf) -> Image.Image | None:
    """Open a picture's alpha channel, upright, 0 where it is transparent; None: it has none."""
    return _opened(source, most_pixels, lambda image: _alpha(ImageOps.exif_transpose(image)))


def _opened(source, most_pixels: float, convert: Callable[[Image.Image], Any]) -> Any:
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(file, formats=FORMATS) as image:  # decodes nothing yet
            if math.prod(image.size) > most_pixels:
                raise PictureError(f"the picture has more than {most_pixels} pixels")
            return convert(image)
    except (FileNotFoundError, PictureError):
        raise
    except IsADirectoryError as error:
        raise PictureError("this is a folder") from error
    except UnidentifiedImageError as error:
        raise PictureError("this is not a PNG, JPEG, WebP or AVIF picture") from error
    except Exception as error:  # Pillow raises many types for damaged or too large files
        raise PictureError(f"the picture is damaged ({error})") from error


def _alpha(image: Image.Image) -> Image.Image | None:
    return image.convert("RGBA").getchannel("A") if image.has_transparency_data else None


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to 8-bit RGB: transparency becomes white, and 16 bits are scaled to 8."""
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype("float64")
        is_16_bit = image.mode != "I" or levels.max() > 255  # "I" has 32 bits, of any range
        scale = 255.0 / 65535.0 if is_16_bit else 1.0
        return Image.fromarray(np.round(levels * scale).clip(0, 255).astype("uint8")).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def square(image: Image.Image, size: int) -> Image.Image:
    """Cut out the middle square, scaled to `size`."""
    return ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)


def levels(picture, size: tuple[int, int]) -> np.ndarray:
    """Return a picture as uint8 (H, W, 3): a PIL image scaled to `size`, or an array of it.

    `size` is (width, height).
    """
    if isinstance(picture, Image.Image):
        return _scaled(to_rgb(picture), size, Image.Resampling.LANCZOS)
    return _checked(picture, (size[1], size[0], 3))


def hint(picture, size: tuple[int, int]) -> np.ndarray:
    """Return a control picture as uint8 (H, W, 3), as diffusers' pipelines of ControlNets take it.

    A PIL image is scaled to `size`, (width, height), in its own mode; one with transparent pixels
    as RGBA, and they become black. (Diffusers shows their colours where nothing is scaled, and
    scales palettes as they are.) 16 bits become 8 first, where diffusers clips them.
    """
    if not isinstance(picture, Image.Image):
        return levels(picture, size)
    if picture.mode.startswith("I"):
        picture = to_rgb(picture)
    if picture.has_transparency_data:
        weighted = picture.convert("RGBA").convert("RGBa")  # by alpha, as Pillow scales them
        scaled = weighted.resize(size, Image.Resampling.LANCZOS).convert("RGBA")
    else:
        scaled = picture.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(scaled.convert("RGB"))


def middle(picture, size: int) -> np.ndarray:
    """Return the middle square of a picture as uint8 (S, S, 3), as CLIP's vision encoder takes it.

    The whole picture, a PIL image or an array, is scaled by its short side before it is cropped.
    """
    if not isinstance(picture, Image.Image):
        array = np.asarray(picture)
        picture = Image.fromarray(_checked(array, (*array.shape[:2], 3)))
    image = to_rgb(picture)
    short, long = sorted(image.size)
    if not short:
        raise ValueError(f"A picture has pixels. Received: {image.width}x{image.height}")
    ratio = math.ceil(long / short)
    if ratio > MOST_RATIO:
        raise ValueError(
            f"A picture that is a prompt is at most {MOST_RATIO} times as long as it is wide. "
            f"Received: {ratio} times"
        )
    sides = [size if side == short else int(size * long / short) for side in image.size]
    left, top = ((side - size) // 2 for side in sides)
    scaled = image.resize(sides, Image.Resampling.BICUBIC)
    return np.asarray(scaled.crop((left, top, left + size, top + size)))


def grays(picture, size: tuple[int, int]) -> np.ndarray:
    """Return a mask as uint8 (H, W): a PIL image scaled to `size`, or an array of it."""
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
    """Convert uint8 pictures to float32 in [-1, 1], as the models take them."""
    return pictures.astype("float32") / 127.5 - 1.0


def to_vision(pictures: np.ndarray) -> np.ndarray:
    """Convert uint8 pictures to float32 as CLIP's vision encoder takes them."""
    return (pictures.astype("float32") / np.float32(255) - CLIP_MEAN) / CLIP_STD


def contact_sheet(images: np.ndarray) -> Image.Image:
    """Arrange all pictures (N, H, W, 3) on one page."""
    count, height, width, _ = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    size = (columns * (width + MARGIN) + MARGIN, rows * (height + MARGIN) + MARGIN)
    sheet = Image.new("RGB", size, "white")
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        place = (MARGIN + column * (width + MARGIN), MARGIN + row * (height + MARGIN))
        sheet.paste(Image.fromarray(image), place)
    return sheet
