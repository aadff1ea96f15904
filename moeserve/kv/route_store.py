"""`RouteStore`: the experts of all tokens in the KV cache, kept by block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moeserve.cache_kind import CacheKind
from moeserve.config.routes import RouteShape
from moeserve.protocol import CachePlace, RankReport


class RouteStore:
    """The experts of the tokens whose keys and values are in the KV cache of a replica.

    A block's rows are valid as long as its keys and values are. Requests with a cached prefix, or that were preempted,
    therefore find the rows of all their tokens.

    The scheduler of a replica has a `RouteStore`. If blocks are copied to a store or to other engines, each rank has a
    `RouteStore` too, which has the rows of these blocks alone: they are copied with the block. See
    `kv/rank/transfers.py`.
    """

    def __init__(self, shape: RouteShape, num_blocks: int, block_size: int) -> None:
        self.shape = shape
        self._block_size = block_size
        self._rows = np.zeros((num_blocks * block_size, shape.num_layers, shape.top_k), shape.dtype)

    def store(self, chunks: Sequence[tuple[Sequence[int], int, int]], reports: Sequence[RankReport]) -> None:
        """Store the rows of a step.

        Args:
            chunks: for each chunk of the step, the block table of its request, the position of its first token, and
                the number of its tokens.
            reports: reports of all ranks. In a stage, the rows of a rank follow those of the rank before.
        """
        slots = [place for table, start, length in chunks for place in self._slots(table, start, start + length)]
        rows_of_stage: dict[int, list[bytes]] = {}
        for report in sorted(reports, key=lambda each: each.rank):
            assert report.routes is not None
            rows_of_stage.setdefault(report.routes.first_layer, []).append(report.routes.rows)
        for first, parts in rows_of_stage.items():
            rows = np.frombuffer(b"".join(parts), self.shape.dtype).reshape(len(slots), -1, self.shape.top_k)
            self._rows[slots, first : first + rows.shape[1]] = rows

    def read(self, table: Sequence[int], start: int, end: int) -> bytes:
        """Return the rows [tokens, layers, top_k] of a request's tokens `start` to `end` - 1, as bytes."""
        return self._rows[self._slots(table, start, end)].tobytes()

    @property
    def blocks(self) -> npt.NDArray[np.uint8]:
        """The routes of all cached tokens, as bytes [blocks, bytes of a block]."""
        return self._rows.view(np.uint8).reshape(len(self._rows) // self._block_size, -1)

    def read_blocks(self, places: Sequence[CachePlace]) -> bytes:
        """Return the rows of the blocks among these places, in order, as bytes."""
        return self.blocks[_blocks_of(places)].tobytes()

    def write_blocks(self, places: Sequence[CachePlace], rows: bytes) -> None:
        """Store rows that `read_blocks` has returned for the same number of blocks."""
        self.blocks[_blocks_of(places)] = np.frombuffer(rows, np.uint8).reshape(-1, self.blocks.shape[1])

    def _slots(self, table: Sequence[int], start: int, end: int) -> list[int]:
        size = self._block_size
        return [table[position // size] * size + position % size for position in range(start, end)]


def _blocks_of(places: Sequence[CachePlace]) -> list[int]:
    return [place.index for place in places if place.kind == CacheKind.BLOCK]
