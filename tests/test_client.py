"""The client gives a pipeline's pictures, and says what is wrong when it cannot."""

import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
from PIL import Image

from sd_tf.cli.main import main
from sd_tf.runtime import retry
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.png import read_parameters
from sd_tf.serving.client.client import Client, ServerError
from sd_tf.serving.tf_serving.predict import ModelServer
from tests.serving_server import (
    SCHEMES,
    grpc_server,
    http_server,
    light_export,
    served_models,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pipe():
    return Pipeline.load(served_models()[0])


@pytest.fixture(scope="module")
def light():
    return light_export()


@pytest.fixture(scope="module")
def addresses():
    models = served_models()[1]
    with grpc_server(models) as first, http_server(models) as second:
        yield {"grpc": f"grpc://{first}", "http": f"http://{second}"}


@pytest.fixture(params=SCHEMES)
def client(request, addresses, light):
    with Client(addresses[request.param], light) as client:
        yield client


def test_more_prompts_than_the_batch(client, pipe):
    call = {"num_steps": 2, "seed": 5, "guidance_scale": 4.0, "scheduler": "dpmpp_2m"}
    ours, theirs = (chain(["a", "b", "c"], "blurry", **call) for chain in (client, pipe))
    np.testing.assert_array_equal(ours.images, theirs.images)
    assert ours.images.shape == (3, 64, 64, 3) and ours.images.dtype == np.uint8
    assert ours.seeds == theirs.seeds == [5, 6, 7]
    assert ours.timings.keys() == theirs.timings.keys()


def test_other_inputs(client, pipe):
    """No negative prompt, start noise, and a picture to start from."""
    noise = np.random.default_rng(0).standard_normal((1, 8, 8, 4))
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), "uint8"))
    for call in ({"noise": noise}, {"image": picture, "strength": 0.5, "scheduler": "euler"}):
        call = {"prompt": "a", "num_steps": 4, "seed": 1, **call}
        np.testing.assert_array_equal(client(**call).images, pipe(**call).images)


def test_callback_sees_and_stops(client, pipe):
    def watch(chain):
        seen = []

        def callback(*state):
            seen.append(state)
            return state[0] < 2

        images = chain("a", num_steps=4, seed=1, scheduler="euler", callback=callback).images
        np.testing.assert_array_equal(chain.decode(seen[-1][2])[:1], images)
        return seen

    ours, theirs = watch(client), watch(pipe)
    assert [state[:2] for state in ours] == [(1, 4), (2, 4)]
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(our[2], their[2])


def test_versions_and_labels(addresses, light, pipe):
    expected = pipe("a", num_steps=1, seed=1).images
    for scheme in SCHEMES:
        for choice in ({"version": 1}, {"label": "stable"}):
            with Client(addresses[scheme], light, **choice) as client:
                np.testing.assert_array_equal(client("a", num_steps=1, seed=1).images, expected)
        for choice, code, message in (
            ({"version": 7}, "NOT_FOUND", r"Specific\(text_encoder, 7\)"),
            ({"label": "x"}, "INVALID_ARGUMENT", "Unrecognized servable version label: x"),
        ):
            with (
                Client(addresses[scheme], light, **choice) as client,
                pytest.raises(ServerError, match=message) as caught,
            ):
                client("a", num_steps=1)
            assert (caught.value.code, caught.value.model) == (code, "text_encoder")
            assert addresses[scheme] in str(caught.value)


class Recording(ModelServer):
    """Takes up version 2 after the first request, in which 2 is missing in one model."""

    def __init__(self):
        loaded = {name: versions[1] for name, versions in served_models()[1].models.items()}
        super().__init__({name: {1: model, 2: model} for name, model in loaded.items()})
        self.missing = self.models["diffusion_model"].pop(2)
        self.asked = []

    def find(self, spec):
        self.asked.append((spec.name, spec.version.value))
        self.models["diffusion_model"][2] = self.missing
        return super().find(spec)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_version_makes_a_batch(light, scheme):
    """The newest that all models have at its start, also when another one comes meanwhile."""
    models = Recording()
    server = {"grpc": grpc_server, "http": http_server}[scheme]
    with server(models) as address, Client(f"{scheme}://{address}", light) as client:
        for version in (1, 2):
            models.asked.clear()
            client("a", num_steps=1, seed=1)
            assert {name for name, _ in models.asked} == {
                "text_encoder",
                "diffusion_model",
                "decoder",
            }
            assert {asked for _, asked in models.asked} == {version}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_models_without_a_common_version(monkeypatch, light, scheme):
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    models = Recording()
    del models.models["diffusion_model"][1]
    models.models["diffusion_model"][3] = models.missing
    server = {"grpc": grpc_server, "http": http_server}[scheme]
    with (
        server(models) as address,
        Client(f"{scheme}://{address}", light, retries=1) as client,
        pytest.raises(
            ServerError,
            match=r"UNAVAILABLE after 2 attempts: no version is served of all models, but "
            r"\{'text_encoder': \[2, 1\], 'diffusion_model': \[3\], 'decoder': \[2, 1\]\}",
        ),
    ):
        client("a", num_steps=1)


def test_rest_needs_no_tensorflow(addresses, light, pipe, tmp_path):
    """And the command writes what `sd-tf generate` writes."""
    code = """
import sys
from sd_tf.cli.main import main
status = main(["serve", "client", *sys.argv[1:]])
print([name for name in ("tensorflow", "keras", "grpc") if name in sys.modules], status)
"""
    flags = ["--server", addresses["http"], "--export_dir", str(light)]
    flags += ["--num_steps", "1", "--seed", "3", "--out", str(tmp_path)]
    result = subprocess.run(
        [sys.executable, "-c", code, "a cat", "a dog", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[] 0", result.stderr
    expected = pipe(["a cat", "a dog"], num_steps=1, seed=3).images
    for name, image in zip(("3.png", "4.png"), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / name)), image)
    assert read_parameters(str(tmp_path / "4.png"))[0]["prompt"] == "a dog"
    assert (tmp_path / "contact_sheet.png").is_file()


def test_command_errors(addresses, light, capsys):
    server = ["--server", addresses["grpc"], "--export_dir", str(light)]
    for flags, message in (
        (["a", *server, "--num_steps", "1", "--version", "7"], "text_encoder at grpc://127.0.0.1:"),
        (["a", *server, "--num_steps", "99"], "--num_steps is a whole number from 1 to 8"),
        (["a", "--server", "x", "--export_dir", str(light)], "Received: 'x'"),
        (["a", "--server", addresses["grpc"], "--export_dir", "/no"], "/no is not an export"),
        (server, "Give a prompt, or --from_png"),
    ):
        assert main(["serve", "client", *flags]) == 1
        assert message in capsys.readouterr().err


def test_the_command_keeps_what_is_finished(light, tmp_path, capsys):
    calls = []

    def before(context):
        calls.append(context)
        if len(calls) > 5:  # those of the first batch
            context.abort(grpc.StatusCode.INTERNAL, "out of memory")

    with grpc_server(served_models()[1], before) as address:
        flags = ["--server", f"grpc://{address}", "--export_dir", str(light), "--num_steps", "1"]
        flags += ["--seed", "3", "--out", str(tmp_path / "out")]
        assert main(["serve", "client", "a", "b", "c", *flags]) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["3.png", "4.png"]
    missing = f"2 of 3 pictures were saved in {tmp_path}/out. Missing:\n  seed 5: c\n"
    error = capsys.readouterr().err
    assert f"{missing}sd-tf serve client: text_encoder at grpc://{address}: INTERNAL: out" in error
