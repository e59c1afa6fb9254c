"""Processes for tests: commands that import TensorFlow once for several, and runs of two hosts."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# TensorFlow is imported, and has run nothing yet: each child gets threads of its own.
FORKED = """
import json, os, runpy, sys, tempfile
import tensorflow

script, calls = sys.argv[1], json.loads(sys.argv[2])
results = []
for arguments in calls:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            sys.argv = [script, *arguments]
            sys.path[0] = os.path.dirname(script)
            runpy.run_path(script, run_name="__main__")
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0), err.seek(0)
        results.append((code, out.read(), err.read()))
print(json.dumps(results))
"""


def run(script: Path, *calls: list[str]) -> list[subprocess.CompletedProcess]:
    """A Python script, called with each of these lists of arguments."""
    process = subprocess.run(
        [sys.executable, "-c", FORKED, str(script), json.dumps(calls)],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers = json.loads(process.stdout.splitlines()[-1])
    return [
        subprocess.CompletedProcess(call, *answer)
        for call, answer in zip(calls, answers, strict=True)
    ]


def of_make(target: str, command: str) -> list[list[str]]:
    """The arguments of each `sd-tf COMMAND …` that a target of the Makefile runs."""
    dry = ["make", "--dry-run", target]
    told = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = told.replace("\\\n", " ").splitlines()
    called = [line.partition("bin/sd-tf ")[2] for line in lines]
    return [shlex.split(call) for call in called if call.startswith(f"{command} ")]


def on_two_hosts(*arguments: str) -> list[str]:
    """What each of two hosts prints that run a command of `sd-tf train` together, on JAX's CPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    # They compile more than they run.
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    hosts = []
    for number in range(2):
        place = ["--coordinator", address, "--hosts", "2", "--host", str(number)]
        command = [sys.executable, "-m", "sd_tf", "train", *arguments, "--backend", "jax", *place]
        hosts.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [host.communicate(timeout=900)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    assert "step 4/4" in said[0] and "step" not in said[1], "the first one speaks"
    return said
