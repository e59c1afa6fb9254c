"""`pipeline.json`, which describes an export: `export` writes it, and what runs it reads it."""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

from sd_tf.config import AUTOENCODER, DECODER, PREVIEW_DECODER, LatentScale
from sd_tf.errors import SdTfError
from sd_tf.runtime.adapter_places import NO_PLACES, AdapterPlaces
from sd_tf.runtime.controls import ControlRecord
from sd_tf.runtime.image_prompts import NO_IMAGE_PROMPTS, VISION_ENCODER, ImagePrompts
from sd_tf.runtime.reuse import NO_REUSE, ReuseRecord
from sd_tf.runtime.shapes import Shapes

FILE_NAME = "pipeline.json"
LONGEST_SHOWN = 100  # characters of a wrong value
FORMAT_VERSION = 11  # 11: tiles
TEXT_TO_IMAGE = "text_to_image"  # the SavedModel that is all components in one
VERSION_FOLDER = "1"  # TensorFlow Serving wants a number below each model's name


class ExportError(SdTfError):
    """An export that cannot be made, or cannot be used: the rule, and how to mend it."""


def write_record(record, path: Path, version: int) -> None:
    """Write a dataclass as JSON, with the version of its format."""
    content = {"format_version": version, **dataclasses.asdict(record)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_record(
    path: Path, version: int, again: str, upgrades: Mapping[int, Callable] = MappingProxyType({})
) -> dict[str, Any]:
    """Read a record's fields from JSON; `typed` checks them.

    Args:
        again: how to mend a file that cannot be used, for the message: "export again".
        upgrades: older version → a function that changes its fields into this version's.
    """
    mend = f"{again[0].upper()}{again[1:]}."
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop("format_version")
        is_older = found in upgrades
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ExportError(f"{path} cannot be read: {error!r}. {mend}") from error
    if is_older:
        try:
            upgrades[found](content)
        except (AttributeError, KeyError, TypeError) as error:
            raise ExportError(f"{path} cannot be upgraded: {error!r}. {mend}") from error
    elif found != version:
        raise ExportError(
            f"{path} has format version {found!r}, this sd_tf reads {version}: use the sd_tf that "
            f"wrote it, or {again}."
        )
    return content


def typed(kind: Any, value: Any, place: str) -> Any:
    """Return a JSON value as a dataclass, a container or a value of the type `kind`.

    Raises:
        ExportError: the value has another type, or a dataclass other fields; `place` says where.
    """
    inner, many = typing.get_args(kind), typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        fields = typing.get_type_hints(kind)
        if fields.keys() != value.keys():
            raise ExportError(
                f"{place} is incomplete or was not written by sd_tf: missing "
                f"{sorted(fields.keys() - value.keys()) or 'nothing'}, unknown "
                f"{sorted(value.keys() - fields.keys()) or 'nothing'}."
            )
        return kind(
            **{name: typed(fields[name], value[name], f"{place}: {name}") for name in fields}
        )
    if many is dict and isinstance(value, dict):
        return {name: typed(inner[1], each, f"{place}: {name}") for name, each in value.items()}
    if many in (list, tuple) and isinstance(value, list):
        if many is list or inner[-1] is Ellipsis or len(value) == len(inner):
            return many(typed(inner[0], each, place) for each in value)
    elif kind is Any or type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ExportError(f"{place} is not {getattr(kind, '__name__', kind)}: {shown(value)}.")


def shown(value: Any) -> str:
    """Return a value's beginning, for a message."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


@dataclass(frozen=True)
class ComponentRecord:
    """One SavedModel: the signatures that it serves and the files that it consists of."""

    signatures: tuple[str, ...]
    target: str  # cpu | gpu | tpu
    rewrites: tuple[str, ...]  # of `config.rewrites`, in the compiled signatures
    files: dict[str, dict[str, Any]]  # path below the export → size; sha256, or a fingerprint
    # Of its weights: name, format, sha256 of files; merged adapters and embeddings, if any.
    checkpoint: dict[str, Any]


@dataclass(frozen=True)
class SchedulerRecord:
    """A scheduler that the export knows."""

    number: int  # what the `scheduler` input of a signature takes
    calls: list[int]  # model calls for 1…max_steps steps; 0: there is no such run

    @property
    def least_steps(self) -> int:
        return min(self._possible)

    @property
    def most_steps(self) -> int:
        return max(self._possible)

    @property
    def _possible(self) -> list[int]:
        return [number for number, count in enumerate(self.calls, start=1) if count]


@dataclass(frozen=True)
class Manifest:
    family: str
    shapes: Shapes
    precision: str
    storage: dict[str, str]  # the checkpoint's parts whose kernels have fewer bits, and how
    max_steps: int
    schedulers: dict[str, SchedulerRecord]
    history: int  # predictions that the loop keeps from step to step
    default_sampler: str
    guidance: str  # classifier_free | none
    guidance_rescale: float
    prediction: str
    latent_inputs: str  # none | image | mask_and_image
    time_ids: int  # SDXL's size numbers per image; 0 elsewhere
    further_scales: tuple[str, ...]  # of guidance that a call may ask for, beside the usual one
    suited: dict[str, float]  # defaults of the checkpoint and its family for a call
    zero_empty_negative: bool
    scaling_factor: float
    shift_factor: float
    jit_compiled_text_encoder: bool
    prompt_chunks: int  # each of 75 tokens; texts are tokenized to 77 · prompt_chunks ids
    adapters: AdapterPlaces
    controls: tuple[ControlRecord, ...]  # ControlNets in the loop, in the order of their inputs
    image_prompts: ImagePrompts
    reuse: ReuseRecord
    tile: int  # most pixels of a side that are decoded at once; 0: all
    tokenizers: dict[str, str]  # text encoder → folder
    components: dict[str, ComponentRecord]
    verification: dict[str, Any]
    versions: dict[str, str]

    @property
    def samplers(self) -> list[str]:
        """The schedulers' names, in the order of their numbers."""
        return sorted(self.schedulers, key=lambda name: self.schedulers[name].number)

    @property
    def latent_scale(self) -> LatentScale:
        return LatentScale(self.scaling_factor, self.shift_factor)

    @property
    def checkpoint(self) -> dict[str, dict[str, Any]]:
        """The checkpoint of each component: its name, its format, and the SHA-256 of its files."""
        return {name: component.checkpoint for name, component in self.parts.items()}

    @property
    def parts(self) -> dict[str, ComponentRecord]:
        """The components that a pipeline runs one after the other: all but the one of them all."""
        return {name: one for name, one in self.components.items() if name != TEXT_TO_IMAGE}

    def model_calls(self, scheduler: str, num_steps: int) -> int:
        """Return a run's number of model calls; refuse unknown schedulers and step counts."""
        known = self._scheduler(scheduler)
        if num_steps not in range(1, self.max_steps + 1):
            raise ExportError(
                f"num_steps is a whole number from 1 to {self.max_steps}, the export's max_steps. "
                f"Received: {num_steps!r}"
            )
        if not known.calls[num_steps - 1]:
            raise ExportError(
                f"The scheduler {scheduler} takes num_steps from {known.least_steps} to "
                f"{known.most_steps}. Received: {num_steps}"
            )
        return known.calls[num_steps - 1]

    def scheduler_number(self, scheduler: str) -> int:
        """Return the number that a signature's `scheduler` input takes for this scheduler."""
        return self._scheduler(scheduler).number

    def _scheduler(self, name: str) -> SchedulerRecord:
        if name not in self.schedulers:
            raise ExportError(
                f"The scheduler is one of {', '.join(self.samplers)}. Received: {name!r}"
            )
        return self.schedulers[name]

    def misfit(self, device: str, components: Iterable[str] | None = None) -> str | None:
        """Say which compiled signatures have rewrites for another target; None: there are none.

        Args:
            device: what they are to run on: cpu, gpu or tpu.
            components: those that run there; None: all.
        """
        wrong = {
            name: self.components[name]
            for name in (self.components if components is None else components)
            if self.components[name].rewrites and self.components[name].target != device
        }
        if not wrong:
            return None
        targets = sorted({part.target for part in wrong.values()})
        rewrites = sorted({name for part in wrong.values() for name in part.rewrites})
        return (
            f"The compiled signatures of {', '.join(wrong)} were exported for a "
            f"{' and a '.join(targets)} (with {', '.join(rewrites)}), not for a {device}"
        )

    def write(self, folder: Path) -> None:
        write_record(self, folder / FILE_NAME, FORMAT_VERSION)

    @classmethod
    def read(cls, folder: str | Path) -> "Manifest":
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise ExportError(
                f"{folder} is not an export: it has no {FILE_NAME}. Make one with `sd-tf export`."
            )
        content = read_record(path, FORMAT_VERSION, "export again", UPGRADES)
        try:
            return typed(cls, content, str(path))
        except ExportError as error:
            raise ExportError(f"{error} Export again.") from error

    def check_files(self, folder: Path) -> None:
        """Check that every file is present with its size and unchanged.

        Large files of variables are not read: they are compared when they are loaded.
        """
        for name, component in self.components.items():
            for relative, known in component.files.items():
                path = folder / relative
                if not path.is_file():
                    raise ExportError(f"{path} of {name} is missing. Export again.")
                if path.stat().st_size != known.get("size"):
                    raise ExportError(
                        f"{path} of {name} has {path.stat().st_size} bytes, it was exported with "
                        f"{known.get('size')}. Copy or export it again."
                    )
                if "sha256" in known and file_hash(path) != known["sha256"]:
                    raise ExportError(
                        f"{path} of {name} is not the file that was exported: its SHA-256 differs. "
                        f"Copy or export it again."
                    )


def _from_version_2(content: dict[str, Any]) -> None:
    """Add the fields that format 2 implied: schedulers in order, five predictions, no shift."""
    if "calls" in content:
        content["schedulers"] = {
            name: {"number": number, "calls": calls}
            for number, (name, calls) in enumerate(content.pop("calls").items())
        }
    content |= {"history": 5, "shift_factor": 0.0}
    _from_version_3(content)


def _from_version_3(content: dict[str, Any]) -> None:
    """Give each component its part of the one checkpoint, whose name was a path on its machine."""
    whole = content.pop("checkpoint")
    for name, component in content["components"].items():
        component["checkpoint"] = {
            "name": PurePath(whole["source"]).name,
            "format": whole["format"],
            "sha256": {part: x for part, x in whole["sha256"].items() if serves(name, part)},
        }
    _from_version_4(content)


def _from_version_4(content: dict[str, Any]) -> None:
    """Make a list of the one shape, and add the one chunk that a prompt had."""
    height, width = content.pop("height"), content.pop("width")
    latent_height, _, channels = content.pop("latent_shape")
    content["shapes"] = {
        "sizes": [[height, width]],
        "batch_sizes": [content.pop("batch_size")],
        "downscale": height // latent_height,
        "latent_channels": channels,
    }
    content["prompt_chunks"] = 1
    _from_version_5(content)


def _from_version_5(content: dict[str, Any]) -> None:
    """Add that there are no places for adapters."""
    content["adapters"] = dataclasses.asdict(NO_PLACES)
    _from_version_6(content)


def _from_version_6(content: dict[str, Any]) -> None:
    """Add that nothing is stored in fewer bits, no further guidance, and no family's defaults."""
    content |= {"storage": {}, "further_scales": [], "suited": {}}
    _from_version_7(content)


def _from_version_7(content: dict[str, Any]) -> None:
    """Add that there are no ControlNets."""
    content["controls"] = []
    _from_version_8(content)


def _from_version_8(content: dict[str, Any]) -> None:
    """Add that no pictures are prompts."""
    content["image_prompts"] = dataclasses.asdict(NO_IMAGE_PROMPTS) | {"adapters": []}
    _from_version_9(content)


def _from_version_9(content: dict[str, Any]) -> None:
    """Add that no features are reused."""
    content["reuse"] = dataclasses.asdict(NO_REUSE)
    _from_version_10(content)


def _from_version_10(content: dict[str, Any]) -> None:
    """Add that pictures are decoded whole."""
    content["tile"] = 0


# Starts of the names of a checkpoint's parts that are the component of the first one's name.
OF_VISION = (VISION_ENCODER, "image_projection")


def serves(component: str, part: str) -> bool:
    """Return whether an export's component computes with the weights of a checkpoint's part."""
    if component == TEXT_TO_IMAGE:
        return True
    if part == AUTOENCODER:
        return component in (DECODER, "image_encoder")
    if part in (DECODER, PREVIEW_DECODER):
        return component == part
    if part.startswith(OF_VISION):
        return component == VISION_ENCODER
    return component == ("text_encoder" if part.startswith("text_encoder") else "diffusion_model")


UPGRADES = {
    2: _from_version_2,
    3: _from_version_3,
    4: _from_version_4,
    5: _from_version_5,
    6: _from_version_6,
    7: _from_version_7,
    8: _from_version_8,
    9: _from_version_9,
    10: _from_version_10,
}

LARGE = 1 << 26
FINGERPRINT = "fingerprint"  # in place of a large file's SHA-256: see `runtime.mapped`


TOKENIZERS = "tokenizer*"  # the folders whose files are among those of the text encoder


def describe_files(folder: Path, component: str) -> dict[str, dict[str, Any]]:
    """Return the sizes and checksums of a component's files, by their paths below the export."""
    places = [folder / component]
    if component == "text_encoder":
        places += folder.glob(TOKENIZERS)
    files = {}
    for path in sorted(path for place in places for path in place.rglob("*")):
        if path.is_file():
            size = path.stat().st_size
            if ".data-" in path.name and size > LARGE:
                from sd_tf.runtime.mapped import fingerprint  # with TensorFlow, which wrote it

                hashed = {FINGERPRINT: fingerprint(path)}
            else:
                hashed = {"sha256": file_hash(path)}
            files[str(path.relative_to(folder))] = {"size": size, **hashed}
    return files


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
