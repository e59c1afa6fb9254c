"""Pictures that are sent and answered: masks by transparency, and the formats of answers."""

import base64
import io
import json
from dataclasses import dataclass
from typing import Any

from PIL import Image

from sd_tf.runtime.capabilities import PAINT, use_of_picture
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.pictures import PictureError, open_alpha, open_picture
from sd_tf.runtime.png import METADATA
from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.body import MOST_PIXELS

BEST = 100
WHITE = 255
EXIF_FOLDER, USER_COMMENT = 0x8769, 0x9286  # EXIF's numbers for the place of the parameters
ASCII = b"ASCII\0\0\0"
MOST_EXIF = 65_000  # bytes, with which a JPEG's header has room for it


def open_pictures(image: bytes, mask: bytes | None, manifest: Manifest) -> dict[str, Image.Image]:
    """Open the picture and the mask of an edit; white of the mask is painted anew.

    A picture without a mask is its own where the checkpoint paints and the picture has
    transparent places.
    """
    opened = {"image": _opened("image", image, open_picture)}
    if mask is not None:
        alpha = _opened("mask", mask, open_alpha)
        if alpha is None:
            message = "mask has an alpha channel, which is 0 where to paint. This file has none."
            raise RefusedError(422, message, "mask")
        if alpha.size != opened["image"].size:
            sizes = [f"{width}x{height}" for width, height in (opened["image"].size, alpha.size)]
            raise RefusedError(
                422, f"mask has the size of the image, {sizes[0]}. Received: {sizes[1]}", "mask"
            )
        opened["mask"] = _painted(alpha)
    elif use_of_picture(manifest) == PAINT:
        alpha = _opened("image", image, open_alpha)
        if alpha is not None and alpha.getextrema()[0] == 0:
            opened["mask"] = _painted(alpha)
    return opened


def _opened(name: str, content: bytes, how) -> Any:
    try:
        return how(content, MOST_PIXELS)
    except PictureError as error:
        raise RefusedError(422, f"{name}: {error}.", name) from error


def _painted(alpha: Image.Image) -> Image.Image:
    return alpha.point(lambda level: WHITE if level == 0 else 0)


@dataclass(frozen=True)
class Format:
    """The kind of file that pictures are answered as."""

    name: str  # png, jpeg or webp
    quality: int  # of a jpeg or webp, from 0 to BEST, with which a webp loses nothing

    def convert(self, png: str) -> str:
        """Return a PNG as a file of this format, both in base64, with the parameters that it has.

        JPEG and WebP have them in EXIF's UserComment, a JPEG only if there is room.
        """
        if self.name == "png":
            return png
        file = io.BytesIO()
        with Image.open(io.BytesIO(base64.b64decode(png)), formats=["PNG"]) as image:
            exif = _exif(image.text.get(METADATA))
            has_room = self.name != "jpeg" or len(exif) <= MOST_EXIF
            options: dict[str, Any] = {"exif": exif} if exif and has_room else {}
            if self.name == "jpeg":
                options["subsampling"] = 0  # colours at full resolution
            else:
                options["lossless"] = self.quality == BEST
            image.save(file, self.name, quality=self.quality, **options)
        return base64.b64encode(file.getvalue()).decode()


def _exif(text: str | None) -> bytes:
    """Return EXIF data that holds JSON, written in ASCII alone; none for no JSON."""
    if text is None:
        return b""
    exif = Image.Exif()
    exif.get_ifd(EXIF_FOLDER)[USER_COMMENT] = ASCII + json.dumps(json.loads(text)).encode()
    return exif.tobytes()
