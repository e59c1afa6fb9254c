"""The files of a serving folder, and the settings that all of its versions share."""

import dataclasses
import ipaddress
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sd_tf.files import atomic
from sd_tf.serving.tf_serving import ServingError

MODELS, CLIENT = "models", "client"
SETTINGS, README = "serving.json", "README.md"
MODELS_CONFIG, MONITORING_CONFIG = "models.config", "monitoring.config"
BATCHING_CONFIG, BATCHING_PARAMETERS = "batching.config", "batching_params.pbtxt"
COMPOSE, KUBERNETES = "compose.yaml", "kubernetes.yaml"
SAVED_MODEL = "saved_model.pb"
WARM_UP = "assets.extra/tf_serving_warmup_requests"

# The paths in the server's container of the folder, and of the models in it.
MOUNTED, MOUNTED_MODELS = "/serving", "/models"

IMAGE = "tensorflow/serving"
DEFAULT_TAG = "2.20.0"
FIRST_GPU_TAG = (2, 18)
DEVICES = ("gpu", "cpu")
LOOPBACK = "127.0.0.1"
SETTINGS_FORMAT = 2


@dataclass(frozen=True)
class Settings:
    """The settings of a server, which all versions in its folder share."""

    device: str = "gpu"
    image_tag: str = DEFAULT_TAG
    name_prefix: str = ""
    xla: bool = True
    host: str = LOOPBACK  # the address at which compose.yaml publishes the ports

    def check(self) -> "Settings":
        if self.device not in DEVICES:
            raise ServingError(
                f"`device` must be one of {', '.join(DEVICES)}. Received: {self.device}"
            )
        if not re.fullmatch(r"([a-z][a-z0-9_]*)?", self.name_prefix):
            raise ServingError(
                f"`name_prefix` must begin with a small letter and have only small letters, "
                f"digits and _. Received: {self.name_prefix!r}"
            )
        if problem := tag_problem(self.image_tag, self.device == "gpu"):
            raise ServingError(f"`image_tag` {self.image_tag}: {problem}")
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            raise ServingError(
                f"`host` must be an IP address: {LOOPBACK} for this machine alone, 0.0.0.0 for "
                f"all interfaces. Received: {self.host!r}"
            ) from None
        return self

    @property
    def image(self) -> str:
        return f"{IMAGE}:{self.image_tag}{'-gpu' if self.device == 'gpu' else ''}"

    def model_name(self, component: str) -> str:
        return f"{self.name_prefix}_{component}" if self.name_prefix else component

    def write(self, folder: Path) -> None:
        content = {"format_version": SETTINGS_FORMAT, **dataclasses.asdict(self)}
        atomic.write(folder / SETTINGS, json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        path = folder / SETTINGS
        expected = {"format_version", *(field.name for field in dataclasses.fields(cls))}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.keys() != expected or content.pop("format_version") != SETTINGS_FORMAT:
                raise ValueError(f"it has {sorted(content)}")
        except (ValueError, AttributeError) as error:
            raise ServingError(
                f"{path} is not of the format that this sd_tf writes: {error}. Write the folder "
                f"again."
            ) from error
        return cls(**content)


def tag_problem(tag: str, gpu: bool) -> str | None:
    """Return why an image's tag (without -gpu) cannot be used, or None."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?([-.]?rc\d+)?", tag)
    if numbers is None:
        return (
            f"a tag must be a version number such as {DEFAULT_TAG}, so that the server does not "
            f"change by itself; '-gpu' is added for a GPU."
        )
    if gpu and (int(numbers[1]), int(numbers[2])) < FIRST_GPU_TAG:
        oldest = ".".join(map(str, FIRST_GPU_TAG))
        return (
            f"on a GPU the image must be {oldest} or later. Earlier servers lack XLA's "
            f"GPU compiler, and their images lack ptxas and libdevice: every compiled signature "
            f"fails with 'could not find compiler for platform CUDA'. Use {DEFAULT_TAG}."
        )
    return None


def age_problem(tag: str, exporters: Iterable[str]) -> str | None:
    """Say that the image is older than a TensorFlow that exported what it serves, or return None.

    TensorFlow reads the graphs of earlier releases. A later one's may have operations or
    attributes that it does not know, and then the version does not load.
    """
    newest = max(exporters, key=_release)
    if _release(tag) >= _release(newest):
        return None
    return (
        f"The server's TensorFlow {tag} is older than {newest}, which exported the models, so "
        f"they may fail to load. Give `image_tag` {newest} if there is such an image, or export "
        f"with TensorFlow {tag}."
    )


def _release(version: str) -> tuple[int, ...]:
    """Return a version's first two numbers: graphs change between these alone."""
    return tuple(int(part) for part in re.match(r"(\d+)\.(\d+)", version).groups())


def components(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / MODELS).iterdir() if path.is_dir())


def versions(folder: Path, component: str) -> list[int]:
    """Return a model's versions: the server takes every folder named by a number for one."""
    return numbered(folder / MODELS / component)


def numbered(folder: Path) -> list[int]:
    """Return the numbers that folders in this one have for a name."""
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())
