"""A random SD1.5 of full size, for PyTorch to write and everybody to read."""

import shutil
from pathlib import Path


def make_random(folder: Path) -> None:
    """Write an SD1.5 of the published configurations, as diffusers builds and saves it."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    from sd_tf.tokenizer.clip import ClipTokenizer

    ClipTokenizer.clip(49407).save(folder / "clip")
    text = CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
    )
    unet = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        clip_sample=False,
        set_alpha_to_one=False,
    )
    diffusers.StableDiffusionPipeline(
        vae=randomized(vae, 1),
        text_encoder=randomized(CLIPTextModel(text), 2),
        tokenizer=CLIPTokenizer.from_pretrained(folder / "clip"),
        unet=randomized(unet, 3),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    shutil.rmtree(folder / "clip")


def randomized(module, seed: int, spread: float = 0.1):
    """Make every parameter of a PyTorch module random, and return the module.

    The scales keep activations at their size: flat outputs would all seem to agree. Norms and
    biases differ from 1 and 0 by `spread`, so that none can be mistaken for another.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(spread * noise + (1.0 if name.endswith("weight") else 0.0))
            elif "embedding" in name.split(".")[-2]:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
    return module.eval()
