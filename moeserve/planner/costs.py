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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple, get_args

from moeserve.config.settings import DtypeName
from moeserve.models.registry import Description
from moeserve.planner.calibration import calibration_of
from moeserve.planner.cost_formulas import BALANCE, rows_that_leave
from moeserve.planner.formula import Formula
from moeserve.planner.hardware import Hardware
from moeserve.planner.layout import BYTES_OF_DTYPE, MXFP4_BYTES, Layout, Layouts
from moeserve.planner.settings import Assumptions
from moeserve.planner.stage_parts import Kind, PartsOfLayout, Rates, Term, parameters_of


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
        config, calibration = description.model, calibration_of(assumptions)
        self.assumptions = assumptions
        self.num_parts = 2 if assumptions.overlap else 1  # micro-batches of a step
        self._of_whole_steps = self
        if assumptions.overlap:
            whole = replace(assumptions, overlap=False)
            self._of_whole_steps = LayoutCosts(description, found, layout, hardware, whole, ranks_per_node)
        self.tp, self.dp, self.pp = layout.tp, layout.dp, layout.pp
        self.num_ranks = layout.tp * layout.dp  # in each stage
        # Ranks of a stage that share a node.
        self.ranks_per_node = max(min(layout.tp, ranks_per_node), ranks_per_node // layout.pp)
        self.is_fp8 = is_fp8(description, assumptions)
        self.has_mxfp4 = has_mxfp4(description, assumptions, found.dtype)
        self.num_sparse_layers = config.num_sparse_layers
        self.num_expert_groups = config.num_expert_groups
        self.top_k = config.expert_shape.top_k if config.expert_shape else 0
        self.has_exchange = self.num_ranks > 1 and config.expert_shape is not None
        is_direct = assumptions.exchange == "direct"
        # How two micro-batches overlap:
        self.is_paired = calibration.is_paired and self.has_exchange and assumptions.overlap and is_direct
        takes_cores = self.has_exchange and assumptions.overlap and not is_direct
        cores = 1 - calibration.forwarding_cores if takes_cores else 1.0
        rates = Rates.of(hardware, calibration, is_direct=is_direct, cores=cores)
        self.node_bandwidth, self.network_bandwidth = rates.node, rates.network
        self._slots, self._fullest_rank = layout.experts_per_rank[1], layout.fullest_rank
        self.leaving_rows = rows_that_leave(assumptions.exchange, self.num_ranks, self.ranks_per_node, self.top_k)
        value_bytes = BYTES_OF_DTYPE[found.dtype]
        weight_bytes = 1 if self.is_fp8 else value_bytes
        experts_per_rank = sum(parameters_of(stage)["routed experts"] for stage in layout.stages)
        parts = PartsOfLayout(
            config=config,
            layout=layout,
            calibration=calibration,
            rates=rates,
            value_bytes=value_bytes,
            weight_bytes=weight_bytes,
            expert_weight_bytes=MXFP4_BYTES if self.has_mxfp4 else weight_bytes,
            expert_parameters=experts_per_rank / max(1, self.num_sparse_layers * self._slots),
            ranks_per_node=ranks_per_node,
            leaving_rows=self.leaving_rows,
            is_fp8=self.is_fp8,
            is_paired=self.is_paired,
        )
        self.expert_bytes = parts.expert_parameters * parts.expert_weight_bytes
        leaving = sum(rows.value for rows in self.leaving_rows)
        self.sent_bytes_per_token = leaving * parts.row_size * (weight_bytes + value_bytes)
        self._stages = tuple(map(parts.of_stage, layout.stages))

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


def has_mxfp4(description: Description, assumptions: Assumptions, dtype: DtypeName) -> bool:
    """Return True if the estimates assume experts in MXFP4."""
    return assumptions.weights != "fp8" and description.keeps_mxfp4(dtype)


def is_fp8(description: Description, assumptions: Assumptions) -> bool:
    """Return True if the estimates assume fp8 weights."""
    if assumptions.weights == "auto":
        return "fp8" in (description.weight_format.stored_as or "")
    return assumptions.weights == "fp8"
