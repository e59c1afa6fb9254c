"""An export appears whole or not at all, and only where it may."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from sd_tf.export import bundles
from sd_tf.files.publish import staging
from sd_tf.runtime.manifest import FILE_NAME, ExportError
from tests.exports import micro_folder, small_export

ROOT = Path(__file__).parent.parent


def test_existing_and_foreign_targets(tmp_path):
    target = tmp_path / "export"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    for options, message in (
        ({}, r"exists. Choose another `output_dir`, or set `overwrite`"),
        (
            {"overwrite": True},
            r"is not an export \(it has no pipeline\.json\), so `overwrite` leaves it alone",
        ),
    ):
        with pytest.raises(ExportError, match=message):
            small_export(target, **options)
    assert (target / "notes.txt").read_text() == "mine"


def staged(target, overwrite):
    return staging(target, overwrite, FILE_NAME, ExportError)


def write(folder, text):
    (folder / "pipeline.json").write_text(text)


def test_overwriting_is_one_step(tmp_path):
    target = tmp_path / "export"
    with staged(target, overwrite=False) as folder:
        write(folder, "one")
        assert not target.exists()
    with pytest.raises(RuntimeError), staged(target, overwrite=True) as folder:
        write(folder, "lost")
        raise RuntimeError
    assert (target / "pipeline.json").read_text() == "one"
    with staged(target, overwrite=True) as folder:
        write(folder, "two")
        assert (target / "pipeline.json").read_text() == "one"
    assert (target / "pipeline.json").read_text() == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".export.lock", "export"]


def test_a_symbolic_link_stays_one(tmp_path):
    """The folder behind it is replaced, again and again; both names have one lock."""
    link, target = tmp_path / "link", tmp_path / "disk" / "export"
    link.symlink_to(target)
    for number in range(3):
        with staged(link, overwrite=number > 0) as folder:
            write(folder, str(number))
            with (
                pytest.raises(ExportError, match=r"Another export to .*disk/export is running"),
                staged(target, overwrite=True),
            ):
                pass
        assert link.is_symlink() and not target.is_symlink()
        assert (target / "pipeline.json").read_text() == str(number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
    assert sorted(path.name for path in target.parent.iterdir()) == [".export.lock", "export"]


def test_two_exports_to_one_target(tmp_path):
    target = tmp_path / "export"
    with staged(target, overwrite=False) as folder:
        write(folder, "first")
        with pytest.raises(ExportError, match=r"Another export to .*export is running"):
            small_export(target)
    assert (target / "pipeline.json").read_text() == "first"


def test_unwritable_target(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match=r"cannot be written to .*a part of its path is a file"):
        small_export(tmp_path / "file" / "export")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.decode()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_no_space_left(small_disk):
    target = small_disk / "export"
    with pytest.raises(ExportError, match=r"no space is left on the device"):
        small_export(target)
    assert [path.name for path in small_disk.iterdir()] == [".export.lock"]


def test_no_space_left_for_values(small_disk, tmp_path):
    """TensorFlow's error is told as Python's, also where values are copied and merged."""
    values, model = tmp_path / "values", small_disk / "model"
    tf.raw_ops.SaveV2(
        prefix=str(values), tensor_names=["x"], shape_and_slices=[""], tensors=[tf.ones(2**20)]
    )
    with pytest.raises(OSError, match="No space left") as problem:
        bundles._copy(values, model, ["x"])
    assert problem.value.errno == errno.ENOSPC


@pytest.mark.long
def test_killed_at_random_moments():
    """-9 at 10 moments of exports: the target is absent or complete, and the next run succeeds.

    CONTRIBUTING.md has the command for 100 kills of the embedded checkpoint's exports.
    """
    size = ["--height=16", "--width=16", "--max_steps=2", "--verify=off"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.kill_exports", "--kills=10", "--whole_every=5", "--fork"]
        + ["--", f"--checkpoint={micro_folder()}", *size],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[0]) >= 5, result.stdout


def test_a_mount_point_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    with (
        pytest.raises(ExportError, match=r"is a mount point.* folder below it as `output_dir`"),
        staging(tmp_path, True, FILE_NAME, ExportError),
    ):
        pytest.fail("it was let in")
