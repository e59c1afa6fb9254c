"""A pipeline whose models run behind a server that speaks TensorFlow Serving's API.

The server is reached over gRPC or REST, and may be any that answers like TensorFlow Serving. The
export's `pipeline.json` and tokenizer have to be here, its models do not.
"""

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sd_tf.config import PREVIEW_DECODER
from sd_tf.errors import SdTfError
from sd_tf.runtime import retry
from sd_tf.runtime.capabilities import PLAIN
from sd_tf.runtime.chain import NEEDED, Chain, open_export
from sd_tf.runtime.manifest import TEXT_TO_IMAGE, Manifest
from sd_tf.runtime.parameter import CallError
from sd_tf.runtime.pictures import open_picture
from sd_tf.runtime.request import Request
from sd_tf.runtime.reuse import reuse_input
from sd_tf.runtime.runner import Clock, Runner, Watch
from sd_tf.runtime.shapes import Shape
from sd_tf.serving.client.transports import (
    DEADLINE_EXCEEDED,
    TRANSPORTS,
    UNAVAILABLE,
    AttemptError,
    split,
)

DEFAULT_TIMEOUT = 600.0  # seconds of one model call: the first one may compile
DEFAULT_RETRIES = 5

# Parameters that the model from prompts to files takes of every export.
WHOLE_TAKES = (
    *("prompt", "negative_prompt", "num_steps", "guidance_scale", "scheduler", "seed"),
    *("height", "width", "adapters"),
)

KEY = "a token (`SD_TF_TOKEN` for the command)"
MEND = {
    UNAVAILABLE: "Is the server running there, and has it loaded the model?",
    DEADLINE_EXCEEDED: "Give a larger `timeout`; a model's first call may compile it. "
    "TensorFlow Serving's REST API has a limit of its own, --rest_api_timeout_in_ms.",
    "NOT_FOUND": "The server has to serve each component under its name, in that version.",
    "INVALID_ARGUMENT": "Does the server serve the export whose pipeline.json is used here?",
    "FAILED_PRECONDITION": "Does the server serve the export whose pipeline.json is used here?",
    "UNAUTHENTICATED": f"Give {KEY}, or a `ca_file` for a certificate of your own authority.",
    "PERMISSION_DENIED": f"Give {KEY}, or check the one given.",
    "RESOURCE_EXHAUSTED": "The message is too large for the server, or for a proxy before it: "
    "start `sd-tf serve ray` with a larger --max_body. Messages are smaller over gRPC than REST.",
}
BUSY = "The server is overloaded. Try again later, or give it more replicas."
OTHERWISE = (
    "See the server's log. If XLA is switched off in the server, give jit_compile=False "
    "(--nojit_compile)."
)


class ServerError(SdTfError):
    """A call that failed: gRPC's code, the server's message, and which model was called."""

    def __init__(
        self,
        code: str,
        message: str,
        model: str,
        server: str,
        attempts: int = 1,
        is_busy: bool = False,
    ):
        self.code, self.message, self.model, self.server = code, message, model, server
        tried = f" after {attempts} attempts" if attempts > 1 else ""
        mend = BUSY if is_busy else MEND.get(code, OTHERWISE)
        super().__init__(f"{model} at {server}: {code}{tried}: {message}. {mend}")


class Client(Chain):
    """Makes pictures with a server's models; called like a `Pipeline`, with the same result."""

    def __init__(
        self,
        server: str,
        export_dir: str | Path,
        *,
        jit_compile: bool = True,
        version: int | None = None,
        label: str | None = None,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        ca_file: str | Path | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
    ):
        """Prepare a client; the first call connects.

        Args:
            server: grpc://host:port, grpcs://…, http://… or https://…, the last two perhaps with
                a path in front of TensorFlow Serving's /v1/models.
            export_dir: the served export, or a copy of its pipeline.json and tokenizer.
            jit_compile: call the signatures that XLA compiles; False: their plain twins.
            version, label: which version of the models to call; None: the latest one that all of
                them have. Each batch of pictures is made with one version from its first model to
                its last, whatever the server takes up meanwhile.
            token: sent as `authorization: Bearer …`, unencrypted over grpc:// and http://.
            headers: sent with every call (gRPC: metadata).
            ca_file: PEM file of the authority that signed the server's certificate; None:
                the system's authorities.
            timeout: seconds for one model call, all attempts together.
            retries: how often a call is repeated while the server cannot be reached or has no
                room for it; no other failure is repeated. Where a server says when to come back
                (`Retry-After`), the call is repeated then, for as long as `timeout` allows.
        """
        start = time.perf_counter()
        if version is not None and label is not None:
            raise ValueError(f"Give version or label, not both. Received: {version!r}, {label!r}")
        if not timeout > 0 or retries < 0:
            raise ValueError(
                f"timeout is above 0, retries at least 0. Received: {timeout!r}, {retries!r}"
            )
        manifest, tokenizers = open_export(Path(export_dir))
        url = split(server)
        sent = {key.lower(): value for key, value in (headers or {}).items()}
        if token is not None:
            sent["authorization"] = f"Bearer {token}"
        transport = TRANSPORTS[url.scheme](url, sent, ca_file)
        self._remote = ServerRunner(
            manifest, jit_compile, transport, server, timeout, retries, version, label
        )
        super().__init__(manifest, [self._remote], tokenizers, time.perf_counter() - start)

    @property
    def calls_back(self) -> bool:
        """Whether a call takes a `callback`: not where the server has `text_to_image` alone."""
        return not self._remote.is_whole

    def close(self) -> None:
        self._remote.transport.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_) -> None:
        self.close()


class ServerRunner(Runner):
    """Runs the models behind a server."""

    def __init__(
        self, manifest: Manifest, jit_compile, transport, server, timeout, retries, version, label
    ):
        super().__init__(manifest, jit_compile)
        self.transport = transport
        self.server, self.timeout, self.retries = server, timeout, retries
        self.version, self.label = version, label
        self._batch = threading.local()  # `version`: of the models that make this thread's batch

    def run(self, request: Request, chunk: range, tokens, watch: Watch):
        """Make one batch, with one version of all models."""
        if self.is_whole:
            if watch.callback is not None:
                raise ValueError(
                    f"`callback` is called between calls of the denoiser, and the server has "
                    f"{TEXT_TO_IMAGE} alone, which makes them all at once. Leave it out."
                )
            return self._run_whole(request, chunk)
        components = [*NEEDED]
        if request.shared.image is not None:
            components.append("image_encoder")
        if request.shared.image_prompt is not None:
            components.append("vision_encoder")
        if watch.callback is not None and PREVIEW_DECODER in self.manifest.components:
            components.append(PREVIEW_DECODER)
        self._batch.version = self._choose(components)
        try:
            return super().run(request, chunk, tokens, watch)
        finally:
            self._batch.version = None

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether the server has the model from prompts to files, and not its parts."""
        if TEXT_TO_IMAGE not in self.manifest.components:
            return False
        part = NEEDED[0]
        try:
            self._attempts(part, lambda timeout: self.transport.versions(part, timeout))
        except ServerError as error:
            if error.code != "NOT_FOUND":
                raise
            return True
        return False

    def _run_whole(self, request: Request, chunk: range):
        """Make one batch by one call of the model from prompts to files."""
        clock, shared = Clock(), request.shared
        reuse = reuse_input(self.manifest.reuse, shared.reuse)
        takes = (*WHOLE_TAKES, *self.manifest.further_scales, *reuse)
        more = shared.given().keys() - {*takes}
        if shared.prompt_syntax == PLAIN:
            more -= {"prompt_syntax"}
        if more:
            raise ValueError(
                f"The server has {TEXT_TO_IMAGE} alone, which takes {', '.join(takes)}. "
                f"Received also: {', '.join(sorted(more))}"
            )
        if shared.negative_prompt is None and self.manifest.zero_empty_negative:
            raise CallError(
                "negative_prompt",
                f"negative_prompt is needed by {TEXT_TO_IMAGE}, which the server has alone.",
            )
        negative = [text or "" for text in request.chunk("negative_prompt", chunk)]
        outputs = self.call(
            TEXT_TO_IMAGE,
            "generate",
            request.shape(chunk),
            prompt=np.array(request.chunk("prompt", chunk), object),
            negative_prompt=np.array(negative, object),
            num_steps=np.int32(shared.num_steps),
            seed=np.array(request.chunk("seed", chunk), "int32"),
            scheduler=np.array(shared.scheduler, object),
            **self._scales(request),
            **reuse,
            **request.adapters,
        )
        images = np.stack([np.asarray(open_picture(file)) for file in outputs["image_bytes"]])
        clock.stop(TEXT_TO_IMAGE)
        return images, clock.seconds

    def call(self, component: str, endpoint: str, shape: Shape, **inputs) -> dict[str, np.ndarray]:
        version = getattr(self._batch, "version", None)
        if version is None:
            version = self._choose([component])
        signature = self.signature(component, endpoint, shape)
        arrays = {name: np.asarray(value) for name, value in inputs.items()}

        def predict(timeout: float) -> dict[str, np.ndarray]:
            return self.transport.predict(component, version, signature, arrays, timeout)

        return self._attempts(component, predict)

    def _choose(self, components: Sequence[str]) -> int:
        """Return the version to call: the one asked for, or the latest that all models have."""
        if self.version is not None:
            return self.version

        def choose(timeout: float) -> int:
            if self.label is not None:  # it names one version of all models
                return self.transport.named(components[0], self.label, timeout)
            known = {name: self.transport.versions(name, timeout) for name in components}
            for version in known[components[0]]:
                if all(version in versions for versions in known.values()):
                    return version
            raise AttemptError(UNAVAILABLE, f"no version is served of all models, but {known}")

        return self._attempts(components[0], choose)

    def _attempts(self, component: str, attempt: Callable[[float], Any]):
        """Return what `attempt(seconds left)` returns; repeat it if the server is busy or away."""
        deadline = time.monotonic() + self.timeout
        pauses, attempts = retry.pauses(self.retries), 0
        while True:
            attempts += 1
            try:
                return attempt(deadline - time.monotonic())
            except AttemptError as error:
                pause = None
                if error.retry_after is not None:
                    pause = retry.asked(error.retry_after)
                elif error.is_busy or error.code == UNAVAILABLE:
                    pause = next(pauses, None)
                if pause is None or time.monotonic() + pause >= deadline:
                    raise ServerError(
                        error.code, error.message, component, self.server, attempts, error.is_busy
                    ) from error
            time.sleep(pause)
