"""From prompts to pictures: checks a call, divides it into batches, walks from model to model.

Where the models run is the part that differs: SavedModels in this process (`pipeline`), or behind
a server (`serving.client`). So nothing here needs TensorFlow.
"""

import os
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
from sd_tf.sampling.tables import HISTORY, start_row
from sd_tf.tokenizer import ClipTokenizer

PLAIN = "plain_"
DEFAULT_STEPS, DEFAULT_GUIDANCE = 50, 7.5
DEFAULT_STRENGTH = {"none": 0.8, "mask_and_image": 1.0}
# SDXL's refiner is conditioned on how beautiful a picture is to be.
AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5

# On the way: (model calls done, calls in all, latents (B, h, w, 4)). False stops the run.
Callback = Callable[[int, int, np.ndarray], bool | None]


@dataclass(frozen=True)
class Result:
    images: np.ndarray  # uint8 (N, H, W, 3)
    seeds: list[int]
    timings: dict[str, float]  # seconds: text_encoder, diffusion_model, decoder, …, total

    def pil(self) -> list[Image.Image]:
        return [Image.fromarray(image) for image in self.images]


@dataclass
class Request:
    """What one call asks for, checked, with one entry per image."""

    prompts: list[str]
    negatives: list[str] | None
    seeds: list[int]
    num_steps: int
    guidance_scale: float
    sampler: int
    calls: int
    start: int
    image: np.ndarray | None = None  # float32 (H, W, 3) in [-1, 1], of every image
    mask: np.ndarray | None = None  # float32 (H, W), 1 where to paint
    noise: np.ndarray | None = None  # float32 (N, h, w, 4)
    time_ids: np.ndarray | None = None
    negative_time_ids: np.ndarray | None = None
    callback: Callback | None = None
    callback_every: int = 1


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
            image: the picture to start from (or to paint in): PIL image or uint8 (H, W, 3).
            mask: where to paint, white, for a checkpoint made for inpainting.
            strength: how much of the way from the image to noise and back is walked, above 0 to 1.
            noise: unit noise (N, h, w, 4) in place of what the seeds give.
            callback: called with (done, calls, latents) after every `callback_every` model calls
                and the last one; False stops.
            original_size, crop_top_left, target_size: SDXL's size conditioning, (height, width).
        """
        start = time.perf_counter()
        request = self._check(
            prompt, negative_prompt, num_steps, guidance_scale, seed, scheduler, noise
        )
        if callback_every < 1:
            raise ValueError(f"callback_every is at least 1. Received: {callback_every}")
        request.callback, request.callback_every = callback, callback_every
        self._add_images(request, image, mask, strength)
        self._add_sizes(request, original_size, crop_top_left, target_size)

        batch = self.manifest.batch_size
        chunks = [range(i, i + batch) for i in range(0, len(request.prompts), batch)]
        jobs = [(chunk, self._tokens(request, chunk)) for chunk in chunks]
        shares = [jobs[i :: len(self._replicas)] for i in range(len(self._replicas))]

        def work(replica, share):
            return [(chunk, replica.run(request, chunk, ids)) for chunk, ids in share]

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
        if self.manifest.latent_inputs == "mask_and_image":
            pictures = {"image": np.zeros((*size, 3), "uint8"), "mask": np.zeros(size, "uint8")}
        prompts = [""] * (self.manifest.batch_size * len(self._replicas))
        return self(prompts, num_steps=1, seed=0, **pictures).timings

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Latents (B, h, w, 4), as a callback gets them → uint8 pictures: a preview."""
        return self._replicas[0].decode(latents)

    def encode(self, pictures: np.ndarray) -> np.ndarray:
        """uint8 pictures (B, H, W, 3) → the latents that `decode` takes."""
        self._need_image_encoder()
        return self._replicas[0].encode(pictures.astype("float32") / 127.5 - 1.0)

    def _need_image_encoder(self) -> None:
        if "image_encoder" not in self.manifest.components:
            raise ExportError(
                "The export has no image_encoder, which an image needs. Export it with "
                "--components=image_encoder."
            )

    # What a call asks for

    def _check(
        self, prompt, negative_prompt, num_steps, guidance_scale, seed, scheduler, noise
    ) -> Request:
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not prompts:
            raise ValueError("At least one prompt is needed. Received: none")
        count = len(prompts)
        negatives = negative_prompt
        if negatives is not None:
            negatives = [negatives] * count if isinstance(negatives, str) else list(negatives)
            if len(negatives) != count:
                raise ValueError(
                    f"One negative prompt for all or one for each of {count} prompts. "
                    f"Received: {len(negatives)}"
                )
        name = self.manifest.default_sampler if scheduler is None else scheduler
        calls = self.manifest.model_calls(name, num_steps)
        if not np.isfinite(guidance_scale):
            raise ValueError(f"guidance_scale is a finite number. Received: {guidance_scale}")
        if noise is not None:
            noise = np.asarray(noise, "float32")
            expected = (count, *self.manifest.latent_shape)
            if noise.shape != expected:
                raise ValueError(f"noise has the shape {expected}. Received: {noise.shape}")
        return Request(
            prompts=prompts,
            negatives=negatives,
            seeds=image_seeds(seed, count),
            num_steps=int(num_steps),
            guidance_scale=float(guidance_scale),
            sampler=self.manifest.samplers.index(name),
            calls=calls,
            start=0,
            noise=noise,
        )

    def _add_images(self, request: Request, image, mask, strength: float | None) -> None:
        paints = self.manifest.latent_inputs == "mask_and_image"
        if (image is None or mask is None) and paints:
            raise ValueError("This checkpoint paints inside a mask: give image=... and mask=...")
        if mask is not None and not paints:
            raise ValueError(
                f"Only a checkpoint made for inpainting takes a mask; this one is "
                f"{self.manifest.family}."
            )
        if image is None:
            return
        if strength is None:
            strength = DEFAULT_STRENGTH[self.manifest.latent_inputs]
        request.start = start_row(request.num_steps, strength)
        self._need_image_encoder()
        request.image = self._pixels(image, "RGB").astype("float32") / 127.5 - 1.0
        if mask is not None:
            request.mask = (self._pixels(mask, "L") >= 128).astype("float32")

    def _pixels(self, picture, mode: str) -> np.ndarray:
        size = (self.manifest.width, self.manifest.height)
        if isinstance(picture, Image.Image):
            resample = Image.Resampling.LANCZOS if mode == "RGB" else Image.Resampling.NEAREST
            picture = picture.convert(mode)
            return np.asarray(picture if picture.size == size else picture.resize(size, resample))
        picture = np.asarray(picture)
        expected = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
        if picture.shape != expected or picture.dtype != np.uint8:
            raise ValueError(
                f"A picture is a PIL image, or an array of uint8 {expected}. "
                f"Received: {picture.dtype} {picture.shape}"
            )
        return picture

    def _add_sizes(self, request: Request, original_size, crop_top_left, target_size) -> None:
        if not self.manifest.time_ids:
            if (original_size, tuple(crop_top_left), target_size) != (None, (0, 0), None):
                raise ValueError("Only SDXL is conditioned on sizes and crops.")
            return
        size = (self.manifest.height, self.manifest.width)
        ids = [*(original_size or size), *crop_top_left]
        negative = list(ids)
        if self.manifest.time_ids == 5:
            ids.append(AESTHETIC_SCORE)
            negative.append(NEGATIVE_AESTHETIC_SCORE)
        else:
            ids += target_size or size
            negative = ids
        request.time_ids = np.array(ids, "float32")
        request.negative_time_ids = np.array(negative, "float32")

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
        """Run one model. What it gives is whatever `np.asarray` and another `call` take."""

    def signature(self, component: str, endpoint: str) -> str:
        """The endpoint's signature: compiled, or its plain twin where there is one."""
        name = endpoint if self.jit_compile else PLAIN + endpoint
        return name if name in self.manifest.components[component].signatures else endpoint

    def decode(self, latents) -> np.ndarray:
        outputs = self.call("decoder", "serving_default", latent=latents)
        return np.asarray(outputs["generated_images"])

    def encode(self, images) -> np.ndarray:
        """Pictures (B, H, W, 3) in [-1, 1] → scaled latents."""
        latent = self.call("image_encoder", "serving_default", images=images)["latent"]
        return np.asarray(latent) * np.float32(self.manifest.scaling_factor)

    def run(self, request: Request, chunk: range, tokens: dict[str, np.ndarray]):
        """One batch: pictures (B, H, W, 3) and the seconds of each stage."""
        clock = Clock()
        endpoint = "encode" if "negative_tokens" in tokens else "serving_default"
        conditions = dict(self.call("text_encoder", endpoint, **tokens))
        np.asarray(conditions["context"])  # waits for it
        clock.stop("text_encoder")
        if request.time_ids is not None:
            shape = (len(chunk), len(request.time_ids))
            conditions["time_ids"] = np.broadcast_to(request.time_ids, shape)
            conditions["unconditional_time_ids"] = np.broadcast_to(request.negative_time_ids, shape)
        image_latent = self._encode_images(request, chunk, conditions)
        if request.image is not None:
            clock.stop("image_encoder")
        latents = self._denoise(request, chunk, conditions, image_latent)
        clock.stop("diffusion_model")
        images = self.decode(latents)
        clock.stop("decoder")
        return images, clock.seconds

    def _encode_images(self, request, chunk, conditions):
        """The image's scaled latents; for inpainting also what the UNet sees beside the noise."""
        if request.image is None:
            return None

        def encode(image):
            return self.encode(np.broadcast_to(image, (len(chunk), *image.shape)))

        if request.mask is not None:
            height, width, _ = self.manifest.latent_shape
            rows = np.arange(height) * self.manifest.height // height
            columns = np.arange(width) * self.manifest.width // width
            small = request.mask[rows][:, columns]
            shape = (len(chunk), height, width, 1)
            conditions["mask"] = np.broadcast_to(small[None, :, :, None], shape)
            kept = request.image * (request.mask < 0.5)[..., None]
            conditions["masked_image_latent"] = encode(kept)
        return encode(request.image) if request.start > 0 or request.mask is None else None

    def _denoise(self, request, chunk, conditions, image_latent):
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
        history = np.zeros((HISTORY, len(chunk), *self.manifest.latent_shape), "float32")
        state = {"latent": state["latent"], "history": history}
        every = request.callback_every if request.callback is not None else request.calls
        for start in range(request.start, request.calls, every):
            stop = min(start + every, request.calls)
            state = self.call(
                "diffusion_model",
                "segment",
                **state,
                **conditions,
                **steps,
                seed=seeds,
                unconditional_guidance_scale=np.float32(request.guidance_scale),
                first=np.int32(request.start),
                start=np.int32(start),
                stop=np.int32(stop),
            )
            if request.callback is not None:
                done, calls = stop - request.start, request.calls - request.start
                if request.callback(done, calls, np.asarray(state["latent"])) is False:
                    break
        return np.asarray(state["latent"])


def open_export(folder: Path) -> tuple[Manifest, dict[str, ClipTokenizer]]:
    """What a chain reads of an export itself; its models are the replicas' part."""
    manifest = Manifest.read(folder)
    needed = ("text_encoder", "diffusion_model", "decoder")
    if missing := [name for name in needed if name not in manifest.components]:
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


def image_seeds(seed, count: int) -> list[int]:
    """The seed of each image: drawn, counted up from one, or as given."""
    if seed is None:
        return [int.from_bytes(os.urandom(4), "little") >> 1 for _ in range(count)]
    seeds = [seed + i for i in range(count)] if isinstance(seed, int | np.integer) else list(seed)
    if len(seeds) != count:
        raise ValueError(f"One seed, or one for each of {count} prompts. Received: {len(seeds)}")
    for value in seeds:
        if value != int(value) or not -(2**31) <= value < 2**31:
            raise ValueError(f"A seed is a whole number of 32 bits. Received: {value!r}")
    return [int(value) for value in seeds]
