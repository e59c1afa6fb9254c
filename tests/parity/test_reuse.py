"""Reused deep features against DeepCache, by those who invented it, on diffusers' pipelines."""

import keras
import pytest
from DeepCache import DeepCacheSDHelper

from tests import peers
from tests.peer_pipelines import (
    NEGATIVE,
    PROMPTS,
    STEPS,
    Pair,
    check_text_to_image,
    drawer,
    psnr,
)

pytestmark = pytest.mark.backend
# Which of its layers run in every call: the first on the way down, and the last two on the way up.
BRANCH = 1
# With one layer to a resolution, all of the first are shallow; with two, the last way up has a deep
# one.
CASES = [("sd1", 2), pytest.param(("sdxl-base", 1), marks=pytest.mark.long)]
if keras.backend.backend() == "jax":  # one of them: the other is the same program with more inputs
    del CASES[1:]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0])
def pair(request, tmp_path_factory):
    family, layers = request.param
    pipeline = peers.random_pipeline(family, layers_per_block=layers)
    folder = tmp_path_factory.mktemp(family)
    pipeline.save_pretrained(folder / "checkpoint")
    return Pair(pipeline, drawer(folder, reuse=3, batch_size=2, height=64, width=64))


@pytest.fixture
def every(pair, request):
    """Have the peer run its deep layers in every such step."""
    helper = DeepCacheSDHelper(pipe=pair.theirs)
    helper.set_params(cache_interval=request.param, cache_branch_id=BRANCH)
    helper.enable()
    yield request.param
    helper.disable()


@pytest.mark.backend(long=True)
@pytest.mark.parametrize("every", [2, 3], indirect=True)
@pytest.mark.parametrize("sampler", ["ddim", "euler"])
def test_text_to_image(pair, sampler, every):
    negative = [NEGATIVE] * len(PROMPTS)
    reused = check_text_to_image(pair, sampler, ours={"reuse": every}, negative_prompt=negative)
    noise = pair.noise(len(PROMPTS))
    exact = pair.ours(PROMPTS, negative, noise=noise, num_steps=STEPS, scheduler=sampler).images
    assert psnr(exact, reused) < 45, "reuse hardly matters"
