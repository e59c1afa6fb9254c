"""Answers of the images API: pictures at once, or as events."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import JSONResponse

from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.drawing import Event
from sd_tf.serving.ray_app.http import collected
from sd_tf.serving.ray_app.images_api.errors import error_content
from sd_tf.serving.ray_app.images_api.reading import Answering


async def answer(events: AsyncIterator[Event], how: Answering) -> JSONResponse:
    """Return the answer that has all pictures of a request."""
    images, _ = await collected(events)
    data = [{"b64_json": await _converted(image, how), **_more(image)} for image in images]
    return JSONResponse(
        {
            "created": int(time.time()),
            "background": "opaque",
            "data": data,
            "output_format": how.format.name,
            "size": how.size,
            "usage": usage(how, len(images)),
        }
    )


async def streamed(events: AsyncIterator[Event], how: Answering) -> AsyncIterator[Event]:
    """Turn the events of a call into the API's."""
    partial: dict[int, int] = {}  # picture → unfinished ones that were sent
    try:
        async for name, content in events:
            if name == "ping":
                yield name, content
            elif name == "preview":
                index = content["index"]
                number = partial.get(index, 0)
                partial[index] = number + 1
                more = {"partial_image_index": number, "index": index}
                yield await _event("partial_image", content, how, more)
            elif name == "image":
                more = {"usage": usage(how, 1), "index": content["index"], **_more(content)}
                yield await _event("completed", content, how, more)
            elif name == "error":
                yield name, error_content(RefusedError(content["status"], content["error"]))
    finally:
        await events.aclose()


def usage(how: Answering, count: int) -> dict[str, Any]:
    """Count tokens as the API does: those of prompts, and the places of the pictures' latents."""
    tokens_in, tokens_out = how.text_tokens + how.image_tokens, count * how.picture_tokens
    return {
        "input_tokens": tokens_in,
        "input_tokens_details": {
            "image_tokens": how.image_tokens,
            "text_tokens": how.text_tokens,
        },
        "output_tokens": tokens_out,
        "total_tokens": tokens_in + tokens_out,
    }


async def _event(end: str, content: dict[str, Any], how: Answering, more: dict[str, Any]) -> Event:
    kind = f"{how.kind}.{end}"
    return kind, {
        "type": kind,
        "b64_json": await _converted(content, how),
        "created_at": int(time.time()),
        "size": how.size,
        "quality": "auto",
        "background": "opaque",
        "output_format": how.format.name,
        **more,
    }


async def _converted(content: dict[str, Any], how: Answering) -> str:
    return await asyncio.to_thread(how.format.convert, content["png"])


def _more(image: dict[str, Any]) -> dict[str, Any]:
    """Return what this server tells about a picture beside what the API does."""
    return {"seed": image["seed"], "parameters": image["parameters"]}
