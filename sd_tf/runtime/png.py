"""PNG files that hold the parameters of the call that made them."""

import io
import json
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from sd_tf.runtime.call import Call
from sd_tf.runtime.manifest import Manifest

METADATA = "sd_tf"


def metadata(call: Call, manifest: Manifest) -> dict[str, Any]:
    """Return a PNG's metadata: the call of its picture, and the checkpoint."""
    pictures = call.picture_counts()
    return {**call.described(), "pictures": pictures, "checkpoint": manifest.checkpoint}


def png_bytes(image: np.ndarray, content: dict[str, Any]) -> bytes:
    """Encode a picture, uint8 (H, W, 3), as a PNG that holds its parameters."""
    information = PngImagePlugin.PngInfo()
    information.add_itxt(METADATA, json.dumps(content, ensure_ascii=False))
    png = io.BytesIO()
    Image.fromarray(image).save(png, "PNG", pnginfo=information)
    return png.getvalue()


def read_parameters(path: str) -> tuple[dict[str, Any], dict[str, list[int | None] | None]]:
    """Read a PNG's parameters, and the names of those pictures that it was made from.

    Each has how many pictures each of several models had, None for one without; where the
    parameter is one picture, or an older sd_tf did not say, it has None.
    """
    try:
        with Image.open(path, formats=["PNG"]) as image:
            text = getattr(image, "text", {}).get(METADATA)
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not a PNG file.") from error
    except OSError:
        raise
    except Exception as error:  # Pillow raises many types for damaged files
        raise ValueError(f"{path} is damaged ({error}).") from error
    if text is None:
        raise ValueError(f"{path} was not made by sd_tf: it holds no parameters.")
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if content == {}:
        raise ValueError(
            f"{path} is a preview, taken while a picture was drawn: it holds no parameters. Give "
            f"the finished picture."
        )
    pictures = content.get("pictures") if isinstance(content, dict) else None
    if isinstance(pictures, list) and all(isinstance(name, str) for name in pictures):
        pictures = dict.fromkeys(pictures)  # as older versions wrote them
    known = Call.parameters()
    if not isinstance(pictures, dict) or not all(
        name in known and known[name].is_file and _are_counts(counts)
        for name, counts in pictures.items()
    ):
        raise ValueError(f"{path} holds something else than the parameters that sd_tf writes.")
    return {name: content[name] for name in known if name in content}, pictures


def _are_counts(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, list) and all(one is None or type(one) is int for one in value)
