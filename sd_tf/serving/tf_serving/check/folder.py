"""Check a serving folder: read it as the server would, and report everything that would fail."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from sd_tf.serving.tf_serving import ServingError, configs
from sd_tf.serving.tf_serving.check.finding import WRITE_AGAIN, Finding
from sd_tf.serving.tf_serving.check.server import Server, check_server, read_servers
from sd_tf.serving.tf_serving.check.version import Version, check_version
from sd_tf.serving.tf_serving.folder import MODELS, MODELS_CONFIG, MOUNTED_MODELS


def check(folder: Path, replay: bool = False) -> list[Finding]:
    """Return everything that would fail. `replay` also runs the warm-up requests."""
    if not folder.is_dir():
        raise ServingError(f"{folder} is not a folder.")
    findings: list[Finding] = []
    servers = list(read_servers(folder, findings))
    served = list(_models(folder, servers, findings))
    for server in servers:
        findings += check_server(folder, server)
    for version in served:
        findings += check_version(version, servers, replay)
    return findings


# Models and versions


def _models(folder: Path, servers: list[Server], findings: list[Finding]) -> Iterator[Version]:
    path = folder / MODELS_CONFIG
    if not path.is_file():
        findings.append(Finding(MODELS_CONFIG, "it is there", "no such file", WRITE_AGAIN))
        return
    try:
        config = configs.read_models_config(path.read_text(encoding="utf-8"))
    except ValueError as error:
        findings.append(Finding(MODELS_CONFIG, "the server can read it", str(error), WRITE_AGAIN))
        return
    models = config.model_config_list.config
    if not models:
        findings.append(Finding(MODELS_CONFIG, "it lists models", "none", WRITE_AGAIN))
    known = [model.name for model in models]
    for name in sorted({name for name in known if known.count(name) > 1}):
        findings.append(
            Finding(MODELS_CONFIG, "a name is one model's", f"{name} twice", WRITE_AGAIN)
        )
    for model in models:
        if model.model_platform != "tensorflow":
            found = f"{model.model_platform!r} for {model.name}"
            rule = "the platform is tensorflow"
            findings.append(Finding(MODELS_CONFIG, rule, found, WRITE_AGAIN))
        place = PurePosixPath(model.base_path)
        if not place.is_relative_to(MOUNTED_MODELS):
            found = f"{model.base_path} for {model.name}"
            rule = f"a base path lies in {MOUNTED_MODELS}, where the folder's models are mounted"
            findings.append(Finding(MODELS_CONFIG, rule, found, WRITE_AGAIN))
            continue
        base = folder / MODELS / place.relative_to(MOUNTED_MODELS)
        yield from _model_versions(folder, model, base, findings)
    if any(model.version_labels for model in models):
        for server in servers:
            if not server.is_on("allow_version_labels_for_unavailable_models"):
                rule = "labels in the first models.config need the flag that allows them"
                found = "no --allow_version_labels_for_unavailable_models"
                findings.append(Finding(server.file, rule, found, "add the flag"))


def _model_versions(folder: Path, model, base: Path, findings) -> Iterator[Version]:
    names = [path.name for path in base.iterdir()] if base.is_dir() else []
    there = sorted(int(name) for name in names if name.isdecimal())
    policy = model.model_version_policy
    if policy.HasField("specific"):
        wanted = sorted(policy.specific.versions)
    elif policy.HasField("all"):
        wanted = there
    else:
        wanted = there[-(policy.latest.num_versions or 1) :]
    if not wanted:
        rule = "a model has a version to serve"
        findings.append(Finding(MODELS_CONFIG, rule, f"none for {model.name}", WRITE_AGAIN))
    for label, version in sorted(model.version_labels.items()):
        if version not in wanted:
            findings.append(
                Finding(
                    MODELS_CONFIG,
                    "a label is a served version's",
                    f"{label} of {model.name} is {version}, served are {wanted}",
                    "label anew: `sd-tf serve tf_serving --out FOLDER --version N`",
                )
            )
    for version in wanted:
        path = base / str(version)
        file = path.relative_to(folder).as_posix()
        if path.is_dir():
            yield Version(base.name, path, file)
        else:
            rule = f"the version that {MODELS_CONFIG} names is there"
            mend = "copy it again, or label another version"
            findings.append(Finding(file, rule, f"no such folder; versions {there}", mend))
