"""`sd-tf train memory --family sd1 --topology v5e:2x2 --batch_size 32`: estimate memory."""

import argparse

from sd_tf.cli.arguments import report
from sd_tf.cli.options import WEIGHTS
from sd_tf.cli.options import add_arguments as add_options
from sd_tf.cli.train_run import add_precision, picture_size
from sd_tf.config import FAMILIES
from sd_tf.training.settings import Settings
from sd_tf.weights import with_texts

TEXTS = ("without", "max_sequence_length")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from sd_tf.training.memory import is_trained

    trained = [name for name, family in FAMILIES.items() if is_trained(family)]
    parser.add_argument("--family", choices=trained, required=True, help="from shapes alone")
    parser.add_argument("--topology", required=True, help="a TPU slice, like v5e:2x2")
    parser.add_argument("--size", type=int, help="pixels; default: the family's own")
    parser.add_argument("--batch_size", type=int, required=True, help="of all chips together")
    parser.add_argument("--accumulate", type=int, default=1, help="parts that it is computed in")
    add_precision(parser, "mixed_bfloat16")
    add_options(parser, [option for option in WEIGHTS if option.name in TEXTS])


def run(options: argparse.Namespace) -> int:
    from sd_tf.training import memory

    family = FAMILIES[options.family]
    config = with_texts(family, options.without, options.max_sequence_length, options.family)
    settings = Settings(
        steps=1000,
        batch_size=options.batch_size,
        accumulate=options.accumulate,
        precision=options.precision,
    ).check()
    memory.table(config, picture_size(options, config), settings, options.topology, report)
    return 0
