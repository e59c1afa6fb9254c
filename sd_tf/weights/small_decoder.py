"""Open a small decoder's folder as diffusers saves an `AutoencoderTiny`; add it to a checkpoint.

The folder's encoder is not read: pictures are encoded by the checkpoint's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import keras

from sd_tf.config import ConfigError, SmallDecoderConfig
from sd_tf.files.objects import read_object
from sd_tf.files.tensors import CheckpointError, StoredTensor
from sd_tf.weights import layout
from sd_tf.weights.checkpoint import Checkpoint
from sd_tf.weights.diffusers import open_component, understood
from sd_tf.weights.diffusers_fields import CONFIG, Fields

CLASS = "AutoencoderTiny"
PREFIX = "decoder."  # how its tensors' names begin
ACTIVATIONS = {name: name for name in ("relu", "silu", "gelu", "mish")} | {"swish": "silu"}
# Fields of the encoder, and of latents that are kept as bytes.
UNUSED = (
    "encoder_block_out_channels",
    "num_encoder_blocks",
    "latent_magnitude",
    "latent_shift",
    "block_out_channels",
    "force_upcast",
)


@dataclass(frozen=True)
class SmallDecoderCheckpoint:
    """An opened small decoder: its configuration and its tensors under diffusers' names."""

    name: str  # what exports call it: without the folders that lead to it
    source: str
    config: SmallDecoderConfig
    tensors: Mapping[str, StoredTensor]

    def build(self, dtype: str = "float32") -> keras.layers.Layer:
        """Build the model and load its weights, strictly and one tensor at a time."""
        return layout.load(self.config, self.tensors, dtype, self.source)


def is_small_decoder(path: Path) -> bool:
    """Tell whether a folder says that it holds an `AutoencoderTiny`."""
    file = path / CONFIG
    return file.is_file() and read_object(file, CheckpointError).get("_class_name") == CLASS


def check_class(raw: Mapping, where: str) -> None:
    """Refuse what is not a small decoder, by the class in its `config.json`."""
    if (found := raw.get("_class_name")) != CLASS:
        raise CheckpointError(
            f"{where} is not a small decoder: its {CONFIG} says {found}, not {CLASS}."
        )


def open_folder(path: Path) -> SmallDecoderCheckpoint:
    """Open a folder that `is_small_decoder`."""
    file = path / CONFIG
    with understood(file):
        config = read_small_decoder(read_object(file, CheckpointError), str(file))
    name = path.resolve().name
    tensors = open_component(path, name, config, None)
    decoder = {key: tensor for key, tensor in tensors.items() if key.startswith(PREFIX)}
    return SmallDecoderCheckpoint(name, str(path), config, decoder)


def read_small_decoder(raw: Mapping, where: str) -> SmallDecoderConfig:
    fields = Fields(raw, where)
    fields.require("in_channels", 3, default=3)
    fields.require("upsample_fn", "nearest", default="nearest")
    fields.require("upsampling_scaling_factor", 2, default=2)
    channels = tuple(fields.take("decoder_block_out_channels", (64,) * 4))
    blocks = tuple(fields.take("num_decoder_blocks", (3, 3, 3, 1)))
    if len(set(channels)) != 1 or len(channels) != len(blocks):
        raise ConfigError(
            f"{where}: decoder_block_out_channels has one number, as often as num_decoder_blocks "
            f"has any. Received: {list(channels)} and {list(blocks)}"
        )
    config = SmallDecoderConfig(
        out_channels=fields.take("out_channels", 3),
        latent_channels=fields.take("latent_channels", 4),
        channels=channels[0],
        blocks=blocks,
        activation=fields.choose("act_fn", ACTIVATIONS, "relu"),
        scaling_factor=fields.take("scaling_factor", 1.0),
        shift_factor=fields.take("shift_factor", None) or 0.0,
    )
    fields.finish(UNUSED)
    return config


def write_small_decoder(config: SmallDecoderConfig) -> dict:
    """Return `config.json`; an encoder of one channel, which diffusers wants, stands beside it."""
    levels = len(config.blocks)
    return {
        "_class_name": CLASS,
        "in_channels": 3,
        "out_channels": config.out_channels,
        "latent_channels": config.latent_channels,
        "decoder_block_out_channels": [config.channels] * levels,
        "num_decoder_blocks": list(config.blocks),
        "encoder_block_out_channels": [1] * levels,
        "num_encoder_blocks": [0] * levels,
        "act_fn": config.activation,
        "scaling_factor": config.scaling_factor,
        "shift_factor": config.shift_factor,
    }


def encoder_shapes(config: SmallDecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the encoder's tensors that `write_small_decoder` speaks of."""
    levels = len(config.blocks)
    shapes = {"encoder.layers.0.weight": (1, 3, 3, 3), "encoder.layers.0.bias": (1,)}
    shapes |= {f"encoder.layers.{level}.weight": (1, 1, 3, 3) for level in range(1, levels)}
    shapes[f"encoder.layers.{levels}.weight"] = (config.latent_channels, 1, 3, 3)
    shapes[f"encoder.layers.{levels}.bias"] = (config.latent_channels,)
    return shapes


def with_small_decoders(
    checkpoint: Checkpoint, decoders: Mapping[str, SmallDecoderCheckpoint]
) -> Checkpoint:
    """Return the checkpoint with small decoders as those components that are their keys.

    Raises:
        CheckpointError: one is for latents of another kind.
    """
    config = replace(
        checkpoint.config, small_decoders={name: one.config for name, one in decoders.items()}
    )
    for one in decoders.values():
        try:
            one.config.check_fits(config.autoencoder)
        except ConfigError as error:
            raise CheckpointError(
                f"{one.source} does not fit {checkpoint.source}: {error}"
            ) from error
    parts = checkpoint.with_parts({name: one.tensors for name, one in decoders.items()})
    return replace(parts, config=config)
