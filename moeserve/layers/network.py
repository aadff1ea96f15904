"""The interface of every kind of network, and the objects from which networks are built and on which they run.

A network is one summand of the residual stream: a token mixer, a dense network, or a mixture of experts. Each network
has a folder with its config, which model families fill from config.json, and with the module that the config builds.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from torch import Tensor, nn

from moeserve.config.needs import Needs
from moeserve.distributed.coordinator import GroupCoordinator
from moeserve.kv.layer_cache import CacheItems, NoCache, Places
from moeserve.kv.rules import AnyRule
from moeserve.layers.build_context import BuildContext
from moeserve.layers.norm import RowsForm
from moeserve.layers.rotary import RotarySpec, Rotations, TemperatureSpec
from moeserve.layers.rows import At, Row
from moeserve.ops.rows.interface import Float8Rows, Rows
from moeserve.step_inputs import StepInputs

if TYPE_CHECKING:
    from moeserve.layers.moe.dispatch.factory import DispatcherFactory
    from moeserve.layers.moe.layer import MoELayer, MoESpec
    from moeserve.layers.moe.placement.placement import Placement

Item = TypeVar("Item")
Result = TypeVar("Result")
Stages: TypeAlias = Generator[None, None, Result]  # a computation that yields before it waits for other ranks


@dataclass(frozen=True)
class Build:
    """The parts from which the networks of one layer are built."""

    context: BuildContext
    hidden_size: int  # D
    norm_epsilon: float
    num_chunks: int  # number of chunks in which networks add their inputs; see `chunked_sums`
    placements: Iterator[Placement]  # each network with experts takes the next placement
    dispatchers: DispatcherFactory


@dataclass(frozen=True)
class Run:
    """A step, or one half of a step, on its way through the layers."""

    step: StepInputs
    rotations: Rotations
    _shared: dict[type, Any] = field(default_factory=dict)

    def shared(self, kind: type[Item]) -> Item:
        """Return the object of type `kind` by which networks pass data to later networks. The first call makes it."""
        if kind not in self._shared:
            self._shared[kind] = kind()
        found: Item = self._shared[kind]
        return found


class NetworkPart(NamedTuple):
    """A part of a network, for counts of parameters. Of its `num_all` equal pieces, `num_active` compute each token."""

    name: str
    module: nn.Module
    num_active: int = 1
    num_all: int = 1


@dataclass(frozen=True, kw_only=True)
class AttentionCosts:
    """Quantities from which the time of attention is estimated, on one tp rank. Attention caches an entry per token."""

    num_heads: int  # number of heads of all ranks
    decode_operations: float  # floating-point operations for one pair of a token and a position, in decode
    prompt_operations: float  # the same in prefill
    positions: int | None  # maximum number of positions that a token attends to; None: no limit
    projected_values: float  # values per token of queries, keys and values
    output_values: float  # values per token that attention returns
    output_parameters: float  # parameters of the output projection
    index_values: int = 0  # values of an indexer's key
    index_operations: float = 0.0  # the indexer's floating-point operations for one pair of a token and a position


class NetworkSpec:
    """The shape of a network: hashable data, known before any weights."""

    name: ClassVar[str] = "self_attn"  # name of the network in the names of tensors, after the layer
    norm_name: ClassVar[str] = "input_layernorm"  # name of the norm before the network
    output_norm_name: ClassVar[str] = "self_attn_output_norm"  # name of a norm of the network's output
    has_dense: ClassVar[bool] = False  # the network contains a dense network

    @property
    def rotaries(self) -> tuple[RotarySpec | TemperatureSpec, ...]:
        """The rotary embeddings and temperatures that the network uses."""
        return ()

    @property
    def needs(self) -> Needs:
        """The demands of the network on the settings."""
        return Needs()

    @property
    def moe(self) -> MoESpec | None:
        """The experts in the network; None: there are no experts."""
        return None

    def cache_rules(self, block_size: int) -> tuple[AnyRule, ...]:
        """Return the rules by which the network keeps items of earlier tokens."""
        return ()

    def can_divide(self, num_ranks: int) -> bool:
        """Return True if `num_ranks` tp ranks can each have an equal share of the network's units, such as heads."""
        return True

    def costs(self, hidden_size: int, tp: int) -> AttentionCosts | None:
        """Return the costs of attention with `tp` ranks; None: the network caches no entry per token."""
        return None

    def entry_norm(self, build: Build) -> nn.Module | None:
        """Return the module before the network, which adds the previous update to the stream and normalises the sum.

        None: the residual stream makes that module.
        """
        return None

    def build(self, build: Build) -> Network:
        """Return the network of one rank."""
        raise NotImplementedError


class FeedForwardSpec(NetworkSpec):
    """The shape of a feed-forward network: it computes each token by itself, and its tensors are named `mlp`."""

    name = "mlp"
    norm_name = "post_attention_layernorm"
    output_norm_name = "mlp_output_norm"


class Network(nn.Module):
    """One summand of the residual stream."""

    waits = False  # True: the network is run by `stages`, which yields while rows travel between ranks

    @property
    def moe(self) -> MoELayer | None:
        """The experts in the network; None: there are no experts."""
        return None

    @property
    def input_form(self) -> RowsForm:
        """The form of rows to give to `forward`."""
        return "plain"

    @property
    def cache_items(self) -> tuple[CacheItems, ...]:
        """The items of earlier tokens that the network keeps, one for each of the network's cache rules."""
        return ()

    def make_cache(self, places: Places) -> Any:
        return NoCache()

    def parts(self) -> Iterator[NetworkPart]:
        """Yield the parts by which the network's parameters are counted."""
        yield NetworkPart("attention", self)

    def rows(self, at: At) -> Iterator[Row]:
        """Yield the weight mapping of this module.

        Args:
            at: the network's place in the names of tensors.
        """
        raise NotImplementedError

    def forward(self, rows: Any, run: Run, cache: Any) -> Tensor:
        """Return the update [t, D] of the residual stream."""
        raise NotImplementedError

    def stages(self, rows: Any, run: Run, cache: Any) -> Stages[Tensor]:
        """Compute `forward` as a generator that yields before it waits for other ranks; for networks with `waits`."""
        raise NotImplementedError


class OverTP(Network):
    """A network that tp ranks divide. Each rank reads the rows of all ranks, and computes a part of a sum.

    Between networks, each tp rank has a share of the step's tokens. The tokens are gathered before this network, and
    its outputs are reduced and scattered.
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.tp = context.tp
        self.sum_dtype = context.sum_dtype

    @property
    def input_form(self) -> RowsForm:
        return self.gathered_form if self.tp.world_size == 1 else "plain"

    @property
    def gathered_form(self) -> RowsForm:
        """The form of rows to give to `partial_sum`."""
        return "plain"

    def forward(self, rows: Rows, run: Run, cache: Any) -> Tensor:
        output_TD = self.partial_sum(gathered(rows, self.tp, run.step), run, cache)
        return self.tp.reduce_scatter(output_TD, run.step.tp_sizes, self.sum_dtype)  # collective: all tp ranks

    def partial_sum(self, rows: Any, run: Run, cache: Any) -> Tensor:
        """Return this rank's part [T, D] of the update, from the rows of all tp ranks."""
        raise NotImplementedError


def gathered(rows_tD: Rows | tuple[Tensor, ...], tp: GroupCoordinator, step: StepInputs) -> Any:
    """Return the rows [T, D] of all tp ranks; for a tuple of inputs, a tuple of rows. FP8 rows need tp = 1."""
    if isinstance(rows_tD, tuple):
        return tuple(tp.all_gather(each_tD, step.tp_sizes) for each_tD in rows_tD)  # collective: all tp ranks
    if isinstance(rows_tD, Float8Rows):
        return rows_tD
    return tp.all_gather(rows_tD, step.tp_sizes)  # collective: all tp ranks


def run_in_turn(halves: Sequence[Stages[Result]]) -> list[Result]:
    """Run the halves of a step in alternation, stage by stage: one half computes while the other half's rows travel.

    All ranks enter the collectives of both halves in the same order, because a half has the same stages on all ranks.
    """
    results: list[Result] = []
    while len(results) < len(halves):
        for half in halves:
            try:
                next(half)
            except StopIteration as end:
                results.append(end.value)
    return results
