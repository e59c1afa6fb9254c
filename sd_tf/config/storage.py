"""How kernels may be stored, in fewer bits than they are computed in."""

from collections.abc import Mapping

INT8, FLOAT16 = "int8", "float16"
STORAGES = (INT8, FLOAT16)


def storage_text(storage: Mapping[str, str]) -> str | None:
    """Return the text that asks for a storage of parts, such as `int8:text_encoder_3,vae`."""
    kinds = set(storage.values())
    if not kinds:
        return None
    (kind,) = kinds
    return f"{kind}:{','.join(storage)}"
