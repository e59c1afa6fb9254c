"""`python -m sd_tf.training COMMAND`: train, make data, and measure what was trained."""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from sd_tf.config import FAMILIES, ConfigError, PipelineConfig
from sd_tf.manifest import ExportError
from sd_tf.training.settings import PRECISIONS, Averaging, Settings, TrainingError


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if "backend" in options:  # Keras chooses its backend when it is first imported
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
    _add_settings(tune)

    edit = commands.add_parser(
        "instruct_pix2pix", help="teach a checkpoint to follow instructions, from pairs of pictures"
    )
    _add_run(edit)
    edit.add_argument(
        "--base", required=True, help="any SD1 or SD2 checkpoint, or one that edits already"
    )
    edit.add_argument(
        "--data", required=True, help="a parquet file, a folder of them, or world:COUNT"
    )
    edit.add_argument("--size", type=int, help="pixels; default: the checkpoint's own")
    edit.add_argument(
        "--resize", type=int, help="scale pictures to this, and cut --size out (default: --size)"
    )
    edit.add_argument(
        "--flip",
        type=float,
        help="how often a pair is mirrored (default: 0.5; of the world, which names sides, never)",
    )
    edit.add_argument(
        "--dropout", type=float, default=0.05, help="of text, of both, and of picture, each"
    )
    edit.add_argument(
        "--precompute",
        action="store_true",
        help="latents and, of an encoder that is not trained, text states once, kept in --out",
    )
    edit.add_argument("--on_error", choices=["refuse", "skip"], default="refuse")
    edit.add_argument("--train_text_encoder", action="store_true")
    edit.add_argument("--coordinator", help="host:port of host 0, where several train together")
    edit.add_argument("--hosts", type=int, help="how many there are; each reads its own part")
    edit.add_argument("--host", type=int, help="which of them this is, from 0")
    _add_settings(edit)

    study = commands.add_parser(
        "ema_study", help="what averages of the weights are worth to an editor, and cost"
    )
    _add_run(study)
    study.add_argument("--seeds", type=int, help="runs (default: 3)")
    study.add_argument("--steps", type=int, help="of each run (default: 1500)")

    pairs = commands.add_parser(
        "edit_pairs", help="write the tiny world's edits as parquet: pairs with a known truth"
    )
    pairs.add_argument("--out", type=Path, required=True, help="a new folder")
    pairs.add_argument("--count", type=int, required=True)
    pairs.add_argument("--split", choices=["train", "held_out"], default="train")
    pairs.add_argument(
        "--kinds",
        nargs="+",
        default=(),
        metavar="KIND",
        help="such as move or shape, which then take turns (default: all kinds alike)",
    )
    pairs.add_argument("--size", type=int, default=64, help="pixels")
    pairs.add_argument("--seed", type=int, default=0)

    slices = commands.add_parser(
        "memory", help="what fine-tuning holds and takes on a TPU slice that need not be here"
    )
    slices.set_defaults(backend="jax")
    slices.add_argument("--family", choices=FAMILIES, required=True, help="from shapes alone")
    slices.add_argument("--topology", required=True, help="a TPU slice, like v5e:2x2")
    slices.add_argument("--size", type=int, help="pixels; default: the family's own")
    slices.add_argument("--batch_size", type=int, required=True, help="of all chips together")
    slices.add_argument("--accumulate", type=int, default=1, help="parts that it is computed in")
    slices.add_argument("--precision", choices=PRECISIONS, default="mixed_bfloat16")

    measure = commands.add_parser("eval", help="how often an export draws what it is asked for")
    _add_measuring(measure)
    measure.add_argument("--prompts", type=int, default=250, help="in each of the four groups")
    measure.add_argument("--negative_prompts", action="store_true")

    measure = commands.add_parser(
        "eval_edits", help="how often an export does what an instruction asks for, and no more"
    )
    _add_measuring(measure)
    measure.add_argument("--pairs", type=int, default=500, help="of each split")
    measure.add_argument("--image_guidance_scale", type=float, default=1.5)
    measure.add_argument(
        "--more_image_guidance", type=float, nargs="*", default=[], metavar="SCALE"
    )
    return parser.parse_args(argv)


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--export_dir", required=True)
    parser.add_argument("--out", type=Path, default=Path("out/evaluation"))
    parser.add_argument("--num_steps", type=int, default=20)
    parser.add_argument("--guidance_scale", type=float, default=4.0)
    parser.add_argument("--more_guidance", type=float, nargs="*", default=[], metavar="SCALE")
    parser.add_argument("--scheduler")
    parser.add_argument("--compile_cache", help="folder where XLA keeps compiled code")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="a run goes on from what is there")
    parser.add_argument("--backend", choices=["tensorflow", "jax"], default="tensorflow")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """`Settings`, which noise levels are learnt, and how the checkpoint is saved."""
    parser.add_argument(
        "--first_timestep",
        type=int,
        default=0,
        help="train from it on alone: the noisiest decide what stands where",
    )
    parser.add_argument(
        "--scheduler", help="the default of the saved checkpoint (default: the one it had)"
    )
    parser.add_argument("--save_dtype", choices=["float32", "float16"], default="float32")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument(
        "--gradient_checkpointing",
        action="store_true",
        help="compute the UNet's blocks again for the gradients: less memory, more time",
    )
    parser.add_argument("--no_average", action="store_true", help="save the last weights")
    parser.add_argument("--ema_start", type=float, default=0.0, help="share of the run before it")
    parser.add_argument("--ema_half_life", type=float, default=1000.0, help="steps")
    for field in dataclasses.fields(Settings):
        if field.type in (int, float):
            required = field.default is dataclasses.MISSING
            default = None if required else field.default
            parser.add_argument(
                f"--{field.name}", type=field.type, default=default, required=required
            )


def _settings(options: argparse.Namespace) -> Settings:
    average = Averaging(None if options.no_average else options.ema_start, options.ema_half_life)
    numbers = {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(Settings)
        if f.type in (int, float)
    }
    return Settings(
        **numbers,
        averaging=average,
        precision=options.precision,
        gradient_checkpointing=options.gradient_checkpointing,
    ).check()


def _size(options: argparse.Namespace, config: PipelineConfig) -> int:
    """Of the pictures."""
    size = config.default_size if options.size is None else options.size
    if size < 1 or size % config.vae.downscale:
        raise TrainingError(
            f"--size is a positive multiple of {config.vae.downscale}. Received: {size}"
        )
    return size


def _world_count(data: str) -> int | None:
    """N of world:N."""
    kind, _, count = data.partition(":")
    return int(count) if kind == "world" and count.isdigit() else None


def _report(text: str) -> None:
    print(text, flush=True)


def _use_all_devices(options: argparse.Namespace):
    """On JAX, a batch is divided among the devices and the weights are on each; this host."""
    import keras

    from sd_tf.training.hosts import join, this_host

    several = [getattr(options, name, None) for name in ("coordinator", "hosts", "host")]
    if any(value is not None for value in several):
        if None in several:
            raise TrainingError("--coordinator, --hosts and --host go together.")
        if keras.backend.backend() != "jax":
            raise TrainingError("Several hosts train together on JAX: --backend jax.")
        if not 0 <= options.host < options.hosts:
            raise TrainingError(
                f"--host is a number from 0 to {options.hosts - 1}. Received: {options.host}"
            )
        join(*several)

    if keras.backend.backend() == "jax" and len(keras.distribution.list_devices()) > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    return this_host()


def train_tiny(options: argparse.Namespace) -> None:
    _use_all_devices(options)
    from sd_tf.training import tiny

    tiny.train(tiny.TINY, options.out, _report)


def tune(options: argparse.Namespace) -> None:
    _use_all_devices(options)
    from sd_tf.training import data, finetune
    from sd_tf.weights import open_checkpoint

    checkpoint = open_checkpoint(options.checkpoint, scheduler=options.scheduler)
    size = _size(options, checkpoint.config)
    count = _world_count(options.data)
    if count is not None:
        source = data.World(count, size)
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
    finetune.finetune(
        checkpoint,
        source,
        _settings(options),
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


def instruct(options: argparse.Namespace) -> None:
    host = _use_all_devices(options)
    from sd_tf.training import edit
    from sd_tf.training.pairs import WorldPairs, open_pairs
    from sd_tf.weights import open_checkpoint

    checkpoint = open_checkpoint(options.base, scheduler=options.scheduler)
    size = _size(options, checkpoint.config)
    count = _world_count(options.data)
    if count is None:
        pairs = open_pairs(options.data, options.on_error, host, _report)
    else:
        pairs = WorldPairs(count, size, host=host)
    _report(f"{len(pairs)} pairs")
    names = [field.name for field in dataclasses.fields(edit.Options) if field.name != "size"]
    chosen = edit.Options(size, **{name: getattr(options, name) for name in names})
    if chosen.flip is None:
        chosen = dataclasses.replace(chosen, flip=0.5 if count is None else 0.0)
    edit.train(checkpoint, pairs, _settings(options), chosen, options.out, _report)


def study_averages(options: argparse.Namespace) -> None:
    from sd_tf.checkpoints import TINY_FOLDER
    from sd_tf.training import ema_study
    from sd_tf.weights import open_checkpoint

    study = ema_study.STUDY
    if options.seeds is not None:
        study = dataclasses.replace(study, seeds=options.seeds)
    if options.steps is not None:
        settings = dataclasses.replace(study.settings, steps=options.steps)
        study = dataclasses.replace(study, settings=settings)
    ema_study.run(study, open_checkpoint(TINY_FOLDER), options.out, _report)


def write_pairs(options: argparse.Namespace) -> None:
    from sd_tf.training import edit_pairs

    edit_pairs.write(
        options.out,
        options.count,
        options.size,
        options.seed,
        options.split,
        options.kinds,
        _report,
    )


def tell_memory(options: argparse.Namespace) -> None:
    from sd_tf.training import ahead

    config = FAMILIES[options.family]
    settings = Settings(
        steps=1000,
        batch_size=options.batch_size,
        accumulate=options.accumulate,
        precision=options.precision,
    ).check()
    ahead.table(config, _size(options, config), settings, options.topology, _report)


def evaluate(options: argparse.Namespace) -> None:
    from sd_tf.pipeline import Pipeline
    from sd_tf.training import evaluate, evaluate_edits

    measure = {"eval": evaluate, "eval_edits": evaluate_edits}[options.command]
    pipe = Pipeline.load(options.export_dir, compile_cache=options.compile_cache)
    names = [field.name for field in dataclasses.fields(measure.Options)]
    chosen = measure.Options(**{name: getattr(options, name) for name in names})
    measure.evaluate(pipe, chosen, options.out, _report)
    _report(f"written to {options.out}")


COMMANDS = {
    "tiny": train_tiny,
    "text_to_image": tune,
    "instruct_pix2pix": instruct,
    "ema_study": study_averages,
    "edit_pairs": write_pairs,
    "memory": tell_memory,
    "eval": evaluate,
    "eval_edits": evaluate,
}

if __name__ == "__main__":
    sys.exit(main())
