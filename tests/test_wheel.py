"""The wheel, installed elsewhere and run from an empty folder, with no file of the checkout."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DATA = (".safetensors", ".json", ".txt", ".gz", ".html", ".js", ".css", ".svg", ".j2")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [
            *pip,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            folder,
            _source(folder),
        ],
        check=True,
    )
    (path,) = folder.glob("*.whl")
    return path


def _source(folder: Path) -> Path:
    """Copy what git would have, so that nothing is built into the checkout or taken from it."""
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if name.startswith("sd_tf/") or name in ("pyproject.toml", "README.md", "LICENSE"):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Install the wheel into an environment that holds the core dependencies and nothing else.

    They are links to this environment's packages, which take gigabytes; the checkout is not there.
    """
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    pip += ["--python", folder / "bin" / "python"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": folder, "platbase": folder}))
    for name in _dependencies(wheel):
        for entry in _entries(name):
            if not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    return folder


def _dependencies(wheel: Path) -> set[str]:
    """Return what the wheel's metadata requires, and all that this requires, without extras."""
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    required = message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    found, waiting = set(), _names(required)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            waiting += _names(metadata.requires(name) or [])
        except metadata.PackageNotFoundError:  # of another system or Python
            continue
        found.add(name)
    return found


def _names(requirements: list[str]) -> list[str]:
    core = [text for text in requirements if "extra ==" not in text]
    return [re.match(r"[\w.-]+", text)[0].lower().replace("_", "-") for text in core]


def _entries(name: str) -> set[Path]:
    """Return a distribution's files and folders right below site-packages."""
    distribution = metadata.distribution(name)
    tops = {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}
    return {Path(distribution.locate_file(top)) for top in tops}


def test_what_the_wheel_holds(wheel):
    listed = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "sd_tf").rglob("*"):
        if path.suffix in (*DATA, ".py") and "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT)) in listed
    assert not [name for name in listed if name.startswith(("tests/", "studies/", "build/"))]


def test_from_an_empty_folder(installed, tmp_path):
    """Run the three commands that a newcomer runs, in fewer steps."""
    inherited = ("PYTHONPATH", "KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL")
    environment = {name: v for name, v in os.environ.items() if name not in inherited}

    def run(program, *arguments):
        result = subprocess.run(
            [installed / "bin" / program, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return result.stdout

    assert Path(run("python", "-c", "import sd_tf; print(sd_tf.__file__)")).is_relative_to(
        installed
    )
    run("sd-tf", "export", "--max_steps=2", "--height=32", "--width=32", "--verify=off")
    run("sd-tf", "generate", "a large red star", "--num_steps=2", "--nojit_compile")
    told = run("sd-tf", "benchmark", "--jit_compile", "--num_steps=1", "--repeat=1")
    assert "SavedModels + XLA" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exports", "out"]
    assert list((tmp_path / "out").glob("*.png"))
