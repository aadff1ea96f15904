"""The weight mapping of tensors that store the heads of several parts together, such as queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from moeserve.layers.rows import Destination, Row, rows_of_heads, some_rows
from moeserve.layers.weights import AnyWeights


@dataclass(frozen=True)
class Part:
    """This rank's rows of a part, ordered by head. `share` is the range of these rows among the rows of all ranks."""

    memory: Tensor
    owner: AnyWeights | None
    share: slice
    num_rows: int  # number of rows of all ranks

    @classmethod
    def of_heads(cls, memory: Tensor, heads: slice, num_heads: int, owner: AnyWeights | None = None) -> Part:
        size = len(memory) // (heads.stop - heads.start)
        return cls(memory, owner, rows_of_heads(heads, size), num_heads * size)


def joined(name: str, parts: Sequence[Part]) -> Iterator[Row]:
    """Yield the rows of a tensor that stores all heads of the first part, then all heads of the second, and so on."""
    num_rows, first = sum(part.num_rows for part in parts), 0
    for part in parts:
        share = slice(first + part.share.start, first + part.share.stop)
        yield name, Destination(part.memory, (num_rows, *part.memory.shape[1:]), (share,), part.owner)
        first += part.num_rows


def by_key_head(name: str, parts: Sequence[Part], key_heads: slice, num_key_heads: int) -> Iterator[Row]:
    """Yield the rows of a tensor that stores, for one key head after the other, the head's rows of all parts."""
    sizes = [part.num_rows // num_key_heads for part in parts]
    num_rows = sum(part.num_rows for part in parts)
    for slot, head in enumerate(range(key_heads.start, key_heads.stop)):
        first = head * sum(sizes)
        for part, size in zip(parts, sizes, strict=True):
            own = part.memory[slot * size : (slot + 1) * size]
            yield name, some_rows(own, slice(first, first + size), num_rows, part.owner)
            first += size
