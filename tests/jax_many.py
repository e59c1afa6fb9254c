"""`python -m tests.jax_many FOLDER`: the same eight pictures on one, eight, and divided devices.

In processes of several hosts: `python -m tests.jax_many FOLDER COORDINATOR COUNT NUMBER`.
"""

import os
import sys
from pathlib import Path

DEVICES = 8


def setup(devices: int) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"


PROMPTS = ["a red star", "two cats", "", "a boat", "the letter w", "a ring", "rain", "a red star"]
CALL = {"seed": [3, 1, 4, 1, 5, 9, 2, 6], "num_steps": 3, "scheduler": "euler_ancestral"}


def draw(folder: Path, mesh, **options):
    from sd_tf.jax import JaxPipeline

    options = {"batch_size": DEVICES, "height": 64, "width": 64, "max_steps": 4, **options}
    pipe = JaxPipeline.from_checkpoint(folder / "checkpoint", mesh, "float32", **options)
    weights = pipe.weights["diffusion_model"].values()
    on_first = sum(w.addressable_shards[0].data.nbytes for w in weights)
    return pipe(PROMPTS, **CALL).images, on_first


def one_host(folder: Path) -> None:
    import jax
    import numpy as np

    from sd_tf.jax import make_mesh

    meshes = {
        "one": make_mesh(jax.devices()[:1]),
        "data": make_mesh(),
        "model": make_mesh(model=4),
    }
    found = {name: draw(folder, mesh) for name, mesh in meshes.items()}
    pictures = {name: images for name, (images, _) in found.items()}
    sizes = {f"{name}_bytes": size for name, (_, size) in found.items()}
    np.savez(folder / "pictures.npz", **pictures, **sizes)


def several_hosts(folder: Path, coordinator: str, count: int, number: int) -> None:
    import jax
    import numpy as np

    jax.distributed.initialize(coordinator, count, number)
    from sd_tf.jax import make_mesh

    assert len(jax.devices()) == DEVICES
    images, _ = draw(folder, make_mesh())
    np.save(folder / f"host{number}.npy", images)


if __name__ == "__main__":
    folder, *host = sys.argv[1:]
    if host:
        setup(DEVICES // int(host[1]))
        several_hosts(Path(folder), host[0], int(host[1]), int(host[2]))
    else:
        setup(DEVICES)
        one_host(Path(folder))
