"""Read diffusers folders: `model_index.json` and a folder for each component."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from sd_tf.config import (
    PipelineConfig,
    T5EncoderConfig,
    TextEncoderConfig,
    VisionEncoderConfig,
    latent_inputs_of,
)
from sd_tf.errors import SdTfError
from sd_tf.files.objects import read_object
from sd_tf.files.tensors import (
    PICKLES,
    CheckpointError,
    StoredTensor,
    open_safetensors,
    open_sharded,
    refuse_pickle,
    shortened,
)
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.tokenizer.t5 import T5Tokenizer
from sd_tf.weights import diffusers_config, diffusers_transformers, diffusers_unet
from sd_tf.weights.checkpoint import Checkpoint
from sd_tf.weights.diffusers_pipelines import (
    CALL_DEFAULTS,
    MODEL_INDEX,
    T5,
    TEXT_ENCODER,
    components_of,
    kind_of,
    read_index,
    tokenizer_of,
)
from sd_tf.weights.diffusers_schedule import read_schedule
from sd_tf.weights.t5 import t5_names
from sd_tf.weights.texts import check_length

TOKENIZERS = {TextEncoderConfig: ClipTokenizer, T5EncoderConfig: T5Tokenizer}
OLD_VAE_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def open_folder(
    folder: Path,
    variant: str | None = None,
    scheduler: str | None = None,
    without: Sequence[str] = (),
    max_sequence_length: int | None = None,
) -> Checkpoint:
    """Open a folder as a `Checkpoint`.

    Args:
        variant: a set of weights: `fp16`, `non_ema`. A component that lacks it takes its default.
        without: text encoders to leave out, whose files need not be there.
        max_sequence_length: tokens of a prompt for T5; None: as many as diffusers' pipeline takes.
    """
    index = read_index(folder, without)
    config = read_config(folder, index, scheduler, max_sequence_length)
    check_variant({name: _names_in(folder / name) for name in config.components}, variant)
    readers = {
        name: partial(open_component, folder / name, name, part, variant)
        for name, part in config.components.items()
    }
    named = components_of(index)
    tokenizers = {}
    for encoder, part in config.text_encoders.items():
        tokenizer = tokenizer_of(encoder)
        if tokenizer in named or (folder / tokenizer).is_dir():
            tokenizers[encoder] = partial(TOKENIZERS[type(part)].from_folder, folder / tokenizer)
        elif not isinstance(part, T5EncoderConfig):  # of which `Checkpoint.tokenizer` tells
            raise CheckpointError(
                f"{folder / MODEL_INDEX} names no {tokenizer}, and there is no such folder. It "
                f"says how prompts are padded, in which releases differ: copy it from the release."
            )
    name = folder.resolve().name
    return Checkpoint(name, str(folder), "diffusers folder", config, readers, tokenizers)


def _call_defaults(index: Mapping) -> dict:
    found = index.get(CALL_DEFAULTS, {})
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{CALL_DEFAULTS} has numbers by parameters' names. Received: {found!r}"
        )
    return found


def read_config(
    folder: Path,
    index: Mapping,
    scheduler: str | None = None,
    max_sequence_length: int | None = None,
) -> PipelineConfig:
    """Read the configurations of all components that an index names."""
    components, kind = components_of(index), kind_of(index)
    has_t5 = kind.t5_length is not None
    check_length(max_sequence_length, has_t5, f"a {index['_class_name']}")
    for name in kind.required:
        if name not in components:
            raise CheckpointError(f"{folder / MODEL_INDEX} names no {name}.")
    if not components.keys() & set(kind.text_encoders):
        raise CheckpointError(f"{folder / MODEL_INDEX} names no text encoder.")
    t5_length = kind.t5_length if max_sequence_length is None else max_sequence_length

    def read(reader, part, *more, file="config.json", **named):
        path = folder / part / file
        with understood(path):
            return reader(read_object(path, CheckpointError), str(path), *more, **named)

    def text_encoder(name):
        if components[name][1] == T5:
            return read(diffusers_transformers.read_t5, name, t5_length)
        encoder = read(
            diffusers_config.read_text_encoder,
            name,
            projected=components[name][1].endswith("WithProjection"),
            penultimate=kind.penultimate,
        )
        return replace(encoder, pools_unprojected=kind.pools_unprojected)

    encoders = {name: text_encoder(name) for name in kind.text_encoders if name in components}
    if "unet" in components:
        pooled = [encoder.projection_dim for encoder in encoders.values()]
        denoiser = read(diffusers_unet.read_unet, "unet", pooled[-1], kind.old_sample_size)
    else:
        [name] = kind.components["transformer"]
        denoiser = read(diffusers_transformers.READERS[name], "transformer")
    vae = read(
        diffusers_config.read_vae,
        "vae",
        of_transformer="transformer" in components,
        upcasts=kind.zeros_and_upcast,
    )
    schedule = read(
        read_schedule,
        "scheduler",
        scheduler,
        file="scheduler_config.json",
        flow_spacing=kind.flow_spacing,
        betas_fields=kind.betas_fields,
    )
    zeros = index.get("force_zeros_for_empty_prompt", kind.zeros_and_upcast)
    is_left_out = kind.left_out is not None and kind.left_out not in components
    with understood(folder):
        return PipelineConfig(
            encoders,
            denoiser=denoiser,
            autoencoder=vae,
            latent_inputs=latent_inputs_of(denoiser, vae),
            schedule=schedule,
            zero_empty_negative=bool(zeros),
            zero_tokens=t5_length if is_left_out else 0,
            suited=_call_defaults(index),
        ).check()


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Report values of kinds that no configuration has, such as a list for a number."""
    try:
        yield
    except SdTfError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a value of a wrong kind: {error!r}.") from error


def weights_stem(component: str) -> str:
    """Return how the names of a component's weights begin."""
    is_transformers = component.startswith((TEXT_ENCODER, VisionEncoderConfig.component))
    return "model" if is_transformers else "diffusion_pytorch_model"


def variants_of(files: Iterable[str], component: str) -> dict[str, str]:
    """Map each variant of a component's weights to its file; the plain ones are called ""."""
    found = {}
    for file in sorted(files):
        stem, *parts = file.split(".")
        if stem == weights_stem(component) and "safetensors" in parts:
            rest = [part for part in parts if part not in ("safetensors", "index", "json")]
            if not any("-of-" in part for part in rest):  # not a shard, which an index names
                found.setdefault(".".join(rest), file)
    return found


def check_variant(files: Mapping[str, Iterable[str]], variant: str | None) -> None:
    """Refuse a variant that no component has; those without it take their default weights.

    Args:
        files: the names of each component's files.
    """
    found = {one for component, names in files.items() for one in variants_of(names, component)}
    if variant is not None and found and variant not in found:
        raise CheckpointError(
            f"The components have no {variant!r} weights; {_choose_variant(found)}"
        )


def _choose_variant(found: Iterable[str]) -> str:
    return f"set `variant` to one of {', '.join(name or 'None' for name in sorted(found))}."


def choose_weights(files: Iterable[str], component: str, variant: str | None = None) -> str:
    """Choose among a component's files the one with its weights, or the index of its shards.

    Without the `variant`, it is the plain file or, if there is none, one in half precision.
    """
    files = sorted(files)
    found = variants_of(files, component)
    wanted = ("", "fp16", "bf16") if variant is None else (variant, "", "fp16", "bf16")
    for name in wanted:
        if name in found:
            return found[name]
    if found:
        raise CheckpointError(
            f"{component} has no {' or '.join(repr(name or 'plain') for name in wanted)} weights; "
            f"{_choose_variant(found)}"
        )
    for file in files:
        if Path(file).suffix in PICKLES:
            # transformers' pickles begin otherwise than its safetensors: pytorch_model, model.
            refuse_pickle(Path(component) / file, Path(file).stem.removeprefix("pytorch_"))
    raise CheckpointError(
        f"{component} has no weights: expected {weights_stem(component)}.safetensors. "
        f"Found: {shortened(files) or 'nothing'}"
    )


def _names_in(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def open_component(
    path: Path, name: str, part: object, variant: str | None
) -> dict[str, StoredTensor]:
    """Open the weights in a component's folder, under the names of its model's attributes."""
    if not path.is_dir():
        raise CheckpointError(f"No such folder: {path}")
    file = path / choose_weights(_names_in(path), name, variant)
    tensors = open_sharded(file) if file.suffix == ".json" else open_safetensors(file)
    return canonical_names(name, part, tensors)


def canonical_names(
    component: str, part: object, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return a component's tensors by the names of its model's attributes, without its buffers."""
    if isinstance(part, T5EncoderConfig):
        return t5_names(tensors)
    return {
        canonical_name(component, name): tensor
        for name, tensor in tensors.items()
        if not name.endswith(".position_ids")  # a buffer 0…76
    }


def canonical_name(component: str, name: str) -> str:
    """Translate the names of older and newer releases to those of the models' attributes."""
    if component.startswith(TEXT_ENCODER):
        if re.match(r"(embeddings|encoder|final_layer_norm)\.", name):
            return f"text_model.{name}"
        return name
    if component == "vae":
        return re.sub(
            r"(mid_block\.attentions\.0)\.(query|key|value|proj_attn)\.",
            lambda match: f"{match[1]}.{OLD_VAE_ATTENTION[match[2]]}.",
            name,
        )
    return name
