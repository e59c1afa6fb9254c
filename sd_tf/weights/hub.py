"""Fetch a diffusers repository from the Hugging Face Hub: only the files that will be read."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from sd_tf.files.objects import read_object
from sd_tf.files.tensors import CheckpointError
from sd_tf.weights.diffusers import check_variant, choose_weights
from sd_tf.weights.diffusers_fields import CONFIG
from sd_tf.weights.diffusers_pipelines import (
    MODEL_INDEX,
    components_of,
    has_weights,
    read_index,
)

SMALL_FILES = (".json", ".txt", "spiece.model")


def fetch(
    repo_id: str,
    revision: str | None = None,
    variant: str | None = None,
    without: Sequence[str] = (),
) -> Path:
    """Download a repository; without a network, find it in the cache. Return its local folder.

    Args:
        without: text encoders that are not wanted.
    """
    return _fetched(
        repo_id,
        lambda: _download(repo_id, revision, variant, without),
        lambda reason: _from_cache(repo_id, revision, variant, without, reason),
    )


def fetch_model(
    repo_id: str,
    inside: str = "",
    component: str | None = None,
    check: Callable[[Mapping, str], None] = lambda config, where: None,
) -> Path:
    """Download a single model, which is not a pipeline: a ControlNet. Return its local folder.

    Args:
        inside: the folder in the repository where it lies.
        component: what it is called in a checkpoint; None: as the repository.
        check: raises if the model is not wanted, before its weights are downloaded. It gets the
            content of `config.json`, and what a message calls the model.
    """
    name = repo_id if component is None else component
    start = f"{inside}/" if inside else ""
    return _fetched(
        repo_id,
        lambda: _download_model(repo_id, start, name, check),
        lambda reason: _cached_model(repo_id, start, name, check, reason),
    )


def fetch_file(repo_id: str, name: str) -> Path:
    """Download a file of a repository; without a network, find it in the cache."""
    return _fetched(
        repo_id,
        lambda: Path(hf_hub_download(repo_id, name)),
        lambda reason: _cached(repo_id, name, None, reason) / Path(name).name,
    )


def _fetched(repo_id: str, download: Callable[[], Path], from_cache: Callable) -> Path:
    """Download, or without a network find in the cache, and say what went wrong."""
    try:
        return download()
    except CheckpointError as error:
        raise CheckpointError(f"{repo_id} on the Hub: {error}") from error
    except (HTTPError, OSError, ValueError) as error:  # HTTPError: the Hub's library's own
        if _has_no_network(error):
            return from_cache(error)
        raise CheckpointError(
            f"{repo_id} is no local file or folder, and it could not be downloaded from the Hub: "
            f"{_described(error)}. With HF_HUB_OFFLINE=1, a complete copy in the Hub's cache is "
            f"used without asking."
        ) from error


def _download_model(repo_id: str, start: str, component: str, check: Callable) -> Path:
    """Download the model whose files' names begin so."""
    siblings = [sibling.rfilename for sibling in HfApi().model_info(repo_id).siblings]
    files = [name.removeprefix(start) for name in siblings if name.startswith(start)]
    if CONFIG not in files:
        raise CheckpointError(
            f"this is not a model in diffusers' format: it has no {start}{CONFIG}."
        )
    folder = Path(hf_hub_download(repo_id, start + CONFIG)).parent
    check(read_object(folder / CONFIG, CheckpointError), "this")
    weights = choose_weights([name for name in files if "/" not in name], component, None)
    commit = folder.parents[start.count("/") - 1].name if start else folder.name

    def get(name: str) -> Path:
        return Path(hf_hub_download(repo_id, start + name, revision=commit))

    for name in shards_of(get(weights)):
        get(name)
    return folder


def _cached_model(
    repo_id: str, start: str, component: str, check: Callable, reason: Exception
) -> Path:
    folder = _cached(repo_id, start + CONFIG, None, reason)
    check(read_object(folder / CONFIG, CheckpointError), repo_id)
    try:
        weights = choose_weights([path.name for path in folder.iterdir()], component, None)
        if lacking := [
            name for name in shards_of(folder / weights) if not (folder / name).is_file()
        ]:
            raise CheckpointError(f"{lacking[0]} is missing.")
    except CheckpointError as error:
        raise _incomplete(repo_id, reason, error) from reason
    return folder


def _download(
    repo_id: str, revision: str | None, variant: str | None, without: Sequence[str]
) -> Path:
    siblings = HfApi().model_info(repo_id, revision=revision).siblings
    files = [sibling.rfilename for sibling in siblings]
    if MODEL_INDEX not in files:
        raise CheckpointError(f"this is not a diffusers pipeline: it has no {MODEL_INDEX}.")

    folder = Path(hf_hub_download(repo_id, MODEL_INDEX, revision=revision)).parent

    def get(name: str) -> Path:
        return Path(hf_hub_download(repo_id, name, revision=folder.name))  # one commit for all

    components = components_of(read_index(folder, without))
    small, weights = wanted_files(files, components, variant)
    # The weights come last: a cache that has them all has all the rest.
    for name in [*small, *weights]:
        for shard in shards_of(get(name)):
            get(f"{name.rpartition('/')[0]}/{shard}")
    return folder


def shards_of(path: Path) -> list[str]:
    """Return the names of the files that an index names; none if it is not an index."""
    if ".safetensors.index." not in path.name:
        return []
    return sorted(set(read_object(path, CheckpointError).get("weight_map", {}).values()))


def wanted_files(
    files: list[str], components: dict, variant: str | None
) -> tuple[list[str], list[str]]:
    """List every component's small files, and one set of weights for each model."""
    names = {
        component: [
            file.removeprefix(f"{component}/") for file in files if file.startswith(f"{component}/")
        ]
        for component in components
        if has_weights(component)
    }
    check_variant(names, variant)
    weights = [f"{part}/{choose_weights(inside, part, variant)}" for part, inside in names.items()]
    small = []
    for component in components:
        inside = [file for file in files if file.startswith(f"{component}/")]
        small += [
            file
            for file in inside
            if file.endswith(SMALL_FILES) and ".index." not in file and file not in weights
        ]
    return small, weights


def _has_no_network(error: Exception) -> bool:
    """Return whether the Hub was not reached, in contrast to a Hub that answered with an error."""
    if isinstance(error, LocalEntryNotFoundError):  # the reason why it looked in the cache
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        return True
    return isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError)


def _from_cache(
    repo_id: str,
    revision: str | None,
    variant: str | None,
    without: Sequence[str],
    reason: Exception,
) -> Path:
    """Return the folder in the Hub's cache, if a download was completed there."""
    folder = _cached(repo_id, MODEL_INDEX, revision, reason)
    try:
        _check_complete(folder, variant, without)
    except CheckpointError as error:
        raise _incomplete(repo_id, reason, error) from reason
    return folder


def _cached(repo_id: str, name: str, revision: str | None, reason: Exception) -> Path:
    """Return the folder in the Hub's cache that holds a file."""
    try:
        return Path(hf_hub_download(repo_id, name, revision=revision, local_files_only=True)).parent
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{repo_id} is no local file or folder, it is not in the Hub's cache, and it could not "
            f"be downloaded: {_described(reason)}"
        ) from reason


def _incomplete(repo_id: str, reason: Exception, error: CheckpointError) -> CheckpointError:
    return CheckpointError(
        f"{repo_id} is only partly in the Hub's cache, and the rest could not be downloaded "
        f"({_described(reason)}): {error}"
    )


def _check_complete(folder: Path, variant: str | None, without: Sequence[str]) -> None:
    components = components_of(read_index(folder, without))
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    for component in components:
        if not any(file.startswith(f"{component}/") for file in files):
            raise CheckpointError(f"{component} is missing.")
    _, weights = wanted_files(files, components, variant)
    for name in weights:
        for shard in shards_of(folder / name):
            if not (folder / name).with_name(shard).is_file():
                raise CheckpointError(f"{shard} of {name.partition('/')[0]} is missing.")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
