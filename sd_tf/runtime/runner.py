"""The base class of runners, which take one batch from model to model."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sd_tf.config import DECODER, PREVIEW_DECODER
from sd_tf.runtime.adapter_places import ADAPTED
from sd_tf.runtime.capabilities import EDIT, WEIGHTED, use_of_picture
from sd_tf.runtime.controls import image_input
from sd_tf.runtime.image_prompts import GIVEN, SCALES, blank_inputs, shown_of, tokens_of
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.pictures import to_model, to_vision
from sd_tf.runtime.request import Request
from sd_tf.runtime.reuse import reuse_input
from sd_tf.runtime.shapes import Shape

PLAIN = "plain_"  # prefix of the uncompiled twin of a compiled signature
# Component → the endpoints that a runner calls. JAX compiles these and no others, and Ray compiles
# the loop's at the start; the remaining ones are for a server's clients. Exports without places
# for adapters have no `ADAPTED`.
CALLED = {
    "text_encoder": ("serving_default", ADAPTED, "encode", WEIGHTED),
    "diffusion_model": ("noise", "begin", "begin_image", "segment"),
    "decoder": ("serving_default",),
    PREVIEW_DECODER: ("serving_default",),
    "image_encoder": ("serving_default",),
    "vision_encoder": ("serving_default",),
}
NOTHING = 0  # in place of a picture's key: no picture
PAINTED = 128  # of 255: from here on a mask says "paint"

# Called on the way with (model calls done, calls in all, latents (B, h, w, C)); returning False
# ends the batch as it is then.
Callback = Callable[[int, int, np.ndarray], bool | None]


@dataclass(frozen=True)
class Watch:
    """A callback, and after how many model calls it is called."""

    callback: Callback | None
    every: int


# Scales of further guidance, and the value that asks for none.
NO_FURTHER_GUIDANCE = {"true_guidance_scale": 1.0, "skip_layer_guidance_scale": 0.0}


class Runner(ABC):
    """Runs an export's models on one batch at a time. A subclass says where."""

    def __init__(self, manifest: Manifest, jit_compile: bool):
        self.manifest = manifest
        self.jit_compile = jit_compile

    @abstractmethod
    def call(self, component: str, endpoint: str, shape: Shape, **inputs) -> Mapping[str, Any]:
        """Run one endpoint for a shape; return outputs that `to_host` and another `call` take."""

    def to_host(self, value) -> np.ndarray:
        return np.asarray(value)

    def leave(self, component: str) -> None:  # noqa: B027
        """A batch has passed a component: what the next one can do without may go."""

    def signature(self, component: str, endpoint: str, shape: Shape) -> str:
        """Return the endpoint's signature: the compiled one, or its plain twin if it has one."""
        known = self.manifest.components[component].signatures
        compiled = self.manifest.shapes.signature(endpoint, shape)
        if compiled not in known:
            raise ExportError(
                f"The export's {component} has no signature {compiled!r}: it was made by an older "
                f"sd_tf. Export again."
            )
        name = compiled if self.jit_compile else PLAIN + compiled
        return name if name in known else compiled

    def decode(self, latents, component: str = DECODER) -> np.ndarray:
        """Decode latents (B, h, w, c), of any shape that the export serves."""
        shape = self.manifest.shapes.of_latents(latents.shape)
        outputs = self.call(component, "serving_default", shape, latent=latents)
        return self.to_host(outputs["generated_images"])

    def preview(self, latents) -> np.ndarray:
        """Decode latents as `decode` does, by the small decoder where the export has one."""
        has_own = PREVIEW_DECODER in self.manifest.components
        return self.decode(latents, PREVIEW_DECODER if has_own else DECODER)

    def encode(self, images) -> np.ndarray:
        """Encode pictures (B, H, W, 3) in [-1, 1] as scaled latents."""
        return self.manifest.latent_scale.apply(self._posterior_mode(images))

    def _posterior_mode(self, images) -> np.ndarray:
        shape = Shape(*images.shape[:3])
        latent = self.call("image_encoder", "serving_default", shape, images=images)["latent"]
        return self.to_host(latent)

    def run(self, request: Request, chunk: range, tokens: Mapping[str, np.ndarray], watch: Watch):
        """Make one batch; return its pictures (B, H, W, 3) and the seconds of each stage."""
        clock, shape = Clock(), request.shape(chunk)

        def passed(component: str) -> None:
            clock.stop(component)
            self.leave(component)

        endpoint = ADAPTED if request.adapters else "serving_default"
        endpoint = "encode" if "negative_tokens" in tokens else endpoint
        endpoint = WEIGHTED if "token_weights" in tokens else endpoint
        conditions = dict(self.call("text_encoder", endpoint, shape, **tokens, **request.adapters))
        self.to_host(conditions["context"])  # waits until it is computed
        passed("text_encoder")
        if request.time_ids is not None:
            both = {"": request.time_ids, "unconditional_": request.negative_time_ids}
            for prefix, ids in both.items():
                conditions[f"{prefix}time_ids"] = np.broadcast_to(ids, (len(chunk), len(ids)))
        image_latent = self._encode_images(request, chunk, conditions)
        if request.shared.image is not None:
            passed("image_encoder")
        conditions |= self._image_prompts(request, chunk)
        if request.shared.image_prompt is not None:
            passed("vision_encoder")
        latents = self._denoise(request, chunk, conditions, image_latent, watch)
        passed("diffusion_model")
        images = self.decode(latents)
        passed("decoder")
        return images, clock.seconds

    def _encode_images(self, request: Request, chunk: range, conditions: dict[str, Any]):
        """Return the scaled latents to start from, or None; add the others to `conditions`."""
        if request.shared.image is None:
            return None

        image = to_model(np.stack(request.chunk("image", chunk)))
        if use_of_picture(self.manifest) == EDIT:  # trained on latents that are not scaled
            conditions["conditioning_latent"] = self._posterior_mode(image)
            return None

        has_mask = request.shared.mask is not None
        if has_mask:
            step = self.manifest.shapes.downscale
            paint = np.stack(request.chunk("mask", chunk))[..., None] >= PAINTED
            conditions["mask"] = paint[:, ::step, ::step].astype("float32")
            conditions["masked_image_latent"] = self.encode(np.where(paint, np.float32(0), image))
        return self.encode(image) if request.start > 0 or not has_mask else None

    def _denoise(self, request: Request, chunk: range, conditions, image_latent, watch: Watch):
        seeds = np.array(request.chunk("seed", chunk), "int32")
        steps = {
            "scheduler": np.int32(request.scheduler),
            "num_steps": np.int32(request.shared.num_steps),
        }
        state = self._begin(request, chunk, seeds, steps, image_latent)
        control = {**request.controls, **self._control_pictures(request, chunk)}
        scales = {**self._scales(request), **request.adapters, **request.image_prompts}
        reuse = reuse_input(self.manifest.reuse, request.shared.reuse)
        inputs = {**conditions, **steps, **scales, **control, **reuse}
        inputs["seed"] = seeds
        calls = request.model_calls
        every = watch.every if watch.callback is not None else calls
        for start in range(request.start, calls, every):
            stop = min(start + every, calls)
            state = self.call(
                "diffusion_model",
                "segment",
                request.shape(chunk),
                **state,
                **inputs,
                first=np.int32(request.start),
                start=np.int32(start),
                stop=np.int32(stop),
            )
            if watch.callback is not None:
                done, all_calls = stop - request.start, calls - request.start
                if watch.callback(done, all_calls, self.to_host(state["latent"])) is False:
                    break
        return self.to_host(state["latent"])

    def _control_pictures(self, request: Request, chunk: range) -> dict[str, np.ndarray]:
        """Return the pictures of each ControlNet in 0…1, black ones where a call has none."""
        count, black = len(self.manifest.controls), np.zeros((*request.size, 3), "uint8")
        of_nets = {image_input(number): [] for number in range(count)}
        for given in request.chunk("control_image", chunk):
            pictures = [None] * count if given is None else given
            for found, picture in zip(of_nets.values(), pictures, strict=True):
                found.append(black if picture is None else picture)
        return {name: np.stack(all_) / np.float32(255) for name, all_ in of_nets.items()}

    def _image_prompts(self, request: Request, chunk: range) -> dict[str, np.ndarray]:
        """Return the tokens of the pictures that are prompts; none where a call has none.

        Those of an adapter whose scale is 0 are not looked at.
        """
        prompts = self.manifest.image_prompts
        found = blank_inputs(prompts, len(chunk))
        scales = request.image_prompts.get(SCALES, ())
        if not np.any(scales):
            return found
        rows = [
            [own if scale else None for own, scale in zip(row, scales, strict=True)]
            for row in request.chunk("image_prompt", chunk)
        ]
        pictures = {id(one): one for row in rows for own in row for one in own or ()}
        encoded = self._encoded(pictures, prompts.size, request.shape(chunk))
        for number, adapter in enumerate(prompts.adapters):
            tokens, shown = found[tokens_of(number)], found[shown_of(number)]
            places = (prompts.most, adapter.tokens, prompts.width)
            if NOTHING in encoded:
                nothing = encoded[NOTHING][tokens_of(number)]
                found[f"unconditional_{tokens_of(number)}"][:] = np.tile(nothing, (prompts.most, 1))
            for row, own in zip(tokens, rows, strict=True):
                for place, picture in zip(row.reshape(places), own[number] or (), strict=False):
                    place[:] = encoded[id(picture)][tokens_of(number)]
            for row, own in zip(shown, rows, strict=True):
                row[: len(own[number] or ())] = 1.0
        return found

    def _encoded(self, pictures: Mapping[int, np.ndarray], size: int, shape: Shape) -> dict:
        """Encode each picture once, and for guidance none; return the tokens by the same keys."""
        everything = {NOTHING: np.zeros((size, size, 3), "uint8"), **pictures}
        keys = list(pictures if self.manifest.guidance == "none" else everything)
        found = {}
        for start in range(0, len(keys), shape.batch_size):
            batch = keys[start : start + shape.batch_size]
            filled = batch + [NOTHING] * (shape.batch_size - len(batch))
            inputs = {
                "pictures": to_vision(np.stack([everything[key] for key in filled])),
                GIVEN: np.array([key != NOTHING for key in filled], "float32"),
            }
            outputs = self.call("vision_encoder", "serving_default", shape, **inputs)
            outputs = {name: self.to_host(value) for name, value in outputs.items()}
            for place, key in enumerate(batch):
                found[key] = {name: value[place] for name, value in outputs.items()}
        return found

    def _begin(self, request: Request, chunk: range, seeds, steps, image_latent) -> dict[str, Any]:
        """Return the state before the first model call: noise, or a picture with noise."""
        shape = request.shape(chunk)
        if request.shared.noise is None:
            noise = self.call("diffusion_model", "noise", shape, seed=seeds)["noise"]
        else:
            noise = np.stack(request.chunk("noise", chunk))
        if image_latent is None:
            state = self.call("diffusion_model", "begin", shape, noise=noise, **steps)
        else:
            state = self.call(
                "diffusion_model",
                "begin_image",
                shape,
                noise=noise,
                image_latent=image_latent,
                start=np.int32(request.start),
                **steps,
            )
        latent_shape = self.manifest.shapes.latent(request.size)
        history = np.zeros((self.manifest.history, len(chunk), *latent_shape), "float32")
        kept = self.manifest.reuse.empty(shape, self.manifest.shapes)
        return {"latent": state["latent"], "history": history, **kept}

    def _scales(self, request: Request) -> dict[str, np.ndarray]:
        scales = {"unconditional_guidance_scale": np.float32(request.shared.guidance_scale)}
        if use_of_picture(self.manifest) == EDIT:
            scales["image_guidance_scale"] = np.float32(request.shared.image_guidance_scale)
        for name in self.manifest.further_scales:
            scales[name] = np.float32(getattr(request.shared, name))
        return scales


class LocalRunner(Runner):
    """Runs models that this process holds, so that it can write into their places for adapters."""

    @abstractmethod
    def put(self, component: str, rows: Mapping[str, np.ndarray], first: int) -> None:
        """Write rows of all matrices of a component's places, from `first` on."""


@dataclass
class Clock:
    """Seconds between stops, by name."""

    last: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def stop(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now
