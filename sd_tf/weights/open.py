"""Open a checkpoint of any format: find out what the source is, and choose its reader."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from sd_tf.config import DECODER, FAMILIES, PREVIEW_DECODER, SAMPLERS, VisionEncoderConfig
from sd_tf.files.objects import read_object
from sd_tf.files.tensors import CheckpointError, refuse_pickle
from sd_tf.weights import diffusers_controlnet, single_file_controlnet, small_decoder
from sd_tf.weights.added_tokens import with_embeddings
from sd_tf.weights.checkpoint import Checkpoint
from sd_tf.weights.controlnet import ControlNetCheckpoint, with_controlnets
from sd_tf.weights.diffusers import open_folder
from sd_tf.weights.diffusers_fields import CONFIG
from sd_tf.weights.diffusers_pipelines import MODEL_INDEX
from sd_tf.weights.image_prompts import (
    ENCODER_FOLDER,
    open_image_adapter,
    open_vision_encoder,
    with_image_prompts,
)
from sd_tf.weights.merge import merge_files
from sd_tf.weights.single_file import open_file
from sd_tf.weights.small_decoder import (
    SmallDecoderCheckpoint,
    is_small_decoder,
    with_small_decoders,
)

# A file or a folder in a repository of the Hub: OWNER/NAME/PATH.
HUB_FILE = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/(\w[\w./-]*)")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # no . or .. as a part: those are paths
KERASCV = "kerascv:"
WHICH_TAKE = {  # parameter → the sources that it is for
    "family": "single files",
    "variant": "diffusers folders and the Hub",
    "revision": "the Hub",
    "ema": "single files",
    "without": "diffusers folders, the Hub and single files",
    "max_sequence_length": "diffusers folders, the Hub and single files",
    "t5_tokenizer": "single files",
}


def open_checkpoint(
    source: str | Path,
    *,
    family: str | None = None,
    scheduler: str | None = None,
    variant: str | None = None,
    revision: str | None = None,
    ema: bool = False,
    without: Sequence[str] = (),
    max_sequence_length: int | None = None,
    t5_tokenizer: str | Path | None = None,
    lora: Sequence[tuple[str | Path, float]] = (),
    embeddings: Sequence[str | Path] = (),
    controlnet: Sequence[str | Path] = (),
    ip_adapter: Sequence[str | Path] = (),
    image_encoder: str | Path | None = None,
    decoder: str | Path | None = None,
    preview_decoder: str | Path | None = None,
    incomplete: bool = False,
) -> Checkpoint:
    """Open a checkpoint, without reading its weights yet.

    Args:
        source: a diffusers folder, a single `.safetensors` file, a Hugging Face Hub id
            (`owner/name`), `kerascv:sd1.4`, `kerascv:sd2.1` or `kerascv:FOLDER`.
        family: `sd2-base` or `sd2-v`, for a single SD2 file whose metadata does not tell it.
        scheduler: the sampler to use instead of the checkpoint's own.
        variant: the set of weights in a folder or on the Hub: `fp16`, `non_ema`. Components that
            lack it take their default.
        revision: the branch, tag or commit on the Hub.
        ema: load a single file's averaged UNet weights.
        without: text encoders to leave out: `text_encoder_3`, SD3's T5, is the only one in place
            of which zeros may stand. Its files need not be there.
        max_sequence_length: tokens of a prompt for T5, 1…512, or of the zeros in their place. None:
            as many as diffusers takes by itself, 256 for SD3 and 512 for Flux.
        t5_tokenizer: a folder with T5's tokenizer, which no single file has.
        lora: adapter files, each with its scale, to merge into the weights: see `weights.merge`.
        embeddings: files of textual inversion, whose tokens are added. `TOKEN=FILE` is one that
            is called TOKEN; without it, a token is called what its file calls it.
        controlnet: ControlNets that steer the denoiser, in the order in which a call gives their
            pictures: see `open_controlnet`.
        ip_adapter: IP-Adapters, by which pictures are prompts, too, in the order in which a call
            gives them: `.safetensors` files, or files on the Hub (`owner/name/folder/file`).
        image_encoder: the folder of their vision encoder, or one on the Hub (`owner/name/folder`).
            None: `image_encoder` beside the first adapter's file.
        decoder: a small decoder in place of the autoencoder's: see `open_small_decoder`.
        preview_decoder: a small decoder for previews, beside the autoencoder's.
        incomplete: open a single file that lacks components, too. They cannot be built.
    """
    checkpoint = _open(
        source,
        scheduler,
        family=family,
        variant=variant,
        revision=revision,
        ema=ema or None,
        without=tuple(without) or None,
        max_sequence_length=max_sequence_length,
        t5_tokenizer=t5_tokenizer,
    )
    if not incomplete:
        checkpoint.check_complete()
    checkpoint = merge_files(checkpoint, lora)
    if embeddings:
        checkpoint = with_embeddings(checkpoint, embeddings)
    if controlnet:
        checkpoint = with_controlnets(checkpoint, [open_controlnet(net) for net in controlnet])
    if ip_adapter:
        files = [_file_of(adapter) for adapter in ip_adapter]
        if image_encoder is None:
            encoder = _encoder_beside(ip_adapter[0], files[0])
        else:
            encoder = _folder_of(image_encoder)
        adapters = [open_image_adapter(file) for file in files]
        checkpoint = with_image_prompts(checkpoint, adapters, open_vision_encoder(encoder))
    elif image_encoder is not None:
        raise CheckpointError("`image_encoder` goes with `ip_adapter`: give both, or neither.")
    small = {DECODER: decoder, PREVIEW_DECODER: preview_decoder}
    decoders = {name: open_small_decoder(source) for name, source in small.items() if source}
    return with_small_decoders(checkpoint, decoders) if decoders else checkpoint


def _file_of(source: str | Path) -> Path:
    """Return an IP-Adapter's file, from the Hub where there is none of that name."""
    path = Path(source).expanduser()
    if not path.exists() and (match := HUB_FILE.fullmatch(str(source))):
        from sd_tf.weights import hub

        return hub.fetch_file(match[1], match[2])
    return path


def _folder_of(source: str | Path) -> Path:
    """Return a vision encoder's folder, from the Hub where there is none of that name."""
    path = Path(source).expanduser()
    if not path.exists() and (match := HUB_FILE.fullmatch(str(source))):
        from sd_tf.weights import hub

        return hub.fetch_model(match[1], match[2], VisionEncoderConfig.component)
    return path


def _encoder_beside(source: str | Path, file: Path) -> Path:
    """Return the folder of the vision encoder that was published with an adapter."""
    if Path(source).expanduser().exists():
        return file.parent / ENCODER_FOLDER
    return _folder_of(f"{str(source).rpartition('/')[0]}/{ENCODER_FOLDER}")


def open_controlnet(source: str | Path) -> ControlNetCheckpoint:
    """Open a ControlNet: a diffusers folder, a `.safetensors` file, or an id of the Hub."""
    path = Path(source).expanduser()
    if (path / CONFIG).is_file():
        raw = read_object(path / CONFIG, CheckpointError)
        diffusers_controlnet.check_class(raw, str(path))
        return diffusers_controlnet.open_folder(path)
    refuse_pickle(path)
    if path.suffix == ".safetensors" and single_file_controlnet.is_controlnet_file(path):
        return single_file_controlnet.open_file(path)
    if path.exists():
        raise CheckpointError(
            f"{path} is not a ControlNet: give a folder whose {CONFIG} says "
            f"{diffusers_controlnet.CLASS}, or a .safetensors file that has "
            f"zero_convs.* or controlnet_down_blocks.*."
        )
    return _from_hub(source, diffusers_controlnet)


def open_small_decoder(source: str | Path) -> SmallDecoderCheckpoint:
    """Open an `AutoencoderTiny`: a diffusers folder, or an id of the Hub."""
    path = Path(source).expanduser()
    if is_small_decoder(path):
        return small_decoder.open_folder(path)
    if path.exists():
        raise CheckpointError(
            f"{path} is not a small decoder: give a folder whose {CONFIG} says "
            f"{small_decoder.CLASS}."
        )
    return _from_hub(source, small_decoder)


def _from_hub(source: str | Path, reader: ModuleType):
    """Open one model by its id on the Hub, where there is nothing of that name.

    Args:
        reader: the module whose `open_folder` opens it, once `check_class` has let it pass.
    """
    if not HUB_ID.fullmatch(str(source)):
        raise CheckpointError(f"No such file or folder: {Path(source).expanduser()}")
    from sd_tf.weights import hub

    model = reader.open_folder(hub.fetch_model(str(source), check=reader.check_class))
    return replace(model, name=str(source), source=str(source))


def is_controlnet(source: str | Path) -> bool:
    """Tell whether a local source is a ControlNet's folder or file, of one that is read or not."""
    path = Path(source).expanduser()
    known = (diffusers_controlnet.CLASS, *diffusers_controlnet.OTHERS)
    return diffusers_controlnet.class_of(path) in known or (
        path.suffix == ".safetensors" and single_file_controlnet.is_controlnet_file(path)
    )


def _open(source: str | Path, scheduler: str | None, **given) -> Checkpoint:
    """Open a source with the options that are given, which are those that are not None."""
    given = {name: value for name, value in given.items() if value is not None}
    for name, value, known in (
        ("family", given.get("family"), FAMILIES),
        ("scheduler", scheduler, SAMPLERS),
    ):
        if value is not None and value not in known:
            raise CheckpointError(f"Unknown {name} {value!r}. Known: {', '.join(known)}.")

    def refuse_all_but(*taken: str) -> None:
        for name in given:
            if name not in taken:
                raise CheckpointError(f"`{name}` is for {WHICH_TAKE[name]}. Received: {source}")

    source = str(source)
    if source.startswith(KERASCV):
        from sd_tf.weights import kerascv  # imports TensorFlow and all of KerasCV

        refuse_all_but()
        return kerascv.open_release(source, scheduler)
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / MODEL_INDEX).is_file():
            raise CheckpointError(
                f"{path} is not a diffusers folder: it has no {MODEL_INDEX}. Give a single file by "
                f"its own path, and a folder with KerasCV's files as {KERASCV}{path}."
            )
        refuse_all_but("variant", "without", "max_sequence_length")
        return open_folder(path, scheduler=scheduler, **given)
    if path.is_file():
        refuse_pickle(path)
        if path.suffix != ".safetensors":
            raise CheckpointError(
                f"{path}: a single file must be .safetensors. "
                f"Received: {path.suffix or 'no suffix'}"
            )
        refuse_all_but("family", "ema", "without", "max_sequence_length", "t5_tokenizer")
        return open_file(path, scheduler=scheduler, **given)
    refuse_pickle(path)
    if HUB_ID.fullmatch(source):
        from sd_tf.weights import hub

        refuse_all_but("variant", "revision", "without", "max_sequence_length")
        revision = given.pop("revision", None)
        folder = hub.fetch(source, revision, given.get("variant"), given.get("without", ()))
        checkpoint = open_folder(folder, scheduler=scheduler, **given)
        return replace(checkpoint, name=source, source=source)
    raise CheckpointError(f"No such file or folder: {path}")
