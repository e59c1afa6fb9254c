"""Commands that import TensorFlow, which takes longer than they do: imported once for several."""

import json
import os
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
