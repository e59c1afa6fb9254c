"""Training with flow matching: diffusers' loss step by step, and adapters."""

import json
import shutil
from dataclasses import replace

import diffusers
import keras
import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from safetensors.numpy import load_file

from sd_tf.adapters.adapter import DIFFUSERS_FILE
from sd_tf.cli.main import main
from sd_tf.config import FAMILIES
from sd_tf.models.branches import branches
from sd_tf.training.batches import LatentBatches, logit_normal_timesteps
from sd_tf.training.conditions import check_trainable, tokenize_for
from sd_tf.training.data import World
from sd_tf.training.finetune import FinetuneOptions, prepare
from sd_tf.training.lora import Adapted, Lora
from sd_tf.training.losses import Denoising, freeze, recomputed
from sd_tf.training.settings import Averaging, LoraOptions, Settings, TrainingError
from sd_tf.training.step import compiled_step
from sd_tf.training.trainer import optimizer_for
from sd_tf.weights import layout, open_checkpoint
from tests import micro
from tests.peer_transformers import NO_T5
from tests.test_lora_training import fill, peft_model, tensor

STEPS = 4
SETTINGS = Settings(
    steps=STEPS,
    batch_size=3,
    learning_rate=5e-3,
    warm_up=1,
    averaging=Averaging(None),
    jit_compile=keras.backend.backend() == "jax",
)
LONG_ON_JAX = pytest.mark.backend(long=True)
# The modules of diffusers' train_dreambooth_lora_sd3.py.
TARGETS = {
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
}


def opened(small_pipelines, name, without=("text_encoder_3",), **options):
    _, folder = small_pipelines(name)
    checkpoint = open_checkpoint(folder, without=without, **options)
    left_out = NO_T5 if without else {}
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(folder, **left_out)
    return checkpoint, pipeline


def batches(checkpoint, dropout=0.0, settings=SETTINGS):
    config = checkpoint.config
    tokenizers = checkpoint.tokenizers()
    side, channels = config.denoiser.sample_size, config.autoencoder.latent_channels
    latents = np.random.default_rng(0).standard_normal((6, side, side, channels), "float32")
    return LatentBatches(World(6, 16), settings, latents, config, tokenize_for(tokenizers), dropout)


def frozen_encoders(checkpoint):
    return [freeze(checkpoint.build(name)) for name in checkpoint.config.text_encoders]


def lengths(make):
    """The number of T5's tokens, where there is a T5."""
    ids = make.tokenize([""]).get("t5_tokens")
    return {} if ids is None else {"max_sequence_length": ids.shape[1]}


def their_loss(pipeline, transformer, make, batch, step):
    """The loss of diffusers' script, with the weighting "logit_normal"."""
    captions = [make.source.caption(*example) for example in make.examples(step)]
    context, _, pooled, _ = pipeline.encode_prompt(
        captions, None, None, do_classifier_free_guidance=False, **lengths(make)
    )
    place = 999 - torch.from_numpy(batch["timesteps"]).long()  # the scheduler's are descending
    sigma = pipeline.scheduler.sigmas[place][:, None, None, None]
    latents, noise = tensor(batch["latents"]), tensor(batch["noise"])
    output = transformer(
        hidden_states=(1.0 - sigma) * latents + sigma * noise,
        timestep=pipeline.scheduler.timesteps[place],
        encoder_hidden_states=context.detach(),
        pooled_projections=pooled.detach(),
    ).sample
    return torch.mean((output - (noise - latents)) ** 2)


def compare_steps(pipeline, transformer, make, update, optimizer, groups):
    """Losses of some updates with the same draws, ours and theirs."""
    adam = torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for params, decay in groups],
        betas=(0.9, SETTINGS.beta_2),
    )
    every = [parameter for params, _ in groups for parameter in params]
    rate = optimizer_for(SETTINGS, [])._learning_rate
    pairs = []
    for step in range(STEPS):
        batch = make(step)
        value = their_loss(pipeline, transformer, make, batch, step)
        value.backward()
        torch.nn.utils.clip_grad_norm_(every, SETTINGS.clip_norm)
        for group in adam.param_groups:
            # Keras adds epsilon to the root of the moment before its bias is corrected.
            group["eps"] = optimizer.epsilon / (1 - SETTINGS.beta_2 ** (step + 1)) ** 0.5
            group["lr"] = float(rate(step))
        adam.step(), adam.zero_grad()
        pairs.append((float(update(batch)["loss"]), value.item()))
    ours, theirs = np.array(pairs).T
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    assert np.abs(np.diff(ours)).min() > 1e-4


@pytest.mark.backend
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sd3-without-t5", {}),
        pytest.param("sd3.5", {}, marks=LONG_ON_JAX),
        ("sd3", {"without": (), "max_sequence_length": 12}),
    ],
)
def test_loss_and_gradients_equal_pytorchs(small_pipelines, name, options):
    """The second is computed again for the gradients; the third has its T5, which is frozen."""
    checkpoint, pipeline = opened(small_pipelines, name, **options)
    model = checkpoint.build("transformer")
    if name == "sd3.5":
        recomputed(model)
    loss = Denoising(model, frozen_encoders(checkpoint), checkpoint.config)
    make = batches(checkpoint)
    gradients, value = micro.gradients_of(loss, make(0))
    transformer = pipeline.transformer.requires_grad_(True)
    theirs = their_loss(pipeline, transformer, make, make(0), 0)
    theirs.backward()
    assert value == pytest.approx(theirs.item(), rel=1e-4)

    parameters = dict(transformer.named_parameters())
    by_variable = dict(zip((id(v) for v in loss.trainable_variables), gradients, strict=True))
    scale = max(p.grad.abs().max().item() for p in parameters.values())
    compared = set()
    for path, slot in layout.slots(model).items():
        if id(slot.variable) in by_variable:
            with keras.StatelessScope([(slot.variable, by_variable[id(slot.variable)])]):
                ours = slot.stored()
            assert np.abs(ours - parameters[path].grad.numpy()).max() <= 1e-3 * scale, path
            compared.add(path)
    assert compared == set(parameters)  # and not the table of positions, a buffer


@pytest.mark.backend
@pytest.mark.jax
def test_losses_equal_pytorchs(small_pipelines):
    checkpoint, pipeline = opened(small_pipelines, "sd3-without-t5")
    model = checkpoint.build("transformer")
    loss = Denoising(model, frozen_encoders(checkpoint), checkpoint.config)
    optimizer = optimizer_for(SETTINGS, loss.trainable_variables)
    update = compiled_step(loss, optimizer, None, SETTINGS)
    parameters = dict(pipeline.transformer.requires_grad_(True).named_parameters())
    decays, others = [], []
    for path, slot in layout.slots(model).items():
        if slot.variable.trainable:
            decaying = optimizer._use_weight_decay(slot.variable)
            (decays if decaying else others).append(parameters[path])
    groups = [(decays, 0.01), (others, 0.0)]
    compare_steps(pipeline, pipeline.transformer, batches(checkpoint), update, optimizer, groups)


@pytest.mark.backend
@pytest.mark.jax
def test_losses_equal_pefts(small_pipelines):
    checkpoint, pipeline = opened(small_pipelines, "sd3.5")
    model = checkpoint.build("transformer")
    lora = Lora({"transformer": model}, LoraOptions(rank=4, alpha=2.0), seed=0)
    loss = Adapted(Denoising(model, frozen_encoders(checkpoint), checkpoint.config), lora)
    optimizer = optimizer_for(SETTINGS, loss.trainable_variables)
    update = compiled_step(loss, optimizer, None, SETTINGS)
    transformer, trained = peft_model(pipeline, lora, "transformer")
    groups = [(trained, 0.01)]
    compare_steps(pipeline, transformer, batches(checkpoint), update, optimizer, groups)


def test_diffusers_loads_the_adapter(small_pipelines, tmp_path):
    checkpoint, pipeline = opened(small_pipelines, "sd3.5")
    model = checkpoint.build("transformer")
    lora = Lora({"transformer": model}, LoraOptions(rank=2, alpha=1.0), seed=0)
    draws = np.random.default_rng(1)
    for variable in lora.variables:
        variable.assign(draws.standard_normal(variable.shape, "float32") * 0.1)
    lora.save(tmp_path / DIFFUSERS_FILE, None, "small", {"transformer": ["ab"]})
    config = checkpoint.config.denoiser
    latents = draws.standard_normal((2, 8, 8, 16), "float32")
    context = draws.standard_normal((2, 9, config.context_dim), "float32")
    pooled = draws.standard_normal((2, config.pooled_dim), "float32")
    times = np.array([900.0, 100.0], "float32")
    plain = np.array(model(latents, times, context, pooled))
    with branches(lora.branches):
        ours = np.array(model(latents, times, context, pooled))

    pipeline.load_lora_weights(tmp_path, weight_name=DIFFUSERS_FILE)
    with torch.no_grad():
        theirs = pipeline.transformer(*map(tensor, (latents, context, pooled, times))).sample
    theirs = theirs.permute(0, 2, 3, 1).numpy()
    assert np.abs(ours - plain).max() > 0.01
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
    found = pipeline.transformer.peft_config["default_0"]
    assert (found.r, found.lora_alpha) == (2, 1.0)
    assert {name.split(".", 3)[3].split(".lora")[0] for name in lora.slots} == TARGETS


@pytest.mark.backend
def test_equal_tokens_are_computed_once(small_pipelines):
    checkpoint, _ = opened(small_pipelines, "sd3.5")
    model, config = checkpoint.build("transformer"), checkpoint.config.denoiser
    draws = np.random.default_rng(0)
    latents = draws.standard_normal((2, 8, 8, 16), "float32")
    context = draws.standard_normal((2, 4, config.context_dim), "float32")
    pooled = draws.standard_normal((2, config.pooled_dim), "float32")
    times = np.array([900.0, 100.0], "float32")
    counts = (1, 3, 1, 40)
    whole = model(latents, times, np.repeat(context, counts, axis=1), pooled)
    short = model(latents, times, context, pooled, counts=counts)
    np.testing.assert_allclose(np.array(short), np.array(whole), atol=2e-5)
    assert np.abs(np.array(model(latents, times, context, pooled)) - whole).max() > 1e-3


def test_timesteps_are_logit_normal():
    timesteps = logit_normal_timesteps(np.random.default_rng(0), 100_000, range(200, 1000))
    assert timesteps.dtype == np.int32 and timesteps.min() >= 200 and timesteps.max() < 1000
    places = (timesteps - 200 + 0.5) / 800
    logits = np.log(places / (1.0 - places))
    assert (logits.mean(), logits.std()) == pytest.approx((0.0, 1.0), abs=0.01)


def test_a_dropped_caption_is_encoded(small_pipelines):
    checkpoint, _ = opened(small_pipelines, "sd3-without-t5")
    make = batches(checkpoint, dropout=1.0)
    assert "has_text" not in make(0)
    empty = make.tokenize([""])["tokens"]
    np.testing.assert_array_equal(make(0)["tokens"], np.repeat(empty, 3, axis=0))


def tune(folder, *more):
    return main(
        [
            *"train text_to_image --data world:4 --steps 2 --batch_size 2 --warm_up 1".split(),
            *"--log_every 1 --sample_every 2 --size 16 --nojit_compile".split(),
            *("--out", str(folder), *map(str, more)),
        ]
    )


def test_what_cannot_be_saved_is_not_trained(small_pipelines, tmp_path, capsys):
    _, folder = small_pipelines("sd3-without-t5")
    assert tune(tmp_path / "run", "--checkpoint", folder, "--scheduler", "flow_dpmpp_2m") == 1
    assert "diffusers has no scheduler that walks" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_shift_that_depends_on_the_size(small_pipelines, tmp_path):
    """The levels are those of the pictures' size, as diffusers' scheduler has them."""
    _, folder = small_pipelines("sd3-without-t5")
    shutil.copytree(folder, tmp_path / "base")
    file = tmp_path / "base" / "scheduler" / "scheduler_config.json"
    dynamic = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
    file.write_text(json.dumps(json.loads(file.read_text()) | dynamic))
    checkpoint = open_checkpoint(tmp_path / "base")
    size = 32
    given = (World(2, size), SETTINGS, FinetuneOptions(), tmp_path, lambda text: None, None)
    loss = prepare(checkpoint, *given).loss
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(file.parent)
    patches = (size // checkpoint.config.size_multiple) ** 2
    scheduler.set_timesteps(sigmas=np.arange(1000, 0, -1) / 1000, mu=calculate_shift(patches))
    np.testing.assert_allclose(loss.sigma[::-1], scheduler.sigmas[:-1], rtol=1e-5)


@pytest.mark.long
def test_a_checkpoint_is_fine_tuned(small_pipelines, tmp_path):
    """Without a T5, diffusers opens what was trained; positions stay as they are."""
    pipeline, folder = small_pipelines("sd3-without-t5")
    assert tune(tmp_path, "--checkpoint", folder, "--gradient_checkpointing") == 0
    assert (tmp_path / "000002.png").is_file()
    tuned = diffusers.StableDiffusion3Pipeline.from_pretrained(tmp_path / "checkpoint", **NO_T5)
    before, after = (p.transformer.state_dict() for p in (pipeline, tuned))
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    # The last block's texts ask for nothing.
    assert same == {"pos_embed.pos_embed", "transformer_blocks.2.attn.add_q_proj.bias"}
    encoders = (p.text_encoder_2.state_dict() for p in (pipeline, tuned))
    assert all(torch.equal(*pair) for pair in zip(*map(dict.values, encoders), strict=True))


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_t5_is_never_trained(small_pipelines, tmp_path, precision):
    """In mixed precision its variables are bfloat16: they need no room for small updates."""
    checkpoint, _ = opened(small_pipelines, "sd3", without=())
    options = FinetuneOptions(train_text_encoder=True)
    settings = replace(SETTINGS, precision=precision)
    task = prepare(checkpoint, World(2, 16), settings, options, tmp_path, lambda text: None, None)
    kinds = {
        name: (bool(model.trainable_variables), {v.dtype for v in model.variables})
        for name, model in task.models.items()
    }
    of_t5 = "bfloat16" if precision == "mixed_bfloat16" else precision
    assert kinds["text_encoder_3"] == (False, {of_t5})
    for name in ("transformer", "text_encoder", "text_encoder_2"):
        assert kinds[name] == (True, {"float32"})
    assert task.batches(0)["t5_tokens"].shape == (3, 256)


def test_adapters_stand_beside_bfloat16(small_pipelines, tmp_path):
    """In mixed precision no frozen weight is float32, and the loss is that of float32."""
    checkpoint, _ = opened(small_pipelines, "sd3")
    options, losses = FinetuneOptions(lora=LoraOptions(rank=2)), []
    for precision in ("float32", "mixed_bfloat16"):
        settings = replace(SETTINGS, precision=precision)
        folder = tmp_path / precision
        task = prepare(checkpoint, World(3, 16), settings, options, folder, lambda text: None, None)
        fill(task.lora)
        loss, _ = task.loss(task.batches(0))
        losses.append(float(loss))
        assert {v.dtype for v in task.lora.variables} == {"float32"}
    frozen = [task.models[name] for name in checkpoint.config.text_encoders]
    frozen.append(task.models["transformer"])
    assert {v.dtype for model in frozen for v in model.variables} == {"bfloat16"}
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[1] != losses[0]


def test_everything_is_saved_with_its_t5(small_pipelines, tmp_path):
    """In mixed precision: T5's weights are those of the checkpoint, to the bit."""
    pipeline, folder = small_pipelines("sd3")
    flags = ("--checkpoint", folder, "--max_sequence_length", 16, "--precision", "mixed_bfloat16")
    assert tune(tmp_path, *flags, "--save_dtype", "float16") == 0
    tuned = diffusers.StableDiffusion3Pipeline.from_pretrained(tmp_path / "checkpoint")
    before, after = (p.text_encoder_3.state_dict() for p in (pipeline, tuned))
    assert all(torch.equal(before[name], after[name]) for name in before)
    weight = "transformer_blocks.0.attn.to_q.weight"
    before, after = (p.transformer.state_dict()[weight] for p in (pipeline, tuned))
    assert not torch.equal(before, after)
    saved = open_checkpoint(tmp_path / "checkpoint")
    assert {t.dtype for t in saved.tensors("transformer").values()} == {"float16"}
    assert {t.dtype for t in saved.tensors("text_encoder_3").values()} == {"float32"}
    assert tuned.tokenizer_3("a star").input_ids == pipeline.tokenizer_3("a star").input_ids


@pytest.mark.long
def test_an_adapter_is_trained(small_pipelines, tmp_path):
    _, folder = small_pipelines("sd3.5")
    flags = ("--checkpoint", folder, "--lora_rank", 2)
    assert tune(tmp_path, *flags, "--train_text_encoder") == 0
    tensors = load_file(tmp_path / DIFFUSERS_FILE)
    parts = {name.partition(".")[0] for name in tensors}
    assert parts == {"transformer", "text_encoder", "text_encoder_2"}
    same = {name for name, value in tensors.items() if not value.any()}
    # The last block's texts ask for nothing.
    assert same == {"transformer.transformer_blocks.10.attn.add_q_proj.lora_B.weight"}
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(folder, **NO_T5)
    pipeline.load_lora_weights(tmp_path, weight_name=DIFFUSERS_FILE)
    assert set(pipeline.get_list_adapters()) == parts


def test_refusals(small_pipelines, tmp_path, capsys):
    _, folder = small_pipelines("sd3.5")
    with pytest.raises(TrainingError, match=r"SDXL base or SD3.*Received: flux-dev"):
        check_trainable(FAMILIES["flux-dev"])
    flags = ("--checkpoint", folder, "--without", "text_encoder_3")
    assert tune(tmp_path, *flags, "--lora_rank", 2, "--lora_conv") == 1
    said = capsys.readouterr()
    assert "--lora_conv is for the convolutions of a UNet" in said.err
    assert "encoding" not in said.out
    token = ("--placeholder_token", "<x>", "--initializer_token", "cat")
    assert tune(tmp_path, *flags, *token) == 1
    assert "SD1, SD2 and SDXL. Received: sd3.5-medium" in capsys.readouterr().err
    edits = "train instruct_pix2pix --data world:4 --steps 2 --warm_up 1 --out".split()
    assert main([*edits, str(tmp_path / "edits"), *map(str, flags)]) == 1
    assert "Training from pairs needs a checkpoint with one text encoder" in capsys.readouterr().err
