"""Open single files of SD3, SD3.5 and Flux in the layout of the original releases.

The tensors' shapes tell the sizes. Two cannot be read from them and follow the releases: the heads
of an SD3 without norms of queries and keys have 64 channels, and Flux's axes are (16, 56, 56).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sd_tf.config import (
    AUTOENCODER,
    FAMILIES,
    FluxConfig,
    MMDiTConfig,
    PipelineConfig,
    T5EncoderConfig,
    TextConfig,
)
from sd_tf.config.original_transformer_names import FINAL, FLUX, LAST_TEXTS, MMDIT, Names
from sd_tf.files.tensors import CheckpointError, StoredTensor, shortened
from sd_tf.weights import diffusers_pipelines
from sd_tf.weights.diffusers import canonical_names
from sd_tf.weights.diffusers_transformers import skip_layers
from sd_tf.weights.single_file_names import (
    TEXT_BUFFERS,
    UNET,
    VAE,
    Tensors,
    under,
    vae_names,
)
from sd_tf.weights.single_file_sizes import CHANNELS_PER_HEAD, count, read_clip, read_vae
from sd_tf.weights.single_file_transformer_names import renamed
from sd_tf.weights.texts import check_left_out, with_texts

CLIP_L, CLIP_G, T5 = (
    f"text_encoders.{name}.transformer." for name in ("clip_l", "clip_g", "t5xxl")
)
PROJECTION = "text_projection.weight"
BUFFERS = re.compile(r"text_encoders\.\w+\.logit_scale$")
TABLES = ("shared.weight", "encoder.embed_tokens.weight")


@dataclass(frozen=True)
class Layout:
    """A layout of the original releases, told from others by one tensor."""

    probe: str
    names: Names
    texts: Mapping[str, str]  # text encoder → the prefix of its tensors
    pipelines: diffusers_pipelines.Pipelines


LAYOUTS = (
    Layout(
        "joint_blocks.0.x_block.attn.qkv.weight",
        MMDIT,
        {"text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "text_encoder_3": T5},
        diffusers_pipelines.SD3,
    ),
    Layout(
        "double_blocks.0.img_attn.qkv.weight",
        FLUX,
        {"text_encoder": CLIP_L, "text_encoder_2": T5},
        diffusers_pipelines.FLUX,
    ),
)


@dataclass(frozen=True)
class TransformerFile:
    """The tensors of a file, by component and under their original names."""

    path: Path
    layout: Layout
    parts: Mapping[str, Tensors]  # without components of which the file has nothing

    @property
    def transformer(self) -> Tensors:
        return self.parts["transformer"]

    @property
    def family(self) -> str:
        tensors = self.transformer
        if self.layout.names is FLUX:
            return "flux-dev" if "guidance_in.in_layer.weight" in tensors else "flux-schnell"
        if any(".attn2." in name for name in tensors):
            return "sd3.5-medium"
        return "sd3.5-large" if any(".ln_q." in name for name in tensors) else "sd3-medium"

    def config(self, max_sequence_length: int | None = None) -> PipelineConfig:
        """Return the family's configuration with the sizes read from the tensors' shapes.

        A component that is missing has the family's own.
        """
        named = FAMILIES[self.family]
        read = _read_flux if isinstance(named.denoiser, FluxConfig) else _read_mmdit
        config = replace(
            named,
            text_encoders={
                name: self._text_encoder(name, encoder)
                for name, encoder in named.text_encoders.items()
            },
            denoiser=read(self, named.denoiser),
            autoencoder=read_vae(self.parts.get(AUTOENCODER, {}), named.autoencoder),
        )
        left_out = self.layout.pipelines.left_out
        without = () if left_out is None or left_out in self.parts else (left_out,)
        return with_texts(config, without, max_sequence_length)

    def _text_encoder(self, name: str, named: TextConfig) -> TextConfig:
        tensors = self.parts.get(name)
        if tensors is None:
            return named
        if isinstance(named, T5EncoderConfig):
            return _read_t5(self, name, named)
        config = read_clip(tensors, named)
        if self.layout.texts[name] == CLIP_L:  # it is pooled without a projection
            is_projected = named.projection_dim is not None
            return replace(config, projection_dim=config.hidden_size if is_projected else None)
        return replace(config, projection_dim=self.shape(name, PROJECTION)[0])

    def shape(self, part: str, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without which a part's sizes are unknown."""
        if name not in self.parts[part]:
            raise CheckpointError(f"{self.path} lacks a tensor of its {part}: {name}")
        return self.parts[part][name].shape

    def tensors(self, config: PipelineConfig) -> dict[str, dict[str, StoredTensor]]:
        """Map each component that is there to its tensors under diffusers' names."""
        return {
            name: self._named(name, part, config)
            for name, part in config.components.items()
            if name in self.parts
        }

    def _named(self, name: str, part, config: PipelineConfig) -> dict[str, StoredTensor]:
        tensors = self.parts[name]
        if name == config.denoiser.component:
            swapped = {FINAL}
            if isinstance(part, MMDiTConfig):
                last = part.num_layers - 1
                swapped.add(f"joint_blocks.{last}.{LAST_TEXTS}")
            return renamed(tensors, self.layout.names, part.hidden_size, swapped)
        if name == AUTOENCODER:
            return canonical_names(name, part, vae_names(tensors, config))
        tensors = canonical_names(name, part, tensors)
        if self.layout.texts[name] != CLIP_L:
            return tensors
        tensors.pop(PROJECTION, None)  # trained for other uses than these
        if part.projection_dim is not None:
            table = tensors.get("text_model.embeddings.token_embedding.weight")
            dtype = "float32" if table is None else table.dtype
            tensors[PROJECTION] = StoredTensor.identity(part.projection_dim, dtype)
        return tensors


def recognize(tensors: Tensors, path: Path, without: Sequence[str] = ()) -> TransformerFile | None:
    """Divide a file of SD3 or Flux into its components; None: it is none of these.

    Args:
        without: text encoders that are left out.

    Raises:
        CheckpointError: a tensor belongs to no component and is not known to be unused.
    """
    for layout in LAYOUTS:
        for prefix in (UNET, ""):
            if f"{prefix}{layout.probe}" in tensors:
                return _divided(tensors, path, layout, prefix, without)
    return None


def _divided(tensors, path, layout, prefix, without) -> TransformerFile:
    check_left_out(without, layout.pipelines.left_out, str(path))
    vae = next((p for p in (VAE, "vae.") if any(name.startswith(p) for name in tensors)), VAE)
    places = {AUTOENCODER: vae, **layout.texts}
    parts = {
        name: {key: t for key, t in under(tensors, place).items() if not TEXT_BUFFERS.match(key)}
        for name, place in places.items()
    }
    known = tuple(places.values())
    rest = [name for name in tensors if not name.startswith(known) and not BUFFERS.match(name)]
    roots = {kind.partition(".")[0] for kind in (*layout.names.ends, *layout.names.blocks)}
    roots.add("pos_embed")
    parts["transformer"] = {
        name.removeprefix(prefix): tensors[name]
        for name in rest
        if name.startswith(prefix) and (prefix or name.partition(".")[0] in roots)
    }
    own = {prefix + name for name in parts["transformer"]}
    if surplus := [name for name in rest if name not in own]:
        raise CheckpointError(
            f"{path} holds {len(surplus)} tensors that belong to no known component; without them "
            f"the model may compute something else: {shortened(surplus)}"
        )
    parts = {name: part for name, part in parts.items() if part and name not in without}
    return TransformerFile(path, layout, parts)


def _read_mmdit(file: TransformerFile, named: MMDiTConfig) -> MMDiTConfig:
    def shape(name):
        return file.shape("transformer", name)

    tensors = file.transformer
    width, channels, patch, _ = shape("x_embedder.proj.weight")
    norm = tensors.get("joint_blocks.0.x_block.attn.ln_q.weight")
    head_dim = CHANNELS_PER_HEAD if norm is None else norm.shape[0]
    layers = count(tensors, r"joint_blocks\.(\d+)\.")
    dual = tuple(
        i for i in range(layers) if f"joint_blocks.{i}.x_block.attn2.qkv.weight" in tensors
    )
    return replace(
        named,
        in_channels=channels,
        out_channels=shape("final_layer.linear.weight")[0] // patch**2,
        patch_size=patch,
        num_layers=layers,
        num_heads=width // head_dim,
        head_dim=head_dim,
        context_dim=shape("context_embedder.weight")[1],
        pooled_dim=shape("y_embedder.mlp.0.weight")[1],
        max_patches=math.isqrt(shape("pos_embed")[1]),
        dual_layers=dual,
        qk_norm=norm is not None,
        skip_layers=skip_layers(dual, layers),
    )


def _read_flux(file: TransformerFile, named: FluxConfig) -> FluxConfig:
    def shape(name):
        return file.shape("transformer", name)

    tensors = file.transformer
    width, channels = shape("img_in.weight")
    [head_dim] = shape("double_blocks.0.img_attn.norm.query_norm.scale")
    if head_dim != sum(named.rope_axes):
        raise CheckpointError(
            f"{file.path}: a single file of Flux has heads of {sum(named.rope_axes)} channels, "
            f"whose division into axes is known. Received: {head_dim}. Open a diffusers folder, "
            f"which names its axes."
        )
    return replace(
        named,
        in_channels=channels,
        out_channels=shape("final_layer.linear.weight")[0],
        num_layers=count(tensors, r"double_blocks\.(\d+)\."),
        num_single_layers=count(tensors, r"single_blocks\.(\d+)\."),
        num_heads=width // head_dim,
        head_dim=head_dim,
        context_dim=shape("txt_in.weight")[1],
        pooled_dim=shape("vector_in.in_layer.weight")[1],
    )


def _read_t5(file: TransformerFile, name: str, named: T5EncoderConfig) -> T5EncoderConfig:
    block = "encoder.block.0.layer.0.SelfAttention"
    tensors = file.parts[name]
    table = next((key for key in TABLES if key in tensors), TABLES[0])
    vocab_size, width = file.shape(name, table)
    buckets, heads = file.shape(name, f"{block}.relative_attention_bias.weight")
    return replace(
        named,
        hidden_size=width,
        vocab_size=vocab_size,
        num_buckets=buckets,
        num_heads=heads,
        head_dim=file.shape(name, f"{block}.q.weight")[0] // heads,
        intermediate_size=file.shape(name, "encoder.block.0.layer.1.DenseReluDense.wi_0.weight")[0],
        num_layers=count(tensors, r"encoder\.block\.(\d+)\."),
    )
