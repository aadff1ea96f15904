"""The contract of dispatchers, and the two layouts of dispatched tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moeserve.layers.moe.dispatch.expert_copies import ExpertCopies
from moeserve.layers.moe.router import Routing
from moeserve.ops.pairs.interface import PairKernels
from moeserve.ops.products.interface import Gather, RowGroups
from moeserve.ops.rows.interface import Rows, plain_rows
from moeserve.step_inputs import StepInputs

# R rows (one per token and chosen expert)


@dataclass(frozen=True)
class PackedTokens:
    """Rows sorted by local expert."""

    rows_RD: Rows  # the rows, or with `gather` the source of the rows
    groups: RowGroups  # the rows of each local expert
    gather: Gather | None = None  # set if kernels gather the rows themselves
    out_RD: Tensor | None = None  # where experts must write their outputs; None: anywhere


@dataclass(frozen=True)
class SlottedTokens:
    """Equally many slots for each local expert, so shapes do not depend on the routing."""

    slots_eSD: Rows  # each expert's rows are in its first slots; other slots are neither computed nor read
    groups: RowGroups  # the rows of each local expert


class PendingOutput(Protocol):
    """A combine in progress."""

    def wait(self) -> Tensor: ...  # [T, D], in the dtype of the hidden states


@dataclass(frozen=True)
class ReadyOutput:
    """A complete combine."""

    hidden_TD: Tensor

    def wait(self) -> Tensor:
        return self.hidden_TD


@dataclass(frozen=True)
class Dispatched:
    """The tokens that this rank's experts compute, and the function that sends their outputs back and adds them up.

    `combine` takes the outputs of the experts, in the same layout as the tokens. If the tokens have an `out_RD`, the
    outputs must be in this memory. `combine` is collective: all ep ranks.
    """

    tokens: PackedTokens | SlottedTokens
    combine: Callable[[Tensor], PendingOutput]
    is_counted: bool = False  # the rows of each expert have been added to the dispatcher's load


@dataclass(frozen=True)
class StepLimits:
    """Limits, in bytes, of steps that run although the host does not know how many rows each rank computes.

    Such a step allocates one row for each pair of a token and a chosen expert, and the limits apply to the bytes of
    these rows. The memory of graphs is measured at the start; the memory of eager steps is not.
    """

    eager: int  # limit of eager steps
    captured: int  # limit of steps that are padded for a graph


def pack(
    pairs: PairKernels,
    source_ND: Rows,
    pair_of_row_R: Tensor,
    top_k: int,
    counts_e: Tensor,
    expected_rows: int | None = None,
    *,
    gathers_late: bool,
) -> PackedTokens:
    """Pack the rows of (token, expert) pairs for the expert kernels. The pairs are sorted by local expert.

    Args:
        expected_rows: estimate of the number of rows that count, if spare rows with pair -1 follow; None: no spare
            rows follow.
        gathers_late: True: expert kernels gather the rows themselves; see `Backend.products_gather_rows`.
    """
    groups = RowGroups(counts_e, expected_rows is not None, expected_rows)
    if gathers_late:
        return PackedTokens(source_ND, groups, Gather(pair_of_row_R, top_k))
    return PackedTokens(pairs.gather(plain_rows(source_ND), pair_of_row_R, top_k), groups)


def share_of_pairs(tokens_per_rank: Sequence[int], top_k: int, num_own: int, num_all: int) -> int:
    """Return the number of pairs that `num_own` of `num_all` slots get if pairs are spread evenly, rounded up.

    Pairs of padding rows are included, because the host does not know their number.
    """
    return -(-sum(tokens_per_rank) * top_k * num_own // num_all)


class PendingDispatch(Protocol):
    """A dispatch in progress."""

    def wait(self) -> Dispatched: ...


class Dispatcher(Protocol):
    """Sends each token to its experts and returns their outputs, weighted and summed.

    The routing names logical experts; the dispatcher chooses among their copies. A pair with expert -1 is padding,
    which is neither sent nor counted, and adds nothing.

    `Dispatched.combine` applies the router's weights; expert kernels do not. `combine` adds a token's outputs in
    float32 and in top-k order, so the sum does not depend on the ranks that computed the outputs or on the order of
    arrival. Unless the context is batch-invariant, a rank may first add and round the outputs of its own experts.

    All ranks of the group call `dispatch`, `wait`, `combine` and `wait` in this order, also without tokens. The number
    of each rank's tokens is in `step.tokens_per_rank`. Calls for the other half of a step may come in between, in the
    same order on all ranks.
    """

    @property
    def expert_copies(self) -> ExpertCopies:
        """The copies of each expert, which `place` may change between steps."""
        ...

    @property
    def takes_float8(self) -> bool:
        """True if FP8 rows reach the experts unchanged. `Float8Rows` must then contain the plain rows too."""
        ...

    def dispatch(self, hidden_TD: Any, routing: Routing, step: StepInputs) -> PendingDispatch:
        """Start to send a row to each chosen expert. `hidden_TD` is a tensor, or `Float8Rows` if `takes_float8`."""
        ...

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        """True if a CUDA graph can capture a padded step with `tokens_per_rank`, and saves time. The same on all ranks.

        Args:
            bytes_per_token: bytes of the rows of one token, which has one row for each chosen expert.
        """
        ...
