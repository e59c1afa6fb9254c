"""HTTP for the front: the guard, headers, errors, bodies, event streams, and the page's files."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import sd_tf
from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.access import Access

WEB = Path(__file__).parent.parent / "web"
RETRY_AFTER = 2  # seconds, sent to clients that are refused
DISCARD_WITHIN = 10.0  # seconds that the rest of a refused body may take
GONE = 499  # the status in the log for a client that did not wait
BODY_WITHIN = 60.0  # seconds that a client may take to send a body
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

log = logging.getLogger("ray.serve")


def plain_error(path: str, error: RefusedError, headers: Mapping[str, str]) -> JSONResponse:
    """Return the answer to a request for `path` that is refused."""
    return JSONResponse({"error": error.message}, error.status, headers)


def make_app(access: Access, error_answer: Callable[..., JSONResponse] = plain_error) -> FastAPI:
    """Make an application without routes; `error_answer` is called as `plain_error` is."""
    app = FastAPI(
        title="sd_tf",
        version=sd_tf.__version__,
        description="Pictures from prompts. TensorFlow Serving's API is below /v1/models.",
        docs_url=None,  # FastAPI's page loads scripts from elsewhere; `docs.html` replaces it
        redoc_url=None,
    )
    app.state.error_answer = error_answer
    app.mount("/static", StaticFiles(directory=WEB))
    app.add_middleware(Guard, access=access)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=access.origins,
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type"],
        expose_headers=["retry-after"],
    )
    app.add_middleware(Answers)
    app.add_exception_handler(RefusedError, refused)
    app.add_exception_handler(HTTPException, unknown)
    return app


class Guard:
    """Answers requests that are not let in, before anything else sees them."""

    def __init__(self, app, access: Access):
        self.app, self.access = app, access

    async def __call__(self, scope, receive, send):
        app = self.app
        try:
            self.access.check(scope["method"], scope["path"], Headers(scope=scope))
        except RefusedError as error:
            app = await refused(Request(scope), error)
        await app(scope, receive, send)


class Answers:
    """Adds HEADERS to every answer, logs it, and sees that a client gets it while it still sends.

    Closing a connection on a body that is not read yet would discard the answer.
    """

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        start, is_read, has_begun = time.monotonic(), False, False

        async def receive_on():
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def discard():
            while not is_read:
                await receive_on()

        async def send_on(message):
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                added = [(name.lower().encode(), text.encode()) for name, text in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
                seconds = time.monotonic() - start
                line = (scope["method"], scope["path"], message["status"], seconds)
                log.info("%s %s %d after %.3f s", *line)
            is_last = message["type"] == "http.response.body" and not message.get(
                "more_body", False
            )
            if not is_last or is_read:
                await send(message)
                return
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                await asyncio.wait_for(discard(), DISCARD_WITHIN)
            await send({"type": "http.response.body"})

        try:
            await self.app(scope, receive_on, send_on)
        except Exception:  # answered like any other error; the log has what went wrong
            if has_begun:
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            failed = RefusedError(500, "The server failed. Its log says why.")
            await _error(Request(scope), failed)(scope, receive_on, send_on)


def _error(
    request: Request, error: RefusedError, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return request.app.state.error_answer(request.scope["path"], error, headers or {})


async def unknown(request: Request, error: HTTPException) -> JSONResponse:
    """Answer for a path or a method that there is not."""
    return _error(request, RefusedError(error.status_code, error.detail), error.headers)


async def refused(request: Request, error: RefusedError) -> JSONResponse:
    headers = {}
    if error.status == 429:
        headers["Retry-After"] = str(RETRY_AFTER)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _error(request, error, headers)


def body_size(request: Request, most: int) -> int:
    """Return how many bytes a request's body can have; refuse one that is too long."""
    is_open = "transfer-encoding" in request.headers  # the length shows at the end only
    size = most if is_open else int(request.headers.get("content-length", 0))
    if size > most:
        raise RefusedError(413, f"The body is longer than {most} bytes.")
    return size


async def read_body(request: Request, most: int, within: float = BODY_WITHIN) -> bytes:
    """Read a request's whole body; refuse one that is too long or too slow."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(within):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise RefusedError(413, f"The body is longer than {most} bytes.")
                parts.append(part)
    except TimeoutError as error:
        raise RefusedError(408, f"The body was not received in {within:g} seconds.") from error
    except ClientDisconnect as error:
        raise RefusedError(GONE, "The client closed the connection.") from error
    return b"".join(parts)


async def unless_gone(request: Request, work: Coroutine) -> Any:
    """Return the work's result; cancel it if the client closes the connection."""
    work, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise RefusedError(GONE, "The client closed the connection.")
        return work.result()
    finally:
        work.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    """Return when the client of a request, whose body was read, has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def collected(events) -> tuple[list[dict], dict]:
    """Return the pictures of a call in order, and what its last event says; raise its error."""
    images = []
    try:
        async for name, content in events:
            if name == "error":
                raise RefusedError(content["status"], content["error"])
            if name == "image":
                images.append(content)
            if name == "done":
                return sorted(images, key=lambda image: image["index"]), content
    finally:
        await events.aclose()
    raise AssertionError("a call ends in done or in an error")


async def event_lines(events) -> AsyncIterator[str]:
    """Write events (name, content) as server-sent events."""
    try:
        async for name, content in events:
            yield ": ping\n\n" if name == "ping" else _lines(name, content)
    finally:
        await events.aclose()


def _lines(name: str, content) -> str:
    return f"event: {name}\ndata: {json.dumps(content)}\n\n"
