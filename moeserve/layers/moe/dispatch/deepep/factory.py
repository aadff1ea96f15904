"""Opens DeepEP on all ranks of a model, or on none, and makes the dispatchers of its layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moeserve.config.settings import DeepEPApi
from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.errors import SettingsError
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.deepep.communicator import DeepEPCommunicator, DeepEPShape
from moeserve.layers.moe.dispatch.deepep.dispatcher import DeepEPDispatcher
from moeserve.layers.moe.dispatch.deepep.elastic import ElasticCommunicator
from moeserve.layers.moe.dispatch.deepep.legacy import LegacyCommunicator
from moeserve.layers.moe.dispatch.deepep.support import CLASSES, import_deepep, offered_api, why_unsupported
from moeserve.layers.moe.placement.placement import Placement

logger = logging.getLogger(__name__)

OTHERS_REFUSE = "another rank cannot use it; see its log"


@dataclass(frozen=True)
class DeepEPDispatchers:
    """See `DispatcherFactory`. One buffer serves all layers."""

    communicator: DeepEPCommunicator
    group: GroupCoordinator
    context: BuildContext

    def make(self, placement: Placement, load_e: Tensor | None = None) -> DeepEPDispatcher:
        return DeepEPDispatcher(self.group, placement, self.context, communicator=self.communicator)

    def prepare(self, tokens_per_rank: Sequence[int]) -> None:
        self.communicator.prepare(tokens_per_rank)

    def reopen(self) -> None:
        raise AssertionError("ranks with DeepEP are started again together")

    def close(self) -> None:
        self.communicator.close()


def open_deepep(
    shape: DeepEPShape, group: GroupCoordinator, context: BuildContext, *, is_required: bool, is_deterministic: bool
) -> DeepEPDispatchers | None:
    """Return the factory; None if another dispatcher must be used. Collective: all ep ranks.

    Args:
        is_required: the user chose DeepEP by name, so there is no fallback.
        is_deterministic: see `ElasticCommunicator`.

    Raises:
        SettingsError: DeepEP is required and cannot be used.
    """
    try:
        deep_ep = choose_package(shape, group, context.device)
        process_group = group.make_torch_group()
        communicator = open_communicator(
            deep_ep, shape, process_group, group, context, is_deterministic=is_deterministic
        )
    except SettingsError as error:
        if is_required:
            raise
        logger.info("rank %d uses all_to_all: %s", group.rank, error)
        return None
    return DeepEPDispatchers(communicator, group, context)


def choose_package(
    shape: DeepEPShape, group: GroupCoordinator, device: torch.device, deep_ep: ModuleType | None = None
) -> ModuleType:
    """Return the package if all ranks can use it through the same API. Collective: all ep ranks.

    Args:
        deep_ep: the package; None: import it.

    Raises:
        SettingsError: on all ranks, if one of them cannot use the package.
    """
    reason = why_unsupported(shape, device, group.node_of_rank, deep_ep)
    package, api_number = None, 0
    if reason is None:
        package = deep_ep or import_deepep()
        api_number = 1 + [*CLASSES].index(_api(package, shape))
    lowest, highest = group.all_reduce_minimum(api_number), -group.all_reduce_minimum(-api_number)
    if lowest == highest and package is not None:
        return package
    raise _unusable(reason or ("packages on other ranks offer another API" if lowest else OTHERS_REFUSE))


def open_communicator(
    deep_ep: ModuleType,
    shape: DeepEPShape,
    process_group: Any,
    group: GroupCoordinator,
    context: BuildContext,
    *,
    is_deterministic: bool = True,
) -> DeepEPCommunicator:
    """Open the buffer for all layers, on all ranks or on none, before any graph is captured.

    DeepEP's constructor looks for connections between GPUs and hosts, and raises some error if a connection is missing.
    If only some ranks fail, the other ranks may wait in the constructor until DeepEP's or NCCL's timeout. Collective:
    all ep ranks.

    Args:
        deep_ep: the result of `choose_package`.
        process_group: the torch.distributed group of `group`'s ranks in their order, with NCCL.
        is_deterministic: see `ElasticCommunicator`; ignored among ranks of several hosts.

    Raises:
        SettingsError: on all ranks, if one of them cannot open the buffer.
    """
    communicator: DeepEPCommunicator | None = None
    reason = OTHERS_REFUSE
    try:
        if _api(deep_ep, shape) == "elastic":
            is_deterministic = is_deterministic and len(set(group.node_of_rank)) == 1
            communicator = ElasticCommunicator(
                deep_ep, shape, process_group, context, is_deterministic=is_deterministic
            )
        else:
            communicator = LegacyCommunicator(deep_ep, shape, process_group, group.rank_in_group, context)
    except Exception as error:
        reason = f"its buffer cannot be opened: {type(error).__name__}: {' '.join(str(error).split())}"
    if group.all_reduce_minimum(int(communicator is not None)) and communicator is not None:
        return communicator
    # A buffer that this rank opened is not closed here, because closing takes all ranks.
    raise _unusable(reason)


def _unusable(reason: str) -> SettingsError:
    return SettingsError(f"dispatcher='deepep' cannot be used: {reason}. Use 'all_to_all' or 'auto'")


def _api(deep_ep: ModuleType, shape: DeepEPShape) -> DeepEPApi:
    api = offered_api(deep_ep, shape.api)
    assert api is not None, "the package is supported"
    return api
