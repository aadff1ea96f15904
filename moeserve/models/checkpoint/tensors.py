"""Tensors of a checkpoint: their description in the header of a shard, and tensors that are not encoded.

Encoded weights are decoded to float32, slice by slice. Formats may also specify how to quantise activations, which is
ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from torch import Tensor

from moeserve.errors import CheckpointError

PLAIN_DTYPES = ("F32", "F16", "BF16")
INTEGER_DTYPES = ("I64", "I32")  # dtypes of tables, such as the experts of each token id


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor, described by the header of its shard."""

    name: str
    shard: Path
    dtype: str  # safetensors' name, such as "BF16"
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes in the shard. The dtype's safetensors name contains the number of bits of a value."""
        bits = 8 if self.dtype == "BOOL" else int(re.findall(r"\d+", self.dtype)[0])
        return math.prod(self.shape) * bits // 8

    def wrong(self, why: str) -> CheckpointError:
        """Return an error that names shard and tensor, followed by `why`."""
        return CheckpointError(f"{self.shard}: tensor {self.name!r} {why}")


ReadRows = Callable[[StoredTensor, int, int], Tensor]  # (tensor, start, stop) -> slices of the first dimension


class CheckpointTensor(Protocol):
    """A tensor of the model, stored plain or encoded."""

    is_encoded: ClassVar[bool]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape after decoding. Valid only after `check`."""

    @property
    def shard(self) -> Path:
        """The shard that stores the tensor, or the largest part of it."""

    def check(self) -> None:
        """Raise CheckpointError if dtypes or shapes in the headers are not supported."""

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        """Return a slice [stop - start, *shape[1:]] of the first dimension. Encoded tensors are decoded to float32."""


@dataclass(frozen=True)
class PlainTensor:
    """A tensor that is not encoded."""

    is_encoded: ClassVar[bool] = False
    stored: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def shard(self) -> Path:
        return self.stored.shard

    @property
    def is_integer(self) -> bool:
        return self.stored.dtype in INTEGER_DTYPES

    def check(self) -> None:
        if self.stored.dtype not in PLAIN_DTYPES + INTEGER_DTYPES:
            raise self.stored.wrong(f"is {self.stored.dtype}; supported: {', '.join(PLAIN_DTYPES)}")

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        return read_rows(self.stored, start, stop)
