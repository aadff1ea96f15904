"""How long a step takes on accelerators: a model of costs, each of whose terms can show its formula with its numbers.

Knows numbers alone: no model's names, no files, no clock. It is arithmetic, not measurement: each part of a layer takes
as long as the slower of reading its weights or cache and computing its products, at the shares of the hardware's peaks
that `Assumptions` says; parts follow each other. All ranks wait for each other in every layer, so the replica with the
most tokens tells how long attention takes, and the rank with the most rows how long its experts and the exchange take.
How rows spread over ranks is told by expert_rows.py.

Not counted: norms, rotary positions, the embedding, sampling, launches of kernels, agreement between replicas, the
reading of a prompt's cache while it is computed, scales of fp8 rows, and rows that a kernel adds to fill its tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

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
        "format of the weights of attention, experts and dense networks, and of their products; auto: fp8 where the "
        "checkpoint holds them so, else --dtype",
    )
    exchange: ExchangeName = setting(
        "direct",
        "how rows travel; direct: one for each expert on another rank; by_node: one for each other node that has an "
        "expert of the token, handed on inside; node_limited: the same, where the router's groups keep to few nodes",
    )
    overlap: bool = setting(False, "each step runs as two halves, one of which exchanges while the other computes")


@dataclass(frozen=True, kw_only=True)
class MatrixWork:
    """Products of rows with weights that are all read once."""

    name: str
    parameters: float
    bytes_per_parameter: float
    memory_bandwidth: float
    rate: float

    def seconds(self, rows: float) -> float:
        return max(
            self.parameters * self.bytes_per_parameter / self.memory_bandwidth, 2 * self.parameters * rows / self.rate
        )

    def formula(self, rows: float) -> Formula:
        template = "max({parameters} x {bytes} / {memory_bandwidth}, 2 x {parameters} x {tokens} / {rate})"
        numbers = {
            "parameters": self.parameters,
            "bytes": self.bytes_per_parameter,
            "memory_bandwidth": self.memory_bandwidth,
            "tokens": rows,
            "rate": self.rate,
        }
        return Formula(self.name, template, numbers, self.seconds(rows))


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """Attention itself in one layer, on one rank. A pair is a token and a position that it attends to.

    Decoding reads the cache of every pair. Prompts have many pairs for each position they read, so they compute only.
    """

    name: str
    window: int | None  # a token attends to at most so many positions
    cache_bytes: float  # of one position
    decode_operations: float  # of a pair, on this rank's heads
    prefill_operations: float
    memory_bandwidth: float
    rate: float

    def seconds(self, load: StepLoad) -> float:
        decode, prefill = self._pairs(load)
        reading, computing = decode * self.cache_bytes / self.memory_bandwidth, decode * self.decode_operations
        return max(reading, computing / self.rate) + prefill * self.prefill_operations / self.rate

    def formula(self, load: StepLoad) -> Formula:
        template = (
            "max({decode_pairs} x {cache_bytes} / {memory_bandwidth}, "
            "{decode_pairs} x {operations_of_a_decode_pair} / {rate}) "
            "+ {prompt_pairs} x {operations_of_a_prompt_pair} / {rate}"
        )
        decode, prefill = self._pairs(load)
        numbers = {
            "decode_pairs": decode,
            "cache_bytes": self.cache_bytes,
            "memory_bandwidth": self.memory_bandwidth,
            "operations_of_a_decode_pair": self.decode_operations,
            "prompt_pairs": prefill,
            "operations_of_a_prompt_pair": self.prefill_operations,
            "rate": self.rate,
        }
        return Formula(self.name, template, numbers, self.seconds(load))

    def _pairs(self, load: StepLoad) -> tuple[float, float]:
        if self.window is None:
            return load.decode_pairs, load.prefill_pairs
        return (
            min(load.decode_pairs, load.num_decoding * self.window),
            min(load.prefill_pairs, load.num_prefill * self.window),
        )


@dataclass(frozen=True, kw_only=True)
class ExpertWork:
    """The routed experts of one layer, on the rank that has most rows. Weights are read of the experts that are hit.

    All slots are taken to be hit alike: a token misses a slot with the chance 1 - chosen / all slots.
    """

    slots: int  # of the rank
    all_slots: int  # of all ranks
    chosen: int  # experts of a token
    num_ranks: int
    parameters: float  # of one expert
    bytes_per_parameter: float
    memory_bandwidth: float
    rate: float

    def seconds(self, num_tokens: float, imbalance: float) -> float:
        hit = self.slots * (1 - (1 - self.chosen / self.all_slots) ** num_tokens)
        rows = num_tokens * self.chosen / self.num_ranks * imbalance
        return max(
            hit * self.parameters * self.bytes_per_parameter / self.memory_bandwidth,
            2 * self.parameters * rows / self.rate,
        )

    def formula(self, num_tokens: float, imbalance: float) -> Formula:
        template = (
            "max({slots} x (1 - (1 - {chosen} / {all_slots}) ^ {tokens}) x {parameters} x {bytes} / {memory_bandwidth}"
            ", 2 x {parameters} x {tokens} x {chosen} / {ranks} x {imbalance} / {rate})"
        )
        numbers = {
            "slots": self.slots,
            "chosen": self.chosen,
            "all_slots": self.all_slots,
            "tokens": num_tokens,
            "parameters": self.parameters,
            "bytes": self.bytes_per_parameter,
            "memory_bandwidth": self.memory_bandwidth,
            "ranks": self.num_ranks,
            "imbalance": imbalance,
            "rate": self.rate,
        }
        return Formula("routed experts", template, numbers, self.seconds(num_tokens, imbalance))


@dataclass(frozen=True, kw_only=True)
class ExchangeWork:
    """Dispatch and combine of one layer, on the rank that has most rows. Both kinds of links work at the same time."""

    node_rows: float  # for each token of the rank: to others of its node
    network_rows: float  # and over the network
    width: int  # values of a row
    bytes_per_value: float  # there and back together
    node_bandwidth: float
    network_bandwidth: float
    latency: float  # of each of the two exchanges

    @property
    def node_bytes(self) -> float:
        """For each token of the rank."""
        return self.node_rows * self.width * self.bytes_per_value

    @property
    def network_bytes(self) -> float:
        """For each token of the rank."""
        return self.network_rows * self.width * self.bytes_per_value

    def seconds(self, num_tokens: float, imbalance: float) -> float:
        slower = max(self.node_bytes / self.node_bandwidth, self.network_bytes / self.network_bandwidth)
        return num_tokens * slower * imbalance + 2 * self.latency

    def formula(self, num_tokens: float, imbalance: float) -> Formula:
        template = (
            "{tokens} x max({rows_inside} x {width} x {bytes} / {node_bandwidth}, "
            "{rows_outside} x {width} x {bytes} / {network_bandwidth}) x {imbalance} + 2 x {latency}"
        )
        numbers = {
            "tokens": num_tokens,
            "rows_inside": self.node_rows,
            "rows_outside": self.network_rows,
            "width": self.width,
            "bytes": self.bytes_per_value,
            "node_bandwidth": self.node_bandwidth,
            "network_bandwidth": self.network_bandwidth,
            "imbalance": imbalance,
            "latency": self.latency,
        }
        return Formula("dispatch and combine", template, numbers, self.seconds(num_tokens, imbalance))


@dataclass(frozen=True, kw_only=True)
class GatherWork:
    """A replica's rows gathered by its tp ranks before a part of a layer, and its sums scattered after it."""

    tp: int
    width: int
    bytes_per_value: float
    bandwidth: float
    latency: float

    def seconds(self, rows: float) -> float:
        row_bytes = self.width * self.bytes_per_value
        return 2 * (rows * (1 - 1 / self.tp) * row_bytes / self.bandwidth + self.latency)

    def formula(self, rows: float) -> Formula:
        template = "2 x ({tokens} x (1 - 1 / {tp}) x {width} x {bytes} / {bandwidth} + {latency})"
        numbers = {
            "tokens": rows,
            "tp": self.tp,
            "width": self.width,
            "bytes": self.bytes_per_value,
            "bandwidth": self.bandwidth,
            "latency": self.latency,
        }
        return Formula("gather and scatter of tp ranks", template, numbers, self.seconds(rows))


@dataclass(frozen=True, kw_only=True)
class RankShape:
    """What a rank of a layout holds and does, as numbers: those of the rank that holds most."""

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
    router_parameters: float  # of one layer with experts, as the next ones
    shared_parameters: float
    expert_parameters: float  # of one expert
    head_parameters: float
    slots: int  # for experts, in one layer
    all_slots: int
    chosen: int  # experts of a token
    # Bytes of a value:
    weight_bytes: float
    is_fp8: bool
    plain_bytes: float  # of what is never fp8: rows, cache, head
    leaving: LeavingRows
    balance: Balance

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """What one replica runs in a step."""

    num_decoding: int = 0  # requests
    decode_pairs: float = 0  # positions that they attend to, of all of them together
    num_prefill: int = 0  # tokens of prompts
    prefill_pairs: float = 0  # positions that these attend to, of all of them together


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """What all replicas run in a step, as far as it matters to its time."""

    num_tokens: float  # of all replicas
    # Of the replica that has most of it:
    most_tokens: float
    num_decoding: float
    decode_pairs: float
    num_prefill: float
    prefill_pairs: float

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

    def divided(self, parts: int) -> StepLoad:
        return StepLoad(
            num_tokens=self.num_tokens / parts,
            most_tokens=self.most_tokens / parts,
            num_decoding=self.num_decoding / parts,
            decode_pairs=self.decode_pairs / parts,
            num_prefill=self.num_prefill / parts,
            prefill_pairs=self.prefill_pairs / parts,
        )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. They add up; with overlap, the exchange is hidden behind the layers, or they behind it."""

    layers: float  # computing and reading in all layers
    exchange: float  # in all layers
    head: float
    has_overlap: bool

    @property
    def seconds(self) -> float:
        in_layers = max(self.layers, self.exchange) if self.has_overlap else self.layers + self.exchange
        return in_layers + self.head


class LayoutCosts:
    """Times of the steps of one layout on one kind of hardware. What does not change from step to step is kept."""

    def __init__(self, shape: RankShape, hardware: Hardware, assumptions: Assumptions) -> None:
        self.shape = shape
        self.assumptions = assumptions
        self._num_parts = 2 if assumptions.overlap else 1
        bandwidth = hardware.memory_bandwidth * assumptions.memory_efficiency
        plain_rate = hardware.bf16_rate * assumptions.compute_efficiency
        rate = hardware.fp8_rate * assumptions.compute_efficiency if shape.is_fp8 else plain_rate
        node_bandwidth = hardware.node_bandwidth * assumptions.link_efficiency
        network_bandwidth = hardware.network_bandwidth * assumptions.link_efficiency

        def matrices(name: str, parameters: float, is_weights: bool = True) -> MatrixWork:
            return MatrixWork(
                name=name,
                parameters=parameters,
                bytes_per_parameter=shape.weight_bytes if is_weights else shape.plain_bytes,
                memory_bandwidth=bandwidth,
                rate=rate if is_weights else plain_rate,
            )

        # Work of a replica's tokens, and how many layers have it:
        self._of_replica = [(matrices("projections of attention", shape.attention_parameters), shape.num_layers)]
        num_dense = shape.num_layers - shape.num_sparse_layers
        if num_dense:
            self._of_replica.append((matrices("dense networks", shape.dense_parameters), num_dense))
        # Of the rank's own share of them:
        self._of_rank = [
            (matrices(name, parameters, is_weights), shape.num_sparse_layers)
            for name, parameters, is_weights in (
                ("router", shape.router_parameters, False),
                ("shared experts", shape.shared_parameters, True),
            )
            if parameters and shape.num_sparse_layers
        ]
        self._attention = [
            (
                AttentionWork(
                    name="attention" if window is None else f"attention to {window} positions",
                    window=window,
                    cache_bytes=shape.cache_bytes,
                    decode_operations=shape.decode_operations,
                    prefill_operations=shape.prefill_operations,
                    memory_bandwidth=bandwidth,
                    rate=plain_rate,
                ),
                num_layers,
            )
            for window, num_layers in shape.num_layers_of_window.items()
        ]
        self._experts = ExpertWork(
            slots=shape.slots,
            all_slots=max(1, shape.all_slots),
            chosen=shape.chosen,
            num_ranks=shape.num_ranks,
            parameters=shape.expert_parameters,
            bytes_per_parameter=shape.weight_bytes,
            memory_bandwidth=bandwidth,
            rate=rate,
        )
        self.exchange = ExchangeWork(
            node_rows=shape.leaving.inside.value,
            network_rows=shape.leaving.outside.value,
            width=shape.hidden_size,
            bytes_per_value=(1 if shape.is_fp8 else shape.plain_bytes) + shape.plain_bytes,
            node_bandwidth=node_bandwidth,
            network_bandwidth=network_bandwidth,
            latency=assumptions.exchange_latency,
        )
        self._num_exchanges = shape.num_sparse_layers if shape.num_ranks > 1 else 0
        self._gather = GatherWork(
            tp=shape.tp,
            width=shape.hidden_size,
            bytes_per_value=shape.plain_bytes,
            bandwidth=node_bandwidth if shape.tp <= shape.ranks_per_node else min(node_bandwidth, network_bandwidth),
            latency=assumptions.exchange_latency,
        )
        self._num_gathers = shape.num_layers + num_dense if shape.tp > 1 else 0
        self._head = matrices("output head", shape.head_parameters, is_weights=False)

    def step_seconds(self, load: StepLoad, imbalance: float | None = None) -> StepTime:
        """
        Args:
            imbalance: rows of the fullest rank over the mean; None: what is to be expected of so many tokens.
        """
        if not load.num_tokens:
            return StepTime(0.0, 0.0, 0.0, self.assumptions.overlap)
        part, parts = (load, 1) if self._num_parts == 1 else (load.divided(self._num_parts), self._num_parts)
        if imbalance is None:
            imbalance = self.shape.balance.imbalance(part.num_tokens)
        rows = part.most_tokens
        own = rows / self.shape.tp
        layers = 0.0
        for work, count in self._of_replica:
            layers += work.seconds(rows) * count
        for work, count in self._of_rank:
            layers += work.seconds(own) * count
        for attention, count in self._attention:
            layers += attention.seconds(part) * count
        if self.shape.num_sparse_layers:
            layers += self._experts.seconds(part.num_tokens, imbalance) * self.shape.num_sparse_layers
        exchange = 0.0
        if self._num_exchanges:
            exchange += self.exchange.seconds(self._exchanged(part, imbalance), imbalance) * self._num_exchanges
        if self._num_gathers:
            exchange += self._gather.seconds(rows) * self._num_gathers
        head = self._head.seconds(max(1, load.num_decoding))
        return StepTime(layers * parts, exchange * parts, head, self.assumptions.overlap)

    def _exchanged(self, part: StepLoad, imbalance: float) -> float:
        """Tokens of the rank with most to exchange, over the imbalance.

        Its own rows go out, however uneven experts are; the fullest rank's come in, however uneven replicas are.
        """
        return max(part.most_tokens / self.shape.tp / imbalance, part.num_tokens / self.shape.num_ranks)

    def formulas(self, load: StepLoad) -> tuple[tuple[Formula, int], ...]:
        """The terms of `step_seconds`, each with how often it stands in a step; then, with 0, what they were given."""
        assert load.num_tokens
        parts = self._num_parts
        part = load.divided(parts)
        balance = self.shape.balance
        imbalance = balance.imbalance(part.num_tokens)
        own = part.most_tokens / self.shape.tp
        terms = [(work.formula(part.most_tokens), count * parts) for work, count in self._of_replica]
        terms += [(attention.formula(part), count * parts) for attention, count in self._attention]
        terms += [(work.formula(own), count * parts) for work, count in self._of_rank]
        if self.shape.num_sparse_layers:
            terms.append((self._experts.formula(part.num_tokens, imbalance), self.shape.num_sparse_layers * parts))
        if self._num_exchanges:
            exchanged = self._exchanged(part, imbalance)
            terms.append((self.exchange.formula(exchanged, imbalance), self._num_exchanges * parts))
        if self._num_gathers:
            terms.append((self._gather.formula(part.most_tokens), self._num_gathers * parts))
        terms.append((self._head.formula(max(1, load.num_decoding)), 1))
        if self._num_exchanges:
            leaving = self.shape.leaving
            terms += [(leaving.inside, 0), (leaving.outside, 0), (balance.formula(part.num_tokens), 0)]
        return tuple(terms)
