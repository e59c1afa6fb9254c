"""Run a soak: start the application, attack it, and judge what came of it."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sd_tf.bench.application import Application, serving
from sd_tf.bench.peers import apart
from sd_tf.bench.plan import BenchError
from sd_tf.bench.soak import exports as soaked
from sd_tf.bench.soak.chaos import DAMAGED, Chaos
from sd_tf.bench.soak.clients import PATIENCE, Client, Target
from sd_tf.bench.soak.tally import Tally
from sd_tf.bench.soak.verdict import judge
from sd_tf.serving.load import BUSY_PAUSE, MOST_CLIENTS

RECOVERY_SECONDS = 180.0


@dataclass(frozen=True)
class SoakOptions:
    """How long, under how many clients, and what is done to the application."""

    minutes: float = 10.0
    clients: int = 16
    kill_every: float = 20.0  # seconds
    replacements: int = 3  # of the export by an intact one; a damaged one comes in between
    replicas: int = 2  # of each model that draws, so that one is left when the other is killed
    work: str = "out/soak"  # folder for exports and compiled code, used again

    def check(self) -> None:
        for name, least, most in (
            ("minutes", 0, 24 * 60),
            ("kill_every", 0, 24 * 3600),
        ):
            value = getattr(self, name)
            if not least < value <= most:
                raise BenchError(f"`{name}` is above {least} to {most}. Received: {value}")
        for name, least, most in (
            ("clients", 1, MOST_CLIENTS),
            ("replacements", 0, 100),
            ("replicas", 1, 16),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise BenchError(f"`{name}` is from {least} to {most}. Received: {value}")


def soak(options: SoakOptions, report: Callable[[str], None]) -> dict:
    """Make the exports, serve one of them, and attack the application; return the figures."""
    options.check()
    work = Path(options.work).resolve()
    report(f"exporting to {work}, and drawing what is expected")
    exports = soaked.make(work)
    served, cache = work / "served", work / "compiled"
    expected = apart(soaked.expected, exports, cache)  # TensorFlow's memory is not to stay here
    soaked.put(next(iter(exports.values())), served)
    report("starting the application")
    flags = ["--compile_cache", str(cache), "--cpus", "diffusion_model=0.1"]
    for name in soaked.COMPONENTS:
        flags += ["--replicas", f"{name}={options.replicas}"]
    with serving(served, work, *flags) as application:
        return attack(application, exports, expected, options, report)


def attack(
    application: Application,
    exports: Mapping[str, Path],
    expected: Mapping[str, soaked.Pictures],
    options: SoakOptions,
    report: Callable[[str], None],
) -> dict:
    """Attack an application that serves the first of the exports; return the figures."""
    seconds, tally = 60 * options.minutes, Tally(expected)
    target = Target(urlsplit(application.url), next(iter(exports.values())), tally)
    chaos = Chaos(application, exports, tally, seconds, options.kill_every, options.replacements)
    clients = [Client(target, number) for number in range(options.clients)]
    pool = ThreadPoolExecutor(options.clients)
    running = [pool.submit(client.run) for client in clients]
    try:
        samples = chaos.run(report)
    finally:
        target.stop.set()
        done, hanging = wait(running, timeout=2 * PATIENCE)
        pool.shutdown(wait=False)
    for client in done:
        client.result()
    last = next(iter(exports))
    for name in chaos.replaced_by():
        last = last if name == DAMAGED else name
    report(f"{tally.now():6.1f} s  waiting for a picture of the {last} export")
    recovery = until_drawn(Target(target.url, target.export_dir, tally), last)
    return judge(tally, samples, chaos, len(hanging), recovery)


def until_drawn(target: Target, export: str) -> float | None:
    """Return the seconds until this export draws a picture, or None where it does not."""
    start, client = target.tally.now(), Client(target, 1_000_000)
    while target.tally.now() - start < RECOVERY_SECONDS:
        if client.ask() and target.tally.drawn[-1][2] == export:
            return target.tally.now() - start
        time.sleep(BUSY_PAUSE)
    return None
