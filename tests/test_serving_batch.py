"""Offline batches: what is read and refused, what is drawn, and that a kill costs nothing."""

import contextlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from sd_tf.cli.main import main
from sd_tf.cli.progress import Progress
from sd_tf.runtime.call import Call
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.png import read_parameters
from sd_tf.serving.batch import BatchError, work
from sd_tf.serving.batch.folder import Folder, safe_name
from sd_tf.serving.batch.rows import Row, check_rows, check_settings, divide, read_entries
from tests.exports import check_equal, pipeline_of, shared_export

ROOT = Path(__file__).parent.parent
BATCH = 2
COUNT, FEWER = 200, 80
SETTINGS = {
    "seed": 0,
    "num_steps": 2,
    "guidance_scale": 7.5,
    "scheduler": "ddim",
}
PROMPTS = [f"picture number {i}" for i in range(COUNT)]


@pytest.fixture(scope="module")
def exported():
    return shared_export()


@pytest.fixture(scope="module")
def manifest(exported):
    return Manifest.read(exported)


@pytest.fixture(scope="module")
def pipe(exported):
    return pipeline_of(exported)


def arguments(exported, prompts, out, *more):
    names = {"--export_dir": exported, "--prompts": prompts, "--out": out}
    given = [str(word) for pair in names.items() for word in pair]
    return ["serve", "batch", *given, "--num_steps", "1", "--nojit_compile", *more]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def parquet(path: Path, **columns) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


# Reading


def entries(path: Path):
    return read_entries(path, path.read_bytes())


def test_txt(tmp_path):
    path = written(tmp_path / "p.txt", "\ufeffone, two\r\n\r\n dre\u2028i \nend")
    assert [entry["prompt"] for entry in entries(path)] == ["one, two", "", " dre\u2028i ", "end"]


def test_csv(tmp_path):
    text = 'id,prompt,seed\n7,"a, ""b""\nc",\n8,x\n9,y,1,2\n,,5\n'
    assert entries(written(tmp_path / "p.csv", text)) == [
        {"id": "7", "prompt": 'a, "b"\nc'},
        "2 values for 3 columns; a text with commas needs quotes",
        "4 values for 3 columns; a text with commas needs quotes",
        {"seed": "5"},
    ]


def test_jsonl(tmp_path):
    lines = [
        '{"prompt": "a\u2028b", "seed": null}',
        "",
        "[1]",
        '"text"',
        '{"prompt": "b", "id": 3}',
    ]
    first, empty, array, text, last = entries(written(tmp_path / "p.jsonl", "\n".join(lines)))
    assert first == {"prompt": "a\u2028b"} and last == {"prompt": "b", "id": 3}
    assert empty.startswith("this is not JSON (Expecting value")
    assert array == "this is no JSON object but list"
    assert text == "this is no JSON object but str"


def test_parquet(tmp_path):
    path = parquet(tmp_path / "p.parquet", prompt=["a", None], seed=[1.0, None], id=["x", "y"])
    assert entries(path) == [{"prompt": "a", "seed": 1.0, "id": "x"}, {"id": "y"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.pdf", "a", "Prompts are read from .txt, .csv, .jsonl, .parquet. Received: p.pdf"),
        ("p.txt", "", "p.txt has no rows"),
        ("p.txt", b"a\n\xff\n", "p.txt, line 2, is not UTF-8"),
        ("p.csv", "", "p.csv: no column prompt. Received: none"),
        ("p.csv", "text\na\n", "p.csv: unknown column text. The columns are prompt, negative_p"),
        ("p.csv", "seed,id\n1,2\n", "p.csv: no column prompt. Received: seed, id"),
        ("p.csv", "prompt,prompt\na,b\n", "a column occurs twice"),
        ("p.csv", 'prompt\na\n"b\nc\n', "p.csv, line 4, is not CSV: unexpected end of data"),
        ("p.jsonl", '{"prompt": "a"}\n{"promt": "b"}', "p.jsonl: unknown column promt"),
        ("p.jsonl", '{"seed": 1}', "p.jsonl: no column prompt. Received: seed"),
        ("p.parquet", "PAR1 damaged PAR1", "p.parquet is not readable as parquet"),
    ],
)
def test_a_file_is_refused_as_a_whole(tmp_path, name, content, message):
    with pytest.raises(BatchError) as raised:
        entries(written(tmp_path / name, content))
    assert message in str(raised.value)


def test_damaged_pages_and_unknown_columns_of_parquet(tmp_path):
    path = parquet(tmp_path / "p.parquet", prompt=[f"{i:064d}" for i in range(99)])
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)
    path.write_bytes(content)
    with pytest.raises(BatchError, match=r"p\.parquet is not readable as parquet: "):
        entries(path)
    with pytest.raises(BatchError, match=r"unknown column caption"):
        entries(parquet(tmp_path / "q.parquet", prompt=["a"], caption=["b"]))


# Checking

TEXT = "a text of at most 10000 characters"
SEED = "a whole number from -2147483648 to 2147483647"
GUIDANCE = "a number from -1000000 to 1000000"
BAD_ROWS = [
    ("not read", "not read"),
    ({}, "the prompt is empty"),
    ({"prompt": "\t "}, "the prompt is empty"),
    ({"prompt": 7}, f"prompt is {TEXT}. Received: 7"),
    ({"prompt": b"a" * 99}, f"prompt is {TEXT}. Received: b'" + "a" * 58 + "…"),
    ({"prompt": "\ud800"}, rf"prompt is {TEXT}. Received: '\ud800'"),
    ({"prompt": "a", "negative_prompt": ["b"]}, f"negative_prompt is {TEXT}. Received: ['b']"),
    ({"prompt": "a", "seed": 2**31}, f"seed is {SEED}. Received: 2147483648"),
    ({"prompt": "a", "seed": 1.5}, f"seed is {SEED}. Received: 1.5"),
    ({"prompt": "a", "seed": True}, f"seed is {SEED}. Received: True"),
    ({"prompt": "a", "seed": float("inf")}, f"seed is {SEED}. Received: inf"),
    ({"prompt": "a", "seed": "1.5"}, f"seed is {SEED}. Received: '1.5'"),
    (
        {"prompt": "a", "num_steps": 9},
        "num_steps is a whole number from 1 to 8, the export's limit. Received: 9",
    ),
    (
        {"prompt": "a", "num_steps": "0"},
        "num_steps is a whole number from 1 to 8, the export's limit. Received: 0",
    ),
    ({"prompt": "a", "guidance_scale": "nan"}, f"guidance_scale is {GUIDANCE}. Rec"),
    ({"prompt": "a", "guidance_scale": 10**400}, f"guidance_scale is {GUIDANCE}. Rec"),
    ({"prompt": "a", "guidance_scale": False}, f"guidance_scale is {GUIDANCE}. Rec"),
    ({"prompt": "a", "scheduler": "magic"}, "scheduler is one of "),
    ({"prompt": "a", "scheduler": 3}, "scheduler is one of "),
    ({"prompt": "a", "id": 1.5}, "an id is a text or a whole number. Received: 1.5"),
    ({"prompt": "a", "id": ""}, "an id is a text or a whole number. Received: ''"),
    ({"prompt": "a", "id": "\udfff"}, "an id is a text or a whole number"),
    ({"prompt": "a", "id": "first"}, "the id is also that of row 0"),
    ({"prompt": "a", "id": 0}, None),
]


def test_failed_rows_have_reasons(manifest):
    content = [{"prompt": "a", "id": "first"}, *(entry for entry, _ in BAD_ROWS)]
    rows, failures = check_rows(content, SETTINGS, manifest)
    assert [row.id for row in rows] == ["first", "0"]
    assert [failure.row for failure in failures] == list(range(1, len(BAD_ROWS)))
    for failure, (_, reason) in zip(failures, BAD_ROWS, strict=False):
        assert failure.reason.startswith(reason)
    assert failures[0].id == "000001" and failures[-1].id == "first"


def test_a_row_overrides_the_flags(manifest):
    own = {
        "prompt": "b",
        "negative_prompt": "",
        "seed": "-7",
        "num_steps": 3.0,
        "guidance_scale": "2",
        "scheduler": "euler",
        "width": "64",
        "id": 12,
    }
    rows, failures = check_rows([{"prompt": "a"}, own], {**SETTINGS, "seed": 5}, manifest)
    size = {"height": 64, "width": 64}
    assert rows[0] == Row(
        0, "000000", Call("a", seed=5, num_steps=2, guidance_scale=7.5, scheduler="ddim", **size)
    )
    assert rows[1] == Row(
        1, "12", Call("b", "", seed=-7, num_steps=3, guidance_scale=2.0, scheduler="euler", **size)
    )
    assert not failures


def test_a_seed_follows_the_row_and_has_32_bits(manifest):
    last = {**SETTINGS, "seed": 2**31 - 2}
    rows, failures = check_rows([{"prompt": "a"}, {}, {"prompt": "c"}], last, manifest)
    assert [row.call.seed for row in rows] == [2**31 - 2]
    assert [f.reason for f in failures][1].startswith(f"seed is {SEED}")


def test_flags_are_checked(manifest):
    for changed, message in (
        ({"scheduler": "magic"}, "scheduler is one of"),
        ({"seed": 2**31}, f"seed is {SEED}"),
        ({"guidance_scale": float("nan")}, f"guidance_scale is {GUIDANCE}"),
    ):
        with pytest.raises(ValueError, match=message):
            check_settings({**SETTINGS, **changed}, manifest)


def test_units_are_alike_and_hold_each_row_once(manifest):
    content = [
        {"prompt": str(i), "num_steps": 1 + i % 2, **({"negative_prompt": ""} if i % 3 else {})}
        for i in range(50)
    ]
    rows, _ = check_rows(content, SETTINGS, manifest)
    units = divide(rows, BATCH)
    assert sorted(row.id for unit in units for row in unit.rows) == [row.id for row in rows]
    assert [unit.index for unit in units] == list(range(len(units)))
    assert [unit.rows[0].id for unit in units] == sorted(unit.rows[0].id for unit in units)
    for unit in units:
        assert len({row.call.alike() for row in unit.rows}) == 1
    assert sum(len(unit.rows) < BATCH for unit in units) <= 4  # of each kind the last


# The folder


def test_names_are_safe_and_differ():
    long = "x" * 5000
    ids = [".", "..", "../a", "/etc/passwd", "a\0b", "a b", "a%20b", ".lock", "ü", "", "~", long]
    names = [safe_name(identity) for identity in [*ids, long + "y", "x" * 150]]
    assert len(set(names)) == len(names)
    for name in names:
        assert len(f"{name}.png") < 200 and not set(name) & set("/\0\\ ") and name[:1] != "."
    assert safe_name("A-1_b.c") == "A-1_b.c" and safe_name("../a") == "%2E.%2Fa"


def test_one_job_at_a_time(tmp_path, exported, capsys):
    prompts = written(tmp_path / "p.txt", "a")
    with Folder.opened(tmp_path / "out", "png"):
        assert main(arguments(exported, prompts, tmp_path / "out")) == 1
    assert f"Another job is writing to {tmp_path / 'out'}. Wait" in capsys.readouterr().err


def test_paths_are_refused(tmp_path, exported, capsys):
    prompts = written(tmp_path / "p.txt", "a")
    strange = tmp_path / "strange"
    strange.mkdir()
    written(strange / "000000.png", "not ours")
    for given, message in (
        (arguments(exported, tmp_path / "no.txt", tmp_path / "out"), "no.txt cannot be read: "),
        (arguments(exported, tmp_path, tmp_path / "out"), "cannot be read: "),
        (arguments(tmp_path, prompts, tmp_path / "out"), f"{tmp_path} is not an export"),
        (arguments(exported, prompts, prompts / "out"), "cannot be written: "),
        (arguments(exported, prompts, "/proc/out"), "/proc/out cannot be written: "),
        (arguments(exported, prompts, strange), "is not empty and has no job.json"),
        (arguments(exported, prompts, tmp_path / "out", "--workers", "0"), "--workers is at least"),
        (
            arguments(exported, prompts, tmp_path / "out", "--gpus_per_worker", "-1"),
            "--gpus_per_worker is a number from 0. Received: -1.0",
        ),
        (
            arguments(exported, prompts, tmp_path / "out", "--address", "ray://host:10001"),
            "Start the job on a node of the cluster, with --address auto",
        ),
        (
            arguments(exported, prompts, tmp_path / "out", "--num_steps", "9"),
            "--num_steps is a whole number from 1 to 8",
        ),
    ):
        assert main(given) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_belongs_to_one_job(tmp_path, exported, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sd_tf.serving.batch.work", None)  # nothing may be run
    monkeypatch.delattr("sd_tf.serving.batch.work", raising=False)
    prompts = written(tmp_path / "p.txt", "a\n\nb")
    given = arguments(exported, prompts, tmp_path / "out")
    with pytest.raises(ModuleNotFoundError):
        main(given)
    failed = (tmp_path / "out/failed.jsonl").read_text()
    assert json.loads(failed) == {"row": 1, "id": "000001", "reason": "the prompt is empty"}
    capsys.readouterr()
    for more, message in (
        (["--num_steps", "3"], "num_steps was 1, is 3"),
        (["--negative_prompt", "é"], 'negative_prompt was null, is "é"'),
        (
            ["--seed", "4", "--format", "parquet"],
            'format was "png", is "parquet"; seed was 0, is 4',
        ),
    ):
        assert main([*given, *more]) == 1
        assert f"{tmp_path / 'out'} holds another job: {message}. Give" in capsys.readouterr().err
    written(prompts, "a\n\nc")
    assert main(given) == 1
    assert 'holds another job: prompts was {"suffix"' in capsys.readouterr().err
    written(tmp_path / "out/job.json", "{")
    assert main(given) == 1
    assert "job.json cannot be read" in capsys.readouterr().err


def test_a_half_written_file_does_not_count(tmp_path, manifest):
    rows, _ = check_rows([{"prompt": "a"}, {"prompt": "b"}], SETTINGS, manifest)
    unit, *_ = divide(rows, BATCH)
    with Folder.opened(tmp_path / "out", "png") as folder:
        folder.claim({}, [])
        written(folder.path / ".partial", "half")
        written(folder.path / "000000.png", "first")
        assert folder.missing(rows) == rows[1:]
        folder.add(unit, [b"other", b"second"])
        assert folder.missing(rows) == []
        assert (folder.path / "000000.png").read_bytes() == b"first"
        assert (folder.path / "000001.png").read_bytes() == b"second"


def test_parts_where_other_rows_fail_than_before(tmp_path, manifest):
    """A row that can be drawn at the second start only shifts no other."""
    content = [{"prompt": name, "num_steps": 1} for name in "abcde"]
    before = ["no such picture", *content[1:]]
    failures = []
    for entries, missing in ((before, "bcde"), (content, "a"), (before, "")):
        rows, failures = check_rows(entries, SETTINGS, manifest)
        with Folder.opened(tmp_path / "out", "parquet") as folder:
            folder.claim({}, failures)
            found = folder.missing(rows)
            assert "".join(row.call.prompt for row in found) == missing
            for unit in divide(found, BATCH):
                folder.add(unit, [row.call.prompt.encode() for row in unit.rows])
            assert (folder.path / "failed.jsonl").exists() == bool(failures)
    parts = sorted(folder.path.glob("part-*"))
    assert [path.stem for path in parts] == ["part-000000", "part-000001", "part-000003"]
    table = pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in parts])
    assert table["png"].to_pylist() == [b"a", b"b", b"c", b"d", b"e"]
    written(parts[0], "PAR1 damaged PAR1")
    with pytest.raises(BatchError, match=r"part-000000\.parquet cannot be read: .* Delete it"):
        folder.missing(rows)


def test_a_job_is_known_again_by_its_lists(tmp_path):
    job = {"original_size": (512, 768), "control_scale": (0.5, 1.0)}
    with Folder.opened(tmp_path / "out", "png") as folder:
        folder.claim(job, [])
        folder.claim(job, [])
        with pytest.raises(BatchError, match=r"original_size was \[512, 768\], is \[512, 64\]"):
            folder.claim({**job, "original_size": (512, 64)}, [])


# Progress and endings


def test_progress(capsys, monkeypatch):
    times = iter([100.0, 105.0, 120.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    with Progress(100, "rows") as progress:
        for done in (20, 40, 60):
            progress.reach(done)
    out, errors = capsys.readouterr()
    assert (out, errors) == ("", "60 of 100 rows, 2 a second, 20 s left\n")


def test_gpus_are_shared_out():
    assert work._chosen(work.Resources(), 0).workers == 1
    four = work._chosen(work.Resources(), 4)
    assert (four.workers, four.gpus_per_worker) == (4, 1)
    assert work._chosen(work.Resources(gpus_per_worker=0.5), 2).workers == 4
    assert work._chosen(work.Resources(gpus_per_worker=0), 2).workers == 1
    assert work._chosen(work.Resources(gpus_per_worker=0.2), 1).workers == 5
    with pytest.raises(BatchError, match="1 workers with 2 GPUs each need more than the 1 "):
        work._chosen(work.Resources(gpus_per_worker=2), 1)
    with pytest.raises(BatchError, match="2 workers with 1 GPUs each need more than the 0 that"):
        work._chosen(work.Resources(workers=2, gpus_per_worker=1), 0)


class Answers:
    """In place of Ray's handle of an actor."""

    def __init__(self, attempts):
        for name in ("begin", "end"):
            setattr(self, name, SimpleNamespace(remote=getattr(attempts, name)))


def test_errors_of_a_worker_are_its_answers(exported, manifest, tmp_path, monkeypatch):
    monkeypatch.setattr(work.ray, "get", lambda answer: answer)
    call = Call("a", seed=5, num_steps=2, guidance_scale=7.5, scheduler="ddim")
    item = {"unit": 3, "calls": json.dumps([call.described()])}
    attempts = Answers(work.Attempts())
    resources = work.Resources(workers=1, gpus_per_worker=0)
    lost = work.Worker(work.Loading(str(tmp_path), False, None), resources, attempts)
    answer = lost(item)
    assert answer["problem"].startswith(f"{tmp_path} is not an export") and answer["unit"] == 3

    worker = work.Worker(work.Loading(str(exported), False, None), resources, attempts)
    assert worker.problem is None
    answer = worker(item)
    assert len(answer["pngs"]) == 1 and not answer["problem"]
    gone = {**call.described(), "image": str(tmp_path / "gone.png"), "strength": 0.5}
    for calls, drawn in (([gone, call.described()], [False, True]), ([gone, gone], [False] * 2)):
        answer = worker({"unit": 3, "calls": json.dumps(calls)})
        assert [bool(png) for png in answer["pngs"]] == drawn and not answer["problem"]
        assert [not reason for reason in answer["reasons"]] == drawn
        assert answer["reasons"][0] == (
            f"image: {tmp_path / 'gone.png'} cannot be read (No such file or directory)."
        )
    attempts = Answers(work.Attempts())
    monkeypatch.setattr(worker, "attempts", attempts)
    assert not worker(item)["problem"]
    monkeypatch.delattr(worker, "pipe")
    assert worker(item)["problem"].startswith("AttributeError: ")
    for _ in range(work.ATTEMPTS):
        answer = worker(item)
    expected = f"The unit 3 has ended its worker's process {work.ATTEMPTS + 1} times, often a sign"
    assert answer["problem"].startswith(expected)


@pytest.mark.parametrize("file_format", ["png", "parquet"])
def test_a_picture_that_is_lost_after_the_check(
    exported, tmp_path, monkeypatch, capsys, file_format
):
    """Its row is listed as one that failed at the check; the others are drawn."""
    reason = "image: b.png cannot be read (No such file or directory)."
    lost_prompts = ["b", "d"]

    def answers(units, *_):
        for unit in units:
            reasons = [reason if row.call.prompt in lost_prompts else "" for row in unit.rows]
            pngs = [
                b"" if lost else row.call.prompt.encode()
                for row, lost in zip(unit.rows, reasons, strict=True)
            ]
            yield unit.index, pngs, reasons

    monkeypatch.setattr(work, "connected", contextlib.nullcontext)
    monkeypatch.setattr(work, "answers", answers)
    monkeypatch.setattr(work.Resources, "workers", 1)
    prompts, out = written(tmp_path / "p.txt", "a\nb\n\nd\ne"), tmp_path / "out"
    given = arguments(exported, prompts, out, "--format", file_format)
    assert main(given) == 1
    printed = capsys.readouterr().out
    assert f"rows whose pictures can be read no more: 2, see {out / 'failed.jsonl'}\n" in printed
    assert printed.endswith(f"{out}: all 2 rows that can be drawn are done.\n")
    failed = [json.loads(line) for line in (out / "failed.jsonl").read_text().splitlines()]
    assert failed == [
        {"row": 1, "id": "000001", "reason": reason},
        {"row": 2, "id": "000002", "reason": "the prompt is empty"},
        {"row": 3, "id": "000003", "reason": reason},
    ]
    if file_format == "png":
        found = [(path.stem, path.read_bytes()) for path in sorted(out.glob("*.png"))]
    else:
        table = pyarrow.concat_tables(
            pyarrow.parquet.read_table(path) for path in sorted(out.glob("part-*"))
        )
        found = list(zip(table["id"].to_pylist(), table["png"].to_pylist(), strict=True))
    assert found == [("000000", b"a"), ("000004", b"e")]

    lost_prompts.clear()
    assert main(given) == 1  # the pictures are there again
    assert capsys.readouterr().out.endswith(f"{out}: all 4 rows that can be drawn are done.\n")
    assert len((out / "failed.jsonl").read_text().splitlines()) == 1


# Drawing


@pytest.fixture(scope="module")
def left_running():
    """What killed drivers leave has ended with the tests: Ray's agents take a minute to notice."""
    processes = []
    yield processes
    _, alive = psutil.wait_procs(processes, timeout=120)
    for process in alive:
        process.kill()
    assert not alive, f"left running: {alive}"


@contextlib.contextmanager
def driver(given, *program, left_running=None):
    """The command in a process; what it started is gone at the end, or goes to `left_running`."""
    process = subprocess.Popen(
        [sys.executable, *(program or ("-m", "sd_tf")), *given],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    own = {}
    try:
        yield process, own
    finally:
        own |= descendants(process)
        process.kill()
        process.communicate()
        if left_running is not None:
            left_running += own.values()
        else:
            _, alive = psutil.wait_procs(own.values(), timeout=60)
            for left in alive:
                left.kill()
            assert not alive, f"left running: {alive}"


def descendants(process) -> dict[int, psutil.Process]:
    try:
        return {p.pid: p for p in psutil.Process(process.pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return {}


def workers(process) -> list[psutil.Process]:
    found = []
    for candidate in descendants(process).values():
        with contextlib.suppress(psutil.Error):
            if "".join(candidate.cmdline()).startswith("ray::MapWorker"):
                found.append(candidate)
    return found


def wait_for(folder: Path, pattern: str, count: int, process) -> int:
    deadline = time.monotonic() + 240
    while (found := len(list(folder.glob(pattern)))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{found} {pattern}"
        time.sleep(0.05)
    return found


def drawing(exported, folder):
    """Arguments that draw the first prompts into a folder's Parquet files."""
    prompts = parquet(folder / "prompts.parquet", prompt=PROMPTS[:FEWER])
    return arguments(exported, prompts, folder / "out", "--format", "parquet")


@pytest.fixture(scope="module")
def finished(exported, tmp_path_factory):
    """The folder and arguments of a job that one driver finished, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    given = drawing(exported, folder)
    with driver(given) as (process, own):
        wait_for(folder / "out", "part-*", 1, process)
        own |= descendants(process)
        output, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
    return folder / "out", given, output


@pytest.fixture(scope="module")
def broken(exported, tmp_path_factory, left_running):
    """Folder and arguments of a job whose driver was killed, and the parts that it left."""
    folder = tmp_path_factory.mktemp("broken")
    given = drawing(exported, folder)
    with driver(given, left_running=left_running) as (process, own):
        wait_for(folder / "out", "part-*", 4, process)
        own |= descendants(process)
        process.kill()
    parts = {path: path.stat().st_mtime_ns for path in (folder / "out").glob("part-*")}
    assert 4 <= len(parts) < FEWER // BATCH
    return folder / "out", given, parts


@pytest.fixture(scope="module")
def drawn(exported, tmp_path_factory, broken):
    """All prompts, drawn by two workers that are killed; folder and what the command printed.

    `broken` first: what its killed driver leaves has more than a minute to end.
    """
    folder = tmp_path_factory.mktemp("drawn")
    prompts = written(folder / "prompts.txt", "\n".join(PROMPTS))
    given = arguments(exported, prompts, folder / "out", "--workers", "2")
    with driver(given) as (process, own):
        for count in (20, 80):
            assert wait_for(folder / "out", "*.png", count, process) < COUNT
            own |= descendants(process)
            victim = workers(process)[0]
            victim.kill()
        own |= descendants(process)
        output, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
    return folder, given, output


def parameters_of(number, pipe):
    return {
        "prompt": PROMPTS[number],
        "height": 64,
        "width": 64,
        "num_steps": 1,
        "guidance_scale": 7.5,
        "seed": number,
        "scheduler": pipe.manifest.default_sampler,
        "prompt_syntax": "plain",
    }


@pytest.mark.long
def test_killed_workers_cost_nothing(drawn, pipe):
    folder, _, output = drawn
    out = folder / "out"
    expected = pipe(PROMPTS, num_steps=1, seed=0).images
    names = [f"{number:06d}.png" for number in range(COUNT)]
    assert sorted(p.name for p in out.iterdir()) == sorted([".lock", "job.json", *names])
    for name, image in zip(names, expected, strict=True):
        check_equal(np.asarray(Image.open(out / name)), image)
    assert read_parameters(str(out / names[7]))[0] == parameters_of(7, pipe)
    assert "0 of 200 rows are done already\nworkers: 2\n" in output
    assert output.endswith("all 200 rows are done.\n")


def check_parts(out, pipe):
    """They hold the pipeline's pictures, metadata included."""
    parts = sorted(out.glob("part-*"))
    names = [f"part-{number:06d}.parquet" for number in range(0, FEWER, BATCH)]
    assert [path.name for path in parts] == names
    table = pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in parts])
    assert table["id"].to_pylist() == [f"{number:06d}" for number in range(FEWER)]
    assert table["prompt"].to_pylist() == PROMPTS[:FEWER]
    assert table["seed"].to_pylist() == list(range(FEWER))
    assert set(table["negative_prompt"].to_pylist()) == {None}
    pictures = pipe(PROMPTS[:FEWER], num_steps=1, seed=0).images
    for number, png in enumerate(table["png"].to_pylist()):
        check_equal(np.asarray(Image.open(io.BytesIO(png))), pictures[number])
        assert read_parameters(io.BytesIO(png))[0] == parameters_of(number, pipe)


def test_a_job_draws_all_rows(finished, pipe):
    out, _, output = finished
    assert f"0 of {FEWER} rows are done already\n" in output
    assert output.endswith(f"{out}: all {FEWER} rows are done.\n")
    check_parts(out, pipe)


def test_a_rerun_does_nothing(finished):
    out, given, _ = finished
    before = {path: path.stat().st_mtime_ns for path in out.glob("[!.]*")}
    code = (
        f"import sys; from sd_tf.cli.main import main; status = main({given!r})\n"
        "print(status, [name for name in ('ray', 'tensorflow') if name in sys.modules])"
    )
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert time.perf_counter() - start < 10
    assert result.stdout.splitlines() == [
        f"{out}: all {FEWER} rows are done, nothing is missing.",
        "0 []",
    ]
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("[!.]*")}


@pytest.mark.long
def test_a_killed_driver_goes_on(broken, pipe):
    out, given, before = broken
    with driver(given) as (process, own):
        wait_for(out, "part-*", len(before) + 1, process)
        own |= descendants(process)
        output, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
    assert f"{len(before) * BATCH} of {FEWER} rows are done already\n" in output
    assert before == {path: path.stat().st_mtime_ns for path in before}
    check_parts(out, pipe)


@pytest.mark.long
def test_rows_of_their_own_settings(exported, pipe, tmp_path):
    lines = [
        {"prompt": "plain"},
        {"prompt": "../up", "id": "../up", "num_steps": 2, "seed": -5},
        {"prompt": ""},
        {"prompt": "not this", "negative_prompt": "bad", "guidance_scale": 3},
        {"prompt": "nor this", "negative_prompt": "", "guidance_scale": 3, "id": "n"},
        {"prompt": "euler", "scheduler": "euler", "num_steps": 9},
        {"prompt": "euler", "scheduler": "euler", "num_steps": 3},
        {"prompt": "plain too"},
    ]
    prompts = written(tmp_path / "p.jsonl", "\n".join(json.dumps(line) for line in lines))
    out = tmp_path / "out"
    with driver(arguments(exported, prompts, out, "--seed", "100")) as (process, _):
        output, error = process.communicate(timeout=300)
    assert process.returncode == 1, error
    assert f"rows that cannot be drawn: 2, see {out / 'failed.jsonl'}\n" in output
    assert output.endswith(f"{out}: all 6 rows that can be drawn are done.\n")
    failed = [json.loads(line) for line in (out / "failed.jsonl").read_text().splitlines()]
    assert [failure["row"] for failure in failed] == [2, 5]

    calls = {
        ("000000", "000007"): pipe(["plain", "plain too"], num_steps=1, seed=[100, 107]),
        ("%2E.%2Fup",): pipe("../up", num_steps=2, seed=-5),
        ("000003", "n"): pipe(
            ["not this", "nor this"], ["bad", ""], num_steps=1, guidance_scale=3, seed=[103, 104]
        ),
        ("000006",): pipe("euler", num_steps=3, seed=106, scheduler="euler"),
    }
    assert {path.stem for path in out.glob("*.png")} == {name for names in calls for name in names}
    for names, result in calls.items():
        for name, image in zip(names, result.images, strict=True):
            png = (out / f"{name}.png").read_bytes()
            check_equal(np.asarray(Image.open(io.BytesIO(png))), image)
    assert read_parameters(str(out / "n.png"))[0]["negative_prompt"] == ""


DYING = """
import os, signal, sys
from sd_tf.cli.main import main
from sd_tf.serving.batch import work

class Dying(work.Worker):
    def load(self, model, resources):
        pass

    def draw(self, calls):
        os.kill(os.getpid(), signal.SIGKILL)

work.Worker, work.ATTEMPTS = Dying, 2
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
def test_what_kills_its_worker_each_time_ends_the_job(exported, tmp_path):
    prompts = written(tmp_path / "p.txt", "a")
    given = arguments(exported, prompts, tmp_path / "out")
    with driver(given, "-c", DYING) as (process, _):
        _, error = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "A worker failed: The unit 0 has ended its worker's process" in error
    assert "0 rows were made and are kept; the same command makes the others." in error
