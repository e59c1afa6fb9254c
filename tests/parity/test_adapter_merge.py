"""Adapters merged into a checkpoint, against diffusers' `fuse_lora` on the same files.

Weights are compared to 1e-6 of values that the adapters change by 0.1 and more, pictures to 50 dB.
"""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from diffusers.utils import state_dict_utils as peers_names
from safetensors.numpy import load_file

from sd_tf.adapters import read_adapter
from sd_tf.config.original_names import original_names
from sd_tf.weights import layers_of, open_checkpoint
from tests import peer_adapters, peers
from tests.peer_pipelines import (
    PROMPTS,
    Pair,
    channels_first,
    check_text_to_image,
    drawer,
    psnr,
)

CLOSE = 1e-6
FAMILIES = ("sd1", "sd2-base", "sdxl-base")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """family → a random checkpoint's folder and two of its adapters, made on first use."""

    @functools.cache
    def make(family):
        folder = tmp_path_factory.mktemp(family)
        pipeline = peers.random_pipeline(family, layers_per_block=1)
        pipeline.save_pretrained(folder / "checkpoint")
        save = functools.partial(peer_adapters.save_lora, pipeline)
        return SimpleNamespace(
            folder=folder,
            pipeline=type(pipeline),
            checkpoint=folder / "checkpoint",
            everywhere=save(folder / "a", 1, peer_adapters.EVERYWHERE, r=4, lora_alpha=8),
            attention=save(folder / "b", 2, r=3, lora_alpha=3),
            blocks=save(folder / "c", 3, peer_adapters.BLOCKS, metadata=False, r=4, lora_alpha=4),
        )

    return make


def check_merged(one, adapters, name):
    """Compare all weights with those of diffusers' own merge; every component must change."""
    pipeline = one.pipeline.from_pretrained(one.checkpoint)
    fused = open_checkpoint(peer_adapters.fused(pipeline, adapters, one.folder / name))
    plain = open_checkpoint(one.checkpoint)
    merged = open_checkpoint(one.checkpoint, lora=adapters)
    components = [component for component in plain.readers if component != "vae"]
    changed = peer_adapters.largest_differences(plain, fused, components)
    assert min(changed.values()) > 0.1, changed
    differ = peer_adapters.largest_differences(merged, fused, components)
    print(f"{name}: changed by {changed}, differ by {differ}")
    assert max(differ.values()) < CLOSE, differ


@pytest.mark.parametrize("family", FAMILIES)
def test_two_adapters(made, family):
    one = made(family)
    check_merged(one, [(one.everywhere, 0.8), (one.attention, -0.5)], "two")
    adapter = read_adapter(one.everywhere, layers_of(open_checkpoint(one.checkpoint).config))
    assert (adapter.format, adapter.ranks, adapter.alphas) == ("diffusers", (4,), (8,))


@pytest.mark.parametrize(
    ("family", "is_original"),
    [("sd1", False), ("sdxl-base", False), ("sdxl-base", True)],  # diffusers has SDXL's alone
)
def test_kohya(made, family, is_original):
    """All alphas are equal: diffusers takes the commonest one for all attentions."""
    one = made(family)
    layers = layers_of(open_checkpoint(one.checkpoint).config)
    originals = original_names(layers["unet"])
    prefixes = {"unet": "lora_unet", "text_encoder": "lora_te"}
    if "text_encoder_2" in layers:
        prefixes |= {"text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}

    def spelled(key):
        component, _, rest = key.partition(".")
        module, _, end = rest.rpartition(".lora_")
        if is_original and component == "unet":
            module = originals[module]
        if component != "unet" and not module.startswith("text_model."):
            module = f"text_model.{module}"
        end = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight"}[end]
        return f"{prefixes[component]}_{module.replace('.', '_')}.{end}"

    names = {spelled(key).partition(".")[0] for key in load_file(one.blocks)}
    alphas = {f"{name}.alpha": np.array(8, "float16") for name in names}
    file = one.folder / f"kohya-{is_original}" / "style.safetensors"
    peer_adapters.renamed(one.blocks, file, spelled, alphas)
    adapter = read_adapter(file, layers)
    assert (adapter.name, adapter.alphas) == ("style", (8,))
    assert adapter.format.startswith("kohya") and ("original" in adapter.format) == is_original
    assert len(adapter.changes) == len(names)
    check_merged(one, [(file, 0.7)], file.parent.name)


PROCESSORS = {".lora_A.": "_lora.down.", ".lora_B.": "_lora.up.", ".to_out.0": ".to_out"}
OLDER = {  # the replacements in a UNet's and in a text encoder's names; by prefix of the UNet's
    "linear-layers": (
        {".lora_A.": ".lora.down.", ".lora_B.": ".lora.up."},
        {".lora_A.": ".lora_linear_layer.down.", ".lora_B.": ".lora_linear_layer.up."},
        "unet.",
    ),
    "processors": (
        PROCESSORS | {"attn1.": "attn1.processor.", "attn2.": "attn2.processor."},
        {".lora_A.": "_lora.down.", ".lora_B.": "_lora.up."}
        | {f"{name}_proj": f"to_{name}" for name in ("q", "k", "v", "out")},
        "unet.",
    ),
    "without-unet": (PROCESSORS, None, ""),
}


@pytest.mark.parametrize("name", OLDER)
def test_older_names_of_diffusers(made, tmp_path, name):
    """diffusers' own tables turn the older names into peft's; we read the same from either."""
    one = made("sd1")
    of_unet, of_text, prefix = OLDER[name]
    text = () if of_text is None else ("q_proj", "k_proj", "v_proj", "out_proj")
    pipeline = one.pipeline.from_pretrained(one.checkpoint)
    new = peer_adapters.save_lora(
        pipeline, tmp_path, 5, text=text, metadata=False, r=2, lora_alpha=2
    )

    def spelled(key):
        component, _, rest = key.partition(".")
        for ours, theirs in (of_unet if component == "unet" else of_text).items():
            rest = rest.replace(ours, theirs)
        return f"{prefix if component == 'unet' else 'text_encoder.'}{rest}"

    old = peer_adapters.renamed(new, tmp_path / "old.safetensors", spelled)
    convert = {
        "unet": peers_names.convert_unet_state_dict_to_peft,
        "text_encoder": peers_names.convert_state_dict_to_peft,
    }
    keys = list(load_file(new))
    for component in ("unet", "text_encoder")[: 1 if of_text is None else 2]:
        begin = f"{component}."
        expected = {key.removeprefix(begin): key for key in keys if key.startswith(begin)}
        theirs = {spelled(key).removeprefix(begin): key for key in expected.values()}
        assert convert[component](theirs) == expected
    layers = layers_of(open_checkpoint(one.checkpoint).config)
    first, second = (read_adapter(file, layers).changes for file in (new, old))
    assert first.keys() == second.keys()
    for place, change in first.items():
        np.testing.assert_array_equal(change.delta(), second[place].delta())


def test_pictures(made, tmp_path):
    """With adapters it draws what diffusers draws with them, and not what it draws alone."""
    one = made("sd1")
    adapters = [(one.everywhere, 0.4), (one.attention, -0.5)]
    pipeline = one.pipeline.from_pretrained(one.checkpoint)
    ours = drawer(one.checkpoint.parent, {"lora": adapters}, height=64, width=64, batch_size=2)
    pair = Pair(pipeline, ours)
    merged = pair.ours.manifest.checkpoint["diffusion_model"]["adapters"]
    assert [(adapter["name"], adapter["scale"]) for adapter in merged] == [("a", 0.4), ("b", -0.5)]
    arguments = {"latents": channels_first(pair.noise(1)), "prompt": PROMPTS[:1], **pair.size}
    before = pair.peer("euler", **arguments)
    peer_adapters.fused(pipeline, adapters, tmp_path / "fused")
    after = pair.peer("euler", **arguments)
    assert psnr(before, after) < 30, "the adapters hardly matter"
    check_text_to_image(pair, "euler")
