"""What POST /generate takes: checked, and told apart into pictures."""

import asyncio
import base64
import binascii
from dataclasses import dataclass

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sd_tf.manifest import ExportError, Manifest
from sd_tf.pictures import PictureError, open_picture
from sd_tf.request import read_request
from sd_tf.serving.ray_app.batching import Job

LONGEST_PROMPT = 10_000  # characters
MOST_PREVIEWS = 20
MOST_PIXELS = 16 << 20  # of a picture that is sent
LONGEST_TIMEOUT = 3600.0
LARGEST_GUIDANCE = 1e6


class RefusedError(Exception):
    """A request that cannot be answered: HTTP's status and why."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status, self.message = status, message


@dataclass(frozen=True)
class Together:
    """What the pictures of one batch have in common."""

    num_steps: int
    guidance_scale: float
    scheduler: str
    strength: float | None
    image_guidance_scale: float | None
    given: frozenset[str]  # of negative_prompt, image, mask
    calls: int  # of the model

    @property
    def parameters(self) -> dict:
        """In the words of a chain's call."""
        found = {
            "num_steps": self.num_steps,
            "guidance_scale": self.guidance_scale,
            "scheduler": self.scheduler,
            "strength": self.strength,
            "image_guidance_scale": self.image_guidance_scale,
        }
        return {name: value for name, value in found.items() if value is not None}


class Wanted(BaseModel):
    """The body, with the defaults of the application where None."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | list[str]
    negative_prompt: str | None = None
    num_steps: int | None = None
    guidance_scale: float | None = Field(None, allow_inf_nan=False)
    seed: int | list[int] | None = None
    scheduler: str | None = None
    image: str | None = None  # a picture's file in base64
    mask: str | None = None
    strength: float | None = Field(None, allow_inf_nan=False)
    image_guidance_scale: float | None = Field(None, allow_inf_nan=False)
    count: int = Field(1, ge=1)
    previews: int = Field(0, ge=0, le=MOST_PREVIEWS)
    timeout: float | None = Field(None, gt=0, le=LONGEST_TIMEOUT)

    @classmethod
    def read(cls, body: bytes) -> "Wanted":
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise RefusedError(422, "; ".join(map(_described, error.errors()))) from error

    def with_defaults(self, num_steps: int, guidance_scale: float) -> "Wanted":
        given = {"num_steps": num_steps, "guidance_scale": guidance_scale}
        return self.model_copy(
            update={name: value for name, value in given.items() if getattr(self, name) is None}
        )

    def jobs(self, manifest: Manifest, most: int, streams: bool) -> list[Job]:
        """A job for each picture, all with one queue of events; refuses what cannot be done."""
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        prompts = [prompt for prompt in given for _ in range(self.count)]
        if not 1 <= len(prompts) <= most:
            raise RefusedError(
                422, f"One call gives 1 to {most} pictures. Received: {len(prompts)}"
            )
        for text in (*given, self.negative_prompt or ""):
            if len(text) > LONGEST_PROMPT:
                raise RefusedError(
                    422, f"A prompt has at most {LONGEST_PROMPT} characters. Received: {len(text)}"
                )
        for name in ("guidance_scale", "image_guidance_scale"):
            if abs(getattr(self, name) or 0.0) > LARGEST_GUIDANCE:
                raise RefusedError(
                    422, f"{name} is at most {LARGEST_GUIDANCE:g}. Received: {getattr(self, name)}"
                )
        scheduler = manifest.default_sampler if self.scheduler is None else self.scheduler
        try:
            request = read_request(
                manifest,
                prompts,
                negative_prompt=self.negative_prompt,
                num_steps=self.num_steps,
                guidance_scale=self.guidance_scale,
                seed=self.seed,
                scheduler=scheduler,
                image=_picture("image", self.image),
                mask=_picture("mask", self.mask),
                strength=self.strength,
                image_guidance_scale=self.image_guidance_scale,
            )
        except (ExportError, ValueError) as error:
            raise RefusedError(422, str(error)) from error
        each = {
            "negative_prompt": request.negatives,
            "image": request.image,
            "mask": request.mask,
        }
        each = {name: values for name, values in each.items() if values is not None}
        together = Together(
            self.num_steps,
            self.guidance_scale,
            scheduler,
            self.strength,
            self.image_guidance_scale,
            frozenset(each),
            request.calls - request.start,
        )
        events = asyncio.Queue()
        return [
            Job(
                index=index,
                prompt=prompt,
                seed=seed,
                inputs={name: values[index] for name, values in each.items()},
                together=together,
                events=events,
                every_step=streams,
                previews=self.previews,
            )
            for index, (prompt, seed) in enumerate(zip(prompts, request.seeds, strict=True))
        ]


def _picture(name: str, content: str | None) -> Image.Image | None:
    if content is None:
        return None
    try:
        return open_picture(base64.b64decode(content, validate=True), MOST_PIXELS)
    except binascii.Error as error:
        raise RefusedError(422, f"{name}: this is not base64 ({error}).") from error
    except PictureError as error:
        raise RefusedError(422, f"{name}: {error}.") from error


def _described(error: dict) -> str:
    place = ".".join(str(part) for part in error["loc"] if part not in ("str", "list[str]"))
    return f"{place}: {error['msg']}" if place else error["msg"]
