"""bfloat16 on a CPU: products stay in the graph, each with its bias, and XLA compiles none."""

import os
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from sd_tf.config.rewrites import IN_GRAPH, REWRITES, TARGETS, in_saved_models
from sd_tf.export import ExportOptions, export
from sd_tf.runtime import graph_kernels
from sd_tf.runtime.graph_kernels import KEEPS_WEIGHTS, keep_weights
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.psnr import psnr
from sd_tf.serving.tf_serving import predict
from sd_tf.weights import open_checkpoint
from tests.exports import adapted_export, micro_export, micro_folder, once, pipeline_of
from tests.fresh import run_python

SIZE = {"batch_size": 2, "height": 16, "width": 16, "max_steps": 2, "target": "cpu"}
CALL = {"num_steps": 2, "seed": 3}


@once
def bfloat16_export(folder):
    options = ExportOptions(**SIZE, precision="bfloat16", verify="full")
    export(open_checkpoint(micro_folder()), folder, options)


def functions(component, signature):
    """The graphs that a signature of an export calls, by name."""
    content = saved_model_pb2.SavedModel()
    content.ParseFromString((bfloat16_export() / component / "1/saved_model.pb").read_bytes())
    graph = content.meta_graphs[0].graph_def
    known = {one.signature.name: one for one in graph.library.function}
    output = next(iter(content.meta_graphs[0].signature_def[signature].outputs.values()))
    waiting = [node for node in graph.node if node.name == output.name.partition(":")[0]]
    found = {}
    while waiting:
        for attribute in waiting.pop().attr.values():
            for name in [attribute.func.name, *(one.name for one in attribute.list.func)]:
                if name in known and name not in found:
                    found[name] = known[name]
                    waiting += known[name].node_def
    return found


def products(graphs):
    """Biases, and those of them that are added to a product with nothing in between."""
    biases = fused = 0
    for graph in graphs.values():
        kinds = {node.name: node.op for node in graph.node_def}
        for node in graph.node_def:
            if node.op == "BiasAdd":
                biases += 1
                fused += kinds.get(node.input[0].partition(":")[0]) in ("MatMul", "Conv2D")
    return biases, fused


PRODUCTS = {"Conv2D", "MatMul", "BatchMatMulV2", "Softmax"}


def computed_in(graph):
    """The expensive operations of a graph, each with what it computes in."""
    for node in graph.node_def:
        if node.op in PRODUCTS:
            yield node.op, tf.dtypes.as_dtype(node.attr["T"].type)


def compiles(graphs):
    return any(graph.attr["_XlaMustCompile"].b for graph in graphs.values())


def test_the_manifest():
    manifest = Manifest.read(bfloat16_export())
    parts = manifest.components
    assert parts["diffusion_model"].rewrites == IN_GRAPH.names
    assert parts["decoder"].rewrites == IN_GRAPH.names
    assert parts["text_encoder"].rewrites == ()
    figures = manifest.verification["diffusion_model"]
    assert min(figures[kind]["psnr_db"] for kind in ("saved_model", "saved_model_xla")) >= 25


@pytest.mark.parametrize("component", ["diffusion_model", "decoder"])
def test_each_product_has_its_bias(component):
    graphs = functions(component, "serving_default")
    biases, fused = products(graphs)
    assert biases == fused > 20
    kinds = {kind for graph in graphs.values() for kind in computed_in(graph)}
    assert {operation for operation, _ in kinds} == PRODUCTS
    assert {dtype for _, dtype in kinds} == {tf.bfloat16}
    assert not compiles(graphs)
    plain_biases, plain_fused = products(functions(component, "plain_serving_default"))
    assert plain_biases > plain_fused, "the rewrite would be of no use"


def test_the_other_form_can_be_chosen(tmp_path):
    """By its name, as every rewrite; the rest of the target's are XLA's then."""
    assert "graph_kernels" in REWRITES
    found = in_saved_models("cpu", "bfloat16", ["graph_kernels"])
    assert found == TARGETS["cpu"]
    for target, precision in (("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")):
        assert in_saved_models(target, precision) == TARGETS[target]


def test_pictures():
    """Those of float32, to what bfloat16 gives, and of the plain signatures."""
    compiled = pipeline_of(bfloat16_export(), jit_compile=True)("a star", **CALL).images
    plain = pipeline_of(bfloat16_export())("a star", **CALL).images
    exact = pipeline_of(micro_export())("a star", **CALL).images
    assert psnr(plain, compiled, peak=255) >= 35
    assert psnr(exact, compiled, peak=255) >= 30


def test_a_client_may_compile_the_whole():
    """As the original contract's do: one XLA program, although none is inside."""
    model = tf.saved_model.load(str(bfloat16_export() / "diffusion_model" / "1"))
    default = model.signatures["serving_default"]
    _, specs = default.structured_input_signature
    rng = np.random.default_rng(0)
    inputs = {
        name: tf.cast(rng.standard_normal(spec.shape), spec.dtype)
        for name, spec in specs.items()
        if spec.dtype.is_floating
    }
    inputs |= {name: tf.ones(s.shape, s.dtype) for name, s in specs.items() if name not in inputs}
    whole = tf.function(lambda **given: default(**given), jit_compile=True)
    expected, found = (next(iter(run(**inputs).values())).numpy() for run in (default, whole))
    assert psnr(expected, found, peak=np.ptp(expected)) >= 30
    hlo = whole.experimental_get_compiler_ir(**inputs)(stage="hlo")
    assert "while(" in hlo and "custom-call" not in hlo


# Weights that change


@pytest.fixture
def keeping(monkeypatch):
    monkeypatch.setenv(KEEPS_WEIGHTS, "")
    monkeypatch.delenv(KEEPS_WEIGHTS)
    return lambda: os.environ.get(KEEPS_WEIGHTS)


def test_weights_are_kept_where_none_change(keeping):
    keep_weights(Manifest.read(micro_export()))
    keep_weights(Manifest.read(adapted_export()))
    fixed = Manifest.read(bfloat16_export())
    keep_weights(replace(fixed, storage={"unet": "int8"}))
    assert keeping() is None
    keep_weights(fixed)
    assert keeping() == "1"


DRAW = """
import sys
import numpy as np
from sd_tf.runtime.pipeline import Pipeline

pipe = Pipeline.load(sys.argv[1], fixed_weights=True)
pictures = [pipe(prompt, num_steps=2, seed=3).images for prompt in ("a star", "a ring", "a star")]
np.save(sys.argv[2], pictures)
"""


def test_kept_weights_draw_the_same(tmp_path):
    """Calls with other prompts, too: what is kept depends on nothing that a call gives."""
    run_python("-c", DRAW, str(bfloat16_export()), str(tmp_path / "kept.npy"))
    pipe = pipeline_of(bfloat16_export(), jit_compile=True)
    first, other = (pipe(prompt, **CALL).images for prompt in ("a star", "a ring"))
    kept = np.load(tmp_path / "kept.npy")
    np.testing.assert_array_equal(kept[0], kept[2])
    assert psnr(first, kept[0], peak=255) >= 45 and psnr(other, kept[1], peak=255) >= 45
    assert psnr(first, other, peak=255) < 30


@pytest.mark.parametrize("load", [Pipeline.load, lambda folder: predict.load(folder, ["decoder"])])
def test_places_for_adapters_are_refused_then(monkeypatch, load):
    monkeypatch.setenv(KEEPS_WEIGHTS, "1")
    with pytest.raises(ExportError, match="places for adapters, which change its weights, and TF_"):
        load(adapted_export())
    monkeypatch.setenv(KEEPS_WEIGHTS, "0")
    load(adapted_export())


@pytest.mark.parametrize(
    ("flags", "told"), [("avx2 avx512f", True), ("avx512_bf16", False), ("asimd i8mm bf16", False)]
)
def test_a_processor_without_bfloat16_is_told(monkeypatch, tmp_path, caplog, flags, told):
    (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags} sse\n")
    monkeypatch.setattr(graph_kernels, "PROCESSOR", tmp_path / "cpuinfo")
    Pipeline.load(micro_export())
    assert "bfloat16" not in caplog.text
    Pipeline.load(bfloat16_export())
    assert ("export with --precision float32" in caplog.text) is told
    caplog.clear()
    Pipeline.load(bfloat16_export(), jit_compile=False)
    assert "bfloat16" not in caplog.text
    # An export for such a CPU is told at once, here before it is refused.
    for options, is_meant in ((SIZE, True), ({**SIZE, "target": "gpu"}, False)):
        with pytest.raises(ExportError, match=r"exists\. Choose another"):
            export(
                open_checkpoint(micro_folder()),
                micro_export(),
                ExportOptions(**options, precision="bfloat16", verify="off"),
            )
        assert ("export with --precision float32" in caplog.text) is (told and is_meant)
        caplog.clear()
