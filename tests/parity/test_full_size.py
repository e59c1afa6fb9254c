"""Real sizes: names and shapes of every release without memory, and SD1.5 with its weights."""

import gc
import json
import os
import subprocess
import sys
import tempfile

import diffusers
import keras
import numpy as np
import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sd_tf.config import FAMILIES
from sd_tf.weights import layout, open_checkpoint
from tests import peers

pytestmark = pytest.mark.full_size

VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
# The published configurations, as far as they set tensors' names and shapes.
SD1_UNET = {"sample_size": 64, "cross_attention_dim": 768}
SD2_UNET = {
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
}
SDXL_UNET = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
CLIP_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
OPENCLIP_H = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
}
OPENCLIP_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
}


def unet(**config):
    return lambda: diffusers.UNet2DConditionModel(**config)


def text(kind=CLIPTextModel, **config):
    return lambda: kind(CLIPTextConfig(**config))


def vae():
    return diffusers.AutoencoderKL(**VAE)


PEERS = {
    "sd1": {"text_encoder": text(**CLIP_L), "unet": unet(**SD1_UNET), "vae": vae},
    "sd2-base": {"text_encoder": text(**OPENCLIP_H), "unet": unet(**SD2_UNET), "vae": vae},
    "sdxl-base": {
        "text_encoder": text(**CLIP_L),
        "text_encoder_2": text(CLIPTextModelWithProjection, **OPENCLIP_G),
        "unet": unet(**SDXL_UNET),
        "vae": vae,
    },
}


@pytest.mark.parametrize(
    ("family", "component"),
    [(family, component) for family, parts in PEERS.items() for component in parts],
)
def test_names_and_shapes(family, component):
    with torch.device("meta"):
        module = PEERS[family][component]()
    expected = {name: tuple(value.shape) for name, value in module.named_parameters()}
    if component == "text_encoder" and "embeddings.token_embedding.weight" in expected:
        expected = {f"text_model.{name}": shape for name, shape in expected.items()}
    model = layout.abstract_model(FAMILIES[family].components[component])
    assert {name: slot.shape for name, slot in layout.slots(model).items()} == expected


@pytest.fixture(scope="module")
def sd15(tmp_path_factory):
    """SD1.5 with random weights, saved by diffusers, and what its UNet gives for one input."""
    folder = tmp_path_factory.mktemp("sd15")
    torch.manual_seed(0)
    parts = {name: build() for name, build in PEERS["sd1"].items()}
    inputs = {
        "latents": torch.randn(1, 4, 32, 32),
        "timesteps": torch.tensor([501]),
        "context": torch.randn(1, 77, 768),
    }
    with torch.no_grad():
        output = parts["unet"](*inputs.values()).sample
    diffusers.StableDiffusionPipeline(
        **parts,
        tokenizer=peers.tokenizer(49407),
        scheduler=diffusers.PNDMScheduler(**peers.SCHEDULE, skip_prk_steps=True),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    del parts
    gc.collect()
    return folder, {name: value.numpy() for name, value in inputs.items()}, output.numpy()


def test_sd15_unet(sd15):
    folder, inputs, theirs = sd15
    model = open_checkpoint(folder).build("unet")
    latents = np.moveaxis(inputs["latents"], 1, -1)
    ours = np.asarray(model(latents, inputs["timesteps"], inputs["context"]))
    ours = np.moveaxis(ours, -1, 1)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


LOAD = """
import json, sys, time

def memory(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

import keras
from sd_tf.weights import open_checkpoint

keras.ops.zeros(1) + 1
before, start = memory("VmRSS"), time.perf_counter()
checkpoint = open_checkpoint(sys.argv[1])
models = [checkpoint.build(name) for name in checkpoint.config.components]
print(json.dumps({
    "weights": sum(4 * v.size for name in checkpoint.readers
                   for v in checkpoint.tensors(name).values()),
    "runtime": before,
    "peak": memory("VmHWM"),
    "seconds": time.perf_counter() - start,
}))
"""


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_loading_sd15_holds_one_copy(sd15, backend, record_property):
    """Beyond the libraries themselves (TensorFlow alone is 0.7 GB), 1.2 times the weights."""
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(sd15[0])],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(result.stdout)
    print(
        f"\nloading SD1.5 on {backend}: {report['weights'] / 1e9:.2f} GB of weights in "
        f"{report['seconds']:.1f} s, peak {report['peak'] / 1e9:.2f} GB, of which "
        f"{report['runtime'] / 1e9:.2f} GB before loading"
    )
    assert report["weights"] == 4 * (859_520_964 + 123_060_480 + 83_653_863)
    assert report["peak"] - report["runtime"] <= 1.2 * report["weights"]


@pytest.mark.parametrize(
    ("family", "size", "precision", "most"),  # bytes, pages of mapped weights included
    [
        ("sd1", 512, "float32", {"export": 10e9, "generate": 6.5e9}),
        pytest.param(
            *("sd1", 512, "bfloat16"), {"export": 8e9, "generate": 4.5e9}, marks=pytest.mark.long
        ),
        pytest.param(
            *("sdxl-base", 1024, "bfloat16"),
            {"export": 12e9, "generate": 10e9},
            marks=pytest.mark.long,
        ),
    ],
)
def test_peaks_of_export_and_drawing(family, size, precision, most):
    with tempfile.TemporaryDirectory() as folder:  # pytest would keep the files of three runs
        checkpoint, exported = f"{folder}/checkpoint", f"{folder}/exported"
        export = [f"--checkpoint={checkpoint}", f"--precision={precision}", f"--out={exported}"]
        drawing = [f"--export_dir={exported}", "--num_steps=2", "--scheduler=ddim"]
        peak_of("checkpoints", family, checkpoint, "--dtype=float16")
        peaks = {
            "export": peak_of(
                "export", *export, f"--height={size}", f"--width={size}", "--verify=fast"
            ),
            "generate": peak_of("generate", "a lighthouse", *drawing, f"--out={folder}"),
        }
    print(f"\n{family}, {size} px, {precision}:", *(f"{x / 1e9:.2f} GB" for x in peaks.values()))
    assert {name: peak for name, peak in peaks.items() if peak > most[name]} == {}


def peak_of(*command):
    """Run a command of `sd-tf`; return the most memory that its process took."""
    process = subprocess.Popen([sys.executable, "-m", "sd_tf", *command])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return used.ru_maxrss * 1024
