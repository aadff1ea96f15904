"""The interfaces of attention libraries: of grouped-query attention, and of latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from moeserve.ops.interfaces import AttentionShape, ExpandLatents, KeyValueCache
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


@dataclass(frozen=True)
class LatentProblem:
    """The facts on which a library's support of latent attention depends.

    Absorbed, all heads share a key, whose unrotated part is also the value. Expanded, each has its own.
    """

    is_absorbed: bool
    num_heads: int  # of this rank
    key_size: int  # without the rotated part
    rotary_size: int
    value_size: int
    dtype: torch.dtype
    scale: float


class AttendAbsorbed(Protocol):
    """See `LatentAttentionBackend.attend`."""

    def serves(self, step: StepInputs, max_rows: int) -> bool:
        """Return True if it can attend from the chunks of this step that have at most `max_rows` rows."""
        ...

    def __call__(self, query_TNP: Tensor, cache: Tensor, step: StepInputs, max_rows: int) -> Tensor: ...


class AttendExpanded(Protocol):
    """See `LatentAttentionBackend.attend_expanded`."""

    def serves(self, step: StepInputs, max_rows: int) -> bool:
        """Return True if it can attend from the chunks of this step that have more than `max_rows` rows."""
        ...

    def __call__(
        self,
        query_TNK: Tensor,
        query_TNE: Tensor,
        cache: Tensor,
        step: StepInputs,
        max_rows: int,
        expand: ExpandLatents,
        out_TNV: Tensor,
    ) -> None: ...


class LatentLibrary(Protocol):
    """Another library's latent attention. Its functions may share memory, and none works in a CUDA graph."""

    @property
    def label(self) -> str:
        """Name and version."""
        ...

    def why_unavailable(self, problem: LatentProblem) -> str | None:
        """Return why the library cannot serve such layers, as a clause; None if it can."""
        ...

    def make_absorbed(self, problem: LatentProblem) -> AttendAbsorbed: ...

    def make_expanded(self, problem: LatentProblem) -> AttendExpanded: ...


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for a device that stands in for one in tests."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
