"""Which text encoders a pipeline has, and how long the prompts are that its T5 takes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from sd_tf.config import MMDiTConfig, PipelineConfig
from sd_tf.files.tensors import CheckpointError
from sd_tf.tokenizer.t5 import T5Tokenizer

LEFT_OUT = "text_encoder_3"  # SD3's T5
LONGEST = 512  # tokens of a prompt


def check_left_out(without: Sequence[str], allowed: str | None, where: str) -> None:
    """Check that the text encoders to leave out are those in place of which zeros may stand."""
    for name in without:
        if name != allowed:
            raise CheckpointError(
                f"`without` leaves out {LEFT_OUT} of SD3, a T5, in place of which zeros may stand; "
                f"nothing stands for any other text encoder. Received: {name} for {where}"
            )


def check_length(max_sequence_length: int | None, has_t5: bool, where: str) -> None:
    """Check that a length is possible, and given only where there is a T5 or zeros in its place."""
    if max_sequence_length is None:
        return
    if not has_t5:
        raise CheckpointError(
            f"`max_sequence_length` is for SD3 and Flux, which have a T5 text encoder. "
            f"Received: {max_sequence_length} for {where}"
        )
    if not 1 <= max_sequence_length <= LONGEST:
        raise CheckpointError(
            f"`max_sequence_length` is 1…{LONGEST}. Received: {max_sequence_length}"
        )


def t5_readers(
    config: PipelineConfig, t5_tokenizer: str | Path | None, where: str
) -> dict[str, Callable[[], T5Tokenizer]]:
    """Return a reader of the folder with T5's tokenizer for every T5; None: there is no folder."""
    if t5_tokenizer is None:
        return {}
    if not config.t5_encoders:
        raise CheckpointError(
            f"`t5_tokenizer` is for a T5 text encoder. Received: {where}, which has none"
        )
    return dict.fromkeys(config.t5_encoders, partial(T5Tokenizer.from_folder, t5_tokenizer))


def with_texts(
    config: PipelineConfig,
    without: Sequence[str] = (),
    max_sequence_length: int | None = None,
    where: str = "this configuration",
) -> PipelineConfig:
    """Return a configuration without some text encoders, and with T5's prompts of that length."""
    check_left_out(without, LEFT_OUT if isinstance(config.denoiser, MMDiTConfig) else None, where)
    t5, zeros = config.t5_encoders, config.zero_tokens
    check_length(max_sequence_length, bool(t5 or zeros), where)
    length = max_sequence_length
    if length is not None:
        t5 = {name: replace(encoder, max_length=length) for name, encoder in t5.items()}
        zeros = length if zeros else 0
    for name in without:
        if name in t5:
            zeros = t5.pop(name).max_length
    encoders = {
        name: t5.get(name, encoder)
        for name, encoder in config.text_encoders.items()
        if name not in without
    }
    return replace(config, text_encoders=encoders, zero_tokens=zeros)
