"""Options of `export` and `benchmark`, described once for `sd-tf` and for the top-level scripts.

`sd-tf` reads them with argparse, `serialize_savedmodels.py` and `benchmark.py` with absl.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

from sd_tf.bench.plan import DEFAULT_PROMPT
from sd_tf.cli.arguments import (
    Switch,
    controlnet,
    names,
    scaled_path,
    sizes,
    small_decoder,
    whole_numbers,
)
from sd_tf.components import COMPONENTS
from sd_tf.components.geometry import GUIDANCE, PRECISIONS
from sd_tf.config import FAMILIES, SAMPLERS
from sd_tf.config.rewrites import TARGETS
from sd_tf.runtime.adapter_places import DEFAULT_LAYERS, DEFAULT_RANK, LAYERS

flags.disclaim_key_flags()  # `--help` shows them as the script's own

EXPORT_DIR = "exports/tiny"


# Kinds of values that have a syntax of their own, and how the help shows it.
SYNTAX = {
    names: "NAME,NAME",
    whole_numbers: "N,N",
    sizes: "HxW,HxW",
    small_decoder: "PATH_OR_ID",
}


@dataclass(frozen=True)
class Option:
    """A flag: its name in the scripts, default, help, and kind of value."""

    name: str
    default: Any
    help: str
    kind: Callable[[str], Any] = str  # or int, float, bool, one of SYNTAX
    choices: Sequence[str] | None = None
    spelling: str | None = None  # the name in `sd-tf`, where it differs; both accept either
    repeated: str | None = None  # it may be given several times; how the help shows a value


WEIGHTS = (  # which of a source's weights to take, for how long prompts, and what to merge
    Option("family", None, "The family of a single SD2 file.", choices=tuple(FAMILIES)),
    Option("variant", None, "Which weights of a folder or of the Hub: fp16, non_ema."),
    Option("revision", None, "Branch, tag or commit on the Hub."),
    Option("ema", False, "Take a single file's averaged UNet weights.", bool),
    Option(
        "without",
        (),
        "Leave out SD3's T5: text_encoder_3. Zeros stand in its place.",
        names,
    ),
    Option(
        "max_sequence_length",
        None,
        "Tokens of a prompt for T5, 1…512. Default: 256 for SD3, 512 for Flux.",
        int,
    ),
    Option(
        "t5_tokenizer",
        None,
        "Folder with T5's tokenizer (tokenizer.json or spiece.model), which a single file lacks.",
    ),
    Option(
        "lora",
        (),
        "An adapter file to merge into the weights, with its scale (1 if none is given); again for "
        "each further one. See docs/adapters.md.",
        scaled_path,
        repeated="PATH@SCALE",
    ),
)
OPENING = (
    Option(
        "scheduler", None, "The default scheduler. Default: the checkpoint's.", choices=SAMPLERS
    ),
    *WEIGHTS,
    Option(
        "embeddings",
        (),
        "Textual inversion: a .safetensors file with a token, or TOKEN=FILE to choose the token; "
        "again for each further one.",
        repeated="TOKEN=FILE",
        spelling="embedding",
    ),
)
CONTROLNET = Option(
    "controlnet",
    (),
    "A ControlNet that steers the pictures: a diffusers folder, a .safetensors file or a Hub id; "
    "again for each further one. tiny:drawing is embedded. See docs/control.md.",
    controlnet,
    repeated="PATH_OR_ID",
)
ADDITIONS = (  # what is added to a checkpoint, beside its own parts
    CONTROLNET,
    Option(
        "ip_adapter",
        (),
        "An IP-Adapter, by which pictures are prompts: a .safetensors file or OWNER/NAME/FILE on "
        "the Hub; again for each further one. See docs/image_prompts.md.",
        repeated="FILE_OR_ID",
    ),
    Option(
        "image_encoder",
        None,
        "The folder of the IP-Adapters' vision encoder, or OWNER/NAME/FOLDER on the Hub. Default: "
        "image_encoder beside the first adapter.",
    ),
    Option(
        "decoder",
        None,
        "A small decoder in place of the autoencoder's: the diffusers folder or Hub id of an "
        "AutoencoderTiny. See docs/small_decoders.md.",
        small_decoder,
    ),
    Option(
        "preview_decoder",
        None,
        "A small decoder for previews, beside the autoencoder's. tiny:preview is embedded.",
        small_decoder,
    ),
)

SEVERAL = (
    Option(
        "batch_sizes",
        (),
        "Several, in place of --batch_size: 1,4. Calls are divided over them.",
        whole_numbers,
    ),
    Option(
        "sizes",
        (),
        "Several, in place of --height and --width: 512x512,768x512 (height x width). The first "
        "is the default of a call.",
        sizes,
    ),
)
SHAPE = (
    Option("batch_size", 1, "Pictures per call.", int),
    Option("height", None, "Pixels. Default: the size that the model was made for.", int),
    Option("width", None, "Pixels. Default: the size that the model was made for.", int),
    *SEVERAL,
)

STORAGE = Option(
    "storage",
    None,
    "Store kernels in fewer bits than they are computed in: int8 or float16, those of all parts "
    "but the autoencoders, or of parts named after a colon, as in int8:text_encoder_3. See "
    "docs/storage.md.",
)

DISABLE_REWRITES = Option(
    "disable_rewrites",
    (),
    "The target's rewrites to leave out. See docs/performance.md.",
    names,
)

PLACES = (
    Option("adapter_slots", 0, "Adapters (LoRA) that can be switched at run time.", int),
    Option("adapter_rank", DEFAULT_RANK, "The highest rank of such an adapter.", int),
    Option(
        "adapter_layers",
        DEFAULT_LAYERS,
        "The layers of the denoiser that they may change; each costs memory. The text encoders' "
        "are always among them.",
        choices=LAYERS,
    ),
    Option("image_prompts", 4, "Most pictures of a prompt for each IP-Adapter.", int),
    Option(
        "reuse",
        1,
        "The most model calls that one run of a UNet's deep layers may serve, as a call may ask: "
        "faster, less exact pictures. See docs/reuse.md.",
        int,
    ),
    Option(
        "tile",
        0,
        "Decode and encode large pictures in overlapping tiles of at most so many pixels a side: "
        "less memory, slightly other pictures. 0: whole. See docs/export.md.",
        int,
    ),
)

EXPORT = (
    Option(
        "checkpoint",
        "tiny",
        "Diffusers folder, .safetensors file, Hugging Face Hub id, kerascv:sd1.4, kerascv:sd2.1, "
        "kerascv:FOLDER, or an embedded one: tiny and tiny-dit (a transformer) draw scenes, "
        "tiny-edit changes them as instructed.",
    ),
    Option("output_dir", EXPORT_DIR, "Folder of the export.", spelling="out"),
    *SHAPE,
    Option("precision", "float32", "The models' precision.", choices=PRECISIONS),
    STORAGE,
    Option("max_steps", 100, "The most steps that a call can ask for.", int),
    *OPENING,
    Option(
        "guidance",
        "classifier_free",
        "none: one model call per step, for Turbo and LCM checkpoints.",
        choices=GUIDANCE,
    ),
    Option("guidance_rescale", 0.0, "0…1: pulls guided contrast back to the unguided one.", float),
    Option(
        "prompt_chunks",
        1,
        "Chunks of 75 tokens that a prompt may fill; each makes every step a little slower.",
        int,
    ),
    *PLACES,
    *ADDITIONS,
    Option("jit_compile_text_encoder", False, "Have XLA compile the text encoder too.", bool),
    Option(
        "target",
        None,
        "Hardware to write the compiled graphs for; it is compared when they are loaded. Default: "
        "the best device of this machine, so give gpu to export on a CPU for a GPU.",
        choices=tuple(TARGETS),
    ),
    DISABLE_REWRITES,
    Option(
        "components",
        None,
        f"What to export; fewer than all replace those of an existing export. Default: all: "
        f"{', '.join(COMPONENTS)}, vision_encoder with IP-Adapters, preview_decoder with one.",
        names,
    ),
    Option(
        "text_to_image",
        False,
        "Add a SavedModel from prompts to PNG files, which needs no other code than TensorFlow's.",
        bool,
    ),
    Option(
        "verify",
        "full",
        "Compare SavedModels with the models: full: plain and compiled; fast: plain alone.",
        choices=("full", "fast", "off"),
    ),
    Option("overwrite", False, "Replace an existing export.", bool),
)

BENCHMARK = (
    Option(
        "export_dir",
        None,
        f"Folder of the export. Default: {EXPORT_DIR}, made on first use.",
    ),
    Option("jit_compile", False, "Run what XLA compiles; else the plain signatures.", bool),
    Option("kerascv", False, "Measure KerasCV's own pipeline instead.", bool),
    Option("all", False, "KerasCV and the SavedModels, each without and with XLA, in turn.", bool),
    Option(
        "random_weights",
        False,
        "KerasCV's architecture with random weights: needs no network.",
        bool,
    ),
    Option("prompt", DEFAULT_PROMPT, "The same for every picture of the batch."),
    Option("num_steps", 50, "Steps of the timed runs and of the call before them.", int),
    Option("repeat", 3, "Timed runs; from 20 on there is a 95th percentile.", int),
    Option("scheduler", None, "Default: the export's own; beside KerasCV, its method (kerascv)."),
    Option(
        "guidance_scale", None, "How closely to follow the prompt. Default: the export's.", float
    ),
    Option("seed", 0, "Seed of the first picture; the next ones count up.", int),
    Option(
        "batch_size",
        None,
        "One of the export's batches. Default: its first; KerasCV alone: 1.",
        int,
    ),
    Option("height", None, "One of the export's sizes. Default: its first; KerasCV: 512.", int),
    Option("width", None, "One of the export's sizes. Default: its first; KerasCV: 512.", int),
    Option("compile_cache", None, "Folder where XLA keeps compiled code."),
    Option(
        "output",
        None,
        "Folder, or file name without its end, for the .json and the .html report.",
        spelling="out",
    ),
)


def opened(
    options: argparse.Namespace,
    source: str,
    of: Sequence[Option] = OPENING,
    incomplete: bool = False,
):
    """Open a checkpoint.

    Args:
        of: the options to open it with.
        incomplete: open it even if it lacks components.
    """
    from sd_tf.weights import open_checkpoint

    return open_checkpoint(place_of(source), **chosen(options, of), incomplete=incomplete)


def place_of(source: str) -> str | Path:
    """Return an embedded checkpoint's folder for its name; any other source stays as it is."""
    from sd_tf.checkpoints import EMBEDDED

    return EMBEDDED.get(source, source)


def chosen(options: argparse.Namespace, of: Sequence[Option]) -> dict[str, Any]:
    """Return the values of the options, by name."""
    return {option.name: getattr(options, option.name) for option in of}


def add_arguments(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Add the options to an argparse parser."""
    for option in options:
        flag_names = [f"--{name}" for name in (option.spelling, option.name) if name is not None]
        kind = {"action": Switch} if option.kind is bool else {"type": option.kind}
        default = option.default
        if option.kind in SYNTAX:
            kind = {"type": option.kind, "metavar": SYNTAX[option.kind]}
        if option.repeated is not None:
            kind |= {"metavar": option.repeated, "action": "append"}
            default = list(default)  # a copy of which argparse appends to
        if option.choices is not None:
            kind = {"choices": option.choices}
        parser.add_argument(
            *flag_names, dest=option.name, default=default, help=option.help, **kind
        )


def define_flags(options: Sequence[Option], values: flags.FlagValues = flags.FLAGS) -> None:
    """Define the options as absl flags."""
    for option in options:
        given = option.name, option.default
        if option.choices is not None:
            flags.DEFINE_enum(*given, list(option.choices), option.help, values)
        elif option.repeated is not None:
            parser = ValueParser(option.kind, option.repeated)
            flags.DEFINE_multi(parser, None, *given, option.help, values)
        elif option.kind in SYNTAX:
            parser = ValueParser(option.kind, SYNTAX[option.kind])
            flags.DEFINE(parser, *given, option.help, values)
        else:
            define = {
                str: flags.DEFINE_string,
                int: flags.DEFINE_integer,
                float: flags.DEFINE_float,
                bool: flags.DEFINE_bool,
            }[option.kind]
            define(*given, option.help, flag_values=values)
        if option.spelling is not None:
            flags.DEFINE_alias(option.spelling, option.name, values)


def parsed_flags(
    options: Sequence[Option], values: flags.FlagValues = flags.FLAGS
) -> argparse.Namespace:
    """Return the values that absl parsed, as argparse would."""
    found = {option.name: values[option.name].value for option in options}
    return argparse.Namespace(**found)


class ValueParser(flags.ArgumentParser):
    """Parses an absl flag with a function of `cli.arguments`."""

    def __init__(self, kind: Callable[[str], tuple], syntax: str):
        self.kind = kind
        self.syntactic_help = syntax

    def parse(self, argument: str | tuple) -> tuple:
        if isinstance(argument, tuple):  # the default
            return argument
        try:
            return self.kind(argument)
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from error

    def flag_type(self) -> str:
        return "list"
