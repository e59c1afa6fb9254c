"""Embeddings of textual inversion against diffusers' `load_textual_inversion`.

Diffusers' pipeline takes them at run time, ours when it is exported or compiled.
"""

import json

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.numpy import load_file
from transformers import CLIPTextModelWithProjection

from sd_tf.weights import open_checkpoint
from tests import peers
from tests.embeddings import vectors, write
from tests.peer_pipelines import Pair, channels_first, check_pictures, drawer, psnr

TOLERANCE = 1e-5  # of the reference's largest value
PROMPTS = [
    "a photo of <cat>s, on the <wall>!",
    "<wall><cat> word " * 8,  # more than 77 ids
    "no token of those",
]
SCALE = 0.5  # large enough to change a picture


def random(*shape, seed):
    return SCALE * vectors(*shape, seed=seed)


@pytest.fixture(scope="module", params=["sd1", "sdxl-base"])
def inverted(request, tmp_path_factory):
    """Diffusers' pipeline with two embeddings, and the folder and files that it is made of."""
    folder = tmp_path_factory.mktemp(request.param)
    peers.random_pipeline(request.param, layers_per_block=1).save_pretrained(folder / "checkpoint")
    # Read again, because the tests share the tokenizers of random pipelines.
    pipeline = DiffusionPipeline.from_pretrained(folder / "checkpoint", safety_checker=None)
    if request.param == "sd1":
        files = [
            write(folder / "learned_embeds.safetensors", **{"<cat>": random(4, 128, seed=1)}),
            write(folder / "<wall>.safetensors", emb_params=random(1, 128, seed=2)),
        ]
        pipeline.load_textual_inversion(str(files[0]))
        pipeline.load_textual_inversion(str(files[1]), token="<wall>")
        return pipeline, folder, files
    files = [
        write(
            folder / f"{name}.safetensors",
            clip_l=random(n, 64, seed=n),
            clip_g=random(n, 128, seed=n),
        )
        for name, n in (("<cat>", 4), ("<wall>", 1))
    ]
    for file in files:
        for name, end in (("clip_l", ""), ("clip_g", "_2")):
            pipeline.load_textual_inversion(
                {file.stem: torch.from_numpy(load_file(file)[name])},
                text_encoder=getattr(pipeline, f"text_encoder{end}"),
                tokenizer=getattr(pipeline, f"tokenizer{end}"),
            )
    return pipeline, folder, files


def close(one, other):
    one, other = np.asarray(one, "float32"), np.asarray(other, "float32")
    assert one.shape == other.shape
    assert np.abs(one - other).max() <= TOLERANCE * np.abs(other).max()


@pytest.mark.backend(long=True)
def test_ids_and_contexts(inverted):
    pipeline, folder, files = inverted
    checkpoint = open_checkpoint(folder / "checkpoint", embeddings=files)
    found = {}
    for name in checkpoint.config.text_encoders:
        tokenizer = getattr(pipeline, name.replace("text_encoder", "tokenizer"))
        texts = pipeline.maybe_convert_prompt(list(PROMPTS), tokenizer)
        ids = tokenizer(texts, padding="max_length", truncation=True, return_tensors="np").input_ids
        np.testing.assert_array_equal(checkpoint.tokenizer(name)(PROMPTS), ids)
        assert {*range(49408, 49413)} <= set(ids.ravel())
        found[name] = checkpoint.build(name)(ids.astype("int32"))
    contexts = np.concatenate([np.asarray(one["context"]) for one in found.values()], axis=-1)
    with torch.no_grad():
        theirs = pipeline.encode_prompt(
            PROMPTS, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
        )
    close(contexts, theirs[0])
    if "text_encoder_2" in found:
        close(found["text_encoder_2"]["pooled"], theirs[2])


def test_the_saved_pipeline_reads_as_the_same(inverted, tmp_path):
    """What diffusers saves with embeddings has the same rows, tokens and expansions."""
    pipeline, folder, files = inverted
    pipeline.save_pretrained(tmp_path)
    saved = open_checkpoint(tmp_path)
    ours = open_checkpoint(folder / "checkpoint", embeddings=files)
    for name, encoder in ours.config.text_encoders.items():
        assert saved.config.text_encoders[name].vocab_size == encoder.vocab_size == 49413
        assert saved.tokenizer(name).vectors == ours.tokenizer(name).vectors
        np.testing.assert_array_equal(saved.tokenizer(name)(PROMPTS), ours.tokenizer(name)(PROMPTS))


@pytest.mark.backend(long=True)
@pytest.mark.parametrize("inverted", ["sdxl-base"], indirect=True)
def test_pooled_is_that_of_the_end_token(inverted):
    """SDXL's own files say `eos_token_id` 2: transformers then takes the row of the highest id,
    which is that of an added token. Ours takes the end token's, as transformers does with 49407.
    """
    pipeline, folder, files = inverted
    path = folder / "checkpoint" / "text_encoder_2" / "config.json"
    written = path.read_text()
    path.write_text(json.dumps({**json.loads(written), "eos_token_id": 2}))
    try:
        plain = open_checkpoint(folder / "checkpoint")
        checkpoint = open_checkpoint(folder / "checkpoint", embeddings=files)
    finally:
        path.write_text(written)
    assert plain.config.text_encoders["text_encoder_2"].eos_token_id is None
    ids = checkpoint.tokenizer("text_encoder_2")(PROMPTS)
    ours = np.asarray(checkpoint.build("text_encoder_2")(ids)["pooled"])

    def theirs(eos):
        encoder = pipeline.text_encoder_2
        assert isinstance(encoder, CLIPTextModelWithProjection)
        encoder.text_model.eos_token_id, before = eos, encoder.text_model.eos_token_id
        with torch.no_grad():
            pooled = encoder(torch.from_numpy(ids)).text_embeds.numpy()
        encoder.text_model.eos_token_id = before
        return pooled

    close(ours, theirs(49407))
    assert np.abs(ours - theirs(2))[:2].max() > 0.1 * np.abs(ours).max()
    close(ours[2], theirs(2)[2])


@pytest.mark.backend(long=True)
@pytest.mark.parametrize("inverted", ["sd1"], indirect=True)
def test_pictures(inverted, tmp_path):
    pipeline, folder, files = inverted
    drawn = drawer(folder, {"embeddings": files}, height=64, width=64)
    pair = Pair(pipeline, drawn)
    noise = pair.noise(2)
    prompts = ["a <cat> in <wall>", "a cat in wall"]
    theirs = pair.peer("ddim", prompt=prompts, latents=channels_first(noise), **pair.size)
    assert psnr(*theirs) < 40, "the embeddings hardly matter"
    ours = drawn(prompts, noise=noise, num_steps=6, scheduler="ddim", guidance_scale=7.5).images
    check_pictures(ours, theirs)
    [*records] = drawn.manifest.checkpoint["text_encoder"]["embeddings"]
    assert [record["token"] for record in records] == ["<cat>", "<wall>"]
