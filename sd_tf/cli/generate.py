"""`sd-tf generate "a prompt"`: make PNG files that hold their parameters."""

import argparse
from pathlib import Path
from typing import Any

from sd_tf.cli.arguments import add_compile_cache, add_jit_compile, add_load_adapter
from sd_tf.cli.drawing import add_drawing_arguments, draw, read_wanted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_drawing_arguments(parser)
    parser.add_argument(
        "--export_dir",
        help="what `sd-tf export` wrote (default: the embedded checkpoint's, or with --image and "
        "no --strength the embedded editor's, made on first use)",
    )
    add_load_adapter(parser)
    add_compile_cache(parser)
    add_jit_compile(parser)


def run(options: argparse.Namespace) -> int:
    from sd_tf.runtime.pipeline import Pipeline

    if options.export_dir is None and options.mask is not None:
        raise ValueError("No embedded checkpoint paints inside a mask: give --export_dir.")
    wanted = read_wanted(options)
    export_dir = options.export_dir
    if export_dir is None:
        export_dir, suited = _embedded(wanted)
        wanted = {**suited, **wanted}
    pipe = Pipeline.load(
        export_dir,
        jit_compile=options.jit_compile,
        compile_cache=options.compile_cache,
    )
    for name, path in options.load_adapter:
        pipe.load_adapter(name, path)
    print(f"loaded {export_dir} in {pipe.load_seconds:.1f} s", flush=True)
    draw(pipe, wanted, Path(options.out))
    return 0


def _embedded(wanted: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the settings of the embedded export that draws, or that edits.

    The editor is used for a picture without a strength.
    """
    from sd_tf.export.embedded import embedded_export

    edits = "image" in wanted and "strength" not in wanted
    return embedded_export(edits, lambda text: print(text, flush=True))
