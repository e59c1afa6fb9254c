"""`sd-tf train memory --family sd1 --topology v5e:2x2 --batch_size 32`: estimate memory."""

import argparse

from sd_tf.cli.arguments import report
from sd_tf.cli.train_run import add_precision, picture_size
from sd_tf.config import FAMILIES, PipelineConfig
from sd_tf.training.settings import Settings
from sd_tf.weights import with_texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from sd_tf.training.memory import is_trained

    trained = [name for name, family in FAMILIES.items() if is_trained(_as_trained(family))]
    parser.add_argument("--family", choices=trained, required=True, help="from shapes alone")
    parser.add_argument("--topology", required=True, help="a TPU slice, like v5e:2x2")
    parser.add_argument("--size", type=int, help="pixels; default: the family's own")
    parser.add_argument("--batch_size", type=int, required=True, help="of all chips together")
    parser.add_argument("--accumulate", type=int, default=1, help="parts that it is computed in")
    add_precision(parser, "mixed_bfloat16")


def _as_trained(family: PipelineConfig) -> PipelineConfig:
    """Leave out SD3's T5, as training does."""
    is_sd3 = family.denoiser.conditioner == "sd3"
    return with_texts(family, tuple(family.t5_encoders)) if is_sd3 else family


def run(options: argparse.Namespace) -> int:
    from sd_tf.training import memory

    config = _as_trained(FAMILIES[options.family])
    settings = Settings(
        steps=1000,
        batch_size=options.batch_size,
        accumulate=options.accumulate,
        precision=options.precision,
    ).check()
    memory.table(config, picture_size(options, config), settings, options.topology, report)
    return 0
