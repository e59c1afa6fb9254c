"""Who may call: the web pages and host names that are known, and callers that have the key."""

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sd_tf.serving.errors import RefusedError, ServingError

SHORTEST_KEY = 16  # characters
SCHEME = "bearer"
JSON, FORM = "application/json", "multipart/form-data"
# Paths whose bodies are read; those below MODELS are TensorFlow Serving's.
FORM_PATHS = ("/v1/images/edits",)
JSON_PATHS = ("/generate", "/v1/images/generations")
MODELS = "/v1/models/"
PORTS = {"http": 80, "https": 443}  # that browsers leave out of an origin
# Paths without secrets, which answer without the key: the page itself, and whether the server runs.
OPEN_PATHS = ("/", "/docs", "/openapi.json", "/health", "/ready")
OPEN_FOLDER = "/static/"


@dataclass(frozen=True)
class Access:
    """The rules by which a request is let in."""

    host: str  # that the server listens on
    origins: tuple[str, ...] = ()  # of other sites whose pages may call, as scheme://host[:port]
    key_hash: bytes | None = None  # None: no key is needed

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Let an HTTP request in, or raise RefusedError."""
        self._check_host(headers.get("host", ""))
        if method not in ("GET", "HEAD"):
            self._check_origin(headers)
            if method == "POST":
                self._check_kind(path, headers)
        if path not in OPEN_PATHS and not path.startswith(OPEN_FOLDER):
            self.check_key(headers.get("authorization"))

    def _check_kind(self, path: str, headers: Mapping[str, str]) -> None:
        """Refuse bodies that a page of another site could send without asking this server first.

        Its browser asks before it sends JSON, and before it sends the header `Authorization`, but
        not before it sends a form. So a form needs that header, whether there is a key or not.
        """
        if path in FORM_PATHS:
            wanted = FORM
        elif path in JSON_PATHS or path.startswith(MODELS):
            wanted = JSON
        else:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != wanted:
            raise RefusedError(
                415, f"Send the header `Content-Type: {wanted}`. Received: {_shown(kind)}"
            )
        scheme = headers.get("authorization", "").partition(" ")[0]
        if wanted == FORM and scheme.lower() != SCHEME:
            raise RefusedError(
                401,
                "Send a form with the header `Authorization: Bearer KEY`, with any KEY if the "
                "server has none.",
            )

    def check_key(self, authorization: str | None) -> None:
        """Compare the key of an `Authorization` header, in a time that tells nothing about it."""
        if self.key_hash is None:
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = key if scheme.lower() == SCHEME else ""
        if not hmac.compare_digest(hash_of(given), self.key_hash):
            raise RefusedError(401, "Send the server's key as `Authorization: Bearer KEY`.")

    def _check_host(self, host: str) -> None:
        """Refuse foreign names: a site can give its own name this server's address (rebinding)."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if not _is_address(name) and name not in self._names():
            raise RefusedError(
                403,
                f"This server does not go by the name {_shown(host)}. If it should, start it with "
                f"--allow_origin http://NAME.",
            )

    def _names(self) -> set[str]:
        allowed = {urlsplit(origin).hostname for origin in self.origins}
        return {"localhost", self.host.lower(), socket.gethostname().lower(), *allowed}

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse what pages of other sites send: browsers name the page's site, others nothing."""
        origin = headers.get("origin")
        if origin is None or origin in self.origins:
            return
        if origin.lower().partition("://")[2] != headers["host"].lower():
            raise RefusedError(
                403,
                f"Pages of {_shown(origin)} may not call this server. To allow it, start the "
                f"server with --allow_origin {_shown(origin)}.",
            )


def read_key(path: str | Path) -> bytes:
    """Read the key in a file; return its hash, which is all that the servers need."""
    key = Path(path).read_text(encoding="utf-8").strip()
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ServingError(
            f"`api_key_file` holds one key: at least {SHORTEST_KEY} letters, digits and signs of "
            f"ASCII, without spaces. {path} does not. One is made by `openssl rand -hex 32`."
        )
    return hash_of(key)


def read_origin(text: str) -> str:
    """Check an origin; return it as browsers write it."""
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in PORTS and parts.hostname and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one or "@" in parts.netloc or (parts.path + parts.query + parts.fragment).strip("/"):
        raise ServingError(
            f"`allow_origin` is http://HOST or https://HOST, perhaps with :PORT. Received: {text!r}"
        )
    port = "" if parts.port in (None, PORTS[parts.scheme]) else f":{parts.port}"
    return f"{parts.scheme}://{parts.netloc.lower().removesuffix(f':{parts.port}')}{port}"


def hash_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shown(text: str) -> str:
    return repr(text[:100])
