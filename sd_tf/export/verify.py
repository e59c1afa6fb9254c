"""Check that an export computes what its models compute: figures for the manifest, and a floor."""

import time

import numpy as np
import tensorflow as tf

from sd_tf.components.build import Component
from sd_tf.runtime.call import WEIGHTED
from sd_tf.runtime.manifest import VERSION_FOLDER, ExportError
from sd_tf.runtime.psnr import psnr
from sd_tf.runtime.runner import PLAIN

# Agreement in dB, below which nothing is published. Export and model are compared in the same
# precision, so only the order of additions differs, which half precision makes visible.
FLOORS = {"float32": 60.0, "bfloat16": 25.0, "float16": 35.0}
STEPS = {"full": 2, "fast": 1}


def run_of(part: Component, level: str) -> dict[str, np.int32]:
    """Choose the run to compare: few steps of the default scheduler."""
    if part.tables is None:
        return {}
    possible = np.flatnonzero(part.tables.calls[part.default_scheduler]) + 1
    enough = possible[possible >= STEPS[level]]
    steps = enough[0] if enough.size else possible[-1]
    return {"num_steps": np.int32(steps), "scheduler": np.int32(part.default_scheduler)}


def sample_inputs(specs: dict[str, tf.TensorSpec], part: Component, level: str) -> dict:
    """Make fixed inputs for an endpoint, in the range of real ones."""
    rng = np.random.default_rng(0)
    known = {
        **run_of(part, level),
        "unconditional_guidance_scale": np.float32(7.5),
        "image_guidance_scale": np.float32(1.5),
    }
    inputs = {}
    for name, spec in specs.items():
        shape = [1 if size is None else size for size in spec.shape]
        if name in known:
            inputs[name] = known[name]
        elif "tokens" in name:
            inputs[name] = rng.integers(0, 1000, shape).astype("int32")
        elif "weights" in name:
            inputs[name] = rng.uniform(0.5, 1.5, shape).astype("float32")
        elif "time_ids" in name:
            inputs[name] = np.full(shape, 512, "float32")
        else:
            inputs[name] = rng.standard_normal(shape).astype(spec.dtype.as_numpy_dtype)
            if part.name == "image_encoder":
                inputs[name] = np.clip(0.5 * inputs[name], -1, 1)
    return inputs


def eager(function, inputs: dict) -> dict[str, np.ndarray]:
    """Compute the reference: run the bare models operation by operation, without tracing."""
    tf.config.run_functions_eagerly(True)
    try:
        outputs = function(**{key: tf.constant(value) for key, value in inputs.items()})
    finally:
        tf.config.run_functions_eagerly(False)
    return {key: value.numpy() for key, value in outputs.items()}


def endpoint_for(component: str) -> str:
    return {"diffusion_model": "from_noise", "text_encoder": WEIGHTED}.get(
        component, "serving_default"
    )


def _span(values) -> float:
    """Return the range of a reference, never 0."""
    return max(float(np.ptp(np.asarray(values, "float64"))), 1e-12)


def compare(component: str, folder, reference: dict, inputs: dict, level: str, precision: str):
    """Reload the SavedModel and compare its outputs with the reference; return the figures."""
    loaded = tf.saved_model.load(str(folder / component / VERSION_FOLDER))
    endpoint = endpoint_for(component)
    names = {"saved_model": PLAIN + endpoint, "saved_model_xla": endpoint}
    if PLAIN + endpoint not in loaded.signatures:  # a text encoder that is not compiled
        names = {"saved_model": endpoint}
    elif level == "fast":
        names.pop("saved_model_xla")
    figures = {}
    for label, name in names.items():
        start = time.perf_counter()
        outputs = loaded.signatures[name](**{k: tf.constant(v) for k, v in inputs.items()})
        seconds = time.perf_counter() - start
        agreement = [psnr(reference[k], outputs[k], _span(reference[k])) for k in reference]
        worst = float(np.min(agreement))  # NaN where any is, unlike Python's `min`
        figures[label] = {"psnr_db": round(min(worst, 999.0), 1), "seconds": round(seconds, 2)}
        if not worst >= FLOORS[precision]:
            raise ExportError(
                f"The exported {component} does not compute what the model computes: signature "
                f"{name!r} agrees to {worst:.1f} dB, the floor for {precision} is "
                f"{FLOORS[precision]:.0f} dB. Nothing was published."
            )
    return figures
