"""The interfaces of attention libraries: of grouped-query attention, and of latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from moeserve.ops.interfaces import AttentionShape, ExpandLatents, KeyValueCache
from moeserve.step_inputs import StepInputs

StepKind = Literal["decode", "chunks"]  # "decode": one row in each chunk; "chunks": all other steps


@dataclass(frozen=True)
class AttentionProblem:
    """The facts that decide if a library supports a layer's grouped-query attention."""

    shape: AttentionShape
    block_size: int  # of the KV cache


class LibraryUnusable(Exception):
    """A library cannot be used on this machine. The message is the reason, as a clause."""


class Attend(Protocol):
    """A function like `AttentionBackend.attend`, called only if there is at least one row."""

    def __call__(
        self, query_TNH: Tensor, cache: KeyValueCache, step: StepInputs, sinks_N: Tensor | None = None
    ) -> Tensor: ...


class AttentionLibrary(Protocol):
    """Another library's attention, opened once per model.

    Its functions may share memory, so only one may run at a time.
    """

    @property
    def label(self) -> str:
        """Name and version of the library."""
        ...

    def why_unavailable(self, problem: AttentionProblem, kind: StepKind) -> str | None:
        """Return why the library cannot run steps of this kind, as a clause; None if it can."""
        ...

    def make_attend(self, problem: AttentionProblem, kind: StepKind) -> Attend:
        """Return the function for steps of a supported kind. The function for "decode" can be captured in a CUDA graph.

        Results of rows without a position, which are padding, are undefined; a backend returns zeros for them.
        """
        ...


@dataclass(frozen=True)
class LatentProblem:
    """The facts that decide if a library supports a layer's latent attention.

    With absorbed weights, all heads share a key, whose unrotated part is also the value. With expanded keys and values,
    each head has its own.
    """

    is_absorbed: bool
    num_heads: int  # of this rank
    key_size: int  # without the rotated part
    rotary_size: int
    value_size: int
    dtype: torch.dtype
    scale: float


class AttendAbsorbed(Protocol):
    """A function like `LatentAttentionBackend.attend`, for the steps that it serves."""

    def serves(self, step: StepInputs, max_rows: int) -> bool:
        """Return True if the function supports the chunks of this step that have at most `max_rows` rows."""
        ...

    def __call__(self, query_TNP: Tensor, cache: Tensor, step: StepInputs, max_rows: int) -> Tensor: ...


class AttendExpanded(Protocol):
    """A function like `LatentAttentionBackend.attend_expanded`, for the steps that it serves."""

    def serves(self, step: StepInputs, max_rows: int) -> bool:
        """Return True if the function supports the chunks of this step that have more than `max_rows` rows."""
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
    """Another library's latent attention. Its functions may share memory, and none can be captured in a CUDA graph."""

    @property
    def label(self) -> str:
        """Name and version of the library."""
        ...

    def why_unavailable(self, problem: LatentProblem) -> str | None:
        """Return why the library cannot serve such layers, as a clause; None if it can."""
        ...

    def make_absorbed(self, problem: LatentProblem) -> AttendAbsorbed: ...

    def make_expanded(self, problem: LatentProblem) -> AttendExpanded: ...


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for other devices, on which tests run."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
