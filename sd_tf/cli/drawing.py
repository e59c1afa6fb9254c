"""Which pictures a command makes and where it puts them, wherever the models run."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sd_tf.cli.parameters import add_parameters, given
from sd_tf.cli.progress import Progress
from sd_tf.files import atomic
from sd_tf.runtime.call import Call
from sd_tf.runtime.capabilities import MIXING
from sd_tf.runtime.chain import Chain
from sd_tf.runtime.parameter import Parameter
from sd_tf.runtime.pictures import PictureError, contact_sheet
from sd_tf.runtime.png import metadata, png_bytes, read_parameters
from sd_tf.runtime.request import read_request

CONTACT_SHEET = "contact_sheet"
LISTED = 10  # of the pictures that are missing
LITTLE_GUIDANCE = (
    "Warning: a guidance_scale of {:g}: 0 draws the negative prompt alone, 1 the prompt alone. For "
    "a checkpoint that was published with 0, meaning no guidance (SDXL-Turbo, Lightning), give 1, "
    "or export it with --guidance=none."
)


def add_drawing_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for pictures and their folder, which all commands that draw share."""
    add_parameters(parser, prompt="what to make: one picture for each prompt, times --count")
    parser.add_argument(
        "--count", type=int, default=1, help="pictures for each prompt (default: 1)"
    )
    parser.add_argument("--out", default="out", help="folder for the pictures (default: out)")
    parser.add_argument("--from_png", help="repeat the picture in this file; options override it")


def read_wanted(options: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters given by the options and --from_png, with opened pictures."""
    if not options.prompt and not options.from_png:
        raise ValueError("Give a prompt, or --from_png.")
    if options.count < 1:
        raise ValueError(f"--count is at least 1. Received: {options.count}")
    parameters, needed = read_parameters(options.from_png) if options.from_png else ({}, {})
    parameters |= given(options)
    known = Call.parameters()
    files = [name for name in parameters if known[name].is_file]
    for name in files:
        parameters[name] = known[name].paths(parameters[name], os.path.isfile)
    if missing := [name for name in needed if not _is_as_before(name, needed, parameters)]:
        flags = ", ".join(_flags(name, needed[name]) for name in missing)
        raise ValueError(
            f"{options.from_png} was made with {' and '.join(needed)}; to repeat it, give {flags} "
            f"again."
        )
    prompts = parameters["prompt"]
    prompts = [prompts] if isinstance(prompts, str) else prompts
    parameters["prompt"] = [prompt for prompt in prompts for _ in range(options.count)]
    for name in files:
        parameters[name] = _opened(parameters[name], known[name])
    return parameters


def _is_as_before(name: str, needed: Mapping[str, Any], parameters: Mapping[str, Any]) -> bool:
    """Whether a picture is given, and as many for each of several models as before."""
    value, counts = parameters.get(name), needed[name]
    if value is None or counts is None:
        return value is not None
    return Call.parameters()[name].counts(value, len(counts)) == counts


def _flags(name: str, counts: Sequence[int | None] | None) -> str:
    """Return the flags that give pictures anew: one for each of several models."""
    if counts in (None, [1]):
        return f"--{name}"
    files = [",".join(["FILE"] * (count or 0)) for count in counts]
    return " ".join(f"--{name} {file}" if file else f"--{name}=" for file in files)


def _opened(path: Any, known: Parameter) -> Any:
    """Open a picture, or those for several models, where None stands for no picture."""
    if path is None:
        return None
    if isinstance(path, list):
        return [_opened(one, known) for one in path]
    try:
        return known.open_file(path)
    except PictureError as error:
        raise ValueError(f"{path}: {error}.") from error


def draw(chain: Chain, wanted: dict[str, Any], folder: Path, progress: bool = True) -> None:
    """Make the pictures, save each batch as soon as it is done, and print the files' paths.

    An error or Ctrl+C leaves the saved pictures in place, and the missing ones are listed.
    """
    each = read_request(chain.manifest, Call.of(**wanted)).each
    if MIXING.holds(chain.manifest) and 0 <= each[0].guidance_scale < 1:
        print(LITTLE_GUIDANCE.format(each[0].guidance_scale), file=sys.stderr)
    batches, images, timings = chain.manifest.shapes.divided(len(each)), [], Counter()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with Progress(len(batches), "batches") as bar:
            watch = following(bar) if progress else None
            for size in batches:
                calls = each[len(images) : len(images) + size]
                result = chain(**Call.joined(calls).given(), callback=watch)
                for call, image in zip(calls, result.images, strict=True):
                    content = png_bytes(image, metadata(call, chain.manifest))
                    path = _reserved(folder, str(call.seed))
                    atomic.write(path, content)
                    images.append(image)
                    print(path, flush=True)
                timings.update(result.timings)
    finally:
        if missing := each[len(images) :]:
            print(_missing(missing, len(each), folder), file=sys.stderr)
    if len(images) > 1:
        path = _reserved(folder, CONTACT_SHEET)
        contact_sheet(np.stack(images)).save(path)
        print(path)
    print(", ".join(f"{name} {seconds:.2f} s" for name, seconds in timings.items()))


def _missing(missing: Sequence[Call], count: int, folder: Path) -> str:
    """Say how many pictures were saved, and list the first of the missing ones."""
    lines = [f"{count - len(missing)} of {count} pictures were saved in {folder}. Missing:"]
    lines += [f"  seed {call.seed}: {call.prompt}" for call in missing[:LISTED]]
    if len(missing) > LISTED:
        lines.append(f"  and {len(missing) - LISTED} more")
    return "\n".join(lines)


def _reserved(folder: Path, name: str) -> Path:
    """Make an empty file of that name, with a number behind it where there is one already."""
    path, number = folder / f"{name}.png", 1
    while True:
        try:
            path.touch(exist_ok=False)  # another process may be about to write the same picture
            return path
        except FileExistsError:
            path = folder / f"{name}-{number}.png"
            number += 1


def following(bar: Progress) -> Callable[[int, int, Any], None]:
    """Return a chain's callback that moves the bar, by a share of a batch at a time."""
    finished = 0

    def follow(done: int, calls: int, latents) -> None:
        nonlocal finished
        bar.reach(finished + done / calls)
        finished += done == calls

    return follow
