"""Open single `.safetensors` files in the layout of the original releases.

The tensors' names tell the family, their shapes the sizes. A UNet's number of heads cannot be read
from shapes; it follows the family's convention: 8 in SD1, one for each 64 channels elsewhere.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sd_tf.adapters.keys import divided
from sd_tf.config import (
    FAMILIES,
    PipelineConfig,
    TextEncoderConfig,
    UNetConfig,
    latent_inputs_of,
)
from sd_tf.files.tensors import (
    CheckpointError,
    StoredTensor,
    open_safetensors,
    read_metadata,
    shortened,
)
from sd_tf.weights.checkpoint import Checkpoint
from sd_tf.weights.single_file_names import (
    CLIP_L,
    OPENCLIP,
    UNET,
    VAE,
    XL_FIRST,
    XL_SECOND,
    Tensors,
    shape_of,
    split,
    text_prefixes,
    under,
    unet_modules,
)
from sd_tf.weights.single_file_sizes import CHANNELS_PER_HEAD, count, read_clip, read_vae
from sd_tf.weights.single_file_transformers import TransformerFile, recognize
from sd_tf.weights.texts import check_left_out, check_length, t5_readers

EMA = "model_ema."
# Fields of a file's metadata by which trainers such as kohya's say what was trained.
PREDICTION, ARCHITECTURE = "modelspec.prediction_type", "modelspec.architecture"
SD2_PREDICTIONS = {"epsilon": "sd2-base", "v": "sd2-v"}
SD2_ARCHITECTURES = {"stable-diffusion-v2-512": "sd2-base", "stable-diffusion-v2-768-v": "sd2-v"}


def open_file(
    path: Path,
    family: str | None = None,
    scheduler: str | None = None,
    ema: bool = False,
    without: Sequence[str] = (),
    max_sequence_length: int | None = None,
    t5_tokenizer: str | Path | None = None,
) -> Checkpoint:
    """Open a file as a `Checkpoint`.

    Args:
        family: `sd2-base` or `sd2-v`, which the tensors of an SD2 file do not tell apart. None:
            the one that the file's metadata tells.
        ema: load the averaged UNet weights.
        without: text encoders to leave out.
        max_sequence_length: tokens of a prompt for T5.
        t5_tokenizer: a folder with T5's tokenizer.
    """
    tensors = open_safetensors(path)
    found = recognize(tensors, path, without)
    if found is not None:
        if ema:
            raise CheckpointError(f"`ema` is for files with a UNet. Received: {path}")
        _settled((found.family,), family, path)
        return _opened(found, scheduler, max_sequence_length, t5_tokenizer)
    check_left_out(without, None, str(path))
    check_length(max_sequence_length, False, str(path))
    if ema:
        tensors = _with_ema(tensors, path)
    metadata, found = read_metadata(path), detect_family(tensors, path)
    prediction = "v" if "v_pred" in tensors else metadata.get(PREDICTION)
    if family is None and len(found) > 1:
        family = SD2_PREDICTIONS.get(prediction) or SD2_ARCHITECTURES.get(
            metadata.get(ARCHITECTURE)
        )
    family = _settled(found, family, path)
    config = read_config(tensors, family, path)
    if prediction == "v" and len(found) == 1:
        config = replace(config, schedule=replace(config.schedule, prediction="v_prediction"))
    config = _with_sampler(config, scheduler).check()
    components = split(tensors, config, path)
    readers = {name: (lambda part=part: part) for name, part in components.items()}
    tokenizers = t5_readers(config, t5_tokenizer, str(path))
    return Checkpoint(path.name, str(path), "single file", config, readers, tokenizers)


def _with_sampler(config: PipelineConfig, scheduler: str | None) -> PipelineConfig:
    if scheduler is None:
        return config
    return replace(config, schedule=replace(config.schedule, sampler=scheduler))


def _opened(
    file: TransformerFile,
    scheduler: str | None,
    max_sequence_length: int | None,
    t5_tokenizer: str | Path | None,
) -> Checkpoint:
    """Open a file of SD3 or Flux, which may lack components."""
    config = _with_sampler(file.config(max_sequence_length), scheduler)
    missing = tuple(name for name in config.components if name not in file.parts)
    if not missing:
        config.check()
    components = file.tensors(config)
    readers = {name: (lambda part=part: part) for name, part in components.items()}
    path = file.path
    tokenizers = t5_readers(config, t5_tokenizer, str(path))
    return Checkpoint(
        path.name, str(path), "single file", config, readers, tokenizers, missing=missing
    )


def detect_family(tensors: Tensors, path: Path) -> tuple[str, ...]:
    """Return the families that the tensors' names allow: one, or both of SD2."""
    probe = f"{UNET}input_blocks.0.0.weight"
    if probe not in tensors:
        if any(divided(name) for name in tensors):
            raise CheckpointError(
                f"{path} is an adapter, not a checkpoint: open the checkpoint that it changes, and "
                f"give it as `lora`."
            )
        raise CheckpointError(
            f"{path} is not a complete Stable Diffusion checkpoint in the original layout: it has "
            f"no {probe!r}. Its tensors' names begin with "
            f"{shortened({name.split('.')[0] for name in tensors}) or 'nothing'}."
        )
    in_channels = tensors[probe].shape[1]
    if any(name.startswith(XL_SECOND) for name in tensors):
        return ("sdxl-instruct-pix2pix" if in_channels == 8 else "sdxl-base",)
    if any(name.startswith(f"{XL_FIRST}model.") for name in tensors):
        return ("sdxl-refiner",)
    if any(name.startswith(OPENCLIP) for name in tensors):
        return ("sd2-base", "sd2-v")
    if any(name.startswith(CLIP_L) for name in tensors):
        return ({8: "instruct-pix2pix", 9: "inpaint"}.get(in_channels, "sd1"),)
    raise CheckpointError(
        f"{path} has a UNet, but no text encoder under a known prefix: {CLIP_L}, {OPENCLIP}, "
        f"{XL_FIRST}."
    )


def _settled(found: tuple[str, ...], family: str | None, path: Path) -> str:
    if family is not None and family not in found:
        raise CheckpointError(
            f"By its tensors, {path} belongs to the family {' or '.join(found)}. "
            f"Received: `family` {family!r}"
        )
    if family is None and len(found) > 1:
        raise CheckpointError(
            f"{path} is an SD2 checkpoint. Its tensors do not tell the 512 px release, which "
            f"predicts noise, from the 768 px release, which predicts v, and its metadata has no "
            f"{PREDICTION} or {ARCHITECTURE} that does: set `family` to sd2-base or sd2-v."
        )
    return family or found[0]


def _with_ema(tensors: Tensors, path: Path) -> dict[str, StoredTensor]:
    """Replace the UNet's tensors by their averages, which are stored under names without dots."""
    result = dict(tensors)
    for name in tensors:
        if name.startswith(UNET):
            average = EMA + name.removeprefix("model.").replace(".", "")
            if average not in tensors:
                raise CheckpointError(f"{path} holds no averaged weights: {average!r} is missing.")
            result[name] = tensors[average]
    return result


def read_config(tensors: Tensors, family: str, path: Path) -> PipelineConfig:
    """Return the family's configuration with the sizes read from the tensors' shapes."""
    named = FAMILIES[family]
    unet = read_unet(under(tensors, UNET), named.denoiser, path)
    vae = read_vae(under(tensors, VAE), named.autoencoder)
    text_encoders = {}
    for name, prefix in text_prefixes(named).items():
        read = _read_openclip if prefix.endswith("model.") else read_clip
        text_encoders[name] = read(under(tensors, prefix), named.text_encoders[name])
    if unet.added is not None:
        ids = named.denoiser.added.num_time_ids
        name, other = "label_emb.0.0.weight", "add_embedding.linear_1.weight"
        width = shape_of(name, other, under(tensors, UNET), path)[1]
        pooled = text_encoders["text_encoder_2"].projection_dim
        added = replace(unet.added, pooled_dim=pooled, time_embed_dim=(width - pooled) // ids)
        unet = replace(unet, added=added)
    return replace(
        named,
        text_encoders=text_encoders,
        denoiser=unet,
        autoencoder=vae,
        latent_inputs=latent_inputs_of(unet, vae),
    )


def read_unet(tensors: Tensors, named: UNetConfig, path: Path) -> UNetConfig:
    """Return a named configuration with the sizes of a UNet, or of its way down and middle."""
    modules, depths = unet_modules(tensors)
    ours = {theirs: block for block, theirs in modules.items()}

    def channels_of(level: int) -> int:
        module = f"down_blocks.{level}.resnets.0"
        name = f"{ours.get(module, module)}.out_layers.3.weight"
        return shape_of(name, f"{module}.conv2.weight", tensors, path)[0]

    channels = tuple(channels_of(level) for level in range(len(depths["down_depths"])))
    heads = tuple(
        named.num_heads[0] if not named.linear_projection else max(width // CHANNELS_PER_HEAD, 1)
        for width in channels
    )
    context = {t.shape[1] for name, t in tensors.items() if name.endswith("attn2.to_k.weight")}
    condition = tensors.get("time_embed.cond_proj.weight")
    return replace(
        named,
        in_channels=shape_of("input_blocks.0.0.weight", "conv_in.weight", tensors, path)[1],
        out_channels=tensors["out.2.weight"].shape[0] if "out.2.weight" in tensors else 4,
        channels=channels,
        num_heads=heads,
        context_dim=context.pop() if len(context) == 1 else named.context_dim,
        guidance_embed_dim=None if condition is None else condition.shape[1],
        **depths,
    )


def _read_openclip(tensors: Tensors, named: TextEncoderConfig) -> TextEncoderConfig:
    embedding = tensors.get("token_embedding.weight")
    fc1 = tensors.get("transformer.resblocks.0.mlp.c_fc.weight")
    if embedding is None or fc1 is None:
        return named
    width, layers = embedding.shape[1], count(tensors, r"transformer\.resblocks\.(\d+)\.")
    # SD2 reads the penultimate layer. The original files hold the last one, too, which is never
    # computed; those that diffusers' script writes do not.
    is_complete = named.projection_dim is not None or layers == named.num_layers
    projected = named.projection_dim is not None and "text_projection" in tensors
    return replace(
        named,
        vocab_size=embedding.shape[0],
        hidden_size=width,
        intermediate_size=fc1.shape[0],
        num_layers=layers if is_complete else layers - 1,
        num_heads=max(width // CHANNELS_PER_HEAD, 1),
        projection_dim=tensors["text_projection"].shape[1] if projected else named.projection_dim,
    )
