"""The kernel of attention for TPUs: interpreted here, and compiled by the TPU's compiler."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import torch

from sd_tf.checkpoints import make_random
from sd_tf.config.rewrites import Rewrites
from sd_tf.jax import JaxPipeline, attention, chips, components, make_mesh
from sd_tf.jax.attention import AttentionKernel
from sd_tf.jax.compile import figures_of
from sd_tf.models.attention import scaled_dot_product
from sd_tf.models.lowering import lowered
from sd_tf.runtime.manifest import ExportError
from tests import micro
from tests.fresh import run_python
from tests.jax_attention import MODEL_AXES
from tests.peer_pipelines import psnr

pytestmark = [pytest.mark.backend, pytest.mark.jax]

WITH_KERNEL = Rewrites(attention_kernel=True)
SCALE = 0.3


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def inputs(queries, keys, channels, batch=2):
    return [normal(batch, n, channels, seed=i) for i, n in enumerate((queries, keys, keys))]


def torchs(q, k, v, heads):
    """The same attention by PyTorch."""
    split = [torch.tensor(x).unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v)]
    h = torch.nn.functional.scaled_dot_product_attention(*split, scale=SCALE)
    return h.transpose(1, 2).flatten(-2).numpy()


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks that the tests' few queries and keys do not fit into."""
    sizes = {"QUERIES": 64, "CHUNK": 128, "MOST_KEYS": 300}
    for name, size in sizes.items():
        monkeypatch.setattr(attention, name, size)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize(
    ("queries", "keys", "heads"),
    [
        (256, 256, 4),
        (200, 77, 8),  # the last block of queries is not full
        (16, 16, 2),
        (130, 600, 4),  # keys in two blocks
        (64, 333, 2),  # of which the second is not full
    ],
)
def test_against_pytorch(small_blocks, queries, keys, heads, dtype, bound):
    """On the same numbers, which PyTorch computes with in float32."""
    given = [jax.numpy.asarray(x, dtype) for x in inputs(queries, keys, 256)]
    theirs = torchs(*(np.asarray(x, "float32") for x in given), heads)
    with lowered(WITH_KERNEL, AttentionKernel(make_mesh(), interpret=True)):
        ours = scaled_dot_product(*given, heads, scale=SCALE)
    assert ours.dtype == dtype
    assert np.abs(np.asarray(ours, "float32") - theirs).max() <= bound * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("keys", "several"),
    [(20, {9: 256}), (600, {0: 3, 290: 100, 599: 256})],  # the latter in two blocks
)
def test_keys_that_stand_for_several(small_blocks, keys, several):
    q, k, v = inputs(130, keys, 256)
    counts = [several.get(key, 1) for key in range(keys)]
    theirs = torchs(q, *(np.repeat(x, counts, axis=1) for x in (k, v)), 4)
    with lowered(WITH_KERNEL, AttentionKernel(make_mesh(), interpret=True)):
        ours = np.asarray(scaled_dot_product(q, k, v, 4, scale=SCALE, counts=counts))
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_heads_that_fill_no_block():
    """Widths that do not divide 128, and channels that it does not divide."""
    kernel = AttentionKernel(make_mesh(), interpret=True)
    for channels, heads in ((320, 8), (320, 5), (512, 1)):
        q, k, v = inputs(16, 16, channels)
        assert kernel(q, k, v, heads, SCALE) is None
        with lowered(WITH_KERNEL, kernel):
            ours = np.asarray(scaled_dot_product(q, k, v, heads, scale=SCALE))
        theirs = torchs(q, k, v, heads)
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_on_meshes(tmp_path):
    """Pictures and heads divided among devices; four have too few heads each for a block."""
    path = tmp_path / "attention.npz"
    q, k, v = inputs(40, 40, 256, batch=4)
    np.savez(path, q=q, k=k, v=v, heads=4)
    run_python("-m", "tests.jax_attention", path)
    theirs = torchs(q, k, v, 4)
    with np.load(path) as found:
        assert list(found) == [str(model) for model in MODEL_AXES if model < 4]
        for ours in found.values():
            assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def test_what_the_tpus_compiler_says():
    """One attention of SDXL on a slice: the same arithmetic, a sixth of the traffic."""
    mesh = make_mesh(chips.slice_devices("v5e:2x2"))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    given = jax.ShapeDtypeStruct((8, 1024, 1280), "bfloat16", sharding=spec)
    found = []
    for kernel in (AttentionKernel(mesh), None):

        def attend(q, k, v, kernel=kernel):
            with lowered(WITH_KERNEL, kernel):
                return scaled_dot_product(q, k, v, 20)

        code = chips.compile_lowered(jax.jit(attend).lower(given, given, given))
        assert ("pallas_call" in code.as_text()) == (kernel is not None)
        found.append(figures_of(code))
    ours, xlas = found
    assert ours["flops"] == pytest.approx(xlas["flops"], rel=0.05)
    assert ours["accessed_bytes"] < xlas["accessed_bytes"] / 6


def test_whole_pictures(tmp_path, monkeypatch):
    """A pipeline whose devices take the kernel, against one that does without."""
    few = {"down_depths": ((0,), (0,)), "up_depths": ((0, 0), (0, 0))}  # the middle's block alone
    denoiser = replace(micro.WIDE_CONFIG.denoiser, **few)
    make_random(replace(micro.WIDE_CONFIG, denoiser=denoiser).check(), tmp_path)
    heads = []

    class Kernel(AttentionKernel):
        def __call__(self, q, k, v, num_heads, *others):
            heads.append(num_heads)
            return super().__call__(q, k, v, num_heads, *others)

    monkeypatch.setattr(components, "AttentionKernel", lambda mesh: Kernel(mesh, interpret=True))
    monkeypatch.setitem(components.ON_JAX, "cpu", WITH_KERNEL)

    def draw(*disabled):
        pipe = JaxPipeline.from_checkpoint(
            tmp_path, precision="float32", max_steps=4, disabled_rewrites=disabled
        )
        images = pipe("a red star", seed=1, num_steps=2).images
        assert pipe.manifest.components["diffusion_model"].rewrites == (
            () if disabled else ("attention_kernel",)
        )
        return images

    ours = draw()
    assert denoiser.num_heads[-1] in heads
    heads.clear()
    assert psnr(ours, draw("attention_kernel")) >= 50
    assert not heads
    with pytest.raises(ExportError, match=r"Rewrites are winograd, .*Received: flash"):
        draw("flash")
