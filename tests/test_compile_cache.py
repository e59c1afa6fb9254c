"""Compiled code that is kept: what a second process saves, and everything that can be wrong."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sd_tf.cli.main import main
from tests.exports import micro_export

ROOT = Path(__file__).parent.parent
PICTURES = """
import hashlib, os, sys
from sd_tf.runtime.pipeline import Pipeline
pipe = Pipeline.load(sys.argv[1], compile_cache=sys.argv[2])
assert "TF_XLA_FLAGS" not in os.environ, "child processes would get it"
print(hashlib.sha256(pipe(["a", "b"], num_steps=2, seed=1).images.tobytes()).hexdigest())
"""
COMPILED = 2  # the loop and the decoder


def start(code: str, *arguments) -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if key != "TF_XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def end(process: subprocess.Popen) -> tuple[str, str]:
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return out, errors


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that two processes filled at once, and the pictures' digest."""
    cache = tmp_path_factory.mktemp("cache") / "new" / "xla"
    both = [start(PICTURES, micro_export(), cache) for _ in range(2)]
    (first, _), (second, _) = [end(process) for process in both]
    assert first == second
    return cache, first


def test_second_process_compiles_nothing(filled):
    cache, pictures = filled
    before = entries(cache)
    assert COMPILED <= len(before) <= 2 * COMPILED
    out, errors = end(start(PICTURES, micro_export(), cache))
    assert out == pictures
    assert entries(cache) == before, "code that is compiled again has another checksum"
    assert "damaged" not in errors


@pytest.mark.long
def test_another_program_finds_them_too(filled):
    """XLA's keys hold functions' names, which are the file's, whatever else TensorFlow made."""
    cache, pictures = filled
    before = entries(cache)
    others = """
import sys, tensorflow as tf
from sd_tf.runtime.compile_cache import set_compile_cache
set_compile_cache(sys.argv[2])
for number in range(5):
    tf.function(lambda x, number=number: x + number)(tf.zeros(()))
"""
    assert end(start(others + PICTURES, micro_export(), cache))[0] == pictures
    assert entries(cache) == before


def test_wrong_entries(filled, tmp_path):
    """TensorFlow alone fails on most of them, and dies of wrong machine code."""
    cache, pictures = filled
    shutil.copytree(cache, tmp_path / "cache")
    loop, decoder = one_of_each(tmp_path / "cache")
    content = bytearray(loop.read_bytes())
    code = content.index(b"\x7fELF") + 256
    content[code : code + 128] = bytes(byte ^ 0xFF for byte in content[code : code + 128])
    loop.write_bytes(content)
    key, checksum, _ = decoder.name.split(".")
    cut = decoder.with_name(f"cut.{checksum}.pb")
    cut.write_bytes(decoder.read_bytes()[:-1])
    elsewhere = tmp_path / "cache" / "tensorflow-2.0.0-x86_64-0123456789abcdef" / decoder.name
    elsewhere.parent.mkdir()
    shutil.copyfile(decoder, elsewhere)
    own, part = decoder.with_name(f"{key}.pb"), decoder.with_name("0123.part")
    for path in (own, part):  # TensorFlow's name for it; a copy that was not finished
        path.write_bytes(b"not read")
    of_other_key = decoder.with_name(f"{loop.name.split('.')[0]}.{checksum}.pb")
    decoder.rename(of_other_key)

    out, errors = end(start(PICTURES, micro_export(), tmp_path / "cache"))
    assert out == pictures
    for path in (loop, cut, of_other_key):
        assert f"{path} is damaged or of another machine; it is removed" in errors
        assert not path.exists()
    left = set(entries(tmp_path / "cache"))
    assert left > {elsewhere, own, part} and len(left) == 3 + COMPILED


def one_of_each(cache: Path) -> list[Path]:
    """An entry for each compilation, those of the second process removed."""
    by_key = {path.name.split(".")[0]: path for path in entries(cache)}
    assert len(by_key) == COMPILED
    for path in set(entries(cache)) - set(by_key.values()):
        path.unlink()
    return sorted(by_key.values(), key=lambda path: path.stat().st_size, reverse=True)


PUBLISHING = """
import shutil, sys
from pathlib import Path
import tensorflow as tf
from sd_tf.runtime.compile_cache import publish, set_compile_cache
cache = Path(sys.argv[1])
set_compile_cache(cache)
(kind,) = cache.iterdir()
kind.rmdir()
kind.touch()  # nothing can be put into it
for number in range(2):
    print(tf.function(lambda: tf.ones(()) + number + 5, jit_compile=True)().numpy())
    publish()
set_compile_cache(str(cache))
try:
    set_compile_cache(cache / "other")
except ValueError as error:
    print(error)
"""


def test_a_cache_that_takes_no_more(tmp_path):
    """As on a full disk: a warning, once, and the work goes on."""
    out, errors = end(start(PUBLISHING, tmp_path / "cache"))
    first, second, message = out.splitlines()
    assert (first, second) == ("6.0", "7.0")
    assert errors.count("Compiled code is not kept in") == 1
    assert message.startswith("A process has one compile cache")
    assert message.endswith(f"Received: {tmp_path / 'cache' / 'other'}")


def test_too_late(tmp_path):
    code = """
import sys
import tensorflow as tf
tf.config.list_physical_devices()
from sd_tf.runtime.compile_cache import set_compile_cache
set_compile_cache(sys.argv[1])
"""
    _, errors = end(start(code, tmp_path / "cache"))
    assert f"{tmp_path / 'cache'} is not used: the compile cache has to be set before" in errors


def test_unwritable_folder(tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "prompts.txt").write_text("a\n")
    export = ["--export_dir", str(micro_export())]
    batch = ["serve", "batch", *export, "--prompts", str(tmp_path / "prompts.txt")]
    for command in (
        ["generate", "a", *export],
        ["serve", "ray", *export],
        [*batch, "--num_steps", "2", "--out", str(tmp_path / "out")],
    ):
        for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/xla")):
            assert main([*command, "--compile_cache", str(folder)]) == 1
            errors = capsys.readouterr().err
            assert f"is a folder that can be written. Received: {folder} (" in errors
