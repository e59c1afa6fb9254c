"""`sd-tf serve tf_serving`: write a serving folder, or check one."""

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType

from sd_tf.cli.arguments import SHAPES, Switch, names, shapes
from sd_tf.serving.tf_serving import ServingError
from sd_tf.serving.tf_serving.folder import DEFAULT_TAG, DEVICES, LOOPBACK, SETTINGS, Settings

EPILOG = """\
Without --export_dir, --out and --version give the versions of a folder new labels: a canary becomes
stable. Settings that are not given stay as the folder was written.
"""
WRITING = (
    *("export_dir", "out", "version", "canary_version", "name_prefix", "device", "image_tag"),
    *("host", "jit_compile", "keep_old", "warm_up", "components"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("--export_dir", type=Path, help="what `sd-tf export` wrote")
    parser.add_argument("--out", type=Path, help="the serving folder, new or to be added to")
    parser.add_argument("--version", type=int, help="the number of this version (default: 1)")
    parser.add_argument(
        "--canary_version",
        type=int,
        help="the version to be labelled canary; if it is this one, the stable one stays",
    )
    parser.add_argument(
        "--keep_old",
        action=Switch,
        default=None,
        help="serve the version that was stable, too, labelled previous, until the next labelling",
    )
    parser.add_argument("--name_prefix", help="of the models' names: PREFIX_decoder")
    parser.add_argument("--device", choices=DEVICES, help="what the export is for (default: gpu)")
    parser.add_argument("--image_tag", help=f"of tensorflow/serving (default: {DEFAULT_TAG})")
    parser.add_argument(
        "--host", help=f"where compose publishes; 0.0.0.0: all interfaces (default: {LOOPBACK})"
    )
    parser.add_argument(
        "--jit_compile", action=Switch, default=None, help="serve what XLA compiles (default: yes)"
    )
    parser.add_argument(
        "--warm_up",
        type=shapes,
        metavar=SHAPES,
        help="the shapes that the server compiles before it opens its ports (default: all)",
    )
    parser.add_argument(
        "--components",
        type=names,
        metavar="NAME,NAME",
        help="those of the export to serve, such as text_to_image alone (default: all)",
    )
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="list what would fail")
    parser.add_argument(
        "--replay", action="store_true", help="with --check: also run the warm-up requests"
    )


def run(options: argparse.Namespace) -> int:
    given = [name for name in WRITING if getattr(options, name) is not None]
    if options.check is not None:
        if given:
            raise ServingError(
                f"--check only reads. Received also: {', '.join('--' + name for name in given)}"
            )
        return _check(options.check, options.replay)
    if options.replay:
        raise ServingError("--replay goes with --check.")
    if options.out is None:
        raise ServingError("Give --out, the folder to write, or --check, a folder to read.")
    if options.export_dir is None and options.version is None:
        raise ServingError(
            "Give --export_dir for a new version, or --version, which then becomes stable."
        )
    for name in ("warm_up", "components"):
        if getattr(options, name) is not None and options.export_dir is None:
            raise ServingError(f"--{name} goes with --export_dir.")
    return _publish(options)


def _publish(options: argparse.Namespace) -> int:
    publish = _module("publish")
    before = Settings()
    if (options.out / SETTINGS).is_file():
        before = Settings.read(options.out)
    changes = {
        name: getattr(options, name)
        for name in ("device", "image_tag", "name_prefix", "host")
        if getattr(options, name) is not None
    }
    if options.jit_compile is not None:
        changes["xla"] = options.jit_compile
    settings = dataclasses.replace(before, **changes)
    version = 1 if options.version is None else options.version
    labels = publish.publish(
        options.export_dir,
        options.out,
        version,
        options.canary_version,
        settings,
        bool(options.keep_old),
        options.warm_up,
        options.components,
    )
    others = {"canary": labels.canary, "previous": labels.previous}
    more = "".join(f", {name}: {number}" for name, number in others.items() if number is not None)
    print(f"{options.out}: stable: {labels.stable}{more}; {settings.image}. See its README.md.")
    if problem := publish.image_problem(options.out, labels, settings):
        print(
            f"sd-tf serve tf_serving: {problem.replace('`image_tag`', '--image_tag')}",
            file=sys.stderr,
        )
    return 0


def _check(folder: Path, replay: bool) -> int:
    findings = _module("check").check(folder, replay)
    for finding in findings:
        print(finding)
    print(f"{folder}: {len(findings) or 'nothing'} would fail")
    return 1 if findings else 0


def _module(name: str) -> ModuleType:
    """Import a module that needs the server's protos."""
    try:
        return importlib.import_module(f"sd_tf.serving.tf_serving.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tensorflow_serving"):
            raise
        raise ServingError(
            "The server's protos are missing: pip install 'sd_tf[serve]', or "
            "tensorflow-serving-api of TensorFlow's version."
        ) from error
