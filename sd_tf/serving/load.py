"""`python -m sd_tf.serving load --url http://…`: how much a running application takes.

So many clients at once, each asking for the next picture when it has one, for so long. Every answer
is compared with the first one for its seed: a mixed-up picture is counted, not averaged away. Two
pictures are the same where they differ by rounding alone, which can depend on the place in a batch.
"""

import argparse
import base64
import http.client
import io
import json
import statistics
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

SEEDS = 16  # different pictures that are asked for
ROUNDING = 1  # of 255 levels
BUSY_PAUSE = 0.2  # seconds after an answer of "busy"
MOST_CLIENTS, LONGEST = 256, 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the application")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each number of clients")
    parser.add_argument("--prompt", default="a large red star on a dark blue background")
    parser.add_argument("--num_steps", type=int, default=20)
    parser.add_argument("--guidance_scale", type=float, default=4.0)
    parser.add_argument("--output", help="JSON file")


def run(options: argparse.Namespace) -> int:
    if not 0 < options.seconds <= LONGEST:
        raise ValueError(f"--seconds is above 0 to {LONGEST:g}. Received: {options.seconds}")
    for clients in options.clients:
        if not 1 <= clients <= MOST_CLIENTS:
            raise ValueError(f"--clients are 1 to {MOST_CLIENTS} each. Received: {clients}")
    url = urlsplit(options.url)
    if url.scheme != "http" or not url.hostname:
        raise ValueError(f"--url is http://host:port. Received: {options.url!r}")
    records, first = [], {}
    for clients in options.clients:
        record = measure(url, options, clients, first)
        records.append(record)
        print(
            f"{clients:3d} clients: {record['pictures_per_second']:6.2f} pictures/s, "
            f"p50 {record['p50']:.2f} s, p95 {record['p95']:.2f} s, "
            f"{record['pictures']} pictures, {record['busy']} told to come back, "
            f"{record['wrong']} wrong, {record['failed']} failed",
            flush=True,
        )
    if options.output is not None:
        Path(options.output).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return int(any(record["wrong"] or record["failed"] for record in records))


@dataclass
class Seen:
    """By all clients of one measurement."""

    first: dict[int, np.ndarray]  # seed → the picture that was given for it
    seconds: list[float] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


def measure(url, options: argparse.Namespace, clients: int, first: dict[int, np.ndarray]) -> dict:
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
    times = sorted(seen.seconds) or [float("nan")]
    return {
        "clients": clients,
        "seconds": elapsed,
        "pictures": len(seen.seconds),
        "pictures_per_second": len(seen.seconds) / elapsed,
        "p50": statistics.median(times),
        "p95": times[min(len(times) - 1, round(0.95 * len(times)))],
        **{name: seen.counts[name] for name in ("busy", "wrong", "failed")},
    }


def _ask(url, options: argparse.Namespace, number: int, start: float, seen: Seen) -> None:
    """One client, until the time is over."""
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=LONGEST)
    asked = number
    while time.perf_counter() - start < options.seconds:
        seed = asked % SEEDS
        body = {
            "prompt": options.prompt,
            "num_steps": options.num_steps,
            "guidance_scale": options.guidance_scale,
            "seed": seed,
        }
        begun = time.perf_counter()
        status, content = _post(connection, f"{url.path.rstrip('/')}/generate", body)
        taken = time.perf_counter() - begun
        if status == 200:
            asked += 1
            picture = _pixels(content["images"][0]["png"])
            with seen.lock:
                expected = seen.first.setdefault(seed, picture)
                seen.seconds.append(taken)
                seen.counts["wrong"] += int(np.abs(picture - expected).max() > ROUNDING)
        else:
            with seen.lock:
                seen.counts["busy" if status == 429 else "failed"] += 1
            time.sleep(BUSY_PAUSE)
    connection.close()


def _pixels(png: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png)))).astype("int16")


def _post(connection: http.client.HTTPConnection, path: str, body: dict):
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError):
        connection.close()  # opened again by the next request
        return None, None
