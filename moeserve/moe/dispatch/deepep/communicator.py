"""What is asked of DeepEP, the same of both its interfaces; and rows in float8. Knows no placement and no replicas.

DeepEP's experts are our physical ones: with as many slots on each rank, expert e is slot e % slots of rank e // slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moeserve.moe.dispatch.base import Pending, PendingOutput, share_of_pairs

# T tokens of this rank, D model width, K experts per token, B blocks of a row

FLOAT8 = torch.float8_e4m3fn
FLOAT8_BLOCK = 128  # neighbours in a row that share a scale, as DeepEP's kernels have it
MIN_MAGNITUDE = 1e-10  # of a block; so a block of zeros has a scale


@dataclass(frozen=True, kw_only=True)
class DeepEPShape:
    """What the layers of a model bring to one buffer, the same for all of them and on all ranks."""

    hidden_size: int
    top_k: int
    dtype: torch.dtype  # of the hidden states
    num_slots: tuple[int, ...]  # physical experts of each rank
    max_tokens_per_rank: int  # that a rank brings to a step
    low_latency_tokens: int = 128  # steps in which no rank has more take the way for few tokens; 0: none does
    is_float8: bool = False  # whether rows travel to experts in float8, with a scale for every FLOAT8_BLOCK values

    @property
    def num_ranks(self) -> int:
        return len(self.num_slots)

    @property
    def num_physical(self) -> int:
        return sum(self.num_slots)

    def is_low_latency(self, tokens_per_rank: Sequence[int]) -> bool:
        """Which way a step takes: from what all ranks know alike, so they answer alike."""
        return self.low_latency_tokens > 0 and max(tokens_per_rank) <= self.low_latency_tokens

    def expected_rows(self, tokens_per_rank: Sequence[int]) -> int:
        """About how many pairs a rank computes: all have as many slots."""
        return share_of_pairs(tokens_per_rank, self.top_k, 1, self.num_ranks)


class Event(Protocol):
    """When kernels on DeepEP's own stream are done. It keeps what they read and write alive, so it is kept until then.

    See `EventOverlap` in deep_ep/utils/event.py (https://github.com/deepseek-ai/DeepEP).
    """

    def current_stream_wait(self) -> None:
        """The current stream waits, and not the host."""
        ...


class DeepEPCommunicator(Protocol):
    """One buffer of DeepEP, which all layers of a model share: their steps pass through it one after the other.

    All ranks call the same methods in the same order, `close` included. Kernels run on DeepEP's stream, behind what the
    current stream was given before the call; what follows there must come after the wait. So a rank's order of calls is
    the order of its kernels, which must not be mixed with other libraries' collectives between a call and its wait.
    """

    shape: DeepEPShape
    num_bytes: int  # of the GPU's memory, beyond what torch's allocator knows

    def is_capturable(self, tokens_per_rank: Sequence[int]) -> bool:
        """Whether such a step runs without a look at the host, so that a CUDA graph can hold it."""
        ...

    def prepare(self, tokens_per_rank: Sequence[int]) -> None:
        """Makes the buffer fit for such a step. `dispatch` does so itself; a graph that is replayed cannot.

        Collective: all ep ranks.
        """
        ...

    def dispatch(
        self, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, tokens_per_rank: Sequence[int]
    ) -> Pending[Any]:
        """
        Args:
            experts_TK: physical ones, int64; -1 is sent nowhere.
            weights_TK: float32.
        """
        ...

    def combine(self, output: Tensor, handle: Any) -> PendingOutput: ...

    def close(self) -> None:
        """Gives the buffer back, at an orderly end. Collective: all ep ranks."""
        ...


@dataclass(frozen=True)
class Returning:
    """A combine under way."""

    output_TD: Tensor
    event: Event

    def wait(self) -> Tensor:
        self.event.current_stream_wait()
        return self.output_TD


def to_float8(rows_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in float8 (e4m3) [T, D], and what each block of 128 values is to be multiplied by: [T, B] float32."""
    blocks_TBF = rows_TD.float().unflatten(1, (rows_TD.shape[1] // FLOAT8_BLOCK, FLOAT8_BLOCK))
    scales_TB = blocks_TBF.abs().amax(dim=2).clamp(min=MIN_MAGNITUDE) / torch.finfo(FLOAT8).max
    return (blocks_TBF / scales_TB[:, :, None]).to(FLOAT8).flatten(1), scales_TB


def from_float8(received: Tensor | tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Rows [..., D] as they were sent, or of float8 and the scales [..., B] of its blocks.

    One pass over memory more. A product that reads float8 with scales needs none: what arrives would be a third kind of
    tokens, with both tensors in it, and this would not be called.
    """
    if isinstance(received, Tensor):
        return received
    rows, scales = received
    blocks = rows.float().unflatten(-1, (scales.shape[-1], FLOAT8_BLOCK))
    return (blocks * scales[..., None]).flatten(-2).to(dtype)
