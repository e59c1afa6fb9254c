"""`sd-tf weights PATH_OR_ID`: describe a checkpoint or an adapter of any kind; does it load?"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from sd_tf.adapters import recognize
from sd_tf.cli.adapter_description import describe_adapter
from sd_tf.cli.arguments import place_of_addition
from sd_tf.cli.human_size import human_size
from sd_tf.cli.options import OPENING, chosen, opened
from sd_tf.cli.options import add_arguments as add_options
from sd_tf.config import family_of, has_named_sizes, suited_to
from sd_tf.errors import SdTfError
from sd_tf.files.tensors import StoredTensor
from sd_tf.tokenizer.clip import TokenizerError
from sd_tf.weights import Checkpoint, CheckpointError, layout
from sd_tf.weights.controlnet import ControlNetCheckpoint
from sd_tf.weights.image_prompts import (
    ImageAdapterCheckpoint,
    is_image_adapter_file,
    open_image_adapter,
)
from sd_tf.weights.open import is_controlnet, open_controlnet, open_small_decoder
from sd_tf.weights.small_decoder import SmallDecoderCheckpoint, is_small_decoder

ROW = "{:<15} {:>8} {:>14}  {:<18} {:>9}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="PATH_OR_ID",
        help="a diffusers folder, a .safetensors file, a Hugging Face Hub id, "
        "kerascv:sd1.4, kerascv:sd2.1, kerascv:FOLDER, or an embedded one: tiny, tiny-dit, "
        "tiny-edit; or an adapter or a ControlNet, by its file or folder, or a small decoder's "
        "folder",
    )
    add_options(parser, OPENING)


def run(options: argparse.Namespace) -> int:
    """Describe what the source is; return exit status 1 if it would not load."""
    try:
        source = place_of_addition(options.source)
        file = recognize(source)
        if file is not None:
            _check_no_options(options, "an adapter")
            return describe_adapter(file)
        if is_image_adapter_file(Path(source)):
            _check_no_options(options, "an IP-Adapter")
            return describe_image_adapter(open_image_adapter(Path(source)))
        if is_controlnet(source):
            _check_no_options(options, "a ControlNet")
            return describe_controlnet(open_controlnet(source))
        if is_small_decoder(Path(source)):
            _check_no_options(options, "a small decoder")
            return describe_small_decoder(open_small_decoder(source))
        checkpoint = opened(options, options.source, incomplete=True)
    except SdTfError as error:
        print(f"would not load: {error}", file=sys.stderr)
        return 1
    return describe(checkpoint)


def _check_no_options(options: argparse.Namespace, what: str) -> None:
    for name, value in chosen(options, OPENING).items():
        if value:
            raise CheckpointError(
                f"{options.source} is {what}, and the option {name} is for a checkpoint."
            )


def describe_controlnet(net: ControlNetCheckpoint) -> int:
    print(f"source      {net.source}")
    print(f"format      ControlNet, {net.format}")
    print(
        f"for         {net.config.trunk.kind}, a context of {net.config.trunk.context_dim} channels"
    )
    order = "blue, green, red" if net.config.hint_is_bgr else "red, green, blue"
    print(f"picture     3 channels ({order}), {net.config.downscale} pixels to a latent's side")
    if net.config.pools:
        print("adds        averages over each map (it pools)")
    print("\n" + ROW.format("component", "tensors", "parameters", "dtype", "size"))
    problems = list(_row("controlnet", net.config, net.tensors))
    print()
    return _verdict(problems)


def describe_image_adapter(adapter: ImageAdapterCheckpoint) -> int:
    projection, attention = adapter.config.projection, adapter.config.attention
    tokens = projection.num_tokens or "one for each of the encoder's,"
    print(f"source      {adapter.source}")
    print(f"format      IP-Adapter, {projection.kind}")
    print(
        f"for         {len(attention.widths)} attentions to a context of "
        f"{attention.context_dim} channels"
    )
    print(f"takes       {projection.embed_dim} channels of a vision encoder")
    print(f"tokens      {tokens} for each picture")
    print("\n" + ROW.format("component", "tensors", "parameters", "dtype", "size"))
    problems = _row(projection.component, projection, adapter.projection)
    problems += _row(attention.component, attention, adapter.attention)
    print()
    return _verdict(problems)


def describe_small_decoder(decoder: SmallDecoderCheckpoint) -> int:
    config = decoder.config
    print(f"source      {decoder.source}")
    print("format      small decoder (AutoencoderTiny)")
    print(f"takes       latents of {config.latent_channels} channels, {config.downscale} px a side")
    blocks = ", ".join(map(str, config.blocks))
    print(f"size        {config.channels} channels; {blocks} blocks on its levels")
    print("\n" + ROW.format("component", "tensors", "parameters", "dtype", "size"))
    problems = _row("decoder", config, decoder.tensors)
    print()
    return _verdict(problems)


def describe(checkpoint: Checkpoint) -> int:
    config = checkpoint.config
    sizes = "" if has_named_sizes(config) else " (with sizes of its own)"
    print(f"source      {checkpoint.source}")
    print(f"format      {checkpoint.format}")
    print(f"family      {family_of(config)}{sizes}")
    for adapter in checkpoint.adapters:
        print(f"merged      {adapter.name} at {adapter.scale:g}")
    print(f"native size {config.default_size} px")
    print(f"prediction  {config.schedule.prediction}, sampler {config.schedule.sampler}")
    if suited := suited_to(config):
        print("defaults    " + ", ".join(f"{name} {value:g}" for name, value in suited.items()))
    print("\n" + ROW.format("component", "tensors", "parameters", "dtype", "size"))
    problems = []
    for name, part in config.components.items():
        if name in checkpoint.missing:
            print(ROW.format(name, "missing", "", "", "").rstrip())
            continue
        try:
            tensors = checkpoint.tensors(name)
        except CheckpointError as error:
            problems.append(f"{name}: {error}")
            continue
        problems += _row(name, part, tensors)
    if config.zero_tokens:
        print(
            f"text_encoder_3 is left out: {config.zero_tokens} zeros stand in place of its tokens"
        )
    for name in config.text_encoders:
        if name in checkpoint.missing:
            continue
        try:
            tokenizer = checkpoint.tokenizer(name)
        except (CheckpointError, TokenizerError) as error:
            problems.append(f"tokenizer of {name}: {error}")
            continue
        origin = "its own" if name in checkpoint.tokenizer_readers else "shipped with sd_tf"
        print(
            f"tokenizer of {name}: {origin}, {tokenizer.vocab_size} tokens, "
            f"padded with {tokenizer.pad_token!r}"
        )
    try:
        checkpoint.check_complete()
    except CheckpointError as error:
        problems.append(str(error))
    print()
    return _verdict(problems)


def _row(name: str, part: object, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Print what a component's tensors are; return why they would not load."""
    parameters = sum(tensor.size for tensor in tensors.values())
    stored = sum(tensor.size * tensor.itemsize for tensor in tensors.values())
    dtypes = ", ".join(sorted({tensor.dtype for tensor in tensors.values()}))
    print(ROW.format(name, len(tensors), f"{parameters:,}", dtypes, human_size(stored)))
    return [f"{name}: {p}" for p in layout.problems(layout.abstract_model(part), tensors)]


def _verdict(problems: list[str]) -> int:
    for problem in problems:
        print(f"would not load: {problem}", file=sys.stderr)
    if not problems:
        print("loads: every tensor has its place, every place its tensor")
    return 1 if problems else 0
