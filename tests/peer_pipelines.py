"""A pipeline of ours beside diffusers' own of the same weights: the same call, the same noise."""

import sys
from dataclasses import dataclass

import diffusers
import keras
import numpy as np
import torch
from keras import ops
from PIL import Image

from sd_tf.components.build import component, component_names, empty_tokens_of
from sd_tf.components.describe import manifest_of, origins
from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.export.modules import Traces
from sd_tf.runtime.adapters import ADAPTED_COMPONENTS
from sd_tf.runtime.chain import Chain
from sd_tf.runtime.manifest import ComponentRecord, Manifest
from sd_tf.runtime.psnr import psnr as psnr_of
from sd_tf.runtime.runner import LocalRunner
from sd_tf.weights import open_checkpoint
from tests import peers

FLOOR = 50.0  # dB
STEPS, GUIDANCE = 6, 7.5
PROMPTS = ["a red bicycle against a wall", "two cats in a hat"]
NEGATIVE = "a blurry photo"

SCHEDULERS = {
    "ddim": (diffusers.DDIMScheduler, {"clip_sample": False}),
    "euler": (diffusers.EulerDiscreteScheduler, {}),
    "euler_ancestral": (diffusers.EulerAncestralDiscreteScheduler, {}),
    "heun": (diffusers.HeunDiscreteScheduler, {"timestep_spacing": "linspace"}),
    "unipc": (diffusers.UniPCMultistepScheduler, {"timestep_spacing": "linspace"}),
    "dpmpp_2m": (diffusers.DPMSolverMultistepScheduler, {"timestep_spacing": "linspace"}),
    "pndm": (diffusers.PNDMScheduler, {"skip_prk_steps": True}),
}
DETERMINISTIC = ["ddim", "euler", "dpmpp_2m", "pndm"]


def drawer(folder, opening=None, **options):
    """What draws the checkpoint in `folder` on this backend.

    `opening` are options of opening the checkpoint, `options` those that its programs fix.
    """
    opening = opening or {}
    if keras.backend.backend() == "jax":
        from sd_tf.jax import JaxPipeline, make_mesh

        return JaxPipeline.from_checkpoint(
            folder / "checkpoint", make_mesh(), "float32", max_steps=12, **options, **opening
        )
    checkpoint = open_checkpoint(folder / "checkpoint", **opening)
    runner = TracingRunner(checkpoint, Fixed(max_steps=12, **options))
    tokenizers = checkpoint.tokenizers()
    return Chain(runner.manifest, [runner], tokenizers, 0.0, runner.layers)


class TracingRunner(LocalRunner):
    """Runs a checkpoint's components as traced when they are called, which saves an export."""

    def __init__(self, checkpoint, fixed, precision="float32"):
        geometry, empty = geometry_of(checkpoint.config, fixed), empty_tokens_of(checkpoint)
        self.parts = {
            name: component(name, checkpoint.config, geometry, precision, empty, checkpoint.build)
            for name in component_names(checkpoint.config)
        }
        traces, shapes = Traces(), geometry.shapes
        self.endpoints = {
            name: {
                shapes.signature(endpoint, shape): declared
                for shape in shapes.all
                for endpoint, declared in part.endpoints(shape, shared=traces.shared).items()
            }
            for name, part in self.parts.items()
        }
        origin = origins(checkpoint, self.parts, hashed=False)
        records = {
            name: ComponentRecord(tuple(endpoints), "cpu", (), {}, origin[name])
            for name, endpoints in self.endpoints.items()
        }
        manifest = manifest_of(
            checkpoint,
            geometry,
            fixed,
            records,
            compiler="tensorflow",
            jit_compiled_text_encoder=False,
        )
        super().__init__(manifest, jit_compile=False)
        for part in self.parts.values():
            for variable in part.places.variables.values():
                variable._initialize(ops.zeros(variable.shape, variable.dtype))

    @property
    def layers(self):
        if not self.manifest.adapters.slots:
            return {}
        return {name: self.parts[name].adaptable for name in ADAPTED_COMPONENTS}

    def call(self, component, endpoint, shape, **inputs):
        name = self.manifest.shapes.signature(endpoint, shape)
        function = self.endpoints[component][name].function
        return function(**{name: ops.convert_to_tensor(x) for name, x in inputs.items()})

    def put(self, component, rows, first):
        variables = self.parts[component].places.variables
        for name, values in rows.items():
            found = np.array(variables[name])
            found[first : first + len(values)] = values
            variables[name].assign(found)


def psnr(one, other):
    """Compare pictures of 255 levels, in dB."""
    assert one.shape == other.shape
    return psnr_of(one, other, peak=255)


def check_pictures(ours, theirs, floor=FLOOR):
    assert ours.dtype == np.uint8
    assert all(picture.std() > 5 for picture in theirs), "flat pictures prove nothing"
    worst = min(psnr(*pair) for pair in zip(ours, theirs, strict=True))
    print(f"PSNR {worst:.1f} dB")
    assert worst >= floor


def channels_first(x):
    return torch.from_numpy(np.moveaxis(x, -1, 1).copy())


def first_latent(manifest: Manifest) -> tuple[int, int, int]:
    """The shape of a latent in the export's first size."""
    return manifest.shapes.latent(manifest.shapes.first.size)


@dataclass
class Pair:
    theirs: diffusers.DiffusionPipeline
    ours: Chain

    @property
    def size(self):
        shape = self.ours.manifest.shapes.first
        return {"height": shape.height, "width": shape.width}

    def noise(self, count):
        """The same for every picture: what differs is what the prompts make of it."""
        noise = np.random.default_rng(0).standard_normal(first_latent(self.ours.manifest))
        return np.stack([noise.astype("float32")] * count)

    def peer(self, sampler, pipeline=None, **arguments):
        """Pictures of diffusers' pipeline, or of one made of its parts."""
        pipeline = pipeline or self.theirs
        make, changes = SCHEDULERS[sampler]
        changes = {"timestep_spacing": "leading", "set_alpha_to_one": False, **changes}
        # Constructors warn of what is not theirs; from_config, made for exchanging, does not.
        pipeline.scheduler = make.from_config({**peers_schedule(self.theirs), **changes})
        pipeline.set_progress_bar_config(disable=True)
        arguments = {"guidance_scale": GUIDANCE, "num_inference_steps": STEPS, **arguments}
        images = pipeline(output_type="np", **arguments).images
        return (255 * images).round().astype("uint8")

    def picture(self):
        """A picture to start from: a gradient, a disc and grain."""
        height, width = self.size.values()
        y, x = np.mgrid[:height, :width]
        disc = np.hypot(y - height / 2, x - width / 3) < height / 4
        planes = [2 * y, 255 * disc, 2 * x] + np.random.default_rng(1).integers(0, 40, (3, 1, 1))
        return Image.fromarray(np.stack(planes, -1).clip(0, 255).astype("uint8"))


def peers_schedule(pipeline):
    kept = ("prediction_type", "steps_offset", *peers.SCHEDULE)
    return {key: pipeline.scheduler.config[key] for key in kept if key in pipeline.scheduler.config}


def check_text_to_image(pair, sampler, theirs=None, ours=None, **common):
    """Arguments for both, and those that only one of them knows, or knows by that name."""
    noise = pair.noise(len(PROMPTS))
    theirs = {"latents": channels_first(noise), **pair.size, **(theirs or {})}
    ours = {"noise": noise, "num_steps": STEPS, "scheduler": sampler, **(ours or {})}
    reference = pair.peer(sampler, prompt=PROMPTS, **theirs, **common)
    assert psnr(*reference) < 40, "the prompt hardly matters"
    pictures = pair.ours(PROMPTS, **ours, **common).images
    check_pictures(pictures, reference)
    return pictures


def pin_noise(monkeypatch, pipeline, noise):
    """Have diffusers take the posterior's mode in place of a sample, and this noise."""
    module = sys.modules[type(pipeline).__module__]
    monkeypatch.setattr(module, "retrieve_latents", lambda output, **_: output.latent_dist.mode())
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: channels_first(noise))
