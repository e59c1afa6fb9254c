"""Read and write diffusers folders: `model_index.json` and a folder for each component."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import keras

from sd_tf.config import PipelineConfig, latent_inputs_of
from sd_tf.errors import SdTfError
from sd_tf.files.objects import read_object
from sd_tf.files.tensors import (
    PICKLES,
    CheckpointError,
    StoredTensor,
    open_safetensors,
    open_sharded,
    refuse_pickle,
    save_safetensors,
    shortened,
)
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.weights import diffusers_config as json_config
from sd_tf.weights import layout
from sd_tf.weights.checkpoint import Checkpoint
from sd_tf.weights.diffusers_schedule import read_schedule, write_schedule

MODEL_INDEX = "model_index.json"
TEXT_ENCODERS = ("text_encoder", "text_encoder_2")  # in the order of concatenation
TEXT_CLASSES = ("CLIPTextModel", "CLIPTextModelWithProjection")
WEIGHTS_STEM = {
    "text_encoder": "model",
    "text_encoder_2": "model",
    "unet": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
}
KNOWN_CLASSES = {
    "text_encoder": TEXT_CLASSES,
    "text_encoder_2": TEXT_CLASSES,
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
    "tokenizer_2": ("CLIPTokenizer", "CLIPTokenizerFast"),
    "scheduler": None,  # read_schedule decides
}
# These check or watermark finished pictures, and take no part in computing them.
IGNORED_COMPONENTS = ("safety_checker", "feature_extractor", "watermark")
PIPELINES = """
    StableDiffusionPipeline StableDiffusionImg2ImgPipeline StableDiffusionInpaintPipeline
    StableDiffusionInstructPix2PixPipeline StableDiffusionXLPipeline
    StableDiffusionXLImg2ImgPipeline StableDiffusionXLInpaintPipeline
    StableDiffusionXLInstructPix2PixPipeline LatentConsistencyModelPipeline
""".split()

OLD_VAE_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def open_folder(folder: Path, variant: str | None = None, scheduler: str | None = None):
    """Open a folder as a `Checkpoint`. `variant` names a set of weights: `fp16`, `non_ema`."""
    index = read_index(folder)
    config = read_config(folder, index, scheduler)
    readers = {name: partial(_open_component, folder, name, variant) for name in config.components}
    named = components_of(index)
    tokenizers = {
        encoder: partial(ClipTokenizer.from_folder, folder / tokenizer)
        for encoder in config.text_encoders
        if (tokenizer := encoder.replace(*TOKENIZER_OF)) in named or (folder / tokenizer).is_dir()
    }
    name = folder.resolve().name
    return Checkpoint(name, str(folder), "diffusers folder", config, readers, tokenizers)


TOKENIZER_OF = ("text_encoder", "tokenizer")


def read_index(folder: Path) -> dict:
    """Read `model_index.json`, and check that its pipeline and its components are supported."""
    path = folder / MODEL_INDEX
    index = read_object(path, CheckpointError)
    pipeline = index.get("_class_name")
    if pipeline not in PIPELINES:
        raise CheckpointError(
            f"{path}: the pipeline class {pipeline!r} is not supported; supported: "
            f"{', '.join(PIPELINES)}."
        )
    for name, entry in components_of(index).items():
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(f"{path} points outside its folder: {name!r}")
        kind = entry[1]
        if name not in KNOWN_CLASSES:
            raise CheckpointError(
                f"{path}: the component {name!r} ({kind}) is not supported, and without it the "
                f"pipeline would compute something else. Supported: {', '.join(KNOWN_CLASSES)}."
            )
        known = KNOWN_CLASSES[name]
        if known is not None and kind not in known:
            raise CheckpointError(f"{path}: {name} is a {kind}, supported: {', '.join(known)}.")
    return index


def components_of(index: Mapping) -> dict[str, list]:
    """Return the components that are present and compute pictures; [null, null] means absent."""
    return {
        name: entry
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and entry[1] is not None
        if name not in IGNORED_COMPONENTS
    }


def read_config(folder: Path, index: Mapping, scheduler: str | None = None) -> PipelineConfig:
    components = components_of(index)
    for name in ("unet", "vae"):
        if name not in components:
            raise CheckpointError(f"{folder / MODEL_INDEX} names no {name}.")

    if not components.keys() & set(TEXT_ENCODERS):
        raise CheckpointError(f"{folder / MODEL_INDEX} names no text encoder.")

    def read(reader, part, *more, file="config.json", **named):
        path = folder / part / file
        with _understood(path):
            return reader(read_object(path, CheckpointError), str(path), *more, **named)

    def text_encoder(name):
        return read(
            json_config.read_text_encoder,
            name,
            projected=components[name][1].endswith("WithProjection"),
            penultimate="XL" in index["_class_name"],
        )

    encoders = {name: text_encoder(name) for name in TEXT_ENCODERS if name in components}
    pooled = [encoder.projection_dim for encoder in encoders.values()]
    unet = read(json_config.read_unet, "unet", pooled[-1])
    vae = read(json_config.read_vae, "vae")
    schedule = read(read_schedule, "scheduler", scheduler, file="scheduler_config.json")
    with _understood(folder):
        return PipelineConfig(
            encoders,
            denoiser=unet,
            autoencoder=vae,
            latent_inputs=latent_inputs_of(unet, vae),
            schedule=schedule,
            zero_empty_negative=bool(index.get("force_zeros_for_empty_prompt", False)),
        ).check()


@contextmanager
def _understood(path: Path) -> Iterator[None]:
    """Report values of kinds that no configuration has, such as a list for a number."""
    try:
        yield
    except SdTfError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a value of a wrong kind: {error!r}.") from error


def choose_weights(files: Iterable[str], component: str, variant: str | None = None) -> str:
    """Choose among a component's files the one with its weights, or the index of its shards.

    Without a `variant`, it is the plain file or, if there is none, the one in half precision.
    """
    files = sorted(files)
    found = {}
    for file in files:
        stem, *parts = file.split(".")
        if stem == WEIGHTS_STEM[component] and "safetensors" in parts:
            rest = [part for part in parts if part not in ("safetensors", "index", "json")]
            if not any("-of-" in part for part in rest):  # not a shard, which an index names
                found.setdefault(".".join(rest), file)
    wanted = ("", "fp16") if variant is None else (variant,)
    for name in wanted:
        if name in found:
            return found[name]
    if found:
        raise CheckpointError(
            f"{component} has no {' or '.join(repr(name or 'plain') for name in wanted)} weights; "
            f"set `variant` to one of {', '.join(name or 'None' for name in sorted(found))}."
        )
    for file in files:
        if Path(file).suffix in PICKLES:
            refuse_pickle(Path(component) / file)
    raise CheckpointError(
        f"{component} has no weights: expected {WEIGHTS_STEM[component]}.safetensors. "
        f"Found: {shortened(files) or 'nothing'}"
    )


def _open_component(folder: Path, name: str, variant: str | None) -> dict[str, StoredTensor]:
    path = folder / name
    if not path.is_dir():
        raise CheckpointError(f"No such folder: {path}")
    file = path / choose_weights((entry.name for entry in path.iterdir()), name, variant)
    tensors = open_sharded(file) if file.suffix == ".json" else open_safetensors(file)
    return {
        canonical_name(name, key): tensor
        for key, tensor in tensors.items()
        if not key.endswith(".position_ids")  # a buffer 0…76
    }


def canonical_name(component: str, name: str) -> str:
    """Translate the names of older and newer releases to those of the models' attributes."""
    if component.startswith("text_encoder"):
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


def save_folder(
    folder: Path,
    config: PipelineConfig,
    models: Mapping[str, keras.layers.Layer],
    tokenizers: Mapping[str, ClipTokenizer],
    dtype: str | None = None,
) -> None:
    """Write a pipeline that diffusers loads, with tensors of `dtype` (None: the variables' dtype).

    Diffusers' files have no fields for the numerics in which KerasCV differs (epsilons, gelu), so
    weights from KerasCV give slightly different results when diffusers computes them.
    """
    folder = Path(folder)
    config.check()
    if models.keys() != config.components.keys():
        raise CheckpointError(
            f"models must be those of the configuration: {', '.join(config.components)}. "
            f"Received: {', '.join(models) or 'none'}"
        )
    if tokenizers.keys() != config.text_encoders.keys():
        raise CheckpointError(
            f"tokenizers must have one for each of {', '.join(config.text_encoders)}. "
            f"Received: {', '.join(tokenizers) or 'none'}"
        )
    index = {"_class_name": json_config.pipeline_class(config), "_diffusers_version": "0.35.0"}
    if config.denoiser.added is not None:
        index["force_zeros_for_empty_prompt"] = config.zero_empty_negative
        if "text_encoder" not in config.text_encoders:
            index |= {"text_encoder": [None, None], "tokenizer": [None, None]}
            index["requires_aesthetics_score"] = config.denoiser.added.num_time_ids == 5
    else:
        index |= {"safety_checker": [None, None], "feature_extractor": [None, None]}
        index["requires_safety_checker"] = False

    for name, model in models.items():
        part = config.components[name]
        if name.startswith("text_encoder"):
            content = json_config.write_text_encoder(part)
            index[name] = ["transformers", content["architectures"][0]]
        else:
            content = (
                json_config.write_unet(part) if name == "unet" else json_config.write_vae(part)
            )
            index[name] = ["diffusers", content["_class_name"]]
        _write_json(folder / name / "config.json", content)
        save_safetensors(
            {key: slot.stored(dtype) for key, slot in layout.slots(model).items()},
            folder / name / f"{WEIGHTS_STEM[name]}.safetensors",
            metadata={"format": "pt"},
        )
    for encoder, tokenizer in tokenizers.items():
        name = encoder.replace(*TOKENIZER_OF)
        tokenizer.save(folder / name)
        index[name] = ["transformers", "CLIPTokenizer"]
    schedule = write_schedule(config.schedule)
    _write_json(folder / "scheduler" / "scheduler_config.json", schedule)
    index["scheduler"] = ["diffusers", schedule["_class_name"]]
    _write_json(folder / MODEL_INDEX, index)


def _write_json(path: Path, content: Mapping) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
