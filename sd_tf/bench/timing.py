"""`python -m sd_tf.bench.timing FOLDER`: measure the one job in the folder, in this process.

Start-up is measured apart: the import, the load, the first call (which compiles). Then come the
timed runs of the same call. Every call returns its pictures as NumPy arrays, so that no work is
left when a clock stops.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sd_tf.bench.plan import BenchError, Job
from sd_tf.bench.run import JOB, RESULT, TIMED_RUNS
from sd_tf.runtime.manifest import ExportError
from sd_tf.runtime.percentile import p95

# One run: the pictures uint8 (B, H, W, 3), and the seconds of each stage in their order.
Call = Callable[[], tuple["np.ndarray", dict[str, float]]]  # noqa: F821


def main(folder: Path) -> None:
    job = Job(**json.loads((folder / JOB).read_text(encoding="utf-8")))
    try:
        result = measure(job, folder)
    except (BenchError, ExportError, OSError) as error:  # others end with a traceback
        result = {"error": str(error)}
    (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")


def measure(job: Job, folder: Path) -> dict:
    prepare, import_seconds = timed(ENGINES[job.engine])
    call, load_seconds = timed(lambda: prepare(job))
    (first_images, _), first_call_seconds = timed(call)
    first_image_seconds = since_start()

    print(TIMED_RUNS, file=sys.stderr, flush=True)
    seconds, stages, is_same = [], [], True
    for _ in range(job.repeat):
        (images, of_stages), total = timed(call)
        seconds.append(total)
        stages.append(of_stages)
        is_same = is_same and bool((images == first_images).all())
    memory, device_memory = peak_memory(), peak_device_memory()
    save(first_images, folder)

    per_call = [run["diffusion_model"] / job.model_calls for run in stages]
    return {
        "import_seconds": import_seconds,
        "load_seconds": load_seconds,
        "first_call_seconds": first_call_seconds,
        "first_image_seconds": first_image_seconds,
        "warm": summary(seconds),
        "stages": {name: summary([run[name] for run in stages]) for name in stages[0]},
        "per_model_call": summary(per_call),
        "images_per_second": job.batch_size / statistics.median(seconds),
        "peak_memory_bytes": memory,
        "peak_device_memory_bytes": device_memory,
        "same_pictures_in_all_runs": is_same,
        "devices": devices(),
    }


def timed(function):
    start = time.perf_counter()
    value = function()
    return value, time.perf_counter() - start


def since_start() -> float:
    """Return the seconds since the system started this process, before any of Python ran."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the machine started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def summary(values: Sequence[float]) -> dict:
    """Summarize values; `p95` is None for few."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "p95": p95(values),
        "values": list(values),
    }


# Engines: each imports its libraries and returns `prepare`, which loads and returns the call.


def saved_models() -> Callable[[Job], Call]:
    from sd_tf.runtime.needed_pictures import blank_pictures
    from sd_tf.runtime.pipeline import Pipeline

    def prepare(job: Job) -> Call:
        pipe = Pipeline.load(
            job.export_dir,
            jit_compile=job.jit_compile,
            compile_cache=job.compile_cache,
            fixed_weights=True,
        )
        pictures = blank_pictures(pipe.manifest, (job.height, job.width))

        def call():
            result = pipe(
                [job.prompt] * job.batch_size,
                num_steps=job.num_steps,
                guidance_scale=job.guidance_scale,
                seed=job.seed,
                scheduler=job.scheduler,
                height=job.height,
                width=job.width,
                **pictures,
            )
            return result.images, {k: v for k, v in result.timings.items() if k != "total"}

        return call

    return prepare


def kerascv() -> Callable[[Job], Call]:
    from sd_tf.bench.kerascv import prepare

    return prepare


ENGINES = {"saved_models": saved_models, "kerascv": kerascv}


# Other figures


def peak_memory() -> int:
    """Return the most bytes that this process ever had in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_device_memory() -> int | None:
    import tensorflow as tf

    count = len(tf.config.list_logical_devices("GPU"))
    info = [tf.config.experimental.get_memory_info(f"GPU:{i}") for i in range(count)]
    return sum(device["peak"] for device in info) if info else None


def devices() -> list[str]:
    import tensorflow as tf

    found = []
    for device in tf.config.list_physical_devices():
        details = tf.config.experimental.get_device_details(device)
        found.append(details.get("device_name", device.device_type))
    return found


def save(images, folder: Path) -> None:
    from PIL import Image

    for index, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{index:03}.png")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise BenchError(f"One folder is needed. Received: {sys.argv[1:]}")
    main(Path(sys.argv[1]))
