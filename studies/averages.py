"""Measure what an average of its weights is worth to a model that learns to edit.

`python studies/averages.py --out runs/ema`; docs/ema.md has the question and the results.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--out", type=Path, required=True, help="a stopped study goes on from what is there"
    )
    parser.add_argument("--seeds", type=int, help="number of runs (default: 3)")
    parser.add_argument("--steps", type=int, help="steps of each run (default: 1500)")
    parser.add_argument("--backend", choices=["tensorflow", "jax"], default="tensorflow")
    options = parser.parse_args(argv)
    os.environ["KERAS_BACKEND"] = options.backend  # Keras reads it when it is first imported

    import averages_study

    from sd_tf.checkpoints import TINY_FOLDER
    from sd_tf.training.settings import TrainingError
    from sd_tf.weights import open_checkpoint

    study = averages_study.STUDY
    if options.seeds is not None:
        study = replace(study, seeds=options.seeds)
    if options.steps is not None:
        study = replace(study, settings=replace(study.settings, steps=options.steps))
    try:
        averages_study.run(study, open_checkpoint(TINY_FOLDER), options.out)
    except TrainingError as error:
        print(f"averages.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
