"""`python -m sd_tf.bench.peers.worker JOB`: load one engine and answer requests, line by line.

A request is a line {"do": …}; the reply is its result or {"kind": …, "error": …}, the class and the
message of an error. The worker ends at the end of its input, also while it works. Output of
libraries goes to the log, which is this process's error output.
"""

import contextlib
import importlib
import json
import os
import queue
import sys
import threading
import traceback
from pathlib import Path

import numpy as np

from sd_tf.bench.peers.engine import Job, Loaded
from sd_tf.bench.timing import peak_memory, since_start, timed


def main(argument: str) -> None:
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with contextlib.suppress(OSError):  # out of memory, the kernel kills this process first
            Path("/proc/self/oom_score_adj").write_text("900", encoding="utf-8")
        worker, lines = Worker(Job(**json.loads(argument))), queue.SimpleQueue()
        threading.Thread(target=_read, args=(lines,), daemon=True).start()
        while True:
            print(json.dumps(worker.answer(json.loads(lines.get()))), file=replies, flush=True)


def _read(lines: queue.SimpleQueue) -> None:
    """Hand over each request; end the process with the last, for its caller is gone."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


class Worker:
    """The engine of one job; each of its public methods answers one kind of request."""

    def __init__(self, job: Job):
        self.job = job
        self._loaded: Loaded | None = None

    def answer(self, message: dict) -> dict:
        try:
            return getattr(self, message.pop("do"))(**message)
        except Exception as error:
            traceback.print_exc()
            return {"kind": type(error).__name__, "error": str(error)}

    def load(self) -> dict:
        """Load the engine; return the seconds since the process started, but those of compiling."""
        name = f"sd_tf.bench.peers.engines.{self.job.kind.module}"
        self._loaded = loaded = importlib.import_module(name).load(self.job)
        return {
            "load_seconds": since_start() - loaded.compile_seconds,
            "compile_seconds": loaded.compile_seconds,
            "devices": loaded.devices,
            "precision": loaded.precision,
        }

    def run(self, stage: str, save: str | None = None) -> dict:
        known = self._loaded.stages[stage]
        result, seconds = timed(known.run)
        if save is not None:
            np.save(save, known.output(result))
        if known.less is not None:
            seconds -= timed(known.less)[1]
        return {"seconds": seconds / known.calls}

    def draw(self, steps: int) -> dict:
        step_seconds, seconds = timed(lambda: self._loaded.draw(steps))
        return {"seconds": seconds, "step_seconds": step_seconds}

    def matmul(self) -> dict:
        return {} if self._loaded.matmul is None else self._loaded.matmul()

    def memory(self) -> dict:
        return {
            "peak_memory_bytes": peak_memory(),
            "peak_device_memory_bytes": self._loaded.device_memory(),
        }


if __name__ == "__main__":
    main(sys.argv[1])
