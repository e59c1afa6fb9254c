"""Measure what pictures that steer cost: a step with a ControlNet, or with an IP-Adapter.

`python studies/steering.py --out runs/steering`; docs/control.md and docs/image_prompts.md have the
results. SD1.5's architecture with random weights; engines and variants in turn, each in a process
of its own, so that one model is in memory at a time.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"  # Keras reads it when it is first imported


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="for exports and figures")
    parser.add_argument("--size", type=int, default=256, help="height and width in pixels")
    parser.add_argument("--rounds", type=int, default=2, help="turns of every variant")
    options = parser.parse_args(argv)

    import steering_study
    from PIL import Image

    from sd_tf.bench.plan import BenchError

    try:
        content = steering_study.run(
            options.out, options.size, options.rounds, Image.effect_noise((64, 64), 80)
        )
    except (BenchError, OSError) as error:
        print(f"steering.py: {error}", file=sys.stderr)
        return 1
    (options.out / "steering.json").write_text(json.dumps(content, indent=1))
    for name, record in content["steps"].items():
        print(f"{name}: {', '.join(f'{seconds:.2f}' for seconds in record['seconds'])} s", end="")
        print("" if record["ratio"] is None else f", {record['ratio']:.2f} times without")
    return 0


if __name__ == "__main__":
    sys.exit(main())
