"""Time an export's SavedModels and KerasCV's pipeline, each in a process of its own, in turn.

python benchmark.py --export_dir=exports/mine --all --output=results/
"""

from sd_tf.cli import benchmark, options, script

options.define_flags(options.BENCHMARK)

if __name__ == "__main__":
    script.run(benchmark, options.BENCHMARK)
