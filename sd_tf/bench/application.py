"""Start the Ray Serve application by its command, and find its processes."""

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sd_tf.bench.plan import BenchError
from sd_tf.bench.run import python_path

START_SECONDS, STOP_SECONDS, STOP_PAUSE = 400, 120, 0.5
REPLICA = re.compile(r"ray::ServeReplica:sd_tf:(\w+)")
PROC = Path("/proc")


@dataclass(frozen=True)
class Application:
    """A running application; its processes are those that its command started."""

    url: str
    grpc: str  # host:port
    metrics: str | None
    export_dir: Path
    process: subprocess.Popen

    def replicas(self, deployment: str) -> list[int]:
        """Return the process ids of a deployment's replicas."""
        return replicas(self.process.pid, deployment)


@contextlib.contextmanager
def serving(
    export_dir: Path, folder: Path, *flags: str, address: str | None = None
) -> Iterator[Application]:
    """Start the application on free ports, and stop it when the block ends.

    Args:
        folder: where its log is written.
        address: of a cluster to deploy to, instead of a Ray of its own.
    """
    http, grpc, metrics = free_ports(3)
    log = folder / "serving.log"
    where = ["--metrics_port", str(metrics)] if address is None else ["--address", address]
    arguments = [
        *(sys.executable, "-m", "sd_tf", "serve", "ray", "--export_dir", str(export_dir)),
        *("--http_port", str(http), "--grpc_port", str(grpc), *where, *flags),
    ]
    with open(log, "wb") as output:
        environment = {**os.environ, "PYTHONPATH": python_path()}
        process = subprocess.Popen(arguments, stdout=output, stderr=output, env=environment)
    application = Application(
        f"http://127.0.0.1:{http}",
        f"127.0.0.1:{grpc}",
        f"http://127.0.0.1:{metrics}/metrics" if address is None else None,
        export_dir,
        process,
    )
    try:
        end = time.monotonic() + START_SECONDS
        while "the page:" not in (said := log.read_text()):
            if process.poll() is not None:
                raise BenchError(f"The application ended. Its log:\n{said}")
            if time.monotonic() > end:
                raise BenchError(
                    f"The application has not started in {START_SECONDS} s. Its log:\n{said}"
                )
            time.sleep(0.5)
        yield application
    except BaseException as error:  # which is what its caller is to see, however stopping goes
        if killed := stop(process):
            error.add_note(_not_ended(killed))
        raise
    if killed := stop(process):
        raise BenchError(_not_ended(killed))


def stop(process: subprocess.Popen) -> list[str]:
    """Stop an application, and kill what has not ended in time; return the commands of that."""
    started = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    while time.monotonic() < end:
        left = [pid for pid in started if "ray" in command_line(pid)]
        if process.poll() is not None and not left:
            return []
        time.sleep(STOP_PAUSE)
    if process.poll() is None:
        left = [process.pid, *{*left, *descendants(process.pid)}]
    commands = [command for pid in left if (command := command_line(pid))]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            kill(pid)
    process.wait()
    return commands


def _not_ended(commands: list[str]) -> str:
    return f"These had not ended in {STOP_SECONDS} s, and were killed: {commands}"


def replicas(root: int, deployment: str) -> list[int]:
    """Return the process ids of a deployment's replicas among what that process started."""
    return [pid for pid in descendants(root) if name_of(command_line(pid)) == deployment]


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes that a process started, and that those started."""
    children = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


def command_line(pid: int) -> str:
    """Return a process's command, or "" where there is no such process or it has ended."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def name_of(command: str) -> str:
    """Return a short name for a process of the application: its deployment, actor or program."""
    if found := REPLICA.match(command):
        return found[1]
    first, *rest = command.split() or [""]
    if first.startswith("ray::"):
        return re.split(r"\W", first.removeprefix("ray::"))[0]
    scripts = [Path(word).stem for word in rest if word.endswith(".py")]
    modules = [module for flag, module in itertools.pairwise(rest) if flag == "-m"]
    return next(iter([*modules, *scripts]), Path(first).name)


def memory(pid: int) -> float | None:
    """Return the megabytes of a process that it shares with no other, or None where it ended."""
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", (PROC / str(pid) / "status").read_text())
    except OSError:
        return None
    return int(found[1]) / 1024 if found else None


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
