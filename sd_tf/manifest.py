"""`pipeline.json`: what an export is. Written by `export`, read strictly by what runs it."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "pipeline.json"
FORMAT_VERSION = 2  # 2: what each component was compiled for
VERSION_FOLDER = "1"  # TensorFlow Serving wants a number below each model's name


class ExportError(ValueError):
    """An export that cannot be made, or cannot be used: the rule, and how to mend it."""


def write_record(record, path: Path, version: int) -> None:
    """A dataclass as JSON that says in which version of its format it is."""
    content = {"format_version": version, **dataclasses.asdict(record)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_record(path: Path, version: int, again: str) -> dict[str, Any]:
    """The fields, unchecked; `again` is what to do where the file is of no use."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop("format_version")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ExportError(
            f"{path} cannot be read: {error!r}. {again[0].upper()}{again[1:]}."
        ) from error
    if found != version:
        raise ExportError(
            f"{path} has format version {found!r}, this sd_tf reads {version}: use the sd_tf that "
            f"wrote it, or {again}."
        )
    return content


@dataclass(frozen=True)
class Component:
    """One SavedModel: the signatures that it serves and the files that it consists of."""

    signatures: tuple[str, ...]
    target: str  # cpu | gpu | tpu
    rewrites: tuple[str, ...]  # of `models.lowering`, in the compiled signatures
    files: dict[str, dict[str, Any]]  # path below the export → size, and sha256 of the small ones


@dataclass(frozen=True)
class Manifest:
    family: str
    batch_size: int
    height: int
    width: int
    latent_shape: tuple[int, int, int]
    precision: str
    max_steps: int
    calls: dict[str, list[int]]  # sampler → model calls for 1…max_steps steps; 0: not possible
    default_sampler: str
    guidance: str  # classifier_free | none
    guidance_rescale: float
    prediction: str
    latent_inputs: str  # none | image | mask_and_image
    time_ids: int  # SDXL's size numbers per image; 0 elsewhere
    zero_empty_negative: bool
    scaling_factor: float
    jit_compiled_text_encoder: bool
    tokenizers: dict[str, str]  # text encoder → folder
    components: dict[str, Component]
    checkpoint: dict[str, Any]
    verification: dict[str, Any]
    versions: dict[str, str]

    @property
    def samplers(self) -> list[str]:
        """In the order of the `scheduler` input."""
        return list(self.calls)

    def model_calls(self, scheduler: str, num_steps: int) -> int:
        """How many model calls a run takes; wrong schedulers and step counts are refused here."""
        if scheduler not in self.calls:
            raise ValueError(
                f"The scheduler is one of {', '.join(self.samplers)}. Received: {scheduler!r}"
            )
        calls = self.calls[scheduler]
        if num_steps not in range(1, self.max_steps + 1):
            raise ValueError(
                f"num_steps is a whole number from 1 to {self.max_steps}, the export's max_steps. "
                f"Received: {num_steps!r}"
            )
        if not calls[num_steps - 1]:
            most = max(n + 1 for n, count in enumerate(calls) if count)
            raise ValueError(
                f"The scheduler {scheduler} takes at most {most} steps. Received: {num_steps}"
            )
        return calls[num_steps - 1]

    def write(self, folder: Path) -> None:
        write_record(self, folder / FILE_NAME, FORMAT_VERSION)

    @classmethod
    def read(cls, folder: str | Path) -> "Manifest":
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise ExportError(
                f"{folder} is not an export: it has no {FILE_NAME}. "
                f"Make one with serialize_savedmodels.py."
            )
        content = read_record(path, FORMAT_VERSION, "export again")
        expected = {field.name for field in dataclasses.fields(cls)}
        if expected != content.keys():
            raise ExportError(
                f"{path} is not complete or not ours: missing "
                f"{sorted(expected - content.keys()) or 'nothing'}, unknown "
                f"{sorted(content.keys() - expected) or 'nothing'}. Export again."
            )
        components = {
            name: Component(
                tuple(part["signatures"]), part["target"], tuple(part["rewrites"]), part["files"]
            )
            for name, part in content["components"].items()
        }
        latent_shape = tuple(content["latent_shape"])
        return cls(**{**content, "components": components, "latent_shape": latent_shape})

    def check_files(self, folder: Path) -> None:
        """Every file there, of its size, and the small ones unchanged.

        The large ones hold variables, whose checksums TensorFlow compares as it reads them.
        """
        for name, component in self.components.items():
            for relative, known in component.files.items():
                path = folder / relative
                if not path.is_file():
                    raise ExportError(f"{path} of {name} is missing. Export again.")
                if path.stat().st_size != known["size"]:
                    raise ExportError(
                        f"{path} of {name} has {path.stat().st_size} bytes, it was exported with "
                        f"{known['size']}. Copy or export it again."
                    )
                if "sha256" in known and file_hash(path) != known["sha256"]:
                    raise ExportError(
                        f"{path} of {name} is not the file that was exported: its SHA-256 differs. "
                        f"Copy or export it again."
                    )


LARGE = 1 << 26


def describe_files(folder: Path, component: str) -> dict[str, dict[str, Any]]:
    files = {}
    for path in sorted((folder / component).rglob("*")):
        if path.is_file():
            size = path.stat().st_size
            is_data = (".data-" in path.name or path.suffix == ".safetensors") and size > LARGE
            hashed = {} if is_data else {"sha256": file_hash(path)}
            files[str(path.relative_to(folder))] = {"size": size, **hashed}
    return files


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
