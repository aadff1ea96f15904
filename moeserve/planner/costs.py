"""A cost model of steps on accelerators, whose terms can show their formulas with their numbers.

This is arithmetic, not measurement. Each part of a layer takes as long as the slower of reading its weights or cache
and computing its products, at the shares of the hardware's peaks that `Assumptions` gives; parts follow each other. All
ranks wait for each other in every layer, so the replica with the most tokens determines the time of attention, and the
rank with the most rows the time of experts and of the exchange (see expert_rows.py).

Not counted: norms, rotary positions, the embedding, sampling, kernel launches, agreement between replicas, reading a
prompt's cache while it is computed, scales of fp8 rows, and padding of tiles.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from moeserve.config.settings import setting
from moeserve.planner.expert_rows import Balance, ExchangeName, LeavingRows
from moeserve.planner.formula import Formula
from moeserve.planner.hardware import Hardware

WeightsName: TypeAlias = Literal["auto", "dtype", "fp8"]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions of the estimates"""

    memory_efficiency: _Share = setting(0.8, "share of the peak memory bandwidth that is reached")
    compute_efficiency: _Share = setting(0.6, "share of the peak rate that matrix products reach")
    link_efficiency: _Share = setting(0.8, "share of a link's peak bandwidth that exchanges reach")
    exchange_latency: Annotated[float, msgspec.Meta(ge=0, le=1)] = setting(
        5e-6, "seconds that each exchange takes beside its bytes"
    )
    memory_share: _Share = setting(0.9, "share of the memory that weights and KV cache may take together")
    weights: WeightsName = setting(
        "auto",
        "format of the weights of attention, experts and dense networks, and of their products; auto: fp8 if the "
        "checkpoint stores them so, else --dtype",
    )
    exchange: ExchangeName = setting(
        "direct",
        "how rows travel; direct: one for each expert on another rank; by_node: one for each other node that has an "
        "expert of the token, forwarded inside; node_limited: the same, if the router's groups keep to few nodes",
    )
    overlap: bool = setting(False, "run each step as two halves: one exchanges while the other computes")


class Work(Protocol):
    """One kind of work of a rank. Numbers in `template` are fields of the class and arguments of `seconds`."""

    template: ClassVar[str]

    @property
    def name(self) -> str: ...

    @property
    def seconds(self) -> Callable[..., float]: ...


@dataclass(frozen=True, kw_only=True)
class MatrixWork:
    """Products of rows with weights that are all read once."""

    template: ClassVar = "max({parameters} x {bytes} / {memory_bandwidth}, 2 x {parameters} x {tokens} / {rate})"

    name: str
    parameters: float
    bytes: float  # of a parameter
    memory_bandwidth: float
    rate: float

    def seconds(self, *, tokens: float) -> float:
        return max(self.parameters * self.bytes / self.memory_bandwidth, 2 * self.parameters * tokens / self.rate)


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """Attention in one layer, on one rank. A pair is a token and a position that it attends to.

    Decoding reads the cache of every pair. A prompt has many pairs for each position it reads, so it only computes.
    """

    template: ClassVar = (
        "max({decode_pairs} x {cache_bytes} / {memory_bandwidth}, "
        "{decode_pairs} x {operations_of_a_decode_pair} / {rate}) "
        "+ {prompt_pairs} x {operations_of_a_prompt_pair} / {rate}"
    )

    name: str
    cache_bytes: float  # of one position
    operations_of_a_decode_pair: float  # on this rank's heads
    operations_of_a_prompt_pair: float
    memory_bandwidth: float
    rate: float

    def seconds(self, *, decode_pairs: float, prompt_pairs: float) -> float:
        reading = decode_pairs * self.cache_bytes / self.memory_bandwidth
        computing = decode_pairs * self.operations_of_a_decode_pair / self.rate
        return max(reading, computing) + prompt_pairs * self.operations_of_a_prompt_pair / self.rate


@dataclass(frozen=True, kw_only=True)
class ExpertWork:
    """The routed experts of one layer, on the rank with the most rows. Only weights of chosen experts are read.

    All slots are chosen equally often: a token misses a slot with probability 1 - chosen / all slots.
    """

    template: ClassVar = (
        "max({slots} x (1 - (1 - {chosen} / {all_slots}) ^ {tokens}) x {parameters} x {bytes} / {memory_bandwidth}"
        ", 2 x {parameters} x {tokens} x {chosen} / {ranks} x {imbalance} / {rate})"
    )
    name: ClassVar[str] = "routed experts"

    slots: int  # of the rank
    all_slots: int  # of all ranks
    chosen: int  # experts of a token
    ranks: int
    parameters: float  # of one expert
    bytes: float  # of a parameter
    memory_bandwidth: float
    rate: float

    def seconds(self, *, tokens: float, imbalance: float) -> float:
        hit = self.slots * (1 - (1 - self.chosen / self.all_slots) ** tokens)
        rows = tokens * self.chosen / self.ranks * imbalance
        return max(hit * self.parameters * self.bytes / self.memory_bandwidth, 2 * self.parameters * rows / self.rate)


@dataclass(frozen=True, kw_only=True)
class ExchangeWork:
    """Dispatch and combine of one layer, on the rank with the most rows. Both kinds of links work at the same time."""

    template: ClassVar = (
        "{tokens} x max({node_rows} x {width} x {bytes} / {node_bandwidth}, "
        "{network_rows} x {width} x {bytes} / {network_bandwidth}) x {imbalance} + 2 x {latency}"
    )
    name: ClassVar[str] = "dispatch and combine"

    node_rows: float  # for each token of the rank: to other ranks of its node
    network_rows: float  # and to other nodes
    width: int  # values of a row
    bytes: float  # of a value, in both directions together
    node_bandwidth: float
    network_bandwidth: float
    latency: float  # of each of the two exchanges

    @property
    def node_bytes(self) -> float:
        """Bytes sent to other ranks of the node, for each token of the rank."""
        return self.node_rows * self.width * self.bytes

    @property
    def network_bytes(self) -> float:
        """Bytes sent to other nodes, for each token of the rank."""
        return self.network_rows * self.width * self.bytes

    def seconds(self, *, tokens: float, imbalance: float) -> float:
        slower = max(self.node_bytes / self.node_bandwidth, self.network_bytes / self.network_bandwidth)
        return tokens * slower * imbalance + 2 * self.latency


@dataclass(frozen=True, kw_only=True)
class GatherWork:
    """The all-gather of a replica's rows over its tp ranks before a part of a layer, and the reduce-scatter after."""

    template: ClassVar = "2 x ({tokens} x (1 - 1 / {tp}) x {width} x {bytes} / {bandwidth} + {latency})"
    name: ClassVar[str] = "gather and scatter of tp ranks"

    tp: int
    width: int
    bytes: float  # of a value
    bandwidth: float
    latency: float

    def seconds(self, *, tokens: float) -> float:
        return 2 * (tokens * (1 - 1 / self.tp) * self.width * self.bytes / self.bandwidth + self.latency)


@dataclass(frozen=True, kw_only=True)
class RankShape:
    """The contents and the work of a rank in numbers; those of the rank that holds most."""

    tp: int
    dp: int
    ranks_per_node: int
    hidden_size: int
    num_layers: int
    num_sparse_layers: int  # those with experts
    num_layers_of_window: Mapping[int | None, int]  # of attention; None: to all positions
    cache_bytes: float  # of a position, in one layer
    decode_operations: float  # of a pair of a token and a position, in one layer
    prefill_operations: float
    # Parameters:
    attention_parameters: float  # of one layer
    dense_parameters: float  # of the network of one layer without experts
    router_parameters: float  # of one layer with experts, as the next two
    shared_parameters: float
    expert_parameters: float  # of one expert
    head_parameters: float
    slots: int  # for experts, in one layer
    all_slots: int
    chosen: int  # experts of a token
    # Bytes of a value:
    weight_bytes: float
    is_fp8: bool
    plain_bytes: float  # of rows, cache and head, which are never fp8
    leaving: LeavingRows
    balance: Balance

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """The work of one replica in a step."""

    num_decoding: int = 0  # requests
    decode_pairs: float = 0  # positions that they attend to, all of them together
    num_prefill: int = 0  # tokens of prompts
    prefill_pairs: float = 0  # positions that these attend to, all of them together


class StepLoad(NamedTuple):
    """The work of all replicas in a step, as far as it affects its time."""

    num_tokens: float = 0.0  # of all replicas
    # Of the replica that has most of it:
    most_tokens: float = 0.0
    num_decoding: float = 0.0
    decode_pairs: float = 0.0
    num_prefill: float = 0.0
    prefill_pairs: float = 0.0

    @classmethod
    def of(cls, replicas: Sequence[ReplicaLoad]) -> StepLoad:
        tokens = [replica.num_decoding + replica.num_prefill for replica in replicas]
        return cls(
            num_tokens=sum(tokens),
            most_tokens=max(tokens),
            num_decoding=max(replica.num_decoding for replica in replicas),
            decode_pairs=max(replica.decode_pairs for replica in replicas),
            num_prefill=max(replica.num_prefill for replica in replicas),
            prefill_pairs=max(replica.prefill_pairs for replica in replicas),
        )

    def plus(self, other: StepLoad) -> StepLoad:
        return StepLoad(*map(operator.add, self, other))

    def divided(self, parts: int) -> StepLoad:
        return StepLoad(*(number / parts for number in self))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. With overlap, the shorter of layers and exchange is hidden behind the longer."""

    layers: float  # computing and reading in all layers
    exchange: float  # in all layers
    head: float
    has_overlap: bool

    @property
    def seconds(self) -> float:
        in_layers = max(self.layers, self.exchange) if self.has_overlap else self.layers + self.exchange
        return in_layers + self.head


@dataclass(frozen=True)
class Term:
    """Work of a step, and how often it occurs in it."""

    work: Work
    quantities: Mapping[str, float]
    count: int

    @property
    def seconds(self) -> float:
        return self.work.seconds(**self.quantities) * self.count

    @property
    def formula(self) -> Formula:
        numbers = {**vars(self.work), **self.quantities}
        return Formula(self.work.name, self.work.template, numbers, self.work.seconds(**self.quantities))


class LayoutCosts:
    """Times of the steps of one layout on one kind of hardware."""

    def __init__(self, shape: RankShape, hardware: Hardware, assumptions: Assumptions) -> None:
        self.shape = shape
        self.assumptions = assumptions
        self.num_parts = 2 if assumptions.overlap else 1  # of a step
        bandwidth = hardware.memory_bandwidth * assumptions.memory_efficiency
        plain_rate = hardware.bf16_rate * assumptions.compute_efficiency
        rate = hardware.fp8_rate * assumptions.compute_efficiency if shape.is_fp8 else plain_rate
        node_bandwidth = hardware.node_bandwidth * assumptions.link_efficiency
        network_bandwidth = hardware.network_bandwidth * assumptions.link_efficiency

        def matrices(name: str, parameters: float, is_weights: bool = True) -> MatrixWork:
            return MatrixWork(
                name=name,
                parameters=parameters,
                bytes=shape.weight_bytes if is_weights else shape.plain_bytes,
                memory_bandwidth=bandwidth,
                rate=rate if is_weights else plain_rate,
            )

        self._projections = matrices("projections of attention", shape.attention_parameters)
        self._dense = matrices("dense networks", shape.dense_parameters)
        self._num_dense = shape.num_layers - shape.num_sparse_layers
        self._of_own_rows = [
            matrices("router", shape.router_parameters, is_weights=False),
            matrices("shared experts", shape.shared_parameters),
        ]
        self._head = matrices("output head", shape.head_parameters, is_weights=False)
        self._attention = {
            window: AttentionWork(
                name="attention" if window is None else f"attention to {window} positions",
                cache_bytes=shape.cache_bytes,
                operations_of_a_decode_pair=shape.decode_operations,
                operations_of_a_prompt_pair=shape.prefill_operations,
                memory_bandwidth=bandwidth,
                rate=plain_rate,
            )
            for window in shape.num_layers_of_window
        }
        self._experts = ExpertWork(
            slots=shape.slots,
            all_slots=max(1, shape.all_slots),
            chosen=shape.chosen,
            ranks=shape.num_ranks,
            parameters=shape.expert_parameters,
            bytes=shape.weight_bytes,
            memory_bandwidth=bandwidth,
            rate=rate,
        )
        self.exchange = ExchangeWork(
            node_rows=shape.leaving.inside.value,
            network_rows=shape.leaving.outside.value,
            width=shape.hidden_size,
            bytes=(1 if shape.is_fp8 else shape.plain_bytes) + shape.plain_bytes,
            node_bandwidth=node_bandwidth,
            network_bandwidth=network_bandwidth,
            latency=assumptions.exchange_latency,
        )
        self.has_exchange = shape.num_ranks > 1 and shape.num_sparse_layers > 0
        self._gather = GatherWork(
            tp=shape.tp,
            width=shape.hidden_size,
            bytes=shape.plain_bytes,
            bandwidth=node_bandwidth if shape.tp <= shape.ranks_per_node else min(node_bandwidth, network_bandwidth),
            latency=assumptions.exchange_latency,
        )

    def step_seconds(self, load: StepLoad, imbalance: float | None = None) -> StepTime:
        """Return the time of a step.

        Args:
            imbalance: rows of the fullest rank over the mean; None: the expected one for this number of tokens.
        """
        seconds = {"layers": 0.0, "exchange": 0.0, "head": 0.0}
        if load.num_tokens:
            for term in self.terms(load, imbalance):
                is_exchange = isinstance(term.work, (ExchangeWork, GatherWork))
                kind = "head" if term.work is self._head else "exchange" if is_exchange else "layers"
                seconds[kind] += term.seconds
        return StepTime(**seconds, has_overlap=self.assumptions.overlap)

    def terms(self, load: StepLoad, imbalance: float | None = None) -> Iterator[Term]:
        """Yield the terms of a step with tokens. See `step_seconds`."""
        shape, parts = self.shape, self.num_parts
        part = load.divided(parts) if parts > 1 else load
        if imbalance is None:
            imbalance = shape.balance.imbalance(part.num_tokens)
        tokens, num_sparse = part.most_tokens, shape.num_sparse_layers
        yield Term(self._projections, {"tokens": tokens}, shape.num_layers * parts)
        if self._num_dense:
            yield Term(self._dense, {"tokens": tokens}, self._num_dense * parts)
        for window, num_layers in shape.num_layers_of_window.items():
            pairs = {"decode_pairs": part.decode_pairs, "prompt_pairs": part.prefill_pairs}
            if window is not None:
                pairs["decode_pairs"] = min(part.decode_pairs, part.num_decoding * window)
                pairs["prompt_pairs"] = min(part.prefill_pairs, part.num_prefill * window)
            yield Term(self._attention[window], pairs, num_layers * parts)
        for work in self._of_own_rows:
            if work.parameters and num_sparse:
                yield Term(work, {"tokens": tokens / shape.tp}, num_sparse * parts)
        if num_sparse:
            of_experts = {"tokens": part.num_tokens, "imbalance": imbalance}
            yield Term(self._experts, of_experts, num_sparse * parts)
        if self.has_exchange:
            # The rank sends its own rows, which do not depend on the balance of experts. The fullest rank receives
            # its rows, whose number does not depend on the balance of replicas.
            exchanged = max(tokens / shape.tp / imbalance, part.num_tokens / shape.num_ranks)
            yield Term(self.exchange, {"tokens": exchanged, "imbalance": imbalance}, num_sparse * parts)
        if shape.tp > 1:  # around attention, and around dense networks
            yield Term(self._gather, {"tokens": tokens}, (shape.num_layers + self._num_dense) * parts)
        yield Term(self._head, {"tokens": max(1, load.num_decoding)}, 1)
