"""Open IP-Adapters and the vision encoder that they take pictures from; add them to a checkpoint.

An adapter is one `.safetensors` file, which tells its sizes: `image_proj.*` makes tokens of an
encoded picture, `ip_adapter.*` are keys and values for the UNet's attentions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sd_tf.config import (
    ConfigError,
    ImageAdapterConfig,
    ImageAttentionConfig,
    ImageProjectionConfig,
    ImagePromptsConfig,
    VisionEncoderConfig,
)
from sd_tf.config.image_prompts import FULL, LINEAR, RESAMPLER, numbered
from sd_tf.files.objects import read_object
from sd_tf.files.tensors import (
    CheckpointError,
    StoredTensor,
    open_safetensors,
    refuse_pickle,
    shortened,
)
from sd_tf.weights.checkpoint import Checkpoint
from sd_tf.weights.diffusers import open_component, understood
from sd_tf.weights.diffusers_config import read_vision_encoder
from sd_tf.weights.diffusers_fields import CONFIG
from sd_tf.weights.single_file_names import Tensors, under

PROJECTION, ATTENTION = "image_proj.", "ip_adapter."
ENCODER_FOLDER = "image_encoder"  # beside an adapter's file, as they are published
LINEAR_TOKENS = 4  # of every base adapter
KEY = re.compile(r"(\d+)\.to_([kv])_ip\.weight")
FACE = ("perceiver_resampler.", "norm.weight")  # told by these alone: FaceID


@dataclass(frozen=True)
class ImageAdapterCheckpoint:
    """An opened IP-Adapter: its configuration, and the tensors of its two parts."""

    name: str  # what exports call it
    source: str
    config: ImageAdapterConfig
    projection: Mapping[str, StoredTensor]
    attention: Mapping[str, StoredTensor]


@dataclass(frozen=True)
class VisionEncoderCheckpoint:
    """An opened vision encoder."""

    source: str
    config: VisionEncoderConfig
    tensors: Mapping[str, StoredTensor]


def is_image_adapter_file(path: Path) -> bool:
    """Tell whether a `.safetensors` file holds an IP-Adapter."""
    names = open_safetensors(path) if path.is_file() and path.suffix == ".safetensors" else ()
    return all(any(name.startswith(start) for name in names) for start in (PROJECTION, ATTENTION))


def open_image_adapter(path: Path) -> ImageAdapterCheckpoint:
    """Open an IP-Adapter's file."""
    refuse_pickle(path)
    if not is_image_adapter_file(path):
        if path.exists():
            raise CheckpointError(
                f"{path} is not an IP-Adapter: give a .safetensors file that has {PROJECTION}* and "
                f"{ATTENTION}*."
            )
        raise CheckpointError(f"No such file: {path}")
    stored = open_safetensors(path)
    projection, attention = under(stored, PROJECTION), under(stored, ATTENTION)
    if surplus := [name for name in attention if not KEY.fullmatch(name)]:
        raise CheckpointError(
            f"{path} has tensors that are no keys or values of pictures, such as those of a FaceID "
            f"adapter, which needs a face network: {ATTENTION}{min(surplus)}"
        )
    numbers = sorted({int(KEY.fullmatch(name)[1]) for name in attention})
    if lacking := [
        f"{ATTENTION}{name}"
        for number in numbers
        for letter in "kv"
        if (name := f"{number}.to_{letter}_ip.weight") not in attention
    ]:
        raise CheckpointError(
            f"{path} is incomplete: keys and values come in pairs, and it lacks "
            f"{shortened(lacking)}."
        )
    sizes = [_shape(stored, f"{ATTENTION}{number}.to_k_ip.weight", 2, path) for number in numbers]
    places = {number: place for place, number in enumerate(numbers)}
    attention = {
        KEY.sub(lambda m: f"ip_adapter.{places[int(m[1])]}.to_{m[2]}_ip.weight", name): tensor
        for name, tensor in attention.items()
    }
    config = ImageAdapterConfig(
        _projection(projection, path),
        ImageAttentionConfig(tuple(width for width, _ in sizes), sizes[0][1]),
    )
    return ImageAdapterCheckpoint(
        path.stem,
        str(path),
        config,
        {f"image_proj.{_named(name)}": tensor for name, tensor in projection.items()},
        attention,
    )


def _shape(tensors: Tensors, name: str, rank: int, path: Path, prefix: str = "") -> tuple[int, ...]:
    """Return a tensor's shape; CheckpointError if it has another number of dimensions.

    `prefix` is what the file has before the name.
    """
    found = tensors[name].shape
    if len(found) != rank:
        raise CheckpointError(
            f"{prefix}{name} of {path} must have {rank} dimensions. Received: {list(found)}"
        )
    return found


def _projection(tensors: Tensors, path: Path) -> ImageProjectionConfig:
    """Tell the kind of a projection and its sizes by its tensors."""

    def shape(name: str, rank: int = 2) -> tuple[int, ...]:
        if name not in tensors:
            raise CheckpointError(f"{path} has no {PROJECTION}{name}, which IP-Adapters have.")
        return _shape(tensors, name, rank, path, PROJECTION)

    if "proj.weight" in tensors or "proj.bias" in tensors:
        out, width = shape("proj.weight")
        return ImageProjectionConfig(LINEAR, width, out // LINEAR_TOKENS, LINEAR_TOKENS)
    if "proj.3.weight" in tensors:
        context, width = shape("proj.2.weight")
        return ImageProjectionConfig(FULL, width, context)
    if "latents" in tensors:
        _, count, width = shape("latents", 3)
        layers = {int(name.split(".")[1]) for name in tensors if name.startswith("layers.")}
        return ImageProjectionConfig(
            RESAMPLER,
            embed_dim=shape("proj_in.weight")[1],
            context_dim=shape("proj_out.weight")[0],
            num_tokens=count,
            hidden_size=width,
            inner_size=shape("layers.0.0.to_q.weight")[0],
            intermediate_size=shape("layers.0.1.1.weight")[0],
            num_layers=len(layers),
        )
    if any(name.startswith(FACE) for name in tensors):
        raise CheckpointError(
            f"{path} is a FaceID adapter, which takes what a face network makes of a picture. "
            f"Supported are base, plus, plus face and full face."
        )
    raise CheckpointError(f"{path} has no projection of pictures that is known here.")


def _named(name: str) -> str:
    """Give a resampler's layers, which are numbered, the names that they have here."""
    name = re.sub(r"^layers\.(\d+)\.0\.", r"layers.\1.attn.", name)
    return re.sub(r"^layers\.(\d+)\.1\.", r"layers.\1.ff.", name)


def open_vision_encoder(folder: Path) -> VisionEncoderCheckpoint:
    """Open the folder of a CLIP vision encoder, as transformers saves it."""
    file = folder / CONFIG
    if not file.is_file():
        raise CheckpointError(
            f"{folder} is no vision encoder, which an IP-Adapter needs: it has no {CONFIG}. Give "
            f"`image_encoder`, the folder that was published with the adapter."
        )
    with understood(file):
        config = read_vision_encoder(read_object(file, CheckpointError), str(file))
    tensors = open_component(folder, config.component, config, None)
    return VisionEncoderCheckpoint(str(folder), config, tensors)


def with_image_prompts(
    checkpoint: Checkpoint,
    adapters: Sequence[ImageAdapterCheckpoint],
    encoder: VisionEncoderCheckpoint,
) -> Checkpoint:
    """Return the checkpoint with adapters that take pictures as prompts.

    Raises:
        CheckpointError: an adapter is for another kind of checkpoint, or another encoder.
    """
    for adapter in adapters:
        config = ImagePromptsConfig(encoder.config, (adapter.config,))
        try:
            replace(checkpoint.config, image_prompts=config).check()
        except ConfigError as error:
            raise CheckpointError(
                f"{adapter.source} does not fit {checkpoint.source}: {error}"
            ) from error
    found = {VisionEncoderConfig.component: encoder.tensors}
    for number, adapter in enumerate(adapters):
        found[numbered(ImageProjectionConfig.component, number)] = adapter.projection
        found[numbered(ImageAttentionConfig.component, number)] = adapter.attention
    config = ImagePromptsConfig(encoder.config, tuple(adapter.config for adapter in adapters))
    checkpoint = checkpoint.with_parts(found)
    return replace(
        checkpoint,
        config=replace(checkpoint.config, image_prompts=config),
        image_adapters=tuple(adapter.name for adapter in adapters),
    )
