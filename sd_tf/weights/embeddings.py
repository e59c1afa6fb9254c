"""Files of textual inversion: a token and the vectors that a text encoder reads in its place.

{TOKEN: (D) or (n, D)}                  diffusers' learned_embeds.safetensors
{emb_params: (n, D)}                    web UIs and kohya; the file's name is the token
{clip_l: (n, 768), clip_g: (n, 1280)}   SDXL, for its first and its second text encoder
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sd_tf.config import FAMILIES, PipelineConfig, family_of
from sd_tf.weights.tensors import (
    PICKLES,
    CheckpointError,
    StoredTensor,
    open_safetensors,
    shortened,
)

ENCODERS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}  # SDXL's, by their tensors
NAMELESS = ("emb_params", "*", *ENCODERS)  # names of tensors that are no tokens
FLOATS = ("float64", "float32", "float16", "bfloat16")
JOIN = (
    'python -c "from safetensors.numpy import load_file, save_file; '
    "l, g = (next(iter(load_file(f).values())) for f in ('clip_l.safetensors', "
    "'clip_g.safetensors')); save_file({'clip_l': l, 'clip_g': g}, 'both.safetensors')\""
)


@dataclass(frozen=True)
class Embedding:
    """A token and its vectors, (n, D) for each tensor of the file."""

    token: str
    file: Path
    tensors: Mapping[str, StoredTensor]

    @property
    def count(self) -> int:
        """How many vectors, and so how many ids, stand for the token."""
        return next(iter(self.tensors.values())).shape[0]

    def vectors(self, config: PipelineConfig, source: str) -> dict[str, StoredTensor]:
        """Return the vectors for each text encoder of a checkpoint; refuse what does not fit it.

        Args:
            source: what messages call the checkpoint.
        """
        found = self._by_encoder(config, source)
        for name, tensor in found.items():
            width, wanted = tensor.shape[1], config.text_encoders[name].hidden_size
            if width != wanted:
                raise CheckpointError(
                    f"The vectors of an embedding must be as wide as the text encoder's. {name} of "
                    f"{source} has {wanted}. Received: {width}, {self.file}.{_made_for(width)}"
                )
        return found

    def _by_encoder(self, config: PipelineConfig, source: str) -> dict[str, StoredTensor]:
        encoders, is_pair = config.text_encoders, self.tensors.keys() == ENCODERS.keys()
        if len(encoders) > 1 and not is_pair:
            raise CheckpointError(
                f"{source} has two text encoders, so an embedding for it must hold two tensors, "
                f"{' and '.join(ENCODERS)}. Received: {', '.join(self.tensors)}, {self.file}. If "
                f"the other half is a file of its own, join them: {JOIN}"
            )
        if not is_pair:
            return dict.fromkeys(encoders, next(iter(self.tensors.values())))
        by_encoder = {ENCODERS[name]: tensor for name, tensor in self.tensors.items()}
        if "text_encoder_2" not in encoders:
            raise CheckpointError(
                f"{self.file} holds {' and '.join(ENCODERS)}, an embedding for SDXL's two text "
                f"encoders. {source} is {family_of(config)}: give one that was made for that."
            )
        return {name: by_encoder[name] for name in encoders}  # the refiner has the second alone


def read_embedding(source: str | Path) -> Embedding:
    """Read an embedding's header; its vectors are read when they are needed.

    Args:
        source: the file, or TOKEN=FILE to call it otherwise than the file does.
    """
    token, path = _divided(str(source))
    _refuse_pickle(path)
    tensors = open_safetensors(path)
    if tensors.keys() != ENCODERS.keys() and len(tensors) != 1:
        raise CheckpointError(
            f"An embedding's file must hold one token, or clip_l and clip_g. {path} has "
            f"{shortened(tensors) or 'no tensors'}. Write a file for each token: "
            f'python -c "from safetensors.numpy import load_file, save_file; '
            f"[save_file({{k: v}}, '%s-%d.safetensors' % ('{path.stem}', i)) "
            f"for i, (k, v) in enumerate(load_file('{path.name}').items())]\""
        )
    tensors = {name: _checked(name, tensor, path) for name, tensor in tensors.items()}
    counts = {name: tensor.shape[0] for name, tensor in tensors.items()}
    if len(set(counts.values())) > 1:
        raise CheckpointError(
            f"An embedding must have as many vectors for each text encoder. Received: {counts}, "
            f"{path}"
        )
    if token is None:
        name = next(iter(tensors))
        token = path.stem if name in NAMELESS else name
    return Embedding(token, path, tensors)


def _divided(source: str) -> tuple[str | None, Path]:
    """Divide TOKEN=FILE; a file of that whole name is one without TOKEN."""
    path = Path(source).expanduser()
    if "=" not in source or path.is_file():
        return None, path
    token, _, file = source.partition("=")
    return token, Path(file).expanduser()


def _checked(name: str, tensor: StoredTensor, path: Path) -> StoredTensor:
    """Return the tensor with an axis of vectors, (n, D)."""
    if len(tensor.shape) not in (1, 2) or not tensor.size or tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"An embedding's tensor must be numbers of shape (D) or (n, D). {path}: {name!r} is "
            f"{tensor.dtype} {list(tensor.shape)}. Is the file something else than an embedding?"
        )
    if len(tensor.shape) == 2:
        return tensor
    return replace(tensor, shape=(1, *tensor.shape), read=lambda: tensor.read()[None])


def _refuse_pickle(path: Path) -> None:
    if path.suffix in PICKLES:
        raise CheckpointError(
            f"{path} is a pickle, which can run any code when it is read; embeddings are loaded "
            f"from safetensors only. If you trust the file, convert it: "
            f'python -c "import torch, safetensors.torch as s; '
            f"w = torch.load('{path.name}', weights_only=True, map_location='cpu'); "
            f"w = w.get('string_to_param', w); "
            f"s.save_file({{k: v.detach().contiguous() for k, v in w.items() "
            f"if hasattr(v, 'shape')}}, '{path.stem}.safetensors')\""
        )


def _made_for(width: int) -> str:
    """Name the families whose text encoder has this width."""
    families = [
        family
        for family, config in FAMILIES.items()
        if len(config.text_encoders) == 1
        and width in (encoder.hidden_size for encoder in config.text_encoders.values())
    ]
    return f" That width fits {', '.join(families)}." if families else ""
