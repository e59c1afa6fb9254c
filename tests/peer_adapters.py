"""Random adapters of diffusers' pipelines, made and saved by peft and diffusers."""

from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.numpy import load_file, save_file

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
TRANSFORMER = (*ATTENTION, "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2")
BLOCKS = (*TRANSFORMER, "conv1", "conv2", "conv_shortcut", "time_emb_proj", "conv")
JOINT = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff.net.2")
EVERYWHERE = (*BLOCKS, "conv_in", "conv_out", "linear_1", "linear_2")
TEXT = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
FILE = "pytorch_lora_weights.safetensors"


def text_encoders(pipeline):
    """Return the names of the CLIP text encoders, which adapters may change."""
    names = ("text_encoder", "text_encoder_2")
    return [n for n in names if type(getattr(pipeline, n, None)).__name__.startswith("CLIP")]


def denoiser(pipeline) -> str:
    return "unet" if hasattr(pipeline, "unet") else "transformer"


def save_lora(
    pipeline, folder: Path, seed: int, targets=ATTENTION, text=TEXT, metadata=True, **config
) -> Path:
    """Save a random LoRA of the pipeline's denoiser and text encoders, as diffusers' scripts do."""
    torch.manual_seed(seed)
    layers, about = {}, {}
    of_texts = dict.fromkeys(text_encoders(pipeline), text) if text else {}
    chosen = {denoiser(pipeline): targets} | of_texts
    for name, target_modules in chosen.items():
        model = getattr(pipeline, name)
        settings = LoraConfig(target_modules=list(target_modules), **config)
        model.add_adapter(settings, "made")
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_" in key and "magnitude" not in key:
                    parameter.normal_(std=0.1)
        layers[f"{name}_lora_layers"] = get_peft_model_state_dict(model, adapter_name="made")
        if metadata:
            about[f"{name}_lora_adapter_metadata"] = settings.to_dict()
    pipeline.save_lora_weights(folder, **layers, **about)
    pipeline.unload_lora_weights()
    return folder / FILE


def renamed(file: Path, to: Path, rename, extra=None) -> Path:
    """Write a file's tensors under other names, without metadata; `extra` are further ones."""
    tensors = {rename(name): tensor for name, tensor in load_file(file).items()}
    to.parent.mkdir(exist_ok=True)
    save_file({**tensors, **(extra or {})}, to)
    return to


def fused(pipeline, adapters, folder: Path) -> Path:
    """Have diffusers add adapters, (file, scale) each, to its weights, and save the pipeline."""
    for number, (file, _) in enumerate(adapters):
        pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=f"a{number}")
    names = [f"a{number}" for number in range(len(adapters))]
    pipeline.set_adapters(names, [scale for _, scale in adapters])
    pipeline.fuse_lora(components=[denoiser(pipeline), *text_encoders(pipeline)])
    pipeline.unload_lora_weights()
    pipeline.save_pretrained(folder)
    return folder


def largest_differences(ours, theirs, components):
    """Return the largest difference of a component's tensors; all must have the same names."""
    found = {}
    for component in components:
        mine, peers = ours.tensors(component), theirs.tensors(component)
        assert mine.keys() == peers.keys()
        found[component] = max(
            float(np.abs(mine[name].read() - peers[name].read()).max()) for name in mine
        )
    return found
