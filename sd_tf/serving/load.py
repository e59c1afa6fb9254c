"""Measure how much load a running application takes.

A number of clients ask at once, each for the next picture when it has one. Every answer is compared
with the first one for its seed, size and mixture of adapters, and this one, if wanted, with what
`Pipeline` draws; so a mixed-up picture is counted, not averaged away. Two pictures are the same if
they differ by rounding alone, which can depend on the place in a batch.
"""

import base64
import http.client
import io
import json
import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
from PIL import Image

from sd_tf.runtime.percentile import p95
from sd_tf.runtime.shapes import Size
from sd_tf.serving.tf_serving import ServingError

SEEDS = 16  # of the pictures that are asked for
MIXTURES, SCALES = 24, (-0.5, 0.5, 1.0)  # of adapters: so many, with scales out of these
ROUNDING = 1  # of 255 levels
BUSY_PAUSE = 0.2  # seconds after an answer of "busy"
MOST_CLIENTS, LONGEST = 256, 600.0


@dataclass(frozen=True)
class LoadOptions:
    """Which application is asked, by how many clients, for how long, and for what."""

    url: str = "http://127.0.0.1:8000"
    clients: Sequence[int] = (1, 4, 16, 64)
    seconds: float = 60.0  # for each number of clients
    prompt: str = "a large red star on a dark blue background"
    num_steps: int = 20
    guidance_scale: float = 4.0
    sizes: Sequence[Size] = ()  # asked for in turn; none: the application's first
    adapters: Sequence[str] = ()  # in the export's places; asked for in random mixtures
    export_dir: str | None = None  # the application's export, for a comparison with `Pipeline`
    token: str | None = field(default=None, repr=False)  # the application's key

    def check(self) -> SplitResult:
        """Check all fields; return the parts of the URL."""
        if not 0 < self.seconds <= LONGEST:
            raise ServingError(f"`seconds` is above 0 to {LONGEST:g}. Received: {self.seconds}")
        for clients in self.clients:
            if not 1 <= clients <= MOST_CLIENTS:
                raise ServingError(f"`clients` are 1 to {MOST_CLIENTS} each. Received: {clients}")
        url = urlsplit(self.url)
        if url.scheme != "http" or not url.hostname:
            raise ServingError(f"`url` is http://host:port. Received: {self.url!r}")
        return url


def measure_load(options: LoadOptions, report: Callable[[str], None]) -> list[dict]:
    """Measure with each number of clients in turn, and report a line for each."""
    url = options.check()
    differing = None if options.export_dir is None else _reference(options)
    records, first = [], {}
    for clients in options.clients:
        known = set(first)
        record, compared = measure(url, options, clients, first), ""
        if differing is not None:
            new = {asked: picture for asked, picture in first.items() if asked not in known}
            record["compared"] = len(new)
            record["wrong"] += differing(new)
            compared = f"{len(new)} compared with Pipeline's, "
        records.append(record)
        report(
            f"{clients:3d} clients: {record['pictures_per_second']:6.2f} pictures/s, "
            f"p50 {_seconds(record['p50'])}, p95 {_seconds(record['p95'])}, "
            f"{record['pictures']} pictures, {compared}{record['busy']} refused as busy, "
            f"{record['wrong']} wrong, {record['failed']} failed"
        )
    return records


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


@dataclass(frozen=True)
class Asked:
    """What is asked for besides the prompt, which is the same for all."""

    seed: int
    size: Size | None = None  # None: the application's first
    mixture: tuple[tuple[str, float], ...] = ()  # (an adapter's name, its scale)

    def call(self, options: LoadOptions) -> dict[str, Any]:
        """Return the parameters of the call."""
        call = {
            "prompt": options.prompt,
            "num_steps": options.num_steps,
            "guidance_scale": options.guidance_scale,
            "seed": self.seed,
        }
        if self.size is not None:
            call["height"], call["width"] = self.size
        if self.mixture:
            call["adapters"] = dict(self.mixture)
        return call


def mixtures(names: Sequence[str]) -> list[tuple[tuple[str, float], ...]]:
    """Draw mixtures of adapters at random, the same ones in every run; the first has none."""
    rng, found = random.Random(0), [()]
    while names and len(found) < MIXTURES:
        taken = rng.sample(list(names), rng.randint(1, len(names)))
        found.append(tuple((name, rng.choice(SCALES)) for name in taken))
    return found


def _reference(options: LoadOptions) -> Callable[[dict[Asked, np.ndarray]], int]:
    """Return a function that counts the pictures that `Pipeline` draws otherwise."""
    from sd_tf.runtime.pipeline import Pipeline  # TensorFlow, which nothing else here needs

    pipe = Pipeline.load(options.export_dir)

    def differing(pictures: dict[Asked, np.ndarray]) -> int:
        alike = defaultdict(list)  # what may share a batch
        for asked in pictures:
            alike[asked.size, asked.mixture].append(asked)
        count = 0
        for group in alike.values():
            call = group[0].call(options)
            call["prompt"] = [options.prompt] * len(group)
            call["seed"] = [asked.seed for asked in group]
            images = pipe(**call).images.astype("int16")
            drawn = dict(zip(group, images, strict=True))
            count += sum(not is_same(pictures[asked], drawn[asked]) for asked in group)
        return count

    return differing


@dataclass
class Seen:
    """What the clients of one measurement have seen together."""

    first: dict[Asked, np.ndarray]  # the picture that was given for the first to ask
    seconds: list[float] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


def measure(url, options: LoadOptions, clients: int, first: dict[Asked, np.ndarray]) -> dict:
    seen = Seen(first)
    start = time.perf_counter()
    threads = [
        threading.Thread(target=_ask, args=(url, options, number, start, seen))
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - start
    return {
        "clients": clients,
        "seconds": elapsed,
        "pictures": len(seen.seconds),
        "pictures_per_second": len(seen.seconds) / elapsed,
        "p50": statistics.median(seen.seconds) if seen.seconds else None,
        "p95": p95(seen.seconds),
        **{name: seen.counts[name] for name in ("busy", "wrong", "failed")},
    }


def _ask(url, options: LoadOptions, number: int, start: float, seen: Seen) -> None:
    """Ask as one client until the time is over."""
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=LONGEST)
    count, sizes, mixed = number, options.sizes or (None,), mixtures(options.adapters)
    rng, path = random.Random(number), f"{url.path.rstrip('/')}/generate"
    while time.perf_counter() - start < options.seconds:
        size = sizes[(count + count // SEEDS) % len(sizes)]
        asked = Asked(count % SEEDS, size, rng.choice(mixed))
        body = json.dumps(asked.call(options)).encode()
        begun = time.perf_counter()
        status, content = post(connection, path, body, options.token)
        taken = time.perf_counter() - begun
        picture = _picture_in(content) if status == 200 else None
        if picture is not None:
            count += 1
            with seen.lock:
                expected = seen.first.setdefault(asked, picture)
                seen.seconds.append(taken)
                seen.counts["wrong"] += not is_same(picture, expected)
        else:
            with seen.lock:
                seen.counts["busy" if status == 429 else "failed"] += 1
            time.sleep(BUSY_PAUSE)
    connection.close()


def _picture_in(content: bytes) -> np.ndarray | None:
    """Return the picture in an answer; None where it has none, as another server's."""
    try:
        return pixels(json.loads(content)["images"][0]["png"])
    except (ValueError, LookupError, TypeError, OSError):
        return None


def is_same(one: np.ndarray, other: np.ndarray) -> bool:
    """Tell whether two pictures differ by rounding alone."""
    return one.shape == other.shape and np.abs(one.astype("int16") - other).max() <= ROUNDING


def pixels(png: str) -> np.ndarray:
    image = Image.open(io.BytesIO(base64.b64decode(png)), formats=["PNG"])
    return np.asarray(image).astype("int16")


def post(
    connection: http.client.HTTPConnection, path: str, body: bytes, token: str | None = None
) -> tuple[int | None, bytes]:
    """Send a body; return the answer's status and content, or None and why there is no answer."""
    headers = {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()  # opened again by the next request
        return None, repr(error).encode()
