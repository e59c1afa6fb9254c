"""scheduler_config.json: the classes' own defaults, what is written, flow matching."""

import inspect
import json
import re
from dataclasses import replace

import diffusers
import numpy as np
import pytest

from sd_tf.config import FAMILIES, SAMPLERS, ConfigError, DynamicShift, ScheduleConfig
from sd_tf.sampling.methods import METHODS
from sd_tf.sampling.tables import steps
from sd_tf.weights.diffusers_pipelines import PIPELINES
from sd_tf.weights.diffusers_schedule import (
    DYNAMIC_SHIFT,
    HARMLESS,
    PEERS,
    QUALIFIERS,
    SWITCHES,
    read_schedule,
    write_schedule,
)

NAMES = ("beta_start", "beta_end", "beta_schedule")
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.method}-{peer.class_name}")
def test_defaults_are_the_class_own(peer):
    """An absent field has the value that diffusers would give it."""
    parameters = inspect.signature(getattr(diffusers, peer.class_name).__init__).parameters
    for name, (default, _) in peer.required.items():
        assert parameters[name].default == default
    assert ("use_karras_sigmas" in {*parameters} - {*peer.required}) == peer.karras
    assert {name for name in SWITCHES if name in parameters} == {*peer.switches}
    assert ("set_alpha_to_one" in parameters) == (peer.set_alpha_to_one is not None)
    if peer.set_alpha_to_one is not None:
        assert parameters["set_alpha_to_one"].default == peer.set_alpha_to_one
    if peer.is_flow:
        assert ("use_dynamic_shifting" not in parameters) == peer.fixed_shift
        assert ("shift_terminal" not in parameters) == peer.fixed_shift
        for theirs, ours in DYNAMIC_SHIFT.items():
            if not peer.fixed_shift:
                assert parameters[theirs].default == getattr(DynamicShift(), ours)
    else:
        assert tuple(parameters[name].default for name in NAMES) == peer.betas
        assert parameters["timestep_spacing"].default == peer.spacing
    read = {*peer.required, *QUALIFIERS, *SWITCHES, "set_alpha_to_one"}
    read |= set() if peer.fixed_shift else {"use_dynamic_shifting", "shift_terminal"}
    assert HARMLESS & {*parameters} <= read, "a field would be ignored that the class reads"


@pytest.mark.parametrize(
    ("class_name", "left_over", "sampler"),
    [
        (
            "EulerAncestralDiscreteScheduler",
            {"use_karras_sigmas": True},
            "euler_ancestral_linspace",
        ),
        ("DDIMScheduler", {"use_karras_sigmas": True, "clip_sample": False}, "ddim"),
        ("LCMScheduler", {"timestep_spacing": "trailing"}, "lcm"),
        ("PNDMScheduler", {"rescale_betas_zero_snr": True, "skip_prk_steps": True}, "pndm"),
        ("HeunDiscreteScheduler", {"use_flow_sigmas": True, "use_lu_lambdas": True}, "heun"),
        (
            "EulerDiscreteScheduler",
            {"predict_x0": True, "disable_corrector": [], "solver_type": "bh2"},
            "euler_linspace",
        ),
    ],
)
def test_fields_that_a_class_ignores(class_name, left_over, sampler):
    """They come from another scheduler; diffusers' steps are the same with and without them."""
    raw = {"_class_name": class_name, **left_over}
    assert read_schedule(raw, "here").sampler == sampler
    steps = []
    for config in (raw, {k: v for k, v in raw.items() if k in ("clip_sample", "skip_prk_steps")}):
        scheduler = getattr(diffusers, class_name).from_config(config)
        scheduler.set_timesteps(10)
        steps.append((scheduler.timesteps.tolist(), scheduler.alphas_cumprod.tolist()))
    assert steps[0] == steps[1]


def saved(scheduler):
    """Return the fields of the file that a scheduler of diffusers saves."""
    return json.loads(scheduler.to_json_string())


def test_schedulers_made_from_another(tmp_path):
    """A class reads its own fields only, and the file keeps those of the class before it."""
    diffusers.UniPCMultistepScheduler(**BETAS, timestep_spacing="leading").save_pretrained(tmp_path)
    unipc = diffusers.UniPCMultistepScheduler.from_pretrained(tmp_path)
    raw = saved(diffusers.EulerDiscreteScheduler.from_config(unipc.config))
    assert raw["predict_x0"] is True and raw["disable_corrector"] == []
    assert read_schedule(raw, "here").sampler == "euler"


@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_noise_levels_of_karras_have_no_spacing(spacing):
    """SDXL's file says "leading", which `from_config` keeps."""
    euler = diffusers.EulerDiscreteScheduler(**BETAS, steps_offset=1, timestep_spacing=spacing)
    theirs = diffusers.DPMSolverMultistepScheduler.from_config(euler.config, use_karras_sigmas=True)
    schedule = read_schedule(saved(theirs), "here")
    assert schedule.sampler == "dpmpp_2m_karras"
    theirs.set_timesteps(12)
    ours = steps(schedule, schedule.sampler, 12)
    assert ours.rows[:, 0, 0].tolist() == theirs.timesteps.tolist()
    np.testing.assert_allclose(ours.sigma / ours.signal, theirs.sigmas[:-1].numpy(), rtol=1e-5)
    for change in ({"use_karras_sigmas": False}, {"algorithm_type": "sde-dpmsolver++"}):
        with pytest.raises(ConfigError, match=r"DPMSolver.* is not supported\. Choose another"):
            read_schedule({**saved(theirs), **change}, "here")


OF_BETAS = [name for kind in PIPELINES.values() if "unet" in kind.components for name in kind.names]


@pytest.mark.parametrize("pipeline", dict.fromkeys(OF_BETAS))
@pytest.mark.parametrize(
    "scheduler", ["DDIMScheduler", "PNDMScheduler", "EulerDiscreteScheduler", "LCMScheduler"]
)
def test_fields_that_a_pipeline_sets(pipeline, scheduler):
    """Those of SD1 mend the files of their first release; others of diffusers do not."""
    raw = {"_class_name": scheduler, **BETAS, "timestep_spacing": "leading"}
    make = getattr(diffusers, pipeline)
    parts = [n for n, p in inspect.signature(make).parameters.items() if p.default is p.empty]
    scheduler = getattr(diffusers, scheduler).from_config(raw)
    theirs = make(**{**dict.fromkeys(parts), "scheduler": scheduler}).scheduler
    fields = {"betas_fields": PIPELINES[pipeline].betas_fields}
    for name, wanted in (("clip_sample", False), ("skip_prk_steps", True)):
        if theirs.config.get(name, wanted) != wanted:
            with pytest.raises(ConfigError, match=f"{name}={not wanted} is not supported"):
                read_schedule(raw, "here", **fields)
            raw[name] = wanted
    if "skip_prk_steps" in theirs.config:
        theirs.register_to_config(skip_prk_steps=True)
    schedule = read_schedule(raw, "here", **fields)
    assert schedule.steps_offset == theirs.config.steps_offset
    theirs.set_timesteps(10)
    ours = steps(schedule, schedule.sampler, 10).rows[:, 0, 0]
    assert ours.tolist() == theirs.timesteps.tolist()


def test_every_method_of_diffusers_has_its_class():
    assert {peer.method for peer in PEERS} == {name for name in METHODS if "kerascv" not in name}


@pytest.mark.parametrize("name", [n for n in ScheduleConfig().samplers if "kerascv" not in n])
def test_what_is_written_is_read_back_by_both(name):
    schedule = ScheduleConfig(
        sampler=name,
        steps_offset=0,
        beta_end=0.01,
        prediction="v_prediction",
        set_alpha_to_one=SAMPLERS[name].method in ("ddim", "pndm", "lcm"),
    )
    written = write_schedule(schedule)
    assert read_schedule(written, "here") == schedule
    theirs = getattr(diffusers, written["_class_name"]).from_config(written)
    assert (
        read_schedule({**theirs.config, "_class_name": type(theirs).__name__}, "here") == schedule
    )


FLOW = ScheduleConfig(kind="flow", prediction="flow", sampler="flow_euler", shift=3.0)
SHIFT = DynamicShift(base_shift=0.25, max_shift=1.5, base_patches=100, max_patches=1600)


def saved_by_diffusers(written, folder):
    """Return the file that diffusers' class saves of what it was made from."""
    scheduler = getattr(diffusers, written["_class_name"]).from_config(written)
    scheduler.save_config(folder)
    return json.loads((folder / "scheduler_config.json").read_text())


@pytest.mark.parametrize("spacing", ["linspace", "trailing"])
@pytest.mark.parametrize(
    "change",
    (
        {},
        {"shift": 1.0, "num_train_timesteps": 500},
        {"sampler": "flow_heun"},
        {"shift_terminal": 0.02},
        {"dynamic_shift": DynamicShift()},
        {"dynamic_shift": SHIFT, "shift_terminal": 0.1},
        {"dynamic_shift": replace(SHIFT, exponential=False)},
    ),
    ids=str,
)
def test_flow_matching(change, spacing, tmp_path):
    schedule = replace(FLOW, **change, spacing=spacing)
    written = write_schedule(schedule)
    for raw in (written, saved_by_diffusers(written, tmp_path)):
        assert read_schedule(raw, "here", flow_spacing=spacing) == schedule
        other = read_schedule(raw, "here", "flow_dpmpp_2m", flow_spacing=spacing)
        assert other == replace(schedule, sampler="flow_dpmpp_2m")
    assert write_schedule(schedule.for_patches(256)) == written


@pytest.mark.parametrize(
    ("class_name", "sampler"),
    [
        ("FlowMatchEulerDiscreteScheduler", "flow_euler"),
        ("FlowMatchHeunDiscreteScheduler", "flow_heun"),
    ],
)
def test_absent_fields_of_a_flow_are_the_class_defaults(class_name, sampler, tmp_path):
    raw = {"_class_name": class_name}
    expected = replace(FLOW, shift=1.0, sampler=sampler)
    assert read_schedule(raw, "here") == expected
    assert read_schedule(saved_by_diffusers(raw, tmp_path), "here") == expected
    if sampler == "flow_euler":
        raw["use_dynamic_shifting"] = True
        expected = replace(expected, dynamic_shift=DynamicShift())
        assert read_schedule(raw, "here") == expected
        assert read_schedule(saved_by_diffusers(raw, tmp_path), "here") == expected


def test_released_files():
    """The fields of Flux.1 dev's and SD3's files."""
    flux = {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "_diffusers_version": "0.30.0.dev0",
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 4096,
        "max_shift": 1.15,
        "num_train_timesteps": 1000,
        "shift": 3.0,
        "use_dynamic_shifting": True,
    }
    assert read_schedule(flux, "here", flow_spacing="trailing") == FAMILIES["flux-dev"].schedule
    schnell = {**flux, "shift": 1.0, "use_dynamic_shifting": False}
    schnell = read_schedule(schnell, "here", flow_spacing="trailing")
    assert schnell == FAMILIES["flux-schnell"].schedule
    sd3 = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
    assert read_schedule(sd3, "here") == FAMILIES["sd3-medium"].schedule


@pytest.mark.parametrize(
    "field",
    (
        "invert_sigmas",
        "stochastic_sampling",
        "use_karras_sigmas",
        "use_exponential_sigmas",
        "use_beta_sigmas",
    ),
)
def test_fields_of_a_flow_that_are_refused(field):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**{field: True})
    raw = {**scheduler.config, "_class_name": "FlowMatchEulerDiscreteScheduler"}
    message = f"^here: {field}=True is not supported; supported: False"
    with pytest.raises(ConfigError, match=message):
        read_schedule(raw, "here")
    if field == "invert_sigmas":  # which no choice of a sampler replaces
        with pytest.raises(ConfigError, match=message):
            read_schedule(raw, "here", "flow_euler")
    else:
        assert read_schedule(raw, "here", "flow_euler") == replace(FLOW, shift=1.0)


def test_other_values_of_a_flow_that_are_refused():
    euler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}
    with pytest.raises(ConfigError, match=r"time_shift_type='sqrt' .*: 'exponential', 'linear'\."):
        read_schedule({**euler, "time_shift_type": "sqrt"}, "here")
    with pytest.raises(ConfigError, match=r"Received: 4096 and 4096"):
        read_schedule({**euler, "base_image_seq_len": 4096}, "here")
    with pytest.raises(ConfigError, match=r"the field timestep_spacing='trailing' is not support"):
        read_schedule({**euler, "timestep_spacing": "trailing"}, "here")
    heun = {"_class_name": "FlowMatchHeunDiscreteScheduler"}
    for field, value in (("use_dynamic_shifting", True), ("shift_terminal", 0.1)):
        with pytest.raises(ConfigError, match=f"{field}={value} is not supported; supported: "):
            read_schedule({**heun, field: value}, "here")
    assert read_schedule({**euler, "shift_terminal": 0}, "here").shift_terminal is None


@pytest.mark.parametrize("name", ["flow_dpmpp_2m", "ddim", "euler"])
def test_a_flow_walk_that_diffusers_cannot_name(name):
    message = (
        f"diffusers has no scheduler that walks a flow schedule as {name} does. Choose another for "
        "this checkpoint with `scheduler`: one of flow_euler, flow_heun, flow_dpmpp_2m."
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        write_schedule(replace(FLOW, sampler=name))


@pytest.mark.parametrize("change", [{"dynamic_shift": SHIFT}, {"shift_terminal": 0.1}])
def test_a_shift_that_heun_cannot_have(change):
    with pytest.raises(ConfigError, match=r"FlowMatchHeun.* cannot be written for flow_heun\. .*"):
        write_schedule(replace(FLOW, **change, sampler="flow_heun"))


def test_a_flow_is_not_taken_for_betas():
    """UniPC can be told to walk σ of flow matching; its betas then mean nothing."""
    scheduler = diffusers.UniPCMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction"
    )
    raw = {**scheduler.config, "_class_name": "UniPCMultistepScheduler"}
    for sampler in (None, "ddim"):
        with pytest.raises(ConfigError, match=r"prediction_type='flow_prediction' is not supp"):
            read_schedule(raw, "here", sampler)
    with pytest.raises(ConfigError, match=r"use_flow_sigmas=True is not supported"):
        read_schedule({**raw, "prediction_type": "epsilon"}, "here")


def test_another_sampler_keeps_what_it_reads_too():
    """diffusers' from_config of another class does."""
    written = {**diffusers.PNDMScheduler(steps_offset=0, set_alpha_to_one=True).config}
    schedule = read_schedule({**written, "_class_name": "PNDMScheduler"}, "here", "ddim")
    theirs = diffusers.DDIMScheduler.from_config(written).config
    assert schedule.sampler == "ddim"
    assert (schedule.steps_offset, schedule.set_alpha_to_one) == (0, True)
    assert (theirs.steps_offset, theirs.set_alpha_to_one) == (0, True)
