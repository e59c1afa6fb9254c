"""The Ray Serve application as its command starts it, in processes of its own."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS, STOP_SECONDS = 400, 60


@dataclass(frozen=True)
class Served:
    url: str
    grpc: str  # host:port
    metrics: str | None
    export_dir: Path
    process: subprocess.Popen

    def replicas(self, deployment: str) -> list[int]:
        """Process ids of a deployment's replicas, of this application alone."""
        return replicas(self.process.pid, deployment)


@contextmanager
def serving(export_dir: Path, folder: Path, *flags: str, address: str | None = None):
    """`folder`: for its log; `address`: of a cluster, instead of a Ray of its own."""
    http, grpc, metrics = free_ports(3)
    log = folder / "serving.log"
    where = ["--metrics_port", str(metrics)] if address is None else ["--address", address]
    arguments = [
        *(sys.executable, "-m", "sd_tf.serving", "ray", "--export_dir", str(export_dir)),
        *("--http_port", str(http), "--grpc_port", str(grpc), *where, *flags),
    ]
    with open(log, "wb") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=output)
    served = Served(
        f"http://127.0.0.1:{http}",
        f"127.0.0.1:{grpc}",
        f"http://127.0.0.1:{metrics}/metrics" if address is None else None,
        export_dir,
        process,
    )
    try:
        end = time.monotonic() + START_SECONDS
        while "the page:" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.5)
        yield served
    finally:
        mine = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_SECONDS)
        end = time.monotonic() + STOP_SECONDS
        while left := [pid for pid in mine if re.search("ray", command_line(pid))]:
            assert time.monotonic() < end, [command_line(pid) for pid in left]
            time.sleep(0.5)


def replicas(root: int, deployment: str) -> list[int]:
    """Process ids of a deployment's replicas among what that process started."""
    title = f"ray::ServeReplica:sd_tf:{deployment}"
    return [pid for pid in descendants(root) if command_line(pid).startswith(title)]


def descendants(pid: int) -> list[int]:
    children = {}
    for entry in Path("/proc").iterdir():
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
    """Empty where there is no such process, or only its exit status."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def in_background(work):
    """Calls `work(stop)` in a thread until the block ends; its exception is raised there."""
    stop, errors = threading.Event(), []

    def run():
        try:
            work(stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
