"""`sd-tf generate "a prompt"`: make PNG files that hold their parameters."""

import argparse
from pathlib import Path
from typing import Any

from sd_tf.cli.arguments import add_compile_cache, add_jit_compile, add_load_adapter
from sd_tf.cli.drawing import add_drawing_arguments, draw, read_wanted
from sd_tf.runtime.call import Call
from sd_tf.runtime.chain import open_export
from sd_tf.runtime.request import read_request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_drawing_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--export_dir", help="what `sd-tf export` wrote")
    source.add_argument(
        "--checkpoint",
        help="an embedded one, tiny, tiny-dit or tiny-edit, which is exported on first use "
        "(default: tiny, or with --image and no --strength tiny-edit)",
    )
    add_load_adapter(parser)
    add_compile_cache(parser)
    add_jit_compile(parser)


def run(options: argparse.Namespace) -> int:
    if options.export_dir is None and options.mask is not None:
        raise ValueError("No embedded checkpoint paints inside a mask: give --export_dir.")
    wanted = read_wanted(options)
    export_dir = options.export_dir
    if export_dir is None:
        from sd_tf.checkpoints import EDITOR, TINY
        from sd_tf.export.embedded import embedded_export

        name = options.checkpoint or (EDITOR if _edits(wanted) else TINY)
        export_dir = embedded_export(name, lambda text: print(text, flush=True))
    if not options.load_adapter:  # else the call may name what is not there yet
        read_request(open_export(Path(export_dir))[0], Call.of(**wanted))
    from sd_tf.runtime.pipeline import Pipeline  # brings TensorFlow: ten seconds, after the checks

    pipe = Pipeline.load(
        export_dir,
        jit_compile=options.jit_compile,
        compile_cache=options.compile_cache,
        fixed_weights=not options.load_adapter,
    )
    for name, path in options.load_adapter:
        pipe.load_adapter(name, path)
    print(f"loaded {export_dir} in {pipe.load_seconds:.1f} s", flush=True)
    draw(pipe, wanted, Path(options.out))
    return 0


def _edits(wanted: dict[str, Any]) -> bool:
    """Tell whether a picture is to be edited as the prompt says: it is given without a strength."""
    return "image" in wanted and "strength" not in wanted
