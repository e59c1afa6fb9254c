"""`python -m tests.jax_many FOLDER MODEL OPTIONS`: the same eight pictures on one device, on eight,
and with `MODEL` devices to each copy of the weights. OPTIONS (JSON) are the pipeline's.

In processes of several hosts: `python -m tests.jax_many FOLDER COORDINATOR COUNT NUMBER`.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

DEVICES = 8


def xla_flags(devices: int) -> str:
    """Return XLA's flags in the environment, and that a CPU is to be so many devices."""
    found = os.environ.get("XLA_FLAGS", "")
    return f"{found} --xla_force_host_platform_device_count={devices}"


def setup(devices: int) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = xla_flags(devices)


PROMPTS = ["a red star", "two cats", "", "a boat", "the letter w", "a ring", "rain", "a red star"]
CALL = {"seed": [3, 1, 4, 1, 5, 9, 2, 6], "num_steps": 3}


def beside(options: dict) -> dict:
    """Pictures for the ControlNets and the IP-Adapters of the options, and how much they count."""
    import numpy as np

    def picture(seed):
        return np.random.default_rng(seed).integers(0, 256, (64, 64, 3)).astype("uint8")

    given = {}
    if nets := options.get("controlnet"):
        given["control_image"] = [picture(seed) for seed in range(len(nets))]
        given["control_scale"] = [1.0 - 0.3 * number for number in range(len(nets))]
    if options.get("ip_adapter"):
        given |= {"image_prompt": picture(10), "image_prompt_scale": 0.7}
    return given


def draw(folder: Path, mesh, **options):
    from sd_tf.jax import JaxPipeline

    options = {"batch_size": DEVICES, "height": 64, "width": 64, "max_steps": 4, **options}
    pipe = JaxPipeline.from_checkpoint(folder / "checkpoint", mesh, "float32", **options)
    on_first = Counter()  # model → bytes
    for weights in pipe.weights.values():
        for name, weight in weights.items():
            on_first[name.partition(".")[0]] += weight.addressable_shards[0].data.nbytes
    return pipe(PROMPTS, **CALL, **beside(options)).images, on_first


def one_host(folder: Path, model: int, **options) -> None:
    import jax
    import numpy as np

    from sd_tf.jax import make_mesh

    meshes = {
        "one": make_mesh(jax.devices()[:1]),
        "data": make_mesh(),
        "model": make_mesh(model=model),
    }
    found = {name: draw(folder, mesh, **options) for name, mesh in meshes.items()}
    np.savez(folder / "pictures.npz", **{name: images for name, (images, _) in found.items()})
    sizes = {name: on_first for name, (_, on_first) in found.items()}
    (folder / "bytes.json").write_text(json.dumps(sizes))


def several_hosts(folder: Path, coordinator: str, count: int, number: int) -> None:
    import jax
    import numpy as np

    jax.distributed.initialize(coordinator, count, number)
    from sd_tf.jax import make_mesh

    assert len(jax.devices()) == DEVICES
    images, _ = draw(folder, make_mesh(), scheduler="euler_ancestral")
    np.save(folder / f"host{number}.npy", images)


if __name__ == "__main__":
    folder, *rest = sys.argv[1:]
    if len(rest) == 3:
        coordinator, count, number = rest
        setup(DEVICES // int(count))
        several_hosts(Path(folder), coordinator, int(count), int(number))
    else:
        model, options = rest
        setup(DEVICES)
        one_host(Path(folder), int(model), **json.loads(options))
