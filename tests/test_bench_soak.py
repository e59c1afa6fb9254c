"""The soak: that it finds what it looks for, on a small server that can be told to misbehave."""

import base64
import contextlib
import io
import json
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from sd_tf.bench import application
from sd_tf.bench.application import (
    Application,
    command_line,
    descendants,
    memory,
    name_of,
    serving,
)
from sd_tf.bench.plan import BenchError
from sd_tf.bench.soak import SoakOptions, table
from sd_tf.bench.soak.chaos import Chaos, Samples
from sd_tf.bench.soak.exports import ASKS, CHANGED, NAMES, Ask, make_checkpoints, put
from sd_tf.bench.soak.soak import attack
from sd_tf.bench.soak.tally import FRONT_GRACE, Tally
from sd_tf.bench.soak.verdict import broken, growth
from sd_tf.cli.main import main
from tests.exports import micro_export, shared_export

LEVELS = np.random.default_rng(0)
EXPECTED = {
    name: {ask: LEVELS.integers(0, 256, (8, 8, 3), "uint8") for ask in ASKS}
    for name in ("first", "second")
}


def png(levels) -> str:
    file = io.BytesIO()
    Image.fromarray(levels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@contextlib.contextmanager
def server(fault=lambda number: None):
    """An application that draws with the first export. `fault(number of a picture)` may
    give (status, content) to answer instead.
    """
    lock, numbers = threading.Lock(), iter(range(1_000_000))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.answer(404, b'{"error": "Servable not found"}')

        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path != "/generate":
                return self.answer(404, b'{"error": "Servable not found"}')
            try:
                asked = json.loads(body)
                ask = Ask(asked["prompt"], asked["num_steps"], asked["seed"])
                image = png(EXPECTED["first"][ask])
            except (ValueError, KeyError, TypeError):
                return self.answer(422, b'{"error": "no call"}')
            if "previews" not in asked:
                with lock:
                    answer = fault(next(numbers))
                if answer is not None:
                    return self.answer(*answer)
                return self.answer(200, json.dumps({"images": [{"png": image}]}).encode())
            events = (("accepted", {}), ("progress", {}), ("image", {"png": image}), ("done", {}))
            lines = [f"event: {name}\ndata: {json.dumps(content)}\n\n" for name, content in events]
            return self.answer(200, "".join(lines).encode())

        def answer(self, status, content):
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def handle(self):
            with contextlib.suppress(ConnectionError):  # clients leave
                super().handle()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}).start()
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            url = f"http://127.0.0.1:{http.server_port}"
            yield Application(url, "", None, shared_export(), process)
            process.communicate(b"\n")
        http.shutdown()


def soaked(fault=lambda number: None, seconds=1.5):
    options = SoakOptions(minutes=seconds / 60, clients=6, kill_every=60, replacements=0)
    with server(fault) as application:
        exports = {"first": shared_export(), "second": shared_export()}
        return attack(application, exports, EXPECTED, options, lambda line: None)


def test_an_application_that_keeps_the_rules():
    figures = soaked(seconds=4)
    assert figures["broken"] == [] and "every rule was kept" in table(figures)
    outcomes = figures["outcomes"]
    assert outcomes["right"] and outcomes["left"] and outcomes["refused"]
    assert outcomes["mixed"] == outcomes["unclean"] == outcomes["lost"] == 0
    assert figures["by_client"]["stream, right"] and figures["by_client"]["walk, clean"]
    assert figures["killed"] == {} and figures["by_export"]["second"] == 0
    assert figures["recovery_seconds"] < 30


mixture = (EXPECTED["first"][ASKS[0]] // 2 + EXPECTED["second"][ASKS[0]] // 2).astype("uint8")
MIXED = 200, json.dumps({"images": [{"png": png(mixture)}]}).encode()


@pytest.mark.parametrize(
    ("answer", "outcome", "rule"),
    [
        (MIXED, "mixed", "requests ended mixed: a picture that no export draws"),
        ((500, b"Internal Server Error"), "unclean", "requests ended unclean: no answer, or one"),
        ((503, b"{}"), "unclean", "requests ended unclean"),
        ((503, b'{"error": "The models cannot be reached."}'), "clean", None),
        ((429, b'{"error": "Try again later."}'), "busy", None),
    ],
)
def test_answers_against_the_rules_are_found(answer, outcome, rule):
    figures = soaked(lambda number: answer if number % 5 == 0 else None)
    assert figures["outcomes"][outcome] > 0 and figures["outcomes"]["right"] > 0
    if rule is None:
        assert figures["broken"] == []
    else:
        assert len(figures["broken"]) == 1 and rule in figures["broken"][0]
        assert f"broken: {figures['broken'][0]}" in table(figures)
        assert figures["examples"][outcome][0] in table(figures)


def test_what_a_front_takes_with_it_is_lost():
    tally = Tally(EXPECTED)
    tally.killed += [(20.0, "front"), (30.0, "decoder")]
    for begun, outcome in ((19.0, "lost"), (20 + FRONT_GRACE, "lost"), (81.0, "unclean")):
        before = tally.total(outcome)
        tally.error("draw", None, b"ConnectionResetError()", begun)
        assert tally.total(outcome) == before + 1


def test_when_what_is_done(tmp_path):
    exports = dict.fromkeys(EXPECTED, tmp_path)
    chaos = Chaos(None, exports, Tally(EXPECTED), seconds=600, kill_every=20, replacements=3)
    events = chaos.events()
    assert [event.at for event in events] == sorted(event.at for event in events)
    kills = [event for event in events if event.name.startswith("kill")]
    assert len(kills) == 29 and kills[0].at == 20 and kills[4].name == "kill front"
    replaced = [(event.at, event.name) for event in events if event not in kills]
    assert replaced == [
        (120, "replace by second"),
        (240, "replace by damaged"),
        (360, "replace by first"),
        (480, "replace by second"),
    ]


def figures_with(changes):
    kept = {
        "seconds": 600.0,
        "outcomes": {"mixed": 0, "unclean": 0},
        "hanging": 0,
        "recovery_seconds": 3.0,
        "by_export": {"first": 1, "second": 1},
        "events": [{"at": 1.0, "event": "replace by second"}],
        "memory": {"front": {"before": 800, "last_third": 830, "growth": 0.0375}},
    }
    return {**kept, **changes}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, None),
        ({"hanging": 2}, "2 clients are still waiting for an answer"),
        ({"recovery_seconds": None}, "the export that is in the folder at the end does not draw"),
        ({"by_export": {"first": 9, "second": 0}}, "the second export drew no picture"),
        (
            {"memory": {"front": {"before": 800, "last_third": 850, "growth": 0.0625}}},
            "front grew by 6.2%, from 800 to 850 MB",
        ),
        ({"memory": {"raylet": {"before": 60, "last_third": 70, "growth": 0.1667}}}, None),
    ],
)
def test_rules(changes, rule):
    assert broken(figures_with(changes)) == ([] if rule is None else [rule])


def test_growth_is_that_of_the_peaks():
    samples = Samples()
    for second in range(90):
        samples.taken += [(second, "front", 100 + second), (second, "front", 50.0)]
    assert growth(samples, 90) == {
        "front": {"before": 159, "last_third": 189, "growth": 189 / 159 - 1}
    }


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("ray::ServeReplica:sd_tf:diffusion_model.run", "diffusion_model"),
        ("ray::ServeReplica:sd_tf:front", "front"),
        ("ray::ProxyActor.run", "ProxyActor"),
        ("/x/python -u /x/ray/_private/log_monitor.py --session-dir=/tmp", "log_monitor"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "raylet"),
        ("/x/python -m sd_tf serve ray --export_dir x", "sd_tf"),
        ("", ""),
    ],
)
def test_names_of_processes(command, name):
    assert name_of(command) == name


DEAF = """#!/bin/sh
trap '' TERM
sh -c 'trap "" TERM; while true; do sleep 1; done' ray::worker &
echo the page:
wait
"""


@pytest.mark.parametrize("error", [KeyError("the first"), None])
def test_an_application_that_does_not_stop_is_killed(tmp_path, monkeypatch, error):
    """With what it started; the error of the block stays the one that is raised."""
    command = tmp_path / "deaf"
    command.write_text(DEAF)
    command.chmod(0o700)
    monkeypatch.setattr(application.sys, "executable", str(command))
    monkeypatch.setattr(application, "STOP_SECONDS", 1)
    said = "These had not ended in 1 s, and were killed: .*deaf.*ray::worker"
    started = []
    with (
        pytest.raises(BenchError if error is None else KeyError) as caught,
        serving(tmp_path, tmp_path) as served,
    ):
        started += [served.process.pid, *descendants(served.process.pid)]
        if error is not None:
            raise error
    if error is None:
        assert re.match(said, str(caught.value))
    else:
        assert re.match(said, caught.value.__notes__[0])
    end = time.monotonic() + 10
    assert len(started) > 1
    while left := [pid for pid in started if command_line(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_memory_of_a_process():
    code = "block = b'x' * 50_000_000; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        samples = Samples()
        samples.take(0.0, process.pid)
        assert samples.names() == [Path(sys.executable).name]
        assert 47 < samples.peak(*samples.names(), 0.0, 1.0) == memory(process.pid) < 90
        process.communicate(b"\n")
    assert memory(process.pid) is None


def test_the_other_checkpoint_differs_in_each_component(tmp_path):
    make_checkpoints(tmp_path / "made")
    for place, (changed, factor) in CHANGED.items():
        before, after = (load_file(tmp_path / "made" / name / place) for name in NAMES)
        assert before.keys() == after.keys() and before[changed].dtype == after[changed].dtype
        np.testing.assert_allclose(after[changed], before[changed] * factor, rtol=1e-2)
        assert all((before[n] == after[n]).all() for n in before if n != changed)


def test_a_damaged_replacement(tmp_path):
    """It reads as an export that nobody has seen, and its decoder does not load."""
    served = tmp_path / "served"
    put(micro_export(), served)
    manifest = (served / "pipeline.json").read_bytes()
    (weights,) = (served / "decoder").rglob("variables.data-*")
    size = weights.stat().st_size
    put(micro_export(), served, damaged=True)
    assert weights.stat().st_size == size // 2
    damaged = (served / "pipeline.json").read_bytes()
    assert damaged != manifest and json.loads(damaged) == json.loads(manifest)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--minutes", "0"], "--minutes is above 0 to 1440. Received: 0.0"),
        (["--kill_every", "0"], "--kill_every is above 0 to 86400. Received: 0.0"),
        (["--clients", "0"], "--clients is from 1 to 256. Received: 0"),
        (["--replicas", "0"], "--replicas is from 1 to 16. Received: 0"),
        (["--replacements", "-1"], "--replacements is from 0 to 100. Received: -1"),
    ],
)
def test_wrong_flags(flags, message, tmp_path, capsys):
    assert main(["bench", "soak", *flags, "--work", str(tmp_path / "work")]) == 1
    assert capsys.readouterr().err == f"sd-tf bench soak: {message}\n"
    assert not (tmp_path / "work").exists()
