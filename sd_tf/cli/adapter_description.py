"""Describe an adapter for `sd-tf weights`: what it changes, and which families it fits."""

import sys
from collections import Counter, defaultdict

from sd_tf.adapters import Adapter, AdapterError, AdapterFile
from sd_tf.checkpoints import CONFIG, TINY
from sd_tf.cli.human_size import human_size
from sd_tf.config import FAMILIES
from sd_tf.weights import layers_of

# The first of these words that is in a module's name tells the kind of layer.
LAYER_KINDS = {
    "attn": "attention",
    "SelfAttention": "attention",
    ".ff": "feed-forward",
    "mlp": "feed-forward",
    "DenseReluDense": "feed-forward",
    ".norm": "modulation",
    "norm_out": "modulation",
    "proj_in": "projection",
    "proj_out": "projection",
    "context_embedder": "projection",
    "x_embedder": "projection",
    "pos_embed": "projection",
    "emb": "embedding of time or size",
    "conv": "convolution",
    "text_projection": "projection",
}


def describe_adapter(file: AdapterFile) -> int:
    """Print the description; return exit status 1 if no family takes the adapter."""
    fitting, refusals = {}, defaultdict(list)
    for family, config in {TINY: CONFIG, **FAMILIES}.items():
        try:
            fitting[family] = file.read(layers_of(config))
        except AdapterError as error:
            refusals[str(error).removeprefix(f"{file.path}: ")].append(family)
    stored = sum(tensor.size * tensor.itemsize for tensor in file.tensors.values())
    dtypes = ", ".join(sorted({tensor.dtype for tensor in file.tensors.values()}))
    print(f"source      {file.path}")
    print(f"tensors     {len(file.tensors)}, {dtypes or 'none'}, {human_size(stored)}")
    if fitting:
        _describe_changes(next(iter(fitting.values())))
        print(f"\nfits        {', '.join(fitting)}")
    for reason, families in refusals.items():
        if fitting:
            print(f"not         {', '.join(families)}: {reason}")
        else:
            print(f"would not load into {', '.join(families)}: {reason}", file=sys.stderr)
    if not fitting:
        print(
            "For a checkpoint with sizes of its own: sd-tf weights CHECKPOINT --lora ADAPTER",
            file=sys.stderr,
        )
    return 0 if fitting else 1


def _describe_changes(adapter: Adapter) -> None:
    print(f"format      {adapter.format}")
    print(f"kind        {', '.join(adapter.kinds)}")
    print(f"rank        {', '.join(map(str, adapter.ranks)) or 'none: all factors are whole'}")
    print(f"alpha       {', '.join(f'{a:g}' for a in adapter.alphas) or 'none: as the rank'}")
    row = "{:<15} {:>7}  {}"
    print("\n" + row.format("component", "layers", "kinds of layers"))
    for component in adapter.components:
        kinds = Counter(
            _layer_kind(module) for name, module in adapter.changes if name == component
        )
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        print(row.format(component, kinds.total(), listed))


def _layer_kind(module: str) -> str:
    return next((kind for word, kind in LAYER_KINDS.items() if word in module), "other")
