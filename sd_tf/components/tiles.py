"""Pictures in overlapping tiles: a model's memory is then that of a tile, not of the picture.

A tile is computed as if it were the whole picture. Where tiles overlap, one fades into the next.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from keras import ops


@dataclass(frozen=True)
class Cut:
    """How a side is divided: where its tiles begin, and how long each is, in latents."""

    tile: int
    starts: tuple[int, ...]

    @property
    def overlaps(self) -> list[int]:
        """What each tile shares with the next; no three share anything."""
        return [start + self.tile - after for start, after in itertools.pairwise(self.starts)]

    @classmethod
    def of(cls, side: int, most: int, least_overlap: int) -> "Cut":
        """Divide a side into as few tiles of at most `most` as overlap by that much, or more."""
        if side <= most:
            return cls(side, (0,))
        count = -(-(side - least_overlap) // (most - least_overlap))
        tile = -(-(side - least_overlap) // count) + least_overlap
        last = count - 1
        return cls(tile, tuple(index * (side - tile) // last for index in range(count)))


@dataclass(frozen=True)
class Tiles:
    """How pictures are divided: into tiles of at most `side` latents each way; 0: not at all.

    Args:
        reach: latents beside its own that a pixel depends on, where that is known: overlaps then
            show nothing that sees a tile's edge, if they are wide enough for it. None: all of them.
    """

    side: int = 0
    reach: int | None = None

    def cut(self, side: int) -> Cut:
        most = self.side if self.side > 0 else side
        return Cut.of(side, most, self.least_overlap)

    @property
    def least_overlap(self) -> int:
        wanted = 0 if self.reach is None else 2 * self.reach + 1
        return max(self.side // 4, min(wanted, (self.side - 4) // 3))

    @property
    def margin(self) -> int:
        """Latents at a tile's inner edges that are not shown."""
        exact = self.reach is not None and 2 * self.reach < self.least_overlap
        return self.reach if exact else 0


def in_tiles(
    function: Callable,
    x,
    tiles: Tiles,
    size: tuple[int, int],
    taken: int,
    given: int,
    channels: int,
):
    """Compute function(x), (B, H, W, C) → float32 (B, H', W', K), one tile after the other.

    Args:
        size: height and width in latents.
        taken: values of a latent's side that the function takes.
        given: those that it gives.
        channels: K.
    """
    rows, columns = map(tiles.cut, size)
    starts = list(itertools.product(rows.starts, columns.starts))
    if len(starts) == 1:
        return function(x)
    margin = tiles.margin
    shape = (x.shape[0], taken * rows.tile, taken * columns.tile, x.shape[-1])

    # Not `ops.map`: outside XLA, TensorFlow computes up to ten of its elements at once.
    def of_tile(last, start):
        tile = function(ops.slice(x, (0, start[0], start[1], 0), shape))
        return tile, tile

    none = ops.zeros((x.shape[0], given * rows.tile, given * columns.tile, channels), "float32")
    places = ops.convert_to_tensor(taken * np.array(starts, "int32"))
    _, computed = ops.scan(of_tile, none, places, length=len(starts))
    grid = (len(rows.starts), len(columns.starts))
    computed = ops.reshape(computed, (*grid, *computed.shape[1:]))
    # (rows, columns, B, h, w, K) → (rows, B, h, W', K) → (B, H', W', K)
    strips = _joined(ops.moveaxis(computed, 1, 0), 3, columns, given, margin)
    return _joined(strips, 1, rows, given, margin)


def _joined(tiles, axis: int, cut: Cut, given: int, margin: int):
    """Join tiles (n, …) along an axis of theirs, each of which fades into the next."""
    tile, overlaps = given * cut.tile, [given * overlap for overlap in cut.overlaps]

    def part(index: int, start: int, stop: int):
        return tiles[index][(slice(None),) * axis + (slice(start, stop),)]

    joined, shared = [], 0  # shared: with the tile before
    for index, overlap in enumerate([*overlaps, 0]):
        joined.append(part(index, shared, tile - overlap))
        if overlap:
            before, after = part(index, tile - overlap, tile), part(index + 1, 0, overlap)
            weight = _fade(overlap, given * margin)
            weight = weight.reshape(-1, *[1] * (len(after.shape) - axis - 1))
            joined.append(before + ops.cast(weight, after.dtype) * (after - before))
        shared = overlap
    return ops.concatenate(joined, axis=axis)


def _fade(length: int, margin: int) -> np.ndarray:
    """Return weights that rise from 0 to 1, without a margin at both ends."""
    inner = np.arange(length) + 0.5 - margin
    return np.clip(inner / (length - 2 * margin), 0.0, 1.0).astype("float32")
