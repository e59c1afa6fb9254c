"""Write diffusers folders, one tensor at a time, in shards where a component is large."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import keras
import numpy as np

from sd_tf.config import (
    PREVIEW_DECODER,
    AutoencoderConfig,
    ControlNetConfig,
    FluxConfig,
    MMDiTConfig,
    PipelineConfig,
    SmallDecoderConfig,
    T5EncoderConfig,
    TextEncoderConfig,
    UNetConfig,
)
from sd_tf.files.stream import write_safetensors
from sd_tf.files.tensors import CheckpointError, StoredTensor
from sd_tf.tokenizer.open import Tokenizer
from sd_tf.weights import diffusers_config, diffusers_transformers, diffusers_unet, layout
from sd_tf.weights.diffusers import weights_stem
from sd_tf.weights.diffusers_controlnet import write_controlnet
from sd_tf.weights.diffusers_fields import CONFIG
from sd_tf.weights.diffusers_pipelines import (
    CALL_DEFAULTS,
    MODEL_INDEX,
    pipeline_class,
    tokenizer_class,
    tokenizer_of,
)
from sd_tf.weights.diffusers_schedule import write_schedule
from sd_tf.weights.small_decoder import encoder_shapes, write_small_decoder
from sd_tf.weights.texts import LEFT_OUT

SHARD_BYTES = 5 * 10**9
WRITERS: dict[type, Callable[..., dict]] = {
    TextEncoderConfig: diffusers_config.write_text_encoder,
    T5EncoderConfig: diffusers_transformers.write_t5,
    UNetConfig: diffusers_unet.write_unet,
    MMDiTConfig: diffusers_transformers.write_mmdit,
    FluxConfig: diffusers_transformers.write_flux,
    AutoencoderConfig: diffusers_config.write_vae,
}
ABSENT = [None, None]


def save_folder(
    folder: Path,
    config: PipelineConfig,
    models: Mapping[str, keras.layers.Layer],
    tokenizers: Mapping[str, Tokenizer],
    dtype: str | None = None,
    unchanged: Mapping[str, Mapping[str, StoredTensor]] | None = None,
) -> None:
    """Write a pipeline that diffusers loads, with tensors of `dtype` (None: the variables' dtype).

    The tensors of components that are `unchanged` are written as they are stored, whatever `dtype`.

    Diffusers' files have no fields for the numerics in which KerasCV differs (epsilons, gelu), so
    weights from KerasCV give slightly different results when diffusers computes them. Nor have
    they one for the number of T5's tokens, or of the zeros in their place: see `open_checkpoint`.
    """
    if models.keys() != config.components.keys():
        raise CheckpointError(
            f"models must be those of the configuration: {', '.join(config.components)}. "
            f"Received: {', '.join(models) or 'none'}"
        )
    tensors = {name: _tensors_of(model, dtype) for name, model in models.items()}
    for name, stored in (unchanged or {}).items():
        tensors[name] = {key: stored[key].as_read() for key in tensors[name]}
    write_folder(folder, config, tensors, tokenizers)


def _tensors_of(model: keras.layers.Layer, dtype: str | None) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(
            slot.shape,
            keras.backend.standardize_dtype(slot.variable.dtype) if dtype is None else dtype,
            partial(slot.stored, dtype),
        )
        for name, slot in layout.slots(model).items()
    }


def write_folder(
    folder: Path,
    config: PipelineConfig,
    tensors: Mapping[str, Mapping[str, StoredTensor]],
    tokenizers: Mapping[str, Tokenizer],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a pipeline that diffusers loads, from tensors by component, each read when written."""
    folder = Path(folder)
    config.check()
    if tokenizers.keys() != config.text_encoders.keys():
        raise CheckpointError(
            f"tokenizers must have one for each of {', '.join(config.text_encoders)}. "
            f"Received: {', '.join(tokenizers) or 'none'}"
        )
    schedule = write_schedule(config.schedule)  # first, as diffusers may have none for it
    index = {
        "_class_name": pipeline_class(config),
        "_diffusers_version": "0.35.0",
        **({CALL_DEFAULTS: dict(config.suited)} if config.suited else {}),
        **_traits(config),
    }
    for name, part in config.components.items():
        content = WRITERS[type(part)](part)
        if name in config.text_encoders:
            index[name] = ["transformers", content["architectures"][0]]
        else:
            index[name] = ["diffusers", content["_class_name"]]
        _write_json(folder / name / CONFIG, content)
        _write_weights(folder / name, weights_stem(name), tensors[name], shard_bytes)
    for encoder, tokenizer in tokenizers.items():
        name = tokenizer_of(encoder)
        tokenizer.save(folder / name)
        index[name] = ["transformers", tokenizer_class(config, encoder)]
    _write_json(folder / "scheduler" / "scheduler_config.json", schedule)
    index["scheduler"] = ["diffusers", schedule["_class_name"]]
    _write_json(folder / MODEL_INDEX, index)


def save_controlnet(
    folder: Path, config: ControlNetConfig, model: keras.layers.Layer, dtype: str | None = None
) -> None:
    """Write a ControlNet that diffusers loads, with tensors of `dtype` (None: the variables')."""
    write_controlnet_folder(folder, config, _tensors_of(model, dtype))


def save_small_decoder(
    folder: Path, config: SmallDecoderConfig, model: keras.layers.Layer, dtype: str | None = None
) -> None:
    """Write a small decoder that diffusers loads, with tensors of `dtype` (None: the variables').

    Beside it stands an encoder of zeros, which diffusers wants.
    """
    encoder = {
        name: StoredTensor(shape, "float32", partial(np.zeros, shape, "float32"))
        for name, shape in encoder_shapes(config).items()
    }
    _write_json(folder / CONFIG, write_small_decoder(config))
    tensors = {**encoder, **_tensors_of(model, dtype)}
    _write_weights(folder, weights_stem(PREVIEW_DECODER), tensors, SHARD_BYTES)


def write_controlnet_folder(
    folder: Path, config: ControlNetConfig, tensors: Mapping[str, StoredTensor]
) -> None:
    """Write a ControlNet that diffusers loads, from tensors that are read when written."""
    _write_json(folder / CONFIG, write_controlnet(config))
    _write_weights(folder, weights_stem(config.component), tensors, SHARD_BYTES)


def _traits(config: PipelineConfig) -> dict:
    """Return what the index says of a pipeline beside its components, and which are absent."""
    if not isinstance(config.denoiser, UNetConfig):
        index = {"image_encoder": ABSENT, "feature_extractor": ABSENT}
        if config.zero_tokens:
            index |= {LEFT_OUT: ABSENT, tokenizer_of(LEFT_OUT): ABSENT}
        return index
    if config.denoiser.added is None:
        index = {"safety_checker": ABSENT, "feature_extractor": ABSENT}
        return index | {"requires_safety_checker": False}
    index = {"force_zeros_for_empty_prompt": config.zero_empty_negative}
    if "text_encoder" not in config.text_encoders:
        index |= {"text_encoder": ABSENT, "tokenizer": ABSENT}
        index["requires_aesthetics_score"] = config.denoiser.added.num_time_ids == 5
    return index


def _write_weights(
    folder: Path, stem: str, tensors: Mapping[str, StoredTensor], shard_bytes: int
) -> None:
    """Write a component's tensors to one file, or to shards and their index."""
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        write_safetensors(tensors, folder / f"{stem}.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
        part = {name: tensors[name] for name in names}
        write_safetensors(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.size * tensor.itemsize for tensor in tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / f"{stem}.safetensors.index.json", content)


def _shards(tensors: Mapping[str, StoredTensor], most: int) -> list[list[str]]:
    """Divide tensors, in their order, into shards of at most so many bytes."""
    shards, size = [[]], 0
    for name, tensor in tensors.items():
        nbytes = tensor.size * tensor.itemsize
        if shards[-1] and size + nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _write_json(path: Path, content: Mapping) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
