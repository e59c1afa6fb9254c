"""`python -m sd_tf.serving client "a prompt" --server grpc://… --export_dir …`: PNG files.

Flags and files are those of `sd_tf.generate`; the models run behind the server.
"""

import argparse
import os
import sys
from pathlib import Path

from sd_tf import generate
from sd_tf.config import ConfigError
from sd_tf.manifest import ExportError
from sd_tf.serving.client import DEFAULT_TIMEOUT, Client, ServerError

TOKEN_VARIABLE = "SD_TF_TOKEN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    generate.add_arguments(parser)
    parser.add_argument("--export_dir", required=True, help="what serialize_savedmodels.py wrote")
    parser.add_argument(
        "--server", required=True, help="grpc://host:port, grpcs://…, http://… or https://…"
    )
    versions = parser.add_mutually_exclusive_group()
    versions.add_argument("--version", type=int, help="of the served models (default: the latest)")
    versions.add_argument("--label", help="of a version of the served models")
    parser.add_argument("--ca_file", help="PEM file of who signed the server's certificate")
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        help=f"seconds for one model call (default: {DEFAULT_TIMEOUT:g})",
    )
    parser.epilog = f"A bearer token is read from the environment variable {TOKEN_VARIABLE}."


def run(options: argparse.Namespace) -> int:
    try:
        if message := generate.misused(options):
            raise ValueError(message)
        wanted = generate.read_wanted(options)
        with Client(
            options.server,
            options.export_dir,
            jit_compile=not options.nojit_compile,
            version=options.version,
            label=options.label,
            token=os.environ.get(TOKEN_VARIABLE),
            ca_file=options.ca_file,
            timeout=options.timeout,
        ) as client:
            # A step at a time costs a call each: only where somebody watches.
            generate.draw(client, wanted, Path(options.out), progress=sys.stderr.isatty())
    except (ServerError, ExportError, ConfigError, ValueError, OSError) as error:
        print(f"sd_tf.serving client: {error}", file=sys.stderr)
        return 1
    return 0
