"""`sd-tf serve client "a prompt" --server grpc://… --export_dir …`: make PNG files.

It takes the flags of `sd-tf generate`, and writes files like it; the models run behind the server.
"""

import argparse
import sys
from pathlib import Path

from sd_tf.cli.arguments import TOKEN_EPILOG, add_export_dir, add_jit_compile, token
from sd_tf.cli.drawing import add_drawing_arguments, draw, read_wanted
from sd_tf.serving.client.client import DEFAULT_TIMEOUT, Client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_drawing_arguments(parser)
    add_jit_compile(parser)
    add_export_dir(parser)
    parser.add_argument(
        "--server", required=True, help="grpc://host:port, grpcs://…, http://… or https://…"
    )
    versions = parser.add_mutually_exclusive_group()
    versions.add_argument("--version", type=int, help="of the served models (default: the latest)")
    versions.add_argument("--label", help="of a version of the served models")
    parser.add_argument("--ca_file", help="PEM file of the server's certificate authority")
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        help=f"seconds for one model call (default: {DEFAULT_TIMEOUT:g})",
    )
    parser.epilog = TOKEN_EPILOG


def run(options: argparse.Namespace) -> int:
    wanted = read_wanted(options)
    with Client(
        options.server,
        options.export_dir,
        jit_compile=options.jit_compile,
        version=options.version,
        label=options.label,
        token=token(),
        ca_file=options.ca_file,
        timeout=options.timeout,
    ) as client:
        # Progress costs a call for each step, so it is shown on a terminal only.
        progress = sys.stderr.isatty() and client.calls_back
        draw(client, wanted, Path(options.out), progress=progress)
    return 0
