"""What is done to the application, and when: kills, replacements, and a damaged replacement."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sd_tf.bench.application import Application, command_line, descendants, kill, memory, name_of
from sd_tf.bench.soak.exports import put
from sd_tf.bench.soak.tally import FRONT, Tally

KILLED = ("diffusion_model", "text_encoder", "decoder", "image_encoder", FRONT)  # in turn
DAMAGED = "damaged"
SAMPLE_SECONDS = 0.5


@dataclass(frozen=True)
class Event:
    """Something that is done `at` seconds after the start."""

    at: float
    name: str
    do: Callable[[], None]


@dataclass(frozen=True)
class Chaos:
    """Events of a soak: a kill every `kill_every` seconds, replacements evenly in between."""

    application: Application
    exports: Mapping[str, Path]
    tally: Tally
    seconds: float
    kill_every: float
    replacements: int

    def replaced_by(self) -> list[str]:
        """Name what replaces the export: the others in turn, and after the first a damaged one."""
        names = list(self.exports)
        good = [names[(turn + 1) % len(names)] for turn in range(self.replacements)]
        return [*good[:1], DAMAGED, *good[1:]] if self.replacements > 1 else good

    def events(self) -> list[Event]:
        turns, names = [], self.replaced_by()
        for turn in range(math.ceil(self.seconds / self.kill_every) - 1):
            name = KILLED[turn % len(KILLED)]
            at = self.kill_every * (turn + 1)
            turns.append(Event(at, f"kill {name}", lambda name=name: self._kill(name)))
        for turn, name in enumerate(names):
            at = self.seconds * (turn + 1) / (len(names) + 1)
            turns.append(Event(at, f"replace by {name}", lambda name=name: self._replace(name)))
        return sorted(turns, key=lambda event: event.at)

    def run(self, report: Callable[[str], None]) -> "Samples":
        """Do all events, each at its time; sample the processes' memory until the end."""
        waiting, samples = self.events(), Samples()
        while (now := self.tally.now()) < self.seconds:
            samples.take(now, self.application.process.pid)
            if waiting and waiting[0].at <= now:
                event = waiting.pop(0)
                report(f"{now:6.1f} s  {event.name}; {self.tally.total('right')} right so far")
                event.do()
            until = min(self.seconds, now + SAMPLE_SECONDS, *(event.at for event in waiting[:1]))
            time.sleep(max(0.0, until - self.tally.now()))
        return samples

    def _kill(self, deployment: str) -> None:
        """Kill a replica, if the deployment has one that is not starting at the moment."""
        for pid in self.application.replicas(deployment)[:1]:
            self.tally.killed.append((self.tally.now(), deployment))
            kill(pid)

    def _replace(self, name: str) -> None:
        damaged = name == DAMAGED
        export = next(iter(self.exports.values())) if damaged else self.exports[name]
        put(export, self.application.export_dir, damaged)


class Samples:
    """The memory of the application's processes over time."""

    def __init__(self):
        self.taken: list[tuple[float, str, float]] = []  # seconds, name, megabytes

    def take(self, now: float, root: int) -> None:
        for pid in (root, *descendants(root)):
            name, megabytes = name_of(command_line(pid)), memory(pid)
            if name and megabytes is not None:
                self.taken.append((now, name, megabytes))

    def names(self) -> list[str]:
        return sorted({name for _, name, _ in self.taken})

    def peak(self, name: str, begin: float, end: float) -> float | None:
        """Return the most megabytes of a process of this name in a span of time."""
        found = [mb for at, of, mb in self.taken if of == name and begin <= at < end]
        return max(found, default=None)
