"""The dispatcher of one layer that uses DeepEP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.base import PendingDispatch
from moeserve.layers.moe.dispatch.deepep.communicator import DeepEPCommunicator
from moeserve.layers.moe.dispatch.expert_copies import ExpertCopies
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.router import Routing
from moeserve.ops.rows.interface import Rows, plain_rows
from moeserve.step_inputs import StepInputs


class DeepEPDispatcher:
    """Sends tokens through DeepEP's kernels. See `Dispatcher` for the contract.

    A step uses the low-latency kernels if no rank brings more than `low_latency_tokens` to it. With the legacy API, the
    tokens of such a step arrive as `SlottedTokens`, whose unused slots have arbitrary contents; all other tokens arrive
    as `PackedTokens`. A rank may add the outputs of a token before it sends them; see the two communicators.
    """

    def __init__(
        self, group: GroupCoordinator, placement: Placement, context: BuildContext, *, communicator: DeepEPCommunicator
    ) -> None:
        """
        Args:
            placement: the placement of this layer, with equally many slots on each rank.
            communicator: the communicator that all layers share.
        """
        assert placement.num_slots == communicator.shape.num_slots, (placement.num_slots, communicator.shape.num_slots)
        self.group = group
        self.communicator = communicator
        self.expert_copies = ExpertCopies(placement, group.rank_in_group, group.node_of_rank, context)
        self.takes_float8 = communicator.shape.is_float8

    def dispatch(self, hidden_TD: Rows, routing: Routing, step: StepInputs) -> PendingDispatch:
        rank, shape = self.group.rank_in_group, self.communicator.shape
        plain_TD = plain_rows(hidden_TD)
        assert len(hidden_TD) == step.tokens_per_rank[rank], (len(hidden_TD), step.tokens_per_rank)
        assert max(step.tokens_per_rank) <= max(shape.max_tokens_per_rank, shape.low_latency_tokens)
        assert plain_TD.shape[1] == shape.hidden_size
        assert hidden_TD.dtype == shape.dtype
        assert routing.experts_TK.shape[1] == shape.top_k
        experts_TK = self.expert_copies.choose(routing.experts_TK, first_token=sum(step.tokens_per_rank[:rank]))
        return self.communicator.dispatch(
            plain_TD.contiguous() if isinstance(hidden_TD, Tensor) else hidden_TD,
            experts_TK.to(torch.int64).contiguous(),
            routing.weights_TK.float().contiguous(),
            step.most_per_rank or step.tokens_per_rank,  # both halves of a step use the same kernels
            is_padded=step.padding is not None,
        )

    def is_capturable(self, tokens_per_rank: Sequence[int], bytes_per_token: int) -> bool:
        return self.communicator.is_capturable(tokens_per_rank)
