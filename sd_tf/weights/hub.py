"""Hugging Face Hub: fetch only the files of a diffusers repository that will be read."""

from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from sd_tf.weights.diffusers import (
    MODEL_INDEX,
    WEIGHTS_STEM,
    choose_weights,
    components_of,
    read_index,
)
from sd_tf.weights.tensors import CheckpointError, read_json

SMALL_FILES = (".json", ".txt")


def fetch(repo_id: str, revision: str | None = None, variant: str | None = None) -> Path:
    """Download (or find in the cache) a repository; returns its local folder."""
    try:
        siblings = HfApi().model_info(repo_id, revision=revision).siblings
        files = [sibling.rfilename for sibling in siblings]
        if MODEL_INDEX not in files:
            raise CheckpointError(f"it is not a diffusers pipeline: it has no {MODEL_INDEX}.")

        folder = Path(hf_hub_download(repo_id, MODEL_INDEX, revision=revision)).parent
        wanted = wanted_files(files, components_of(read_index(folder)), variant)
        for name in wanted:
            path = Path(hf_hub_download(repo_id, name, revision=folder.name))  # one commit for all
            if ".safetensors.index." in name:
                shards = set(read_json(path).get("weight_map", {}).values())
                wanted += [f"{name.rpartition('/')[0]}/{shard}" for shard in sorted(shards)]
        return folder
    except CheckpointError as error:
        raise CheckpointError(f"{repo_id} on the Hub: {error}") from error
    except Exception as error:  # which HTTP library raises it differs between Hub clients
        return _from_cache(repo_id, revision, error)


def wanted_files(files: list[str], components: dict, variant: str | None) -> list[str]:
    """Every component's small files, and one set of weights for each model."""
    wanted = []
    for component in components:
        inside = [file for file in files if file.startswith(f"{component}/")]
        names = [file.removeprefix(f"{component}/") for file in inside]
        weights = []
        if component in WEIGHTS_STEM:
            weights = [f"{component}/{choose_weights(names, component, variant)}"]
        wanted += weights
        wanted += [
            file
            for file in inside
            if file.endswith(SMALL_FILES) and ".index." not in file and file not in weights
        ]
    return wanted


def _from_cache(repo_id: str, revision: str | None, error: Exception) -> Path:
    try:
        return Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{repo_id} is neither a local file or folder, nor in the Hub's cache, and the Hub did "
            f"not give it: {type(error).__name__}: {error}"
        ) from error
