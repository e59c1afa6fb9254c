"""Start the application, and say what the start waits for."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatus

from sd_tf.serving.errors import ServingError
from sd_tf.serving.ray_app.settings import Scale

POLL = 1.0  # seconds between looks at the deployments


def unplaceable(scales: Mapping[str, Scale], nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """Say which deployments have replicas that fit on no node, whatever else runs there.

    Args:
        nodes: each node's resources, as Ray names them.
    """
    problems = []
    for name, scale in scales.items():
        wanted = {"CPU": scale.cpus, "GPU": scale.gpus}
        if not any(all(node.get(k, 0) >= v for k, v in wanted.items()) for node in nodes):
            most = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in wanted}
            problems.append(
                f"a replica of {name} reserves {scale.cpus:g} CPUs and {scale.gpus:g} GPUs, and no "
                f"node has them (the most are {most['CPU']:g} CPUs, {most['GPU']:g} GPUs)"
            )
    return problems


def unused_gpus(scales: Mapping[str, Scale], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Return whether there is a GPU, and no deployment reserves any."""
    return any(node.get("GPU") for node in nodes) and not any(s.gpus for s in scales.values())


def deploy(application, name: str, say: Callable[[str], Any]):
    """Deploy an application, wait until it runs, and return its handle.

    Args:
        say: called with what the start waits for, whenever that changes.
    """
    target = serve.RunTarget(application, name=name, route_prefix=None)
    (handle,) = serve.run_many([target], wait_for_applications_running=False)
    said: list[str] = []
    while True:
        application = serve.status().applications[name]
        if application.status == ApplicationStatus.RUNNING:
            break
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            raise ServingError(f"The application cannot be started. {_joined(application)}")
        for line in waits(application):
            if line not in said:
                said.append(line)
                say(line)
        time.sleep(POLL)
    return handle


def nodes_of(front) -> list[str]:
    """Return the addresses of the nodes that fronts run on."""
    front.node.remote().result()  # waits until the handle knows the fronts
    return sorted(set(front.broadcast("node").results()))


def waits(application: ApplicationStatusOverview) -> list[str]:
    """Say what each deployment that does not run yet waits for, if Ray knows it."""
    return [
        f"waiting for {name}: {' '.join(deployment.message.split())}"
        for name, deployment in application.deployments.items()
        if deployment.status != DeploymentStatus.HEALTHY and deployment.message
    ]


def _joined(application: ApplicationStatusOverview) -> str:
    messages = [deployment.message for deployment in application.deployments.values()]
    return "\n".join(filter(None, [application.message, *messages]))
