"""Count the UNet's operations with PyTorch's counter, on diffusers' model."""

import json
from pathlib import Path


def unet_flops(checkpoint: Path, latent_shape: tuple[int, int, int]) -> int:
    """Count the operations of one call on a guidance pair, with direct convolutions and products.

    A multiplication and an addition count as two. The model has shapes only, and takes no memory.
    """
    import diffusers
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    config = json.loads((checkpoint / "unet" / "config.json").read_text(encoding="utf-8"))
    height, width, channels = latent_shape
    with torch.device("meta"), torch.no_grad():
        unet = diffusers.UNet2DConditionModel.from_config(config)
        sample = torch.empty(2, channels, height, width)
        context = torch.empty(2, 77, unet.config.cross_attention_dim)
        with FlopCounterMode(display=False) as counter:
            unet(sample, torch.empty(()), context)
    return counter.get_total_flops()
