"""`sd-tf bench training`: compare updates of a UNet's weights with PyTorch's."""

import argparse

from sd_tf.bench.peers import report, training
from sd_tf.cli.arguments import names
from sd_tf.cli.arguments import report as tell
from sd_tf.cli.bench_options import add_out, add_work, checkpoint_folder, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = training.UpdateOptions()
    parser.add_argument(
        "--checkpoint",
        type=checkpoint_folder,
        default=defaults.checkpoint,
        help="diffusers folder, or an embedded checkpoint's name (default: tiny)",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        default=defaults.batch_size,
        help="examples of an update (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=defaults.rounds, help="turns of each (default: 15)"
    )
    parser.add_argument(
        "--engines",
        type=names,
        default=defaults.engines,
        help=f"of {', '.join(defaults.engines)} (default: all)",
    )
    parser.add_argument("--lora_rank", type=int, help="train an adapter (LoRA) of this rank")
    add_work(parser)
    add_out(parser)


def run(options: argparse.Namespace) -> int:
    results = training.compare(read(training.UpdateOptions, options), tell)
    print("\n" + training.table(results))
    if options.out is not None:
        print(report.write_json(results, options.out, "training"))
    return 0
