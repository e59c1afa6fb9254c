"""PEFT's settings beside an adapter: in diffusers' metadata, or in PEFT's adapter_config.json."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sd_tf.adapters.errors import AdapterError
from sd_tf.adapters.spellings import module_names

# diffusers' one JSON object with the keys "unet.r", "unet.lora_alpha", …, or, where one model saved
# its own adapter, "r", "lora_alpha", …
METADATA = "lora_adapter_metadata"
UNNAMED = ""  # the component whose keys have no prefix, as its tensors' names have none
ALPHA = {"LORA": "lora_alpha", "LOHA": "alpha", "LOKR": "alpha"}  # kind → the setting's name
# Initial values that leave the model's weights as they are. Others (pissa, olora, …) change them.
INITIAL = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# Settings that would make it another computation, unless they are empty.
EMPTY = (
    *("fan_in_fan_out", "modules_to_save", "trainable_token_indices", "target_parameters"),
    *("alora_invocation_tokens", "layer_replication", "use_qalora", "use_bdlora"),
    *("arrow_config", "kasa_config", "monteclora_config"),
)


@dataclass(frozen=True)
class PeftSettings:
    """The settings of one component's adapter."""

    content: Mapping[str, Any]
    where: str  # for messages

    def __post_init__(self):
        kind = self.kind
        if not isinstance(kind, str) or kind not in ALPHA:
            raise AdapterError(
                f"{self.where}: the peft_type {kind!r} is not supported; supported: "
                f"{', '.join(ALPHA)}."
            )
        wrong = [name for name in EMPTY if self.content.get(name)]
        if self.content.get("bias") not in (None, "none"):
            wrong.append("bias")
        if self.content.get("init_lora_weights") not in INITIAL:
            wrong.append("init_lora_weights")
        if wrong:
            given = ", ".join(f"{name} {self.content[name]!r}" for name in wrong)
            raise AdapterError(f"{self.where}: these settings are not supported: {given}.")
        for name in ("rank_pattern", "alpha_pattern"):
            if not isinstance(self.content.get(name) or {}, dict):
                raise AdapterError(f"{self.where}: {name} must be an object.")

    @property
    def kind(self) -> str:
        return self.content.get("peft_type", "LORA")

    def rank(self, module: str) -> float:
        return self._number("r", "rank_pattern", module)

    def alpha(self, module: str) -> float:
        return self._number(ALPHA[self.kind], "alpha_pattern", module)

    def multiplier(self, module: str, stored_rank: int | None) -> float:
        """Return the factor of the layer's change: alpha / rank, or alpha / √rank."""
        rank = self.rank(module)
        if rank <= 0 or stored_rank not in (None, rank):
            raise AdapterError(f"its rank is {stored_rank}, but {self.where} has {rank:g}")
        divisor = math.sqrt(rank) if self.content.get("use_rslora") else rank
        return self.alpha(module) / divisor

    def _number(self, name: str, patterns: str, module: str) -> float:
        value = self.content.get(name)
        for pattern, special in (self.content.get(patterns) or {}).items():
            if self._matches(pattern, module):
                value = special
                break
        if type(value) not in (int, float) or not math.isfinite(value):
            raise AdapterError(f"{self.where}: {name} must be a number. Received: {value!r}")
        return float(value)

    def _matches(self, pattern: str, module: str) -> bool:
        """Whether a pattern names the module, by PEFT's rule."""
        try:
            rule = re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            raise AdapterError(
                f"{self.where}: the pattern {pattern!r} cannot be read: {error}."
            ) from error
        return any(rule.match(name) for name in module_names(module))


def settings_in(metadata: Mapping[str, str], where: str) -> dict[str, PeftSettings]:
    """Return the settings in a file's metadata, by component; none if it has none.

    Settings without a component, those of the denoiser, are called `UNNAMED`.
    """
    if METADATA not in metadata:
        return {}
    where = f"{where}, {METADATA}"
    try:
        content = json.loads(metadata[METADATA])
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise AdapterError(f"{where} must be a JSON object. Received: {type(content).__name__}")
    by_component: dict[str, dict[str, Any]] = {}
    for name, value in content.items():
        component, _, setting = name.rpartition(".")
        by_component.setdefault(component, {})[setting] = value
    return {
        component: PeftSettings(settings, f"{where}, {component}" if component else where)
        for component, settings in by_component.items()
    }
