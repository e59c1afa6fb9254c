"""Exports and PyTorch's models with and without what steers them, and a step's seconds of each."""

import statistics
import time
from pathlib import Path

from sd_tf.bench.peers.own_process import apart
from sd_tf.bench.peers.random_checkpoint import make_random

CHECKPOINT, NET, ADAPTER = "checkpoint", "controlnet", "ip_adapter/base.safetensors"
EXPORTS = "exports"
EMBED, TOKENS = 1024, 4  # of the published base adapter: a picture's embedding, its tokens
# variant → what its call is given beside the prompt, and the variant that it is compared with
CALLS = {
    "plain": ((), None),
    "net": (("control_image",), "plain"),
    "net at scale 0": (("control_image", "control_scale"), "plain"),
    "adapter": (("image_prompt",), "plain"),
    "adapter at scale 0": (("image_prompt", "image_prompt_scale"), "plain"),
}
FEW, MANY = 2, 4  # steps, whose difference is that of steps alone


def run(out: Path, size: int, rounds: int, picture) -> dict:
    """Return the seconds of a step, by engine and variant, and the ratios of each turn's."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / ADAPTER).is_file():
        apart(make_inputs, out)
    for steered in ("plain", "net", "adapter"):
        if not (out / EXPORTS / steered).exists():
            apart(export_one, out, steered, size)
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for steered in ("plain", "net", "adapter"):
            for name, value in apart(of_export, out, steered, picture).items():
                seconds.setdefault(f"sd_tf: {name}", []).append(value)
        for name, value in apart(of_pytorch, out, size).items():
            seconds.setdefault(f"PyTorch: {name}", []).append(value)
    return {"size": size, "steps": {name: _record(name, seconds) for name in seconds}}


def _record(name: str, seconds: dict[str, list[float]]) -> dict:
    engine, _, variant = name.partition(": ")
    base = CALLS[variant][1]
    if base is None:
        return {"seconds": seconds[name], "ratio": None}
    pairs = zip(seconds[name], seconds[f"{engine}: {base}"], strict=True)
    return {"seconds": seconds[name], "ratio": statistics.median(a / b for a, b in pairs)}


def make_inputs(out: Path) -> None:
    """Write a random SD1.5, a ControlNet, and a base IP-Adapter with a small vision encoder."""
    import diffusers
    import torch
    from safetensors.torch import save_file
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    from sd_tf.bench.peers.random_checkpoint import randomized

    make_random(out / CHECKPOINT)
    unet = diffusers.UNet2DConditionModel.from_pretrained(out / CHECKPOINT / "unet")
    randomized(diffusers.ControlNetModel.from_unet(unet), 4).save_pretrained(out / NET)
    width = unet.config.cross_attention_dim
    tensors = {
        "image_proj.proj.weight": torch.randn(TOKENS * width, EMBED) * EMBED**-0.5,
        "image_proj.proj.bias": torch.zeros(TOKENS * width),
        "image_proj.norm.weight": torch.ones(width),
        "image_proj.norm.bias": torch.zeros(width),
    }
    for number, name in enumerate(unet.attn_processors):
        if "attn2" in name:
            shape = unet.get_submodule(name.removesuffix(".processor")).to_k.weight.shape
            for part in ("to_k_ip", "to_v_ip"):
                value = torch.randn(shape) * shape[1] ** -0.5
                tensors[f"ip_adapter.{number}.{part}.weight"] = value
    path = out / ADAPTER
    path.parent.mkdir(exist_ok=True)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = CLIPVisionConfig(num_attention_heads=2, projection_dim=EMBED, **sizes)
    encoder = randomized(CLIPVisionModelWithProjection(config), 5)
    encoder.save_pretrained(path.parent / "image_encoder")
    save_file(tensors, path)


def export_one(out: Path, steered: str, size: int) -> None:
    from sd_tf.export import ExportOptions, export
    from sd_tf.weights import open_checkpoint

    given = {"net": {"controlnet": [out / NET]}, "adapter": {"ip_adapter": [out / ADAPTER]}}
    checkpoint = open_checkpoint(out / CHECKPOINT, **given.get(steered, {}))
    options = ExportOptions(height=size, width=size, max_steps=MANY, verify="off")
    export(checkpoint, out / EXPORTS / steered, options)


def of_export(out: Path, steered: str, picture) -> dict[str, float]:
    """Return the seconds of a step in the compiled loop, for each variant of one export."""
    from sd_tf.runtime.pipeline import Pipeline

    pipe = Pipeline.load(out / EXPORTS / steered)
    given = {name for names, _ in CALLS.values() for name in names}
    values = {name: 0.0 if name.endswith("_scale") else picture for name in given}

    def seconds(num_steps: int, given: dict) -> float:
        result = pipe("a house", num_steps=num_steps, seed=1, scheduler="ddim", **given)
        return result.timings["diffusion_model"]

    found = {}
    for variant, (names, _) in CALLS.items():
        if variant.split(" ")[0] == steered:
            inputs = {name: values[name] for name in names}
            seconds(FEW, inputs)  # compiles
            turns = [seconds(MANY, inputs) - seconds(FEW, inputs) for _ in range(3)]
            found[variant] = statistics.median(turns) / (MANY - FEW)
    return found


def of_pytorch(out: Path, size: int) -> dict[str, float]:
    """Return the seconds of a step by diffusers' models, eager, with the two halves of guidance."""
    import diffusers
    import torch

    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(
        out / CHECKPOINT, safety_checker=None
    )
    net = diffusers.ControlNetModel.from_pretrained(out / NET)
    models = [
        module.eval().to(memory_format=torch.channels_last) for module in (pipeline.unet, net)
    ]
    latents = torch.randn(2, 4, size // 8, size // 8).to(memory_format=torch.channels_last)
    context, hint = torch.randn(2, 77, 768), torch.rand(2, 3, size, size)
    embeds = [torch.randn(2, 1, EMBED)]

    def plain(**more):
        return models[0](latents, 500, context, return_dict=False, **more)

    def steered():
        down, middle = models[1](latents, 500, context, hint, return_dict=False)
        return plain(down_block_additional_residuals=down, mid_block_additional_residual=middle)

    found = {"plain": _median(plain), "net": _median(steered)}
    path = out / ADAPTER
    pipeline.load_ip_adapter(
        str(path.parent), subfolder="", weight_name=path.name, image_encoder_folder=None
    )
    return {**found, "adapter": _median(lambda: plain(added_cond_kwargs={"image_embeds": embeds}))}


def _median(call) -> float:
    import torch

    def seconds() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            call()
        return time.perf_counter() - start

    seconds()
    return statistics.median(seconds() for _ in range(3))
