"""Imports run one way, as CONTRIBUTING.md draws them."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sd_tf"

# Part → the parts that it may import. Every folder or module right below sd_tf/ is a part.
ALLOWED = {
    "config": set(),
    "tokenizer": {"config"},
    "models": {"config"},
    "weights": {"config", "tokenizer", "models"},
    "checkpoints": {"config", "tokenizer", "models", "weights"},
    "sampling": {"config"},
    "manifest": set(),
    "compile_cache": set(),
    "commands": set(),
    "publish": {"manifest"},
    "components": {"config", "sampling", "manifest", "weights"},
    "export": {"components", "publish", "config", "sampling", "manifest", "models", "weights"},
    "pictures": set(),
    "request": {"manifest", "pictures", "sampling"},
    "chain": {"tokenizer", "sampling", "manifest", "pictures", "request"},
    "saved_model": {"manifest"},
    "pipeline": {"chain", "compile_cache", "manifest", "request", "saved_model"},
    "embedded": {"checkpoints", "export", "weights"},
    "generate": {"chain", "config", "embedded", "manifest", "pictures", "pipeline", "request"},
    "jax": {
        *("chain", "commands", "compile_cache", "components", "config", "generate", "manifest"),
        *("models", "publish", "sampling", "weights"),
    },
    "serving": {
        "chain",
        "pictures",
        "request",
        "commands",
        "compile_cache",
        "config",
        "tokenizer",
        "manifest",
        "pipeline",
        "generate",
        "saved_model",
    },
    "bench": {
        "chain",
        "commands",
        "compile_cache",
        "config",
        "tokenizer",
        "manifest",
        "models",
        "pipeline",
        "checkpoints",
        "sampling",
        "training",
        "weights",
    },
    "training": {
        "config",
        "tokenizer",
        "models",
        "weights",
        "checkpoints",
        "sampling",
        "manifest",
        "pictures",
        "pipeline",
        "generate",
        "jax",
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
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").is_file()
    )


def test_every_part_is_listed():
    assert parts() == sorted(ALLOWED)


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_run_one_way(part):
    path = PACKAGE / f"{part}.py"
    files = [path] if path.is_file() else sorted((PACKAGE / part).rglob("*.py"))
    assert files
    for file in files:
        surplus = imported_parts(file) - ALLOWED[part] - {part}
        assert not surplus, f"{file.relative_to(ROOT)} may not import {surplus}"


@pytest.mark.parametrize(
    ("module", "backend", "absent"),
    [
        ("sd_tf", "tensorflow", ("keras", "tensorflow", "numpy")),
        ("sd_tf.config", "tensorflow", ("keras", "tensorflow", "jax", "numpy")),
        ("sd_tf.tokenizer", "tensorflow", ("keras", "tensorflow", "jax")),
        ("sd_tf.models", "jax", ("tensorflow", "torch")),
        (
            "sd_tf.pipeline",
            "tensorflow",
            ("sd_tf.models", "sd_tf.weights", "sd_tf.export", "keras_cv", "torch"),
        ),
        ("sd_tf.jax.pipeline", "jax", ("keras", "tensorflow", "torch", "sd_tf.models")),
        ("sd_tf.components.diffusion", "jax", ("tensorflow", "torch", "sd_tf.models")),
        ("sd_tf.sampling.loop", "jax", ("tensorflow", "torch", "sd_tf.models")),
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
