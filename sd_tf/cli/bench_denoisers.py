"""`sd-tf bench denoisers`: time a transformer's call beside other engines."""

import argparse

from sd_tf.bench.peers import denoisers, report
from sd_tf.cli.arguments import names
from sd_tf.cli.arguments import report as tell
from sd_tf.cli.bench_options import add_out, add_precision, add_work, checkpoint_folder, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = denoisers.DenoiserOptions("")
    parser.add_argument(
        "--checkpoint",
        type=checkpoint_folder,
        required=True,
        help="diffusers folder of SD3 or Flux, or tiny-dit",
    )
    parser.add_argument("--size", type=int, default=defaults.size, help="pixels (default: 512)")
    add_precision(parser)
    parser.add_argument(
        "--engines",
        type=names,
        default=defaults.engines,
        help=f"of {', '.join(defaults.engines)} (default: all)",
    )
    parser.add_argument(
        "--rounds", type=int, default=defaults.rounds, help="processes of each, in turn"
    )
    parser.add_argument(
        "--calls", type=int, default=defaults.calls, help="timed calls in each process"
    )
    add_work(parser)
    add_out(parser)


def run(options: argparse.Namespace) -> int:
    results = denoisers.compare(read(denoisers.DenoiserOptions, options), tell)
    print("\n" + denoisers.table(results))
    if options.out is not None:
        print(report.write_json(results, options.out, "denoisers"))
    return int(denoisers.failed(results))
