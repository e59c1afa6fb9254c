"""What an update takes on a TPU slice that is somewhere else, compiled from shapes alone."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sd_tf.config import PipelineConfig
from sd_tf.jax.ahead import figures_of
from sd_tf.jax.chips import GB, Chip, DoesNotFitError, chip_of, compiled, no_row, slice_devices
from sd_tf.jax.sharding import check_mesh, make_mesh, of_value
from sd_tf.models import deferred_variables
from sd_tf.training.losses import Denoising, recomputed
from sd_tf.training.settings import Settings, TrainingError
from sd_tf.training.step import frozen_of, jax_update, state_of
from sd_tf.training.trainer import optimizer_for
from sd_tf.weights.layout import abstract_model

HEADINGS = (
    "UNet's blocks",
    "weights and moments, GB a chip",
    "temporaries",
    "HBM in all",
    "TFLOP an example",
    "GB an example",
    "seconds an update (estimate)",
    "examples/s (estimate)",
)


@dataclass(frozen=True)
class Held:
    """By one chip, in bytes, and the figures of one update there."""

    state: int
    temporaries: int
    code: int
    flops: float
    accessed: float
    compile_seconds: float

    @property
    def memory(self) -> int:
        return self.state + self.temporaries + self.code

    def row(self, label: str, chip: Chip, examples: int, chips: int) -> list[str]:
        """As in `HEADINGS`."""
        seconds = max(self.flops / chip.flops, self.accessed / chip.bandwidth)
        fits = "" if self.memory <= chip.memory_bytes else ", does not fit"
        return [
            label,
            f"{self.state / GB:.2f}",
            f"{self.temporaries / GB:.2f}",
            f"{self.memory / GB:.2f} of {chip.memory_bytes / GB:.1f}{fits}",
            f"{self.flops * chips / examples / 1e12:.2f}",
            f"{self.accessed * chips / examples / GB:.1f}",
            f"{seconds:.3f}",
            f"{examples / seconds:.1f}",
        ]


def held(
    config: PipelineConfig, size: int, settings: Settings, devices: Sequence[jax.Device]
) -> Held:
    """An update of the UNet, latents and text states given; a batch divided among the chips, the
    rest on each. An average adds a float32 copy of the weights.
    """
    if config.unet.added is not None:
        raise TrainingError(
            f"Training is of checkpoints with one text encoder (SD1, SD2). "
            f"Received: {config.family}"
        )
    mesh = make_mesh(devices)
    check_mesh(mesh, settings.batch_size // settings.accumulate)
    unet = abstract_model(config.unet, settings.precision)
    if settings.gradient_checkpointing:
        recomputed(unet)
    loss = Denoising(unet, None, config.schedule, min_snr=None)
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
    figures = figures_of(compiled(lowered))
    seconds = time.perf_counter() - start
    counted = sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in (*state, *fixed))
    inputs = figures["argument_bytes"] - counted + figures["output_bytes"]
    return Held(
        counted,
        figures["temporary_bytes"] + inputs,
        figures["code_bytes"],
        figures["flops"],
        figures["accessed_bytes"],
        seconds,
    )


def _batch(config: PipelineConfig, size: int, count: int) -> dict[str, tuple[tuple, str]]:
    side, channels = size // config.vae.downscale, config.vae.latent_channels
    text = config.text_encoder.max_length, config.unet.context_dim
    latents = (count, side, side, channels)
    batch = {
        "latents": (latents, "float32"),
        "noise": (latents, "float32"),
        "timesteps": ((count,), "int32"),
        "context": ((count, *text), "float32"),
    }
    if config.unet.in_channels > channels:
        batch["beside"] = ((*latents[:3], config.unet.in_channels - channels), "float32")
    return batch


def table(
    config: PipelineConfig,
    size: int,
    settings: Settings,
    topology: str,
    report: Callable[[str], None],
) -> None:
    """What the blocks compute kept for the gradients, and computed again, in a row each."""
    chip, devices = chip_of(topology), slice_devices(topology)
    rows = []
    for label, again in (("kept", False), ("computed again", True)):
        try:
            found = held(config, size, replace(settings, gradient_checkpointing=again), devices)
        except DoesNotFitError as error:
            report(f"{label}: {error}")
            rows.append(no_row(label))
            continue
        report(f"{label}: compiled in {found.compile_seconds:.1f} s")
        rows.append(found.row(label, chip, settings.batch_size, len(devices)))
    report(
        f"\n{config.family}, {size} px, {settings.batch_size} examples on {topology}, "
        f"{settings.precision}; time = max(arithmetic, memory) at published peaks\n"
    )
    for cells in (HEADINGS, ["---"] * len(HEADINGS), *rows):
        report(f"| {' | '.join(cells)} |")
