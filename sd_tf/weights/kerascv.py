"""Read KerasCV's SD 1.4 and 2.1 weights, which KerasCV itself loads from its `.h5` files.

KerasCV's layers of each kind, in the order of the data flow, are matched with the layers of our
models. Their kernels already have Keras' layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import keras
import keras_cv
import numpy as np
from keras_cv.src.models.stable_diffusion import diffusion_model as kcv_unet
from keras_cv.src.models.stable_diffusion.attention_block import AttentionBlock
from keras_cv.src.models.stable_diffusion.padded_conv2d import PaddedConv2D
from keras_cv.src.models.stable_diffusion.resnet_block import ResnetBlock
from keras_cv.src.models.stable_diffusion.text_encoder import CLIPEmbedding, CLIPEncoderLayer

from sd_tf.config import FAMILIES, PipelineConfig, with_kerascv_numerics
from sd_tf.files.tensors import CheckpointError, StoredTensor
from sd_tf.models.layers import deferred_variables
from sd_tf.weights.checkpoint import Checkpoint
from sd_tf.weights.open import KERASCV

kcv = keras_cv.models.stable_diffusion
kcv_v2 = kcv_unet.DiffusionModelV2

# Release → its family, KerasCV's classes, and the names of KerasCV's files.
RELEASES = {
    "sd1.4": (
        "sd1",
        {"text_encoder": kcv.TextEncoder, "unet": kcv.DiffusionModel},
        {"text_encoder": "kcv_encoder.h5", "unet": "kcv_diffusion_model.h5"},
    ),
    "sd2.1": (
        "sd2-base",
        {"text_encoder": kcv.TextEncoderV2, "unet": kcv_v2},
        {"text_encoder": "text_encoder_v2_1.h5", "unet": "diffusion_model_v2_1.h5"},
    ),
}
VAE_FILES = {"encoder": "vae_encoder.h5", "decoder": "kcv_decoder.h5"}


@dataclass(frozen=True)
class Place:
    """A variable of KerasCV's model, and the axes that turn its layout into the checkpoint's."""

    variable: keras.Variable
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.variable.shape[axis] for axis in self.axes)

    def tensor(self) -> StoredTensor:
        return StoredTensor(self.shape, self.variable.dtype, self._take)

    def _take(self) -> np.ndarray:
        """Return the values and free the variable, so that two models are never held at once."""
        value = np.transpose(np.asarray(self.variable), self.axes)
        self.variable._value = None
        return value

    def fill(self, stored: np.ndarray) -> None:
        self.variable.assign(np.transpose(stored.reshape(self.shape), np.argsort(self.axes)))


Places = Iterator[tuple[str, Place]]  # by the checkpoint's names


def open_release(source: str, scheduler: str | None = None) -> Checkpoint:
    """Open `kerascv:sd1.4` or `kerascv:sd2.1`, which KerasCV downloads, or `kerascv:FOLDER`."""
    name = source.removeprefix(KERASCV)
    folder, called = None, source
    if name not in RELEASES:
        folder = Path(name).expanduser()
        name, called = _release_of(folder), KERASCV + folder.resolve().name
    family, classes, files = RELEASES[name]
    config = with_kerascv_numerics(FAMILIES[family])
    if scheduler is not None:
        config = replace(config, schedule=replace(config.schedule, sampler=scheduler)).check()
    sizes = {
        "text_encoder": (config.text_encoders["text_encoder"].max_length,),
        "unet": (512, 512, 77),
    }

    def read(component):
        if component == "vae":
            places = _vae_places(folder, config)
        else:
            build = partial(classes[component], *sizes[component])
            model = _loaded(build, folder and folder / files[component])
            walk = text_places if component == "text_encoder" else unet_places
            places = walk(model, config)
        return {name: place.tensor() for name, place in places}

    readers = {component: partial(read, component) for component in config.components}
    read_from = {**{part: [file] for part, file in files.items()}, "vae": VAE_FILES.values()}
    paths = {
        part: [] if folder is None else [folder / file for file in read_from[part]]
        for part in config.components
    }
    return Checkpoint(called, source, f"KerasCV {name}", config, readers, paths=paths)


def _release_of(folder: Path) -> str:
    for name, (_, _, files) in RELEASES.items():
        if (folder / files["unet"]).is_file():
            return name
    raise CheckpointError(
        f"{KERASCV} must be followed by a release ({', '.join(RELEASES)}), or by a folder with "
        f"KerasCV's files, which include "
        f"{' or '.join(files['unet'] for _, _, files in RELEASES.values())}. "
        f"Received: {str(folder)!r}"
    )


def _loaded(build, file: Path | None):
    """Build KerasCV's model with its weights, from `file` or from KerasCV's own download."""
    if file is None:
        try:
            return build(download_weights=True)
        except Exception as error:  # Keras raises a bare Exception for a failed download
            raise CheckpointError(
                f"KerasCV could not download its weights: {error}. Without a network, put its .h5 "
                f"files into a folder and open {KERASCV}FOLDER."
            ) from error
    if not file.is_file():
        raise CheckpointError(f"No such file: {file}")
    with deferred_variables():  # no random values, which the file's would replace
        model = build(download_weights=False)
    for variable in model.variables:
        variable._initialize(np.zeros(variable.shape, variable.dtype))
    try:
        model.load_weights(str(file))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read by KerasCV: {error}") from error
    return model


def _layers(model, kind) -> list:
    """List the model's layers of one kind in the order of the data flow.

    `model.layers` keeps that order within a kind, because no kind occurs on two parallel paths.
    """
    return [layer for layer in model.layers if type(layer) is kind]


def text_places(model, config: PipelineConfig) -> Places:
    (embedding,) = _layers(model, CLIPEmbedding)
    base = "text_model.embeddings"
    yield from _leaf(f"{base}.token_embedding", embedding.token_embedding)
    yield from _leaf(f"{base}.position_embedding", embedding.position_embedding)
    for i, layer in enumerate(_layers(model, CLIPEncoderLayer)):
        base = f"text_model.encoder.layers.{i}"
        yield from _leaf(f"{base}.layer_norm1", layer.layer_norm1)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _leaf(f"{base}.self_attn.{name}", getattr(layer.clip_attn, name))
        yield from _leaf(f"{base}.layer_norm2", layer.layer_norm2)
        yield from _leaf(f"{base}.mlp.fc1", layer.fc1)
        yield from _leaf(f"{base}.mlp.fc2", layer.fc2)
    (norm,) = _layers(model, keras.layers.LayerNormalization)
    yield from _leaf("text_model.final_layer_norm", norm)


def unet_places(model, config: PipelineConfig) -> Places:
    unet = config.denoiser
    last = len(unet.channels) - 1
    resnets, attentions, downs = [], [], []
    for i, depths in enumerate(unet.down_depths):
        resnets += [f"down_blocks.{i}.resnets.{j}" for j in range(len(depths))]
        attentions += [f"down_blocks.{i}.attentions.{j}" for j, depth in enumerate(depths) if depth]
        downs += [f"down_blocks.{i}.downsamplers.0.conv"] if i < last else []
    resnets += ["mid_block.resnets.0", "mid_block.resnets.1"]
    attentions += ["mid_block.attentions.0"]
    for i, depths in enumerate(unet.up_depths):
        resnets += [f"up_blocks.{i}.resnets.{j}" for j in range(len(depths))]
        attentions += [f"up_blocks.{i}.attentions.{j}" for j, depth in enumerate(depths) if depth]

    time = ["time_embedding.linear_1", "time_embedding.linear_2"]
    for base, layer in zip(time, _layers(model, keras.layers.Dense), strict=True):
        yield from _leaf(base, layer)
    convs = ["conv_in", *downs, "conv_out"]
    for base, layer in zip(convs, _layers(model, PaddedConv2D), strict=True):
        yield from _leaf(base, layer.conv2d)
    for base, layer in zip(resnets, _layers(model, kcv_unet.ResBlock), strict=True):
        yield from _leaf(f"{base}.norm1", layer.entry_flow[0])
        yield from _leaf(f"{base}.conv1", layer.entry_flow[2].conv2d)
        yield from _leaf(f"{base}.time_emb_proj", layer.embedding_flow[1])
        yield from _leaf(f"{base}.norm2", layer.exit_flow[0])
        yield from _leaf(f"{base}.conv2", layer.exit_flow[2].conv2d)
        yield from _shortcut(base, layer)
    for base, layer in zip(attentions, _layers(model, kcv_unet.SpatialTransformer), strict=True):
        yield from _transformer(base, layer)
    ups = [f"up_blocks.{i}.upsamplers.0.conv" for i in range(last)]
    for base, layer in zip(ups, _layers(model, kcv_unet.Upsample), strict=True):
        yield from _leaf(base, layer.conv.conv2d)
    (norm,) = _layers(model, keras.layers.GroupNormalization)
    yield from _leaf("conv_norm_out", norm)


def _transformer(base, layer):
    yield from _leaf(f"{base}.norm", layer.norm)
    for name, projection in (("proj_in", layer.proj1), ("proj_out", layer.proj2)):
        yield from _leaf(f"{base}.{name}", getattr(projection, "conv2d", projection))
    block, base = layer.transformer_block, f"{base}.transformer_blocks.0"
    for name in ("norm1", "norm2", "norm3"):
        yield from _leaf(f"{base}.{name}", getattr(block, name))
    for name in ("attn1", "attn2"):
        attention = getattr(block, name)
        for part in ("to_q", "to_k", "to_v"):
            yield from _leaf(f"{base}.{name}.{part}", getattr(attention, part))
        yield from _leaf(f"{base}.{name}.to_out.0", attention.out_proj)
    yield from _leaf(f"{base}.ff.net.0.proj", block.geglu.dense)
    yield from _leaf(f"{base}.ff.net.2", block.dense)


def _vae_places(folder: Path | None, config: PipelineConfig) -> Places:
    encoder = _loaded(kcv.ImageEncoder, folder and folder / VAE_FILES["encoder"])
    yield from encoder_places(encoder, config)
    decoder = _loaded(partial(kcv.Decoder, 512, 512), folder and folder / VAE_FILES["decoder"])
    yield from decoder_places(decoder, config)


def encoder_places(model, config: PipelineConfig) -> Places:
    levels, resnets = len(config.autoencoder.channels), config.autoencoder.layers_per_block
    blocks = [f"down_blocks.{i}.resnets.{j}" for i in range(levels) for j in range(resnets)]
    convs = [f"encoder.down_blocks.{i}.downsamplers.0.conv" for i in range(levels - 1)]
    convs = ["encoder.conv_in", *convs, "encoder.conv_out", "quant_conv"]
    yield from _half_vae("encoder", model, [*blocks, *MID_RESNETS], convs)


def decoder_places(model, config: PipelineConfig) -> Places:
    levels, resnets = len(config.autoencoder.channels), config.autoencoder.layers_per_block + 1
    blocks = [f"up_blocks.{i}.resnets.{j}" for i in range(levels) for j in range(resnets)]
    convs = [f"decoder.up_blocks.{i}.upsamplers.0.conv" for i in range(levels - 1)]
    convs = ["post_quant_conv", "decoder.conv_in", *convs, "decoder.conv_out"]
    yield from _half_vae("decoder", model, [*MID_RESNETS, *blocks], convs)


MID_RESNETS = ("mid_block.resnets.0", "mid_block.resnets.1")


def _half_vae(side, model, resnets, convs):
    for base, layer in zip(convs, _layers(model, PaddedConv2D), strict=True):
        yield from _leaf(base, layer.conv2d)
    for base, layer in zip(resnets, _layers(model, ResnetBlock), strict=True):
        for name in ("norm1", "norm2"):
            yield from _leaf(f"{side}.{base}.{name}", getattr(layer, name))
        for name in ("conv1", "conv2"):
            yield from _leaf(f"{side}.{base}.{name}", getattr(layer, name).conv2d)
        yield from _shortcut(f"{side}.{base}", layer)
    (attention,) = _layers(model, AttentionBlock)
    base = f"{side}.mid_block.attentions.0"
    yield from _leaf(f"{base}.group_norm", attention.norm)
    for theirs, ours in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")):
        yield from _leaf(f"{base}.{ours}", getattr(attention, theirs).conv2d)
    (norm,) = _layers(model, keras.layers.GroupNormalization)
    yield from _leaf(f"{side}.conv_norm_out", norm)


def _shortcut(base, resnet):
    if isinstance(resnet.residual_projection, PaddedConv2D):
        yield from _leaf(f"{base}.conv_shortcut", resnet.residual_projection.conv2d)


# Keras' attribute → the checkpoint's name, and the axes from Keras' layout to the checkpoint's.
LEAVES = {
    "kernel": ("weight", {2: (1, 0), 4: (3, 2, 0, 1)}),
    "embeddings": ("weight", {}),
    "gamma": ("weight", {}),
    "bias": ("bias", {}),
    "beta": ("bias", {}),
}


def _leaf(base: str, layer) -> Places:
    for attribute, (name, layouts) in LEAVES.items():
        variable = getattr(layer, attribute, None)
        if variable is None:
            continue
        axes = layouts.get(len(variable.shape), tuple(range(len(variable.shape))))
        yield f"{base}.{name}", Place(variable, axes)
