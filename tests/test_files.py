"""Files: absent or complete, locked by who lives, and read row by row."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from sd_tf.files import atomic, locks
from sd_tf.files.publish import staging
from sd_tf.files.rows import ParquetRows, RowsError, read_rows


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed(code: str, *arguments: Path) -> None:
    """Run code which says when it is in the middle of its work, and kill it there."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys, time\nfrom pathlib import Path\n{code}", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()


WAIT = "print('ready', flush=True); time.sleep(60)"


# Writing


@pytest.mark.parametrize("options", [{}, {"durable": True}, {"shared": True}])
def test_a_file_is_replaced_when_its_block_ends(tmp_path, options):
    path = tmp_path / "a.json"
    for content in ("one", "two"):
        before = path.read_text() if path.exists() else None
        with atomic.new_file(path, **options) as part:
            part.write_text(content)
            assert (path.read_text() if path.exists() else None) == before
        assert path.read_text() == content
    with pytest.raises(RuntimeError), atomic.new_file(path, **options) as part:
        part.write_text("half")
        raise RuntimeError
    assert path.read_text() == "two" and names(tmp_path) == ["a.json"]


def test_text_and_bytes(tmp_path):
    atomic.write(tmp_path / "a", "grün")
    assert (tmp_path / "a").read_bytes() == "grün".encode()
    atomic.write(tmp_path / "a", b"\xff", durable=True)
    assert (tmp_path / "a").read_bytes() == b"\xff"


def test_two_writers_of_one_file(tmp_path):
    path = tmp_path / "a"
    with atomic.new_file(path, shared=True) as first, atomic.new_file(path, shared=True) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first" and names(tmp_path) == ["a"]


def test_a_killed_writer_changes_nothing_and_its_left_over_is_used_up(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    code = f"""
from sd_tf.files.atomic import new_file
with new_file(Path(sys.argv[1])) as part:
    part.write_text("half")
    {WAIT}
"""
    killed(code, path)
    assert path.read_text() == "old" and len(names(tmp_path)) == 2
    atomic.write(path, "new")
    assert path.read_text() == "new" and names(tmp_path) == ["a"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_when_its_block_ends(tmp_path, monkeypatch, exchange):
    """Also on file systems that cannot exchange two folders."""
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    target = tmp_path / "deep" / "target"
    for number in range(2):
        with atomic.new_folder(target) as folder:
            assert names(folder) == []
            (folder / f"{number}").touch()
            assert target.exists() == (number > 0)
        assert names(target) == [str(number)]
    with pytest.raises(RuntimeError), atomic.new_folder(target) as folder:
        (folder / "half").touch()
        raise RuntimeError
    assert names(target) == ["1"] and names(target.parent) == ["target"]


def test_killed_between_the_steps_of_a_replacement(tmp_path):
    """Where two folders cannot be exchanged: the old one is put back, and no copy is lost."""
    target = tmp_path / "target"
    (target / "old").mkdir(parents=True)
    code = f"""
from sd_tf.files import atomic
atomic._exchange = lambda one, other: False
rename = atomic.os.rename
def second_step(one, other):
    if Path(other) == Path(sys.argv[1]):
        {WAIT}
    rename(one, other)
atomic.os.rename = second_step
with atomic.new_folder(Path(sys.argv[1])) as folder:
    (folder / "new").touch()
"""
    killed(code, target)
    assert not target.exists()
    with pytest.raises(RuntimeError), atomic.new_folder(target):
        assert names(target) == ["old"]
        raise RuntimeError
    assert names(target) == ["old"] and names(tmp_path) == ["target"]


def test_a_replacement_that_fails_in_the_middle(tmp_path, monkeypatch):
    target, rename = tmp_path / "target", os.rename

    def refuse_the_new_one(one, other):
        if one.name.endswith(atomic.STAGING):
            raise PermissionError
        rename(one, other)

    (target / "old").mkdir(parents=True)
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", refuse_the_new_one)
    with pytest.raises(PermissionError), atomic.new_folder(target):
        pass
    assert names(target) == ["old"] and names(tmp_path) == ["target"]


def test_a_link_to_a_folder_stays_one(tmp_path):
    link, target = tmp_path / "link", tmp_path / "target"
    (target / "old").mkdir(parents=True)
    link.symlink_to(target)
    with atomic.new_folder(link) as folder:
        (folder / "new").touch()
    assert link.is_symlink() and names(target) == ["new"]
    assert names(tmp_path) == ["link", "target"]


def test_a_folder_of_a_killed_process_is_made_anew(tmp_path):
    target = tmp_path / "target"
    code = f"""
from sd_tf.files.atomic import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "half").touch()
    {WAIT}
"""
    killed(code, target)
    assert not target.exists()
    with atomic.new_folder(target) as folder:
        (folder / "all").touch()
    assert names(target) == ["all"] and names(tmp_path) == ["target"]


# Locks


def test_a_lock_refuses_at_once(tmp_path):
    path, refusal = tmp_path / ".lock", ValueError("held by another")
    with locks.held(path, refusal):
        with pytest.raises(ValueError, match="held by another"), locks.held(path, refusal):
            pass
        other = threading.Thread(target=lambda: seen.append(is_held(path)))
        seen = []
        other.start()
        other.join()
        assert seen == [True]
    assert path.exists() and not is_held(path)


def test_a_lock_that_is_waited_for(tmp_path):
    path, order = tmp_path / ".lock", []

    def wait():
        with locks.held(path):
            order.append("second")

    with locks.held(path):
        other = threading.Thread(target=wait)
        other.start()
        other.join(0.2)
        order.append("first")
    other.join()
    assert order == ["first", "second"]


def is_held(path: Path) -> bool:
    """Ask another process."""
    code = """
import sys
from pathlib import Path
from sd_tf.files.locks import held
with held(Path(sys.argv[1]), SystemExit(7)):
    pass
"""
    status = subprocess.run([sys.executable, "-c", code, path]).returncode
    assert status in (0, 7)
    return status == 7


def test_a_lock_ends_with_its_process(tmp_path):
    path = tmp_path / ".lock"
    code = f"""
from sd_tf.files.locks import held
with held(Path(sys.argv[1]), SystemExit(7)):
    {WAIT}
"""
    killed(code, path)
    assert path.exists() and not is_held(path)


def test_a_lock_in_an_unwritable_place(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError), locks.held(tmp_path / "file" / ".lock", ValueError()):
        pass


# Publishing


class PublishError(Exception):
    pass


def test_only_what_bears_the_marker_is_replaced(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    with staging(target, True, "marker", PublishError) as folder:  # an empty folder is nobody's
        (folder / "marker").touch()
    with (
        pytest.raises(PublishError, match=r"target exists. Choose another"),
        staging(target, False, "marker", PublishError),
    ):
        pass
    (target / "marker").unlink()
    (target / "notes").touch()
    with (
        pytest.raises(PublishError, match=r"target is not an export \(it has no marker\)"),
        staging(target, True, "marker", PublishError),
    ):
        pass
    assert names(target) == ["notes"]
    with (
        pytest.raises(PublishError, match=r"notes is not an export \(it has no marker\)"),
        staging(target / "notes", True, "marker", PublishError),
    ):
        pass


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_appears_while_a_folder_is_written_stays(tmp_path, overwrite):
    target = tmp_path / "target"
    with (
        pytest.raises(PublishError, match=r"target (exists\. Choose|is not an export)"),
        staging(target, overwrite, "marker", PublishError) as folder,
    ):
        (folder / "marker").touch()
        target.mkdir()
        (target / "notes").touch()
    assert names(target) == ["notes"] and names(tmp_path) == [".target.lock", "target"]


def test_what_appears_before_the_lock_is_held_stays(tmp_path, monkeypatch):
    target, held = tmp_path / "target", locks.held

    def later(*arguments):
        target.mkdir()
        (target / "marker").touch()
        return held(*arguments)

    monkeypatch.setattr(locks, "held", later)
    with (
        pytest.raises(PublishError, match=r"target exists. Choose another"),
        staging(target, False, "marker", PublishError),
    ):
        pytest.fail("it was let in")
    assert names(target) == ["marker"]


@pytest.mark.parametrize(
    ("place", "number", "is_told"),
    [
        (".target.staging/a", errno.EACCES, True),
        ("target", errno.EROFS, True),
        ("", errno.ENOTDIR, True),  # the folder that the target lies in
        (None, errno.ENOSPC, True),  # a write has no name
        (None, errno.EACCES, False),
        ("checkpoint/a.safetensors", errno.EACCES, False),
        ("other/b", errno.ENOSPC, False),
    ],
)
def test_only_errors_at_the_target_are_said_to_be_of_it(tmp_path, place, number, is_told):
    at = [] if place is None else [str(tmp_path / place)]
    problem = OSError(number, "refused", *at)
    expected = PublishError if is_told else OSError
    with (
        pytest.raises(expected, match="cannot be written to" if is_told else "refused"),
        staging(tmp_path / "target", False, "marker", PublishError),
    ):
        raise problem


# Rows


def write_rows(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_lines(tmp_path):
    path = write_rows(tmp_path / "a.txt", "\ufeffone\r\n\r\n two\u2028three \nend")
    found = read_rows(path, line_column="prompt")
    assert found.columns == ["prompt"]
    assert [row["prompt"] for row in found] == ["one", "", " two\u2028three ", "end"]
    assert list(read_rows(write_rows(tmp_path / "b.txt", "a\n\n"))) == [{"text": "a"}, {"text": ""}]
    assert list(read_rows(write_rows(tmp_path / "c.txt", ""))) == []


def test_csv(tmp_path):
    path = write_rows(tmp_path / "a.csv", 'id,text\n7,"a, ""b""\nc"\n\n8\n,x\n1,2,3\n')
    found = read_rows(path)
    assert found.columns == ["id", "text"]
    assert list(found) == [
        {"id": "7", "text": 'a, "b"\nc'},
        "1 values for 2 columns; a text with commas needs quotes",
        {"id": None, "text": "x"},
        "3 values for 2 columns; a text with commas needs quotes",
    ]
    assert read_rows(write_rows(tmp_path / "b.csv", "")).columns == []


def test_jsonl(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", '{"a": 1, "b": null}\r\n\n[2]\n{"a":\n{"c": "x"}')
    found = read_rows(path)
    assert found.columns is None
    first, empty, array, cut, last = found
    assert (first, last) == ({"a": 1, "b": None}, {"c": "x"})
    assert array == "this is no JSON object but list"
    assert all(text.startswith("this is not JSON (Expecting value") for text in (empty, cut))
    deep = write_rows(tmp_path / "b.jsonl", "[" * 100_000 + '\n{"a": 1}')
    problem, good = read_rows(deep)
    assert problem.startswith("this is not JSON (") and good == {"a": 1}


def test_content_that_was_read_already(tmp_path):
    assert list(read_rows(tmp_path / "none.csv", b"a\n1\n")) == [{"a": "1"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"a\n\xff\n", "a.txt, line 2, is not UTF-8: "),
        ("a.csv", 'a\n1\n"b\nc\n', "a.csv, line 4, is not CSV: unexpected end of data."),
        ("a.parquet", "PAR1 damaged PAR1", "a.parquet is not readable as parquet: "),
    ],
)
def test_a_file_that_is_wrong_as_a_whole(tmp_path, name, content, message):
    path = write_rows(tmp_path / name, content)
    with pytest.raises(RowsError, match=re.escape(message)):
        list(read_rows(path))


@pytest.fixture
def three_groups(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"n": list(range(7)), "text": [f"{n:064d}" for n in range(7)]}
    pyarrow.parquet.write_table(
        pyarrow.table(columns), path, row_group_size=3, compression="none", use_dictionary=False
    )
    return path


def test_parquet(three_groups):
    table = ParquetRows(three_groups)
    assert table.columns == ["n", "text"] and table.group_sizes == [3, 3, 1]
    assert table.group(1, ["n"]) == [{"n": 3}, {"n": 4}, {"n": 5}]
    expected = [{"n": n, "text": f"{n:064d}"} for n in range(7)]
    assert list(table) == list(read_rows(three_groups)) == expected
    assert list(read_rows(three_groups, three_groups.read_bytes())) == expected


def test_a_row_group_is_read_when_it_is_wanted(three_groups):
    """A damaged second group leaves the rows of the first one readable."""
    footer = pyarrow.parquet.ParquetFile(three_groups).metadata
    start = footer.row_group(1).column(1).data_page_offset
    content = bytearray(three_groups.read_bytes())
    content[start : start + 16] = b"\xff" * 16
    three_groups.write_bytes(content)
    found = iter(read_rows(three_groups))
    assert [next(found)["n"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RowsError, match=r"a\.parquet is not readable as parquet"):
        next(found)
