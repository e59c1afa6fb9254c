"""`sd-tf export-adapters`: write adapters into an export's places, for servers to take up."""

import argparse

from sd_tf.cli.arguments import named_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("export_dir", help="what `sd-tf export --adapter_slots` wrote")
    parser.add_argument(
        "adapters",
        nargs="*",
        type=named_path,
        metavar="NAME=PATH",
        help="an adapter's file (LoRA), and the name by which calls ask for it",
    )
    parser.add_argument(
        "--remove",
        action="append",
        default=[],
        metavar="NAME",
        help="free an adapter's place; may be given several times",
    )


def run(options: argparse.Namespace) -> int:
    from sd_tf.export.adapters import write_adapters

    names = [name for name, _ in options.adapters]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Each adapter is given once. Received twice: {', '.join(twice)}")
    places = write_adapters(options.export_dir, dict(options.adapters), options.remove).adapters
    for name in places.names:
        print(f"place {places.loaded[name].slot}: {name} ({places.loaded[name].file})")
    free = places.slots - len(places.names)
    print(f"{options.export_dir}: {free} of {places.slots} places are free")
    return 0
