"""Measure an export's start-up, and the host's share of a warm call.

Start-up is the time to a first picture: without a compile cache, filling one, and finding one
filled, each in a new process and in turn. The host's share is the part of a warm call that is not
spent in its compiled functions, which are timed by calling them again on the same arrays.
"""

import statistics
import tempfile
import time
from pathlib import Path

from sd_tf.bench.plan import BenchError, BenchOptions, make_plan
from sd_tf.bench.run import run_job
from sd_tf.bench.timing import summary

CACHE_AT_MOST, HOST_AT_MOST = 0.5, 5.0  # of the time without a cache; percent of a warm call


def measure(export_dir: str, num_steps: int, rounds: int, calls: int) -> dict:
    """Measure `rounds` turns of the starts, and the host's share of `calls` warm calls."""
    for name, value in (("num_steps", num_steps), ("rounds", rounds), ("calls", calls)):
        if value < 1:
            raise BenchError(f"`{name}` is at least 1. Received: {value}")
    return {
        "starts": starts(export_dir, num_steps, rounds),
        "host": host_share(export_dir, num_steps, calls),
    }


def starts(export_dir: str, num_steps: int, rounds: int) -> dict:
    """Measure the seconds from a process's start to its first pictures."""
    seconds = {"without": [], "filling": [], "filled": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="sd_tf_cache_") as cache:
            for name, folder in (("without", None), ("filling", cache), ("filled", cache)):
                (job,) = make_plan(
                    BenchOptions(
                        export_dir=export_dir,
                        jit_compile=True,
                        num_steps=num_steps,
                        repeat=1,
                        compile_cache=folder,
                    )
                ).jobs
                seconds[name].append(run_job(job)["first_image_seconds"])
    ratio = statistics.median(seconds["filled"]) / statistics.median(seconds["without"])
    return {**{name: summary(values) for name, values in seconds.items()}, "ratio": ratio}


def host_share(export_dir: str, num_steps: int, calls: int) -> dict:
    """Measure the percentage of a warm call that is not spent in its compiled functions."""
    from sd_tf.runtime.chain import open_export
    from sd_tf.runtime.graph_kernels import keep_weights
    from sd_tf.runtime.needed_pictures import blank_pictures
    from sd_tf.runtime.pipeline import Pipeline, SavedModelRunner

    class Recording(SavedModelRunner):
        """A runner that records its calls and their inputs."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.seen = []

        def call(self, component, endpoint, shape, **inputs):
            self.seen.append((component, self.signature(component, endpoint, shape), inputs))
            return super().call(component, endpoint, shape, **inputs)

    manifest, tokenizers = open_export(Path(export_dir))
    keep_weights(manifest)
    replica = Recording(Path(export_dir), manifest, True, None)
    pipe = Pipeline(manifest, [replica], tokenizers, 0.0)
    shape = manifest.shapes.first
    prompts = [BenchOptions.prompt] * shape.batch_size
    pictures = blank_pictures(manifest, shape.size)
    pipe.warm_up()
    whole, compiled = [], []
    for _ in range(calls):
        replica.seen.clear()
        start = time.perf_counter()
        pipe(prompts, num_steps=num_steps, seed=0, **pictures)
        whole.append(time.perf_counter() - start)
        functions = [
            (replica.component(component), signature, inputs)
            for component, signature, inputs in replica.seen
        ]
        start = time.perf_counter()
        for model, signature, inputs in functions:
            model.run(signature, inputs)
        compiled.append(time.perf_counter() - start)
    share = 100 * (1 - statistics.median(compiled) / statistics.median(whole))
    return {"call": summary(whole), "compiled": summary(compiled), "percent": share}


def table(found: dict) -> str:
    starts, host = found["starts"], found["host"]
    seconds = {name: f"{starts[name]['median']:.1f}" for name in ("without", "filling", "filled")}
    return "\n".join(
        [
            f"first pictures without a cache {seconds['without']} s, filling one "
            f"{seconds['filling']} s, filled {seconds['filled']} s",
            f"filled / without: {starts['ratio']:.2f} (aim: at most {CACHE_AT_MOST})",
            f"warm call {host['call']['median']:.3f} s, its compiled functions alone "
            f"{host['compiled']['median']:.3f} s",
            f"host's share: {host['percent']:.1f} % (aim: at most {HOST_AT_MOST:g} %)",
        ]
    )
