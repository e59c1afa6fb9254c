"""`sd-tf train controlnet --checkpoint … --data … --out RUN`: train a ControlNet."""

import argparse
import dataclasses

from sd_tf.cli.arguments import report
from sd_tf.cli.options import opened
from sd_tf.cli.train_run import (
    add_denoiser,
    add_hosts,
    add_pictures,
    add_run,
    add_settings,
    picture_size,
    read_settings,
    use_backend,
    world_count,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--checkpoint", required=True, help="the SD1, SD2 or SDXL base checkpoint to steer"
    )
    parser.add_argument(
        "--data",
        required=True,
        help="a parquet file or a folder of them, with the columns conditioning_image, text and "
        "image; or world:COUNT, the tiny world's scenes and their outlines",
    )
    add_pictures(parser)
    parser.add_argument(
        "--resize", type=int, help="scale pictures to this, and cut --size out (default: --size)"
    )
    parser.add_argument(
        "--flip", type=float, default=0.0, help="share of mirrored pairs (default: 0)"
    )
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="share without a caption (default: 0.1)"
    )
    add_hosts(parser)
    add_denoiser(parser)
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    host = use_backend(options)
    from sd_tf.training import control
    from sd_tf.training.pairs import CONTROLS, WorldOutlines, open_pairs

    settings = read_settings(options)
    checkpoint = opened(options, options.checkpoint)
    size = picture_size(options, checkpoint.config)
    count = world_count(options, options.data)
    if count is None:
        pairs = open_pairs(options.data, options.on_error, host, report, CONTROLS)
    else:
        pairs = WorldOutlines(count, size, host=host)
    report(f"{len(pairs)} pairs")
    names = {field.name for field in dataclasses.fields(control.ControlOptions)} - {"size"}
    given = {name: getattr(options, name) for name in names}
    control.train(
        checkpoint, pairs, settings, control.ControlOptions(size, **given), options.folder, report
    )
    return 0
