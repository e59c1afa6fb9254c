"""The front's side of HTTP: headers, errors, bodies, event streams, the page's files."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles

from sd_tf.serving.ray_app.wanted import RefusedError

WEB = Path(__file__).parent.parent / "web"
RETRY_AFTER = 2  # seconds, told to who is refused
BODY_WITHIN = 60.0  # seconds that a client may take to send what it wants
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def make_app() -> FastAPI:
    app = FastAPI(title="sd_tf", docs_url=None, redoc_url=None, openapi_url=None)
    app.mount("/static", StaticFiles(directory=WEB))
    app.add_middleware(Headers)
    app.add_exception_handler(RefusedError, _refused)
    return app


class Headers:
    """Adds ours to every answer. Plain ASGI, so that a client's leaving reaches the stream."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def send_with_headers(message):
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), text.encode()) for name, text in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await self.app(scope, receive, send_with_headers)


async def _refused(request: Request, error: RefusedError) -> JSONResponse:
    headers = {"Retry-After": str(RETRY_AFTER)} if error.status == 429 else {}
    return JSONResponse({"error": error.message}, error.status, headers)


async def read_body(request: Request, most: int, within: float = BODY_WITHIN) -> bytes:
    """All of it, unless it is longer than allowed, or does not come."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(within):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise RefusedError(413, f"The body is longer than {most} bytes.")
                parts.append(part)
    except TimeoutError as error:
        raise RefusedError(408, f"The body was not there within {within:g} seconds.") from error
    return b"".join(parts)


async def event_lines(events) -> AsyncIterator[str]:
    """(name, content) as server-sent events."""
    try:
        async for name, content in events:
            yield ": ping\n\n" if name == "ping" else _lines(name, content)
    finally:
        await events.aclose()


def _lines(name: str, content) -> str:
    return f"event: {name}\ndata: {json.dumps(content)}\n\n"
