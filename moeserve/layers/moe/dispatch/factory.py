"""Factories of dispatchers. A rank opens one factory, which makes a dispatcher per layer and is closed at the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from moeserve.config.engine_config import EngineConfig
from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.distributed.transport import TransportUnavailable
from moeserve.errors import SettingsError
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.base import Dispatcher
from moeserve.layers.moe.dispatch.local import LocalDispatcher
from moeserve.layers.moe.placement.placement import Placement

if TYPE_CHECKING:
    from moeserve.layers.moe.dispatch.shared_rows import SharedRows

logger = logging.getLogger(__name__)


class DispatcherFactory(Protocol):
    """Makes the dispatchers of one rank, and owns the buffers that these dispatchers share."""

    @property
    def group(self) -> GroupCoordinator:
        """The ep group."""
        ...

    def make(self, placement: Placement, load_e: Tensor | None = None) -> Dispatcher:
        """Return the dispatcher of a layer whose experts are placed as in `placement`.

        Args:
            load_e: [e] int64. A dispatcher adds the number of rows of each local expert to it, if counting needs no
                kernel of its own; see `Dispatched.is_counted`.
        """
        ...

    def prepare(self, tokens_per_rank: Sequence[int]) -> None:
        """Prepare shared buffers before a captured step is replayed. Collective: all ep ranks."""
        ...

    def reopen(self) -> None:
        """Share buffers again after the group was connected again. Collective: all ep ranks."""
        ...

    def close(self) -> None:
        """Release shared buffers. Collective: all ep ranks."""
        ...


@dataclass(frozen=True)
class TorchDispatchers:
    """Makes dispatchers that use the group's own collectives. Only `shared_memory` dispatchers share memory."""

    name: Literal["local", "allgather", "all_to_all", "shared_memory"]
    group: GroupCoordinator
    context: BuildContext
    rows: SharedRows | None = None  # the memory that dispatchers share with name="shared_memory"

    def make(self, placement: Placement, load_e: Tensor | None = None) -> Dispatcher:
        if self.name == "local":
            return LocalDispatcher(placement, self.context, load_e)
        # Imported by engines of several ranks only, as DeepEP below.
        from moeserve.layers.moe.dispatch.all_to_all import AllToAllDispatcher
        from moeserve.layers.moe.dispatch.allgather import AllGatherDispatcher, DispatcherBySize
        from moeserve.layers.moe.dispatch.shared_rows import SharedRowsDispatcher

        small = AllGatherDispatcher(self.group, placement, self.context)
        match self.name:
            case "allgather":
                return small
            case "all_to_all":
                return DispatcherBySize(small, AllToAllDispatcher(small.exchange))
            case "shared_memory":
                assert self.rows is not None
                return DispatcherBySize(small, SharedRowsDispatcher(small.exchange, self.rows))

    def prepare(self, tokens_per_rank: Sequence[int]) -> None:
        """Return at once: any step may follow any other."""

    def reopen(self) -> None:
        if self.rows is not None:
            self.rows.share_again(self.group)

    def close(self) -> None:
        """Return at once: there is nothing to release together with other ranks."""


@dataclass(frozen=True, kw_only=True)
class DispatchShape:
    """The shapes of the tensors that all layers of a model send, the same on all ranks."""

    hidden_size: int
    top_k: int
    dtype: torch.dtype  # the dtype of hidden states
    num_slots: tuple[int, ...]  # physical experts of each rank
    max_tokens_per_rank: int  # maximum number of tokens that a rank brings to a step


def open_dispatchers(
    config: EngineConfig, shape: DispatchShape, group: GroupCoordinator, context: BuildContext
) -> DispatcherFactory:
    """Open the dispatchers that the config chooses. Collective: all ep ranks.

    With dispatcher="auto", `all_to_all` replaces a dispatcher that cannot be used, and a log message gives the reason.

    Raises:
        SettingsError: the config requires a dispatcher that cannot be used.
    """
    experts = config.experts
    if experts.dispatcher == "shared_memory":
        from moeserve.layers.moe.dispatch.shared_rows import share_rows

        max_tokens = shape.max_tokens_per_rank * group.world_size
        try:
            rows = share_rows(group, max_tokens, shape.top_k, shape.hidden_size, shape.dtype)
        except TransportUnavailable as error:
            if not experts.dispatcher_may_change:
                raise SettingsError(
                    f"dispatcher='shared_memory', but ranks cannot share memory: {error}; use 'all_to_all' or 'auto'"
                ) from error
            if group.rank_in_group == 0:
                logger.info("the dispatcher is all_to_all, because ranks cannot share memory: %s", error)
            return TorchDispatchers("all_to_all", group, context)
        return TorchDispatchers("shared_memory", group, context, rows)
    if experts.dispatcher != "deepep":
        return TorchDispatchers(experts.dispatcher, group, context)
    from moeserve.layers.moe.dispatch.deepep.communicator import DeepEPShape
    from moeserve.layers.moe.dispatch.deepep.factory import open_deepep

    deepep_shape = DeepEPShape(
        **asdict(shape),
        low_latency_tokens=experts.deepep_low_latency_tokens,
        api=experts.deepep_api,
        is_float8=experts.deepep_float8,
    )
    opened = open_deepep(
        deepep_shape,
        group,
        context,
        is_required=not experts.dispatcher_may_change,
        is_deterministic=config.compute.enforce_eager,  # graphs cannot hold the sort that makes results repeatable
    )
    return opened or TorchDispatchers("all_to_all", group, context)
