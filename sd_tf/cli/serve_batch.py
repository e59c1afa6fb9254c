"""`sd-tf serve batch --prompts FILE --export_dir DIR --out DIR`: draw a file of prompts."""

import argparse
import hashlib
from dataclasses import replace
from pathlib import Path

from sd_tf.cli.arguments import add_compile_cache, add_export_dir, add_jit_compile
from sd_tf.cli.parameters import add_parameters, given
from sd_tf.cli.progress import Progress
from sd_tf.runtime.chain import open_export
from sd_tf.runtime.compile_cache import for_workers
from sd_tf.runtime.manifest import FILE_NAME, file_hash
from sd_tf.serving.batch import BatchError
from sd_tf.serving.batch.folder import FAILED, FORMATS, Folder
from sd_tf.serving.batch.rows import (
    COLUMNS,
    Failure,
    Unit,
    check_rows,
    check_settings,
    divide,
    read_entries,
    row_parameters,
)

JOB_VERSION = 3
KEPT = "{} rows were made and are kept; the same command makes the others."
EPILOG = f"""\
.txt holds a prompt in each line; .csv, .jsonl and .parquet a column prompt and, where wanted,
{", ".join(name for name in COLUMNS if name != "prompt")}. What a row does not give is as
the flags say; its seed is then --seed plus the row's number, its id that number. Started again, a
job makes what is missing. Rows that cannot be drawn are listed in {FAILED}. Exit status: 0 all rows
drawn, 1 some failed or the job stopped. The nodes of a cluster need sd_tf, and the export at the
same path; RAY_AUTH_MODE=token where Ray asks for its token.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_export_dir(parser)
    parser.add_argument("--prompts", required=True, help="a .txt, .csv, .jsonl or .parquet file")
    parser.add_argument("--out", required=True, help="folder of this job's pictures")
    parser.add_argument("--format", choices=FORMATS, default="png", help="(default: png)")
    settings = [known for known in row_parameters().values() if not known.is_required]
    add_parameters(parser, settings, seed="seed of the first row (default: 0)")
    parser.set_defaults(seed=0)
    add_jit_compile(parser)
    add_compile_cache(parser)
    parser.add_argument(
        "--address", help="of a running Ray, auto or HOST:PORT (default: one that the job starts)"
    )
    parser.add_argument("--workers", type=int, help="(default: one for each GPU, else 1)")
    parser.add_argument(
        "--cpus_per_worker", type=float, default=1.0, help="reserved with Ray (default: 1)"
    )
    parser.add_argument("--gpus_per_worker", type=float, help="(default: 1 where there are GPUs)")


def run(options: argparse.Namespace) -> int:
    _check_resources(options)
    export_dir, prompts, out = (
        Path(path).expanduser().resolve()
        for path in (options.export_dir, options.prompts, options.out)
    )
    manifest, _ = open_export(export_dir)
    settings = check_settings(given(options), manifest)
    cache = for_workers(options.compile_cache, are_here=options.address is None)
    try:
        content = prompts.read_bytes()
    except OSError as error:
        raise BatchError(f"--prompts {prompts} cannot be read: {error}") from error
    rows, failures = check_rows(read_entries(prompts, content), settings, manifest, prompts.parent)
    if not rows:
        raise BatchError(
            f"None of the {len(failures)} rows of {prompts} can be drawn; the first: "
            f"{failures[0].reason}"
        )
    job = {
        "version": JOB_VERSION,
        "prompts": {"suffix": prompts.suffix, "sha256": hashlib.sha256(content).hexdigest()},
        "export": file_hash(export_dir / FILE_NAME),
        "format": options.format,
        "jit_compile": options.jit_compile,
        **settings,
    }
    with Folder.opened(out, options.format) as folder:
        folder.claim(job, failures)
        if failures:
            print(f"rows that cannot be drawn: {len(failures)}, see {out / FAILED}", flush=True)
        missing = folder.missing(rows)
        if missing:
            manifest.check_files(export_dir)
            print(f"{len(rows) - len(missing)} of {len(rows)} rows are done already", flush=True)
            units = divide(missing, manifest.shapes.largest_batch)
            _work(folder, units, options, export_dir, cache)
        if lost := len(folder.failures) - len(failures):
            print(f"rows whose pictures can be read no more: {lost}, see {out / FAILED}")
        which = " that can be drawn" if folder.failures else ""
        nothing = "" if missing else ", nothing is missing"
        print(f"{out}: all {len(rows) - lost} rows{which} are done{nothing}.")
        return 1 if folder.failures else 0


def _work(
    folder: Folder,
    units: list[Unit],
    options: argparse.Namespace,
    export_dir: Path,
    cache: str | None,
) -> None:
    from sd_tf.serving.batch import work

    model = work.Loading(str(export_dir), options.jit_compile, cache)
    wanted = work.Resources(
        options.address, options.workers, options.cpus_per_worker, options.gpus_per_worker
    )
    by_index = {unit.index: unit for unit in units}
    made, answered, count = 0, 0, sum(len(unit.rows) for unit in units)
    try:
        with work.connected(wanted) as resources:
            print(f"workers: {resources.workers}", flush=True)
            with Progress(count, "rows") as progress:
                for index, pngs, reasons in work.answers(units, model, resources):
                    made += _add(folder, by_index[index], pngs, reasons)
                    answered += len(pngs)
                    progress.reach(answered)
    except KeyboardInterrupt:
        raise BatchError(f"Interrupted. {KEPT.format(made)}") from None
    except (BatchError, OSError) as error:
        raise BatchError(f"{str(error).rstrip('.')}. {KEPT.format(made)}") from error


def _add(folder: Folder, unit: Unit, pngs: list[bytes], reasons: list[str]) -> int:
    """Write a unit's pictures, and the reason where a row has none; return how many there are."""
    rows = list(zip(unit.rows, pngs, reasons, strict=True))
    if failures := [Failure(row.number, row.id, reason) for row, _, reason in rows if reason]:
        folder.fail(failures)
    drawn = [(row, png) for row, png, reason in rows if not reason]
    if drawn:
        of_rows, made = zip(*drawn, strict=True)
        folder.add(replace(unit, rows=of_rows), list(made))
    return len(drawn)


def _check_resources(options: argparse.Namespace) -> None:
    if options.workers is not None and options.workers < 1:
        raise BatchError(f"--workers is at least 1. Received: {options.workers}")
    for name in ("cpus_per_worker", "gpus_per_worker"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < float("inf"):
            raise BatchError(f"--{name} is a number from 0. Received: {value}")
    if (options.address or "").startswith("ray://"):
        raise BatchError(
            f"Ray Data does not run through Ray's client. Start the job on a node of the cluster, "
            f"with --address auto (`ray job submit` does). Received: {options.address}"
        )
