"""`sd-tf train instruct_pix2pix --checkpoint … --data … --out RUN`: teach a checkpoint to edit."""

import argparse
import dataclasses

from sd_tf.cli.arguments import report
from sd_tf.cli.options import opened
from sd_tf.cli.train_run import (
    add_denoiser,
    add_hosts,
    add_lora,
    add_pictures,
    add_run,
    add_settings,
    add_train_text_encoder,
    picture_size,
    read_lora,
    read_settings,
    use_backend,
    world_count,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="any SD1 or SD2 checkpoint, or one that edits already",
    )
    parser.add_argument(
        "--data", required=True, help="a parquet file, a folder of them, or world:COUNT"
    )
    add_pictures(parser)
    add_train_text_encoder(parser)
    parser.add_argument(
        "--resize", type=int, help="scale pictures to this, and cut --size out (default: --size)"
    )
    parser.add_argument(
        "--flip",
        type=float,
        help="share of mirrored pairs (default: 0.5; for world:COUNT, whose texts name sides, 0)",
    )
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.05,
        help="share without text, without both, without picture",
    )
    parser.add_argument(
        "--precompute",
        action="store_true",
        help="compute latents and unchanging text states once, and keep them in --out",
    )
    add_lora(parser)
    add_hosts(parser)
    add_denoiser(parser)
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    host = use_backend(options)
    from sd_tf.training import edit
    from sd_tf.training.pairs import WorldPairs, open_pairs

    settings, lora = read_settings(options), read_lora(options)
    checkpoint = opened(options, options.checkpoint)
    size = picture_size(options, checkpoint.config)
    count = world_count(options, options.data)
    if count is None:
        pairs = open_pairs(options.data, options.on_error, host, report)
    else:
        pairs = WorldPairs(count, size, host=host)
    report(f"{len(pairs)} pairs")
    names = {field.name for field in dataclasses.fields(edit.EditOptions)} - {"size", "lora"}
    chosen = edit.EditOptions(size, lora=lora, **{name: getattr(options, name) for name in names})
    if chosen.flip is None:
        chosen = dataclasses.replace(chosen, flip=0.5 if count is None else 0.0)
    edit.train(checkpoint, pairs, settings, chosen, options.folder, report)
    return 0
