"""A cost model of steps on accelerators, built from formulas that can be printed with their numbers.

The costs are computed, not measured. Each part of a layer takes the time to read its weights or cache or the time to
compute its matrix products, whichever is longer, at the fractions of the hardware's peaks in a `Calibration`. Parts run
one after another. All ranks synchronise in every layer, so the replica with the most tokens determines the time of
attention, and the rank with the most rows determines the time of experts and of the exchange.

Not counted: the embedding, sampling, agreement between replicas, reading the KV cache during prefill, scales of fp8
rows and padding of tiles; and, for the optimum, the kernels between matrix products (norms, rotary positions,
quantization, sorting rows) and their launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple, get_args

from moeserve.config.expert_layout import BYTES_OF_DTYPE, BYTES_OF_QUANTIZATION
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
    Kind,
    Part,
    Rows,
    Term,
    rows_that_leave,
)
from moeserve.planner.formula import Formula
from moeserve.planner.hardware import Hardware
from moeserve.planner.layout import Layout, Layouts, Stage
from moeserve.planner.settings import Assumptions


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """The work of one replica in a step. A pair is a token and a position that the token attends to."""

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
    """Seconds of a step by kind of work. With overlap, only the longer of two overlapping kinds counts."""

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
        """Seconds of reading weights and cache and of computing, over all layers. The exchange is not included."""
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
        self.assumptions, self._config, self._layout = assumptions, description.model, layout
        self._calibration = calibration = calibration_of(assumptions)
        self.num_parts = 2 if assumptions.overlap else 1  # micro-batches of a step
        self._of_whole_steps = self
        if assumptions.overlap:
            whole = replace(assumptions, overlap=False)
            self._of_whole_steps = LayoutCosts(description, found, layout, hardware, whole, ranks_per_node)
        self.tp, self.dp, self.pp = layout.tp, layout.dp, layout.pp
        self.num_ranks = layout.tp * layout.dp  # number of ranks in each stage
        self._ranks_of_node = ranks_per_node  # of all stages
        self.ranks_per_node = max(min(layout.tp, ranks_per_node), ranks_per_node // layout.pp)  # of one stage
        self.sparse_layers = self._config.sparse_layers
        self.num_sparse_layers = len(self.sparse_layers)
        self.num_expert_groups = self._config.num_expert_groups
        shape = self._config.expert_shape
        self.top_k = shape.top_k if shape else 0
        self._row_size = shape.hidden_size if shape else self._config.hidden_size  # of an expert's input and output
        self._slots = layout.experts_per_rank[1]

        is_direct = assumptions.exchange == "direct"
        self.has_exchange = self.num_ranks > 1 and shape is not None
        overlaps = self.has_exchange and assumptions.overlap
        self.is_paired = calibration.is_paired and overlaps and is_direct  # see `Calibration.is_paired`
        # Fraction of the cores that the exchange leaves to the layers:
        cores = 1 - calibration.forwarding_cores if overlaps and not is_direct else 1.0
        network = calibration.direct_network if is_direct else calibration.forwarding_network
        self._memory_bandwidth = hardware.memory_bandwidth * calibration.memory  # bandwidth for weights and values
        self._cache_bandwidth = hardware.memory_bandwidth * calibration.cache
        self.node_bandwidth = hardware.node_bandwidth * calibration.node_links
        self.network_bandwidth = hardware.network_bandwidth * network
        self._attention_rate = hardware.bf16_rate * calibration.attention * cores

        self.is_fp8 = is_fp8(description, assumptions)
        self.has_mxfp4 = has_mxfp4(description, assumptions, found.dtype)
        self._value_bytes = BYTES_OF_DTYPE[found.dtype]
        weight_bytes = 1 if self.is_fp8 else self._value_bytes
        bf16, fp8 = (rate * calibration.products * cores for rate in (hardware.bf16_rate, hardware.fp8_rate))
        memory = {"memory_bandwidth": self._memory_bandwidth}
        self._plain = {**memory, "bytes": self._value_bytes, "rate": bf16}  # products with weights in the model's dtype
        self._weights = {**memory, "bytes": weight_bytes, "rate": fp8 if self.is_fp8 else bf16}
        expert_weight_bytes = BYTES_OF_QUANTIZATION["mxfp4"] if self.has_mxfp4 else weight_bytes
        self._experts = {**self._weights, "bytes": expert_weight_bytes}
        experts_per_rank = sum(parameters_of(stage)["routed experts"] for stage in layout.stages)
        self._expert_parameters = experts_per_rank / max(1, self.num_sparse_layers * self._slots)  # of one expert
        self.expert_bytes = self._expert_parameters * expert_weight_bytes
        self.leaving_rows = rows_that_leave(assumptions.exchange, self.num_ranks, self.ranks_per_node, self.top_k)
        leaving = sum(rows.value for rows in self.leaving_rows)
        self.sent_bytes_per_token = leaving * self._row_size * (weight_bytes + self._value_bytes)
        self._stages = [list(self._parts(stage)) for stage in layout.stages]

    def for_step(self, load: StepLoad) -> LayoutCosts:
        """Return the costs for this load: with two-batch overlap if the settings enable that for it, else without."""
        assumptions = self.assumptions
        least = assumptions.overlap_prefill_tokens if load.num_prefill else assumptions.overlap_decode_tokens
        return self if load.most_tokens >= least else self._of_whole_steps

    def step_seconds(self, load: StepLoad, imbalance: float | None = None) -> StepTime:
        """Return the time of a step, by kind of work, from the first pipeline stage to the last.

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
        """Yield the terms of the time of a step. See `step_seconds` for the arguments."""
        half = StepLoad(*(number / self.num_parts for number in load))
        if imbalance is None:
            imbalance = self.imbalance(load.num_tokens).value
        numbers: dict[Rows, dict[str, float]] = {
            "replica": {"tokens": half.most_tokens},
            "rank": {"tokens": half.most_tokens / self.tp},
            "all": {"tokens": half.num_tokens, "imbalance": imbalance},
            "expert": {"tokens": half.num_tokens * self.top_k / self.num_ranks * imbalance},
            # A rank sends its own rows, which do not depend on the imbalance of experts. Divide by the imbalance,
            # because the formula multiplies by it. The fullest rank receives rows that do not depend on the balance of
            # replicas.
            "exchanged": {
                "tokens": max(half.most_tokens / self.tp / imbalance, half.num_tokens / self.num_ranks),
                "imbalance": imbalance,
            },
            "none": {},
            "stage": {"tokens": load.most_tokens / self.tp},
            "last": {"tokens": max(1, load.num_decoding)},
        }
        for stage, parts in enumerate(self._stages):
            for part in parts:
                quantities = _pairs(half, part.window) if part.rows == "pairs" else numbers[part.rows]
                times = 1 if part.rows in ("stage", "last") else self.num_parts
                formula = Formula(part.name, part.template, {**part.constants, **quantities})
                yield Term(formula, part.count * times, part.kind, stage)

    def _parts(self, stage: Stage) -> Iterator[Part]:
        """Yield the parts of a step in a pipeline stage, in the order in which they are printed."""
        config, parameters, weights = self._config, parameters_of(stage), self._weights
        layers = range(stage.first_layer, stage.first_layer + stage.num_layers)
        networks = [network for number in layers for network in config.layers[number].networks]
        num_sparse = sum(network.moe is not None for network in networks)
        num_dense = sum(network.has_dense for network in networks)
        num_mixers = sum(network.moe is None and not network.has_dense for network in networks)
        first, is_last = config.costs_of_attention(self.tp)[0], stage is self._layout.stages[-1]
        outputs = first.output_parameters * num_mixers
        projections = parameters["attention"] - outputs
        yield from _products("projections of attention", projections, num_mixers, weights, "before")
        yield from _products("output projection of attention", outputs, num_mixers, weights, "after")
        yield from _products("dense networks", parameters["dense networks"], num_dense, weights, "before")
        yield from self._passes("values of queries, keys and values", first.projected_values, num_mixers, "before")
        yield from self._passes("values of attention's outputs", first.output_values, num_mixers, "after")
        yield from self._attention(stage, layers)
        yield from _products("router", parameters["routers"], num_sparse, self._plain, "after", "rank")
        for name in ("shared experts", "latent projections"):
            yield from _products(name, parameters[name], num_sparse, weights, "before", "rank")
        if num_sparse:
            yield from self._experts_and_exchange(num_sparse)
        row = {"width": config.hidden_size, "bytes": self._value_bytes, "latency": self._calibration.exchange_latency}
        if self.tp > 1:  # once for attention in each layer that has it, and once for each dense network
            bandwidth = self._bandwidth_between(is_in_node=self.tp <= self._ranks_of_node)
            numbers, count = {"tp": self.tp, "bandwidth": bandwidth, **row}, num_mixers + num_dense
            yield Part("gather and scatter of tp ranks", GATHER, numbers, count, "dispatch")
        if is_last:
            # With one stage, a tied output head is counted under the embedding.
            head = {"parameters": parameters["output head"] or parameters["embedding"], **self._plain}
            yield Part("output head", PRODUCTS, head, 1, "head", "last")
        else:
            bandwidth = self._bandwidth_between(is_in_node=self._ranks_of_node % (self.tp * self.pp) == 0)
            yield Part("hand-over to the next stage", HANDOVER, {"bandwidth": bandwidth, **row}, 1, "dispatch", "stage")

    def _experts_and_exchange(self, count: int) -> Iterator[Part]:
        shape = self._config.expert_shape
        assert shape is not None
        experts = {
            "slots": self._slots,
            "all_slots": sum(len(holder.experts) for holder in self._layout.holders if holder.stage == 0),
            "chosen": self.top_k,
            "ranks": self.num_ranks,
            "parameters": self._expert_parameters,
            **self._experts,
        }
        yield Part("routed experts", EXPERTS, experts, count, "experts", "all")
        # An expert reads and writes its input, gate, up, and the input of down.
        values = self._row_size + (shape.num_matrices - 1) * shape.width
        yield from self._passes("values of experts", values, count, "experts", "expert")
        if not self.has_exchange:
            return
        node_rows, network_rows = (rows.value for rows in self.leaving_rows)
        exchange = {
            "node_rows": node_rows,
            "network_rows": network_rows,
            "width": self._row_size,
            "node_bandwidth": self.node_bandwidth,
            "network_bandwidth": self.network_bandwidth,
            "latency": self._calibration.exchange_latency,
        }
        dispatched = {**exchange, "bytes": self._weights["bytes"]}
        yield Part("dispatch", EXCHANGE, dispatched, count, "dispatch", "exchanged")
        yield Part("combine", EXCHANGE, {**exchange, "bytes": self._value_bytes}, count, "combine", "exchanged")
        if self.is_paired:
            seconds = {"seconds": self._calibration.exchange_on_cores}
            yield Part("dispatch on cores", ON_CORES, seconds, count, "before", "none")
            yield Part("combine on cores", ON_CORES, seconds, count, "after", "none")

    def _attention(self, stage: Stage, layers: range) -> Iterator[Part]:
        """Yield a part for all layers with the same maximum number of positions, and a part for all indexers."""
        first = self._config.costs_of_attention(self.tp)[0]
        cached = self._config.costs_of_attention(self.tp, layers)
        index_bytes = sum(each.index_values for each in cached) * self._value_bytes
        rates = {"memory_bandwidth": self._cache_bandwidth, "rate": self._attention_rate}
        numbers = {
            "cache_bytes": (stage.cache.bytes_per_token - index_bytes) / max(1, len(cached)),
            "decode_operations": first.decode_operations,
            "prompt_operations": first.prompt_operations,
        }
        for window, count in Counter(each.positions for each in cached).items():
            name = "attention" if window is None else f"attention to {window} positions"
            yield Part(name, ATTENTION, {**rates, **numbers}, count, "after", "pairs", window)
        if num_indexers := sum(each.index_values > 0 for each in cached):
            operations = sum(each.index_operations for each in cached) / num_indexers
            numbers = {
                "cache_bytes": index_bytes / num_indexers,
                "decode_operations": operations,
                "prompt_operations": operations,
            }
            yield Part("indexers", ATTENTION, {**rates, **numbers}, num_indexers, "after", "pairs")

    def _passes(
        self, name: str, values_of_row: float, count: int, kind: Kind, rows: Rows = "replica"
    ) -> Iterator[Part]:
        passes, memory = self._calibration.passes, self._memory_bandwidth
        if passes and count:
            numbers = {
                "passes": passes,
                "values": values_of_row,
                "bytes": self._value_bytes,
                "memory_bandwidth": memory,
            }
            yield Part(name, VALUES, numbers, count, kind, rows)

    def _bandwidth_between(self, *, is_in_node: bool) -> float:
        return self.node_bandwidth if is_in_node else min(self.node_bandwidth, self.network_bandwidth)

    def imbalance(self, num_tokens: float, placement: float | None = None) -> Formula:
        """Return the rows of the fullest rank over the mean, as expected from the placement and from random variation.

        Args:
            num_tokens: tokens of all ranks in the step; more than zero.
            placement: the fullest rank's expected rows over the mean; None: the value of the layout's placement.
        """
        placement = self._layout.fullest_rank if placement is None else placement
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


def parameters_of(stage: Stage) -> Counter[str]:
    """Return the number of parameters of a stage, by kind of part."""
    parameters: Counter[str] = Counter()
    for part in stage.parts:
        parameters[part.name] += part.num_parameters
    return parameters


def _products(
    name: str, total: float, count: int, format: dict[str, float], kind: Kind, rows: Rows = "replica"
) -> Iterator[Part]:
    if total:
        yield Part(name, PRODUCTS, {"parameters": total / max(1, count), **format}, count, kind, rows)


def _pairs(load: StepLoad, window: int | None) -> dict[str, float]:
    """Return the numbers of pairs of a token and a position, if a token attends to at most `window` positions."""
    decode, prompt = load.decode_pairs, load.prefill_pairs
    if window is not None:
        decode, prompt = min(decode, load.num_decoding * window), min(prompt, load.num_prefill * window)
    return {"decode_pairs": decode, "prompt_pairs": prompt}
