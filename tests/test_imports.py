"""Imports run one way, as CONTRIBUTING.md draws them."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sd_tf.cli.dispatch import Group
from sd_tf.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sd_tf"

EVERYWHERE = {"errors"}  # which every part may import
# Part → the parts that it may import. Every folder or module right below sd_tf/ is a part.
ALLOWED = {
    "errors": set(),
    "config": set(),
    "files": set(),
    "adapters": {"config", "files"},
    "tokenizer": {"config", "files"},
    "models": {"config"},
    "sampling": {"config"},
    "weights": {"adapters", "config", "files", "tokenizer", "models"},
    "checkpoints": {"config", "files", "tokenizer", "models", "weights"},
    "runtime": {"adapters", "config", "files", "sampling", "tokenizer"},
    "components": {"config", "runtime", "sampling", "models", "weights"},
    "export": {
        *("adapters", "checkpoints", "components", "config", "files", "models", "runtime"),
        *("sampling", "tokenizer", "weights"),
    },
    "jax": {
        *("components", "config", "files", "models", "runtime", "sampling", "tokenizer"),
        "weights",
    },
    "serving": {"config", "files", "runtime", "tokenizer"},
    "training": {
        *("adapters", "checkpoints", "components", "config", "files", "jax", "models", "runtime"),
        *("sampling", "tokenizer", "weights"),
    },
    "bench": {
        *("checkpoints", "components", "config", "files", "models", "runtime", "sampling"),
        *("serving", "tokenizer", "training", "weights"),
    },
    "cli": {
        *("adapters", "bench", "checkpoints", "components", "config", "export", "files", "jax"),
        *("models", "runtime", "sampling", "serving", "tokenizer", "training", "weights"),
    },
}


def part_of(module: str) -> str | None:
    names = module.split(".")
    return names[1] if names[0] == "sd_tf" and len(names) > 1 else None


def imported_parts(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {part_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they lead"
            found |= {part_of(f"{node.module}.{alias.name}") for alias in node.names}
    return found - {None}


def parts():
    return sorted(
        path.stem
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" and path.stem not in ("__init__", "__main__"))
        or (path / "__init__.py").is_file()
    )


def test_every_part_is_listed():
    assert parts() == sorted(ALLOWED)


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_run_one_way(part):
    path = PACKAGE / f"{part}.py"
    files = [path] if path.is_file() else sorted((PACKAGE / part).rglob("*.py"))
    assert files
    for file in files:
        surplus = imported_parts(file) - ALLOWED[part] - EVERYWHERE - {part}
        assert not surplus, f"{file.relative_to(ROOT)} may not import {surplus}"


def test_nothing_imports_a_command():
    commands = set()
    for entry in COMMANDS.values():
        found = entry.commands.values() if isinstance(entry, Group) else [entry]
        commands |= {command.module for command in found}
    assert len(commands) > 20
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            else:
                continue
            assert not names & commands, f"{path.relative_to(ROOT)} imports {names & commands}"


@pytest.mark.parametrize(
    ("module", "backend", "absent"),
    [
        ("sd_tf", "tensorflow", ("keras", "tensorflow", "numpy")),
        ("sd_tf.config", "tensorflow", ("keras", "tensorflow", "jax", "numpy")),
        ("sd_tf.adapters", "tensorflow", ("keras", "tensorflow", "jax", "torch")),
        ("sd_tf.tokenizer.clip", "tensorflow", ("keras", "tensorflow", "jax")),
        ("sd_tf.tokenizer.tables", "tensorflow", ("keras", "tensorflow", "jax")),
        (
            "sd_tf.runtime.pipeline",
            "tensorflow",
            ("sd_tf.models", "sd_tf.weights", "sd_tf.export", "keras_cv", "torch"),
        ),
        ("sd_tf.jax.pipeline", "jax", ("keras", "tensorflow", "torch", "sd_tf.models")),
        ("sd_tf.components.diffusion", "jax", ("tensorflow", "torch", "sd_tf.models")),
        ("sd_tf.weights", "jax", ("tensorflow", "torch", "keras_cv")),
        ("sd_tf.weights", "tensorflow", ("torch", "keras_cv", "diffusers", "transformers")),
    ],
)
def test_what_an_import_pulls_in(module, backend, absent):
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


def test_public_names():
    import sd_tf

    for name in sd_tf.__all__:
        assert getattr(sd_tf, name) is not None
    with pytest.raises(AttributeError, match=r"'sd_tf' has no attribute 'nothing'"):
        sd_tf.nothing  # noqa: B018


# Pinned for what builds the package, and for what needs them to be of one release.
BESIDE = {"core": {"setuptools", "wheel"}, "serve": {"pandas"}, "bench": {"jaxlib"}}


def required(lines) -> set[str]:
    names = [re.match(r"\w[\w.-]*", line) for line in lines]  # not comments, nor -r FILE
    return {name[0].lower().replace("_", "-") for name in names if name}


@pytest.mark.parametrize("extra", ["core", "serve", "bench", "test"])
def test_the_extras_are_what_is_pinned(extra):
    """What the package requires, and what `make` installs, are the same packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {"core": project["dependencies"], **project["optional-dependencies"]}
    includes = {"core": (), "test": ("core", "serve", "bench")}.get(extra, ("core",))
    pinned, beside = set(), set()
    for name in (extra, *includes):
        file = ROOT / "requirements" / f"{name}.txt"
        pinned |= required(file.read_text(encoding="utf-8").splitlines())
        beside |= BESIDE.get(name, set())
    assert required(extras["core"]) | required(extras[extra]) == pinned - beside
