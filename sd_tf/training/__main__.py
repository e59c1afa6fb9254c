"""`python -m sd_tf.training tiny | text_to_image | eval`: train, and measure what was trained."""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from sd_tf.config import ConfigError
from sd_tf.manifest import ExportError
from sd_tf.training.settings import PRECISIONS, Averaging, Settings, TrainingError


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.command != "eval":  # Keras chooses its backend when it is first imported
        os.environ["KERAS_BACKEND"] = options.backend
    from sd_tf.weights import CheckpointError

    try:
        COMMANDS[options.command](options)
    except (TrainingError, CheckpointError, ExportError, ConfigError) as error:
        print(f"sd_tf.training: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sd_tf.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    tiny = commands.add_parser("tiny", help="train the embedded checkpoint anew, from nothing")
    _add_run(tiny)

    tune = commands.add_parser("text_to_image", help="fine-tune a checkpoint on captioned pictures")
    _add_run(tune)
    tune.add_argument("--checkpoint", required=True, help="any source that sd_tf.weights reads")
    tune.add_argument(
        "--data", required=True, help="a folder, a parquet file or folder, or world:COUNT"
    )
    tune.add_argument("--size", type=int, help="pixels; default: the checkpoint's own")
    tune.add_argument("--on_error", choices=["refuse", "skip"], default="refuse")
    tune.add_argument("--caption_column", help="where it is not 'text'")
    tune.add_argument("--image_column", help="where it is not 'image' ('file_name' in a folder)")
    tune.add_argument("--train_text_encoder", action="store_true")
    tune.add_argument("--caption_dropout", type=float, default=0.1)
    tune.add_argument("--even_weights", action="store_true", help="no min-SNR weighting")
    tune.add_argument(
        "--first_timestep",
        type=int,
        default=0,
        help="train from it on alone: the noisiest decide where things stand",
    )
    tune.add_argument("--save_dtype", choices=["float32", "float16"], default="float32")
    tune.add_argument("--precision", choices=PRECISIONS, default="float32")
    tune.add_argument("--no_average", action="store_true", help="save the last weights")
    tune.add_argument("--ema_start", type=float, default=0.0, help="share of the run before it")
    tune.add_argument("--ema_half_life", type=float, default=1000.0, help="steps")
    for field in dataclasses.fields(Settings):
        if field.type in (int, float):
            required = field.default is dataclasses.MISSING
            default = None if required else field.default
            tune.add_argument(
                f"--{field.name}", type=field.type, default=default, required=required
            )

    measure = commands.add_parser("eval", help="how often an export draws what it is asked for")
    measure.add_argument("--export_dir", required=True)
    measure.add_argument("--out", type=Path, default=Path("out/evaluation"))
    measure.add_argument("--prompts", type=int, default=250, help="in each of the four groups")
    measure.add_argument("--num_steps", type=int, default=20)
    measure.add_argument("--guidance_scale", type=float, default=4.0)
    measure.add_argument("--more_guidance", type=float, nargs="*", default=[], metavar="SCALE")
    measure.add_argument("--scheduler")
    measure.add_argument("--negative_prompts", action="store_true")
    measure.add_argument("--compile_cache", help="folder where XLA keeps compiled code")
    return parser.parse_args(argv)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="a run goes on from what is there")
    parser.add_argument("--backend", choices=["tensorflow", "jax"], default="tensorflow")


def _report(text: str) -> None:
    print(text, flush=True)


def _use_all_devices() -> None:
    """On JAX, a batch is divided among the devices and the weights are on each."""
    import keras

    if keras.backend.backend() == "jax" and len(keras.distribution.list_devices()) > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel())


def train_tiny(options: argparse.Namespace) -> None:
    _use_all_devices()
    from sd_tf.training import tiny

    tiny.train(tiny.TINY, options.out, _report)


def tune(options: argparse.Namespace) -> None:
    _use_all_devices()
    from sd_tf.training import data, finetune
    from sd_tf.weights import open_checkpoint

    checkpoint = open_checkpoint(options.checkpoint)
    size = options.size or checkpoint.config.default_size
    kind, _, count = options.data.partition(":")
    if kind == "world" and count.isdigit():
        source = data.World(int(count), size)
    else:
        columns = {
            name: getattr(options, name)
            for name in ("caption_column", "image_column")
            if getattr(options, name) is not None
        }
        source = data.open_source(options.data, size, options.on_error, **columns)
        for line in source.skipped:
            _report(f"skipped {line}")
        _report(f"{len(source)} examples, {len(source.skipped)} skipped")
    average = Averaging(None if options.no_average else options.ema_start, options.ema_half_life)
    numbers = {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(Settings)
        if f.type in (int, float)
    }
    settings = Settings(**numbers, averaging=average, precision=options.precision)
    finetune.finetune(
        checkpoint,
        source,
        settings.check(),
        finetune.Options(
            options.train_text_encoder,
            options.caption_dropout,
            None if options.even_weights else finetune.Options.min_snr,
            options.first_timestep,
            options.save_dtype,
        ),
        options.out,
        _report,
    )


def evaluate(options: argparse.Namespace) -> None:
    from sd_tf.pipeline import Pipeline
    from sd_tf.training import evaluate

    pipe = Pipeline.load(options.export_dir, compile_cache=options.compile_cache)
    names = [field.name for field in dataclasses.fields(evaluate.Options)]
    chosen = evaluate.Options(**{name: getattr(options, name) for name in names})
    evaluate.evaluate(pipe, chosen, options.out, _report)
    _report(f"written to {options.out}")


COMMANDS = {"tiny": train_tiny, "text_to_image": tune, "eval": evaluate}

if __name__ == "__main__":
    sys.exit(main())
