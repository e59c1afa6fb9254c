"""Times an export's SavedModels and KerasCV's pipeline, each in a process of its own, in turn.

python benchmark.py --export_dir=exports/mine --all --output=results/
"""

import sys

from absl import app, flags

from sd_tf import bench
from sd_tf.bench import report
from sd_tf.bench.page import page
from sd_tf.manifest import ExportError

FLAGS = flags.FLAGS

flags.DEFINE_string("export_dir", None, "What serialize_savedmodels.py wrote.")
flags.DEFINE_bool("jit_compile", False, "Run what XLA compiles; else the plain signatures.")
flags.DEFINE_bool("kerascv", False, "Measure KerasCV's own pipeline instead.")
flags.DEFINE_bool("all", False, "KerasCV and the SavedModels, each without and with XLA, in turn.")
flags.DEFINE_bool(
    "random_weights", False, "KerasCV's architecture with random weights: needs no network."
)
flags.DEFINE_string("prompt", bench.DEFAULT_PROMPT, "The same for every picture of the batch.")
flags.DEFINE_integer("num_steps", 50, "Of the timed runs and of the call before them.")
flags.DEFINE_integer("repeat", 3, "Timed runs; from 20 on there is a 95th percentile.")
flags.DEFINE_string(
    "scheduler", None, "Default: the export's own; beside KerasCV, its method (kerascv)."
)
flags.DEFINE_float("guidance_scale", 7.5, "How closely to follow the prompt.")
flags.DEFINE_integer("seed", 0, "Of the first picture; the next ones count up.")
flags.DEFINE_integer("batch_size", None, "KerasCV's without an export. Default: 1.")
flags.DEFINE_integer("height", None, "KerasCV's without an export. Default: 512.")
flags.DEFINE_integer("width", None, "KerasCV's without an export. Default: 512.")
flags.DEFINE_string("compile_cache", None, "Folder where XLA keeps compiled code.")
flags.DEFINE_string(
    "output", None, "Folder, or file name without its end, for the .json and the .html report."
)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    given = {flag.name: flag.value for flag in FLAGS.get_key_flags_for_module(argv[0])}
    output = given.pop("output")
    try:
        planned = bench.plan(bench.Options(**given))
        paths = None if output is None else report.output_paths(output)
        measured = bench.run(planned, lambda text: print(text, flush=True))
        results = report.complete(measured, {**given, "output": output})
        print(report.table(results))
        if paths is not None:
            print(*report.write(results, page(results), *paths), sep="\n")
    except (bench.BenchError, ExportError, OSError) as error:
        print(f"benchmark.py: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(any(item["failed"] for item in results["left_out"]))


if __name__ == "__main__":
    app.run(main)
