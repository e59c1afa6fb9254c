"""JSON files that hold an object."""

import json
from pathlib import Path
from typing import Any


def read_object(path: Path, error: type[Exception]) -> dict[str, Any]:
    """Read a JSON object; raise `error` where the file is missing or holds anything else."""
    if not path.is_file():
        raise error(f"No such file: {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is not valid JSON: {cause}") from cause
    if not isinstance(content, dict):
        raise error(f"{path} must hold a JSON object. Received: {type(content).__name__}")
    return content
