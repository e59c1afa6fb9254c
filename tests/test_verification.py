"""What an export computes is compared with its models, and nothing wrong is published."""

import dataclasses
import gc
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from sd_tf.checkpoints import make_random
from sd_tf.components import build as assembling
from sd_tf.components.build import Component
from sd_tf.components.diffusion import DiffusionModel
from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.config import FAMILIES, ScheduleConfig
from sd_tf.export import ExportOptions, export, verify
from sd_tf.models.unet import UNet
from sd_tf.runtime.manifest import ExportError
from sd_tf.runtime.psnr import psnr
from sd_tf.sampling.packed import pack
from sd_tf.weights import open_checkpoint
from tests.exports import (
    AS_WRITTEN,
    micro_folder,
    replace_in_micro,
    shared_export,
    small_export,
)


def load(folder, component):
    return tf.saved_model.load(str(folder / component / "1"))


@pytest.fixture(scope="module")
def exported():
    return shared_export()


def test_below_the_floor_nothing_is_published(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "psnr", lambda *_: 59.9)
    with pytest.raises(ExportError, match=r"does not compute .* to 59.9 dB, the floor .* 60 dB"):
        small_export(tmp_path / "export", verify="fast")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("owner", [(UNet, "call"), (DiffusionModel, "begin")])
def test_what_is_traced_is_compared_with_the_model_itself(tmp_path, monkeypatch, owner):
    """The reference shares no trace with the signatures, so a wrong trace of a model is found.

    It is wrong by little: the calls compared are ones whose output counts.
    """
    call = getattr(*owner)

    def wrong_in_graphs(self, *given, **more):
        output = call(self, *given, **more)
        if tf.executing_eagerly():
            return output
        return tf.nest.map_structure(lambda values: 1.02 * values, output)

    monkeypatch.setattr(*owner, wrong_in_graphs)
    with pytest.raises(ExportError, match="diffusion_model does not compute what the model comp"):
        replace_in_micro(
            tmp_path / "export",
            open_checkpoint(micro_folder()),
            ("diffusion_model",),
            verify="fast",
        )


def test_models_are_gone_before_their_saved_models_are_loaded(tmp_path, monkeypatch):
    """So the weights are in memory once, however large they are."""
    known, alive = {id(one) for one in variables()}, {}

    def counting(name):
        original = getattr(verify, name)

        def counted(*given, **more):
            alive.setdefault(name, []).append(len({id(one) for one in variables()} - known))
            return original(*given, **more)

        monkeypatch.setattr(verify, name, counted)

    for name in ("sampled", "compare", "drawn"):
        counting(name)
    options = ExportOptions(**AS_WRITTEN, verify="fast", text_to_image=True)
    export(open_checkpoint(micro_folder()), tmp_path / "export", options)
    assert alive["compare"] == [0] * 5 and alive["drawn"] == [0]
    assert min(alive["sampled"]) >= 10 and max(alive["sampled"]) >= 100


def variables():
    """Variables, and the handles by which graphs hold their values."""
    return [
        one
        for one in gc.get_objects()
        if isinstance(one, tf.Variable)
        or (isinstance(one, tf.__internal__.EagerTensor) and one.dtype == tf.resource)
    ]


def test_a_wrong_model_is_noticed(exported):
    """The comparison itself: other inputs than the reference's do not pass."""
    inputs = {"latent": np.random.default_rng(0).standard_normal((2, 8, 8, 4)).astype("float32")}
    signature = load(exported, "decoder").signatures["plain_serving_default"]
    reference = {"generated_images": signature(latent=tf.constant(inputs["latent"])).popitem()[1]}
    sample = verify.Sample("serving_default", inputs, reference)
    figures = verify.compare("decoder", exported, [sample], "full", "float32")
    assert figures["saved_model"]["psnr_db"] > 60
    inputs["latent"] *= 1.01
    with pytest.raises(ExportError, match=r"decoder does not compute what the model computes"):
        verify.compare("decoder", exported, [sample], "full", "float32")


def test_a_model_that_overflows_is_noticed():
    """By the model's own values, so the export is not blamed."""

    def overflows(latent):
        return {"generated_images": latent * np.float16(1e4)}

    inputs = {"latent": np.full((1, 8), 1e3, "float16")}
    message = (
        r"The model itself gives .* no numbers in float16 \(generated_images of serving_default"
    )
    with pytest.raises(ExportError, match=message):
        verify.sampled("serving_default", overflows, inputs, "float16")


def test_a_run_that_shows_what_reuse_costs_begins_with_noise():
    """In the range of its first call, not of the call that is compared."""
    tables = pack(FAMILIES["sdxl-base"].schedule, 20)
    number = tables.numbers["euler"]
    reuse = SimpleNamespace(record=SimpleNamespace(most=2))
    part = SimpleNamespace(tables={(64, 64): tables}, default_scheduler=number, reuse=reuse)
    compared = verify.segment_of(part, "full")
    noise = np.random.default_rng(0).standard_normal((1, 64, 64, 4)).astype("float32")
    sample = verify.Sample("segment", {**compared, "latent": noise}, {})
    runs = verify.reuse_runs(part, [sample], "full")
    scale = tables.scales[number, 19]
    spread = verify._spread(part, compared)
    assert 1.5 * spread < scale
    for every, run in runs.items():
        assert (run["num_steps"], run["reuse"], run["first"], run["start"]) == (20, every, 0, 0)
        np.testing.assert_allclose(run["latent"], noise / spread * scale, rtol=1e-3)


WEIGHTS = ("token_weights", "negative_token_weights")


def test_nan_in_one_output_is_noticed(exported):
    tokens = np.zeros((2, 77), "int32")
    inputs = {"tokens": tokens, "negative_tokens": tokens}
    inputs |= {name: np.ones((2, 77), "float32") for name in WEIGHTS}
    signature = load(exported, "text_encoder").signatures["weighted"]
    reference = {name: value.numpy() for name, value in signature(**inputs).items()}
    assert len(reference) > 1
    reference[sorted(reference)[-1]][0, 0] = np.nan
    sample = verify.Sample("weighted", inputs, reference)
    with pytest.raises(ExportError, match=r"text_encoder does not compute .* agrees to nan dB"):
        verify.compare("text_encoder", exported, [sample], "full", "float32")


def test_verified_run():
    """It is one that the default scheduler has, however few steps the export allows."""

    def chosen(schedule, max_steps):
        tables = pack(schedule, max_steps)
        number = tables.numbers[schedule.sampler]
        part = Component("diffusion_model", {}, None, (), {(64, 64): tables}, number)
        whole, early = verify.run_of(part, "full"), verify.segment_of(part, "full")
        for run in (whole, early):
            assert tables.calls[run["scheduler"], run["num_steps"] - 1] > 0
        bounds = (early[name] for name in ("num_steps", "first", "start", "stop"))
        return int(whole["num_steps"]), tuple(map(int, bounds))

    schedule = FAMILIES["sd1"].schedule
    flow = ScheduleConfig(kind="flow", prediction="flow", sampler="flow_euler")
    assert chosen(schedule, 50) == (2, (5, 1, 1, 3))
    assert chosen(flow, 50) == (2, (6, 1, 1, 3))
    assert chosen(schedule, 1) == chosen(flow, 1) == (1, (1, 0, 0, 2))


def test_skip_layer_guidance_is_compared(tmp_path):
    """Verification reaches the prediction without some blocks, and a call that does without it."""
    base = FAMILIES["sd3.5-medium"]
    narrow = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 2, "num_heads": 2}
    texts = {
        name: dataclasses.replace(encoder, **narrow, projection_dim=4)
        for name, encoder in base.clip_encoders.items()
    }
    sizes = {"num_layers": 3, "num_heads": 2, "head_dim": 8, "context_dim": 16, "pooled_dim": 8}
    config = dataclasses.replace(
        base,
        text_encoders=texts,
        denoiser=dataclasses.replace(base.denoiser, **sizes, max_patches=8, dual_layers=(0,)),
        autoencoder=dataclasses.replace(base.autoencoder, channels=(8, 16), norm_groups=4),
        zero_tokens=4,
    ).check()
    make_random(config, tmp_path)
    checkpoint = open_checkpoint(tmp_path)

    def compared(skip_layers, max_steps, level):
        denoiser = dataclasses.replace(config.denoiser, skip_layers=skip_layers)
        own = dataclasses.replace(checkpoint.config, denoiser=denoiser)
        geometry = geometry_of(own, Fixed(height=16, width=16, max_steps=max_steps))
        tokens = assembling.empty_tokens_of(checkpoint)
        part = assembling.component(
            "diffusion_model", own, geometry, "float32", tokens, checkpoint.build
        )
        names = verify.endpoints_for("diffusion_model", own, geometry, level)
        endpoint = part.endpoints(geometry.shapes.first)[names[0]]
        specs = {name: tf.TensorSpec(s.shape, s.dtype) for name, s in endpoint.inputs.items()}
        inputs = verify.sample_inputs(specs, part, level)
        return names, inputs, verify.eager(endpoint.function, inputs)["latent"]

    for level, calls in (("fast", 1), ("full", 2)):
        names, inputs, latent = compared((1,), 8, level)
        assert names == ["segment", "noise", "begin", "begin_image"]
        assert (inputs["start"], inputs["stop"]) == (1, 1 + calls)
        assert 0.01 < 1 / inputs["num_steps"] < 0.2 < 2 / inputs["num_steps"]
        *_, broken = compared((2,), 8, level)
        assert psnr(latent, broken, np.ptp(latent)) < verify.FLOORS["float32"]
    _, inputs, _ = compared((1,), 5, "full")  # too few for a call that leaves out blocks
    assert (inputs["start"], inputs["stop"], inputs["num_steps"]) == (0, 2, 2)
