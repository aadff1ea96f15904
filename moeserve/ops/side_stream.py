"""Work that may run beside other work: on a GPU in a stream of its own, elsewhere at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """Something that is being computed."""

    def wait(self) -> Tensor:
        """The result, for whatever comes next in the stream of the caller."""
        ...


class Aside(Protocol):
    """Starts `compute`, beside whatever the caller does until it waits."""

    def __call__(self, compute: Callable[[Tensor], Tensor], input: Tensor) -> Pending: ...


@dataclass(frozen=True)
class Computed:
    result: Tensor

    def wait(self) -> Tensor:
        return self.result


def at_once(compute: Callable[[Tensor], Tensor], input: Tensor) -> Computed:
    """Beside nothing."""
    return Computed(compute(input))


@dataclass(frozen=True)
class InStream:
    result: Tensor
    stream: torch.cuda.Stream

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_stream(self.stream)
        return self.result


class SideStream:
    """A second stream of a GPU.

    Memory is safe without more ado: whoever uses it waits, before freeing what went in; and what comes out is only
    written again after the next start, for which the stream waits until all is read.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def __call__(self, compute: Callable[[Tensor], Tensor], input: Tensor) -> InStream:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return InStream(compute(input), self._stream)


@functools.cache
def choose_aside(device: str) -> Aside:
    """How a device type computes beside other work: one stream serves all layers."""
    return SideStream() if device == "cuda" else at_once
