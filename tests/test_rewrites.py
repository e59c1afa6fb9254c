"""Rewrites for a target: the same results as the models as they are written, with less work."""

import math
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from sd_tf.config.rewrites import AS_WRITTEN, REWRITES, TARGETS, Rewrites
from sd_tf.export.modules import Traces
from sd_tf.export.options import ExportOptions, check
from sd_tf.models import attention, convolution, lowering
from sd_tf.models.lowering import lowered
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.psnr import psnr
from sd_tf.weights import open_checkpoint
from tests.exports import shared_export, small_export, small_folder

# One rewrite alone.
ALONE = {name: Rewrites(**{name: True}) for name in REWRITES}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def torch_conv(x, kernel, doubled_to=None):
    """The same convolution by PyTorch."""
    x = torch.tensor(np.moveaxis(x, -1, 1))
    if doubled_to is not None:
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)[..., : doubled_to[0], : doubled_to[1]]
    y = torch.nn.functional.conv2d(x, torch.tensor(kernel.transpose(3, 2, 0, 1)), padding=1)
    return np.moveaxis(y.numpy(), 1, -1)


# Convolutions


@pytest.mark.backend
@pytest.mark.parametrize(
    ("batch", "height", "width"),
    [
        (2, 16, 16),
        (2, 64, 32),
        (3, 18, 22),  # tiles reach beyond the edges
        (1, 96, 160),  # blocks of rows
        (2, 132, 64),  # rows of tiles that no power of two divides
        (8, 8, 8),
    ],
)
def test_winograd(batch, height, width):
    x, kernel = normal(batch, height, width, 48), normal(3, 3, 48, 56, seed=1)
    theirs = torch_conv(x, kernel)
    ours = keras.ops.convert_to_numpy(convolution.by_winograd(x, kernel))
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


@pytest.mark.backend
@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 2), (3, 1)])
def test_small_maps(size):
    x, kernel = normal(2, *size, 24), normal(3, 3, 24, 40, seed=1)
    theirs = torch_conv(x, kernel)
    ours = keras.ops.convert_to_numpy(convolution.by_patches(x, kernel))
    assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(theirs).max()


@pytest.mark.backend
@pytest.mark.parametrize("size", [(8, 8), (16, 9), (5, 20)])
def test_upsample_phases(size):
    x, kernel = normal(2, *size, 24), normal(3, 3, 24, 40, seed=1)
    theirs = torch_conv(x, kernel, (2 * size[0], 2 * size[1]))
    ours = keras.ops.convert_to_numpy(convolution.by_phases(x, kernel))
    assert np.abs(ours - theirs).max() <= 2e-6 * np.abs(theirs).max()


@pytest.mark.parametrize("name", ["as_written", *REWRITES])
@pytest.mark.parametrize("doubled_to", [None, (32, 32), (31, 32)])
def test_every_rewrite_leaves_a_convolution_what_it_is(name, doubled_to):
    """Also one that does not apply, and a doubled map that is cut before it is convolved."""
    x, kernel = normal(4, 16, 16, 64), normal(3, 3, 64, 64, seed=1)
    theirs = torch_conv(x, kernel, doubled_to)
    with lowered(ALONE.get(name, AS_WRITTEN)):
        if doubled_to is None:
            ours = convolution.convolve(x, kernel)
        else:
            ours = convolution.convolve_doubled(x, kernel, doubled_to)
    ours = keras.ops.convert_to_numpy(ours)
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


def test_winograd_is_for_float32_large_batches_and_kernels_of_a_bearable_size():
    def pays(shape, filters, dtype="float32"):
        x = keras.KerasTensor(shape, dtype)
        return convolution._winograd_pays(x, keras.KerasTensor((3, 3, shape[-1], filters), dtype))

    assert pays((2, 32, 32, 1920), 640) and pays((2, 64, 64, 960), 320)
    assert not pays((2, 8, 8, 1280), 1280), "8 tiles a picture: too few"
    assert not pays((2, 16, 16, 1280), 1280), "236 MB of transformed kernel"
    assert not pays((2, 64, 64, 4), 320) and not pays((2, 64, 64, 320), 4)
    assert not pays((2, 64, 64, 320), 320, "bfloat16")
    assert not pays((None, 64, 64, 320), 320)


# Attention


@pytest.mark.backend
@pytest.mark.parametrize("name", ["query_blocks", "fused_attention"])
@pytest.mark.parametrize("queries", [1024, 700])
def test_attention(name, queries):
    """Against PyTorch's own, with a count of queries that no block divides too."""
    heads, width, keys = 3, 16, 1100
    q, k, v = (normal(2, n, heads * width, seed=i) for i, n in enumerate((queries, keys, keys)))
    split = [torch.tensor(x).unflatten(-1, (heads, width)).transpose(1, 2) for x in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(*split)
    theirs = theirs.transpose(1, 2).flatten(-2).numpy()
    with lowered(ALONE[name]):
        ours = keras.ops.convert_to_numpy(attention.scaled_dot_product(q, k, v, heads))
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.backend
@pytest.mark.parametrize("counts", [None, (1,) * 1099 + (4,)])
def test_attention_as_written_holds_few_scores(monkeypatch, counts):
    """A large picture's queries take turns, with a count that none divides; otherwise, none."""
    q, k, v = (normal(2, n, 3 * 16, seed=i) for i, n in enumerate((700, 1100, 1100)))
    whole = attention.scaled_dot_product(q, k, v, 3, counts=counts)
    monkeypatch.setattr(attention, "_attend_in_blocks", None)
    turns, attend = [], attention._attend

    def counted(q, *given):
        turns.append(q.shape)
        return attend(q, *given)

    monkeypatch.setattr(attention, "_attend", counted)
    monkeypatch.setattr(attention, "MOST_SCORES", 3 * 699 * 1100)
    in_turns = attention.scaled_dot_product(q, k, v, 3, counts=counts)
    assert {shape[2] for shape in turns} == {699 // 16}
    whole, in_turns = map(keras.ops.convert_to_numpy, (whole, in_turns))
    assert np.abs(in_turns - whole).max() <= 1e-6 * np.abs(whole).max()


@pytest.mark.backend
@pytest.mark.parametrize("name", ["query_blocks", "fused_attention", "graph_kernels"])
def test_attention_to_keys_that_stand_for_several(name):
    """Against PyTorch's own, which is given each key as often as it counts."""
    heads, width, keys = 2, 16, 1100
    q, k, v = (normal(2, n, heads * width, seed=i) for i, n in enumerate((700, keys, keys)))
    counts = (*[1] * 76, 256, *[1] * (keys - 78), 3)
    given = (q, *(np.repeat(x, counts, axis=1) for x in (k, v)))
    split = [torch.tensor(x).unflatten(-1, (heads, width)).transpose(1, 2) for x in given]
    theirs = torch.nn.functional.scaled_dot_product_attention(*split)
    theirs = theirs.transpose(1, 2).flatten(-2).numpy()
    with lowered(ALONE[name]):
        ours = attention.scaled_dot_product(q, k, v, heads, counts=counts)
    ours = keras.ops.convert_to_numpy(ours)
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.backend
def test_large_scores_do_not_overflow():
    q = normal(1, 1024, 32)
    q *= 500 / np.linalg.norm(q, axis=-1, keepdims=True)
    with lowered(ALONE["query_blocks"]):
        h = keras.ops.convert_to_numpy(attention.scaled_dot_product(q, q, q, 1))
    assert np.isfinite(h).all()
    assert np.abs(h - q).max() <= 1e-3, "each query finds itself"


# Whole models


@pytest.fixture(scope="module")
def models():
    checkpoint = open_checkpoint(small_folder())
    return {name: checkpoint.build(name) for name in ("unet", "vae")}


@pytest.mark.backend(long=True)
@pytest.mark.parametrize("target", TARGETS)
def test_models_stay_what_they_are(models, target):
    context = normal(2, 77, models["unet"].config.context_dim, seed=2)
    calls = {
        "unet": (models["unet"], (normal(2, 32, 32, 4), np.array([7, 801]), context)),
        "decoder": (models["vae"].decode, (normal(1, 32, 32, 4),)),
        "encoder": (models["vae"].encode, (normal(1, 64, 96, 3),)),
    }
    for name, (model, inputs) in calls.items():
        written = keras.tree.flatten(model(*inputs))
        with lowered(TARGETS[target]):
            rewritten = keras.tree.flatten(model(*inputs))
        for one, other in zip(written, rewritten, strict=True):
            one, other = (keras.ops.convert_to_numpy(x) for x in (one, other))
            agreement = psnr(one, other, peak=np.ptp(one))
            assert agreement >= 100, f"{name}: {agreement:.0f} dB"


def test_the_scope_ends():
    with pytest.raises(ZeroDivisionError), lowered(TARGETS["cpu"]):
        assert lowering.rewrites() == TARGETS["cpu"]
        raise ZeroDivisionError
    assert lowering.rewrites() == AS_WRITTEN


# The work that is compiled: counted, because time is not the same on every machine


DOT = re.compile(r"= f32\[([\d,]*)\]\S* dot\(%?([\w.\-]+), .*lhs_contracting_dims=\{([\d,]*)\}")
CONVOLUTION = re.compile(
    r"= f32\[([\d,]*)\]\S* convolution\(%?([\w.\-]+), %?([\w.\-]+)\), .*dim_labels=\w+_(\w+)->"
)
SHAPE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = f32\[([\d,]*)\]")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
BODY = re.compile(r"while\(.*body=%?([\w.\-]+)")


def sizes(text):
    return [int(number) for number in text.split(",") if number]


def multiplications(hlo):
    """By computation: the dots and convolutions of optimized HLO."""
    shapes, counts, name = {}, {}, None
    for line in hlo.splitlines():
        if found := COMPUTATION.match(line):
            name = found[1]
        if found := SHAPE.match(line):
            shapes[found[1]] = sizes(found[2])
        if found := DOT.search(line):
            inner = math.prod(shapes[found[2]][axis] for axis in sizes(found[3]))
            counts[name] = counts.get(name, 0) + math.prod(sizes(found[1])) * inner
        elif found := CONVOLUTION.search(line):
            taps = math.prod(
                n for n, label in zip(shapes[found[3]], found[4], strict=True) if label != "o"
            )
            counts[name] = counts.get(name, 0) + math.prod(sizes(found[1])) * taps
    return counts


def compiled(function, *inputs):
    import tensorflow as tf

    inputs = [tf.constant(x) for x in inputs]
    jitted = tf.function(function, jit_compile=True, autograph=False)
    return jitted.experimental_get_compiler_ir(*inputs)(stage="optimized_hlo")


@pytest.mark.parametrize(
    ("name", "most"),
    [("as_written", 1.0), ("winograd", 0.36), ("upsample_phases", 4 / 9)],
)
def test_multiplications_of_a_convolution(name, most):
    """F(4×4, 3×3) takes a quarter, and a bit for what the kernel's transform takes."""
    x, kernel = normal(2, 64, 64, 64), normal(3, 3, 64, 64, seed=1)
    direct = 2 * 64 * 64 * 9 * 64 * 64
    if name == "upsample_phases":
        x = x[:, :32, :32]

    def run(x, kernel):
        with lowered(ALONE.get(name, AS_WRITTEN)):
            if name == "upsample_phases":
                return convolution.convolve_doubled(x, kernel, (64, 64))
            return convolution.convolve(x, kernel)

    count = sum(multiplications(compiled(run, x, kernel)).values())
    assert 0.2 * direct < count <= most * direct


def test_what_no_step_changes_is_computed_before_the_loop(models):
    """Keys and values of the prompt and the transformed kernels: XLA moves them out."""
    import tensorflow as tf

    block = models["unet"].down_blocks[1]
    rows = block.attentions[0].transformer_blocks[0].attn2
    kernels = [resnet.conv2.kernel for resnet in block.resnets]
    inputs = normal(2, 32, 32, 32), normal(2, 128), normal(2, 77, 64, seed=2)

    def loop(x, embedding, context, steps):
        def step(i, x):
            with lowered(TARGETS["cpu"]):
                _, skips = block(x, embedding * tf.cast(i, "float32"), context)
            return i + 1, x - 0.1 * skips[0][..., :32]

        return tf.while_loop(lambda i, x: i < steps, step, (0, x))[1]

    hlo = compiled(loop, *inputs, np.int32(3))
    entry = re.search(r"ENTRY %?([\w.\-]+)", hlo)[1]
    once = 2 * 77 * 2 * math.prod(rows.to_k.kernel.shape)
    once += 36 * 9 * math.prod(kernels[0].shape[2:])
    assert multiplications(hlo)[entry] == once
    inside = [line for name in BODY.findall(hlo) for line in body_of(hlo, name)]
    transform = re.compile(r"f32\[36,\d+\]\S* dot\(")
    assert transform.search(hlo) and not any(transform.search(line) for line in inside)


def body_of(hlo, name):
    lines = iter(hlo.splitlines())
    for line in lines:
        found = COMPUTATION.match(line)
        if found and found[1] == name:
            break
    return list(iter(lambda: next(lines, "}"), "}"))


# What an export says of them


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "npu"}, r"The target is one of cpu, gpu, tpu\. Received: npu"),
        ({"disabled_rewrites": ("winograd", "fft")}, r"Rewrites are winograd, .*Received: fft"),
    ],
)
def test_options(options, message):
    with pytest.raises(ExportError, match=message):
        check(open_checkpoint(small_folder()), ExportOptions(height=64, width=64, **options))


def test_an_export_records_what_it_was_made_for(tmp_path):
    """And pictures by the rewritten decoder are those by one that is not, up to rounding."""
    folder = shutil.copytree(shared_export(), tmp_path / "export")
    manifest = Manifest.read(folder)
    assert {part.target for part in manifest.components.values()} == {"cpu"}
    rewritten = {name: part.rewrites for name, part in manifest.components.items()}
    assert rewritten.pop("text_encoder") == ()
    assert set(rewritten.values()) == {TARGETS["cpu"].names}

    latents = normal(2, 8, 8, 4)
    before = Pipeline.load(folder).decode(latents)
    disabled = ("winograd", "upsample_phases")
    again = {"components": ("decoder",), "disabled_rewrites": disabled, "target": "cpu"}
    after = small_export(folder, batch_size=2, **again)
    parts = Manifest.read(after).components
    assert parts["decoder"].rewrites == ("small_maps", "query_blocks")
    assert parts["diffusion_model"].rewrites == TARGETS["cpu"].names
    pictures = Pipeline.load(after).decode(latents)
    assert np.abs(pictures.astype(int) - before).max() <= 1


def test_turns_do_not_hide_the_batch_size(monkeypatch):
    """PNG files need it, and whoever reads the signatures."""
    monkeypatch.setattr(attention, "MOST_SCORES", 16)
    attend = Traces().shared(
        lambda q: attention.scaled_dot_product(q, q, q, num_heads=2), open_batch=True
    )
    traced = tf.function(attend).get_concrete_function(tf.TensorSpec((2, 70, 16)))
    assert tuple(traced.output_shapes) == (2, 70, 16)
