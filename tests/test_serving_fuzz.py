"""Hostile requests: always an answer that says what is wrong, and no memory that stays taken."""

import gc
import http.client
import json

import numpy as np
import psutil
import pytest
import schemathesis
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from tensorflow_serving.apis import get_model_metadata_pb2, predict_pb2

from sd_tf.runtime.saved_model import give_back
from sd_tf.serving.tf_serving import predict
from sd_tf.serving.tf_serving.rest import rest
from tests.exports import micro_export
from tests.fronts import ask, running_front
from tests.fuzz import FEW, MANY, changed, damaged

CALL = {"prompt": "a", "negative_prompt": "b", "num_steps": 1, "seed": 1, "count": 1, "previews": 1}
REFUSED = {400, 404, 413, 415, 422}
MOST_GROWTH = 200e6  # bytes
LATENT = np.zeros((2, 8, 8, 4), "float32")


@pytest.fixture(scope="module")
def front():
    with running_front(num_steps=1) as front:
        status, _ = ask(front, "POST", "/generate", **CALL)  # takes what a first picture takes
        assert status == 200
        yield front


@pytest.fixture(scope="module")
def server():
    models = predict.load(micro_export(), ["decoder"])
    return predict.ModelServer({"decoder": {1: models["decoder"]}})


@pytest.fixture(autouse=True)
def memory_stays(front, server):
    before = held()
    yield
    assert held() - before < MOST_GROWTH


def held() -> int:
    """Bytes that the process holds when all that it does not use is given back."""
    gc.collect()
    give_back()
    return psutil.Process().memory_info().rss


def test_bodies(front):
    connection = http.client.HTTPConnection(front.http, timeout=60)

    @FEW
    @given(st.data())
    def post(data):
        body = json.dumps(data.draw(changed(CALL))).encode()
        if data.draw(st.booleans()):
            body = data.draw(damaged(body))
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        content = json.loads(answer.read())
        assert answer.status == 200 or (answer.status in REFUSED and content["error"])

    post()
    connection.close()


def test_the_api_is_as_its_page_says(front):
    """Requests made of the OpenAPI document, those that it allows and those that it does not."""
    schema = schemathesis.openapi.from_url(f"http://{front.http}/openapi.json")
    for operation in schema.get_all_operations():

        @FEW
        @given(case=operation.ok().as_strategy())
        def ask(case):
            if isinstance(case.body, dict) and isinstance(case.body.get("num_steps"), int):
                case.body["num_steps"] = min(case.body["num_steps"], 2)
            status = case.call().status_code
            assert status < 500 or status == 504, "a timeout may be short"

        ask()


def test_rest_of_the_models(server):
    body = {"signature_name": "plain_serving_default", "inputs": {"latent": LATENT.tolist()}}
    paths = ("/v1/models/decoder:predict", "/v1/models/decoder/versions/1:predict")

    @FEW
    @given(st.data())
    def post(data):
        content = json.dumps(data.draw(changed(body))).encode()
        path = data.draw(st.sampled_from(paths))
        if data.draw(st.booleans()):
            content = data.draw(damaged(content))
        if data.draw(st.integers(0, 4)) == 0:
            path = data.draw(damaged(path.encode())).decode("latin-1")
        status, text = rest(server, data.draw(st.sampled_from(["POST", "GET"])), path, content)
        assert status == 200 or (status in REFUSED and json.loads(text)["error"])

    post()


@pytest.mark.parametrize("method", ["predict", "metadata"])
def test_messages_to_the_models(server, method):
    if method == "predict":
        request = predict_pb2.PredictRequest()
        request.inputs["latent"].CopyFrom(tf.make_tensor_proto(LATENT))
        request.model_spec.signature_name = "plain_serving_default"
    else:
        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "decoder"
    message = request.SerializeToString()
    head = len(message) if method == "metadata" else 150  # the rest is numbers
    allowed = {
        0,
        tf.errors.INVALID_ARGUMENT,
        tf.errors.NOT_FOUND,
        tf.errors.FAILED_PRECONDITION,
        tf.errors.UNIMPLEMENTED,
    }

    @MANY
    @given(st.data())
    def ask(data):
        code, answer = predict.serialized(
            server, method, data.draw(damaged(message[:head])) + message[head:]
        )
        assert code in allowed and (code == 0 or answer)

    ask()
