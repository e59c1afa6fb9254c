"""Open a ControlNet's single `.safetensors` file, in the original layout or with diffusers' names.

The file tells the sizes. As for a checkpoint, the number of heads follows the family's convention.
The tensors do not tell whether the net pools; the file's name does, as it was published.
"""

import re
from dataclasses import replace
from pathlib import Path

from sd_tf.config import FAMILIES, ControlNetConfig
from sd_tf.config.original_names import original_names
from sd_tf.files.tensors import CheckpointError, StoredTensor, open_safetensors, shortened
from sd_tf.weights.controlnet import SIZES, ControlNetCheckpoint
from sd_tf.weights.single_file import read_unet
from sd_tf.weights.single_file_names import (
    BUFFERS,
    UNET,
    VAE,
    Tensors,
    shape_of,
    under,
    unet_names,
)

PREFIX = "control_model."
# Where a ControlNet is stored with the checkpoint that it was trained on.
WHOLE = (PREFIX, UNET, VAE, "cond_stage_model.")
DIFFERENCE = "difference"  # a tensor that marks weights to be added to a UNet's
LORA = "lora_controlnet"  # one that marks a ControlLoRA
HINT = "controlnet_cond_embedding."
HINT_ENDS = {0: "conv_in", 7: "conv_out"}  # the other layers of the hint are blocks
ZERO = re.compile(r"controlnet_down_blocks\.\d+\.weight")
SIZE_WIDTH = 256  # to which each of them is embedded, in all that were published
POOLING = ("_shuffle", "_shuffle_fp16")  # how the names of those that pool end
FAMILY_OF_KIND = {"SD1": "sd1", "SD2": "sd2-base", "SDXL": "sdxl-base"}


def is_controlnet_file(path: Path) -> bool:
    """Tell whether a `.safetensors` file holds a ControlNet."""
    return path.is_file() and any(
        ZERO.fullmatch(name) or name.removeprefix(PREFIX).startswith("zero_convs.")
        for name in open_safetensors(path)
    )


def open_file(path: Path) -> ControlNetCheckpoint:
    """Open a file that `is_controlnet_file`."""
    stored = open_safetensors(path)
    original = _net(stored, path)
    if any(name.startswith("zero_convs.") for name in original):
        kind = "single file"
        tensors = {_hinted(name): t for name, t in unet_names(original).items()}
    else:
        kind, tensors = "single file with diffusers' names", dict(stored)
        original = _with_original_names(stored)
    return ControlNetCheckpoint(
        path.stem, str(path), kind, _config(original, tensors, path), tensors
    )


def _net(stored: Tensors, path: Path) -> Tensors:
    """Return the ControlNet's own tensors; refuse a file in which others change what they mean."""
    if DIFFERENCE in stored:
        raise CheckpointError(
            f"{path} is a ControlNet stored as differences from a UNet, as its tensor "
            f"{DIFFERENCE!r} says. Give one that is stored whole."
        )
    if LORA in stored:
        raise CheckpointError(
            f"{path} is a ControlLoRA, as its tensor {LORA!r} says. Give a whole ControlNet."
        )
    original = under(stored, PREFIX)
    if not original:
        return stored
    if surplus := [n for n in stored if not n.startswith(WHOLE) and not BUFFERS.match(n)]:
        raise CheckpointError(
            f"{path} holds {len(surplus)} tensors that belong to no ControlNet and to no "
            f"checkpoint; without them the net may compute something else: {shortened(surplus)}"
        )
    return original


def _hinted(name: str) -> str:
    """Give diffusers' name to a tensor that no UNet has; others keep theirs."""
    module, _, leaf = name.rpartition(".")
    if match := re.fullmatch(r"input_hint_block\.(\d+)", module):
        place = int(match[1]) // 2  # activations stand between the convolutions
        return f"{HINT}{HINT_ENDS.get(place, f'blocks.{place - 1}')}.{leaf}"
    if match := re.fullmatch(r"zero_convs\.(\d+)\.0", module):
        return f"controlnet_down_blocks.{match[1]}.{leaf}"
    return f"controlnet_mid_block.{leaf}" if module == "middle_block_out.0" else name


def _with_original_names(tensors: Tensors) -> dict[str, StoredTensor]:
    names = original_names({name.rpartition(".")[0] for name in tensors})
    return {
        f"{names[module]}.{leaf}": tensor
        for name, tensor in tensors.items()
        for module, _, leaf in [name.rpartition(".")]
        if module in names
    }


def _config(original: Tensors, tensors: Tensors, path: Path) -> ControlNetConfig:
    """Read the sizes; `original` are the trunk's tensors under the original names."""
    projection = next((t for name, t in original.items() if name.endswith(".proj_in.weight")), None)
    if projection is None:
        raise CheckpointError(f"{path} is a ControlNet without attention, which no family has.")
    label = original.get("label_emb.0.0.weight")
    kind = "SDXL" if label is not None else "SD2" if len(projection.shape) == 2 else "SD1"
    named = FAMILIES[FAMILY_OF_KIND[kind]].denoiser
    trunk = replace(read_unet(original, named, path), up_depths=(), guidance_embed_dim=None)
    if label is not None:
        pooled = label.shape[1] - SIZES * SIZE_WIDTH
        trunk = replace(trunk, added=replace(trunk.added, pooled_dim=pooled))
    first = f"{HINT}conv_in.weight", "input_hint_block.0.weight"
    widths = [shape_of(*first, tensors, path)[0]]
    while (name := f"{HINT}blocks.{2 * len(widths) - 1}.weight") in tensors:
        widths.append(tensors[name].shape[0])
    pools = path.stem.endswith(POOLING)
    return ControlNetConfig(trunk, tuple(widths), pools=pools)
