"""The Ray Serve application on two nodes of a cluster, of which one is lost."""

import json
import os
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from sd_tf.bench.application import replicas, serving
from tests.exports import micro_export

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

DEPLOYMENTS = ("front", "text_encoder", "diffusion_model", "decoder")
TWO_OF_EACH = [flag for name in DEPLOYMENTS for flag in ("--replicas", f"{name}=2")]
NODE = {"num_cpus": 2, "include_dashboard": False}
BODY = {"prompt": "a large red star", "num_steps": 2, "seed": 1, "guidance_scale": 4.0}
RECOVERY_SECONDS = 120


@pytest.fixture
def cluster():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def picture(url: str) -> str:
    headers = {"content-type": "application/json"}
    request = Request(f"{url}/generate", json.dumps(BODY).encode(), headers)
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)["images"][0]["png"]


def raylet(node) -> int:
    (process,) = node.all_processes["raylet"]
    return process.process.pid


@pytest.mark.long
def test_a_node_is_lost(cluster, tmp_path):
    """Replicas on both nodes; when one node is gone, the other one answers, and alike."""
    flags = [*TWO_OF_EACH, "--cpus", "diffusion_model=1.2", "--nojit_compile"]
    flags += ["--num_steps", "2"]
    with serving(micro_export(), tmp_path, *flags, address=cluster.address) as served:
        head, other = cluster.head_node, *cluster.worker_nodes
        for name in DEPLOYMENTS:
            assert [len(replicas(raylet(node), name)) for node in (head, other)] == [1, 1], name
        expected = {picture(served.url) for _ in range(6)}
        assert len(expected) == 1

        cluster.remove_node(other, allow_graceful=False)
        end = time.monotonic() + RECOVERY_SECONDS
        in_a_row = 0
        while in_a_row < 6:
            assert time.monotonic() < end
            try:
                assert {picture(served.url)} == expected
                in_a_row += 1
            except (URLError, OSError):  # what was on its way to the lost node
                in_a_row = 0
                time.sleep(0.5)
