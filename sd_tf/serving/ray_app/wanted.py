"""What POST /generate takes: checked, and told apart into pictures."""

import asyncio

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sd_tf.chain import image_seeds
from sd_tf.manifest import Manifest
from sd_tf.serving.ray_app.batching import Job

LONGEST_PROMPT = 10_000  # characters
MOST_PREVIEWS = 20
LONGEST_TIMEOUT = 3600.0
LARGEST_GUIDANCE = 1e6


class RefusedError(Exception):
    """A request that cannot be answered: HTTP's status and why."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status, self.message = status, message


class Wanted(BaseModel):
    """The body, with the defaults of the application where None."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | list[str]
    negative_prompt: str | None = None
    num_steps: int | None = None
    guidance_scale: float | None = Field(None, allow_inf_nan=False)
    seed: int | list[int] | None = None
    scheduler: str | None = None
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
        if abs(self.guidance_scale) > LARGEST_GUIDANCE:
            raise RefusedError(
                422,
                f"guidance_scale is at most {LARGEST_GUIDANCE:g}. Received: {self.guidance_scale}",
            )
        scheduler = manifest.default_sampler if self.scheduler is None else self.scheduler
        try:
            manifest.model_calls(scheduler, self.num_steps)
            seeds = image_seeds(self.seed, len(prompts))
        except ValueError as error:
            raise RefusedError(422, str(error)) from error
        has_negative = self.negative_prompt is not None
        events = asyncio.Queue()
        return [
            Job(
                index=index,
                prompt=prompt,
                negative=self.negative_prompt,
                seed=seed,
                settings=(self.num_steps, self.guidance_scale, scheduler, has_negative),
                events=events,
                every_step=streams,
                previews=self.previews,
            )
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]


def _described(error: dict) -> str:
    place = ".".join(str(part) for part in error["loc"] if part not in ("str", "list[str]"))
    return f"{place}: {error['msg']}" if place else error["msg"]
