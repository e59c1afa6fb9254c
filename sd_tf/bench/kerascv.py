"""Run KerasCV's own pipeline as its users do, and time the calls of its parts."""

import time
from pathlib import Path

import keras
import keras_cv
from keras_cv.src.models.stable_diffusion.clip_tokenizer import SimpleTokenizer

import sd_tf
from sd_tf.bench.plan import BenchError, Job

MAX_PROMPT_LENGTH = 77
VOCABULARY = Path(sd_tf.__file__).parent / "data" / "bpe_simple_vocab_16e6.txt.gz"
PARTS = ("text_encoder", "diffusion_model", "decoder")


def prepare(job: Job):
    """Build and load all parts now, which KerasCV does on first use; return the timed call."""
    if job.compile_cache is not None:
        from sd_tf.runtime.pipeline import set_compile_cache

        set_compile_cache(job.compile_cache)
    model = keras_cv.models.StableDiffusion(job.height, job.width, jit_compile=job.jit_compile)
    model._tokenizer = SimpleTokenizer(bpe_path=str(VOCABULARY))
    if len(model.tokenizer.encode(job.prompt)) > MAX_PROMPT_LENGTH:
        raise BenchError(f"KerasCV takes a prompt of at most {MAX_PROMPT_LENGTH} tokens.")
    if job.random_weights:
        keras.utils.set_random_seed(job.seed % 2**32)  # the same weights with and without XLA
        parts = keras_cv.models.stable_diffusion
        size = (job.height, job.width)
        model._text_encoder = parts.TextEncoder(MAX_PROMPT_LENGTH, download_weights=False)
        model._diffusion_model = parts.DiffusionModel(
            *size, MAX_PROMPT_LENGTH, download_weights=False
        )
        model._decoder = parts.Decoder(*size, download_weights=False)
    clocks = {name: Stopwatch(_part(model, name), job.jit_compile) for name in PARTS}

    def call():
        for part in clocks.values():
            part.calls = []
        start = time.perf_counter()
        images = model.text_to_image(
            job.prompt,
            batch_size=job.batch_size,
            num_steps=job.num_steps,
            unconditional_guidance_scale=job.guidance_scale,
            seed=job.seed,
        )
        end = time.perf_counter()
        # The prompt and the empty one are encoded, then the loop runs, then the decoder.
        encoded = clocks["text_encoder"].calls[-1][1]
        denoised = clocks["decoder"].calls[0][0]
        stages = {
            "text_encoder": encoded - start,
            "diffusion_model": denoised - encoded,
            "decoder": end - denoised,
        }
        return images, stages

    return call


def _part(model, name: str):
    try:
        return getattr(model, name)
    except Exception as error:  # Keras raises a bare Exception for a failed download
        raise BenchError(
            f"KerasCV could not get the weights of its {name}: {error}. Without a network, measure "
            f"the same architecture with `random_weights`."
        ) from error


class Stopwatch:
    """Records when each call of a model begins and ends; results are NumPy's, so complete."""

    def __init__(self, model, jit_compile: bool):
        # Keras 3 uses XLA unless told not to, and KerasCV's jit_compile=False does not tell it.
        model.compile(jit_compile=jit_compile)
        self.calls: list[tuple[float, float]] = []
        predict = model.predict_on_batch

        def predict_on_batch(inputs):
            start = time.perf_counter()
            outputs = predict(inputs)
            self.calls.append((start, time.perf_counter()))
            return outputs

        model.predict_on_batch = predict_on_batch
