"""Small random pipelines, made and saved by diffusers."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import keras
import pytest

from tests import peers


def pytest_collection_modifyitems(items):
    """On another backend only what runs models is worth running again."""
    if keras.backend.backend() != "tensorflow":
        items[:] = [item for item in items if item.get_closest_marker("backend")]


@pytest.fixture(scope="session")
def small_pipelines(tmp_path_factory):
    """family → (diffusers' pipeline, the folder it saved itself to); made on first use."""
    made = {}

    def make(family):
        if family not in made:
            pipeline = peers.random_pipeline(family)
            folder = tmp_path_factory.mktemp(family)
            pipeline.save_pretrained(folder)
            made[family] = pipeline, folder
        return made[family]

    return make
