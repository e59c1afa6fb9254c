"""The kinds of changes, against peft's own layers and the formulas of those that peft lacks."""

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import save_file

from sd_tf.adapters import merged, read_adapter

LINEAR = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
POINTWISE = "mid_block.attentions.0.proj_in"
CONV = "mid_block.resnets.0.conv1"
LAYERS = {"unet": {LINEAR: (24, 16), POINTWISE: (24, 16, 1, 1), CONV: (24, 16, 3, 3)}}
SHAPES = LAYERS["unet"]
RTOL = {"rtol": 1e-5, "atol": 1e-6}


def toy():
    """A model of torch with one layer of each kind, at the places of a UNet's."""
    root = torch.nn.Module()
    root.forward = lambda x: x
    for name, shape in SHAPES.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        out, inner, *kernel = shape
        layer = torch.nn.Conv2d(inner, out, kernel) if kernel else torch.nn.Linear(inner, out)
        module.add_module(leaf, layer)
    return root


def weights_of(model):
    return {name: model.get_submodule(name).weight.detach().numpy().copy() for name in SHAPES}


def peft_folder(folder, settings):
    """Save a random adapter with PEFT; return the weights without it and with it."""
    torch.manual_seed(0)
    model = toy()
    before = weights_of(model)
    wrapped = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "magnitude" in name:
                parameter.mul_(0.5 + torch.rand(parameter.shape))
            elif parameter.requires_grad:
                parameter.normal_(std=0.4)
    wrapped.save_pretrained(folder)
    return before, weights_of(wrapped.merge_and_unload())


def check(adapter, before, after, places=tuple(SHAPES)):
    """Compare weights with an adapter's, and its product form with its change."""
    assert {module for _, module in adapter.changes} == set(places)
    for (_, module), change in adapter.changes.items():
        ours = merged(before[module], [(change, 1.0)])
        assert ours.dtype == np.float32 and np.abs(after[module] - before[module]).max() > 1e-2
        np.testing.assert_allclose(ours, after[module], **RTOL, err_msg=module)
        half = merged(before[module].reshape(len(before[module]), -1), [(change, 0.5)])
        halfway = (before[module] + after[module]) / 2
        np.testing.assert_allclose(half, halfway.reshape(half.shape), **RTOL)
        if change.rank is None:
            assert change.factors() is None
            continue
        a, b = change.factors()
        assert a.shape[0] == b.shape[1] == change.rank
        assert change.delta().shape == SHAPES[module]
        np.testing.assert_allclose(b @ a, change.delta().reshape(len(b), -1), **RTOL)


TARGETS = {"target_modules": list(SHAPES)}
KINDS = {
    "lora": (peft.LoraConfig(r=4, lora_alpha=6, **TARGETS), "LoRA", (4,), 4),
    "rslora": (peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, **TARGETS), "LoRA", (4,), 4),
    "dora": (peft.LoraConfig(r=4, lora_alpha=6, use_dora=True, **TARGETS), "DoRA", (4,), None),
    "loha": (peft.LoHaConfig(r=3, alpha=6, **TARGETS), "LoHa", (3,), 9),
    "loha-tucker": (
        peft.LoHaConfig(r=3, alpha=6, use_effective_conv2d=True, **TARGETS),
        *("LoHa", (3,), 9),
    ),
    # w1 is (4, 4), w2 is a product of rank 2, or whole
    "lokr": (peft.LoKrConfig(r=2, alpha=3, **TARGETS), "LoKr", (2,), 8),
    "lokr-tucker": (
        peft.LoKrConfig(r=2, alpha=3, use_effective_conv2d=True, **TARGETS),
        *("LoKr", (2,), 8),
    ),
    "lokr-both": (
        peft.LoKrConfig(r=1, alpha=3, decompose_both=True, **TARGETS),
        *("LoKr", (1,), 1),
    ),
    "lokr-whole": (peft.LoKrConfig(r=16, alpha=8, **TARGETS), "LoKr", (), None),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_peft(tmp_path, name):
    settings, kind, ranks, rank = KINDS[name]
    before, after = peft_folder(tmp_path / name, settings)
    adapter = read_adapter(tmp_path / name, LAYERS)
    assert (adapter.name, adapter.format) == (name, "PEFT")
    assert (adapter.kinds, adapter.ranks) == ((kind,), ranks)
    if rank is not None:
        assert {change.rank for change in adapter.changes.values()} == {rank}
    check(adapter, before, after)


def test_patterns_of_rank_and_alpha(tmp_path):
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        rank_pattern={"attn1.to_q": 2},
        alpha_pattern={r"resnets\.\d\.conv1": 12, "proj_in": 1},
        **TARGETS,
    )
    before, after = peft_folder(tmp_path, settings)
    adapter = read_adapter(tmp_path, LAYERS)
    assert (adapter.ranks, adapter.alphas) == ((2, 4), (1, 6, 12))
    check(adapter, before, after)


@pytest.mark.filterwarnings("ignore:Adapter 'default'")  # taken for a shard, as it has one axis
def test_bias(tmp_path):
    settings = peft.LoraConfig(r=4, lora_alpha=6, lora_bias=True, target_modules=[LINEAR])
    torch.manual_seed(0)
    model = toy()
    bias = model.get_submodule(LINEAR).bias.detach().numpy().copy()
    wrapped = peft.get_peft_model(model, settings)
    with torch.no_grad():
        wrapped.get_submodule(f"base_model.model.{LINEAR}.lora_B.default").bias.normal_()
    wrapped.save_pretrained(tmp_path)
    after = wrapped.merge_and_unload().get_submodule(LINEAR).bias.detach().numpy()
    (change,) = read_adapter(tmp_path, LAYERS).changes.values()
    assert change.has_bias
    np.testing.assert_allclose(bias + change.bias(), after, **RTOL)


def kohya(tmp_path, module, tensors):
    """Read a file with the tensors of one layer; returns its change."""
    name = f"lora_unet_{module.replace('.', '_')}"
    stored = {f"{name}.{part}": np.asarray(tensor, "float32") for part, tensor in tensors.items()}
    save_file(stored, tmp_path / "one.safetensors")
    adapter = read_adapter(tmp_path / "one.safetensors", LAYERS)
    assert list(adapter.changes) == [("unet", module)]
    return adapter.changes["unet", module]


def random(*shape, seed=0):
    return np.random.default_rng(seed + len(shape)).standard_normal(shape).astype("float32")


def check_change(change, delta, rank):
    assert change.rank == rank
    np.testing.assert_allclose(change.delta(), delta, rtol=1e-4, atol=1e-5)
    a, b = change.factors()
    np.testing.assert_allclose(b @ a, delta.reshape(len(delta), -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alpha, scale", [(None, 1), (0, 1), (2, 0.5), (-4, -1)])
def test_alpha_of_kohya(tmp_path, alpha, scale):
    tensors = {"lora_down.weight": random(4, 16), "lora_up.weight": random(24, 4)}
    given = {} if alpha is None else {"alpha": alpha}
    change = kohya(tmp_path, LINEAR, tensors | given)
    check_change(change, scale * tensors["lora_up.weight"] @ tensors["lora_down.weight"], 4)


def test_a_matrix_may_be_a_convolution_and_the_other_way_round(tmp_path):
    down, up = random(4, 16), random(24, 4)
    for module, ones in ((LINEAR, (1, 1)), (POINTWISE, ())):
        tensors = {"lora_down.weight": down.reshape(4, 16, *ones)}
        tensors["lora_up.weight"] = up.reshape(24, 4, *ones)
        check_change(kohya(tmp_path, module, tensors), (up @ down).reshape(SHAPES[module]), 4)


def test_a_convolution_between_two_matrices(tmp_path):
    down, mid, up = random(4, 16, 1, 1), random(4, 4, 3, 3), random(24, 4, 1, 1, seed=9)
    parts = {"lora_down.weight": down, "lora_mid.weight": mid, "lora_up.weight": up, "alpha": 2}
    change = kohya(tmp_path, CONV, parts)
    reference = torch.einsum(
        "om,mnkl,ni->oikl", *map(torch.tensor, (up[..., 0, 0], mid, down[..., 0, 0]))
    )
    check_change(change, 0.5 * reference.numpy(), 4)


def test_loha_between_tucker_kernels(tmp_path):
    t1, t2 = random(3, 3, 3, 3), random(3, 3, 3, 3, seed=5)
    w1a, w1b, w2a, w2b = random(3, 24), random(3, 16, seed=1), random(3, 24, seed=2), random(3, 16)
    parts = {"hada_t1": t1, "hada_t2": t2, "hada_w1_a": w1a, "hada_w1_b": w1b}
    parts |= {"hada_w2_a": w2a, "hada_w2_b": w2b, "alpha": 6}
    rebuilt = [
        np.einsum("ijkl,ip,jr->prkl", *factors) for factors in ((t1, w1a, w1b), (t2, w2a, w2b))
    ]
    check_change(kohya(tmp_path, CONV, parts), 2 * rebuilt[0] * rebuilt[1], 9)


def test_lokr_with_two_whole_factors_has_no_alpha(tmp_path):
    w1, w2 = random(6, 4), random(4, 4, 3, 3)
    change = kohya(tmp_path, CONV, {"lokr_w1": w1, "lokr_w2": w2, "alpha": 1e6})
    check_change(change, np.kron(w1[..., None, None], w2), 16)
    assert change.stored_rank is None


@pytest.mark.parametrize("module", [LINEAR, CONV])
@pytest.mark.parametrize("axis", [0, 1])
def test_dora_scale_is_per_output_or_per_input(tmp_path, module, axis):
    shape = SHAPES[module]
    down, up, weight = random(4, *shape[1:]), random(24, 4), random(*shape, seed=3)
    kept = tuple(size if at == axis else 1 for at, size in enumerate(shape))
    magnitude = 1 + np.abs(random(shape[axis])).reshape(kept)
    parts = {"lora_down.weight": down, "lora_up.weight": up, "dora_scale": magnitude, "alpha": 2}
    change = kohya(tmp_path, module, parts)
    v = torch.tensor(weight + 0.5 * (up @ down.reshape(4, -1)).reshape(shape))
    norm = torch.linalg.vector_norm(v, dim=[a for a in range(v.ndim) if a != axis], keepdim=True)
    after = (torch.tensor(magnitude) * v / norm).numpy()
    np.testing.assert_allclose(merged(weight, [(change, 1.0)]), after, **RTOL)
    np.testing.assert_array_equal(merged(weight, [(change, 0.0)]), weight)
    assert (change.kind, change.rank, change.stored_rank) == ("DoRA", None, 4)


def test_changes_add_to_the_original_weight(tmp_path):
    down, up, weight = random(4, 16), random(24, 4), random(24, 16, seed=3)
    lora = kohya(tmp_path, LINEAR, {"lora_down.weight": down, "lora_up.weight": up})
    parts = {"lora_down.weight": down, "lora_up.weight": up, "dora_scale": np.ones((24, 1))}
    (tmp_path / "dora").mkdir()
    dora = kohya(tmp_path / "dora", LINEAR, parts)
    expected = weight + 0.5 * lora.delta() - 2 * dora.difference(weight)
    for order in ([(lora, 0.5), (dora, -2.0)], [(dora, -2.0), (lora, 0.5)]):
        np.testing.assert_allclose(merged(weight, order), expected, **RTOL)
    half = merged(weight.astype("float16"), [(lora, 0.5)])
    assert half.dtype == np.float32
