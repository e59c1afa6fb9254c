"""Which tensors make a change together, and the shapes that they must have."""

from itertools import product

from sd_tf.adapters.changes import Change, DoRA, LoHa, LoKr, LoRA, Parts, Shape, Sum
from sd_tf.adapters.errors import AdapterError

MAGNITUDES = ("dora_scale", "magnitude")  # of DoRA: LyCORIS' name and PEFT's
_FIRST = (("lokr_w1",), ("lokr_w1_a", "lokr_w1_b"))
_SECOND = (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"), ("lokr_w2_a", "lokr_w2_b", "lokr_t2"))
_HADA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
# The sets of tensors that make a change → its class.
FORMS: dict[frozenset[str], type[Sum]] = {
    frozenset(("down", "up")): LoRA,
    frozenset(("down", "up", "bias")): LoRA,
    frozenset(("down", "up", "mid")): LoRA,
    frozenset(_HADA): LoHa,
    frozenset((*_HADA, "hada_t1", "hada_t2")): LoHa,
    **{frozenset((*first, *second)): LoKr for first, second in product(_FIRST, _SECOND)},
}


def check_parts(parts: Parts, shape: Shape) -> type[Sum]:
    """Return the class of the change that the tensors make; refuse others, and wrong shapes."""
    products = {name: tensor for name, tensor in parts.items() if name not in MAGNITUDES}
    kind = FORMS.get(frozenset(products))
    if kind is None:
        raise AdapterError(_incomplete(frozenset(products)))
    for name, tensor in products.items():
        if (name != "bias" and len(tensor.shape) < 2) or 0 in tensor.shape:
            raise AdapterError(f"{name} has the shape {list(tensor.shape)}")
    for name, wanted in kind.wanted(products, shape):
        if _squeezed(products[name].shape) != _squeezed(wanted):
            raise AdapterError(
                f"{name} is {list(products[name].shape)}, the weight of {list(shape)} wants "
                f"{list(wanted)}"
            )
    magnitudes = [parts[name] for name in MAGNITUDES if name in parts]
    if len(magnitudes) > 1 or (magnitudes and "bias" in parts):
        raise AdapterError("DoRA has one magnitude, and no bias")
    if "magnitude" in parts and parts["magnitude"].size != shape[0]:
        raise AdapterError(f"the magnitude has {parts['magnitude'].size} values for {shape[0]}")
    if "dora_scale" in parts and _squeezed(parts["dora_scale"].shape) not in (
        *((shape[0],), (shape[0], 1)),
        (1, shape[1]),
    ):
        raise AdapterError(
            f"dora_scale is {list(parts['dora_scale'].shape)}, the weight of {list(shape)} wants "
            f"[{shape[0]}, 1] or [1, {shape[1]}]"
        )
    return kind


def make_change(kind: type[Sum], parts: Parts, shape: Shape, multiplier: float) -> Change:
    """Return the change of tensors that were checked; `multiplier` is alpha / rank."""
    products = {name: tensor for name, tensor in parts.items() if name not in MAGNITUDES}
    change = kind(shape, products, multiplier)
    magnitude = {name: parts[name] for name in MAGNITUDES if name in parts}
    if not magnitude:
        return change
    # Until version 3.2, LyCORIS took the norm of each input, and stored (1, in, …).
    is_per_input = "dora_scale" in magnitude and magnitude["dora_scale"].shape[0] != shape[0]
    return DoRA(shape, magnitude, change, is_per_input)


def _incomplete(found: frozenset[str]) -> str:
    larger = [form for form in FORMS if found < form]
    if not found:
        return "there is a magnitude or an alpha alone"
    if not larger:
        return f"{', '.join(sorted(found))} do not make one change"
    missing = min(larger, key=len) - found
    return f"there is {', '.join(sorted(found))}, but no {', '.join(sorted(missing))}"


def _squeezed(shape: Shape) -> Shape:
    """Drop the ones behind the second axis: a matrix may be stored as a 1×1 convolution."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return tuple(shape)
