"""What steers a picture, all in one export: each part alone is as in an export of its own."""

import numpy as np
import pytest
from PIL import Image

from sd_tf.components.geometry import Fixed
from sd_tf.config.rewrites import REWRITES
from sd_tf.export import ExportOptions, export
from sd_tf.export.adapters import write_adapters
from sd_tf.runtime.chain import Chain
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.psnr import psnr
from sd_tf.weights import open_checkpoint
from tests.exports import (
    AS_WRITTEN,
    micro_export,
    micro_folder,
    micro_net,
    pipeline_of,
    shaped_export,
    steered_export,
)
from tests.micro_adapters import adapter_files, written_export
from tests.peer_image_prompts import micro_image_adapters, shown_export
from tests.peer_pipelines import TracingRunner

pytestmark = pytest.mark.long

PROMPT = "a red bicycle"
CALL = {"num_steps": 2, "seed": 3}
LINES, MOON, SEA = (
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3)).astype("uint8"))
    for seed in range(3)
)
# name → the call's values, those for the export of its own where they differ, and that export.
ALONE = {
    "nothing": ({}, {}, micro_export),
    "net": ({"control_image": LINES}, {"control_image": [LINES, None]}, steered_export),
    "picture": ({"image_prompt": [MOON, SEA]}, {}, shown_export),
    "LoRA": ({"adapters": {"style": 0.8}}, {}, written_export),
}
ALL = {"control_image": LINES, "image_prompt": MOON, "adapters": {"style": 0.8}}


def steered(kind):
    """Open the smallest checkpoint with a net and an IP-Adapter."""
    adapter = micro_image_adapters() / f"{kind}.safetensors"
    return open_checkpoint(micro_folder(), controlnet=[micro_net()], ip_adapter=[adapter])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("together") / "export"
    options = ExportOptions(
        disabled_rewrites=REWRITES,
        sizes=((16, 16), (16, 24)),
        batch_sizes=(1,),
        max_steps=2,
        adapter_slots=1,
        adapter_rank=4,
        adapter_layers="all",
        image_prompts=2,
        verify="fast",
    )
    export(steered("plus"), folder, options)
    write_adapters(folder, {"style": adapter_files()["style"]})
    return folder


@pytest.mark.parametrize("name", ALONE)
def test_each_alone(folder, name):
    given, own, other = ALONE[name]
    ours = pipeline_of(folder)(PROMPT, **CALL, **given).images
    theirs = pipeline_of(other())(PROMPT, **CALL, **{**given, **own}).images
    assert psnr(ours, theirs, peak=255) >= 60
    if given:
        plain = pipeline_of(micro_export())(PROMPT, **CALL).images
        assert psnr(theirs, plain, peak=255) < 45, "it hardly matters"


def test_in_another_size(folder):
    wide = {**CALL, "width": 24}
    plain, theirs = (pipeline_of(one)(PROMPT, **wide).images for one in (folder, shaped_export()))
    assert psnr(plain, theirs, peak=255) >= 60
    for given, _, _ in list(ALONE.values())[1:]:
        assert psnr(pipeline_of(folder)(PROMPT, **wide, **given).images, plain, peak=255) < 50


@pytest.mark.parametrize("width", [16, 24])
def test_all_of_them_compiled(folder, width):
    """Each adds to what the others do."""
    pipe = pipeline_of(folder)
    ours = pipe(PROMPT, **CALL, **ALL, width=width).images
    compiled = pipeline_of(folder, jit_compile=True)(PROMPT, **CALL, **ALL, width=width).images
    assert psnr(ours, compiled, peak=255) >= 50
    for name in ALL:
        others = {key: value for key, value in ALL.items() if key != name}
        assert psnr(pipe(PROMPT, **CALL, **others, width=width).images, ours, peak=255) < 50, name


@pytest.mark.parametrize(("precision", "floor"), [("bfloat16", 25), ("float16", 40)])
def test_in_half_precision(tmp_path, precision, floor):
    """A base adapter, whose projection takes what says that there is no picture, and a net."""
    checkpoint = steered("base")
    options = ExportOptions(**AS_WRITTEN, precision=precision, image_prompts=2, verify="fast")
    export(checkpoint, tmp_path / "export", options)
    fixed = Fixed(height=16, width=16, batch_size=2, max_steps=2, image_prompts=2)
    runner = TracingRunner(checkpoint, fixed)
    tokenizers = checkpoint.tokenizers()
    exact = Chain(runner.manifest, [runner], tokenizers, 0.0)
    half = Pipeline.load(tmp_path / "export", jit_compile=False)
    net, shown = {"control_image": LINES}, {"image_prompt": MOON, "image_prompt_scale": 4}
    ours, theirs = (one(PROMPT, **CALL, **net, **shown).images for one in (half, exact))
    agreement = psnr(ours, theirs, peak=255)
    assert agreement >= floor
    for alone in (net, shown):
        other = exact(PROMPT, **CALL, **alone).images
        assert psnr(other, theirs, peak=255) < agreement - 5, f"enough with {', '.join(alone)}"
