"""LoRA for SD3 and Flux: kohya's fused names, and pictures, against diffusers and peft."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers
from safetensors.numpy import save_file

from sd_tf.adapters import AdapterError, read_adapter
from sd_tf.config import FAMILIES
from sd_tf.weights import layers_of, open_checkpoint
from tests import peer_transformers
from tests.peer_adapters import JOINT, fused, largest_differences, save_lora
from tests.peer_pipelines import PROMPTS, Pair, channels_first, check_pictures, drawer, psnr

RANK, ALPHA = 2, 3.0
# Original name → the outputs of the layers that it fuses.
FUSED = {
    "double_blocks_0_img_attn_qkv": 3 * [3072],
    "double_blocks_0_txt_attn_qkv": 3 * [3072],
    "double_blocks_0_img_mlp_0": [12288],
    "single_blocks_0_linear1": [*3 * [3072], 12288],
}


def flux_layers():
    """The shapes of Flux's layers in one block of each kind."""
    flux = FAMILIES["flux-dev"]
    return {
        "transformer": layers_of(
            replace(flux, denoiser=replace(flux.denoiser, num_layers=1, num_single_layers=1))
        )["transformer"]
    }


def kohya(**changes):
    """A random LoRA as kohya's scripts save it."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, outputs in FUSED.items():
        for end, shape in (("lora_down", (RANK, 3072)), ("lora_up", (sum(outputs), RANK))):
            values = rng.standard_normal(shape).astype("float32")
            tensors[f"lora_unet_{name}.{end}.weight"] = values
        tensors[f"lora_unet_{name}.alpha"] = np.array(ALPHA, "float32")
    return {**tensors, **changes}


def written(folder, tensors):
    save_file(tensors, folder / "kohya.safetensors")
    return folder / "kohya.safetensors"


def test_kohya_names_of_flux(tmp_path):
    adapter = read_adapter(written(tmp_path, kohya()), flux_layers())
    theirs = _convert_kohya_flux_lora_to_diffusers(
        {name: torch.from_numpy(x.copy()) for name, x in kohya().items()}
    )
    modules = {name.removeprefix("transformer.").rpartition(".lora_")[0] for name in theirs}
    assert {module for _, module in adapter.changes} == modules
    rng = np.random.default_rng(0)
    for (component, module), change in adapter.changes.items():
        down, up = (theirs[f"{component}.{module}.lora_{end}.weight"] for end in "AB")
        x = rng.standard_normal(down.shape[1]).astype("float32")  # the matrices are large
        expected = (up @ (down @ torch.from_numpy(x))).numpy()
        np.testing.assert_allclose(change.delta() @ x, expected, rtol=1e-4, atol=1e-2)


def test_fused_layers_that_do_not_fit(tmp_path):
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    short = {f"{name}.lora_up.weight": np.zeros((3072, RANK), "float32")}
    with pytest.raises(AdapterError, match=rf"{name}\.lora_up.weight must have 9216 rows"):
        read_adapter(written(tmp_path, kohya(**short)), flux_layers())
    other = {f"{name}.lokr_w1": np.zeros((4, 4), "float32")}
    with pytest.raises(AdapterError, match="is for a layer that is 3 layers here, which only LoRA"):
        read_adapter(written(tmp_path, kohya(**other)), flux_layers())


@pytest.fixture(scope="module", params=["sd3-without-t5", "flux-dev"])
def adapted(request, tmp_path_factory):
    """diffusers' pipeline and ours, a random LoRA's file, and the checkpoint's folder."""
    pipeline = peer_transformers.random_pipeline(request.param)
    pipeline.set_progress_bar_config(disable=True)
    folder = tmp_path_factory.mktemp(request.param)
    pipeline.save_pretrained(folder / "checkpoint")
    file = save_lora(pipeline, folder / "lora", 0, targets=JOINT, r=4, lora_alpha=2)
    places = {"adapter_slots": 1, "adapter_rank": 4, "adapter_layers": "transformer"}
    ours = drawer(folder, {"max_sequence_length": 32}, height=64, width=96, **places)
    return Pair(pipeline, ours), file, folder


@pytest.mark.backend(long=True)
def test_adapters_are_switched(adapted):
    pair, file, _ = adapted
    noise = pair.noise(2)
    packed = channels_first(noise)
    if pair.ours.manifest.family.startswith("flux"):
        packed = pair.theirs._pack_latents(packed, *packed.shape)
    pair.theirs.load_lora_weights(file.parent, adapter_name="one")
    pair.theirs.set_adapters(["one"], [0.8])
    pair.ours.load_adapter("one", file)
    common = {"guidance_scale": 4.0}
    reference = pair.theirs(
        PROMPTS,
        latents=packed,
        num_inference_steps=4,
        max_sequence_length=32,
        output_type="np",
        **pair.size,
        **common,
    ).images
    pair.theirs.unload_lora_weights()
    arguments = {"noise": noise, "num_steps": 4, **common}
    drawn = pair.ours(PROMPTS, adapters={"one": 0.8}, **arguments).images
    check_pictures(drawn, (255 * reference).round().astype("uint8"))
    assert psnr(drawn, pair.ours(PROMPTS, **arguments).images) < 35, "the adapter hardly matters"


def test_merged_weights(adapted, tmp_path):
    pair, file, folder = adapted
    ours = open_checkpoint(folder / "checkpoint", lora=[(file, 0.7)])
    copy = type(pair.theirs).from_pretrained(folder / "checkpoint", **absent(pair.theirs))
    theirs = open_checkpoint(fused(copy, [(file, 0.7)], tmp_path / "fused"))
    differences = largest_differences(ours, theirs, ["transformer", "text_encoder"])
    assert max(differences.values()) < 1e-5


def absent(pipeline):
    """What `from_pretrained` has to be told of parts that a pipeline lacks."""
    names = ("text_encoder_3", "tokenizer_3")
    return {n: None for n in names if n in pipeline.components and getattr(pipeline, n) is None}
