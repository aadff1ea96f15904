"""Latent attention on a GPU by another library, for the layer shapes and steps that it supports."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from moeserve.ops.latent_attention.interface import ExpandLatents, LatentAttentionBackend, LatentShape
from moeserve.step_inputs import StepInputs

# T tokens, N query heads; K, E, L, P and V: see `LatentAttentionBackend`

logger = logging.getLogger(__name__)

Attend = TypeVar("Attend")


class LatentChoice:
    """The choice between our own kernels and one library's for the latent attention of a model's layers.

    The head sizes of a layer are known only at its first call. Layers of one shape share a function and its plan.
    """

    name = "latent library"  # of the implementation

    def __init__(self, library: LatentLibrary) -> None:
        self._library = library
        self.absorbed = functools.cache(functools.partial(self._choose, library.make_absorbed))
        self.expanded = functools.cache(functools.partial(self._choose, library.make_expanded))

    def attention(self, own: LatentAttentionBackend, shape: LatentShape) -> LatentAttentionBackend:
        """Return the attention of a layer that `own` serves where the library cannot."""
        return LibraryLatentAttention(own, self, shape.scale, shape.latent_size)

    def _choose(self, make: Callable[[LatentProblem], Attend], problem: LatentProblem) -> Attend | None:
        """Return the library's function, or None if our own kernels must be used."""
        if reason := self._library.why_unavailable(problem):
            logger.info("latent attention (%s) runs on our kernels, not %s: %s", problem, self._library.label, reason)
            return None
        return make(problem)


class LibraryLatentAttention:
    """A `LatentAttentionBackend` of a library. Steps with padding, as in CUDA graphs, run on our kernels."""

    takes_all_rows = False

    def __init__(self, own: LatentAttentionBackend, choice: LatentChoice, scale: float, latent_size: int) -> None:
        self._own = own
        self._choice = choice
        self._scale = scale
        self._latent_size = latent_size
        self.write = own.write
        self.attend_chosen = own.attend_chosen

    def attend(self, query_TNP: Tensor, cache: Tensor, step: StepInputs, max_rows: int | None = None) -> Tensor:
        num_heads, vector_size = query_TNP.shape[1:]
        rotary_size, size = vector_size - self._latent_size, self._latent_size
        problem = LatentProblem(True, num_heads, size, rotary_size, size, query_TNP.dtype, self._scale)
        absorbed: AttendAbsorbed | None = self._choice.absorbed(problem)
        most = step.max_rows_per_chunk if max_rows is None else max_rows
        if absorbed is not None and step.padding is None and absorbed.serves(step, most):
            return absorbed(query_TNP, cache, step, most)
        return self._own.attend(query_TNP, cache, step, max_rows)

    def attend_expanded(
        self,
        query_TNK: Tensor,
        query_TNE: Tensor,
        cache: Tensor,
        step: StepInputs,
        max_rows: int,
        expand: ExpandLatents,
        out_TNV: Tensor,
    ) -> None:
        num_heads, key_size = query_TNK.shape[1:]
        sizes = (num_heads, key_size, query_TNE.shape[2], out_TNV.shape[2])
        expanded: AttendExpanded | None = self._choice.expanded(
            LatentProblem(False, *sizes, query_TNK.dtype, self._scale)
        )
        attend = self._own.attend_expanded
        if expanded is not None and step.padding is None and expanded.serves(step, max_rows):
            attend = expanded
        attend(query_TNK, query_TNE, cache, step, max_rows, expand, out_TNV)


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
