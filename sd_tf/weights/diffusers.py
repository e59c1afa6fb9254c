"""Diffusers folders: `model_index.json` and a folder for each component. Read, and written."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import keras

from sd_tf.config import PipelineConfig
from sd_tf.tokenizer import ClipTokenizer
from sd_tf.weights import diffusers_config as json_config
from sd_tf.weights import layout
from sd_tf.weights.checkpoint import Checkpoint
from sd_tf.weights.tensors import (
    PICKLES,
    CheckpointError,
    StoredTensor,
    open_safetensors,
    open_sharded,
    read_json,
    refuse_pickle,
    save_safetensors,
    shortened,
)

MODEL_INDEX = "model_index.json"
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
# They judge or watermark finished pictures, and take no part in making them.
IGNORED_COMPONENTS = ("safety_checker", "feature_extractor", "watermark")
PIPELINES = """
    StableDiffusionPipeline StableDiffusionImg2ImgPipeline StableDiffusionInpaintPipeline
    StableDiffusionInstructPix2PixPipeline StableDiffusionXLPipeline
    StableDiffusionXLImg2ImgPipeline StableDiffusionXLInpaintPipeline
    StableDiffusionXLInstructPix2PixPipeline LatentConsistencyModelPipeline
""".split()

OLD_VAE_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def open_folder(folder: Path, variant: str | None = None, scheduler: str | None = None):
    """A folder on disk as a `Checkpoint`. `variant` picks among the weights (`fp16`, `non_ema`)."""
    index = read_index(folder)
    config = read_config(folder, index, scheduler)
    readers = {name: partial(_open_component, folder, name, variant) for name in config.components}
    tokenizers = {
        encoder: partial(ClipTokenizer.from_folder, folder / encoder.replace(*TOKENIZER_OF))
        for encoder in config.text_encoders
        if (folder / encoder.replace(*TOKENIZER_OF)).is_dir()
    }
    return Checkpoint(str(folder), "diffusers folder", config, readers, tokenizers)


TOKENIZER_OF = ("text_encoder", "tokenizer")


def read_index(folder: Path) -> dict:
    """`model_index.json`, its components checked to be ones that we know."""
    path = folder / MODEL_INDEX
    index = read_json(path)
    pipeline = index.get("_class_name")
    if pipeline not in PIPELINES:
        raise CheckpointError(
            f"{path}: the pipeline {pipeline!r} is not supported; supported: "
            f"{', '.join(PIPELINES)}."
        )
    for name, entry in components_of(index).items():
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(f"{path} points outside its folder: {name!r}")
        kind = entry[1]
        if name not in KNOWN_CLASSES:
            raise CheckpointError(
                f"{path}: the component {name!r} ({kind}) is unknown; a pipeline that needs it "
                f"cannot be computed without it. Known: {', '.join(KNOWN_CLASSES)}."
            )
        known = KNOWN_CLASSES[name]
        if known is not None and kind not in known:
            raise CheckpointError(f"{path}: {name} is a {kind}, supported: {', '.join(known)}.")
    return index


def components_of(index: Mapping) -> dict[str, list]:
    """The components that are there and take part; [null, null] means absent."""
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

    if not components.keys() & {"text_encoder", "text_encoder_2"}:
        raise CheckpointError(f"{folder / MODEL_INDEX} names no text encoder.")

    def text_encoder(name):
        if name not in components:
            return None
        path = folder / name / "config.json"
        return json_config.read_text_encoder(
            read_json(path),
            str(path),
            projected=components[name][1].endswith("WithProjection"),
            penultimate="XL" in index["_class_name"],
        )

    encoders = {name: text_encoder(name) for name in ("text_encoder", "text_encoder_2")}
    pooled = [encoder.projection_dim for encoder in encoders.values() if encoder is not None]
    unet_file, vae_file = folder / "unet" / "config.json", folder / "vae" / "config.json"
    schedule_file = folder / "scheduler" / "scheduler_config.json"
    return PipelineConfig(
        **encoders,
        unet=json_config.read_unet(read_json(unet_file), str(unet_file), pooled[-1]),
        vae=json_config.read_vae(read_json(vae_file), str(vae_file)),
        schedule=json_config.read_schedule(read_json(schedule_file), str(schedule_file), scheduler),
        zero_empty_negative=bool(index.get("force_zeros_for_empty_prompt", False)),
    ).check()


def choose_weights(files: Iterable[str], component: str, variant: str | None = None) -> str:
    """The file among a component's that holds its weights, or the index of its shards.

    Without a `variant` the plain file is taken, else the half precision one.
    """
    files = sorted(files)
    found = {}
    for file in files:
        stem, *parts = file.split(".")
        if stem == WEIGHTS_STEM[component] and "safetensors" in parts:
            rest = [part for part in parts if part not in ("safetensors", "index", "json")]
            if not any("-of-" in part for part in rest):  # a shard, which its index will name
                found.setdefault(".".join(rest), file)
    wanted = ("", "fp16") if variant is None else (variant,)
    for name in wanted:
        if name in found:
            return found[name]
    if found:
        raise CheckpointError(
            f"{component} has no weights {' or '.join(repr(name or 'plain') for name in wanted)}; "
            f"choose with variant=..., one of {', '.join(sorted(found))}."
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
    """Names of older and newer releases → the ones that the models' attributes have."""
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
    """Write a pipeline that diffusers loads, its tensors as `dtype`, or as the variables are.

    Numerics in which KerasCV differs from diffusers (epsilons, gelu) have no field there: the
    weights are the same, and whoever reads them computes in its own way.
    """
    folder = Path(folder)
    config.check()
    if models.keys() != config.components.keys():
        raise CheckpointError(
            f"A folder holds the components {', '.join(config.components)}. "
            f"Received: {', '.join(models) or 'none'}"
        )
    if tokenizers.keys() != config.text_encoders.keys():
        raise CheckpointError(
            f"One tokenizer for each of {', '.join(config.text_encoders)} is needed. "
            f"Received: {', '.join(tokenizers) or 'none'}"
        )
    index = {"_class_name": json_config.pipeline_class(config), "_diffusers_version": "0.35.0"}
    if config.unet.added is not None:
        index["force_zeros_for_empty_prompt"] = config.zero_empty_negative
        if config.text_encoder is None:
            index |= {"text_encoder": [None, None], "tokenizer": [None, None]}
            index["requires_aesthetics_score"] = config.unet.added.num_time_ids == 5
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
    schedule = json_config.write_schedule(config.schedule)
    _write_json(folder / "scheduler" / "scheduler_config.json", schedule)
    index["scheduler"] = ["diffusers", schedule["_class_name"]]
    _write_json(folder / MODEL_INDEX, index)


def _write_json(path: Path, content: Mapping) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
