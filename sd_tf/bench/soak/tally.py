"""What clients have seen together: pictures by the export that drew them, errors by their kind."""

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from sd_tf.bench.soak.exports import Ask, Pictures
from sd_tf.serving.load import is_same

BUSY, CLEAN = {429}, {503, 504}
REFUSED = range(400, 500)
MOST_EXAMPLES = 6  # of each outcome
FRONT = "front"
FRONT_GRACE = 60.0  # seconds in which a new front has to take the killed one's place


@dataclass
class Tally:
    """The outcomes of all requests.

    Outcomes are `right`, `mixed` (a picture that no export draws), `busy`, `clean` (an error that
    says so), `lost` (with a front that was killed), `unclean` (any other end) and `left`.
    """

    expected: Mapping[str, Pictures]
    start: float = field(default_factory=time.monotonic)
    counts: Counter = field(default_factory=Counter)  # (kind of client, outcome) → requests
    drawn: list[tuple[float, float, str]] = field(default_factory=list)  # begun, done, export
    examples: dict[str, list[str]] = field(default_factory=dict)  # of what breaks the rules
    killed: list[tuple[float, str]] = field(default_factory=list)  # when, a replica of what
    lock: threading.Lock = field(default_factory=threading.Lock)

    def now(self) -> float:
        return time.monotonic() - self.start

    def add(self, kind: str, outcome: str, example: str | None = None) -> None:
        with self.lock:
            self.counts[kind, outcome] += 1
            if example is not None:
                kept = self.examples.setdefault(outcome, [])
                if len(kept) < MOST_EXAMPLES:
                    kept.append(f"{self.now():.1f} s, {kind}, {outcome}: {example}")

    def picture(self, kind: str, ask: Ask, image: np.ndarray, begun: float) -> None:
        """Count a picture as that of one export, or as a mixture."""
        for name, pictures in self.expected.items():
            if is_same(pictures[ask], image):
                with self.lock:
                    self.drawn.append((begun, self.now(), name))
                self.add(kind, "right")
                return
        differences = {
            name: int(np.abs(pictures[ask].astype(int) - image).max())
            for name, pictures in self.expected.items()
            if pictures[ask].shape == image.shape
        }
        self.add(kind, "mixed", f"{ask}, largest differences {differences}")

    def error(self, kind: str, status: int | None, content: bytes, begun: float) -> None:
        """Count an answer that is no picture."""
        if status in BUSY:
            self.add(kind, "busy")
        elif status in CLEAN and _says_why(content):
            self.add(kind, "clean")
        else:
            self.ended(kind, f"{status}: {content[:200].decode(errors='replace')}", begun)

    def ended(self, kind: str, example: str, begun: float) -> None:
        """Count a request that ended without an answer, or with one that says nothing."""
        if any(name == FRONT and begun - FRONT_GRACE <= at for at, name in list(self.killed)):
            self.add(kind, "lost")
        else:
            self.add(kind, "unclean", example)

    def total(self, *outcomes: str) -> int:
        with self.lock:
            counts = dict(self.counts)
        return sum(count for (_, outcome), count in counts.items() if outcome in outcomes)


def _says_why(content: bytes) -> bool:
    try:
        answer = json.loads(content)
    except ValueError:
        return False
    return isinstance(answer, dict) and isinstance(answer.get("error"), str)
