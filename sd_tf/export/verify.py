"""Does the export compute what the models compute? Figures for the manifest, and a floor."""

import time

import numpy as np
import tensorflow as tf

from sd_tf.export.modules import PLAIN
from sd_tf.manifest import VERSION_FOLDER, ExportError

# dB below which nothing is published. Compared is the same precision with itself: what differs is
# only the order of additions, which half precision makes visible.
FLOORS = {"float32": 60.0, "bfloat16": 25.0, "float16": 35.0}
STEPS = {"full": 2, "fast": 1}


def psnr(reference, other) -> float:
    """In dB, of the reference's own range; infinite where both are the same."""
    reference, other = np.asarray(reference, "float64"), np.asarray(other, "float64")
    error = np.mean(np.square(reference - other))
    span = reference.max() - reference.min()
    return float("inf") if error == 0 else float(10 * np.log10(max(span, 1e-12) ** 2 / error))


def sample_inputs(specs: dict[str, tf.TensorSpec], component: str, level: str) -> dict:
    """Fixed inputs for an endpoint, in the range of real ones."""
    rng = np.random.default_rng(0)
    known = {
        "num_steps": np.int32(STEPS[level]),
        "scheduler": np.int32(0),
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
        elif "time_ids" in name:
            inputs[name] = np.full(shape, 512, "float32")
        else:
            inputs[name] = rng.standard_normal(shape).astype(spec.dtype.as_numpy_dtype)
            if component == "image_encoder":
                inputs[name] = np.clip(0.5 * inputs[name], -1, 1)
    return inputs


def eager(function, inputs: dict) -> dict[str, np.ndarray]:
    """A reference: the bare models, operation by operation, nothing traced."""
    tf.config.run_functions_eagerly(True)
    try:
        outputs = function(**{key: tf.constant(value) for key, value in inputs.items()})
    finally:
        tf.config.run_functions_eagerly(False)
    return {key: value.numpy() for key, value in outputs.items()}


def endpoint_for(component: str) -> str:
    return {"diffusion_model": "from_noise", "text_encoder": "encode"}.get(
        component, "serving_default"
    )


def compare(component: str, folder, reference: dict, inputs: dict, level: str, precision: str):
    """Reload the SavedModel and run it on the reference's inputs; returns figures, or raises."""
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
        worst = min(psnr(reference[key], outputs[key]) for key in reference)
        figures[label] = {"psnr_db": round(min(worst, 999.0), 1), "seconds": round(seconds, 2)}
        if not worst >= FLOORS[precision]:
            raise ExportError(
                f"The exported {component} does not compute what the model computes: signature "
                f"{name!r} agrees to {worst:.1f} dB, the floor for {precision} is "
                f"{FLOORS[precision]:.0f} dB. Nothing was published."
            )
    return figures
