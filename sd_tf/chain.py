"""From prompts to pictures: divides a call into batches, walks from model to model.

Where the models run is the part that differs: SavedModels in this process (`pipeline`), or behind
a server (`serving.client`). So nothing here needs TensorFlow.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sd_tf.manifest import ExportError, Manifest
from sd_tf.pictures import to_model
from sd_tf.request import (
    DEFAULT_GUIDANCE,
    DEFAULT_STEPS,
    Request,
    check_image_encoder,
    read_request,
)
from sd_tf.sampling.tables import HISTORY
from sd_tf.tokenizer import ClipTokenizer

PLAIN = "plain_"
WHITE = 128  # of 255: from here on a mask says "paint"
NEEDED = ("text_encoder", "diffusion_model", "decoder")

# On the way: (model calls done, calls in all, latents (B, h, w, 4)). False stops the run.
Callback = Callable[[int, int, np.ndarray], bool | None]


@dataclass(frozen=True)
class Result:
    images: np.ndarray  # uint8 (N, H, W, 3)
    seeds: list[int]
    timings: dict[str, float]  # seconds: text_encoder, diffusion_model, decoder, …, total

    def pil(self) -> list[Image.Image]:
        return [Image.fromarray(image) for image in self.images]


@dataclass(frozen=True)
class Watch:
    """Who is told on the way, and after how many model calls."""

    callback: Callback | None
    every: int


class Chain:
    """See `__call__`."""

    def __init__(self, manifest: Manifest, replicas: Sequence["Stages"], tokenizers, load_seconds):
        self.manifest = manifest
        self.load_seconds = load_seconds
        self._replicas = replicas
        self._tokenizers = tokenizers

    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        num_steps: int = DEFAULT_STEPS,
        guidance_scale: float = DEFAULT_GUIDANCE,
        seed: int | Sequence[int] | None = None,
        scheduler: str | None = None,
        image=None,
        mask=None,
        strength: float | None = None,
        image_guidance_scale: float | None = None,
        noise: np.ndarray | None = None,
        callback: Callback | None = None,
        callback_every: int = 1,
        original_size: tuple[int, int] | None = None,
        crop_top_left: tuple[int, int] = (0, 0),
        target_size: tuple[int, int] | None = None,
    ) -> Result:
        """One picture for each prompt; any number of them, in batches of the exported size.

        Args:
            negative_prompt: one for all or one for each. None is what the family's users expect
                of no negative prompt; SDXL tells that from "".
            seed: a number for the first image, the following ones count up; or one for each.
                None draws at random; the result's `seeds` tells.
            scheduler: one of `manifest.samplers`; None: the checkpoint's own.
            image: the picture to start from, to paint in, or that the prompt tells how to edit
                (InstructPix2Pix): PIL image or uint8 (H, W, 3); one for all or one for each.
            mask: where to paint, white, for a checkpoint made for inpainting; one or one for each.
            strength: how much of the way from the image to noise and back is walked, above 0 to 1.
            image_guidance_scale: how strongly an edit holds on to the image (default: 1.5).
            noise: unit noise (N, h, w, 4) in place of what the seeds give.
            callback: called with (done, calls, latents) after every `callback_every` model calls
                and the last one; False stops.
            original_size, crop_top_left, target_size: SDXL's size conditioning, (height, width).
        """
        start = time.perf_counter()
        request = read_request(
            self.manifest,
            prompt,
            negative_prompt=negative_prompt,
            num_steps=num_steps,
            guidance_scale=guidance_scale,
            seed=seed,
            scheduler=scheduler,
            image=image,
            mask=mask,
            strength=strength,
            image_guidance_scale=image_guidance_scale,
            noise=noise,
            original_size=original_size,
            crop_top_left=crop_top_left,
            target_size=target_size,
        )
        if callback_every < 1:
            raise ValueError(f"callback_every is at least 1. Received: {callback_every}")
        watch = Watch(callback, callback_every)

        batch = self.manifest.batch_size
        chunks = [range(i, i + batch) for i in range(0, len(request.prompts), batch)]
        jobs = [(chunk, self._tokens(request, chunk)) for chunk in chunks]
        shares = [jobs[i :: len(self._replicas)] for i in range(len(self._replicas))]

        def work(replica, share):
            return [(chunk, replica.run(request, chunk, ids, watch)) for chunk, ids in share]

        if len(self._replicas) == 1:
            done = work(self._replicas[0], shares[0])
        else:
            with ThreadPoolExecutor(len(self._replicas)) as pool:
                done = [out for part in pool.map(work, self._replicas, shares) for out in part]
        done.sort(key=lambda item: item[0].start)
        images = np.concatenate([images for _, (images, _) in done])[: len(request.prompts)]
        timings = {}
        for _, (_, seconds) in done:
            for name, value in seconds.items():
                timings[name] = timings.get(name, 0.0) + value
        timings["total"] = time.perf_counter() - start
        return Result(images, request.seeds, timings)

    def warm_up(self) -> dict[str, float]:
        """Compile everything that a call needs; seconds per stage."""
        size = (self.manifest.height, self.manifest.width)
        pictures = {}
        if self.manifest.latent_inputs != "none":
            pictures["image"] = np.zeros((*size, 3), "uint8")
        if self.manifest.latent_inputs == "mask_and_image":
            pictures["mask"] = np.zeros(size, "uint8")
        prompts = [""] * (self.manifest.batch_size * len(self._replicas))
        return self(prompts, num_steps=1, seed=0, **pictures).timings

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Latents (B, h, w, 4), as a callback gets them → uint8 pictures: a preview."""
        return self._replicas[0].decode(latents)

    def encode(self, pictures: np.ndarray) -> np.ndarray:
        """uint8 pictures (B, H, W, 3) → the latents that `decode` takes."""
        check_image_encoder(self.manifest)
        return self._replicas[0].encode(to_model(pictures))

    def _tokens(self, request: Request, chunk: range) -> dict[str, np.ndarray]:
        """Ids of a chunk, the last one filled up with its last prompt."""

        def ids(texts):
            texts = _filled(texts, chunk)
            per_encoder = [tokenizer(texts) for tokenizer in self._tokenizers.values()]
            return per_encoder[0] if len(per_encoder) == 1 else np.stack(per_encoder, axis=1)

        tokens = {"tokens": ids(request.prompts)}
        if request.negatives is not None:
            tokens["negative_tokens"] = ids(request.negatives)
        return tokens


class Stages(ABC):
    """The models of one batch, in their order. A subclass says where they run."""

    def __init__(self, manifest: Manifest, jit_compile: bool):
        self.manifest = manifest
        self.jit_compile = jit_compile

    @abstractmethod
    def call(self, component: str, endpoint: str, **inputs) -> Mapping[str, Any]:
        """Run one model. What it gives is whatever `to_host` and another `call` take."""

    def to_host(self, value) -> np.ndarray:
        return np.asarray(value)

    def signature(self, component: str, endpoint: str) -> str:
        """The endpoint's signature: compiled, or its plain twin where there is one."""
        name = endpoint if self.jit_compile else PLAIN + endpoint
        return name if name in self.manifest.components[component].signatures else endpoint

    def decode(self, latents) -> np.ndarray:
        outputs = self.call("decoder", "serving_default", latent=latents)
        return self.to_host(outputs["generated_images"])

    def encode(self, images) -> np.ndarray:
        """Pictures (B, H, W, 3) in [-1, 1] → scaled latents."""
        return self._posterior_mode(images) * np.float32(self.manifest.scaling_factor)

    def _posterior_mode(self, images) -> np.ndarray:
        latent = self.call("image_encoder", "serving_default", images=images)["latent"]
        return self.to_host(latent)

    def run(self, request: Request, chunk: range, tokens, watch: "Watch"):
        """One batch: pictures (B, H, W, 3) and the seconds of each stage."""
        clock = Clock()
        endpoint = "encode" if "negative_tokens" in tokens else "serving_default"
        conditions = dict(self.call("text_encoder", endpoint, **tokens))
        self.to_host(conditions["context"])  # waits for it
        clock.stop("text_encoder")
        if request.time_ids is not None:
            shape = (len(chunk), len(request.time_ids))
            conditions["time_ids"] = np.broadcast_to(request.time_ids, shape)
            conditions["unconditional_time_ids"] = np.broadcast_to(request.negative_time_ids, shape)
        image_latent = self._encode_images(request, chunk, conditions)
        if request.image is not None:
            clock.stop("image_encoder")
        latents = self._denoise(request, chunk, conditions, image_latent, watch)
        clock.stop("diffusion_model")
        images = self.decode(latents)
        clock.stop("decoder")
        return images, clock.seconds

    def _encode_images(self, request, chunk, conditions):
        """The scaled latents to start from; what the UNet sees beside the noise is a condition."""
        if request.image is None:
            return None

        image = to_model(np.stack(_filled(request.image, chunk)))
        if self.manifest.latent_inputs == "image":  # trained on latents that are not scaled
            conditions["conditioning_latent"] = self._posterior_mode(image)
            return None

        if request.mask is not None:
            height, width, _ = self.manifest.latent_shape
            rows = np.arange(height) * self.manifest.height // height
            columns = np.arange(width) * self.manifest.width // width
            paint = np.stack(_filled(request.mask, chunk))[..., None] >= WHITE
            conditions["mask"] = paint[:, rows][:, :, columns].astype("float32")
            conditions["masked_image_latent"] = self.encode(np.where(paint, np.float32(0), image))
        return self.encode(image) if request.start > 0 or request.mask is None else None

    def _denoise(self, request, chunk, conditions, image_latent, watch):
        seeds = np.array(_filled(request.seeds, chunk), "int32")
        steps = {"scheduler": np.int32(request.sampler), "num_steps": np.int32(request.num_steps)}
        if request.noise is None:
            noise = self.call("diffusion_model", "noise", seed=seeds)["noise"]
        else:
            noise = np.stack(_filled(list(request.noise), chunk))
        if image_latent is None:
            state = self.call("diffusion_model", "begin", noise=noise, **steps)
        else:
            state = self.call(
                "diffusion_model",
                "begin_image",
                noise=noise,
                image_latent=image_latent,
                start=np.int32(request.start),
                **steps,
            )
        scales = {"unconditional_guidance_scale": np.float32(request.guidance_scale)}
        if self.manifest.latent_inputs == "image":
            scales["image_guidance_scale"] = np.float32(request.image_guidance_scale)
        history = np.zeros((HISTORY, len(chunk), *self.manifest.latent_shape), "float32")
        state = {"latent": state["latent"], "history": history}
        every = watch.every if watch.callback is not None else request.calls
        for start in range(request.start, request.calls, every):
            stop = min(start + every, request.calls)
            state = self.call(
                "diffusion_model",
                "segment",
                **state,
                **conditions,
                **steps,
                seed=seeds,
                **scales,
                first=np.int32(request.start),
                start=np.int32(start),
                stop=np.int32(stop),
            )
            if watch.callback is not None:
                done, calls = stop - request.start, request.calls - request.start
                if watch.callback(done, calls, self.to_host(state["latent"])) is False:
                    break
        return self.to_host(state["latent"])


def open_export(folder: Path) -> tuple[Manifest, dict[str, ClipTokenizer]]:
    """What a chain reads of an export itself; its models are the replicas' part."""
    manifest = Manifest.read(folder)
    if missing := [name for name in NEEDED if name not in manifest.components]:
        raise ExportError(
            f"{folder} holds no {', '.join(missing)}, which a pipeline needs. Export with "
            f"--components={','.join(missing)}."
        )
    tokenizers = {
        name: ClipTokenizer.from_folder(folder / place)
        for name, place in manifest.tokenizers.items()
    }
    return manifest, tokenizers


@dataclass
class Clock:
    """Seconds between stops, by name."""

    last: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def stop(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now


def _filled(values: Sequence, chunk: range) -> list:
    """A chunk of the values; beyond their end the last one again."""
    return [values[min(i, len(values) - 1)] for i in chunk]
