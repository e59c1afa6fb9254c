"""Small random pipelines, made and saved by diffusers."""

import gc
import os
import signal

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import keras
import pytest

from sd_tf.checkpoints import TINY_FOLDER
from sd_tf.weights import open_checkpoint
from tests import peer_transformers, peers


def pytest_sessionstart():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell says so
    spare_the_collector()


def spare_the_collector():
    """Spare the garbage collector what libraries hold: a fourth of the time that tracing takes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_collection_modifyitems(items):
    """On JAX only what runs models is worth running again, and what is JAX's alone runs there."""
    if keras.backend.backend() == "tensorflow":
        items[:] = [item for item in items if not item.get_closest_marker("jax")]
    else:
        items[:] = [item for item in items if item.get_closest_marker("backend")]
        for item in items:
            if any(marker.kwargs.get("long") for marker in item.iter_markers("backend")):
                item.add_marker("long")


@pytest.fixture(scope="session")
def small_pipelines(tmp_path_factory):
    """family → (diffusers' pipeline, the folder it saved itself to); made on first use."""
    made = {}

    def make(family):
        if family not in made:
            module = peer_transformers if family in peer_transformers.FAMILIES else peers
            pipeline = module.random_pipeline(family)
            folder = tmp_path_factory.mktemp(family)
            pipeline.save_pretrained(folder)
            made[family] = pipeline, folder
        return made[family]

    return make


@pytest.fixture
def load_once(monkeypatch):
    """Commands that the test gives one after the other share what they load."""
    from sd_tf.runtime.pipeline import Pipeline

    made, load = {}, Pipeline.load

    def shared(folder, **options):
        key = (folder, repr(options))
        if key not in made:
            made[key] = load(folder, **options)
        return made[key]

    monkeypatch.setattr(Pipeline, "load", shared)


@pytest.fixture(scope="session")
def tiny_exports(tmp_path_factory):
    """batch size → an export of the shipped checkpoint as it is written, which compiles in half the
    time, made on first use.
    """
    folders = {}

    def make(batch_size):
        if batch_size not in folders:
            from sd_tf.config.rewrites import REWRITES
            from sd_tf.export import ExportOptions, export

            folder = tmp_path_factory.mktemp("tiny") / "export"
            options = ExportOptions(batch_size=batch_size, verify="off", disabled_rewrites=REWRITES)
            export(open_checkpoint(TINY_FOLDER), folder, options)
            folders[batch_size] = folder
        return folders[batch_size]

    return make


@pytest.fixture(scope="session")
def served(tiny_exports, tmp_path_factory):
    """The Ray Serve application with the shipped checkpoint."""
    from sd_tf.bench.application import serving

    folder = tmp_path_factory.mktemp("served")
    flags = ["--num_steps", "20", "--guidance_scale", "4", "--max_queue", "64"]
    flags += ["--compile_cache", str(folder / "compiled")]  # replicas come and go
    flags += ["--nojit_compile"]
    with serving(tiny_exports(4), folder, *flags) as served:
        yield served


@pytest.fixture(scope="session")
def served_url(served):
    return served.url
