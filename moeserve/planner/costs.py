"""A cost model of steps on accelerators, built from formulas that can be printed with their numbers.

This is arithmetic, not measurement. Each part of a layer takes the time to read its weights or cache or the time to
compute its matrix products, whichever is longer, at the fractions of the hardware's peaks in a `Calibration`. Parts run
one after another. All ranks synchronise in every layer, so the replica with the most tokens determines the time of
attention, and the rank with the most rows determines the time of experts and of the exchange.

Not counted: the embedding, sampling, agreement between replicas, reading the KV cache during prefill, scales of fp8
rows and padding of tiles; and, for the optimum, the kernels between matrix products (norms, rotary positions,
quantization, sorting rows) and their launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal, NamedTuple, TypeAlias, get_args

from moeserve.config.settings import DtypeName
from moeserve.models.registry import Description
from moeserve.planner.calibration import calibration_of
from moeserve.planner.cost_formulas import (
    ATTENTION,
    BALANCE,
    EXCHANGE,
    EXPERTS,
    GATHER,
    HANDOVER,
    ON_CORES,
    PRODUCTS,
    VALUES,
    rows_that_leave,
)
from moeserve.planner.formula import Formula
from moeserve.planner.hardware import Hardware
from moeserve.planner.layout import BYTES_OF_DTYPE, MXFP4_BYTES, Layout, Layouts, Stage
from moeserve.planner.settings import Assumptions


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """The work of one replica in a step. A pair is a token and one position that it attends to."""

    num_decoding: int = 0  # decoding requests
    decode_pairs: float = 0
    num_prefill: int = 0  # prompt tokens
    prefill_pairs: float = 0


class StepLoad(NamedTuple):
    """The work of all replicas in a step, reduced to the quantities that determine its time."""

    num_tokens: float  # sum over the replicas
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


# "before" and "after" are relative to reading the KV cache. "before" includes shared experts and dense networks;
# "after" includes attention itself and the router.
Kind: TypeAlias = Literal["before", "after", "experts", "dispatch", "combine", "head"]


@dataclass(frozen=True)
class Term:
    """One summand of a step's time."""

    formula: Formula
    count: int  # occurrences in the step
    kind: Kind
    stage: int  # pipeline stage

    @property
    def seconds(self) -> float:
        return self.formula.value * self.count


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by kind of work. With overlap, only the longer of two concurrent kinds counts."""

    before: float
    after: float
    experts: float
    dispatch: float
    combine: float
    head: float
    has_overlap: bool
    is_paired: bool  # dispatch overlaps only `before`, and combine only `after`

    @property
    def layers(self) -> float:
        """Seconds of computing and reading in all layers."""
        return self.before + self.after + self.experts

    @property
    def exchange(self) -> float:
        """Seconds of dispatch and combine, and of transfers between tp ranks and between pipeline stages."""
        return self.dispatch + self.combine

    @property
    def formula(self) -> Formula:
        template = "{layers} + {exchange} + {head}"
        if self.is_paired:
            template = "max({before}, {dispatch}) + {experts} + max({after}, {combine}) + {head}"
        elif self.has_overlap:
            template = "max({layers}, {exchange}) + {head}"
        return Formula("step", template, {**vars(self), "layers": self.layers, "exchange": self.exchange})

    @property
    def seconds(self) -> float:
        return self.formula.value


@dataclass(frozen=True)
class _Part:
    """A term whose formula still lacks the quantities of a particular step."""

    name: str
    template: str
    constants: Mapping[str, float]
    count: int
    kind: Kind

    def term(self, stage: int, factor: int, **quantities: float) -> Term:
        formula = Formula(self.name, self.template, {**self.constants, **quantities})
        return Term(formula, self.count * factor, self.kind, stage)


@dataclass(frozen=True, kw_only=True)
class _StageParts:
    """The parts of a step in one pipeline stage."""

    of_replica_rows: list[_Part]
    of_own_rows: list[_Part]
    attention: list[tuple[int | None, _Part]]  # each with the maximum positions per token; None: no limit
    experts: _Part
    of_expert_rows: list[_Part]
    exchange: list[_Part]
    on_cores: list[_Part]
    gather: _Part
    head: _Part | None  # only in the last stage
    handover: _Part | None  # not in the last stage


class LayoutCosts:
    """The costs of steps in one layout on one kind of hardware."""

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
        shape = config.expert_shape
        self.assumptions = assumptions
        calibration = calibration_of(assumptions)
        self.num_parts = 2 if assumptions.overlap else 1  # micro-batches of a step
        self._of_whole_steps = self
        if assumptions.overlap:
            whole = replace(assumptions, overlap=False)
            self._of_whole_steps = LayoutCosts(description, found, layout, hardware, whole, ranks_per_node)
        self.tp, self.dp, self.pp = layout.tp, layout.dp, layout.pp
        self.num_ranks = layout.tp * layout.dp  # in each stage
        ranks_of_replica = layout.tp * layout.pp
        # Ranks of a stage that share a node.
        self.ranks_per_node = max(min(layout.tp, ranks_per_node), ranks_per_node // layout.pp)
        self.is_fp8 = is_fp8(description, assumptions)
        self.num_sparse_layers = config.num_sparse_layers
        self.num_expert_groups = config.num_expert_groups
        self.top_k = shape.top_k if shape else 0
        self.has_exchange = self.num_ranks > 1 and shape is not None
        self.node_bandwidth = hardware.node_bandwidth * calibration.node_links
        is_direct = assumptions.exchange == "direct"
        network = calibration.direct_network if is_direct else calibration.forwarding_network
        self.network_bandwidth = hardware.network_bandwidth * network
        # How two micro-batches overlap:
        self.is_paired = calibration.is_paired and self.has_exchange and assumptions.overlap and is_direct
        self._slots = layout.experts_per_rank[1]
        self._fullest_rank = layout.fullest_rank

        value_bytes = BYTES_OF_DTYPE[found.dtype]
        weight_bytes = 1 if self.is_fp8 else value_bytes
        takes_cores = self.has_exchange and assumptions.overlap and not is_direct
        cores = 1 - calibration.forwarding_cores if takes_cores else 1.0  # fraction left to the layers
        memory_bandwidth = hardware.memory_bandwidth * calibration.memory
        plain = {
            "memory_bandwidth": memory_bandwidth,
            "bytes": value_bytes,
            "rate": hardware.bf16_rate * calibration.products * cores,
        }
        weights = {**plain, "bytes": weight_bytes}
        if self.is_fp8:
            weights["rate"] = hardware.fp8_rate * calibration.products * cores
        experts_per_rank = sum(_parameters(stage)["routed experts"] for stage in layout.stages)
        parameters_of_expert = experts_per_rank / max(1, self.num_sparse_layers * self._slots)
        self.has_mxfp4 = has_mxfp4(description, assumptions, found.dtype)
        bytes_of_weight = MXFP4_BYTES if self.has_mxfp4 else weight_bytes
        self.expert_bytes = parameters_of_expert * bytes_of_weight
        first = config.costs_of_attention(layout.tp)[0]
        attention = {
            "decode_operations": first.decode_operations,
            "prompt_operations": first.prompt_operations,
            "memory_bandwidth": hardware.memory_bandwidth * calibration.cache,
            "rate": hardware.bf16_rate * calibration.attention * cores,
        }
        values = {"passes": calibration.passes, "bytes": value_bytes, "memory_bandwidth": memory_bandwidth}
        row_size = shape.hidden_size if shape else config.hidden_size  # the inputs and outputs of experts
        expert_values = row_size + ((shape.num_matrices - 1) * shape.width if shape else 0)  # gate, up and down
        experts = {
            "slots": self._slots,
            "all_slots": sum(len(holder.experts) for holder in layout.holders if holder.stage == 0),
            "chosen": self.top_k,
            "ranks": self.num_ranks,
            "parameters": parameters_of_expert,
            **weights,
            "bytes": bytes_of_weight,
        }
        self.leaving_rows = rows_that_leave(assumptions.exchange, self.num_ranks, self.ranks_per_node, self.top_k)
        node_rows, network_rows = (rows.value for rows in self.leaving_rows)
        exchange = {
            "node_rows": node_rows,
            "network_rows": network_rows,
            "width": row_size,
            "node_bandwidth": self.node_bandwidth,
            "network_bandwidth": self.network_bandwidth,
            "latency": calibration.exchange_latency,
        }
        self.sent_bytes_per_token = (node_rows + network_rows) * row_size * (weight_bytes + value_bytes)
        rows = {"width": config.hidden_size, "bytes": value_bytes, "latency": calibration.exchange_latency}
        slower = min(self.node_bandwidth, self.network_bandwidth)
        gather = {"tp": layout.tp, "bandwidth": self.node_bandwidth if layout.tp <= ranks_per_node else slower, **rows}
        is_in_node = ranks_per_node % ranks_of_replica == 0
        handover = {"bandwidth": self.node_bandwidth if is_in_node else slower, **rows}

        def parts_of(stage: Stage) -> _StageParts:
            parameters = _parameters(stage)
            numbers = range(stage.first_layer, stage.first_layer + stage.num_layers)
            networks = [network for number in numbers for network in config.layers[number].networks]
            num_sparse = sum(network.moe is not None for network in networks)
            num_dense = sum(network.has_dense for network in networks)
            num_mixers = sum(network.moe is None and not network.has_dense for network in networks)
            is_last = stage is layout.stages[-1]

            def products(name: str, total: float, count: int, format: Mapping[str, float], kind: Kind) -> list[_Part]:
                each = total / max(1, count)
                return [_Part(name, PRODUCTS, {"parameters": each, **format}, count, kind)] if each else []

            def passes(name: str, values_of_row: float, count: int, kind: Kind) -> list[_Part]:
                has_passes = calibration.passes and count
                return [_Part(name, VALUES, {"values": values_of_row, **values}, count, kind)] if has_passes else []

            def exchanged(name: str, value_size: int, kind: Kind) -> _Part:
                return _Part(name, EXCHANGE, {"bytes": value_size, **exchange}, num_sparse, kind)

            def on_cores(name: str, kind: Kind) -> list[_Part]:
                constants = {"seconds": calibration.exchange_on_cores}
                return [_Part(name, ON_CORES, constants, num_sparse, kind)] if self.is_paired and num_sparse else []

            output_projections = first.output_parameters * num_mixers
            projections = parameters["attention"] - output_projections
            cached = config.costs_of_attention(layout.tp, numbers)
            num_indexers = sum(each.index_values > 0 for each in cached)
            index_bytes = sum(each.index_values for each in cached) * value_bytes
            bytes_of_attention = stage.cache.bytes_per_token - index_bytes
            cache = {"cache_bytes": bytes_of_attention / max(1, len(cached)), **attention}
            windows = Counter(each.positions for each in cached)
            index_operations = sum(each.index_operations for each in cached)
            of_indexer = {
                **cache,
                "cache_bytes": index_bytes / max(1, num_indexers),
                "decode_operations": index_operations / max(1, num_indexers),
                "prompt_operations": index_operations / max(1, num_indexers),
            }
            # With one stage, a tied output head is counted under the embedding.
            head = {"parameters": parameters["output head"] or parameters["embedding"], **plain}
            return _StageParts(
                of_replica_rows=[
                    *products("projections of attention", projections, num_mixers, weights, "before"),
                    *products("output projection of attention", output_projections, num_mixers, weights, "after"),
                    *products("dense networks", parameters["dense networks"], num_dense, weights, "before"),
                    *passes("values of queries, keys and values", first.projected_values, num_mixers, "before"),
                    *passes("values of attention's outputs", first.output_values, num_mixers, "after"),
                ],
                of_own_rows=[
                    *products("router", parameters["routers"], num_sparse, plain, "after"),
                    *products("shared experts", parameters["shared experts"], num_sparse, weights, "before"),
                    *products("latent projections", parameters["latent projections"], num_sparse, weights, "before"),
                ],
                attention=[
                    *(
                        (
                            window,
                            _Part(
                                "attention" if window is None else f"attention to {window} positions",
                                ATTENTION,
                                cache,
                                count,
                                "after",
                            ),
                        )
                        for window, count in windows.items()
                    ),
                    *(
                        [(None, _Part("indexers", ATTENTION, of_indexer, num_indexers, "after"))]
                        if num_indexers
                        else []
                    ),
                ],
                experts=_Part("routed experts", EXPERTS, experts, num_sparse, "experts"),
                of_expert_rows=passes("values of experts", expert_values, num_sparse, "experts"),
                exchange=[
                    exchanged("dispatch", weight_bytes, "dispatch"),
                    exchanged("combine", value_bytes, "combine"),
                ],
                on_cores=[*on_cores("dispatch on cores", "before"), *on_cores("combine on cores", "after")],
                # Once for attention in each layer that has it, and once for each dense network.
                gather=_Part("gather and scatter of tp ranks", GATHER, gather, num_mixers + num_dense, "dispatch"),
                head=_Part("output head", PRODUCTS, head, 1, "head") if is_last else None,
                handover=None if is_last else _Part("hand-over to the next stage", HANDOVER, handover, 1, "dispatch"),
            )

        self._stages = tuple(map(parts_of, layout.stages))

    def for_step(self, load: StepLoad) -> LayoutCosts:
        """Return the costs that apply to this load: with two-batch overlap if the settings enable it, else without."""
        assumptions = self.assumptions
        least = assumptions.overlap_prefill_tokens if load.num_prefill else assumptions.overlap_decode_tokens
        return self if load.most_tokens >= least else self._of_whole_steps

    def step_seconds(self, load: StepLoad, imbalance: float | None = None) -> StepTime:
        """Return the time of a step from the first pipeline stage to the last.

        Args:
            imbalance: rows of the fullest rank over the mean; None: the value expected for this number of tokens.
        """
        return self._step_time(self.terms(load, imbalance))

    def stage_seconds(self, load: StepLoad, imbalance: float | None = None) -> list[float]:
        """Return the seconds of a step in each pipeline stage. See `step_seconds` for the arguments."""
        terms = list(self.terms(load, imbalance))
        stages = ([term for term in terms if term.stage == stage] for stage in range(self.pp))
        return [self._step_time(of_stage).seconds for of_stage in stages]

    def _step_time(self, terms: Iterable[Term]) -> StepTime:
        seconds: dict[Kind, float] = dict.fromkeys(get_args(Kind), 0.0)
        for term in terms:
            seconds[term.kind] += term.seconds
        return StepTime(**seconds, has_overlap=self.assumptions.overlap, is_paired=self.is_paired)

    def terms(self, load: StepLoad, imbalance: float | None = None) -> Iterator[Term]:
        """Yield the terms of a step. See `step_seconds` for the arguments."""
        parts = self.num_parts
        part = StepLoad(*(number / parts for number in load))
        if imbalance is None:
            imbalance = self.imbalance(load.num_tokens).value
        tokens = part.most_tokens
        for stage, work in enumerate(self._stages):
            for product in work.of_replica_rows:
                yield product.term(stage, parts, tokens=tokens)
            for window, attention in work.attention:
                pairs = part.decode_pairs, part.prefill_pairs
                if window is not None:
                    pairs = min(pairs[0], part.num_decoding * window), min(pairs[1], part.num_prefill * window)
                yield attention.term(stage, parts, decode_pairs=pairs[0], prompt_pairs=pairs[1])
            for product in work.of_own_rows:
                yield product.term(stage, parts, tokens=tokens / self.tp)
            if work.experts.count:
                yield work.experts.term(stage, parts, tokens=part.num_tokens, imbalance=imbalance)
                for values in work.of_expert_rows:
                    rows = part.num_tokens * self.top_k / self.num_ranks * imbalance
                    yield values.term(stage, parts, tokens=rows)
            if self.has_exchange and work.experts.count:
                # A rank sends its own rows, which do not depend on the imbalance of experts; the formula multiplies by
                # it, so it is divided out. The fullest rank receives rows that do not depend on the balance of
                # replicas.
                exchanged = max(tokens / self.tp / imbalance, part.num_tokens / self.num_ranks)
                for exchange in work.exchange:
                    yield exchange.term(stage, parts, tokens=exchanged, imbalance=imbalance)
                for constant in work.on_cores:
                    yield constant.term(stage, parts)
            if self.tp > 1:
                yield work.gather.term(stage, parts, tokens=tokens)
            if work.handover:
                yield work.handover.term(stage, 1, tokens=load.most_tokens / self.tp)
            if work.head:
                yield work.head.term(stage, 1, tokens=max(1, load.num_decoding))

    def imbalance(self, num_tokens: float, placement: float | None = None) -> Formula:
        """Return the rows of the fullest rank over the mean, as expected from the placement and from random variation.

        Args:
            num_tokens: tokens of all ranks in the step; more than zero.
            placement: the fullest rank's expected rows over the mean; None: that of the layout's placement.
        """
        placement = self._fullest_rank if placement is None else placement
        chosen = self.top_k or 1
        # A token is routed to each expert of a rank at most once.
        highest = min(chosen, self._slots or 1) * self.num_ranks / chosen
        if self.assumptions.speed == "calibrated":
            placement = max(placement, min(self.assumptions.expert_imbalance, highest))
        numbers = {
            "placement": placement,
            "z": NormalDist().inv_cdf((self.num_ranks - 0.375) / (self.num_ranks + 0.25)),
            "mean_rows": num_tokens / self.num_parts * chosen / self.num_ranks,
            "highest": highest,
        }
        return Formula("rows of the fullest rank / mean", BALANCE, numbers, unit="")


def _parameters(stage: Stage) -> Counter[str]:
    parameters: Counter[str] = Counter()
    for part in stage.parts:
        parameters[part.name] += part.num_parameters
    return parameters


def has_mxfp4(description: Description, assumptions: Assumptions, dtype: DtypeName) -> bool:
    """Return True if the estimates assume experts in MXFP4."""
    return assumptions.weights != "fp8" and description.keeps_mxfp4(dtype)


def is_fp8(description: Description, assumptions: Assumptions) -> bool:
    """Return True if the estimates assume fp8 weights."""
    if assumptions.weights == "auto":
        return "fp8" in (description.weight_format.stored_as or "")
    return assumptions.weights == "fp8"
