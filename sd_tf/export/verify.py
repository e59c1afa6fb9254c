"""Check that an export computes what its models compute: figures for the manifest, and a floor."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import tensorflow as tf

from sd_tf.components.build import Component, component, empty_tokens_of
from sd_tf.components.geometry import Geometry, takes_weights
from sd_tf.components.guidance import SKIP_LAST, SKIP_SCALE
from sd_tf.config import FLOAT16, INT8, PipelineConfig
from sd_tf.runtime.call import Call
from sd_tf.runtime.capabilities import GUIDED, WEIGHTED
from sd_tf.runtime.controls import SCALES, inputs_of
from sd_tf.runtime.image_prompts import GIVEN, SHOWN
from sd_tf.runtime.image_prompts import SCALES as IMAGE_SCALES
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.pipeline import Pipeline
from sd_tf.runtime.psnr import psnr
from sd_tf.runtime.request import adapter_inputs
from sd_tf.runtime.reuse import REUSE, figure_name, reuse_input
from sd_tf.runtime.runner import NO_FURTHER_GUIDANCE, PLAIN
from sd_tf.runtime.saved_model import SavedModel
from sd_tf.weights import Checkpoint, layout

# Agreement in dB, below which nothing is published. Export and model are compared in the same
# precision, so only the order of additions differs, which half precision makes visible.
FLOORS = {"float32": 60.0, "bfloat16": 25.0, "float16": 35.0}
# Of a component's outputs, between kernels stored so and as they are computed.
STORAGE_FLOORS = {INT8: 30.0, FLOAT16: 40.0}
STEPS = {"full": 2, "fast": 1}
REUSE_STEPS = 20  # of the run that shows what reuse costs
ALL_CALLS = 1000  # more than the compared run has
PROMPT, NEGATIVE_PROMPT = "a lighthouse above the sea, İstanbul", "fog"


def run_of(part: Component, level: str) -> dict[str, np.int32]:
    """Choose a whole run to compare: few steps of the default scheduler."""
    if not part.tables:
        return {}
    possible = np.flatnonzero(_calls(part)) + 1
    enough = possible[possible >= STEPS[level]]
    steps = enough[0] if enough.size else possible[-1]
    return {"num_steps": np.int32(steps), "scheduler": np.int32(part.default_scheduler)}


def segment_of(part: Component, level: str) -> dict[str, np.int32]:
    """Choose the part of a run to compare: early model calls, which decide most of a picture.

    A short run's calls are late ones, too, at timesteps where the denoiser's output counts for
    next to nothing. The first call compared is one in which guidance leaves out blocks, if it does
    so at all; the next is not.
    """
    possible = np.flatnonzero(SKIP_LAST * _calls(part) > 100) + 1
    if not possible.size:  # the export's longest run is too short for that
        run, start = run_of(part, level), 0
    else:
        run, start = {**run_of(part, level), "num_steps": np.int32(possible[0])}, 1
    bounds = {"first": start, "start": start, "stop": start + STEPS[level]}
    return {**run, **{name: np.int32(value) for name, value in bounds.items()}}


def _calls(part: Component) -> np.ndarray:
    """Return the model calls of the default scheduler's runs: entry n of n + 1 steps, or 0."""
    return next(iter(part.tables.values())).calls[part.default_scheduler]


def sample_inputs(specs: dict[str, tf.TensorSpec], part: Component, level: str) -> dict:
    """Make fixed inputs for an endpoint, in the range of real ones."""
    rng = np.random.default_rng(0)
    known = {
        **(segment_of(part, level) if part.tables else {}),
        "unconditional_guidance_scale": np.float32(7.5),
        "image_guidance_scale": np.float32(1.5),
        "true_guidance_scale": np.float32(2.0),
        SKIP_SCALE: np.float32(2.8),
        REUSE: np.int32(2),
    }
    nets = specs[SCALES].shape[0] if SCALES in specs else 0
    known |= inputs_of([1.0] * nets, [(0, ALL_CALLS)] * nets, guesses=False)
    known |= {name: np.ones(specs[name].shape, "float32") for name in specs if _is_full(name)}
    inputs = {}
    for name, spec in specs.items():
        shape = [1 if size is None else size for size in spec.shape]
        if name in known:
            inputs[name] = known[name]
        elif "tokens" in name:
            most = min(1000, *(model.config.vocab_size for model in part.models.values()))
            inputs[name] = rng.integers(0, most, shape).astype("int32")
        elif "weights" in name:
            inputs[name] = rng.uniform(0.5, 1.5, shape).astype("float32")
        elif "time_ids" in name:
            inputs[name] = np.full(shape, 512, "float32")
        elif "control_image" in name:
            inputs[name] = rng.uniform(0, 1, shape).astype("float32")
        else:
            inputs[name] = rng.standard_normal(shape).astype(spec.dtype.as_numpy_dtype)
            if part.name == "image_encoder":
                inputs[name] = np.clip(0.5 * inputs[name], -1, 1)
    if "history" in inputs:
        inputs["latent"] *= _spread(part, inputs)
        inputs["history"] *= np.float32(0)
    return inputs


def _spread(part: Component, run: dict[str, np.int32]) -> np.float32:
    """Return the standard deviation of the latents that a run's first compared call takes."""
    tables = next(iter(part.tables.values()))
    row = tables.starts[run["scheduler"], run["num_steps"] - 1] + run["start"]
    return np.hypot(tables.signals[row], tables.sigmas[row]).astype("float32")


def _is_full(name: str) -> bool:
    """Whether an input says that pictures which are prompts are there, and count."""
    return name in (IMAGE_SCALES, GIVEN) or name.endswith(SHOWN)


def eager(function, inputs: dict) -> dict[str, np.ndarray]:
    """Compute the reference: run the bare models operation by operation, without tracing."""
    tf.config.run_functions_eagerly(True)
    try:
        outputs = function(**{key: tf.constant(value) for key, value in inputs.items()})
    finally:
        tf.config.run_functions_eagerly(False)
    return {key: value.numpy() for key, value in outputs.items()}


@dataclass(frozen=True, eq=False)
class Sample:
    """Inputs of an endpoint, and the outputs that the models themselves compute of them."""

    endpoint: str
    inputs: dict[str, np.ndarray]
    reference: dict[str, np.ndarray]


def sampled(endpoint: str, function, inputs: dict, precision: str) -> Sample:
    """Have the models compute what is compared.

    Raises:
        ExportError: they cannot in this precision.
    """
    reference = eager(function, inputs)
    for name, values in reference.items():
        if not np.isfinite(values.astype("float32")).all():
            raise ExportError(
                f"The model itself gives values that are no numbers in {precision} ({name} of "
                f"{endpoint}): export in another precision. Nothing was published."
            )
    return Sample(endpoint, inputs, reference)


def storage_figures(
    part: Component,
    sample: Sample,
    checkpoint: Checkpoint,
    geometry: Geometry,
    precision: str,
) -> dict[str, dict[str, float]]:
    """Compare a component whose kernels are stored in fewer bits with itself as it is computed.

    The latter's weights are read while it runs, so that one model is in memory at a time.

    Args:
        sample: of the component as it is stored.

    Raises:
        ExportError: the outputs differ too much.
    """
    stored = {name: geometry.storage[name] for name in part.models if name in geometry.storage}
    if not stored:
        return {}
    start = time.perf_counter()

    def build(name: str, dtype: str, storage: str | None):
        return layout.abstract_model(checkpoint.config.components[name], dtype, storage)

    as_computed = replace(geometry, storage={})
    tokens = empty_tokens_of(checkpoint)
    exact = component(part.name, checkpoint.config, as_computed, precision, tokens, build)
    shape = geometry.shapes.first
    named = {geometry.shapes.signature(n, shape): e for n, e in exact.endpoints(shape).items()}
    with layout.read_when_used(*((m, checkpoint.tensors(n)) for n, m in exact.models.items())):
        reference = eager(named[sample.endpoint].function, sample.inputs)
    agreement = _least(sample.inputs, reference, sample.reference)
    (kind,) = set(stored.values())
    if not agreement >= STORAGE_FLOORS[kind]:
        raise ExportError(
            f"The {part.name} with kernels in {kind} agrees with the same as computed to "
            f"{agreement:.1f} dB, the floor is {STORAGE_FLOORS[kind]:.0f} dB: store fewer of its "
            f"parts ({', '.join(stored)}), or leave out `storage`. Nothing was published."
        )
    return {f"stored as {kind}": _figure(agreement, time.perf_counter() - start)}


def endpoints_for(
    component: str, config: PipelineConfig, geometry: Geometry, level: str
) -> list[str]:
    """Return the endpoints to compare, the largest first: for every shape, or only for the first.

    A text encoder is compared by the endpoint for weights if it has one; a loop by part of a run,
    and by what makes a run's first state.
    """
    wanted = {
        "diffusion_model": ("segment", "noise", "begin", "begin_image"),
        "text_encoder": (WEIGHTED if takes_weights(config) else "encode",),
    }
    endpoints, shapes = wanted.get(component, ("serving_default",)), geometry.shapes
    compared = {"full": shapes.all, "fast": [shapes.first], "off": []}[level]
    return [shapes.signature(name, shape) for name in endpoints for shape in compared]


def drawn(
    folder: Path, manifest: Manifest, num_steps: int, endpoint: str, level: str
) -> list[Sample]:
    """Draw with the exported components what their SavedModel from prompts to files has to draw."""
    pipe, samples = Pipeline.load(folder, jit_compile=False), []
    call = Call("").completed(manifest)
    negative = NEGATIVE_PROMPT if GUIDED.holds(manifest) else ""
    for shape in manifest.shapes.all if level == "full" else [manifest.shapes.first]:
        prompts = [f"{PROMPT}, {i}" for i in range(shape.batch_size)]
        seeds = list(range(shape.batch_size))
        images = pipe(
            prompts,
            negative,
            num_steps=num_steps,
            seed=seeds,
            height=shape.height,
            width=shape.width,
        ).images
        inputs = {
            "prompt": np.array(prompts),
            "negative_prompt": np.array([negative] * shape.batch_size),
            "num_steps": np.int32(num_steps),
            "unconditional_guidance_scale": np.float32(call.guidance_scale),
            "seed": np.array(seeds, "int32"),
            "scheduler": np.array(manifest.default_sampler),
            **{name: np.float32(NO_FURTHER_GUIDANCE[name]) for name in manifest.further_scales},
            **adapter_inputs(manifest.adapters, {}),
            **reuse_input(manifest.reuse, 1),
        }
        name = manifest.shapes.signature(endpoint, shape)
        samples.append(Sample(name, inputs, {"image_bytes": images}))
    return samples


def _least(inputs: dict, reference: dict, outputs: dict) -> float:
    """Return the worst agreement of an endpoint's outputs; NaN where any is.

    Of the latents, it is that of what the endpoint adds to them: there is more in them than that.
    """

    def seen(values: dict, name: str) -> np.ndarray:
        found = _values(values[name])
        return found - inputs[name] if name == "latent" and name in inputs else found

    expected = {name: seen(reference, name) for name in reference}
    each = [psnr(x, seen(outputs, name), _span(x)) for name, x in expected.items()]
    return float(np.min(each))  # unlike Python's `min`


def _figure(agreement: float, seconds: float) -> dict[str, float]:
    """Return what a manifest keeps of a comparison; equal outputs count as 999 dB."""
    # Digits, not decimals: the smallest models take milliseconds.
    return {"psnr_db": round(min(agreement, 999.0), 1), "seconds": float(f"{seconds:.3g}")}


def _span(values) -> float:
    """Return the range of a reference, never 0."""
    return max(float(np.ptp(np.asarray(values, "float64"))), 1e-12)


def _values(output: np.ndarray) -> np.ndarray:
    """Return an output as numbers: PNG files as their pixels."""
    if output.dtype == object:
        return np.stack([tf.io.decode_png(file).numpy() for file in output])
    return output


def compare(
    component: str,
    folder: Path,
    samples: list[Sample],
    level: str,
    precision: str,
    runs: Mapping[int, dict] = MappingProxyType({}),
    optimize: bool = False,
) -> dict:
    """Reload the SavedModel and compare its outputs with the reference; return the figures.

    They are the worst agreement of all shapes, and the seconds of all together.

    Args:
        runs: the inputs that `reuse_runs` chose, which are measured, too.
        optimize: rework its graph, as is done where XLA compiles none of it.
    """
    # Copied, not mapped: TensorFlow may keep the room that the models had, and uses it again.
    loaded = SavedModel(folder, component, optimize)
    signatures = loaded.signatures
    twins = [sample for sample in samples if PLAIN + sample.endpoint in signatures]
    others = [sample for sample in samples if sample not in twins]  # which nothing compiles
    plain = [(PLAIN + sample.endpoint, sample) for sample in twins]
    compared = {"saved_model": plain + [(sample.endpoint, sample) for sample in others]}
    if twins and level != "fast":
        compared["saved_model_xla"] = [(sample.endpoint, sample) for sample in twins]
    figures = {}
    for label, pairs in compared.items():
        start = time.perf_counter()
        agreement = [_agreement(loaded, component, *pair, precision) for pair in pairs]
        figures[label] = _figure(min(agreement), time.perf_counter() - start)
    return {**figures, **_reuse_figures(loaded, samples[0].endpoint, runs)}


def reuse_runs(part: Component, samples: list[Sample], level: str) -> dict[int, dict]:
    """Choose the runs that show what reuse costs and saves, by their `reuse`; none without it.

    They have 20 steps of the default scheduler, or as many as it can make below that, and begin
    with the noise that the first sample has.
    """
    if part.reuse.record.most == 1 or level != "full":
        return {}
    steps = np.flatnonzero(_calls(part)[:REUSE_STEPS])[-1] + 1
    whole = {"num_steps": steps, "first": 0, "start": 0, "stop": ALL_CALLS}
    run = {**samples[0].inputs, **{name: np.int32(value) for name, value in whole.items()}}
    run["latent"] = run["latent"] / _spread(part, samples[0].inputs) * _spread(part, run)
    return {n: {**run, REUSE: np.int32(n)} for n in range(1, part.reuse.record.most + 1)}


def _reuse_figures(loaded: SavedModel, endpoint: str, runs: Mapping[int, dict]) -> dict:
    """Measure each run's seconds, and how close its latents come to the first one's, the exact."""
    exact, figures = None, {}
    for every, run in runs.items():
        start = time.perf_counter()
        latent = loaded.run(endpoint, run)["latent"]
        seconds = time.perf_counter() - start
        exact = latent if exact is None else exact
        agreement = psnr(exact, latent, _span(exact))
        figure = _figure(agreement, seconds)
        figures[figure_name(every)] = {**figure, "num_steps": int(run["num_steps"])}
    return figures


def _agreement(
    loaded: SavedModel, component: str, name: str, sample: Sample, precision: str
) -> float:
    """Return the agreement of one signature's outputs with the reference; refuse too little."""
    worst = _least(sample.inputs, sample.reference, loaded.run(name, sample.inputs))
    if not worst >= FLOORS[precision]:
        raise ExportError(
            f"The exported {component} does not compute what the model computes: signature "
            f"{name!r} agrees to {worst:.1f} dB, the floor for {precision} is "
            f"{FLOORS[precision]:.0f} dB. Nothing was published."
        )
    return worst
