"""Side streams, which overlap computations in a second CUDA stream on a GPU. Other devices compute at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pending:
    """A result that may still be being computed in another CUDA stream."""

    result: Tensor
    stream: torch.cuda.Stream | None = None

    def wait(self) -> Tensor:
        """Return the result, ready for the caller's stream."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        return self.result


class SideStream(Protocol):
    """An executor that overlaps computations with the caller's work if the device supports it."""

    def start(self, compute: Callable[[Any], Tensor], input: Any) -> Pending:
        """Start compute(input). Call `wait` on the returned object before using the result."""
        ...


class InlineStream:
    """A `SideStream` for devices without streams: `start` computes at once."""

    def start(self, compute: Callable[[Any], Tensor], input: Any) -> Pending:
        return Pending(compute(input))


class CudaSideStream:
    """A second stream of a GPU, which all layers share.

    Tensors do not need record_stream(), because the caller waits before it frees the input, and the stream waits for
    the caller before it reuses the memory of an earlier result.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def start(self, compute: Callable[[Any], Tensor], input: Any) -> Pending:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return Pending(compute(input), self._stream)
