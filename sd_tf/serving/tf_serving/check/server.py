"""Check how compose.yaml and kubernetes.yaml start the server."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import yaml

from sd_tf.serving.tf_serving import configs
from sd_tf.serving.tf_serving.check.finding import WRITE_AGAIN, Finding
from sd_tf.serving.tf_serving.folder import COMPOSE, IMAGE, KUBERNETES, MOUNTED, tag_problem


@dataclass(frozen=True)
class Server:
    """A container of compose.yaml or kubernetes.yaml."""

    file: str
    image: str
    flags: dict[str, str]

    def is_on(self, flag: str) -> bool:
        return self.flags.get(flag, "false") == "true"

    @property
    def compiles(self) -> bool:
        return any(self.is_on(f"xla_{device}_compilation_enabled") for device in ("cpu", "gpu"))


def read_servers(folder: Path, findings: list[Finding]) -> Iterator[Server]:
    readers = {COMPOSE: _compose_containers, KUBERNETES: _kubernetes_containers}
    present = [name for name in readers if (folder / name).is_file()]
    if not present:
        rule = f"{COMPOSE} or {KUBERNETES} says how the server is started"
        findings.append(Finding(".", rule, "neither", WRITE_AGAIN))
    for name in present:
        try:
            documents = list(yaml.safe_load_all((folder / name).read_text(encoding="utf-8")))
            containers = [
                (str(image), [str(flag) for flag in flags])
                for image, flags in readers[name](documents)
                if IMAGE in str(image)
            ]
        except (yaml.YAMLError, ValueError, AttributeError, LookupError, TypeError) as error:
            findings.append(Finding(name, "it is YAML of its kind", repr(error), WRITE_AGAIN))
            continue
        if not containers:
            rule = f"a container runs {IMAGE}"
            findings.append(Finding(name, rule, "none", WRITE_AGAIN))
        for image, flags in containers:
            pairs = (flag.removeprefix("--").partition("=") for flag in flags)
            yield Server(name, image, {key: value if on else "true" for key, on, value in pairs})


def _compose_containers(documents):
    for service in documents[0]["services"].values():
        yield service["image"], service["command"]


def _kubernetes_containers(documents):
    for document in documents:
        if document and document["kind"] == "Deployment":
            for container in document["spec"]["template"]["spec"]["containers"]:
                yield container["image"], container["args"]


def check_server(folder: Path, server: Server) -> Iterator[Finding]:
    tag = server.image.rpartition(":")[2]
    if problem := tag_problem(tag.removesuffix("-gpu"), tag.endswith("-gpu")):
        yield Finding(
            server.file,
            "the image's version is known, and able to compile for its device",
            f"{server.image}: {problem.rstrip('.')}",
            "write the folder again with another `image_tag`",
        )
    readers = {
        "model_config_file": configs.read_models_config,
        "monitoring_config_file": configs.read_monitoring,
        "batching_parameters_file": configs.read_batching,
    }
    for flag, read in readers.items():
        place = server.flags.get(flag)
        if place is None:
            if flag == "model_config_file":
                rule = "the server is given its models"
                yield Finding(server.file, rule, "no --model_config_file", WRITE_AGAIN)
            continue
        path = PurePosixPath(place)
        if not path.is_relative_to(MOUNTED) or not (folder / path.relative_to(MOUNTED)).is_file():
            rule = f"the file of --{flag} is there"
            yield Finding(server.file, rule, f"no {place}", WRITE_AGAIN)
        elif flag != "model_config_file":  # models.config is checked elsewhere
            local = path.relative_to(MOUNTED)
            try:
                read((folder / local).read_text(encoding="utf-8"))
            except ValueError as error:
                yield Finding(str(local), "the server can read it", str(error), WRITE_AGAIN)
    if "batching_parameters_file" in server.flags and not server.is_on("enable_batching"):
        yield Finding(
            server.file,
            "--batching_parameters_file goes with --enable_batching",
            "the file alone, with which the server does not start",
            "give both or none",
        )
