"""`sd-tf serve load --url http://…`: measure how much load an application takes."""

import argparse
import dataclasses

from sd_tf.cli.arguments import TOKEN_EPILOG, add_json, names, report, sizes, token, write_json
from sd_tf.serving.load import LoadOptions, measure_load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = LoadOptions()
    parser.add_argument("--url", default=defaults.url, help="of the application")
    parser.add_argument(
        "--clients",
        type=int,
        nargs="+",
        default=defaults.clients,
        help="that ask at once; several numbers are measured one after the other",
    )
    parser.add_argument(
        "--seconds", type=float, default=defaults.seconds, help="for each number of clients"
    )
    parser.add_argument("--prompt", default=defaults.prompt, help="of all calls")
    parser.add_argument("--num_steps", type=int, default=defaults.num_steps, help="of all calls")
    parser.add_argument(
        "--guidance_scale", type=float, default=defaults.guidance_scale, help="of all calls"
    )
    parser.add_argument(
        "--sizes",
        type=sizes,
        metavar="HxW,HxW",
        default=defaults.sizes,
        help="sizes of the pictures, asked for in turn (default: the application's first)",
    )
    parser.add_argument(
        "--adapters",
        type=names,
        metavar="NAME,NAME",
        default=defaults.adapters,
        help="adapters in the export's places, asked for in random mixtures",
    )
    parser.add_argument(
        "--export_dir",
        help="the application's export: pictures are also compared with what it draws here",
    )
    add_json(parser)
    parser.epilog = TOKEN_EPILOG


def run(options: argparse.Namespace) -> int:
    fields = [field.name for field in dataclasses.fields(LoadOptions) if field.name != "token"]
    chosen = LoadOptions(**{name: getattr(options, name) for name in fields}, token=token())
    records = measure_load(chosen, report)
    write_json(options.json, records)
    return int(any(record["wrong"] or record["failed"] for record in records))
