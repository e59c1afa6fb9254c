"""The shapes that an export serves: batches of pictures of one size, over one set of weights."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sd_tf.errors import SdTfError

# What a call of the models costs beside its pictures, in pictures: an estimate, above what SD1.5's
# batches of 1, 2 and 4 at 256 px gave by the clock (0.4) and by processor time (0.1). How they were
# measured is in docs/performance.md.
CALL_COST = 0.5
SHAPE = re.compile(r"([1-9]\d{0,6})x([1-9]\d{0,6})x([1-9]\d{0,6})")
SIZE = re.compile(r"([1-9]\d{0,6})x([1-9]\d{0,6})")

Size = tuple[int, int]  # (height, width) in pixels


class ShapeError(SdTfError):
    """A shape that an export does not serve, or that is not written as one."""


@dataclass(frozen=True)
class Shape:
    """What one call of the models makes: so many pictures, of this size."""

    batch_size: int
    height: int
    width: int

    @property
    def size(self) -> Size:
        return self.height, self.width

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.height}x{self.width}"

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Read a shape as `__str__` writes it."""
        if (match := SHAPE.fullmatch(text)) is None:
            raise ShapeError(
                f"A shape is BATCHxHEIGHTxWIDTH, such as 4x512x768. Received: {text!r}"
            )
        return cls(*map(int, match.groups()))


@dataclass(frozen=True)
class Shapes:
    """Every batch size with every size; the first of both is the default."""

    sizes: tuple[Size, ...]
    batch_sizes: tuple[int, ...]
    downscale: int  # pixels to a latent, in both directions
    latent_channels: int

    def __str__(self) -> str:
        return f"{self.sizes_text} px in batches of {', '.join(map(str, self.batch_sizes))}"

    @property
    def sizes_text(self) -> str:
        """The sizes as `parse_sizes` reads them."""
        return ",".join(f"{height}x{width}" for height, width in self.sizes)

    @property
    def first(self) -> Shape:
        """The shape of the signatures without a suffix."""
        return Shape(self.batch_sizes[0], *self.sizes[0])

    @property
    def all(self) -> list[Shape]:
        return [
            Shape(batch_size, *size)
            for size, batch_size in itertools.product(self.sizes, self.batch_sizes)
        ]

    @property
    def largest_batch(self) -> int:
        return max(self.batch_sizes)

    def latent(self, size: Size) -> tuple[int, int, int]:
        """Return the shape (h, w, c) of the latent of one picture."""
        height, width = size
        return height // self.downscale, width // self.downscale, self.latent_channels

    def of_latents(self, latents: Sequence[int]) -> Shape:
        """Return the shape whose latents have the shape (B, h, w, c)."""
        batch_size, height, width, _ = latents
        return self.checked(Shape(batch_size, height * self.downscale, width * self.downscale))

    def signature(self, endpoint: str, shape: Shape) -> str:
        """Return the name under which an endpoint is served for a shape."""
        return endpoint if self.checked(shape) == self.first else f"{endpoint}_{shape}"

    def endpoint_of(self, signature: str) -> tuple[str, Shape]:
        """Return the endpoint and the shape that a signature serves."""
        endpoint, shape = parse_signature(signature)
        return endpoint, self.first if shape is None else shape

    def checked(self, shape: Shape) -> Shape:
        """Return the shape if it is served."""
        if shape not in self.all:
            known = ", ".join(map(str, self.all))
            raise ShapeError(f"A shape of the export is one of {known}. Received: {shape}")
        return shape

    def size_of(self, height: int | None, width: int | None) -> Size:
        """Choose the size by its height or width or both; by neither, the default.

        One of the two is enough where it leaves no choice.
        """
        if height is None and width is None:
            return self.sizes[0]
        found = [
            size for size in self.sizes if height in (None, size[0]) and width in (None, size[1])
        ]
        if len(found) == 1:
            return found[0]
        rule = "Several of the export's sizes fit" if found else "The export has no such size"
        if width is None:
            given = f"height {height}"
        else:
            given = f"width {width}" if height is None else f"{height}x{width}"
        raise ShapeError(f"{rule}: {self.sizes_text} (HxW). Received: {given}")

    def divided(self, count: int) -> list[int]:
        """Return the sizes of the batches that make `count` pictures at the least cost.

        A batch costs what its pictures cost, wanted or not, and `CALL_COST`.
        """
        order = sorted(self.batch_sizes, reverse=True)
        costs, choices = [0.0], [0]
        for pictures in range(1, count + 1):
            by_choice = {b: b + CALL_COST + costs[max(pictures - b, 0)] for b in order}
            choices.append(min(by_choice, key=by_choice.get))
            costs.append(by_choice[choices[-1]])
        found = []
        while count > 0:
            found.append(choices[count])
            count -= choices[count]
        return sorted(found, reverse=True)


def parse_signature(name: str) -> tuple[str, Shape | None]:
    """Divide a signature's name into its endpoint and its shape; None: the export's first."""
    endpoint, _, suffix = name.rpartition("_")
    return (endpoint, Shape.parse(suffix)) if SHAPE.fullmatch(suffix) else (name, None)


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Read sizes, HEIGHTxWIDTH with commas between."""
    matches = [SIZE.fullmatch(part) for part in text.split(",")]
    if None in matches:
        raise ShapeError(
            f"Sizes are HEIGHTxWIDTH with commas between, such as 512x512,768x512. "
            f"Received: {text!r}"
        )
    return tuple((int(match[1]), int(match[2])) for match in matches)


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Read shapes, BATCHxHEIGHTxWIDTH with commas between."""
    return tuple(Shape.parse(part) for part in text.split(","))
