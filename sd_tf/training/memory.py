"""Compile an update for a TPU slice that need not be present, and report its memory and time."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
from jax.sharding import NamedSharding, PartitionSpec

from sd_tf.components.conditions import conditioner_of
from sd_tf.config import PipelineConfig, family_of
from sd_tf.jax import chips
from sd_tf.jax.compile import figures_of
from sd_tf.jax.sharding import check_mesh, make_mesh, of_value
from sd_tf.models import deferred_variables
from sd_tf.training.conditions import check_trainable, text_precisions
from sd_tf.training.edit import check_family
from sd_tf.training.hosts import check_parts
from sd_tf.training.losses import Denoising, recomputed
from sd_tf.training.settings import Settings, TrainingError
from sd_tf.training.step import frozen_of, jax_update, state_of
from sd_tf.training.trainer import optimizer_for
from sd_tf.weights.layout import abstract_model


def is_trained(config: PipelineConfig) -> bool:
    """Tell whether a command trains such a denoiser, on captioned pictures or to edit."""
    check = check_family if config.latent_inputs == "image" else check_trainable
    try:
        check(config)
    except TrainingError:
        return False
    return True


def compile_update(
    config: PipelineConfig, size: int, settings: Settings, devices: Sequence[jax.Device]
) -> dict[str, float]:
    """Compile an update of the denoiser, from shapes alone, and return the compiler's figures.

    Latents and text states are given. The batch is divided among the chips; weights are on each. An
    average of the weights would add a float32 copy of them.
    """
    mesh = make_mesh(devices)
    check_mesh(mesh, settings.batch_size)
    check_parts(settings, len(devices))
    denoiser = abstract_model(config.denoiser, settings.precision)
    if settings.gradient_checkpointing:
        recomputed(denoiser)
    loss = Denoising(denoiser, [], config, min_snr=None)
    optimizer = optimizer_for(settings, loss.trainable_variables)
    with deferred_variables():
        optimizer.build(loss.trainable_variables)
    update = jax_update(loss, optimizer, None, settings)
    everywhere = NamedSharding(mesh, PartitionSpec())
    state, fixed = (
        [jax.ShapeDtypeStruct(tuple(v.shape), v.dtype, sharding=everywhere) for v in variables]
        for variables in (state_of(loss, optimizer, None), frozen_of(loss))
    )
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=of_value(mesh, name, len(shape)))
        for name, (shape, dtype) in _batch(config, size, settings.batch_size).items()
    }
    lowered = jax.jit(update, donate_argnums=0).lower(state, fixed, batch)
    start = time.perf_counter()
    code = chips.compile_lowered(lowered)
    return {
        "compile_seconds": round(time.perf_counter() - start, 2),
        "weight_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in (*state, *fixed)),
        **figures_of(code),
    }


def _batch(config: PipelineConfig, size: int, count: int) -> dict[str, tuple[tuple, str]]:
    side, channels = size // config.autoencoder.downscale, config.autoencoder.latent_channels
    length = conditioner_of(config).length(config, 1)
    latents = (count, side, side, channels)
    batch = {
        "latents": (latents, "float32"),
        "noise": (latents, "float32"),
        "timesteps": ((count,), "int32"),
        "context": ((count, length, config.denoiser.context_dim), "float32"),
    }
    if config.denoiser.pooled_dim is not None:
        batch["pooled"] = ((count, config.denoiser.pooled_dim), "float32")
    if config.denoiser.num_time_ids:
        batch["time_ids"] = ((count, config.denoiser.num_time_ids), "float32")
    if config.denoiser.in_channels > channels:
        batch["beside"] = ((*latents[:3], config.denoiser.in_channels - channels), "float32")
    return batch


def table(
    config: PipelineConfig,
    size: int,
    settings: Settings,
    topology: str,
    report: Callable[[str], None],
) -> None:
    """Report a table with a row for activations kept, and a row for gradient checkpointing."""
    chip, devices = chips.chip_of(topology), chips.slice_devices(topology)
    rows = []
    for label, again in (("kept", False), ("computed again", True)):
        try:
            figures = compile_update(
                config, size, replace(settings, gradient_checkpointing=again), devices
            )
        except chips.DoesNotFitError as error:
            report(f"{label}: {error}")
            rows.append(chips.no_row(label))
            continue
        report(f"{label}: compiled in {figures['compile_seconds']:.1f} s")
        found = chips.outlook({"update": figures}, chip, {"update": 1})
        rows.append(chips.row(label, found, chip, settings.batch_size, len(devices)))
    report(
        f"\n{family_of(config)}, {size} px, {settings.batch_size} examples on {topology}, "
        f"{settings.precision}; time = max(arithmetic, memory) at published peaks\n"
    )
    report(chips.table("denoiser's blocks", "weights and moments", "example", "an update", rows))
    texts = text_bytes(config, settings.precision) / 1e9
    report(f"\nThe text encoders, which are not counted, take {texts:.2f} GB more on each chip.")


def text_bytes(config: PipelineConfig, precision: str) -> int:
    """Return the size of the text encoders' weights in training."""
    return sum(
        math.prod(variable.shape) * jax.numpy.dtype(variable.dtype).itemsize
        for name, one in text_precisions(config, precision).items()
        for variable in abstract_model(config.text_encoders[name], one).variables
    )
