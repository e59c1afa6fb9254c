"""Read the JSON file of a model in a diffusers folder, field by field.

Every field is either read, or required to have the one value that our models compute, or known to
have no effect. Any other field is refused by its name and value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sd_tf.config import ConfigError

CONFIG = "config.json"  # the file's name in a model's folder


@dataclass
class Fields:
    """A JSON object that is read field by field; `finish` refuses the fields that were not read."""

    raw: Mapping[str, Any]
    where: str

    def __post_init__(self):
        self.rest = {k: v for k, v in self.raw.items() if not k.startswith("_")}

    def take(self, name: str, default):
        return self.rest.pop(name, default)

    def choose(self, name: str, choices: Mapping, default):
        value = self.take(name, default)
        if value not in choices:
            raise self.unsupported(name, value, choices)
        return choices[value]

    def require(self, name: str, *allowed, default):
        value = self.take(name, default)
        if value not in allowed:
            raise self.unsupported(name, value, allowed)

    def unsupported(self, name, value, allowed) -> ConfigError:
        return ConfigError(
            f"{self.where}: {name}={value!r} is not supported; "
            f"supported: {', '.join(repr(choice) for choice in allowed)}."
        )

    def finish(self, harmless=()):
        for name, value in self.rest.items():
            if name not in harmless and value is not None:
                raise ConfigError(
                    f"{self.where}: the field {name}={value!r} is not supported; ignoring it could "
                    f"change what the model computes."
                )
