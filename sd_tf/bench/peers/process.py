"""Start workers, send them requests and read their replies."""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from sd_tf.bench.peers.engine import Job, NoGpuError
from sd_tf.bench.plan import BenchError
from sd_tf.bench.run import LOG_LINES, python_path

PATIENCE = 60  # seconds that a worker may take to end


class KilledError(BenchError):
    """The system ended a worker, as it does when memory runs out."""


def environment(job: Job) -> dict[str, str]:
    """Return a worker's environment: the same number of threads for all, a GPU only if wanted.

    Two processes share the GPU, so neither may take all of its memory.
    """
    gpu = job.device == "gpu"
    return {
        **os.environ,
        "PYTHONPATH": python_path(),
        "KERAS_BACKEND": job.kind.backend,
        "OMP_NUM_THREADS": str(job.threads),
        "TF_NUM_INTRAOP_THREADS": str(job.threads),
        "JAX_PLATFORMS": "cuda" if gpu else "cpu",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "HF_HUB_OFFLINE": "1",
        **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""}),
    }


class Process:
    """A worker process, which ends with the `with` block."""

    def __init__(self, job: Job, log: Path):
        self.job, self.label, self._log = job, job.label, log
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "sd_tf.bench.peers.worker"]
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                [*command, json.dumps(dataclasses.asdict(job))],
                env=environment(job),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, do: str, **arguments) -> dict:
        """Call the worker's method `do`, and return its reply."""
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._line()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            if status == -signal.SIGKILL:
                raise KilledError(
                    f"The system ended the process of {self.label}, "
                    f"as it does when memory runs out."
                )
            tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            raise BenchError("\n".join([f"The process ended with status {status}:", *tail]))
        reply = json.loads(line)
        if "error" in reply:
            kind = NoGpuError if reply["kind"] == NoGpuError.__name__ else BenchError
            raise kind(f"{reply['kind']}: {reply['error']} (log: {self._log})")
        return reply

    def _line(self) -> str:
        """Return the worker's next line, or nothing if it ended.

        Processes that it started may outlive it, and hold its end of the pipe.
        """
        stdout = self._process.stdout
        while True:
            has_ended = self._process.poll() is not None
            if select.select([stdout], [], [], 0.0 if has_ended else 1.0)[0]:
                return stdout.readline()
            if has_ended:
                return ""
