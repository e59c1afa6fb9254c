"""What one call asks for, checked against what the export can do; one entry for each picture."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sd_tf import pictures
from sd_tf.manifest import ExportError, Manifest
from sd_tf.sampling.tables import start_row

DEFAULT_STEPS, DEFAULT_GUIDANCE, DEFAULT_IMAGE_GUIDANCE = 50, 7.5, 1.5
DEFAULT_STRENGTH = {"none": 0.8, "mask_and_image": 1.0}
# SDXL's refiner is conditioned on how beautiful a picture is to be.
AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5


@dataclass
class Request:
    prompts: list[str]
    negatives: list[str] | None
    seeds: list[int]
    num_steps: int
    guidance_scale: float
    sampler: int  # its place among the manifest's
    calls: int  # of the model, for all steps
    start: int = 0  # the first of them that is made
    image_guidance_scale: float = DEFAULT_IMAGE_GUIDANCE
    image: np.ndarray | None = None  # uint8 (N, H, W, 3)
    mask: np.ndarray | None = None  # uint8 (N, H, W), white where to paint
    noise: np.ndarray | None = None  # float32 (N, h, w, 4)
    time_ids: np.ndarray | None = None
    negative_time_ids: np.ndarray | None = None


def read_request(
    manifest: Manifest,
    prompt: str | Sequence[str],
    *,
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
    original_size: tuple[int, int] | None = None,
    crop_top_left: tuple[int, int] = (0, 0),
    target_size: tuple[int, int] | None = None,
) -> Request:
    """The words of `Chain.__call__`; ValueError or ExportError where it cannot be done."""
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
    name = manifest.default_sampler if scheduler is None else scheduler
    calls = manifest.model_calls(name, num_steps)
    _check_finite("guidance_scale", guidance_scale)
    if noise is not None:
        noise = np.asarray(noise, "float32")
        expected = (count, *manifest.latent_shape)
        if noise.shape != expected:
            raise ValueError(f"noise has the shape {expected}. Received: {noise.shape}")
    request = Request(
        prompts=prompts,
        negatives=negatives,
        seeds=image_seeds(seed, count),
        num_steps=int(num_steps),
        guidance_scale=float(guidance_scale),
        sampler=manifest.samplers.index(name),
        calls=calls,
        noise=noise,
    )
    _check_pictures(manifest, image, mask, strength, image_guidance_scale)
    if image_guidance_scale is not None:
        request.image_guidance_scale = float(image_guidance_scale)
    if image is not None:
        size = (manifest.width, manifest.height)
        if manifest.latent_inputs != "image":
            if strength is None:
                strength = DEFAULT_STRENGTH[manifest.latent_inputs]
            request.start = start_row(request.num_steps, strength)
        request.image = _each("image", image, 3, count, lambda one: pictures.levels(one, size))
        if mask is not None:
            request.mask = _each("mask", mask, 2, count, lambda one: pictures.grays(one, size))
    _add_sizes(manifest, request, original_size, crop_top_left, target_size)
    return request


def _check_pictures(manifest: Manifest, image, mask, strength, image_guidance_scale) -> None:
    """What goes with this family, and what it needs."""
    edits = manifest.latent_inputs == "image"
    paints = manifest.latent_inputs == "mask_and_image"
    if image is None and edits:
        raise ValueError("This checkpoint edits a picture by instruction: give image=...")
    if strength is not None and edits:
        raise ValueError(
            "An edit starts from noise, so there is no strength; image_guidance_scale says how "
            "much of the image to keep."
        )
    if image_guidance_scale is not None:
        if not edits:
            raise ValueError(
                f"Only InstructPix2Pix takes an image_guidance_scale; this checkpoint is "
                f"{manifest.family}."
            )
        _check_finite("image_guidance_scale", image_guidance_scale)
    if (image is None or mask is None) and paints:
        raise ValueError("This checkpoint paints inside a mask: give image=... and mask=...")
    if mask is not None and not paints:
        raise ValueError(
            f"Only a checkpoint made for inpainting takes a mask; this one is {manifest.family}."
        )
    if image is not None:
        check_image_encoder(manifest)


def check_image_encoder(manifest: Manifest) -> None:
    if "image_encoder" not in manifest.components:
        raise ExportError(
            "The export has no image_encoder, which an image needs. Export it with "
            "--components=image_encoder."
        )


def _each(name: str, given, rank: int, count: int, read: Callable) -> np.ndarray:
    """One picture for each of `count` prompts; `rank`: of one picture's array."""
    is_array = isinstance(given, np.ndarray)
    if not isinstance(given, list | tuple) and not (is_array and given.ndim == rank + 1):
        one = read(given)
        return np.broadcast_to(one, (count, *one.shape))
    if len(given) != count:
        raise ValueError(
            f"One {name} for all or one for each of {count} prompts. Received: {len(given)}"
        )
    return np.stack([read(picture) for picture in given])


def _add_sizes(manifest, request, original_size, crop_top_left, target_size) -> None:
    if not manifest.time_ids:
        if (original_size, tuple(crop_top_left), target_size) != (None, (0, 0), None):
            raise ValueError("Only SDXL is conditioned on sizes and crops.")
        return
    size = (manifest.height, manifest.width)
    ids = [*(original_size or size), *crop_top_left]
    negative = list(ids)
    if manifest.time_ids == 5:
        ids.append(AESTHETIC_SCORE)
        negative.append(NEGATIVE_AESTHETIC_SCORE)
    else:
        ids += target_size or size
        negative = ids
    request.time_ids = np.array(ids, "float32")
    request.negative_time_ids = np.array(negative, "float32")


def _check_finite(name: str, value: float) -> None:
    if not np.isfinite(value):
        raise ValueError(f"{name} is a finite number. Received: {value}")


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
