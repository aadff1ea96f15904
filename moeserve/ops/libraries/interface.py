"""The interface of an attention library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from moeserve.ops.interfaces import AttentionShape, KeyValueCache
from moeserve.step_inputs import StepInputs

StepKind = Literal["decode", "chunks"]  # one row in each chunk; anything else


@dataclass(frozen=True)
class AttentionProblem:
    """The facts on which a library's support depends."""

    shape: AttentionShape
    block_size: int  # of the KV cache


class LibraryUnusable(Exception):
    """A library cannot be used on this machine. The message is the reason, as a clause."""


class Attend(Protocol):
    """See `AttentionBackend.attend`. There is at least one row."""

    def __call__(
        self, query_TNH: Tensor, cache: KeyValueCache, step: StepInputs, sinks_N: Tensor | None = None
    ) -> Tensor: ...


class AttentionLibrary(Protocol):
    """Another library's attention, opened once for a model. Its functions may share memory: only one runs at a time."""

    @property
    def label(self) -> str:
        """Name and version."""
        ...

    def why_unavailable(self, problem: AttentionProblem, kind: StepKind) -> str | None:
        """Return why the library cannot run steps of this kind, as a clause; None if it can."""
        ...

    def make_attend(self, problem: AttentionProblem, kind: StepKind) -> Attend:
        """Return the function for steps of a kind that it can serve. The one for "decode" works in a CUDA graph too.

        Results of rows without a position are undefined, where those of a backend are zeros: such rows are padding.
        """
        ...


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for a device that stands in for one in tests."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
