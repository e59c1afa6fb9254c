"""SDXL on all of this machine's devices, a different prompt on each, as a walk-through.

    python examples/jax_sdxl.py                                    # from the Hub, on a TPU slice
    python examples/jax_sdxl.py --checkpoint FOLDER --size 64      # any SDXL, also on a CPU
    python examples/jax_sdxl.py --refiner stabilityai/stable-diffusion-xl-refiner-1.0

docs/jax.md explains each section.
"""

import argparse
import collections
import time

import jax

from sd_tf.jax import JaxPipeline, make_mesh
from sd_tf.runtime.pictures import contact_sheet

PROMPTS = (
    "a lighthouse at dusk, oil on canvas",
    "a red bicycle against a yellow wall",
    "an astronaut riding a horse in a green desert",
    "a bowl of soup that looks like a galaxy",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--checkpoint", default="stabilityai/stable-diffusion-xl-base-1.0")
    parser.add_argument("--refiner", help="a second checkpoint, which goes over the pictures")
    parser.add_argument("--size", type=int, help="pixels; default: what the checkpoint is for")
    parser.add_argument("--num_steps", type=int, default=20)
    parser.add_argument("--model_axis", type=int, default=1, help="devices that share one UNet")
    parser.add_argument("--compile_cache", help="folder for compiled code")
    parser.add_argument("--out", default="grid.png")
    options = parser.parse_args()

    # 1. Devices. Pictures go over the data axis, with --model_axis the UNet's weights over another.
    mesh = make_mesh(model=options.model_axis)
    print(f"{len(jax.devices())} × {jax.devices()[0].device_kind}, mesh {dict(mesh.shape)}")

    # 2. Load and cast: one tensor at a time, straight to its devices.
    fixed = {"height": options.size, "width": options.size, "compile_cache": options.compile_cache}
    start = time.perf_counter()
    pipe = JaxPipeline.from_checkpoint(options.checkpoint, mesh, "bfloat16", **fixed)
    jax.block_until_ready(pipe.weights)  # placing goes on in the background
    dtypes = collections.Counter()
    for weight in jax.tree.leaves(dict(pipe.weights)):
        dtypes[weight.dtype.name] += weight.nbytes / 1e9
    held = ", ".join(f"{size:.2f} GB {name}" for name, size in dtypes.items())
    print(f"loaded in {time.perf_counter() - start:.1f} s: {held}")

    # 3. Compile: the first call would do it too. Steps, guidance and scheduler stay inputs.
    print(f"compiled in {sum(pipe.warm_up().values()):.1f} s")

    # 4. One prompt for each picture. A result is on the host, so the clock needs no more waiting.
    count = max(4, pipe.manifest.shapes.first.batch_size)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    for _ in range(2):
        result = pipe(prompts, num_steps=options.num_steps, guidance_scale=5.0, seed=0)
        seconds = result.timings["total"]
        print(f"{len(prompts)} pictures in {seconds:.2f} s, {len(prompts) / seconds:.2f} a second")

    # 5. The refiner walks the last part of the way again, from each picture.
    images = result.images
    if options.refiner is not None:
        del pipe
        refiner = JaxPipeline.from_checkpoint(options.refiner, mesh, "bfloat16", **fixed)
        images = refiner(
            prompts, image=images, strength=0.3, num_steps=options.num_steps, seed=0
        ).images

    contact_sheet(images).save(options.out)
    print(options.out)


if __name__ == "__main__":
    main()
