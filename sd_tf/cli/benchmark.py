"""`sd-tf benchmark`: time an export's SavedModels and KerasCV's pipeline, in turn."""

import argparse
import dataclasses

from sd_tf.bench import report
from sd_tf.bench.page import page
from sd_tf.bench.plan import BenchOptions, check, make_plan
from sd_tf.bench.run import run_plan
from sd_tf.cli.arguments import report as tell
from sd_tf.cli.options import BENCHMARK, chosen
from sd_tf.cli.options import add_arguments as add_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, BENCHMARK)


def run(options: argparse.Namespace) -> int:
    given = chosen(options, BENCHMARK)
    output = given.pop("output")
    paths = None if output is None else report.output_paths(output)
    wanted = BenchOptions(**given)
    if wanted.export_dir is None and not wanted.kerascv:
        check(wanted)  # before the minute that an export takes
        wanted = dataclasses.replace(wanted, export_dir=_embedded())
    measured = run_plan(make_plan(wanted), tell)
    results = report.complete(measured, {**dataclasses.asdict(wanted), "output": output})
    print(report.table(results))
    if paths is not None:
        print(*report.write(results, page(results), *paths), sep="\n")
    return int(any(item["failed"] for item in results["left_out"]))


def _embedded() -> str:
    from sd_tf.checkpoints import TINY
    from sd_tf.export.embedded import embedded_export

    return str(embedded_export(TINY, tell))
