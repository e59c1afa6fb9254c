"""`python -m sd_tf.generate "a prompt"`: PNG files that say how they were made."""

import argparse
import io
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from PIL import Image, PngImagePlugin, UnidentifiedImageError

from sd_tf.chain import Chain
from sd_tf.config import ConfigError
from sd_tf.manifest import ExportError, Manifest
from sd_tf.pictures import PictureError, open_picture
from sd_tf.request import DEFAULT_GUIDANCE, DEFAULT_STEPS

METADATA = "sd_tf"
REPEATED = (
    *("prompt", "negative_prompt", "num_steps", "guidance_scale", "image_guidance_scale"),
    *("strength", "seed", "scheduler"),
)
CONTACT_SHEET = "contact_sheet.png"
MARGIN = 8


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        return run(options)
    except (ExportError, ConfigError, ValueError, OSError) as error:
        print(f"sd_tf.generate: {error}", file=sys.stderr)
        return 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sd_tf.generate",
        description="Make pictures with an export; each PNG holds its own parameters.",
    )
    add_arguments(parser)
    parser.add_argument(
        "--export_dir",
        help="what serialize_savedmodels.py wrote (default: the embedded checkpoint's, or with "
        "--image and no --strength the embedded editor's, made on first use)",
    )
    parser.add_argument("--compile_cache", help="folder where compiled code is kept")
    options = parser.parse_args(argv)
    if message := misused(options):
        parser.error(message)
    return options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to draw and where to put it, wherever the models run."""
    parser.add_argument("prompt", nargs="*", help="one picture for each prompt (times --count)")
    parser.add_argument("--out", default="out", help="folder for the pictures (default: out)")
    parser.add_argument("--negative_prompt")
    parser.add_argument("--num_steps", type=int)
    parser.add_argument("--guidance_scale", type=float)
    parser.add_argument("--seed", type=int, help="of the first picture; the next ones count up")
    parser.add_argument("--scheduler")
    parser.add_argument("--count", type=int, default=1, help="pictures for each prompt")
    parser.add_argument("--image", help="a picture to start from, or to edit as the prompt says")
    parser.add_argument(
        "--image_guidance_scale", type=float, help="how strongly an edit keeps the picture"
    )
    parser.add_argument("--mask", help="where to paint (white), for inpainting checkpoints")
    parser.add_argument("--strength", type=float, help="how far to leave the image, above 0 to 1")
    parser.add_argument("--from_png", help="repeat the picture in this file; options override it")
    parser.add_argument("--nojit_compile", action="store_true", help="run without XLA")


def misused(options: argparse.Namespace) -> str | None:
    if not options.prompt and not options.from_png:
        return "give a prompt, or --from_png"
    if options.count < 1:
        return f"--count is at least 1. Received: {options.count}"
    if options.export_dir is None and options.mask is not None:
        return "no embedded checkpoint paints in a mask: give --export_dir"
    return None


@dataclass(frozen=True)
class Wanted:
    """What the options ask for, in the words of a chain's call."""

    prompts: list[str]
    parameters: dict[str, Any]  # those that a PNG tells about itself
    pictures: dict[str, Any]  # image, mask


def read_wanted(options: argparse.Namespace) -> Wanted:
    parameters, needed = read_parameters(options.from_png) if options.from_png else ({}, [])
    if missing := [name for name in needed if getattr(options, name) is None]:
        raise ValueError(
            f"{options.from_png} was made with {' and '.join(needed)}; to repeat it, give "
            f"{', '.join('--' + name for name in missing)} again."
        )
    given = {name: getattr(options, name) for name in REPEATED}
    given["prompt"] = options.prompt or None
    parameters |= {name: value for name, value in given.items() if value is not None}
    prompts = parameters.pop("prompt")
    prompts = [prompts] if isinstance(prompts, str) else prompts
    prompts = [prompt for prompt in prompts for _ in range(options.count)]
    pictures = {}
    for name in ("image", "mask"):
        if getattr(options, name) is not None:
            pictures[name] = _opened(getattr(options, name))
    return Wanted(prompts, parameters, pictures)


def _opened(path: str) -> Image.Image:
    try:
        return open_picture(path)
    except PictureError as error:
        raise ValueError(f"{path}: {error}.") from error


def run(options: argparse.Namespace) -> int:
    if options.compile_cache is not None:  # TensorFlow calls its own entries errors
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    from sd_tf.pipeline import Pipeline

    wanted = read_wanted(options)
    export_dir = options.export_dir
    if export_dir is None:
        export_dir, suited = _embedded(wanted)
        wanted = replace(wanted, parameters={**suited, **wanted.parameters})
    pipe = Pipeline.load(
        export_dir,
        jit_compile=not options.nojit_compile,
        compile_cache=options.compile_cache,
    )
    print(f"loaded {export_dir} in {pipe.load_seconds:.1f} s", flush=True)
    draw(pipe, wanted, Path(options.out))
    return 0


def _embedded(wanted: Wanted) -> tuple[Path, dict[str, Any]]:
    """Of the checkpoint that draws; with a picture and no strength, of the one that edits."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    from sd_tf.embedded import embedded_export

    edits = "image" in wanted.pictures and "strength" not in wanted.parameters
    return embedded_export(edits, lambda text: print(text, flush=True))


def draw(chain: Chain, wanted: Wanted, folder: Path, progress: bool = True) -> None:
    """Make the pictures, save each with its parameters, print where they are."""
    batches = math.ceil(len(wanted.prompts) / chain.manifest.batch_size)
    bar = Bar(batches) if progress else None
    result = chain(wanted.prompts, **wanted.parameters, **wanted.pictures, callback=bar)
    folder.mkdir(parents=True, exist_ok=True)
    for prompt, seed, image in zip(wanted.prompts, result.seeds, result.images, strict=True):
        content = described(
            chain.manifest,
            sorted(wanted.pictures),
            prompt=prompt,
            **wanted.parameters | {"seed": seed},
        )
        path = folder / f"{seed}.png"
        number = 1
        while path.exists():
            path = folder / f"{seed}-{number}.png"
            number += 1
        path.write_bytes(png_bytes(image, content))
        print(path)
    if len(wanted.prompts) > 1:
        contact_sheet(result.images).save(folder / CONTACT_SHEET)
        print(folder / CONTACT_SHEET)
    print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in result.timings.items()))


def described(manifest: Manifest, pictures: Sequence[str] = (), **parameters) -> dict[str, Any]:
    """What a PNG tells about itself; `pictures`: names of those that it was made from."""
    return {
        "num_steps": DEFAULT_STEPS,
        "guidance_scale": DEFAULT_GUIDANCE,
        "scheduler": manifest.default_sampler,
        **parameters,
        "pictures": list(pictures),
        "checkpoint": manifest.checkpoint,
    }


def png_bytes(image: np.ndarray, content: dict[str, Any]) -> bytes:
    """A picture, uint8 (H, W, 3), as a PNG that holds its parameters."""
    information = PngImagePlugin.PngInfo()
    information.add_itxt(METADATA, json.dumps(content, ensure_ascii=False))
    png = io.BytesIO()
    Image.fromarray(image).save(png, "PNG", pnginfo=information)
    return png.getvalue()


def read_parameters(path: str) -> tuple[dict, list[str]]:
    """What a PNG of ours says about itself: keywords of the pipeline, and what else it needs."""
    try:
        with Image.open(path) as image:
            text = getattr(image, "text", {}).get(METADATA)
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is not a picture.") from error
    if text is None:
        raise ValueError(f"{path} was not made by sd_tf.generate: it holds no parameters.")
    content = json.loads(text)
    return {name: content[name] for name in REPEATED if name in content}, content["pictures"]


def contact_sheet(images: np.ndarray) -> Image.Image:
    """All pictures (N, H, W, 3) on one page."""
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


class Bar:
    """A progress bar over all batches, drawn only on a terminal."""

    def __init__(self, batches: int, width: int = 30):
        self.batches, self.width = batches, width
        self.finished = 0
        self.start = time.perf_counter()

    def __call__(self, done: int, calls: int, latents) -> None:
        share = (self.finished + done / calls) / self.batches
        if done == calls:
            self.finished += 1
        if not sys.stderr.isatty():
            return
        filled = round(share * self.width)
        left = (time.perf_counter() - self.start) * (1 / share - 1)
        print(
            f"\r|{'█' * filled}{' ' * (self.width - filled)}| {share:4.0%} "
            f"batch {min(self.finished + 1, self.batches)}/{self.batches}, {left:.0f} s left ",
            end="\n" if share >= 1 else "",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
