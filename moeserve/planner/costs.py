"""A cost model of steps on accelerators, made of formulas that can be shown with their numbers.

This is arithmetic, not measurement. Each part of a layer takes as long as the slower of reading its weights or cache
and computing its products, at the shares of the hardware's peaks that `Assumptions` gives; parts follow each other. All
ranks wait for each other in every layer, so the replica with the most tokens determines the time of attention, and the
rank with the most rows the time of experts and of the exchange.

Not counted: norms, rotary positions, the embedding, sampling, kernel launches, agreement between replicas, reading a
prompt's cache while it is computed, scales of fp8 rows, and padding of tiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple, TypeAlias

from moeserve.layers.attention import AttentionConfig
from moeserve.layers.mla import LatentAttentionConfig
from moeserve.models.registry import Description
from moeserve.moe.layer import MoEConfig
from moeserve.planner.formula import Formula
from moeserve.planner.hardware import Hardware
from moeserve.planner.layout import BYTES_OF_DTYPE, Layout, Layouts, Stage
from moeserve.planner.settings import Assumptions


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """The work of one replica in a step. A pair is a token and a position that it attends to."""

    num_decoding: int = 0  # decoding requests
    decode_pairs: float = 0
    num_prefill: int = 0  # tokens of prompts
    prefill_pairs: float = 0


class StepLoad(NamedTuple):
    """The work of all replicas in a step, as far as it affects its time."""

    num_tokens: float  # sum of all replicas
    # Maxima over the replicas:
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


Kind: TypeAlias = Literal["layers", "exchange", "head"]


@dataclass(frozen=True)
class Term:
    """A part of a step's time."""

    formula: Formula
    count: int  # occurrences in the step
    kind: Kind
    stage: int  # pipeline stage

    @property
    def seconds(self) -> float:
        return self.formula.value * self.count


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. With overlap, the shorter of layers and exchange is hidden behind the longer."""

    layers: float  # computing and reading in all layers
    exchange: float
    head: float
    has_overlap: bool

    @property
    def formula(self) -> Formula:
        template = "max({layers}, {exchange}) + {head}" if self.has_overlap else "{layers} + {exchange} + {head}"
        return Formula("step", template, vars(self))

    @property
    def seconds(self) -> float:
        return self.formula.value


@dataclass(frozen=True)
class _Part:
    """A part of a step whose formula lacks the quantities of the step."""

    name: str
    template: str
    constants: Mapping[str, float]
    count: int
    kind: Kind = "layers"

    def term(self, stage: int, factor: int, **quantities: float) -> Term:
        formula = Formula(self.name, self.template, {**self.constants, **quantities})
        return Term(formula, self.count * factor, self.kind, stage)


@dataclass(frozen=True, kw_only=True)
class _StageParts:
    """The parts of a step in one pipeline stage."""

    of_replica_rows: list[_Part]
    of_own_rows: list[_Part]
    attention: dict[int | None, _Part]  # by window
    experts: _Part
    exchange: _Part
    gather: _Part
    head: _Part | None  # only in the last stage
    handover: _Part | None  # not in the last stage


PRODUCTS = "max({parameters} x {bytes} / {memory_bandwidth}, 2 x {parameters} x {tokens} / {rate})"
# Decoding reads the cache of every pair. A prompt has many pairs for each position it reads, so it only computes.
ATTENTION = (
    "max({decode_pairs} x {cache_bytes} / {memory_bandwidth}, {decode_pairs} x {decode_operations} / {rate}) "
    "+ {prompt_pairs} x {prompt_operations} / {rate}"
)
# Only weights of chosen experts are read. A token misses a slot with probability 1 - chosen / all slots.
EXPERTS = (
    "max({slots} x (1 - (1 - {chosen} / {all_slots}) ^ {tokens}) x {parameters} x {bytes} / {memory_bandwidth}"
    ", 2 x {parameters} x {tokens} x {chosen} / {ranks} x {imbalance} / {rate})"
)
# Both kinds of links work at the same time. The latency counts for dispatch and for combine.
EXCHANGE = (
    "{tokens} x max({node_rows} x {width} x {bytes} / {node_bandwidth}, "
    "{network_rows} x {width} x {bytes} / {network_bandwidth}) x {imbalance} + 2 x {latency}"
)
# An all-gather of a replica's rows over its tp ranks before a part of a layer, and a reduce-scatter after it.
GATHER = "2 x ({tokens} x (1 - 1 / {tp}) x {width} x {bytes} / {bandwidth} + {latency})"
# The residual stream, from each rank of a stage to one of the next.
HANDOVER = "{tokens} x {width} x {bytes} / {bandwidth} + {latency}"
# If tokens choose independently, a rank's rows vary about as a Poisson distribution: by the square root of their mean.
# The largest of n independent normal values lies about z deviations above their mean (Blom, 1958).
BALANCE = "max({placement}, min({placement} + {z} x ({placement} / {mean_rows}) ^ 0.5, {highest}))"


class LayoutCosts:
    """Times of the steps of one layout on one kind of hardware."""

    def __init__(
        self,
        description: Description,
        found: Layouts,
        layout: Layout,
        hardware: Hardware,
        assumptions: Assumptions,
        ranks_per_node: int,
    ) -> None:
        config = description.model
        moe = config.first_moe
        self.assumptions = assumptions
        self.num_parts = 2 if assumptions.overlap else 1  # halves of a step
        self.tp, self.dp, self.pp = layout.tp, layout.dp, layout.pp
        self.num_ranks = layout.tp * layout.dp  # of a stage
        ranks_of_replica = layout.tp * layout.pp
        # Ranks of a stage in one node.
        self.ranks_per_node = max(min(layout.tp, ranks_per_node), ranks_per_node // layout.pp)
        self.is_fp8 = is_fp8(description, assumptions)
        self.num_sparse_layers = config.num_sparse_layers
        self.top_k = moe.router.top_k if moe else 0
        self.has_exchange = self.num_ranks > 1 and moe is not None
        self.node_bandwidth = hardware.node_bandwidth * assumptions.link_efficiency
        self.network_bandwidth = hardware.network_bandwidth * assumptions.link_efficiency
        self._slots = layout.experts_per_rank[1]
        self._fullest_rank = layout.fullest_rank

        value_bytes = BYTES_OF_DTYPE[found.dtype]
        weight_bytes = 1 if self.is_fp8 else value_bytes
        memory = {"memory_bandwidth": hardware.memory_bandwidth * assumptions.memory_efficiency}
        plain = {**memory, "bytes": value_bytes, "rate": hardware.bf16_rate * assumptions.compute_efficiency}
        weights = {**plain, "bytes": weight_bytes}
        if self.is_fp8:
            weights["rate"] = hardware.fp8_rate * assumptions.compute_efficiency
        experts_per_rank = sum(_parameters(stage)["routed experts"] for stage in layout.stages)
        self.expert_bytes = experts_per_rank / max(1, self.num_sparse_layers * self._slots) * weight_bytes
        decode_operations, prompt_operations = _operations(config.layers[0].attention, layout.tp)
        attention = {"decode_operations": decode_operations, "prompt_operations": prompt_operations, **plain}
        experts = {
            "slots": self._slots,
            "all_slots": sum(len(holder.experts) for holder in layout.holders if holder.stage == 0),
            "chosen": self.top_k,
            "ranks": self.num_ranks,
            "parameters": self.expert_bytes / weight_bytes,
            **weights,
        }
        self.leaving_rows = rows_that_leave(assumptions.exchange, self.num_ranks, self.ranks_per_node, self.top_k)
        node_rows, network_rows = (rows.value for rows in self.leaving_rows)
        exchange = {
            "node_rows": node_rows,
            "network_rows": network_rows,
            "width": config.hidden_size,
            "bytes": weight_bytes + value_bytes,  # dispatched and returned
            "node_bandwidth": self.node_bandwidth,
            "network_bandwidth": self.network_bandwidth,
            "latency": assumptions.exchange_latency,
        }
        self.sent_bytes_per_token = (node_rows + network_rows) * config.hidden_size * exchange["bytes"]
        rows = {"width": config.hidden_size, "bytes": value_bytes, "latency": assumptions.exchange_latency}
        slower = min(self.node_bandwidth, self.network_bandwidth)
        gather = {"tp": layout.tp, "bandwidth": self.node_bandwidth if layout.tp <= ranks_per_node else slower, **rows}
        is_in_node = ranks_per_node % ranks_of_replica == 0
        handover = {"bandwidth": self.node_bandwidth if is_in_node else slower, **rows}

        def parts_of(stage: Stage) -> _StageParts:
            parameters = _parameters(stage)
            layers = config.layers[stage.first_layer : stage.first_layer + stage.num_layers]
            num_sparse = sum(isinstance(layer.feed_forward, MoEConfig) for layer in layers)
            num_dense = len(layers) - num_sparse
            is_last = stage is layout.stages[-1]

            def products(name: str, part: str, count: int, format: Mapping[str, float]) -> list[_Part]:
                each = parameters[part] / max(1, count)
                return [_Part(name, PRODUCTS, {"parameters": each, **format}, count)] if each else []

            cache = {"cache_bytes": stage.cache_bytes_per_token / len(layers), **attention}
            windows = Counter(getattr(layer.attention, "window", None) for layer in layers)
            # A tied head of the only stage shares the embedding.
            head = {"parameters": parameters["output head"] or parameters["embedding"], **plain}
            return _StageParts(
                of_replica_rows=[
                    *products("projections of attention", "attention", len(layers), weights),
                    *products("dense networks", "dense networks", num_dense, weights),
                ],
                of_own_rows=[
                    *products("router", "routers", num_sparse, plain),
                    *products("shared experts", "shared experts", num_sparse, weights),
                ],
                attention={
                    window: _Part(
                        "attention" if window is None else f"attention to {window} positions", ATTENTION, cache, count
                    )
                    for window, count in windows.items()
                },
                experts=_Part("routed experts", EXPERTS, experts, num_sparse),
                exchange=_Part("dispatch and combine", EXCHANGE, exchange, num_sparse, "exchange"),
                # Around attention, and around dense networks.
                gather=_Part("gather and scatter of tp ranks", GATHER, gather, len(layers) + num_dense, "exchange"),
                head=_Part("output head", PRODUCTS, head, 1, "head") if is_last else None,
                handover=None if is_last else _Part("hand-over to the next stage", HANDOVER, handover, 1, "exchange"),
            )

        self._stages = tuple(map(parts_of, layout.stages))

    def step_seconds(self, load: StepLoad, imbalance: float | None = None) -> StepTime:
        """Return the time of a step with tokens, from the first stage to the last.

        Args:
            imbalance: rows of the fullest rank over the mean; None: the expected one for this number of tokens.
        """
        return self._step_time(self.terms(load, imbalance))

    def stage_seconds(self, load: StepLoad, imbalance: float | None = None) -> list[float]:
        """Return the seconds that a step with tokens takes in each pipeline stage. See `step_seconds`."""
        terms = list(self.terms(load, imbalance))
        stages = ([term for term in terms if term.stage == stage] for stage in range(self.pp))
        return [self._step_time(of_stage).seconds for of_stage in stages]

    def _step_time(self, terms: Iterable[Term]) -> StepTime:
        seconds: dict[Kind, float] = {"layers": 0.0, "exchange": 0.0, "head": 0.0}
        for term in terms:
            seconds[term.kind] += term.seconds
        return StepTime(**seconds, has_overlap=self.assumptions.overlap)

    def terms(self, load: StepLoad, imbalance: float | None = None) -> Iterator[Term]:
        """Yield the terms of a step with tokens. See `step_seconds`."""
        parts = self.num_parts
        part = StepLoad(*(number / parts for number in load))
        if imbalance is None:
            imbalance = self.imbalance(load.num_tokens).value
        tokens = part.most_tokens
        for stage, work in enumerate(self._stages):
            for product in work.of_replica_rows:
                yield product.term(stage, parts, tokens=tokens)
            for window, attention in work.attention.items():
                pairs = part.decode_pairs, part.prefill_pairs
                if window is not None:
                    pairs = min(pairs[0], part.num_decoding * window), min(pairs[1], part.num_prefill * window)
                yield attention.term(stage, parts, decode_pairs=pairs[0], prompt_pairs=pairs[1])
            for product in work.of_own_rows:
                yield product.term(stage, parts, tokens=tokens / self.tp)
            if work.experts.count:
                yield work.experts.term(stage, parts, tokens=part.num_tokens, imbalance=imbalance)
            if self.has_exchange and work.exchange.count:
                # The rank sends its own rows, which do not depend on the balance of experts. The fullest rank receives
                # its rows, whose number does not depend on the balance of replicas.
                exchanged = max(tokens / self.tp / imbalance, part.num_tokens / self.num_ranks)
                yield work.exchange.term(stage, parts, tokens=exchanged, imbalance=imbalance)
            if self.tp > 1:
                yield work.gather.term(stage, parts, tokens=tokens)
            if work.handover:
                yield work.handover.term(stage, 1, tokens=load.most_tokens / self.tp)
            if work.head:
                yield work.head.term(stage, 1, tokens=max(1, load.num_decoding))

    def imbalance(self, num_tokens: float, placement: float | None = None) -> Formula:
        """Return the rows of the fullest rank over the mean, by placement and by chance.

        Args:
            num_tokens: tokens of all ranks in the step; more than zero.
            placement: the fullest rank's expected rows over the mean; None: those of the layout.
        """
        placement = self._fullest_rank if placement is None else placement
        chosen = self.top_k or 1
        numbers = {
            "placement": placement,
            "z": NormalDist().inv_cdf((self.num_ranks - 0.375) / (self.num_ranks + 0.25)),
            "mean_rows": num_tokens / self.num_parts * chosen / self.num_ranks,
            # A token chooses each of a rank's experts at most once.
            "highest": min(chosen, self._slots or 1) * self.num_ranks / chosen,
        }
        return Formula("rows of the fullest rank / mean", BALANCE, numbers, unit="")


def _parameters(stage: Stage) -> Counter[str]:
    parameters: Counter[str] = Counter()
    for part in stage.parts:
        parameters[part.name] += part.num_parameters
    return parameters


def rows_that_leave(exchange: str, num_ranks: int, ranks_per_node: int, chosen: int) -> tuple[Formula, Formula]:
    """Return the rows that leave a rank for each of its tokens: to other ranks of its node, and to other nodes.

    All experts are chosen equally often. With "by_node", a row enters a node at one rank, which forwards it once for
    each expert on another of its ranks.
    """
    in_node = min(num_ranks, ranks_per_node)
    numbers = {"chosen": chosen, "ranks_of_a_node": in_node, "ranks": num_ranks, "nodes": num_ranks / in_node}
    if exchange == "direct":
        inside = "{chosen} x ({ranks_of_a_node} - 1) / {ranks}"
        outside = "{chosen} x ({ranks} - {ranks_of_a_node}) / {ranks}"
    else:
        inside = "{chosen} x ({ranks_of_a_node} - 1) / {ranks_of_a_node}"
        outside = "({nodes} - 1) x (1 - (1 - 1 / {nodes}) ^ {chosen})"
    return (
        Formula("rows inside the node, per token", inside, numbers, unit="rows"),
        Formula("rows to other nodes, per token", outside, numbers, unit="rows"),
    )


def is_fp8(description: Description, assumptions: Assumptions) -> bool:
    """Return True if the estimates assume weights in fp8."""
    if assumptions.weights == "auto":
        return "fp8" in (description.weight_format.stored_as or "")
    return assumptions.weights == "fp8"


def _operations(attention: AttentionConfig | LatentAttentionConfig, tp: int) -> tuple[float, float]:
    """Return the operations of a pair of token and position on one tp rank, in decoding and in a prompt."""
    heads = attention.num_heads / tp
    match attention:
        case AttentionConfig():
            return heads * 4 * attention.head_dim, heads * 4 * attention.head_dim
        case LatentAttentionConfig():
            absorbed = attention.cached_size + attention.latent_size
            expanded = attention.query_dim + attention.value_dim
            return heads * 2 * absorbed, heads * 2 * expanded
