"""What a dispatcher promises, and the two layouts of the tokens that arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from moeserve.moe.dispatch.expert_copies import ExpertCopies
from moeserve.moe.router import Routing
from moeserve.ops.products import Gather
from moeserve.step_inputs import StepInputs

# T tokens, D model width, R rows (one per token and expert chosen), S slots for the rows of one expert, e local experts

Handle = TypeVar("Handle")


@dataclass(frozen=True)
class PackedTokens:
    """Rows sorted by local expert, each expert's rows together."""

    rows_RD: Tensor  # or, with `gather`, what they are to be fetched from
    counts_e: Tensor  # int64: how many rows each local expert has
    has_spare_rows: bool = False  # whether more rows may follow the last expert's, which nobody computes
    gather: Gather | None = None  # for kernels that fetch rows as they read them
    expected_rows: int | None = None  # about how many rows count, where most are spare; None: nearly all


@dataclass(frozen=True)
class SlottedTokens:
    """As many slots for each local expert, whatever its rows: shapes do not depend on the routing."""

    slots_eSD: Tensor  # each expert's rows first, in its slots; what lies in the others, or comes of it, is not read
    counts_e: Tensor  # int64: how many rows each local expert has
    expected_rows: int | None = None  # about how many rows all experts have together; None: nearly every slot


@dataclass(frozen=True)
class Arrived(Generic[Handle]):
    """The tokens that this rank's experts compute, and what is needed to send the results back."""

    tokens: PackedTokens | SlottedTokens
    handle: Handle


def share_of_pairs(tokens_per_rank: Sequence[int], top_k: int, num_own: int, num_all: int) -> int:
    """About how many pairs of a step come to `num_own` of `num_all` slots, if as many come to each.

    Padding counts: the host knows a step's rows, and only the GPU knows which of them stand for no token.
    """
    return -(-sum(tokens_per_rank) * top_k * num_own // num_all)


class Pending(Protocol[Handle]):
    """A dispatch under way."""

    def wait(self) -> Arrived[Handle]: ...


class PendingOutput(Protocol):
    """A combine under way."""

    def wait(self) -> Tensor: ...  # [T, D], the dtype of the hidden states


class Dispatcher(Protocol[Handle]):
    """Carries each token to its experts and brings the outputs back, weighted and summed.

    Routing names logical experts; the dispatcher knows where they live, and which of several copies a token goes to.
    Expert -1 is padding: it is sent nowhere, counted nowhere, and adds nothing.

    The router's weights ride in the handle: expert kernels never see them. `combine` adds a token's contributions
    in float32 and in top-k order, so the sum does not depend on who computed them or when they came.

    All ranks of the group call `dispatch`, `wait`, `combine` and `wait` in this order, with tokens or without; each
    rank's tokens are as many as `step.tokens_per_rank` says.
    """

    @property
    def expert_copies(self) -> ExpertCopies:
        """Where experts live, which may change between steps."""
        ...

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> Pending[Handle]: ...

    def combine(self, output: Tensor, handle: Handle) -> PendingOutput:
        """`output` has the layout of the tokens that arrived."""
        ...

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        """Whether a CUDA graph can hold such a step, padded, and is worth it. All ranks answer alike.

        Args:
            bytes_per_token: of the rows of all of a token's experts.
        """
        ...
