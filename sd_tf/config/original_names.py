"""The names that a UNet's modules have in the original releases, beside diffusers'."""

from collections.abc import Iterable
from itertools import count, takewhile

RESNET = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
UNET_ENDS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "time_embed.cond_proj": "time_embedding.cond_proj",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_IN_RESNET = {ours: theirs for theirs, ours in RESNET.items()}


def original_names(modules: Iterable[str]) -> dict[str, str]:
    """Map a UNet's modules, given by diffusers' names, to their names in the original releases."""
    modules = set(modules)
    blocks = _blocks(modules)
    names = {ours: theirs for theirs, ours in UNET_ENDS.items() if ours in modules}
    for module in modules - names.keys():
        parts = module.split(".")
        for length in range(len(parts), 1, -1):
            block, rest = ".".join(parts[:length]), ".".join(parts[length:])
            if block in blocks:
                inner = _IN_RESNET.get(rest, rest) if ".resnets." in block else rest
                names[module] = f"{blocks[block]}.{inner}" if inner else blocks[block]
                break
    return names


def _blocks(modules: set[str]) -> dict[str, str]:
    """Map diffusers' resnets, attentions and samplers to the numbered blocks of the original."""
    prefixes = {
        ".".join(parts[:length])
        for parts in (module.split(".") for module in modules)
        for length in range(1, len(parts) + 1)
    }

    def present(pattern: str) -> Iterable[int]:
        return takewhile(lambda number: pattern.format(number) in prefixes, count())

    names = {
        "mid_block.resnets.0": "middle_block.0",
        "mid_block.attentions.0": "middle_block.1",
        "mid_block.resnets.1": "middle_block.2",
    }
    number = 1  # input block 0 is conv_in
    for level in present("down_blocks.{}"):
        block = f"down_blocks.{level}"
        for place in present(block + ".resnets.{}"):
            names[f"{block}.resnets.{place}"] = f"input_blocks.{number}.0"
            names[f"{block}.attentions.{place}"] = f"input_blocks.{number}.1"
            number += 1
        if f"{block}.downsamplers.0" in prefixes:
            names[f"{block}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
            number += 1
    number = 0
    for level in present("up_blocks.{}"):
        block = f"up_blocks.{level}"
        for place in present(block + ".resnets.{}"):
            names[f"{block}.resnets.{place}"] = f"output_blocks.{number}.0"
            names[f"{block}.attentions.{place}"] = f"output_blocks.{number}.1"
            number += 1
        sampler = 2 if f"{block}.attentions.0" in prefixes else 1  # it follows the attention
        names[f"{block}.upsamplers.0.conv"] = f"output_blocks.{number - 1}.{sampler}.conv"
    return names
