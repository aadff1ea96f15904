"""The choice of each token's experts, and of their copies."""

from __future__ import annotations

from moeserve.ops.backend import Backend, Implementation, choose
from moeserve.ops.routing.cpu import CpuRouter, copies_by
from moeserve.ops.routing.interface import ChooseCopies, RouterSpec, RouteTokens
from moeserve.ops.routing.reference import TorchRouter, choose_expert_copies


def make(backend: Backend, config: RouterSpec) -> RouteTokens:
    """Return the operation that chooses experts by the rule `config`."""
    return choose(TABLE, backend, config)


def make_copies(backend: Backend) -> ChooseCopies:
    """Return the operation that chooses among copies of experts."""
    return choose(COPIES, backend, None)


def _triton(backend: Backend, config: RouterSpec) -> RouteTokens:
    from moeserve.ops.routing.triton import OrderedRouter, TritonRouter

    return OrderedRouter(config) if backend.is_batch_invariant else TritonRouter(config)


TABLE: dict[str, Implementation[RouterSpec, RouteTokens]] = {
    "triton": Implementation(_triton),
    "cpu": Implementation(lambda backend, config: CpuRouter(backend.native, config)),
    "reference": Implementation(lambda backend, config: TorchRouter(config)),
}
COPIES: dict[str, Implementation[None, ChooseCopies]] = {
    "cpu": Implementation(lambda backend, _: copies_by(backend.native)),
    "reference": Implementation(lambda backend, _: choose_expert_copies),
}
