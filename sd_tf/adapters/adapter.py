"""Read adapter files: every tensor has its place in the model, or the error names the culprit."""

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sd_tf.adapters.changes import Change, Parts
from sd_tf.adapters.errors import AdapterError
from sd_tf.adapters.forms import check_parts, make_change
from sd_tf.adapters.keys import divided, refusal, without_doubles
from sd_tf.adapters.peft_settings import METADATA, UNNAMED, PeftSettings, settings_in
from sd_tf.adapters.spellings import DENOISERS, Layers, spellings
from sd_tf.files.objects import read_object
from sd_tf.files.tensors import (
    CheckpointError,
    StoredTensor,
    open_safetensors,
    read_metadata,
    refuse_pickle,
    shortened,
)

PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
MOST_SHOWN = 3  # wrong layers in a message
# What a fused layer's LoRA says of each of its layers, and what has rows for all of them.
SHARED_IF_FUSED, DIVIDED_IF_FUSED = ("down", "alpha"), ("up", "bias")

Place = tuple[str, str]  # component and module


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter's changes of a model's layers; their tensors are read when they are needed."""

    name: str  # what exports and pictures call it
    files: tuple[Path, ...]
    format: str  # the convention of its tensors' names
    changes: Mapping[Place, Change]
    alphas: tuple[float, ...]  # the distinct ones that the file gives

    @property
    def components(self) -> tuple[str, ...]:
        """The components with layers that it changes."""
        return tuple(dict.fromkeys(component for component, _ in self.changes))

    @property
    def kinds(self) -> tuple[str, ...]:
        """LoRA, LoHa, LoKr, DoRA: the distinct ones."""
        return tuple(dict.fromkeys(change.kind for change in self.changes.values()))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The distinct ranks that were set for the training, the smallest first."""
        found = {change.stored_rank for change in self.changes.values()}
        return tuple(sorted(found - {None}))


@dataclass(frozen=True)
class AdapterFile:
    """An opened file: its tensors and the settings beside them, not yet compared with a model."""

    path: Path  # as it was given
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    settings: Mapping[str, PeftSettings] = field(default_factory=dict)  # by component
    peft: PeftSettings | None = None  # of PEFT's own folder, which is for one model

    @property
    def name(self) -> str:
        file = self.files[0]
        if file.name in (PEFT_FILE, DIFFUSERS_FILE):  # these say nothing, their folder does
            return file.resolve().parent.name
        return file.stem

    @property
    def is_adapter(self) -> bool:
        """Whether some tensor is named as in an adapter, supported or not."""
        return any(divided(key) or refusal(key) for key in self.tensors)

    def read(self, layers: Layers) -> Adapter:
        """Find the layers of a model that the adapter changes.

        Raises:
            AdapterError: a tensor has no place in the model or a wrong shape, or its kind is not
                supported.
        """
        self._check_kinds()
        if self.peft is None:
            self._check_settings(layers)
            return self._read(layers)
        found, failures = [], []
        for component in layers:
            try:
                found.append(self._read({component: layers[component]}))
            except AdapterError as error:
                failures.append(f"{component}: {error}")
        if len(found) != 1:
            raise AdapterError(
                f"{self.path} is for one model, and must fit exactly one component of "
                f"{', '.join(layers)}. It fits {len(found)}. {' '.join(failures)}".rstrip()
            )
        return found[0]

    def _check_kinds(self) -> None:
        if not self.tensors:
            raise AdapterError(f"{self.path} holds no tensors.")
        refused = {key: what for key in self.tensors if (what := refusal(key))}
        if refused:
            raise AdapterError(
                f"{self.path} cannot be used: {', '.join(sorted(set(refused.values())))} is not "
                f"supported, and without it the result would be another. Received: "
                f"{shortened(refused, MOST_SHOWN)}"
            )

    def _check_settings(self, layers: Layers) -> None:
        if surplus := self.settings.keys() - {UNNAMED, *layers}:
            raise AdapterError(
                f"{self.path}: its {METADATA} is of {shortened(surplus, MOST_SHOWN)}, but this "
                f"model's components are {', '.join(layers)}."
            )

    def _settings_of(self, component: str) -> PeftSettings | None:
        if self.peft is not None:
            return self.peft
        alone = self.settings.get(UNNAMED) if component in DENOISERS else None
        return self.settings.get(component, alone)

    def _read(self, layers: Layers) -> Adapter:
        parts, conventions = self._placed(layers)
        changes, alphas, problems = {}, set(), []
        for place, found in parts.items():
            component, module = place
            try:
                alpha, changes[place] = self._change(place, found, layers[component][module])
            except AdapterError as error:
                problems.append(f"{component} {module}: {error}")
            else:
                alphas |= {alpha} - {None}
        if problems:
            raise AdapterError(
                f"{self.path}: {len(problems)} of its {len(parts)} layers do not fit the model: "
                f"{'; '.join(problems[:MOST_SHOWN])}."
            )
        convention = " and ".join(sorted(conventions))
        return Adapter(self.name, self.files, convention, changes, tuple(sorted(alphas)))

    def _placed(self, layers: Layers) -> tuple[dict[Place, dict[str, StoredTensor]], set[str]]:
        """Return the tensors by layer and by what they are, and the conventions of their names."""
        index = spellings(layers, is_peft=self.peft is not None)
        parts, keys, conventions, unknown = {}, {}, set(), []
        for key, tensor in without_doubles(self.tensors).items():
            name, part = divided(key) or (key, None)
            spelled = index.get(name)
            if part is None or spelled is None:
                unknown.append(key)
                continue
            shapes = [layers[spelled.component][module] for module in spelled.modules]
            for module, piece in zip(
                spelled.modules, self._pieces(key, part, tensor, shapes), strict=True
            ):
                place = spelled.component, module
                other = keys.setdefault((*place, part), key)
                if other != key:
                    raise AdapterError(
                        f"{self.path}: {other} and {key} are for the same place of the model."
                    )
                parts.setdefault(place, {})[part] = piece
            conventions.add(spelled.convention)
        if unknown:
            raise AdapterError(
                f"{self.path}: {len(unknown)} of its {len(self.tensors)} tensors belong to no "
                f"layer of the model: {shortened(unknown, MOST_SHOWN)}."
            )
        return parts, conventions

    def _pieces(self, key: str, part: str, tensor: StoredTensor, shapes) -> list[StoredTensor]:
        """Divide a fused layer's tensor among its layers, which share its inputs."""
        if len(shapes) == 1 or part in SHARED_IF_FUSED:
            return [tensor] * len(shapes)
        ends = list(itertools.accumulate(shape[0] for shape in shapes))
        if part not in DIVIDED_IF_FUSED:
            raise AdapterError(
                f"{self.path}: {key} is for a layer that is {len(shapes)} layers here, which only "
                f"LoRA can change. Merge it in the program that it was made for."
            )
        if tensor.shape[0] != ends[-1]:
            raise AdapterError(
                f"{self.path}: {key} must have {ends[-1]} rows. Received: {list(tensor.shape)}"
            )
        return [tensor.rows(end - shape[0], end) for shape, end in zip(shapes, ends, strict=True)]

    def _change(self, place: Place, found: Parts, shape) -> tuple[float | None, Change]:
        """Return a layer's alpha, if there is one, and its change."""
        component, module = place
        parts = {name: tensor for name, tensor in found.items() if name != "alpha"}
        kind = check_parts(parts, shape)
        stored_rank = make_change(kind, parts, shape, 1.0).stored_rank
        settings = self._settings_of(component)
        if settings is not None:
            if "alpha" in found:
                raise AdapterError(f"there is an alpha, and another in {settings.where}")
            alpha = settings.alpha(module)
            multiplier = settings.multiplier(module, stored_rank)
        else:
            alpha = _alpha(found["alpha"]) if "alpha" in found else None
            # Trainers write 0 for the rank itself; two whole factors of LoKr have no rank.
            multiplier = alpha / stored_rank if alpha and stored_rank else 1.0
        return alpha, make_change(kind, parts, shape, multiplier)


def read_adapter(path: str | Path, layers: Layers) -> Adapter:
    """Read an adapter for a model with these layers: a `.safetensors` file, or a folder with one.

    Raises:
        AdapterError: the file does not fit the model, or is not supported.
    """
    return open_adapter(path).read(layers)


def open_adapter(path: str | Path) -> AdapterFile:
    """Open a file, or a folder with diffusers' or PEFT's file, without reading its tensors."""
    path = Path(path).expanduser()
    with _as_adapter_error():
        file = _file_in(path)
        tensors, metadata = open_safetensors(file), read_metadata(file)
    config = file.with_name(PEFT_CONFIG)
    if file.name == PEFT_FILE:
        settings = PeftSettings(read_object(config, AdapterError), str(config))
        return AdapterFile(path, (file, config), tensors, peft=settings)
    return AdapterFile(path, (file,), tensors, settings_in(metadata, str(file)))


def recognize(path: str | Path) -> AdapterFile | None:
    """Open an adapter's file or folder; return None if it is something else, or not there."""
    path = Path(path).expanduser()
    if path.is_dir():
        is_known = any((path / name).is_file() for name in (PEFT_FILE, DIFFUSERS_FILE))
        return open_adapter(path) if is_known else None
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    file = open_adapter(path)
    return file if file.is_adapter else None


def _file_in(path: Path) -> Path:
    if not path.is_dir():
        refuse_pickle(path)
        if path.is_file() and path.suffix != ".safetensors":
            raise AdapterError(
                f"{path}: an adapter is a .safetensors file. Received: {path.suffix or 'no suffix'}"
            )
        return path
    for name in (PEFT_FILE, DIFFUSERS_FILE):
        if (path / name).is_file():
            return path / name
        refuse = (path / name).with_suffix(".bin")
        if refuse.is_file():
            refuse_pickle(refuse)
    raise AdapterError(
        f"{path} is no adapter: it has neither {DIFFUSERS_FILE} nor {PEFT_FILE}. Give a file in "
        f"it by its own path."
    )


def _alpha(tensor: StoredTensor) -> float:
    if tensor.size != 1:
        raise AdapterError(f"alpha is one number. Received: the shape {list(tensor.shape)}")
    value = float(tensor.read().reshape(()))
    if not math.isfinite(value):
        raise AdapterError(f"alpha is a finite number. Received: {value}")
    return value


@contextmanager
def _as_adapter_error() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise AdapterError(str(error)) from error
