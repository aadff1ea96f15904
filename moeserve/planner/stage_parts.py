"""The parts of a step's time in each pipeline stage: formulas that lack the quantities of a particular step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from moeserve.models.model_config import ModelConfig
from moeserve.planner.calibration import Calibration
from moeserve.planner.cost_formulas import (
    ATTENTION,
    EXCHANGE,
    EXPERTS,
    GATHER,
    HANDOVER,
    ON_CORES,
    PRODUCTS,
    VALUES,
)
from moeserve.planner.formula import Formula
from moeserve.planner.hardware import Hardware
from moeserve.planner.layout import Layout, Stage

# "before" and "after" are relative to reading the KV cache. "before" includes shared experts and dense networks;
# "after" includes attention itself and the router.
Kind: TypeAlias = Literal["before", "after", "experts", "dispatch", "combine", "head"]
Constants: TypeAlias = Mapping[str, float]


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


@dataclass(frozen=True)
class Part:
    """A term whose formula still lacks the quantities of a particular step."""

    name: str
    template: str
    constants: Constants
    count: int
    kind: Kind

    def term(self, stage: int, factor: int, **quantities: float) -> Term:
        formula = Formula(self.name, self.template, {**self.constants, **quantities})
        return Term(formula, self.count * factor, self.kind, stage)


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """The parts of a step in one pipeline stage."""

    of_replica_rows: list[Part]
    of_own_rows: list[Part]
    attention: list[tuple[int | None, Part]]  # each with the maximum positions per token; None: no limit
    experts: Part
    of_expert_rows: list[Part]
    exchange: list[Part]
    on_cores: list[Part]
    gather: Part
    head: Part | None  # only in the last stage
    handover: Part | None  # not in the last stage


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates that a layout reaches on its hardware, per second."""

    weights: float  # bytes of weights and values
    cache: float  # bytes of the KV cache
    bf16: float  # operations of products
    fp8: float
    attention: float  # operations
    node: float  # bytes to other ranks of the node
    network: float  # bytes to other nodes

    @classmethod
    def of(cls, hardware: Hardware, calibration: Calibration, *, is_direct: bool, cores: float) -> Rates:
        """
        Args:
            is_direct: the exchange of experts is direct.
            cores: fraction of the cores that the exchange leaves to the layers.
        """
        network = calibration.direct_network if is_direct else calibration.forwarding_network
        return cls(
            weights=hardware.memory_bandwidth * calibration.memory,
            cache=hardware.memory_bandwidth * calibration.cache,
            bf16=hardware.bf16_rate * calibration.products * cores,
            fp8=hardware.fp8_rate * calibration.products * cores,
            attention=hardware.bf16_rate * calibration.attention * cores,
            node=hardware.node_bandwidth * calibration.node_links,
            network=hardware.network_bandwidth * network,
        )


@dataclass(frozen=True, kw_only=True)
class PartsOfLayout:
    """Makes the parts of each stage of a layout."""

    config: ModelConfig
    layout: Layout
    calibration: Calibration
    rates: Rates
    value_bytes: int
    weight_bytes: int
    expert_weight_bytes: float
    expert_parameters: float  # of one expert
    ranks_per_node: int
    leaving_rows: tuple[Formula, Formula]
    is_fp8: bool
    is_paired: bool

    def of_stage(self, stage: Stage) -> StageParts:
        """Return the parts of a stage."""
        config, parameters = self.config, parameters_of(stage)
        numbers = range(stage.first_layer, stage.first_layer + stage.num_layers)
        networks = [network for number in numbers for network in config.layers[number].networks]
        num_sparse = sum(network.moe is not None for network in networks)
        num_dense = sum(network.has_dense for network in networks)
        num_mixers = sum(network.moe is None and not network.has_dense for network in networks)
        first = config.costs_of_attention(self.layout.tp)[0]
        output_projections = first.output_parameters * num_mixers
        projections = parameters["attention"] - output_projections
        weights, is_last = self._weights, stage is self.layout.stages[-1]
        # With one stage, a tied output head is counted under the embedding.
        head = {"parameters": parameters["output head"] or parameters["embedding"], **self._plain}
        return StageParts(
            of_replica_rows=[
                *_products("projections of attention", projections, num_mixers, weights, "before"),
                *_products("output projection of attention", output_projections, num_mixers, weights, "after"),
                *_products("dense networks", parameters["dense networks"], num_dense, weights, "before"),
                *self._passes("values of queries, keys and values", first.projected_values, num_mixers, "before"),
                *self._passes("values of attention's outputs", first.output_values, num_mixers, "after"),
            ],
            of_own_rows=[
                *_products("router", parameters["routers"], num_sparse, self._plain, "after"),
                *_products("shared experts", parameters["shared experts"], num_sparse, weights, "before"),
                *_products("latent projections", parameters["latent projections"], num_sparse, weights, "before"),
            ],
            attention=self._attention(stage, numbers),
            experts=Part("routed experts", EXPERTS, self._experts, num_sparse, "experts"),
            of_expert_rows=self._passes("values of experts", self._values_of_expert_row, num_sparse, "experts"),
            exchange=[
                self._exchange("dispatch", self.weight_bytes, num_sparse, "dispatch"),
                self._exchange("combine", self.value_bytes, num_sparse, "combine"),
            ],
            on_cores=[
                *self._on_cores("dispatch on cores", num_sparse, "before"),
                *self._on_cores("combine on cores", num_sparse, "after"),
            ],
            # Once for attention in each layer that has it, and once for each dense network.
            gather=Part("gather and scatter of tp ranks", GATHER, self._gather, num_mixers + num_dense, "dispatch"),
            head=Part("output head", PRODUCTS, head, 1, "head") if is_last else None,
            handover=None if is_last else Part("hand-over to the next stage", HANDOVER, self._handover, 1, "dispatch"),
        )

    @property
    def row_size(self) -> int:
        """Number of values of an expert's input, and of its output."""
        shape = self.config.expert_shape
        return shape.hidden_size if shape else self.config.hidden_size

    @property
    def _plain(self) -> Constants:
        """Constants of products with weights in the model's dtype."""
        return {"memory_bandwidth": self.rates.weights, "bytes": self.value_bytes, "rate": self.rates.bf16}

    @property
    def _weights(self) -> Constants:
        rate = self.rates.fp8 if self.is_fp8 else self.rates.bf16
        return {"memory_bandwidth": self.rates.weights, "bytes": self.weight_bytes, "rate": rate}

    @property
    def _experts(self) -> Constants:
        shape, layout = self.config.expert_shape, self.layout
        return {
            "slots": layout.experts_per_rank[1],
            "all_slots": sum(len(holder.experts) for holder in layout.holders if holder.stage == 0),
            "chosen": shape.top_k if shape else 0,
            "ranks": layout.tp * layout.dp,
            "parameters": self.expert_parameters,
            **self._weights,
            "bytes": self.expert_weight_bytes,
        }

    @property
    def _values_of_expert_row(self) -> int:
        """Number of values that an expert reads and writes for a row: its input, gate, up, and the input of down."""
        shape = self.config.expert_shape
        return self.row_size + ((shape.num_matrices - 1) * shape.width if shape else 0)

    @property
    def _row(self) -> Constants:
        latency = self.calibration.exchange_latency
        return {"width": self.config.hidden_size, "bytes": self.value_bytes, "latency": latency}

    @property
    def _gather(self) -> Constants:
        bandwidth = self._bandwidth_between(is_in_node=self.layout.tp <= self.ranks_per_node)
        return {"tp": self.layout.tp, "bandwidth": bandwidth, **self._row}

    @property
    def _handover(self) -> Constants:
        is_in_node = self.ranks_per_node % (self.layout.tp * self.layout.pp) == 0
        return {"bandwidth": self._bandwidth_between(is_in_node=is_in_node), **self._row}

    def _bandwidth_between(self, *, is_in_node: bool) -> float:
        return self.rates.node if is_in_node else min(self.rates.node, self.rates.network)

    def _passes(self, name: str, values_of_row: float, count: int, kind: Kind) -> list[Part]:
        passes = self.calibration.passes
        constants = {"passes": passes, "bytes": self.value_bytes, "memory_bandwidth": self.rates.weights}
        return [Part(name, VALUES, {"values": values_of_row, **constants}, count, kind)] if passes and count else []

    def _exchange(self, name: str, value_size: int, count: int, kind: Kind) -> Part:
        node_rows, network_rows = (rows.value for rows in self.leaving_rows)
        constants = {
            "bytes": value_size,
            "node_rows": node_rows,
            "network_rows": network_rows,
            "width": self.row_size,
            "node_bandwidth": self.rates.node,
            "network_bandwidth": self.rates.network,
            "latency": self.calibration.exchange_latency,
        }
        return Part(name, EXCHANGE, constants, count, kind)

    def _on_cores(self, name: str, count: int, kind: Kind) -> list[Part]:
        constants = {"seconds": self.calibration.exchange_on_cores}
        return [Part(name, ON_CORES, constants, count, kind)] if self.is_paired and count else []

    def _attention(self, stage: Stage, numbers: range) -> list[tuple[int | None, Part]]:
        """Return attention by its maximum positions per token, and the indexers."""
        first = self.config.costs_of_attention(self.layout.tp)[0]
        cached = self.config.costs_of_attention(self.layout.tp, numbers)
        index_bytes = sum(each.index_values for each in cached) * self.value_bytes
        rates = {"memory_bandwidth": self.rates.cache, "rate": self.rates.attention}
        constants = {
            "cache_bytes": (stage.cache.bytes_per_token - index_bytes) / max(1, len(cached)),
            "decode_operations": first.decode_operations,
            "prompt_operations": first.prompt_operations,
            **rates,
        }
        parts: list[tuple[int | None, Part]] = []
        for window, count in Counter(each.positions for each in cached).items():
            name = "attention" if window is None else f"attention to {window} positions"
            parts.append((window, Part(name, ATTENTION, constants, count, "after")))
        if num_indexers := sum(each.index_values > 0 for each in cached):
            operations = sum(each.index_operations for each in cached) / num_indexers
            constants = {
                "cache_bytes": index_bytes / num_indexers,
                "decode_operations": operations,
                "prompt_operations": operations,
                **rates,
            }
            parts.append((None, Part("indexers", ATTENTION, constants, num_indexers, "after")))
        return parts


def _products(name: str, total: float, count: int, format: Constants, kind: Kind) -> list[Part]:
    each = total / max(1, count)
    return [Part(name, PRODUCTS, {"parameters": each, **format}, count, kind)] if each else []


def parameters_of(stage: Stage) -> Counter[str]:
    """Return the numbers of a stage's parameters by kind."""
    parameters: Counter[str] = Counter()
    for part in stage.parts:
        parameters[part.name] += part.num_parameters
    return parameters
