"""Weights in prompts and long prompts against code that is not ours.

diffusion-prompt-embedder reads the web UIs' syntax, tokenizes what it finds and multiplies contexts
by the weights. It neither restores the mean, nor has it BREAK or a rule for commas once the text is
tokens. For these, and for encoders beside SD1's, each chunk is written out by hand here, runs
through transformers' text encoder by itself, and is weighted by the formula in NumPy.
"""

import re

import keras
import numpy as np
import pytest
import torch
from diffusion_prompt_embedder import get_embeddings_sd15, parse_prompt_attention
from diffusion_prompt_embedder.clip import (
    get_prompts_tokens_with_weights,
    group_tokens_and_weights,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sd_tf.components.build import component, empty_tokens_of
from sd_tf.components.geometry import Fixed, geometry_of
from sd_tf.runtime.text_inputs import text_inputs
from sd_tf.tokenizer.clip import ClipTokenizer
from sd_tf.tokenizer.prompts import parse, tokenize
from sd_tf.weights import open_checkpoint
from tests import peers
from tests.test_call import manifest

TOLERANCE = 1e-5  # of the reference's largest value

PIECES = ["(", ")", "[", "]", ":", ":1.3)", ": .5 )", ":-2)", "\\", "a", "BREAKs", " ", ",", "é"]
SYNTAX = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


def their_runs(text):
    """Their runs without the empty ones, which no token comes from, joined as ours are."""
    runs = []
    for piece, weight in parse_prompt_attention(text):
        if runs and runs[-1][1] == weight:
            runs[-1] = (runs[-1][0] + piece, weight)
        elif piece:
            runs.append((piece, weight))
    return runs


@settings(max_examples=1000, deadline=None)
@given(SYNTAX | st.text())
@example("a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).")
def test_parser(text):
    if re.search(r":\s*[+-]?[\d.]*\.[\d.]*\.", text):  # a number like 1.2.3 is an error there
        return
    assert [tuple(run) for part in parse(text) for run in part] == their_runs(text)


@settings(max_examples=40, deadline=None)
@given(words=st.lists(st.sampled_from([*PIECES, " word", " (cat:1.2)", " [dogs"]), max_size=150))
def test_tokens(words):
    """Whole prompts of up to four chunks; without commas, which they do not look for."""
    text = "".join(words).replace(",", "")
    ids, weights = get_prompts_tokens_with_weights(peers.tokenizer(49407), text)
    theirs = group_tokens_and_weights(ids, weights)
    chunks = len(theirs[0])
    ours = tokenize(ClipTokenizer.clip(), [text], chunks, weighted=True)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one[0], np.concatenate(other), rtol=1e-6)


# A prompt, and its chunks as runs of text with one weight.
PROMPTS = {
    "a (red:1.4) [dog] by \\(me\\)": [
        [("a ", 1.0), ("red", 1.4), (" ", 1.0), ("dog", 1 / 1.1), (" by (me)", 1.0)]
    ],
    "a ((house:1.3) (in [the] (woods:0.5), sun": [
        [("a ", 1.0), ("house", 1.3 * 1.1), (" ", 1.1), ("in ", 1.1**2), ("the", 1.1)]
        + [(" ", 1.1**2), ("woods", 0.5 * 1.1**2), (", sun", 1.1**2)]
    ],
    "": [[]],
    "a dog BREAK (b:-0.6)": [[("a dog", 1.0)], [("b", -0.6)]],
    "word " * 100: [[("word " * 75, 1.0)], [("word " * 25, 1.0)]],
    "cat " * 60 + ", " + "(dog:1.2) " * 30: [[("cat " * 60 + ",", 1.0)], [("dog " * 30, 1.2)]],
    "cat " * 50 + ", " + "(dog:1.2) " * 30: [
        [("cat " * 50 + ",", 1.0), ("dog " * 24, 1.2)],
        [("dog " * 6, 1.2)],
    ],
}


class Peer:
    """transformers' text encoder and tokenizer under one name of a diffusers pipeline."""

    def __init__(self, pipeline, name):
        self.encoder = getattr(pipeline, name)
        self.tokenizer = getattr(pipeline, name.replace("text_encoder", "tokenizer"))
        self.is_xl = pipeline.__class__.__name__.startswith("StableDiffusionXL")

    def chunk(self, runs):
        """Return one chunk's context (77, D), weighted, and the model's other outputs."""
        tokenizer, ids, weights = self.tokenizer, [], []
        for text, weight in runs:
            ids += tokenizer(text, add_special_tokens=False).input_ids
            weights += [weight] * (len(ids) - len(weights))
        ids = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
        weights = [1.0, *weights, *[1.0] * (76 - len(weights))]
        ids += [tokenizer.pad_token_id] * (77 - len(ids))
        with torch.no_grad():
            outputs = self.encoder(torch.tensor([ids]), output_hidden_states=True)
        state = outputs.hidden_states[-2] if self.is_xl else outputs.last_hidden_state
        z, w = state[0].numpy().astype("float64"), np.array(weights)[:, None]
        return z * w * z.mean() / (z * w).mean(), outputs

    def chunks(self, chunks, count):
        found = [self.chunk(runs) for runs in [*chunks, *[[]] * (count - len(chunks))]]
        return np.concatenate([context for context, _ in found]), found[0][1]


def ours(folder, chunks, prompts, negative_prompts=None):
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    by = manifest(prompt_chunks=chunks, zero_empty_negative=config.zero_empty_negative)
    tokenizers = [checkpoint.tokenizer(name) for name in config.text_encoders]
    inputs = text_inputs(by, tokenizers, prompts, negative_prompts, weighted=True)
    fixed = Fixed(batch_size=len(prompts), height=64, width=64, prompt_chunks=chunks)
    geometry = geometry_of(config, fixed)
    part = component(
        "text_encoder",
        config,
        geometry,
        "float32",
        empty_tokens_of(checkpoint),
        checkpoint.build,
    )
    inputs = {name: keras.ops.convert_to_tensor(value) for name, value in inputs.items()}
    outputs = part.endpoints(geometry.shapes.first)["weighted"].function(**inputs)
    return {name: keras.ops.convert_to_numpy(value) for name, value in outputs.items()}


def close(one, other):
    assert one.shape == other.shape
    assert np.abs(one - other).max() <= TOLERANCE * np.abs(other).max()


@pytest.mark.backend
@pytest.mark.parametrize("family", ["sd1", "sd2-base", "sdxl-base"])
def test_contexts(small_pipelines, family):
    pipeline, folder = small_pipelines(family)
    names = ["text_encoder", "text_encoder_2"] if family == "sdxl-base" else ["text_encoder"]
    prompts, count = list(PROMPTS), 2
    found = ours(folder, count, prompts, prompts[::-1])
    for index, chunks in enumerate(PROMPTS.values()):
        theirs = [Peer(pipeline, name).chunks(chunks, count) for name in names]
        context = np.concatenate([context for context, _ in theirs], axis=-1)
        places = {"": index, "unconditional_": len(prompts) - 1 - index}
        for prefix, place in places.items():
            close(found[f"{prefix}context"][place], context)
            if family == "sdxl-base":
                pooled = theirs[1][1].text_embeds[0].numpy()
                close(found[f"{prefix}pooled"][place], pooled)


@pytest.mark.backend
def test_a_missing_negative_prompt(small_pipelines):
    """SDXL takes zeros for one; the other families take that of an empty text."""
    found = ours(small_pipelines("sdxl-base")[1], 2, ["a (cat:1.3)"])
    assert not found["unconditional_context"].any() and not found["unconditional_pooled"].any()
    pipeline, folder = small_pipelines("sd1")
    found = ours(folder, 2, ["a (cat:1.3)"])
    close(found["unconditional_context"][0], Peer(pipeline, "text_encoder").chunks([[]], 2)[0])


@pytest.mark.backend
@pytest.mark.parametrize(
    ("text", "same_words"),
    [
        ("a (red:1.4) [dog] by \\(me\\)", "a red dog by \\(me\\)"),
        ("word (big:0.7) " * 60, "word big " * 60),
    ],
)
def test_contexts_whose_mean_is_restored_here(small_pipelines, text, same_words):
    """The package's own contexts of SD1, each chunk times mean(z)/mean(z·w)."""
    pipeline, folder = small_pipelines("sd1")

    def theirs(prompt):
        with torch.no_grad():
            context, _ = get_embeddings_sd15(
                pipeline.tokenizer, pipeline.text_encoder, prompt=prompt, pad_last_block=True
            )
        return context.reshape(-1, 77, context.shape[-1]).numpy()

    weighted, plain = theirs(text), theirs(same_words)
    means = [context.mean(axis=(1, 2), keepdims=True) for context in (plain, weighted)]
    restored = weighted * means[0] / means[1]
    close(ours(folder, len(restored), [text])["context"], restored.reshape(1, -1, plain.shape[-1]))
