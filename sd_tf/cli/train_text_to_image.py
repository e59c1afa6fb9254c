"""`sd-tf train text_to_image --checkpoint … --data … --out RUN`: fine-tune a checkpoint."""

import argparse

from sd_tf.cli.arguments import Switch, report
from sd_tf.cli.options import opened
from sd_tf.cli.train_run import (
    add_data,
    add_denoiser,
    add_hosts,
    add_lora,
    add_run,
    add_settings,
    add_train_text_encoder,
    open_data,
    picture_size,
    read_lora,
    read_settings,
    use_backend,
)
from sd_tf.training.settings import TrainingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--checkpoint", required=True, help="any source that `sd-tf weights` reads")
    add_data(parser)
    add_train_text_encoder(parser)
    parser.add_argument(
        "--caption_dropout",
        type=float,
        default=0.1,
        help="share of examples without a caption, for guidance (default: 0.1)",
    )
    parser.add_argument(
        "--min_snr",
        action=Switch,
        default=True,
        help="weight losses by min-SNR; those of flow matching have equal weights",
    )
    parser.add_argument(
        "--prior_data",
        help="pictures of the same class, like --data, of which nothing is to be forgotten",
    )
    parser.add_argument(
        "--prior_weight", type=float, help="of the loss of --prior_data (default: 1)"
    )
    parser.add_argument(
        "--placeholder_token", help="train the vectors of this new token alone, such as '<cat>'"
    )
    parser.add_argument("--initializer_token", help="a known token, whose vector they begin with")
    parser.add_argument("--num_vectors", type=int, default=1, help="of --placeholder_token")
    add_lora(parser)
    add_hosts(parser)
    add_denoiser(parser)
    add_settings(parser)


def read_inversion(options: argparse.Namespace):
    """Return the options of textual inversion, or None where weights are trained."""
    from sd_tf.training.inversion import InversionOptions

    token, first = options.placeholder_token, options.initializer_token
    if (token is None) != (first is None) or (token is None and options.num_vectors != 1):
        raise TrainingError(
            "--placeholder_token and --initializer_token go together, and --num_vectors with them."
        )
    return None if token is None else InversionOptions(token, first, options.num_vectors)


def run(options: argparse.Namespace) -> int:
    host = use_backend(options)
    from sd_tf.training import finetune

    settings, lora = read_settings(options), read_lora(options)
    prior_weight = finetune.FinetuneOptions.prior_weight
    if options.prior_weight is not None:
        if options.prior_data is None:
            raise TrainingError("--prior_weight goes with --prior_data.")
        prior_weight = options.prior_weight
    inversion = read_inversion(options)
    checkpoint = opened(options, options.checkpoint)
    size = picture_size(options, checkpoint.config)

    source, prior = open_data(options, options.data, size, host), None
    if options.prior_data is not None:
        prior = open_data(options, options.prior_data, size, host, "prior_bad_rows")
    finetune.finetune(
        checkpoint,
        source,
        settings,
        finetune.FinetuneOptions(
            options.train_text_encoder,
            options.caption_dropout,
            finetune.FinetuneOptions.min_snr if options.min_snr else None,
            options.first_timestep,
            options.save_dtype,
            lora,
            prior_weight,
            inversion,
        ),
        options.folder,
        report,
        prior,
    )
    return 0
