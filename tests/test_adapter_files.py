"""Adapter files: every spelling of a layer, the settings beside it, and what is refused and how."""

import json

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.lora_conversion_utils import _maybe_map_sgm_blocks_to_diffusers
from peft import LoraConfig

from sd_tf.adapters import AdapterError, open_adapter, read_adapter
from sd_tf.adapters.spellings import spellings
from sd_tf.config import FAMILIES
from sd_tf.weights import layers_of
from tests.adapter_files import CONV, KOHYA, LAYERS, ONE, Q_PROJ, SPELLED, TO_Q, keyed, written


@pytest.mark.parametrize("name", SPELLED)
def test_spellings(tmp_path, name):
    tensors, place = SPELLED[name]
    adapter = read_adapter(written(tmp_path, tensors), LAYERS)
    assert list(adapter.changes) == [place]
    np.testing.assert_array_equal(adapter.changes[place].delta(), np.full((16, 16), 2.0))
    assert (adapter.name, adapter.kinds, adapter.ranks, adapter.alphas) == (
        *("one", ("LoRA",)),
        *((2,), ()),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_layers_share_a_spelling(family):
    """`spellings` raises where they do; every UNet layer has its original name, too."""
    layers = layers_of(FAMILIES[family])
    found = spellings(layers)
    for component, modules in layers.items():
        for convention in ("diffusers", "kohya"):
            named = {p.modules[0] for p in found.values() if p[::2] == (component, convention)}
            assert named == modules.keys()
    original = {
        module
        for place in found.values()
        if "original" in place.convention
        for module in place.modules
    }
    denoiser = FAMILIES[family].denoiser
    # Their outputs are in another order in the original releases.
    reordered = {"norm_out.linear"}
    if family.startswith("sd3"):
        reordered.add(f"transformer_blocks.{denoiser.num_layers - 1}.norm1_context.linear")
    assert original == layers[denoiser.component].keys() - reordered


def test_a_spelling_of_two_layers_is_refused():
    with pytest.raises(AdapterError, match=r"lora_unet_a_b could be .*'a\.b'.* or .*'a_b'.* of"):
        spellings({"unet": {"a.b": (1, 1), "a_b": (1, 1)}})


def test_kohya_names_of_two_text_encoders():
    found = spellings(layers_of(FAMILIES["sdxl-base"]))
    first, second = (found[f"lora_te{n}_{Q_PROJ.replace('.', '_')}"] for n in (1, 2))
    assert (first.component, second.component) == ("text_encoder", "text_encoder_2")
    assert f"lora_te_{Q_PROJ.replace('.', '_')}" not in found


@pytest.mark.parametrize(
    ("family", "component"), [("sd3-medium", "text_encoder_3"), ("flux-dev", "text_encoder_2")]
)
def test_kohya_names_of_t5(family, component):
    """`lora_te3_` in both, though T5 is the second encoder of Flux."""
    found = spellings(layers_of(FAMILIES[family]))
    place = found["lora_te3_encoder_block_0_layer_0_SelfAttention_q"]
    assert place[:2] == (component, ("encoder.block.0.layer.0.SelfAttention.q",))
    assert not any(name.startswith("lora_te2_encoder_block") for name in found)


def test_folders_of_diffusers_and_peft(tmp_path):
    theirs = tmp_path / "water colour"
    theirs.mkdir()
    file = written(theirs, SPELLED["peft"][0], name="pytorch_lora_weights.safetensors")
    for path in (theirs, file):
        assert read_adapter(path, LAYERS).name == "water colour"
    peft = tmp_path / "peft"
    peft.mkdir()
    written(peft, keyed(f"base_model.model.{Q_PROJ}", ONE), name="adapter_model.safetensors")
    (peft / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 1}')
    adapter = read_adapter(peft, LAYERS)
    assert list(adapter.changes) == [("text_encoder", Q_PROJ)] and adapter.alphas == (1,)
    assert adapter.changes["text_encoder", Q_PROJ].delta()[0, 0] == 1


def metadata(**settings):
    return {"lora_adapter_metadata": json.dumps({f"unet.{k}": v for k, v in settings.items()})}


def test_metadata_of_diffusers(tmp_path):
    """Only the component that it names has its alpha; without it, the scale is 1."""
    tensors = SPELLED["peft"][0] | keyed(f"unet.{CONV}", {
        "lora_A.weight": np.ones((4, 8, 3, 3), "float32"),
        "lora_B.weight": np.ones((8, 4, 1, 1), "float32"),
    }) | SPELLED["text"][0]  # fmt: skip
    about = metadata(r=2, lora_alpha=3, rank_pattern={"conv1": 4}, alpha_pattern={CONV: 1})
    adapter = read_adapter(written(tmp_path, tensors, about), LAYERS)
    multipliers = {module: change.multiplier for (_, module), change in adapter.changes.items()}
    assert multipliers == {TO_Q: 1.5, CONV: 0.25, Q_PROJ: 1}
    assert (adapter.alphas, adapter.ranks) == ((1, 3), (2, 4))
    assert set(adapter.components) == {"unet", "text_encoder"}


def test_metadata_without_a_component(tmp_path):
    """A model of diffusers that saves its own adapter names itself nowhere."""
    torch.manual_seed(0)
    sizes = {"block_out_channels": (32, 32), "layers_per_block": 1, "cross_attention_dim": 8}
    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    unet = UNet2DConditionModel(**sizes, **blocks, attention_head_dim=4)
    before = {name: value.clone() for name, value in unet.state_dict().items()}
    layers = {
        "unet": {
            name.removesuffix(".weight"): tuple(value.shape)
            for name, value in before.items()
            if name.endswith(".weight") and ".attn" in name
        },
        "text_encoder": LAYERS["text_encoder"],
    }
    chosen = {"target_modules": ["attn2.to_q", "attn1.to_v"], "init_lora_weights": False}
    patterns = {"alpha_pattern": {"attn1.to_v": 3}, "rank_pattern": {"attn1.to_v": 2}}
    settings = LoraConfig(r=4, lora_alpha=2, use_rslora=True, **patterns, **chosen)
    unet.add_adapter(settings)
    unet.save_lora_adapter(tmp_path)
    adapter = read_adapter(tmp_path, layers)
    multipliers = {module[-10:]: c.multiplier for (_, module), c in adapter.changes.items()}
    assert multipliers == {"attn2.to_q": 2 / 4**0.5, "attn1.to_v": 3 / 2**0.5}
    unet.fuse_lora()
    unet.unload_lora()
    for (_, module), change in adapter.changes.items():
        found = (unet.get_submodule(module).weight - before[f"{module}.weight"]).detach().numpy()
        assert np.abs(change.delta() - found).max() < 1e-6 < 1e-2 < np.abs(found).max()
    unet.add_adapter(LoraConfig(r=2, **{**chosen, "init_lora_weights": "pissa"}))
    unet.save_lora_adapter(tmp_path / "pissa")
    with pytest.raises(AdapterError, match=r"not supported: init_lora_weights 'pissa'"):
        read_adapter(tmp_path / "pissa", layers)


def test_metadata_of_what_the_model_lacks(tmp_path):
    about = {"lora_adapter_metadata": json.dumps({"transformer.r": 2, "transformer.lora_alpha": 1})}
    message = r"its lora_adapter_metadata is of transformer, but this model's components are text_"
    with pytest.raises(AdapterError, match=message):
        read_adapter(written(tmp_path, keyed(Q, ONE), about), LAYERS)


def test_blocks_under_both_names(tmp_path):
    """diffusers drops those of the original names, whatever is in them."""
    ours, original = SPELLED["kohya"][0], SPELLED["kohya-original"][0]
    doubled = ours | {name: 2 * tensor for name, tensor in original.items()}
    adapter = read_adapter(written(tmp_path, doubled), LAYERS)
    alone = read_adapter(written(tmp_path, ours, name="alone.safetensors"), LAYERS)
    assert adapter.changes.keys() == alone.changes.keys() == {("unet", TO_Q)}
    place = "unet", TO_Q
    np.testing.assert_array_equal(adapter.changes[place].delta(), alone.changes[place].delta())
    kept = _maybe_map_sgm_blocks_to_diffusers(dict(doubled), None)
    assert kept.keys() == ours.keys()


Q = f"unet.{TO_Q}"
REFUSED_FILES = {
    "unknown": (
        {f"unet.{TO_Q}x.lora_A.weight": ONE["lora_A.weight"], f"{Q}.lora_C": np.ones(1)},
        r"one.safetensors: 2 of its 2 tensors belong to no layer of the model: unet\.down.*lora_C, "
        r"unet\.down.*to_qx\.lora_A\.weight\.",
    ),
    "half": (
        {f"{Q}.lora_A.weight": ONE["lora_A.weight"]},
        rf"1 of its 1 layers do not fit the model: unet {TO_Q}: there is down, but no up\.",
    ),
    "alpha-alone": ({f"{Q}.alpha": np.float32(1)}, "there is a magnitude or an alpha alone"),
    "mixed": (
        keyed(Q, ONE) | {f"{Q}.lokr_w1": np.ones((2, 2))},
        "down, lokr_w1, up do not make one change",
    ),
    "shape": (
        keyed(Q, ONE | {"lora_A.weight": np.ones((2, 8))}),
        r"down is \[2, 8\], the weight of \[16, 16\] wants \[2, 16\]",
    ),
    "rank": (
        keyed(Q, ONE | {"lora_B.weight": np.ones((16, 3))}),
        r"up is \[16, 3\], the weight of \[16, 16\] wants \[16, 2\]",
    ),
    "number": (keyed(Q, ONE | {"lora_A.weight": np.float32(1)}), r"down has the shape \[\]"),
    "kronecker": (
        keyed(Q, {"lokr_w1": np.ones((3, 2)), "lokr_w2": np.ones((4, 8))}),
        r"w1 of shape \[3, 2\] does not divide \[16, 16\]",
    ),
    "dora": (
        keyed(Q, ONE | {"dora_scale": np.ones((8, 1))}),
        r"dora_scale is \[8, 1\], the weight of \[16, 16\] wants \[16, 1\] or \[1, 16\]",
    ),
    "magnitude": (
        keyed(Q, ONE | {"lora_magnitude_vector": np.ones(8)}),
        "the magnitude has 8 values for 16",
    ),
    "two-magnitudes": (
        keyed(Q, ONE | {"lora_magnitude_vector": np.ones(16), "dora_scale": np.ones((16, 1))}),
        "DoRA has one magnitude, and no bias",
    ),
    "twice": (
        keyed(Q, ONE) | keyed(f"lora_unet_{TO_Q.replace('.', '_')}", KOHYA),
        rf"{Q}\.lora_A\.weight and lora_unet.*lora_down\.weight are for the same place|"
        rf"lora_unet.*lora_down\.weight and {Q}\.lora_A\.weight are for the same place",
    ),
    "alpha-shape": (
        keyed(Q, ONE | {"alpha": np.ones(2)}),
        r"alpha is one number. Received: the shape \[2\]",
    ),
    "alpha-nan": (keyed(Q, ONE | {"alpha": np.float32("nan")}), "a finite number. Received: nan"),
    "empty": ({}, "holds no tensors"),
    "diff": ({f"{Q}.diff": np.ones(1)}, r"whole differences of weights or biases \(diff, diff_b\)"),
    "norm": ({f"{Q}.w_norm": np.ones(1)}, r"changes of norms \(w_norm, b_norm\)"),
    "glora": ({f"{Q}.a1.weight": np.ones(1)}, "GLoRA"),
    "oft": ({f"{Q}.oft_blocks": np.ones(1)}, "OFT or BOFT"),
    "peft-oft": ({f"{Q}.oft_R.weight": np.ones(1)}, "OFT or BOFT"),
    "ia3": ({f"{Q}.on_input": np.ones(1)}, "IA3"),
    "vera": ({f"{Q}.vera_lambda_b": np.ones(1)}, "VeRA"),
    "embedding": ({"text_encoder.x.lora_embedding_A": np.ones(1)}, "LoRA of an embedding"),
    "replaced": ({f"{Q}.set_weight": np.ones(1)}, "replaced or reshaped weights"),
    "bundle": (
        keyed(Q, ONE) | {"bundle_emb.cat.string_to_param.*": np.ones(1)},
        r"cannot be used: textual inversion bundled with the adapter \(bundle_emb\) is not "
        r"supported, .* Received: bundle_emb\.cat\.string_to_param\.\*",
    ),
}


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_refused_files(tmp_path, name):
    tensors, reason = REFUSED_FILES[name]
    with pytest.raises(AdapterError, match=reason):
        read_adapter(written(tmp_path, tensors), LAYERS)


REFUSED_SETTINGS = {
    "rank": ({"r": 4, "lora_alpha": 4}, "its rank is 2, but .* unet has 4"),
    "no-alpha": ({"r": 2}, "unet: lora_alpha must be a number. Received: None"),
    "no-kind": ({"r": 2, "peft_type": ["LORA"]}, r"peft_type \['LORA'\] is not supported"),
    "kind": ({"r": 2, "peft_type": "OFT"}, "peft_type 'OFT' is not supported; supported: LORA"),
    "pissa": (
        {"r": 2, "lora_alpha": 2, "init_lora_weights": "pissa"},
        "these settings are not supported: init_lora_weights 'pissa'",
    ),
    "bias": ({"r": 2, "lora_alpha": 2, "bias": "all"}, "not supported: bias 'all'"),
    "saved": ({"r": 2, "lora_alpha": 2, "modules_to_save": ["a"]}, r"modules_to_save \['a'\]"),
    "patterns": ({"r": 2, "lora_alpha": 2, "rank_pattern": [1]}, "rank_pattern must be an object"),
    "pattern": (
        {"r": 2, "lora_alpha": 2, "alpha_pattern": {"(": 1}},
        r"the pattern '\(' cannot be read",
    ),
}


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_refused_settings(tmp_path, name):
    settings, reason = REFUSED_SETTINGS[name]
    with pytest.raises(AdapterError, match=reason):
        read_adapter(written(tmp_path, keyed(Q, ONE), metadata(**settings)), LAYERS)


def test_refused_metadata(tmp_path):
    for text, reason in (("{", "is not valid JSON"), ("[]", "must be a JSON object.*list")):
        with pytest.raises(AdapterError, match=f"lora_adapter_metadata {reason}"):
            open_adapter(written(tmp_path, keyed(Q, ONE), {"lora_adapter_metadata": text}))
    about = metadata(r=2, lora_alpha=2)
    file = written(tmp_path, keyed(Q, ONE | {"alpha": np.float32(1)}), about)
    with pytest.raises(AdapterError, match=r"there is an alpha, and another in .*metadata, unet"):
        read_adapter(file, LAYERS)


def test_refused_paths(tmp_path):
    with pytest.raises(AdapterError, match=r"No such file: .*none.safetensors"):
        open_adapter(tmp_path / "none.safetensors")
    with pytest.raises(AdapterError, match=r"it has neither pytorch_lora_weights.safetensors nor"):
        open_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    for path in (tmp_path, tmp_path / "x.pt"):
        with pytest.raises(AdapterError, match="is a pickle, which can run any code"):
            open_adapter(path)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(AdapterError, match=r"an adapter is a .safetensors file. Received: .txt"):
        open_adapter(tmp_path / "a.txt")
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    with pytest.raises(AdapterError, match="is truncated"):
        open_adapter(tmp_path / "short.safetensors")
    written(tmp_path, keyed(f"base_model.model.{TO_Q}", ONE), name="adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"No such file: .*adapter_config.json"):
        open_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 3, "lora_alpha": 1}')
    with pytest.raises(AdapterError, match=r"fits 0.*text_encoder: .*unet: .*its rank is 2, but"):
        read_adapter(tmp_path, LAYERS)
