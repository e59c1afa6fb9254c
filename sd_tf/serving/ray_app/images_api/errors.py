"""Errors in the images API's shape: {"error": {"message", "type", "param", "code"}}."""

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from sd_tf.serving.errors import RefusedError
from sd_tf.serving.ray_app.body import problems

INVALID, SERVER, TIMEOUT = "invalid_request_error", "server_error", "timeout_error"
# Status → the type, and the code where the error has none of its own.
KINDS = {
    400: (INVALID, "invalid_value"),
    401: (INVALID, "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: (INVALID, "not_found"),
    405: (INVALID, "method_not_allowed"),
    408: (TIMEOUT, "request_timeout"),
    413: (INVALID, "request_too_large"),
    415: (INVALID, "unsupported_media_type"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: (SERVER, "service_unavailable"),
    504: (TIMEOUT, "timeout"),
}
OTHERWISE = (SERVER, "server_error")
# Of a value, as pydantic names what is wrong with it; others end in _type or _parsing, or are bad.
CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
}


def error_answer(error: RefusedError, headers: Mapping[str, str]) -> JSONResponse:
    """Return the answer to a request that is refused."""
    status = status_of(error)
    if status == 504:  # the client would repeat it, and wait as long in vain
        headers = {**headers, "X-Should-Retry": "false"}
    return JSONResponse(error_content(error), status, headers)


def error_content(error: RefusedError) -> dict[str, Any]:
    kind, code = KINDS.get(status_of(error), OTHERWISE)
    code = code if error.code is None else error.code
    return {
        "error": {"message": error.message, "type": kind, "param": error.parameter, "code": code}
    }


def status_of(error: RefusedError) -> int:
    """Return HTTP's status: the API has 400 where POST /generate has 422."""
    return 400 if error.status == 422 else error.status


def refusal(error: ValidationError, body: type[BaseModel]) -> RefusedError:
    """Make the error of values that are no `body`; its parameter is the first wrong one."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    kind, place = first["type"], first["loc"]
    is_type = kind.endswith(("_type", "_parsing"))
    code = CODES.get(kind, "invalid_type" if is_type else "invalid_value")
    parameter = str(place[0])[:100] if place else None
    return RefusedError(422, problems(error, body), parameter, code)
