"""Arguments that the commands which train share, and the settings made from them."""

import argparse
import dataclasses
import os
from pathlib import Path

from sd_tf.cli.arguments import Switch, report
from sd_tf.cli.options import OPENING
from sd_tf.cli.options import add_arguments as add_options
from sd_tf.config import PipelineConfig
from sd_tf.training.settings import (
    PRECISIONS,
    Averaging,
    LoraOptions,
    Settings,
    TrainingError,
)


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        dest="folder",
        type=Path,
        required=True,
        help="the run's folder; a run that was stopped goes on from it",
    )
    parser.add_argument(
        "--backend",
        choices=["tensorflow", "jax"],
        default="tensorflow",
        help="what computes the updates (default: tensorflow); jax: on all of its devices",
    )


def add_pictures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, help="pixels; default: the checkpoint's own")
    parser.add_argument(
        "--on_error",
        choices=["refuse", "skip"],
        default="refuse",
        help="what to do with a row that cannot be read",
    )


def add_data(parser: argparse.ArgumentParser, is_captioned: bool = True) -> None:
    """Add what `open_data` reads."""
    parser.add_argument(
        "--data", required=True, help="a folder, a parquet file or folder, or world:COUNT"
    )
    add_pictures(parser)
    if is_captioned:
        parser.add_argument("--caption_column", help="where it is not 'text'")
    parser.add_argument("--image_column", help="where it is not 'image' ('file_name' in a folder)")


def open_data(
    options: argparse.Namespace,
    path: str,
    size: int,
    host,
    checked: str = "bad_rows",
    is_captioned: bool = True,
):
    """Open this host's part of the pictures; `checked`: the file that lists bad rows."""
    from sd_tf.training import data

    count = world_count(options, path)
    if count is not None:
        return data.World(count, size, host=host)
    columns = {
        name: getattr(options, name)
        for name in ("caption_column", "image_column")
        if getattr(options, name, None) is not None
    }
    if not is_captioned:
        columns["caption_column"] = None
    file = options.folder / f"{host.named(checked)}.json"
    source = data.open_source(path, size, options.on_error, host, file, **columns)
    for line in source.skipped:
        report(f"skipped {line}")
    report(f"{len(source)} examples, {len(source.skipped)} skipped")
    return source


def add_train_text_encoder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--train_text_encoder",
        action="store_true",
        help="train the CLIP encoders, too, not the denoiser alone",
    )


def add_lora(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lora_rank",
        type=int,
        help="train an adapter of this rank (LoRA) beside the frozen weights",
    )
    parser.add_argument(
        "--lora_alpha", type=float, help="its branches are scaled by alpha / rank (default: rank)"
    )
    parser.add_argument(
        "--lora_conv",
        action="store_true",
        help="give resnets and samplers branches, too, not the transformers alone",
    )


def read_lora(options: argparse.Namespace) -> LoraOptions | None:
    """Return the options of the adapter to train, or None where all weights are trained."""
    if options.lora_rank is None:
        if options.lora_alpha is not None or options.lora_conv:
            raise TrainingError("--lora_alpha and --lora_conv go with --lora_rank.")
        return None
    return LoraOptions(options.lora_rank, options.lora_alpha, options.lora_conv).check()


def add_hosts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coordinator", help="host:port of host 0, where several train together")
    parser.add_argument("--hosts", type=int, help="how many there are; each reads its own part")
    parser.add_argument("--host", type=int, help="which of them this is, from 0")


def add_denoiser(parser: argparse.ArgumentParser) -> None:
    """Add the noise levels that a denoiser learns, and how its blocks are computed."""
    parser.add_argument(
        "--first_timestep",
        type=int,
        default=0,
        help="train on no timestep below it: noisy ones decide where things stand",
    )
    parser.add_argument(
        "--gradient_checkpointing",
        action="store_true",
        help="compute the denoiser's blocks again for the gradients: less memory, more time",
    )


def add_precision(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=default,
        help=f"of what is computed; trained weights stay float32 (default: {default})",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add how to open the checkpoint, how to save what is trained, and `Settings`."""
    add_options(parser, OPENING)
    parser.add_argument(
        "--save_dtype",
        choices=["float32", "float16"],
        default="float32",
        help="of what is saved, but T5, which stays as it is (default: float32)",
    )
    add_precision(parser, "float32")
    parser.add_argument(
        "--jit_compile",
        action=Switch,
        default=True,
        help="have XLA compile the update (the default); a run of few steps is faster without",
    )
    parser.add_argument(
        "--average",
        action=Switch,
        default=True,
        help="save the weights' moving average (the default), or the last weights",
    )
    parser.add_argument(
        "--ema_start", type=float, help="share of the run before averaging (default: 0)"
    )
    parser.add_argument("--ema_half_life", type=float, help="steps (default: 1000)")
    for field in dataclasses.fields(Settings):
        if field.type in (int, float):
            required, about = field.default is dataclasses.MISSING, field.metadata["help"]
            default = None if required else field.default
            parser.add_argument(
                f"--{field.name}",
                type=field.type,
                default=default,
                required=required,
                help=about if required else f"{about} (default: {default})",
            )


def read_settings(options: argparse.Namespace) -> Settings:
    numbers = {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(Settings)
        if f.type in (int, float)
    }
    return Settings(
        **numbers,
        averaging=_averaging(options),
        precision=options.precision,
        gradient_checkpointing=getattr(options, "gradient_checkpointing", False),
        jit_compile=options.jit_compile,
    ).check()


def _averaging(options: argparse.Namespace) -> Averaging:
    given = {"start": options.ema_start, "half_life": options.ema_half_life}
    given = {name: value for name, value in given.items() if value is not None}
    if options.average:
        return Averaging(**given)
    if given:
        raise TrainingError("--ema_start and --ema_half_life do not go with --noaverage.")
    return Averaging(start=None)


def picture_size(options: argparse.Namespace, config: PipelineConfig) -> int:
    """Return --size, or the checkpoint's own, in pixels."""
    size = config.default_size if options.size is None else options.size
    multiple, most = config.size_multiple, config.denoiser.most_latents
    if size < 1 or size % multiple:
        raise TrainingError(f"--size is a positive multiple of {multiple}. Received: {size}")
    if most is not None and size > most * config.autoencoder.downscale:
        raise TrainingError(
            f"--size is at most {most * config.autoencoder.downscale}: the checkpoint has "
            f"positions for no more. Received: {size}"
        )
    return size


def world_count(options: argparse.Namespace, data: str) -> int | None:
    """Return N of data that is world:N, or None where it is something else."""
    kind, _, number = data.partition(":")
    if kind != "world" or not number.isdecimal():
        return None
    count, hosts = int(number), options.hosts or 1
    if count < hosts:
        raise TrainingError(
            f"world:COUNT has an example or more for each host. Received: {data} for "
            f"{hosts} host{'s' if hosts > 1 else ''}"
        )
    return count


def use_backend(options: argparse.Namespace):
    """Choose Keras's backend and devices before a run; return this host.

    On JAX, a batch is divided among the devices, each of which holds all weights.
    """
    os.environ["KERAS_BACKEND"] = options.backend  # read when Keras is first imported
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
