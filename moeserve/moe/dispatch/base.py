"""What a dispatcher promises, and the layout of the tokens that arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from moeserve.moe.router import Routing
from moeserve.step_inputs import StepInputs

# T tokens, D model width, K experts per token, R rows (one per token and expert chosen), e local experts

Ticket = TypeVar("Ticket")


@dataclass(frozen=True)
class PackedTokens:
    """Rows sorted by local expert, each expert's rows together."""

    rows_RD: Tensor
    counts_e: Tensor  # int64: how many rows each local expert has


@dataclass(frozen=True)
class Arrived(Generic[Ticket]):
    """The tokens that this rank's experts compute, and what is needed to send the results back."""

    tokens: PackedTokens
    ticket: Ticket


class Pending(Protocol[Ticket]):
    """A dispatch under way."""

    def wait(self) -> Arrived[Ticket]: ...


class PendingOutput(Protocol):
    """A combine under way."""

    def wait(self) -> Tensor: ...  # [T, D], the dtype of the hidden states


class Dispatcher(Protocol[Ticket]):
    """Carries each token to its experts and brings the outputs back, weighted and summed.

    The router's weights ride in the ticket: expert kernels never see them. `combine` adds a token's contributions
    in float32 and in top-k order, so the sum does not depend on who computed them or when they came.
    """

    def dispatch(self, hidden_TD: Tensor, routing: Routing, step: StepInputs) -> Pending[Ticket]: ...

    def combine(self, output_RD: Tensor, ticket: Ticket) -> PendingOutput: ...
