"""The places in a serving folder, and the settings that all of its versions share."""

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

from sd_tf.serving.tf_serving import ServingError

MODELS, CLIENT = "models", "client"
SETTINGS, README = "serving.json", "README.md"
MODELS_CONFIG, MONITORING_CONFIG = "models.config", "monitoring.config"
BATCHING_CONFIG, BATCHING_PARAMETERS = "batching.config", "batching_params.pbtxt"
COMPOSE, KUBERNETES = "compose.yaml", "kubernetes.yaml"
SAVED_MODEL = "saved_model.pb"
WARM_UP = "assets.extra/tf_serving_warmup_requests"

# Where the server finds the folder, and the models in it.
MOUNTED, MOUNTED_MODELS = "/serving", "/models"

IMAGE = "tensorflow/serving"
DEFAULT_TAG = "2.20.0"
FIRST_GPU_TAG = (2, 18)
DEVICES = ("gpu", "cpu")
SETTINGS_FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """What the server is told once for all versions."""

    device: str = "gpu"
    image_tag: str = DEFAULT_TAG
    name_prefix: str = ""
    xla: bool = True

    def check(self) -> "Settings":
        if self.device not in DEVICES:
            raise ServingError(
                f"The device is one of {', '.join(DEVICES)}. Received: {self.device}"
            )
        if not re.fullmatch(r"([a-z][a-z0-9_]*)?", self.name_prefix):
            raise ServingError(
                f"A name prefix has small letters, digits and _, and begins with a letter. "
                f"Received: {self.name_prefix!r}"
            )
        if problem := tag_problem(self.image_tag, self.device == "gpu"):
            raise ServingError(f"--image_tag={self.image_tag}: {problem}")
        return self

    @property
    def image(self) -> str:
        return f"{IMAGE}:{self.image_tag}{'-gpu' if self.device == 'gpu' else ''}"

    def model_name(self, component: str) -> str:
        return f"{self.name_prefix}_{component}" if self.name_prefix else component

    def write(self, folder: Path) -> None:
        content = {"format_version": SETTINGS_FORMAT, **dataclasses.asdict(self)}
        replace_text(folder / SETTINGS, json.dumps(content, indent=1) + "\n")

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
                f"{path} is not what this sd_tf writes: {error}. Write the folder again."
            ) from error
        return cls(**content)


def tag_problem(tag: str, gpu: bool) -> str | None:
    """Why an image's tag (without -gpu) will not do."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?([-.]?rc\d+)?", tag)
    if numbers is None:
        return (
            f"a tag is a version number such as {DEFAULT_TAG}, so that what is served does not "
            f"change by itself; '-gpu' is added for a GPU."
        )
    if gpu and (int(numbers[1]), int(numbers[2])) < FIRST_GPU_TAG:
        oldest = ".".join(map(str, FIRST_GPU_TAG))
        return (
            f"on a GPU the image is {oldest} or later. Earlier servers are built without XLA's "
            f"GPU compiler, and their images lack ptxas and libdevice: every compiled signature "
            f"fails with 'could not find compiler for platform CUDA'. Use {DEFAULT_TAG}."
        )
    return None


def components(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / MODELS).iterdir() if path.is_dir())


def versions(folder: Path, component: str) -> list[int]:
    """The server takes every folder whose name is a number for a version."""
    names = [path.name for path in (folder / MODELS / component).iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def replace_text(path: Path, text: str) -> None:
    """In one step: a server that reads its configuration again sees the old or the new one."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
