"""The clients of a soak: they ask, stream, walk the models, leave in the middle, send rubbish."""

import http.client
import json
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult

from sd_tf.bench.soak.exports import ASKS, Ask
from sd_tf.bench.soak.tally import BUSY, REFUSED, Tally
from sd_tf.serving.client.client import Client as ModelClient
from sd_tf.serving.client.client import ServerError
from sd_tf.serving.load import BUSY_PAUSE, pixels, post

PATIENCE = 120.0  # seconds without a byte of an answer
# The server's own codes; the last one is what it answers for a version that it has let go.
CLEAN_CODES = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "NOT_FOUND"}
GENERATE = "/generate"
RUBBISH_PATHS = (GENERATE, "/v1/models/decoder:predict", "/v1/models/nothing:predict")
VALID = json.dumps(ASKS[0].call()).encode()


@dataclass(frozen=True)
class Target:
    """The application that clients ask, where they count, and when they stop."""

    url: SplitResult
    export_dir: Path  # has the tokenizer and the sizes of all that is served
    tally: Tally
    stop: threading.Event = field(default_factory=threading.Event)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=PATIENCE)


class AnswerError(Exception):
    """An answer that is not what was asked for."""

    def __init__(self, status: int | None, content: bytes):
        super().__init__(status, content)
        self.status, self.content = status, content


class Client:
    """Sends one request after the other; its number decides of which kind they are."""

    def __init__(self, target: Target, number: int):
        self.target, self.tally = target, target.tally
        self.kind = KINDS[number] if number < len(KINDS) else "draw"
        self.source = random.Random(number)
        self.connection = target.connect()

    def run(self) -> None:
        while not self.target.stop.is_set():
            if not self.ask():
                self.target.stop.wait(BUSY_PAUSE)

    def ask(self) -> bool:
        """Send one request, and count how it ended; return whether it gave a picture."""
        begun = self.tally.now()
        try:
            return getattr(self, f"_{self.kind}")(self.source.choice(ASKS), begun)
        except AnswerError as error:
            self.tally.error(self.kind, error.status, error.content, begun)
            return False
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            self.connection.close()  # opened again by the next request
            self.tally.ended(self.kind, repr(error), begun)
            return False

    def _draw(self, ask: Ask, begun: float) -> bool:
        status, content = post(self.connection, GENERATE, json.dumps(ask.call()).encode())
        if status != 200:
            raise AnswerError(status, content)
        image = pixels(json.loads(content)["images"][0]["png"])
        self.tally.picture(self.kind, ask, image, begun)
        return True

    def _stream(self, ask: Ask, begun: float) -> bool:
        """Take a picture as events, with a preview on the way."""
        image = None
        for name, content in self._events(ask):
            if name == "image":
                image = pixels(content["png"])
            if name == "done":
                self.tally.picture(self.kind, ask, image, begun)
                return True
        self.tally.ended(self.kind, "the stream broke off", begun)
        return False

    def _leave(self, ask: Ask, begun: float) -> bool:
        """Close the connection at the first step, or right after asking."""
        waits = self.source.random() < 0.5
        for name, _ in self._events(ask):
            if not waits or name != "accepted":
                break
        self.tally.add(self.kind, "left")
        return False

    def _rubbish(self, ask: Ask, begun: float) -> bool:
        """Send what is no request, or promise more than comes and leave."""
        if self.source.random() < 0.2:
            place = self.target.url.hostname, self.target.url.port
            lines = (
                f"POST {GENERATE} HTTP/1.1",
                "Host: localhost",
                "Content-Type: application/json",
                "Content-Length: 1000",
            )
            head = "".join(f"{line}\r\n" for line in (*lines, "")).encode()
            with socket.create_connection(place, PATIENCE) as one:
                half = self.source.random() < 0.5
                one.sendall(head + (VALID if half else self.source.randbytes(100)))
            self.tally.add(self.kind, "left")
            return False
        body = self.source.randbytes(self.source.randint(0, 300))
        if self.source.random() < 0.6:
            at = self.source.randrange(len(VALID))
            body = VALID[:at] + self.source.randbytes(self.source.randint(1, 3)) + VALID[at + 1 :]
        status, content = post(self.connection, self.source.choice(RUBBISH_PATHS), body)
        if status == 200:
            self.tally.add(self.kind, "understood")
        elif status in REFUSED and status not in BUSY:
            self.tally.add(self.kind, "refused")
        else:
            raise AnswerError(status, content)
        return False

    def _walk(self, ask: Ask, begun: float) -> bool:
        """Call one model after the other, as clients of TensorFlow Serving's API do."""
        client = ModelClient(
            self.target.url.geturl(),
            self.target.export_dir,
            timeout=PATIENCE,
            retries=0,
        )
        try:
            with client:
                image = client(**ask.call()).images[0]
        except ServerError as error:
            if error.code in CLEAN_CODES:
                self.tally.add(self.kind, "clean")
            else:
                self.tally.ended(self.kind, str(error), begun)
            return False
        self.tally.picture(self.kind, ask, image, begun)
        return True

    def _events(self, ask: Ask) -> Iterator[tuple[str, dict]]:
        """Yield a stream's events."""
        connection = self.target.connect()
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        try:
            connection.request("POST", GENERATE, json.dumps({**ask.call(), "previews": 1}), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise AnswerError(response.status, response.read())
            name = None
            while line := response.readline():
                key, _, value = line.decode().rstrip("\n").partition(": ")
                if key == "event":
                    name = value
                elif key == "data" and name == "error":
                    raise AnswerError(json.loads(value)["status"], value.encode())
                elif key == "data":
                    yield name, json.loads(value)
        finally:
            connection.close()


KINDS = ("walk", "leave", "rubbish", "stream")  # of the first clients; all others draw
