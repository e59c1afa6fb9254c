"""`python -m sd_tf.bench starts`: what comes before and around the compiled code of an export.

Time to a first picture without a compile cache, filling one and finding it filled, each in a new
process and in turn; and the host's share of a warm call: what is left of it when the same compiled
functions are called again, one behind the other, on the same arrays.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from sd_tf.bench import BenchError, Options, plan, run_alone
from sd_tf.bench.timing import summary

CACHE_AT_MOST, HOST_AT_MOST = 0.6, 5.0  # of the time without a cache; percent of a warm call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--export_dir", required=True, help="what serialize_savedmodels.py wrote")
    parser.add_argument("--num_steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, help="Turns of the starts. Default: 3.")
    parser.add_argument("--calls", type=int, default=9, help="Warm calls. Default: 9.")
    parser.add_argument("--json", type=Path, help="A file for the figures.")


def run(options: argparse.Namespace) -> int:
    for name in ("num_steps", "rounds", "calls"):
        if getattr(options, name) < 1:
            raise BenchError(f"--{name} is at least 1. Received: {getattr(options, name)}")
    found = {
        "starts": starts(options.export_dir, options.num_steps, options.rounds),
        "host": host_share(options.export_dir, options.num_steps, options.calls),
    }
    print(table(found))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def starts(export_dir: str, num_steps: int, rounds: int) -> dict:
    """Seconds from a process's start to its first pictures."""
    seconds = {"without": [], "filling": [], "filled": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="sd_tf_cache_") as cache:
            for name, folder in (("without", None), ("filling", cache), ("filled", cache)):
                (job,) = plan(
                    Options(
                        export_dir=export_dir,
                        jit_compile=True,
                        num_steps=num_steps,
                        repeat=1,
                        compile_cache=folder,
                    )
                ).jobs
                seconds[name].append(run_alone(job)["first_image_seconds"])
    ratio = statistics.median(seconds["filled"]) / statistics.median(seconds["without"])
    return {**{name: summary(values) for name, values in seconds.items()}, "ratio": ratio}


def host_share(export_dir: str, num_steps: int, calls: int) -> dict:
    """Percent of a warm call that is not spent in its compiled functions."""
    from sd_tf.chain import open_export
    from sd_tf.pipeline import Pipeline, Replica

    class Recording(Replica):
        """Keeps what was called with what."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.seen = []

        def call(self, component, endpoint, **inputs):
            self.seen.append((component, endpoint, inputs))
            return super().call(component, endpoint, **inputs)

    manifest, tokenizers = open_export(Path(export_dir))
    replica = Recording(Path(export_dir), manifest, True, None)
    pipe = Pipeline(manifest, [replica], tokenizers, 0.0)
    prompts = [Options.prompt] * manifest.batch_size
    pipe.warm_up()
    whole, compiled = [], []
    for _ in range(calls):
        replica.seen.clear()
        start = time.perf_counter()
        pipe(prompts, num_steps=num_steps, seed=0)
        whole.append(time.perf_counter() - start)
        functions = [
            (replica.component(component), replica.signature(component, endpoint), inputs)
            for component, endpoint, inputs in replica.seen
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
