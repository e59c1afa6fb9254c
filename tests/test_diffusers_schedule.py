"""scheduler_config.json: the classes' own defaults, what is written, flow matching."""

import inspect
import re
from dataclasses import replace

import diffusers
import pytest

from sd_tf.config import SAMPLERS, ConfigError, ScheduleConfig
from sd_tf.sampling.methods import METHODS
from sd_tf.weights.diffusers_schedule import PEERS, read_schedule, write_schedule

NAMES = ("beta_start", "beta_end", "beta_schedule")


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.method}-{peer.kind}")
def test_defaults_are_the_class_own(peer):
    """An absent field has the value that diffusers would give it."""
    parameters = inspect.signature(getattr(diffusers, peer.class_name).__init__).parameters
    for name, (default, _) in peer.required.items():
        assert parameters[name].default == default
    assert ("use_karras_sigmas" in parameters) == peer.karras
    assert ("set_alpha_to_one" in parameters) == (peer.set_alpha_to_one is not None)
    if peer.set_alpha_to_one is not None:
        assert parameters["set_alpha_to_one"].default == peer.set_alpha_to_one
    if peer.kind == "beta":
        assert tuple(parameters[name].default for name in NAMES) == peer.betas
        assert parameters["timestep_spacing"].default == peer.spacing


def test_every_method_of_diffusers_has_its_class():
    assert {peer.method for peer in PEERS} == {name for name in METHODS if "kerascv" not in name}


@pytest.mark.parametrize("name", [name for name in SAMPLERS if "kerascv" not in name])
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


@pytest.mark.parametrize("name", ["euler_linspace", "heun"])
def test_flow_matching(name):
    schedule = ScheduleConfig(kind="flow", prediction="flow", shift=3.0, sampler=name)
    written = write_schedule(schedule)
    assert read_schedule(written, "here") == schedule
    theirs = getattr(diffusers, written["_class_name"]).from_config(written)
    full = {**theirs.config, "_class_name": written["_class_name"]}
    assert read_schedule(full, "here") == schedule
    assert read_schedule(full, "here", sampler="unipc") == replace(schedule, sampler="unipc")


@pytest.mark.parametrize("name", ["dpmpp_2m", "euler_trailing"])
def test_a_flow_walk_that_diffusers_cannot_name(name):
    schedule = ScheduleConfig(kind="flow", prediction="flow", sampler=name)
    message = f"diffusers has no scheduler that walks a flow schedule as {name} does. Choose"
    with pytest.raises(ConfigError, match=re.escape(message)):
        write_schedule(schedule)


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
