"""The ends of the tensors' names in adapter files: what they are, and what is refused."""

import re
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

# The end of a key → what the tensor is to its layer's change.
ENDS = {
    **{f".{name}.weight": "down" for name in ("lora_A", "lora_down", "lora.down")},
    **{f".{name}.weight": "up" for name in ("lora_B", "lora_up", "lora.up")},
    ".lora_linear_layer.down.weight": "down",
    ".lora_linear_layer.up.weight": "up",
    "_lora.down.weight": "down",  # attention processors: to_q_lora
    "_lora.up.weight": "up",
    ".lora_B.bias": "bias",
    ".lora_mid.weight": "mid",
    ".alpha": "alpha",
    ".dora_scale": "dora_scale",
    ".lora_magnitude_vector": "magnitude",
    **{
        f".{name}": name
        for name in (
            *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
            *("lokr_w1", "lokr_w1_a", "lokr_w1_b"),
            *("lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
        )
    },
}
# Kinds of changes that are known and not supported.
REFUSED = {
    r"\.diff(_b)?$": "whole differences of weights or biases (diff, diff_b)",
    r"\.[wb]_norm$": "changes of norms (w_norm, b_norm)",
    r"\.[ab][12]\.weight$": "GLoRA (a1, a2, b1, b2)",
    r"\.b?oft_\w+(\.weight)?$": "OFT or BOFT (oft_blocks, oft_diag, …)",
    r"\.on_input$|\.ia3_l$": "IA3",
    r"\.vera_lambda_[bd]$": "VeRA",
    r"^bundle_emb\.": "textual inversion bundled with the adapter (bundle_emb)",
    r"\.lora_embedding_[AB]$": "LoRA of an embedding (lora_embedding_A, lora_embedding_B)",
    r"\.(set_weight|reshape_weight)$": "replaced or reshaped weights (set_weight, reshape_weight)",
}
# In kohya's names of a UNet's layers: blocks by their original names, and by diffusers'.
ORIGINAL_BLOCKS = re.compile(r"^lora_unet_(input_blocks|middle_block|output_blocks)_")
BLOCKS = re.compile(r"^lora_unet_(down_blocks|mid_block|up_blocks)_")


def without_doubles(tensors: Mapping[str, T]) -> dict[str, T]:
    """Leave out blocks by their original names if the file has diffusers' names, as diffusers does.

    Some trainers wrote the same layers under both.
    """
    has_both = any(map(BLOCKS.match, tensors))
    return {k: v for k, v in tensors.items() if not (has_both and ORIGINAL_BLOCKS.match(k))}


def divided(key: str) -> tuple[str, str] | None:
    """Divide a tensor's name into the layer's name and what the tensor is; None: no known end."""
    for end, part in ENDS.items():
        if key.endswith(end):
            return key.removesuffix(end), part
    return None


def refusal(key: str) -> str | None:
    """Return what a tensor belongs to, if that is known and not supported."""
    return next((what for pattern, what in REFUSED.items() if re.search(pattern, key)), None)
