"""Serving text_to_image alone: TensorFlow Serving's folder, its API, and the client."""

import base64
import io
import json
import shutil
import urllib.request

import grpc
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from sd_tf.cli.main import main
from sd_tf.export import ExportOptions, export
from sd_tf.runtime.manifest import TEXT_TO_IMAGE
from sd_tf.runtime.psnr import psnr
from sd_tf.serving.client.client import Client
from sd_tf.serving.tf_serving import warmup
from sd_tf.serving.tf_serving.check import check
from sd_tf.serving.tf_serving.folder import WARM_UP
from sd_tf.serving.tf_serving.predict import ModelServer, load
from sd_tf.weights import open_checkpoint
from tests.exports import AS_WRITTEN, micro_folder, pipeline_of, shaped_export
from tests.serving_server import grpc_server, http_server

SCHEMES = ("grpc", "http")
PROMPTS = ["a large red star", "İstanbul, 星"]
CALL = {"num_steps": 2, "guidance_scale": 4.0, "scheduler": "euler_ancestral", "seed": [7, 3]}


@pytest.fixture(scope="module")
def pipe():
    return pipeline_of(shaped_export())


@pytest.fixture(scope="module")
def models():
    loaded = load(shaped_export(), [TEXT_TO_IMAGE])
    return ModelServer({name: {1: servable} for name, servable in loaded.items()})


@pytest.fixture(scope="module")
def addresses(models):
    with grpc_server(models) as first, http_server(models) as second:
        yield {"grpc": f"grpc://{first}", "http": f"http://{second}"}


@pytest.fixture(params=SCHEMES)
def client(request, addresses, tmp_path):
    """It has what a client needs of the export, and no models."""
    shutil.copy(shaped_export() / "pipeline.json", tmp_path)
    shutil.copytree(shaped_export() / "tokenizer", tmp_path / "tokenizer")
    with Client(addresses[request.param], tmp_path, jit_compile=False) as client:
        yield client


def check_pixels(ours, theirs):
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == np.uint8
    assert psnr(ours, theirs, 255) >= 55
    assert np.abs(ours.astype(int) - theirs).max() <= 1


def opened(files):
    return np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files])


def folder_of(out, *arguments):
    given = ["--export_dir", shaped_export(), "--out", out, "--device", "cpu", *arguments]
    return main(["serve", "tf_serving", *map(str, given)])


def recorded(out, component):
    requests = warmup.read(out / "models" / component / "1" / WARM_UP)
    return {request.model_spec.signature_name for request in requests}


# TensorFlow Serving's folder


def test_a_folder_of_it_alone(tmp_path, capsys):
    out = tmp_path / "out"
    chosen = ["--components", TEXT_TO_IMAGE, "--warm_up", "1x16x24"]
    assert folder_of(out, *chosen) == 0
    assert [path.name for path in (out / "models").iterdir()] == [TEXT_TO_IMAGE]
    assert recorded(out, TEXT_TO_IMAGE) == {"generate_1x16x24", "serving_default_1x16x24"}
    capsys.readouterr()
    assert main(["serve", "tf_serving", "--check", str(out), "--replay"]) == 0
    assert "nothing would fail" in capsys.readouterr().out
    readme = (out / "README.md").read_text()
    assert "`text_to_image` makes pictures of 2 prompts in one call" in readme
    assert "/v1/models/text_to_image/labels/stable:predict" in readme
    assert "_BATCHxHEIGHTxWIDTH" in readme
    assert "text_encoder" not in readme


def test_a_folder_of_everything(tmp_path):
    out = tmp_path / "out"
    assert folder_of(out) == 0
    assert check(out, replay=False) == []
    readme = (out / "README.md").read_text()
    assert "text_to_image" in readme and "`text_encoder` → `diffusion_model` → `decoder`" in readme
    names = recorded(out, TEXT_TO_IMAGE)
    assert names == {
        f"{endpoint}{suffix}"
        for endpoint in ("generate", "serving_default")
        for suffix in ("", "_1x16x16", "_2x16x24", "_1x16x24")
    }
    shared = "variables/variables.data-00000-of-0000"
    ours = (out / "models/decoder/1").glob("variables/variables.data-*")
    whole = list((out / "models" / TEXT_TO_IMAGE / "1").glob("variables/variables.data-*"))
    assert any(one.samefile(other) for one in ours for other in whole), shared


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--warm_up", "4x16x16"], "A shape of the export is one of 2x16x16, 1x16x16, "),
        (["--warm_up", "16x16"], "A shape is BATCHxHEIGHTxWIDTH, such as 4x512x768"),
        (["--components", "text_to_images"], "text_to_image. Received: text_to_images"),
    ],
)
def test_wrong_choices_are_refused(tmp_path, capsys, flags, message):
    try:
        status = folder_of(tmp_path / "out", *flags)
    except SystemExit as error:
        status = error.code
    assert status != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# TensorFlow Serving's API


def test_a_predict_request_over_grpc(addresses, pipe):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = TEXT_TO_IMAGE
    request.model_spec.signature_name = "plain_generate_2x16x24"
    inputs = {
        "prompt": PROMPTS,
        "negative_prompt": ["fog", ""],
        "num_steps": np.int32(CALL["num_steps"]),
        "unconditional_guidance_scale": np.float32(CALL["guidance_scale"]),
        "seed": np.array(CALL["seed"], "int32"),
        "scheduler": CALL["scheduler"],
    }
    for name, value in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    with grpc.insecure_channel(addresses["grpc"].removeprefix("grpc://")) as channel:
        response = prediction_service_pb2_grpc.PredictionServiceStub(channel).Predict(request)
    files = tf.make_ndarray(response.outputs["image_bytes"])
    theirs = pipe(PROMPTS, ["fog", ""], width=24, **CALL).images
    check_pixels(opened(files), theirs)


def test_instances_over_rest(addresses, pipe):
    body = {"instances": PROMPTS, "signature_name": "plain_serving_default"}
    url = f"{addresses['http']}/v1/models/{TEXT_TO_IMAGE}:predict"
    with urllib.request.urlopen(url, json.dumps(body).encode()) as answer:
        predictions = json.loads(answer.read())["predictions"]
    files = [base64.b64decode(prediction["b64"]) for prediction in predictions]
    check_pixels(opened(files), pipe(PROMPTS, num_steps=2, seed=0).images)


def test_a_refusal_names_the_rule(addresses):
    body = {"prompt": ["a"], "negative_prompt": [""], "num_steps": 9, "seed": [0]}
    body |= {"unconditional_guidance_scale": 1.0, "scheduler": "euler"}
    url = f"{addresses['http']}/v1/models/{TEXT_TO_IMAGE}:predict"
    asked = {"signature_name": "plain_generate_1x16x16", "inputs": body}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, json.dumps(asked).encode())
    assert refused.value.code == 400
    assert "num_steps must be 1…2" in json.loads(refused.value.read())["error"]


# The client


def test_the_client_draws_the_pipelines_pictures(client, pipe):
    prompts, seed = [*PROMPTS, "c"], [7, 3, 5]
    for more in ({"width": 24}, {"negative_prompt": "fog"}, {"prompt_syntax": "plain"}):
        parameters = {**CALL, "seed": seed, **more}
        ours, theirs = (chain(prompts, **parameters) for chain in (client, pipe))
        check_pixels(ours.images, theirs.images)
        assert ours.seeds == theirs.seeds == seed
    assert ours.timings.keys() == {TEXT_TO_IMAGE, "total"}


def test_the_client_refuses_what_it_does_not_take(client):
    picture = np.zeros((16, 16, 3), "uint8")
    for given, names in (
        ({"image": picture, "strength": 0.5}, "image, strength"),
        ({"prompt_syntax": "weighted"}, "prompt_syntax"),
    ):
        with pytest.raises(ValueError, match=f"text_to_image alone.*Received also: {names}"):
            client("a", num_steps=2, **given)
    assert not client.calls_back
    with pytest.raises(ValueError, match=r"`callback` is called between .*text_to_image alone"):
        client("a", num_steps=2, callback=lambda *state: None)


def test_the_command_shows_no_progress(addresses, pipe, tmp_path, monkeypatch, capsys):
    """On a terminal, too: the server draws in one call."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    flags = ["--server", addresses["grpc"], "--export_dir", shaped_export(), "--seed", 3]
    flags += ["--num_steps", 2, "--nojit_compile", "--out", tmp_path]
    assert main(["serve", "client", "a", *map(str, flags)]) == 0, capsys.readouterr().err
    drawn = np.asarray(Image.open(tmp_path / "3.png"))
    check_pixels(drawn, pipe("a", num_steps=2, seed=3).images[0])


def test_the_client_gives_what_an_export_takes_besides(tmp_path):
    """Reuse of deep features is one more input of the model from prompts to files."""
    exported = tmp_path / "exported"
    options = ExportOptions(**AS_WRITTEN, reuse=2, text_to_image=True, verify="off")
    export(open_checkpoint(micro_folder()), exported, options)
    loaded = load(exported, [TEXT_TO_IMAGE])
    models = ModelServer({name: {1: servable} for name, servable in loaded.items()})
    pipe, call = pipeline_of(exported), {"num_steps": 2, "seed": 1}
    drawn = []
    with (
        grpc_server(models) as address,
        Client(f"grpc://{address}", exported, jit_compile=False) as client,
    ):
        for reuse in (1, 2):
            drawn.append(client("a red star", reuse=reuse, **call).images)
            check_pixels(drawn[-1], pipe("a red star", reuse=reuse, **call).images)
    assert (drawn[0] != drawn[1]).any()
