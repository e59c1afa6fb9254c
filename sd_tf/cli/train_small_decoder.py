"""`sd-tf train small_decoder --checkpoint … --data … --out RUN`: train a small decoder."""

import argparse

from sd_tf.cli.arguments import report, whole_numbers
from sd_tf.cli.options import opened
from sd_tf.cli.train_run import (
    add_data,
    add_hosts,
    add_run,
    add_settings,
    open_data,
    picture_size,
    read_settings,
    use_backend,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--checkpoint", required=True, help="the checkpoint whose latents it is to decode"
    )
    add_data(parser, is_captioned=False)
    parser.add_argument("--channels", type=int, default=64, help="on all levels (default: 64)")
    parser.add_argument(
        "--blocks",
        type=whole_numbers,
        help="on each level, from the latents on: 3,3,3,1 (default: three, and one on the last)",
    )
    add_hosts(parser)
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    host = use_backend(options)
    from sd_tf.training import small_decoder

    settings = read_settings(options)
    checkpoint = opened(options, options.checkpoint)
    size = picture_size(options, checkpoint.config)
    source = open_data(options, options.data, size, host, is_captioned=False)
    small_decoder.train(
        checkpoint,
        source,
        settings,
        small_decoder.SmallDecoderOptions(options.channels, options.blocks, options.save_dtype),
        options.folder,
        report,
    )
    return 0
