"""Run a plan: one process for each job, in turn.

Nothing here imports TensorFlow: the jobs' processes do, so that neither memory peaks nor compiled
code pass from one to the next.
"""

import base64
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import sd_tf
from sd_tf.bench.plan import BenchError, Job, LeftOut, Plan

JOB, RESULT, LOG = "job.json", "result.json", "log.txt"
TIMED_RUNS = "sd_tf.bench: the timed runs begin"  # a line of the log
# With these settings TensorFlow logs one line for each cluster that XLA compiles.
LOG_COMPILATIONS = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "device_compilation_profiler=1"}
COMPILED = re.compile(
    r"device_compilation_profiler\.cc:\d+\] Compiled \S+ .*?compile time: (\d+) us"
)
LOG_LINES = 12


def run_plan(plan: Plan, progress: Callable[[str], None] = lambda text: None) -> dict:
    """Measure all jobs in turn.

    A variant that fails is left out, with its reason; if all fail, BenchError is raised.
    """
    variants, left_out = [], list(plan.left_out)
    load_average = os.getloadavg()[0]  # from before, to show other work on the machine
    for number, job in enumerate(plan.jobs, start=1):
        progress(f"[{number}/{len(plan.jobs)}] {job.name} …")
        try:
            variants.append(run_job(job))
        except BenchError as error:
            left_out.append(LeftOut(job.name, str(error), failed=True))
            progress(f"{job.name} failed")
    if not variants:
        reasons = "\n".join(item.reason for item in left_out)
        raise BenchError(f"Nothing could be measured. {reasons}".strip())
    return {
        "load_average": load_average,
        "variants": variants,
        "left_out": [dataclasses.asdict(item) for item in left_out],
    }


def run_job(job: Job) -> dict:
    """Measure one job in a new process, so that peak memory and compilations are its own."""
    environment = {
        **os.environ,
        **LOG_COMPILATIONS,
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": python_path(),
    }
    with tempfile.TemporaryDirectory(prefix="sd_tf_bench_") as name:
        folder = Path(name)
        (folder / JOB).write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        with open(folder / LOG, "wb") as log:
            command = [sys.executable, "-m", "sd_tf.bench.timing", str(folder)]
            status = subprocess.run(command, env=environment, stdout=log, stderr=log).returncode
        log = (folder / LOG).read_text(encoding="utf-8", errors="replace")
        if not (folder / RESULT).is_file():
            tail = "\n".join(log.splitlines()[-LOG_LINES:])
            raise BenchError(f"The process ended with status {status}. The end of its log:\n{tail}")
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        if "error" in result:
            raise BenchError(result["error"])
        result["pictures"] = [
            base64.b64encode(path.read_bytes()).decode() for path in sorted(folder.glob("*.png"))
        ]
    return {
        "name": job.name,
        **dataclasses.asdict(job),
        **result,
        "compilations": compilations(log, job.jit_compile and not job.in_graph),
    }


def python_path() -> str:
    """Return a PYTHONPATH with which new processes find this package, wherever they run."""
    home = str(Path(sd_tf.__file__).parent.parent)
    return os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])


def compilations(log: str, expected: bool) -> dict | None:
    """Count the clusters that XLA compiled; None if some were expected and none are logged."""
    first, timed = (
        [int(microseconds) / 1e6 for microseconds in COMPILED.findall(part)]
        for part in log.split(TIMED_RUNS)
    )
    if expected and not first:
        return None
    return {"first_call": len(first), "first_call_seconds": sum(first), "timed_runs": len(timed)}
