"""Small exports for tests, made through the same call as the command's."""

import atexit
import fcntl
import functools
import io
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from sd_tf.checkpoints import make_random
from sd_tf.config import FAMILIES, ControlNetConfig, PipelineConfig, SmallDecoderConfig
from sd_tf.config.rewrites import REWRITES
from sd_tf.export import ExportOptions, export
from sd_tf.models.controlnet import ControlNet
from sd_tf.models.small_decoder import SmallDecoder
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.weights import layout, open_checkpoint, save_controlnet, save_small_decoder
from tests import micro

MICRO = {"batch_size": 2, "height": 16, "width": 16, "max_steps": 2}
# Without rewrites, compiled and plain signatures share their traces: a fifth of the time.
AS_WRITTEN = {**MICRO, "disabled_rewrites": REWRITES}
SMALL = {"height": 64, "width": 64, "max_steps": 8, "verify": "off"}

_SD1 = FAMILIES["sd1"]
CONFIG = PipelineConfig(
    {
        "text_encoder": replace(
            _SD1.text_encoders["text_encoder"],
            hidden_size=64,
            intermediate_size=256,
            num_layers=4,
            num_heads=4,
        )
    },
    denoiser=replace(
        _SD1.denoiser,
        channels=(32, 64),
        num_heads=(2, 4),
        down_depths=((0,), (1,)),
        mid_depth=1,
        up_depths=((1, 1), (0, 0)),
        context_dim=64,
        sample_size=16,
    ),
    autoencoder=replace(
        _SD1.autoencoder, channels=(32, 32, 64, 64), layers_per_block=1, sample_size=128
    ),
    schedule=_SD1.schedule,
).check()


def check_equal(ours, theirs):
    """One computation in two runtimes, which add in another order what XLA does not compile."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    if ours.dtype == object:  # PNG files
        ours, theirs = (
            np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files.ravel()])
            for files in (ours, theirs)
        )
    if ours.dtype == np.uint8:
        assert np.abs(ours.astype(int) - theirs).max() <= 1
    elif np.issubdtype(ours.dtype, np.floating):
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    else:
        np.testing.assert_array_equal(ours, theirs)


@functools.cache
def made_here() -> Path:
    """The folder of what is made once, which all groups of `make test` share."""
    if shared := os.environ.get("SHARED_EXPORTS"):
        return Path(shared)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


def once(make):
    """`make(folder)` on first use; later calls get the same folder, which nobody may change."""

    @functools.cache
    def made() -> Path:
        folder = made_here() / make.__name__
        with open(folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another group may be making it
            if not folder.exists():
                make(folder)
        return folder

    return made


@functools.lru_cache(maxsize=8)
def pipeline_of(folder: Path, jit_compile: bool = False) -> Pipeline:
    """An export that nobody changes, loaded and compiled once for all tests of a process."""
    return Pipeline.load(folder, jit_compile=jit_compile)


@once
def small_folder(folder):
    """A random checkpoint in diffusers' layout."""
    make_random(CONFIG, folder)


def small_export(folder: Path, **options) -> Path:
    export(open_checkpoint(small_folder()), folder, ExportOptions(**{**SMALL, **options}))
    return folder


@once
def shared_export(folder):
    """Batch 2, 64 px, up to 8 steps, not verified."""
    small_export(folder, batch_size=2)


@once
def micro_folder(folder):
    """The smallest checkpoint that there is."""
    make_random(micro.CONFIG, folder)


@once
def micro_xl_folder(folder):
    """The smallest checkpoint of SDXL."""
    make_random(micro.XL_CONFIG, folder)


@once
def micro_export(folder):
    """Batch 2, 16 px, up to 2 steps, not verified."""
    options = ExportOptions(**MICRO, verify="off")
    export(open_checkpoint(micro_folder()), folder, options)


def replace_in_micro(folder: Path, checkpoint, components: tuple[str, ...], **options) -> None:
    """Copy `micro_export`, and replace some of its components."""
    shutil.copytree(micro_export(), folder)
    options = ExportOptions(**{**AS_WRITTEN, **options}, components=components)
    export(checkpoint, folder, options)


@once
def adapted_export(folder):
    """Like `micro_export`, with places for four adapters in all layers; with text_to_image, and
    verified.
    """
    options = ExportOptions(
        **MICRO,
        adapter_slots=4,
        adapter_rank=4,
        adapter_layers="all",
        text_to_image=True,
        verify="fast",
    )
    export(open_checkpoint(micro_folder()), folder, options)


@once
def micro_net(folder):
    """A ControlNet for the smallest checkpoint, all of its layers random."""
    trunk = replace(micro.CONFIG.denoiser, up_depths=())
    config = ControlNetConfig(trunk, hint_channels=(4, 8))
    net, random = ControlNet(config), np.random.default_rng(0)
    for slot in layout.slots(net).values():
        scale = 0.5 if len(slot.shape) == 1 else 2 * np.prod(slot.shape[1:]) ** -0.5
        value = random.standard_normal(slot.shape).astype("float32") * np.float32(scale)
        slot.fill(lambda value=value: value)
    save_controlnet(folder, config, net)


@once
def steered_export(folder):
    """Like `micro_export`, with two ControlNets, and verified."""
    checkpoint = open_checkpoint(micro_folder(), controlnet=[micro_net(), micro_net()])
    replace_in_micro(folder, checkpoint, ("diffusion_model",), verify="fast")


@once
def micro_decoder(folder):
    """A small decoder for the smallest checkpoint, all of its layers random."""
    config = SmallDecoderConfig(channels=8, blocks=(1, 1))
    decoder, random = SmallDecoder(config), np.random.default_rng(0)
    for slot in layout.slots(decoder).values():
        scale = 0.1 if len(slot.shape) == 1 else np.prod(slot.shape[1:]) ** -0.5
        value = random.standard_normal(slot.shape).astype("float32") * np.float32(scale)
        slot.fill(lambda value=value: value)
    save_small_decoder(folder, config, decoder)


@once
def previewing_export(folder):
    """Like `micro_export`, with a small decoder for previews, and verified."""
    options = ExportOptions(**AS_WRITTEN, verify="fast")
    export(open_checkpoint(micro_folder(), preview_decoder=micro_decoder()), folder, options)


@once
def shaped_export(folder):
    """16x16 and 16x24 px in batches of 2 and 1, up to 2 steps; with text_to_image.

    As it is written, so that one trace serves the batches of a size.
    """
    options = ExportOptions(
        disabled_rewrites=REWRITES,
        sizes=((16, 16), (16, 24)),
        batch_sizes=(2, 1),
        max_steps=2,
        text_to_image=True,
        verify="fast",
    )
    export(open_checkpoint(micro_folder()), folder, options)


def micro_of_kind(folder: Path, latent_inputs: str, in_channels: int) -> None:
    """Export the smallest checkpoint with a UNet that takes a picture beside the noise."""
    denoiser = replace(micro.CONFIG.denoiser, in_channels=in_channels)
    config = replace(micro.CONFIG, denoiser=denoiser, latent_inputs=latent_inputs).check()
    make_random(config, folder.parent / "checkpoint")
    options = ExportOptions(**AS_WRITTEN, verify="off")
    export(open_checkpoint(folder.parent / "checkpoint"), folder, options)


@once
def painting_export(folder):
    """Like `micro_export`, but it paints inside a mask."""
    micro_of_kind(folder, "mask_and_image", 9)


@once
def editing_export(folder):
    """Like `micro_export`, but it edits a picture by instruction."""
    micro_of_kind(folder, "image", 8)
