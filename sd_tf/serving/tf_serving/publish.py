"""Write a serving folder, add versions to it, and label them."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from sd_tf.files import atomic
from sd_tf.files.publish import link
from sd_tf.runtime.chain import NEEDED
from sd_tf.runtime.manifest import TEXT_TO_IMAGE, VERSION_FOLDER, Manifest
from sd_tf.runtime.runner import PLAIN
from sd_tf.runtime.shapes import Shape
from sd_tf.serving.tf_serving import ServingError, configs, signatures, templates, warmup
from sd_tf.serving.tf_serving.configs import CANARY, PREVIOUS, STABLE, ServedModel
from sd_tf.serving.tf_serving.deployment import (
    CONFIG_POLL_SECONDS,
    GRPC_PORT,
    REST_PORT,
    REST_TIMEOUT_SECONDS,
    Deployment,
    weights,
)
from sd_tf.serving.tf_serving.folder import (
    BATCHING_CONFIG,
    BATCHING_PARAMETERS,
    CLIENT,
    COMPOSE,
    KUBERNETES,
    MODELS,
    MODELS_CONFIG,
    MONITORING_CONFIG,
    README,
    SETTINGS,
    Settings,
    age_problem,
    components,
    numbered,
    versions,
)


@dataclass(frozen=True)
class Labels:
    """The versions that the labels name."""

    stable: int
    canary: int | None
    previous: int | None  # the stable version before, for clients that still use it

    def numbers(self) -> list[int]:
        """Return the versions that are served."""
        return [
            number for number in (self.stable, self.canary, self.previous) if number is not None
        ]


def publish(
    export: Path | None,
    out: Path,
    version: int,
    canary: int | None,
    settings: Settings,
    keep_old: bool = False,
    warm_up: Sequence[Shape] | None = None,
    components: Sequence[str] | None = None,
) -> Labels:
    """Add a version to a new or existing folder; without an export, label its versions anew.

    The version becomes stable. If it is the canary, the stable version remains. Its SavedModels are
    complete before any file names them. With `keep_old` the version that was stable is served on,
    labelled previous, until the folder is labelled again. `warm_up` lists the shapes whose
    signatures the server compiles before it serves them; None: all. `components` are those of the
    export to serve; None: all.
    """
    settings.check()
    for name, number in (("version", version), ("canary_version", canary)):
        if number is not None and number < 1:
            raise ServingError(f"`{name}` is a number from 1. Received: {number}")
    _check_target(out, settings, new=export is not None)
    manifest = None
    if export is not None:
        manifest = Manifest.read(export)
        manifest.check_files(export)
        shapes = manifest.shapes
        warm_up = shapes.all if warm_up is None else [shapes.checked(one) for one in warm_up]
        components = _components(manifest, components)
    there = _complete_versions(out)
    if export is not None and version in there:
        raise ServingError(
            f"{out} has a version {version}, and a server that knows it would not look again. "
            f"Choose another `version`; to label this one anew, leave out `export_dir`."
        )
    there = {*there, version} if export is not None else there
    labels = _labels(out, version, canary, there, keep_old)
    for number in labels.numbers():
        is_new = manifest is not None and number == version
        _check_device(
            manifest if is_new else Manifest.read(out / CLIENT / str(number)), number, settings
        )
    if manifest is not None:
        out.mkdir(parents=True, exist_ok=True)
        settings.write(out)
        _add_version(export, out, version, manifest, settings, components, warm_up)
    write_configs(out, labels, settings)
    return labels


def _components(manifest: Manifest, wanted: Sequence[str] | None) -> list[str]:
    known = list(manifest.components)
    if wanted is None:
        return known
    if not wanted or set(wanted) - set(known):
        raise ServingError(
            f"`components` are among the export's, {', '.join(known)}. "
            f"Received: {', '.join(wanted) or 'none'}"
        )
    return [name for name in known if name in wanted]


def _check_device(manifest: Manifest, version: int, settings: Settings) -> None:
    if settings.xla and (misfit := manifest.misfit(settings.device)) is not None:
        raise ServingError(
            f"Version {version}: {misfit}. Run your export command again with --target "
            f"{settings.device}, or serve this version by another `device`, or without XLA "
            f"(--nojit_compile)."
        )


def _check_target(out: Path, settings: Settings, new: bool) -> None:
    if not (out / SETTINGS).is_file():
        if not new:
            raise ServingError(f"{out} is not a serving folder. Give `export_dir` to make one.")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ServingError(
                f"{out} exists and is not a serving folder, so it is left alone. Choose another "
                f"`out`."
            )
        return
    before = Settings.read(out)
    for name in ("name_prefix", "xla"):
        old, given = getattr(before, name), getattr(settings, name)
        if old != given:
            raise ServingError(
                f"All versions in a folder share one server: {out} was written with {name} {old}. "
                f"Received: {given}. Give the same, or another `out`."
            )


def _complete_versions(out: Path) -> set[int]:
    """Return the versions that were written to their end: the client's part is written last."""
    folder = out / CLIENT
    return set(numbered(folder)) if folder.is_dir() else set()


def _labels(out: Path, version: int, canary: int | None, there: set[int], keep_old: bool) -> Labels:
    stable = version
    if canary == version:
        stable = _stable(out)
        if stable is None:
            raise ServingError(
                f"A canary is tried beside a stable version, and {out} has none. Write the first "
                f"version without a canary."
            )
        if stable == canary:
            raise ServingError(
                f"Version {canary} is the stable one. Make another one stable first: leave out "
                f"`export_dir`, and give its `version`."
            )
    before = _stable(out) if keep_old else None
    labels = Labels(stable, canary, before if before in there - {stable, canary} else None)
    for number in labels.numbers():
        if number not in there:
            raise ServingError(
                f"{out} has no version {number}. It has {', '.join(map(str, sorted(there)))}."
            )
    return labels


def _stable(out: Path) -> int | None:
    path = out / MODELS_CONFIG
    if not path.is_file():
        return None
    try:
        config = configs.read_models_config(path.read_text(encoding="utf-8"))
    except ServingError as error:
        raise ServingError(
            f"{path}: {error}. Label anew: leave out `export_dir`, and give `version`."
        ) from error
    found = {model.version_labels.get(STABLE) for model in config.model_config_list.config}
    return max(found - {None, 0}, default=None)


def image_problem(out: Path, labels: Labels, settings: Settings) -> str | None:
    """Say that the server's image is older than what exported a served version, or return None."""
    manifests = [Manifest.read(out / CLIENT / str(number)) for number in labels.numbers()]
    return age_problem(settings.image_tag, [one.versions["tensorflow"] for one in manifests])


# A version's files


def _add_version(
    export: Path,
    out: Path,
    version: int,
    manifest: Manifest,
    settings: Settings,
    components: Sequence[str],
    warm_up: Sequence[Shape],
) -> None:
    with tempfile.TemporaryDirectory(prefix=".staging-", dir=out) as name:
        folder = Path(name)
        for component in components:
            target = folder / MODELS / component
            shutil.copytree(export / component / VERSION_FOLDER, target, copy_function=link)
            model = settings.model_name(component)
            warmup.write(target, component, model, export, manifest, settings.xla, warm_up)
            graph = signatures.read(target)
            batch = manifest.shapes.largest_batch
            if batch > 1 and configs.batching_problem(graph) is None:
                text = configs.batching_parameters(batch)
                (target / BATCHING_PARAMETERS).write_text(text, encoding="utf-8")
        client = folder / CLIENT
        client.mkdir()
        manifest.write(client)
        for place in manifest.tokenizers.values():
            shutil.copytree(export / place, client / place, dirs_exist_ok=True)

        moves = [
            (folder / MODELS / component, out / MODELS / component / str(version))
            for component in components
        ]
        for source, target in [*moves, (client, out / CLIENT / str(version))]:
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():  # from a run that was interrupted
                shutil.rmtree(target)
            os.rename(source, target)


# Configuration


def write_configs(out: Path, labels: Labels, settings: Settings) -> None:
    """Write everything beside the models, from what lies in the folder.

    Each file is replaced in one step, models.config last: a server that reads it again meanwhile
    sees the old or the new one.
    """
    models = []
    for component in components(out):
        there = versions(out, component)
        given = {
            label: number
            for label, number in (
                (STABLE, labels.stable),
                (CANARY, labels.canary),
                (PREVIOUS, labels.previous),
            )
            if number in there
        }
        if given:
            models.append(ServedModel(component, given))
    served = [
        out / MODELS / model.component / str(version)
        for model in models
        for version in set(model.labels.values())
    ]
    deployment = Deployment(
        settings,
        batching=any((folder / BATCHING_PARAMETERS).is_file() for folder in served),
        probed=settings.model_name(models[0].component),
        weights=sum(map(weights, served)),
    )
    settings.write(out)
    atomic.write(out / MONITORING_CONFIG, configs.monitoring_config())
    if deployment.batching:
        atomic.write(out / BATCHING_CONFIG, configs.batching_config())
    else:
        (out / BATCHING_CONFIG).unlink(missing_ok=True)
    atomic.write(out / COMPOSE, deployment.compose())
    atomic.write(out / KUBERNETES, deployment.kubernetes())
    atomic.write(out / README, _readme(out, models, labels, deployment))
    atomic.write(out / MODELS_CONFIG, configs.models_config(models, settings))


def _readme(out: Path, models: list[ServedModel], labels: Labels, deployment: Deployment) -> str:
    settings = deployment.settings
    manifest = Manifest.read(out / CLIENT / str(labels.stable))
    rows, batched = [], []
    for model in models:
        newest = out / MODELS / model.component / str(max(model.labels.values()))
        names = warmup.wanted(signatures.names(signatures.read(newest)), settings.xla)
        cells = (
            f"`{settings.model_name(model.component)}`",
            str(model.labels.get(STABLE, "–")),
            str(model.labels.get(CANARY, "–")),
            ", ".join(f"`{name}`" for name in names),
        )
        rows.append(f"| {' | '.join(cells)} |")
        if (newest / BATCHING_PARAMETERS).is_file():
            batched.append(f"`{settings.model_name(model.component)}`")
    problem = image_problem(out, labels, settings)
    batches = " or ".join(map(str, manifest.shapes.batch_sizes))
    several = {"batched": " and ".join(batched), "batch": batches, "timeout": _BATCH_TIMEOUT}
    return Template(templates.README).substitute(
        title=f"{settings.model_name('sd_tf')} for TensorFlow Serving",
        sd_tf=manifest.versions["sd_tf"],
        image=f"`{settings.image}`",
        summary=(
            f"Version {labels.stable}: {manifest.family}, {manifest.shapes},\n"
            f"{manifest.precision}, up to {manifest.max_steps} steps, exported by TensorFlow "
            f"{manifest.versions['tensorflow']}."
            + (f" Version {labels.previous} is served on." if labels.previous is not None else "")
        ),
        age="" if problem is None else f"\n**{problem}**\n",
        table="\n".join(rows),
        toolkit=" and NVIDIA's container toolkit" if settings.device == "gpu" else "",
        batch=batches,
        plural="" if batches == "1" else "s",
        shapes="" if len(manifest.shapes.all) == 1 else templates.SHAPES,
        plain="" if settings.xla else templates.PLAIN,
        xla=templates.XLA if settings.xla else templates.NO_XLA,
        batching=Template(templates.BATCHED if batched else templates.NOT_BATCHED).substitute(
            several
        ),
        name=deployment.name,
        probed=deployment.probed,
        published=(
            f"compose.yaml publishes the ports on {settings.host}; Kubernetes' service is\n"
            f"  reached from inside the cluster."
        ),
        weights=f"{deployment.weights / 1e9:.1f} GB",
        metrics=configs.METRICS_PATH,
        grpc=GRPC_PORT,
        rest=REST_PORT,
        timeout=REST_TIMEOUT_SECONDS,
        poll=CONFIG_POLL_SECONDS,
        calls=_calls(settings, manifest, [model.component for model in models]),
    )


def _calls(settings: Settings, manifest: Manifest, served: Sequence[str]) -> str:
    """Say how a picture is made with the served models."""
    batch = manifest.shapes.first.batch_size
    prompts = ", ".join(f'"{warmup.PROMPT}"' for _ in range(batch))
    names = {name: settings.model_name(name) for name in (*NEEDED, TEXT_TO_IMAGE)}
    known = {
        **names,
        "rest": REST_PORT,
        "prompts": prompts,
        "batch": batch,
        "prefix": "" if settings.xla else PLAIN,
        "default": "" if settings.xla else f'"signature_name": "{PLAIN}serving_default", ',
    }
    texts = []
    if TEXT_TO_IMAGE in served:
        texts.append(templates.WHOLE)
    if set(NEEDED) <= set(served):
        texts.append(templates.PARTS)
    plural = "" if batch == 1 else "s"
    return "".join(Template(text).substitute(known, plural=plural) for text in texts)


_BATCH_TIMEOUT = f"{configs.BATCH_TIMEOUT_MICROS / 1000:g} ms"
