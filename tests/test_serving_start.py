"""The start of the Ray Serve application: what it waits for, and how it is interrupted."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus, DeploymentStatus

from sd_tf.cli.main import main
from sd_tf.serving.errors import ServingError
from sd_tf.serving.ray_app import listen, start
from sd_tf.serving.ray_app.settings import Scale
from tests.exports import micro_export

CPU_NODE, GPU_NODE = {"CPU": 8.0}, {"CPU": 2.0, "GPU": 1.0}
APART = "a replica of decoder reserves 4 CPUs and 1 GPUs, and no node has them (the most are 8 "


def test_what_fits_on_no_node():
    scales = {"front": Scale(), "decoder": Scale(cpus=4, gpus=1)}
    assert start.unplaceable(scales, [CPU_NODE, {"CPU": 4.0, "GPU": 2.0}]) == []
    (problem,) = start.unplaceable(scales, [CPU_NODE, GPU_NODE])
    assert problem == APART + "CPUs, 1 GPUs)"
    (problem,) = start.unplaceable(scales, [CPU_NODE])
    assert problem == APART + "CPUs, 0 GPUs)"


def test_a_gpu_that_nothing_reserves():
    scales = {"front": Scale(), "decoder": Scale()}
    assert start.unused_gpus(scales, [CPU_NODE, GPU_NODE])
    assert not start.unused_gpus(scales, [CPU_NODE])
    assert not start.unused_gpus({**scales, "decoder": Scale(gpus=0.1)}, [GPU_NODE])


class Looks:
    """Serve's status, look after look: the application's, and its deployment's with a message."""

    def __init__(self, monkeypatch, *looks):
        self.looks = iter(looks)
        monkeypatch.setattr(start, "POLL", 0)
        monkeypatch.setattr(serve, "run_many", lambda targets, **_: ["handle" for _ in targets])
        monkeypatch.setattr(serve, "status", self.status)

    def status(self):
        status, deployment, message = next(self.looks)
        decoder = SimpleNamespace(status=deployment, message=message)
        application = SimpleNamespace(status=status, message="", deployments={"decoder": decoder})
        return SimpleNamespace(applications={"name": application})


def test_the_start_says_what_it_waits_for(monkeypatch):
    deploying, updating = ApplicationStatus.DEPLOYING, DeploymentStatus.UPDATING
    Looks(
        monkeypatch,
        (deploying, updating, ""),
        (deploying, updating, "1 replicas\nwait for a GPU"),
        (deploying, updating, "1 replicas\nwait for a GPU"),
        (deploying, DeploymentStatus.HEALTHY, "1 replicas wait no more"),
        (ApplicationStatus.RUNNING, DeploymentStatus.HEALTHY, ""),
    )
    said = []
    assert start.deploy(None, "name", said.append) == "handle"
    assert said == ["waiting for decoder: 1 replicas wait for a GPU"]


def test_a_start_that_fails(monkeypatch):
    failed = ApplicationStatus.DEPLOY_FAILED, DeploymentStatus.DEPLOY_FAILED, "ExportError: x"
    Looks(monkeypatch, failed)
    with pytest.raises(ServingError, match=r"cannot be started\. ExportError: x"):
        start.deploy(None, "name", print)


@pytest.fixture
def no_ray(monkeypatch):
    """Ray as the command uses it, without its processes."""
    calls = []

    def init(**options):
        calls.append("init")
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray does

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": CPU_NODE}])
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(serve, "start", lambda **_: calls.append("start"))
    monkeypatch.setattr(listen, "check_free", lambda *_: None)  # a server may run beside the tests
    known = SimpleNamespace(applications={})
    monkeypatch.setattr(serve, "status", lambda: known)
    monkeypatch.setattr(serve, "delete", lambda name: calls.append(f"delete {name}"))
    before = signal.getsignal(signal.SIGTERM)
    yield calls
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--http_port", "0"], "--http_port is a port from 1 to 65535. Received: 0"),
        (["--grpc_port", "65536"], "--grpc_port is a port from 1 to 65535. Received: 65536"),
        (["--grpc_port", "8000"], "--grpc_port is another port than --http_port. Received: 8000"),
        (
            ["--metrics_port", "8500"],
            "--metrics_port is another port than --grpc_port. Received: 8500",
        ),
        (
            ["--num_steps", "3"],
            "--num_steps is a whole number from 1 to 2, the export's limit. Received: 3",
        ),
        (
            ["--guidance_scale", "1e7"],
            "--guidance_scale is a number from -1000000 to 1000000. Received: 10000000.0",
        ),
    ],
)
def test_flags_that_no_call_could_use(no_ray, capsys, flags, message):
    assert main(["serve", "ray", "--export_dir", str(micro_export()), *flags]) == 1
    assert message in capsys.readouterr().err
    assert no_ray == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("flags", [[], ["--address", "auto"]])
def test_a_start_is_interrupted(no_ray, monkeypatch, capsys, number, flags):
    """Nothing stays behind: Ray's own processes end with it, on a cluster the application does."""

    def load(*_):
        serve.status().applications["sd_tf"] = None
        os.kill(os.getpid(), number)
        time.sleep(60)

    monkeypatch.setattr(start, "deploy", load)
    assert main(["serve", "ray", "--export_dir", str(micro_export()), *flags]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "stopped before the application was ready"
    assert no_ray == ["init", "start", *(["delete sd_tf"] if flags else []), "shutdown"]


@pytest.mark.parametrize("ends", [KeyboardInterrupt, ServingError("it cannot be started")])
@pytest.mark.parametrize("ran_before", [True, False])
def test_an_update_that_does_not_succeed(no_ray, monkeypatch, ends, ran_before):
    """The application that ran before stays; one that never ran is removed."""

    def load(*_):
        serve.status().applications["sd_tf"] = None
        raise ends

    if ran_before:
        serve.status().applications["sd_tf"] = None
    monkeypatch.setattr(start, "deploy", load)
    flags = ["--export_dir", str(micro_export()), "--address", "auto"]
    assert main(["serve", "ray", *flags]) == 1
    assert no_ray == ["init", "start", *([] if ran_before else ["delete sd_tf"]), "shutdown"]


def test_a_start_of_ray_is_interrupted(no_ray, monkeypatch, capsys):
    init = ray.init

    def interrupted(**options):
        init(**options)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(ray, "init", interrupted)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert main(["serve", "ray", "--export_dir", str(micro_export()), "--address", "auto"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "stopped before the application was ready"
    assert no_ray == ["init", "shutdown"]


def test_a_ray_of_its_own_never_gets_another_node(no_ray, capsys):
    arguments = ["serve", "ray", "--export_dir", str(micro_export()), "--gpus", "decoder=1"]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert "a replica of decoder reserves 0.1 CPUs and 1 GPUs, and no node has them" in said
    assert "Lower --cpus or --gpus, or give --address." in said
    assert no_ray == ["init", "shutdown"]


def test_a_cluster_may_get_one(no_ray, monkeypatch, capsys):
    monkeypatch.setattr(start, "deploy", lambda *_: None)
    monkeypatch.setattr(start, "nodes_of", lambda front: ["10.0.0.1"])
    arguments = ["serve", "ray", "--export_dir", str(micro_export()), "--gpus", "decoder=1"]
    assert main([*arguments, "--address", "auto", "--detach"]) == 0
    assert "waiting for a node: a replica of decoder reserves" in capsys.readouterr().out
