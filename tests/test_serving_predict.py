"""TensorFlow Serving's API on an export, asked through TensorFlow Serving's own Python stubs."""

import base64
import http.client
import io
import json
import random

import grpc
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tensorflow.python.tools import saved_model_utils
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from sd_tf.runtime.manifest import ExportError
from sd_tf.serving.tf_serving.predict import load
from sd_tf.serving.tf_serving.rest import rest
from tests.exports import check_equal
from tests.serving_server import UNLIMITED, grpc_server, http_server, served_models

COMPONENTS = ("text_encoder", "diffusion_model", "decoder", "image_encoder")
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 49406, (2, 77)).astype("int32")
LATENT = RNG.standard_normal((2, 8, 8, 4)).astype("float32")
CONTEXT = RNG.standard_normal((2, 77, 64)).astype("float32")
RUN = {
    "context": CONTEXT,
    "unconditional_context": -CONTEXT,
    "num_steps": np.int32(2),
    "unconditional_guidance_scale": np.float32(5.0),
}
STEPS = {"num_steps": np.int32(2), "scheduler": np.int32(3)}
SEED = {"seed": np.array([3, 4], "int32")}
STATE = {
    "latent": LATENT,
    "history": np.zeros((5, 2, 8, 8, 4), "float32"),
    "first": np.int32(0),
    "start": np.int32(0),
    "stop": np.int32(1),
}
CASES = [
    ("text_encoder", "serving_default", {"tokens": TOKENS}),
    ("text_encoder", "serving_default", {"tokens": TOKENS[:1]}),
    ("text_encoder", "encode", {"tokens": TOKENS, "negative_tokens": TOKENS[:1]}),
    ("diffusion_model", "plain_serving_default", RUN),
    ("diffusion_model", "plain_seeded", {**RUN, **STEPS, **SEED}),
    ("diffusion_model", "plain_segment", {**RUN, **STEPS, **SEED, **STATE}),
    ("diffusion_model", "noise", SEED),
    ("diffusion_model", "begin", {"noise": LATENT, **STEPS}),
    ("decoder", "plain_serving_default", {"latent": LATENT}),
    ("decoder", "plain_png", {"latent": LATENT}),
    (
        "image_encoder",
        "plain_serving_default",
        {"images": LATENT.repeat(8, 1).repeat(8, 2)[..., :3]},
    ),
]


@pytest.fixture(scope="module")
def export():
    return served_models()[0]


@pytest.fixture(scope="module")
def models():
    return served_models()[1]


@pytest.fixture(scope="module")
def loaded(export):
    return {name: tf.saved_model.load(str(export / name / "1")) for name in COMPONENTS}


@pytest.fixture(scope="module")
def channel(models):
    with grpc_server(models) as address, grpc.insecure_channel(address, UNLIMITED) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel):
    return prediction_service_pb2_grpc.PredictionServiceStub(channel)


def request_of(model, signature="", inputs=None, version=None, label=None, outputs=()):
    request = predict_pb2.PredictRequest(output_filter=outputs)
    request.model_spec.name, request.model_spec.signature_name = model, signature
    if version is not None:
        request.model_spec.version.value = version
    if label is not None:
        request.model_spec.version_label = label
    for name, value in (inputs or {}).items():
        is_proto = isinstance(value, tf.make_tensor_proto(0).__class__)
        request.inputs[name].CopyFrom(value if is_proto else tf.make_tensor_proto(value))
    return request


def arrays(response):
    return {name: tf.make_ndarray(proto) for name, proto in response.outputs.items()}


def equal(ours, expected):
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        check_equal(ours[name], value.numpy())


# gRPC


@pytest.mark.parametrize(("model", "signature", "inputs"), CASES)
def test_predict_equals_the_saved_model(stub, loaded, model, signature, inputs):
    response = stub.Predict(request_of(model, signature, inputs))
    expected = loaded[model].signatures[signature](
        **{name: tf.constant(value) for name, value in inputs.items()}
    )
    equal(arrays(response), expected)
    spec = response.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == (model, 1, signature)


def test_versions_labels_and_outputs(stub):
    for choice in ({}, {"version": 1}, {"label": "stable"}):
        wanted = ["unconditional_context"]
        request = request_of("text_encoder", "", {"tokens": TOKENS}, outputs=wanted, **choice)
        response = stub.Predict(request)
        assert list(response.outputs) == wanted
        assert response.model_spec.signature_name == "serving_default"
        assert response.model_spec.version.value == 1


@pytest.mark.parametrize("model", COMPONENTS)
def test_metadata_equals_the_file(stub, export, model):
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = model
    response = stub.GetModelMetadata(request)
    assert (response.model_spec.name, response.model_spec.version.value) == (model, 1)
    served = get_model_metadata_pb2.SignatureDefMap()
    response.metadata["signature_def"].Unpack(served)
    # What saved_model_cli reads.
    graph = saved_model_utils.get_meta_graph_def(str(export / model / "1"), "serve")
    assert served.signature_def.keys() == graph.signature_def.keys()
    assert "serving_default" in served.signature_def
    for name, signature in graph.signature_def.items():
        assert served.signature_def[name] == signature


def test_status(channel):
    stub = model_service_pb2_grpc.ModelServiceStub(channel)
    for version in (None, 1):
        response = stub.GetModelStatus(status_request("decoder", version))
        (entry,) = response.model_version_status
        assert (entry.version, entry.state, entry.status.error_code) == (1, 30, 0)
        assert entry.State.Name(entry.state) == "AVAILABLE"
    for model, version, message in (
        ("vae", None, "Could not find any versions of model vae"),
        ("decoder", 2, "Could not find version 2 of model decoder"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetModelStatus(status_request(model, version))
        assert (caught.value.code(), caught.value.details()) == (NOT_FOUND, message)
    with pytest.raises(grpc.RpcError, match="Missing ModelSpec"):
        stub.GetModelStatus(get_model_status_pb2.GetModelStatusRequest())


def status_request(model, version):
    request = get_model_status_pb2.GetModelStatusRequest()
    request.model_spec.name = model
    if version is not None:
        request.model_spec.version.value = version
    return request


def proto(dtype="int32", shape=(2, 77), **fields):
    result = tf.make_tensor_proto(np.zeros((), dtype))
    result.ClearField(f"{'float' if dtype == 'float32' else 'int'}_val")
    for size in shape:
        result.tensor_shape.dim.add(size=size)
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(result, name).extend(value)
        else:
            setattr(result, name, value)
    return result


def test_how_a_tensor_may_be_written(stub):
    """Content, values, one value for all, fewer values than elements, none."""

    def ids(**fields):
        response = stub.Predict(request_of("text_encoder", "", {"tokens": proto(**fields)}))
        return arrays(response)["context"]

    full = np.full((2, 77), 7, "int32")
    expected = ids(tensor_content=full.tobytes())
    np.testing.assert_array_equal(ids(int_val=full.ravel().tolist()), expected)
    np.testing.assert_array_equal(ids(int_val=[7]), expected)
    some = np.concatenate([np.arange(5), np.full(149, 4)]).astype("int32").reshape(2, 77)
    np.testing.assert_array_equal(ids(int_val=[0, 1, 2, 3, 4]), ids(tensor_content=some.tobytes()))
    np.testing.assert_array_equal(ids(), ids(tensor_content=np.zeros_like(full).tobytes()))


NOT_FOUND, INVALID = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT
UNKNOWN_RANK = proto(shape=())
UNKNOWN_RANK.tensor_shape.unknown_rank = True
UNKNOWN_TYPE, NO_TYPE = proto(int_val=[1]), proto(int_val=[1])
UNKNOWN_TYPE.dtype, NO_TYPE.dtype = 77, 0
PARSING = "tensor parsing error: tokens"
ERRORS = [
    (("vae",), NOT_FOUND, "Servable not found for request: Latest(vae)"),
    (
        ("decoder", "", None, 7),
        NOT_FOUND,
        "Servable not found for request: Specific(decoder, 7)",
    ),
    (("decoder", "", None, None, "x"), INVALID, "Unrecognized servable version label: x"),
    (("",), INVALID, "ModelSpec has no name specified."),
    (
        ("decoder", "x"),
        grpc.StatusCode.FAILED_PRECONDITION,
        'Serving signature key "x" not found.',
    ),
    (
        ("decoder", "__saved_model_init_op"),
        grpc.StatusCode.FAILED_PRECONDITION,
        'Serving signature key "__saved_model_init_op" not found.',
    ),
    (
        ("text_encoder", "encode", {"tokens": TOKENS}),
        INVALID,
        "input size does not match signature: 1!=2 len({tokens}) != len({negative_tokens,tokens}). "
        "Sent extra: {}. Missing but required: {negative_tokens}.",
    ),
    (
        ("text_encoder", "", {"tokens": TOKENS, "more": TOKENS}),
        INVALID,
        "input size does not match signature: 2!=1 len({more,tokens}) != len({tokens}). "
        "Sent extra: {more}. Missing but required: {}.",
    ),
    (
        ("text_encoder", "encode", {"tokens": TOKENS, "x": TOKENS}),
        INVALID,
        "input tensor alias not found in signature: x. "
        "Inputs expected to be in the set {negative_tokens,tokens}.",
    ),
    (
        ("text_encoder", "", {"tokens": TOKENS.astype("float32")}),
        INVALID,
        "Expects arg[0] to be int32 but float is provided",
    ),
    (
        ("diffusion_model", "begin", {"noise": LATENT, **STEPS, "scheduler": np.int64(1)}),
        INVALID,
        "Expects arg[2] to be int32 but int64 is provided",
    ),
    (
        ("text_encoder", "", {"tokens": TOKENS[:, :76]}),
        INVALID,
        "Input tokens has the shape [2,76], its signature takes [1|2,77].",
    ),
    (
        ("text_encoder", "", {"tokens": np.zeros((3, 77), "int32")}),
        INVALID,
        "Input tokens has the shape [3,77], its signature takes [1|2,77].",
    ),
    (
        ("decoder", "", {"latent": LATENT[0]}),
        INVALID,
        "Input latent has the shape [8,8,4], its signature takes [2,8,8,4].",
    ),
    (
        ("text_encoder", "", {"tokens": proto(shape=(1 << 40, 77), int_val=[1])}),
        INVALID,
        "Input tokens has the shape [1099511627776,77], its signature takes [1|2,77].",
    ),
    (("text_encoder", "", {"tokens": proto(tensor_content=b"123")}), INVALID, PARSING),
    (("text_encoder", "", {"tokens": proto(shape=(-1, 77))}), INVALID, PARSING),
    (("text_encoder", "", {"tokens": UNKNOWN_RANK}), INVALID, PARSING),
    (("text_encoder", "", {"tokens": UNKNOWN_TYPE}), INVALID, PARSING),
    (("text_encoder", "", {"tokens": NO_TYPE}), INVALID, PARSING),
    (
        ("text_encoder", "", {"tokens": TOKENS}, None, None, ["x"]),
        INVALID,
        "output tensor alias not found in signature: x "
        "Outputs expected to be in the set {context,unconditional_context}.",
    ),
    (
        ("text_encoder", "", {"tokens": TOKENS}, None, None, ["context"] * 2),
        INVALID,
        "duplicate output tensor alias: context",
    ),
]


@pytest.mark.parametrize(("asked", "code", "message"), ERRORS)
def test_errors(stub, asked, code, message):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(request_of(*asked))
    assert (caught.value.code(), caught.value.details()) == (code, message)


def test_what_the_model_itself_refuses(stub):
    for changes, message in (
        ({"num_steps": np.int32(9)}, "num_steps must be 1…8"),
        ({"scheduler": np.int32(-1)}, "scheduler must be 0…"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Predict(
                request_of("diffusion_model", "begin", {"noise": LATENT, **STEPS, **changes})
            )
        assert caught.value.code() == INVALID
        assert caught.value.details().startswith(f"assertion failed: [{message}")
    with pytest.raises(grpc.RpcError) as caught:
        stub.Predict(request_of("text_encoder", "", {"tokens": np.full((1, 77), 50000, "int32")}))
    assert caught.value.code() == INVALID
    assert caught.value.details().startswith("indices[0,0] = 50000 is not in [0, 49408)")


def test_requests_without_a_model(stub):
    for method, request in (
        (stub.Predict, predict_pb2.PredictRequest()),
        (stub.GetModelMetadata, get_model_metadata_pb2.GetModelMetadataRequest()),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            method(request)
        assert (caught.value.code(), caught.value.details()) == (INVALID, "Missing ModelSpec")
    for fields, message in (
        ([], "GetModelMetadataRequest must specify at least one metadata_field"),
        (["x"], "Metadata field x is not supported"),
    ):
        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=fields)
        request.model_spec.name = "decoder"
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetModelMetadata(request)
        assert (caught.value.code(), caught.value.details()) == (INVALID, message)


def test_unknown_components(export):
    with pytest.raises(
        ExportError, match=r"must be among those of .*text_encoder, diffusion_model.*Received: vae"
    ):
        load(export, ["vae"])


# REST


def post(models, path, **content):
    status, text = rest(models, "POST", f"/v1/models/{path}:predict", json.dumps(content).encode())
    return status, json.loads(text)


def test_rest_rows_and_columns(models, loaded):
    expected = loaded["text_encoder"].signatures["serving_default"](tokens=tf.constant(TOKENS))
    for path in ("text_encoder", "text_encoder/versions/1", "text_encoder/labels/stable"):
        status, answer = post(models, path, instances=TOKENS.tolist())
        assert status == 200 and answer.keys() == {"predictions"}
        rows = answer["predictions"]
        columns = {key: np.array([row[key] for row in rows], "float32") for key in rows[0]}
        equal(columns, expected)
    named = [{"tokens": row} for row in TOKENS.tolist()]
    assert post(models, "text_encoder", instances=named) == (200, answer)
    for inputs in (TOKENS.tolist(), {"tokens": TOKENS.tolist()}):
        status, answer = post(models, "text_encoder", inputs=inputs)
        assert status == 200 and answer.keys() == {"outputs"}
        equal({key: np.array(v, "float32") for key, v in answer["outputs"].items()}, expected)


def test_rest_single_outputs_and_scalars(models, loaded):
    inputs = {"noise": LATENT.tolist(), "num_steps": 2, "scheduler": 3}
    status, answer = post(models, "diffusion_model", signature_name="begin", inputs=inputs)
    expected = loaded["diffusion_model"].signatures["begin"](
        noise=tf.constant(LATENT), num_steps=tf.constant(2), scheduler=tf.constant(3)
    )
    assert status == 200
    np.testing.assert_array_equal(np.array(answer["outputs"], "float32"), expected["latent"])
    content = {"signature_name": "plain_serving_default", "instances": LATENT.tolist()}
    status, answer = post(models, "decoder", **content)
    assert status == 200 and np.array(answer["predictions"]).shape == (2, 64, 64, 3)


def test_rest_binary(models, loaded):
    """Outputs named *_bytes come as base64, and binary may be given so."""
    status, answer = post(models, "decoder", signature_name="plain_png", inputs=LATENT.tolist())
    assert status == 200
    pixels = loaded["decoder"].signatures["plain_serving_default"](latent=tf.constant(LATENT))
    for entry, expected in zip(answer["outputs"], pixels["generated_images"], strict=True):
        assert entry.keys() == {"b64"}
        picture = Image.open(io.BytesIO(base64.b64decode(entry["b64"])))
        check_equal(np.asarray(picture), expected.numpy())


def test_rest_floats_are_the_servers(models):
    """Six digits where they give the number back, else nine."""
    noise = np.zeros((2, 8, 8, 4), "float32")
    noise[0, 0, 0] = [0.2, 1 / 3, 1e-20, 3.0]
    inputs = {"noise": noise.tolist(), "num_steps": 1, "scheduler": 0}
    _, answer = post(models, "diffusion_model", signature_name="begin", inputs=inputs)
    assert answer["outputs"][0][0][0] == [0.2, 0.333333343, 1e-20, 3.0]


def test_rest_status_and_metadata(models, export):
    expected = {
        "model_version_status": [
            {
                "version": "1",
                "state": "AVAILABLE",
                "status": {"error_code": "OK", "error_message": ""},
            }
        ]
    }
    for path in ("decoder", "decoder/versions/1"):
        status, text = rest(models, "GET", f"/v1/models/{path}")
        assert (status, json.loads(text)) == (200, expected)
    status, text = rest(models, "GET", "/v1/models/decoder/metadata")
    answer = json.loads(text)
    assert status == 200
    assert answer["model_spec"] == {"name": "decoder", "signature_name": "", "version": "1"}
    latent = answer["metadata"]["signature_def"]["signature_def"]["png"]["inputs"]["latent"]
    assert latent["dtype"] == "DT_FLOAT"
    assert [dim["size"] for dim in latent["tensor_shape"]["dim"]] == ["2", "8", "8", "4"]


@pytest.mark.parametrize(
    ("model", "content", "status", "message"),
    [
        ("vae", {"inputs": 1}, 404, "Servable not found for request: Latest(vae)"),
        ("decoder/versions/7", {"inputs": 1}, 404, "request: Specific(decoder, 7)"),
        ("decoder/labels/x", {"inputs": 1}, 400, "Unrecognized servable version label: x"),
        (f"decoder/versions/{2**63}", {}, 400, f"Failed to convert version: {2**63} to numeric."),
        (
            "decoder",
            {"signature_name": "x", "inputs": 1},
            400,
            'Serving signature name: "x" not found in signature def',
        ),
        ("decoder", {"signature_name": 1}, 400, "'signature_name' key must be a string value."),
        ("decoder", {}, 400, "Missing 'inputs' or 'instances' key"),
        ("decoder", {"inputs": 1, "instances": [1]}, 400, "expecting only one of 'inputs' or"),
        ("decoder", {"instances": 1}, 400, "Excepting 'instances' to be an list/array"),
        ("decoder", {"instances": []}, 400, "No values in 'instances' array"),
        ("decoder", {"inputs": {"x": 1}}, 400, "Missing named input: latent in 'inputs' object."),
        ("decoder", {"inputs": [[1], [1, 2]]}, 400, "list at unexpected size: 2 at level: 1"),
        ("decoder", {"inputs": [[1], 2]}, 400, "JSON Value: 2 found at incorrect level: 2"),
        ("decoder", {"inputs": [1, [2]]}, 400, "Encountered list at unexpected level: 1"),
        (
            "decoder",
            {"inputs": ["a"]},
            400,
            'JSON Value: "a" Type: String is not of expected type: float',
        ),
        ("decoder", {"inputs": [True]}, 400, "Type: Bool is not of expected type: float"),
        ("decoder", {"inputs": [1e39]}, 400, "to float without loss of precision."),
        ("decoder", {"inputs": [2**24]}, 400, "to float without loss of precision."),
        ("decoder", {"inputs": {"b64": "AA=="}}, 400, "Object is not of expected type: float"),
        ("text_encoder", {"inputs": [[0.5]]}, 400, "Number is not of expected type: int32"),
        ("text_encoder", {"inputs": [[2**31]]}, 400, "Number is not of expected type: int32"),
        ("text_encoder", {"inputs": [[None]]}, 400, "Type: Null is not of expected type: int32"),
        ("text_encoder", {"inputs": [[1]]}, 400, "shape [1,1], its signature takes [1|2,77]."),
        ("text_encoder", {"inputs": 1}, 400, "shape [], its signature takes [1|2,77]."),
        (
            "text_encoder",
            {"signature_name": "encode", "inputs": [[1]]},
            400,
            "expecting an object as multiple input tensors required",
        ),
        (
            "text_encoder",
            {"signature_name": "encode", "instances": [[1]]},
            400,
            "expecting list of objects as multiple input tensors required",
        ),
        (
            "text_encoder",
            {"signature_name": "encode", "instances": [{"tokens": [1]}]},
            400,
            "element: 0 of 'instances' list. JSON object: {\"tokens\": [1]} keys must be equal to: "
            "negative_tokens,tokens",
        ),
        ("decoder", {"instances": [[1], {"latent": [1]}]}, 400, "list but got object at item 1"),
        ("decoder", {"instances": [{"latent": [1]}, [1]]}, 400, "object but got list at item 1"),
        ("decoder", {"instances": [[1], [1, 2]]}, 400, "Expecting shape [1] but got: [2]"),
        (
            "decoder",
            {"instances": [[]] * 100_000},
            400,
            "'instances' has at most 2 rows. Received: 100000",
        ),
        ("decoder", {"x": [[]] * 200_000}, 400, "The body has more than "),
        ("decoder", {"x": [0] * 100_000, "instances": 1}, 400, '{"x": [0, 0, 0, 0'),
    ],
)
def test_rest_errors(models, model, content, status, message):
    got, answer = post(models, model, **content)
    assert got == status and answer.keys() == {"error"}
    assert message in answer["error"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/v1/models/decoder:predict", b"", 400, "JSON Parse error: The document is empty"),
        ("POST", "/v1/models/decoder:predict", b"{", 400, "JSON Parse error: "),
        ("POST", "/v1/models/decoder:predict", b"\xff", 400, "JSON Parse error: "),
        ("POST", "/v1/models/decoder:predict", b"[1]", 400, "JSON Value: [1] Is not object"),
        ("POST", "/v1/models/decoder:predict", b"[" * 99999, 400, "JSON Parse error: "),
        (
            "POST",
            "/v1/models/decoder:predict",
            b'{"inputs": ' + b"[" * 90 + b"1" + b"]" * 90 + b"}",
            400,
            "A tensor of 90 dimensions",
        ),
        (
            "POST",
            "/v1/models/decoder:predict",
            b'{"instances": [' + b"[" * 64 + b"1" + b"]" * 64 + b"]}",
            400,
            "A tensor of 64 dimensions",
        ),
        ("POST", "/v1/models/decoder", b"{}", 400, "Malformed request: POST /v1/models/decoder"),
        ("POST", "/v1/models/decoder:classify", b"{}", 400, "Expected classify signature"),
        ("GET", "/v1/models/decoder:predict", b"", 400, "Malformed request: GET"),
        ("GET", "/v2/models", b"", 400, "Malformed request: GET /v2/models"),
        ("PUT", "/v1/models/decoder", b"", 400, "Malformed request: PUT"),
        ("GET", "/v1/models/vae", b"", 404, "Could not find any versions of model vae"),
        ("GET", "/v1/models/vae/metadata", b"", 404, "request: Latest(vae)"),
    ],
)
def test_rest_malformed(models, method, path, body, status, message):
    got, text = rest(models, method, path, body)
    assert got == status
    assert message in json.loads(text)["error"]


# Nothing that is sent brings a server down


JUNK = [None, True, -1, 0, 0.5, 2**31, 1e39, "x", "", [], {}, [[]], {"b64": "AA=="}, {"b64": "!"}]


def mutated(content: bytes, source: random.Random) -> bytes:
    """Some bytes replaced, left out or put in."""
    content = bytearray(content)
    for _ in range(source.randint(1, 3)):
        kind, place = source.randrange(4), source.randrange(len(content))
        if kind == 0:
            content[place] = source.randrange(256)
        elif kind == 1:
            content[place] ^= 1 << source.randrange(8)
        elif kind == 2 and len(content) > 9:
            del content[place : place + source.randint(1, 9)]
        else:
            content[place:place] = source.randbytes(source.randint(1, 9))
    return bytes(content)


def distorted(request, source: random.Random):
    """A request that parses, with a few of its fields wrong or odd."""
    request = predict_pb2.PredictRequest.FromString(request.SerializeToString())
    for _ in range(source.randint(1, 3)):
        spec, names = request.model_spec, sorted(request.inputs)
        tensor = request.inputs[source.choice(names)] if names else tf.make_tensor_proto(0)
        match source.randrange(9):
            case 0:
                spec.name = source.choice(["", "vae", "decoder", "text_encoder"])
            case 1:
                spec.signature_name = source.choice(["", "x", "noise", "encode", "png"])
            case 2:
                spec.version.value = source.choice([-1, 0, 1, 2**63 - 1])
            case 3:
                spec.version_label = source.choice(["", "x", "stable"])
            case 4:
                tensor.dtype = source.randrange(130)
            case 5:
                sizes = [source.choice([-1, 0, 1, 2, 77, 1 << 40, 2**63 - 1]) for _ in range(2)]
                tensor.tensor_shape.dim.add(size=sizes[0])
                tensor.tensor_shape.dim[0].size = sizes[1]
            case 6:
                tensor.tensor_content = source.randbytes(source.choice([0, 1, 8, 308, 616]))
            case 7:
                tensor.int_val.extend(source.choices([-(2**31), -1, 0, 49408, 2**31 - 1], k=3))
            case 8:
                request.inputs[source.choice(["x", "", "seed"])].CopyFrom(tensor)
    return request.SerializeToString()


def replaced(value, source: random.Random):
    """A JSON value with one of its parts replaced by junk."""
    if not value or not isinstance(value, dict | list) or source.random() < 0.1:
        return source.choice(JUNK)
    if isinstance(value, dict):
        key = source.choice(sorted(value))
        return {**value, key: replaced(value[key], source)}
    index = source.randrange(len(value))
    return [*value[:index], replaced(value[index], source), *value[index + 1 :]]


def test_fuzzed_protobufs(channel, stub):
    """Random bytes, and valid requests with some bytes or fields changed."""
    source = random.Random(0)
    valid = [
        request_of("text_encoder", "serving_default", {"tokens": TOKENS[:1]}, 1),
        request_of("text_encoder", "", {"tokens": proto(int_val=[7])}),
        request_of("diffusion_model", "noise", SEED),
        request_of("diffusion_model", "begin", {"noise": LATENT, **STEPS}, outputs=["latent"]),
    ]
    send = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    codes = []
    for index in range(300):
        request = source.choice(valid)
        content = source.randbytes(source.randint(1, 200))
        if index % 6 > 3:
            content = mutated(request.SerializeToString(), source)
        elif index % 6:
            content = distorted(request, source)
        try:
            send(content, timeout=20)
            codes.append(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            codes.append(error.code())
            if error.code() == grpc.StatusCode.INTERNAL:
                assert error.details() == "Exception deserializing request!"
                with pytest.raises(Exception, match="parsing message"):
                    predict_pb2.PredictRequest.FromString(content)
    # Some changes leave a valid request; UNKNOWN would be an exception of ours.
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.INTERNAL, NOT_FOUND, INVALID} | {
        grpc.StatusCode.FAILED_PRECONDITION
    }
    assert sum(code != grpc.StatusCode.OK for code in codes) > 150
    stub.Predict(request_of("text_encoder", "", {"tokens": TOKENS}))


def test_fuzzed_json(models):
    source = random.Random(0)
    rows = {"instances": TOKENS[:1].tolist()}
    columns = {
        "signature_name": "begin",
        "inputs": {"noise": LATENT.round(1).tolist(), "num_steps": 2, "scheduler": 3},
    }
    valid = [("text_encoder", json.dumps(rows)), ("diffusion_model", json.dumps(columns))]
    statuses = []
    with http_server(models) as address:
        connection = http.client.HTTPConnection(address, timeout=20)
        for index in range(300):
            model, text = source.choice(valid)
            path = f"/v1/models/{model}:predict"
            if index % 6 > 3:
                body = mutated(text.encode(), source)
            elif index % 6:
                body = json.dumps(replaced(json.loads(text), source))
            else:
                body = source.randbytes(source.randint(1, 200))
                path = "/" + "".join(source.choices("v1/models:predict%2e%ff?", k=20))
            connection.request("POST", path, body)
            response = connection.getresponse()
            answer = json.loads(response.read())
            statuses.append(response.status)
            assert (answer.keys() == {"error"}) == (response.status != 200)
        connection.request("POST", "/v1/models/text_encoder:predict", valid[0][1])
        response = connection.getresponse()
        assert response.status == 200 and response.read()
        connection.close()
    assert set(statuses) <= {200, 400, 404}
    assert sum(status != 200 for status in statuses) > 150
