"""Kill exports (-9) at random moments: `python -m tests.kill_exports --kills 100 [-- FLAG …]`.

Each export is a whole run of `serialize_savedmodels.py` with the flags behind `--`: into nothing,
over an export, or of one of its components. Afterwards the target is complete, or absent where
nothing was there before. The last run is not killed: it succeeds, and nothing is left beside it.
"""

import argparse
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO

from sd_tf.runtime.chain import open_export

SCRIPT = Path(__file__).parent.parent / "serialize_savedmodels.py"
INTO_NOTHING, OVER, PART = (), ("--overwrite",), ("--components=decoder",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--whole_every",
        type=int,
        default=2,
        help="every how many runs export all components; the others replace one, which is faster",
    )
    parser.add_argument(
        "--fork",
        action="store_true",
        help="fork each run from a process that has imported TensorFlow, which is faster",
    )
    parser.add_argument("flags", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+") as log:
        target = Path(folder) / "exports" / "mine"
        target.parent.mkdir()
        runs = Runs([f"--output_dir={target}", *options.flags], options.fork, log)
        killed = kill(runs, target, options)
    print(f"{killed} of {options.kills} runs were killed, and left no torn export", flush=True)


class Runs:
    """Starts runs of the script, and waits for their end."""

    def __init__(self, flags: list[str], fork: bool, log: IO):
        self.flags, self.fork, self.log = flags, fork, log
        if fork:
            import tensorflow  # noqa: F401  (each child gets threads of its own when it runs one)

            import sd_tf.export  # noqa: F401

    def start(self, kind: tuple[str, ...]) -> int:
        """Start a run; return its process id."""
        arguments = [str(SCRIPT), *self.flags, *kind]
        if not self.fork:
            both = [(os.POSIX_SPAWN_DUP2, self.log.fileno(), number) for number in (1, 2)]
            command = [sys.executable, *arguments]
            return os.posix_spawn(sys.executable, command, os.environ, file_actions=both)
        child = os.fork()
        if child == 0:
            for number in (1, 2):
                os.dup2(self.log.fileno(), number)
            os._exit(_run(arguments))
        return child

    def wait(self, run: int) -> bool:
        """Wait for a run's end; return whether it was killed, and raise if it failed."""
        status = os.waitstatus_to_exitcode(os.waitpid(run, 0)[1])
        if status not in (0, -signal.SIGKILL):
            self.log.seek(0)
            sys.exit(f"A run ended with status {status}:\n{self.log.read()[-4000:]}")
        return status != 0


def _run(arguments: list[str]) -> int:
    """Run the script in this process; return its exit status."""
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr, flush=True)
            return 1
        return end.code or 0
    except Exception:  # as an interpreter ends: a forked child must not go on in the parent's code
        traceback.print_exc()
        return 1
    return 0


def kill(runs: Runs, target: Path, options: argparse.Namespace) -> int:
    """Start and kill runs, check what each leaves, and return how many did not end before."""
    seconds = {}
    for kind in (INTO_NOTHING, PART):
        began = time.monotonic()
        runs.wait(runs.start(kind))
        seconds[kind] = time.monotonic() - began
    seconds[OVER] = seconds[INTO_NOTHING]
    complete = open_export(target)[0].components.keys()
    kept, moments, killed = target.with_name("kept"), random.Random(options.seed), 0
    for number in range(options.kills):
        whole, is_part = divmod(number, options.whole_every)
        kind = PART if is_part else (INTO_NOTHING, OVER)[whole % 2]
        if kind is INTO_NOTHING:
            target.rename(kept)
        run = runs.start(kind)
        moment = moments.uniform(0, 1.1 * seconds[kind])
        time.sleep(moment)
        os.kill(run, signal.SIGKILL)
        if runs.wait(run):
            killed += 1
        else:  # the machine may have become faster than it was when the first runs were timed
            seconds[kind] = min(seconds[kind], moment)
        if target.exists():
            check(target, complete)
        elif kind is not INTO_NOTHING:
            sys.exit(f"Killed after {moment:.2f} s, the run {' '.join(kind)} left no export.")
        if kind is INTO_NOTHING:
            if target.exists():
                shutil.rmtree(target)
            kept.rename(target)
    runs.wait(runs.start(OVER))
    check(target, complete)
    if (found := sorted(os.listdir(target.parent))) != [f".{target.name}.lock", target.name]:
        sys.exit(f"Beside the export, runs that were killed left {', '.join(found)}.")
    return killed


def check(target: Path, complete) -> None:
    """Raise if the export is not whole."""
    manifest, _ = open_export(target)
    manifest.check_files(target)
    if manifest.components.keys() != complete:
        sys.exit(f"The export has the components {', '.join(manifest.components)} alone.")


if __name__ == "__main__":
    main()
