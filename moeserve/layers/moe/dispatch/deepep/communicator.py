"""The common interface to DeepEP's two APIs, and rows in float8.

DeepEP's experts are our physical experts: with equally many slots on each rank, expert e is slot e % slots of rank
e // slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moeserve.config.settings import DeepEPApi
from moeserve.layers.moe.dispatch.base import PendingDispatch, StepLimits, share_of_pairs
from moeserve.ops.rows.interface import FLOAT8_BLOCK, Float8Rows, Rows

# B blocks of a row

FLOAT8 = torch.float8_e4m3fn
ROOM_FOR_PAIRS = StepLimits(eager=2**26, captured=2**30)  # limits of rows that DeepEP sends only if they exist
MIN_MAGNITUDE = 1e-10  # minimum magnitude of a block, so that a block of zeros has a scale


@dataclass(frozen=True, kw_only=True)
class DeepEPShape:
    """The shapes of a model's steps, the same for all layers and on all ranks."""

    hidden_size: int
    top_k: int
    dtype: torch.dtype  # the dtype of hidden states
    num_slots: tuple[int, ...]  # physical experts of each rank
    max_tokens_per_rank: int  # maximum number of tokens that a rank brings to a step
    low_latency_tokens: int = 128  # maximum number of tokens per rank in a low-latency step; 0: no such steps
    api: DeepEPApi | None = None  # None: the newest API that the package has
    is_float8: bool = False  # send rows to experts in float8, with a scale for every FLOAT8_BLOCK values

    @property
    def num_ranks(self) -> int:
        return len(self.num_slots)

    @property
    def num_physical(self) -> int:
        return sum(self.num_slots)

    def is_low_latency(self, tokens_per_rank: Sequence[int]) -> bool:
        """True if a step uses the low-latency kernels. The result is the same on all ranks."""
        return self.low_latency_tokens > 0 and max(tokens_per_rank) <= self.low_latency_tokens

    def has_room(self, num_pairs: int, is_padded: bool) -> bool:
        """True if a step can allocate outputs for `num_pairs` pairs, so that the host need not know the number."""
        most = ROOM_FOR_PAIRS.captured if is_padded else ROOM_FOR_PAIRS.eager
        return num_pairs * self.hidden_size * self.dtype.itemsize <= most

    def expected_rows(self, tokens_per_rank: Sequence[int]) -> int:
        """Return the approximate number of pairs that a rank computes."""
        return share_of_pairs(tokens_per_rank, self.top_k, 1, self.num_ranks)


class Event(Protocol):
    """The completion of kernels on DeepEP's stream. An event keeps the kernels' tensors alive: hold it until the wait.

    See `EventOverlap` in deep_ep/utils/event.py (https://github.com/deepseek-ai/DeepEP).
    """

    def current_stream_wait(self) -> None:
        """Make the current stream wait, not the host."""
        ...


class DeepEPCommunicator(Protocol):
    """One buffer of DeepEP, which the layers of a model use in turn.

    All ranks call the same methods in the same order, `close` included. Kernels run after the work that the current
    stream had before the call. Between a call and its wait, no other library's collective may start.
    """

    shape: DeepEPShape
    num_bytes: int  # GPU memory outside torch's allocator

    def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
        """True if a step with `tokens_per_rank` never waits for the host, so that CUDA graphs can capture it."""
        ...

    def prepare(self, tokens_per_rank: Sequence[int]) -> None:
        """Prepare the buffer for a step with `tokens_per_rank` before a graph is replayed. `dispatch` does so itself.

        Collective: all ep ranks.
        """
        ...

    def dispatch(
        self,
        hidden_TD: Rows,
        experts_TK: Tensor,
        weights_TK: Tensor,
        tokens_per_rank: Sequence[int],
        is_padded: bool = False,
    ) -> PendingDispatch:
        """Start to send rows to their experts. Collective: all ep ranks.

        Args:
            hidden_TD: hidden states; `Float8Rows` (which contain the plain rows) only if `shape.is_float8`.
            experts_TK: physical experts, int64. Pairs with -1 are not sent.
            weights_TK: float32.
            is_padded: the step is padded for a graph.
        """
        ...

    def close(self) -> None:
        """Free the buffer. Collective: all ep ranks."""
        ...


@dataclass(frozen=True)
class PendingCombine:
    """A combine in progress."""

    output_TD: Tensor
    receive: Callable[[], None]  # makes the current stream wait, not the host

    def wait(self) -> Tensor:
        self.receive()
        return self.output_TD


def to_float8(rows_TD: Rows) -> tuple[Tensor, Tensor]:
    """Return rows in float8 (e4m3) [T, D], and the scale of each block of 128 values: [T, B] float32."""
    if isinstance(rows_TD, Float8Rows):
        return rows_TD.codes, rows_TD.scales
    blocks_TBF = rows_TD.float().unflatten(1, (rows_TD.shape[1] // FLOAT8_BLOCK, FLOAT8_BLOCK))
    scales_TB = blocks_TBF.abs().amax(dim=2).clamp(min=MIN_MAGNITUDE) / torch.finfo(FLOAT8).max
    return (blocks_TBF / scales_TB[:, :, None]).to(FLOAT8).flatten(1), scales_TB


def received_rows(received: Tensor | tuple[Tensor, Tensor], dtype: torch.dtype) -> Rows:
    """Return received rows [..., D], or codes [..., D] with scales [..., B], in the form that experts take."""
    return received if isinstance(received, Tensor) else Float8Rows(*received, dtype)
