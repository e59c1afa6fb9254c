"""Warm-up requests, which the server runs on a version before it serves it.

Each compiled signature compiles when it is first called. Recorded requests, one for each signature
(and for each number of prompts that the text encoder takes), move that to the start of the server.
Only dtypes and shapes matter, so no model is run to make them: tokens are those of a real prompt,
scalars are those of a real call of one step, and other components' outputs (contexts, latents,
pictures) are random numbers of the right shape.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.framework import types_pb2
from tensorflow_serving.apis import predict_pb2, prediction_log_pb2

from sd_tf.runtime.capabilities import takes_weights
from sd_tf.runtime.controls import inputs_of
from sd_tf.runtime.image_prompts import GIVEN, SCALES, shown_of
from sd_tf.runtime.manifest import Manifest
from sd_tf.runtime.reuse import FEATURES, reuse_input
from sd_tf.runtime.runner import NO_FURTHER_GUIDANCE, PLAIN
from sd_tf.runtime.shapes import Shape, Size
from sd_tf.runtime.text_inputs import text_inputs
from sd_tf.serving.tf_serving import ServingError, signatures
from sd_tf.serving.tf_serving.folder import WARM_UP
from sd_tf.tokenizer.open import open_tokenizer

PROMPT = "a lighthouse on a cliff above the sea at sunset, oil painting"
GUIDANCE = 7.5
MAX_RECORDS = 1000  # the server refuses a model with more


def write(
    folder: Path,
    component: str,
    model: str,
    export: Path,
    manifest: Manifest,
    xla: bool,
    shapes: Collection[Shape],
) -> None:
    """Record the requests of one component's SavedModel for some shapes in `folder`."""
    graph = signatures.read(folder)
    path = folder / WARM_UP
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # it may be a link to the export's own file
    names = [
        name
        for name in wanted(signatures.names(graph), xla)
        if manifest.shapes.endpoint_of(name)[1] in shapes
    ]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for request in requests(graph.signature_def, names, component, export, manifest):
            request.model_spec.name = model
            log = prediction_log_pb2.PredictionLog(
                predict_log=prediction_log_pb2.PredictLog(request=request)
            )
            writer.write(log.SerializeToString(deterministic=True))


def requests(
    signature_defs, names: Iterable[str], component: str, export: Path, manifest: Manifest
) -> Iterator[predict_pb2.PredictRequest]:
    """Yield a request for each named signature and each number of prompts that it takes."""
    values = Values(export, manifest)
    for name in names:
        _, shape = manifest.shapes.endpoint_of(name)
        batch = shape.batch_size
        for count in sorted({1, batch}) if component == "text_encoder" else [batch]:
            inputs = signature_defs[name].inputs
            request = predict_pb2.PredictRequest()
            request.model_spec.name = component
            request.model_spec.signature_name = name
            for key in sorted(inputs):
                value = values(key, inputs[key], count, shape.size)
                request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
            yield request


def wanted(names: list[str], xla: bool) -> list[str]:
    """Select the signatures that clients call: without XLA, plain twins replace compiled ones."""
    if xla:
        return [name for name in names if not name.startswith(PLAIN)]
    return [name for name in names if PLAIN + name not in names]


class Values:
    """Callable: an input, the number of prompts and the size → a value such as a client sends."""

    def __init__(self, export: Path, manifest: Manifest):
        scheduler = manifest.default_sampler
        steps = manifest.schedulers[scheduler].least_steps
        calls = manifest.model_calls(scheduler, steps)
        tokenizers = [open_tokenizer(export / place) for place in manifest.tokenizers.values()]
        weighted = takes_weights(manifest)
        texts = text_inputs(manifest, tokenizers, [PROMPT], [PROMPT], weighted)
        nets = len(manifest.controls)
        self.time_ids = manifest.time_ids
        self.texts = {"prompt": PROMPT, "negative_prompt": "", "scheduler": scheduler}
        self.random = np.random.default_rng(0)
        self.known = {
            **{name: value[0] for name, value in texts.items()},
            "seed": 0,
            "scheduler": manifest.scheduler_number(scheduler),
            "num_steps": steps,
            "first": 0,
            "start": 0,
            "stop": calls,
            "unconditional_guidance_scale": GUIDANCE,
            **{name: NO_FURTHER_GUIDANCE[name] for name in manifest.further_scales},
            "history": 0,
            FEATURES: 0,
            **reuse_input(manifest.reuse, manifest.reuse.most),
            "mask": 1,
            **inputs_of([1.0] * nets, [(0, calls)] * nets, guesses=False),
            SCALES: 1,
            GIVEN: 1,
            **{shown_of(n): 1 for n in range(len(manifest.image_prompts.adapters))},
        }

    def __call__(self, name: str, tensor, count: int, size: Size) -> np.ndarray:
        dtype = tf.dtypes.as_dtype(tensor.dtype).as_numpy_dtype
        if tensor.dtype == types_pb2.DT_STRING and name in self.texts:
            return np.full(signatures.shape(tensor), self.texts[name], dtype)
        shape = [count if size < 0 else size for size in signatures.shape(tensor)]
        if name.endswith("time_ids"):
            return np.broadcast_to(np.asarray([*size, 0, 0, *size][: self.time_ids], dtype), shape)
        if name in self.known:
            return np.broadcast_to(np.asarray(self.known[name], dtype), shape)
        if not np.issubdtype(dtype, np.floating):
            raise ServingError(
                f"No warm-up value is known for the input {name!r}, "
                f"{signatures.describe(tensor)}. Add it to Values in {__name__}."
            )
        if name == "images" or name.startswith("control_image"):
            return self.random.uniform(0, 1, shape).astype(dtype)
        return self.random.standard_normal(shape).astype(dtype)


def read(path: Path) -> Iterator[predict_pb2.PredictRequest]:
    """Yield the requests in a file, read as the server reads them."""
    try:
        for index, record in enumerate(tf.data.TFRecordDataset(str(path)).as_numpy_iterator()):
            log = prediction_log_pb2.PredictionLog.FromString(record)
            if not log.HasField("predict_log"):
                raise ValueError(f"record {index} is {log.WhichOneof('log_type')}, not predict_log")
            yield log.predict_log.request
    except (tf.errors.OpError, DecodeError, ValueError) as error:
        raise ServingError(str(error).partition("\n")[0]) from error


def replay(session, graph, request: predict_pb2.PredictRequest) -> dict[str, np.ndarray]:
    """Run a request in a session as the server does: feed and fetch by the tensors' names."""
    signature = graph.signature_def[request.model_spec.signature_name]
    feed = {
        signature.inputs[key].name: tf.make_ndarray(value) for key, value in request.inputs.items()
    }
    fetch = {key: tensor.name for key, tensor in signature.outputs.items()}
    return session.run(fetch, feed)
