"""The places for adapters that an export has: how many, of which rank, and what they hold."""

from dataclasses import dataclass, field

# The denoiser's layers that have places. CLIP's transformers have them in all linear layers.
LAYERS = ("attention", "transformer", "all")
DEFAULT_RANK, DEFAULT_LAYERS = 16, "transformer"
# The names of a place's two matrices: PREFIX, the checkpoint's part, the layer, DOWN or UP.
PREFIX, DOWN, UP = "adapters.", ".down", ".up"
ADAPTER_SCALES = "adapter_scales"  # the input of an endpoint: a number for each slot
ADAPTED = "adapted"  # the text encoder's endpoint that is its default one with adapters


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in one of the places."""

    slot: int
    file: str  # without its folder
    sha256: str


@dataclass(frozen=True)
class AdapterPlaces:
    slots: int = 0  # adapters at a time; 0: the export has no places
    rank: int = 0  # of an adapter, at most
    layers: str = DEFAULT_LAYERS
    loaded: dict[str, LoadedAdapter] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of the adapters in the places, in the order of their slots."""
        return sorted(self.loaded, key=lambda name: self.loaded[name].slot)


NO_PLACES = AdapterPlaces()
