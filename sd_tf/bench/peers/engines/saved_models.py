"""Our engine: an export's SavedModels, whose compiled signatures are called as by the pipeline."""

from pathlib import Path

import numpy as np
import tensorflow as tf

from sd_tf.bench.peers import inputs as npz
from sd_tf.bench.peers.agreement import solved
from sd_tf.bench.peers.engine import (
    GUIDANCE,
    NEGATIVE,
    PLAIN,
    PROMPT,
    SAMPLER,
    Job,
    Loaded,
    Stage,
)
from sd_tf.bench.timing import devices, peak_device_memory, timed
from sd_tf.runtime.chain import open_export
from sd_tf.runtime.graph_kernels import keep_weights
from sd_tf.runtime.pipeline import Pipeline, SavedModelRunner

MATMUL_SIZES, MATMUL_RUNS = (2048, 4096), 4


def load(job: Job) -> Loaded:
    job.check_device("TensorFlow", bool(tf.config.list_physical_devices("GPU")))
    manifest, tokenizers = open_export(Path(job.export_dir))
    keep_weights(manifest)
    compiles = job.engine != PLAIN
    replica = SavedModelRunner(Path(job.export_dir), manifest, jit_compile=compiles, device=None)
    pipe = Pipeline(manifest, [replica], tokenizers, load_seconds=0.0)

    def draw(steps):
        result = pipe(
            [PROMPT] * manifest.shapes.first.batch_size,
            negative_prompt=NEGATIVE,
            num_steps=steps,
            guidance_scale=GUIDANCE,
            scheduler=SAMPLER,
            seed=0,
        )
        return result.timings["diffusion_model"] / manifest.model_calls(SAMPLER, steps)

    return Loaded(
        stages={} if job.inputs is None else _stages(replica, job),
        draw=draw,
        matmul=lambda: _matmul(job.precision),
        device_memory=peak_device_memory,
        devices=devices(),
    )


def _stages(replica: SavedModelRunner, job: Job) -> dict[str, Stage]:
    given = npz.read(job.inputs)
    negative, positive = np.split(given["tokens"], 2)
    unconditional, conditional = np.split(given["context"], 2)
    noise, shape = given["noise"], replica.manifest.shapes.first

    def encode():
        tokens = {"tokens": positive, "negative_tokens": negative}
        outputs = replica.call("text_encoder", "encode", shape, **tokens)
        return [np.asarray(outputs[name]) for name in ("unconditional_context", "context")]

    def segment(stop):
        outputs = replica.call(
            "diffusion_model",
            "segment",
            shape,
            latent=noise,
            history=np.zeros((replica.manifest.history, *noise.shape), "float32"),
            context=conditional,
            unconditional_context=unconditional,
            scheduler=np.int32(replica.manifest.scheduler_number(SAMPLER)),
            num_steps=np.int32(job.steps),
            seed=np.zeros(len(noise), "int32"),
            unconditional_guidance_scale=np.float32(GUIDANCE),
            first=np.int32(0),
            start=np.int32(0),
            stop=np.int32(stop),
        )
        return np.asarray(outputs["latent"])

    return {
        "text_encoder": Stage(encode, lambda both: np.concatenate([x[:1] for x in both])),
        "unet_step": Stage(
            lambda: segment(job.steps),
            lambda _: solved(noise, segment(1), given["rows"][0]),
            calls=job.steps - 1,
            less=lambda: segment(1),
        ),
        "decoder": Stage(lambda: replica.decode(given["latent"]), lambda images: images),
    }


def _matmul(precision: str) -> dict[str, float]:
    """Measure square products, compiled by XLA and in TensorFlow's graph: the best GFLOP/s each."""

    def product(a, b):
        return a @ b

    kinds = {
        "xla": tf.function(product, jit_compile=True),
        "graph": tf.function(product),
    }
    found = {}
    for size in MATMUL_SIZES:
        a, b = (tf.cast(tf.random.normal((size, size)), precision) for _ in range(2))
        for kind, function in kinds.items():
            function(a, b).numpy()
            # Reading one number waits for the whole product, and does not copy it.
            seconds = [
                timed(lambda f=function, a=a, b=b: f(a, b)[0, 0].numpy())[1]
                for _ in range(MATMUL_RUNS)
            ]
            found[f"{kind} {size}"] = 2 * size**3 / min(seconds) / 1e9
    return found
