"""The formulas of the cost model, and the parts of a step to which they are applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from moeserve.planner.formula import Formula

# "before" and "after" are relative to reading the KV cache. "before" includes shared experts and dense networks;
# "after" includes attention itself and the router.
Kind: TypeAlias = Literal["before", "after", "experts", "dispatch", "combine", "head"]
# The rows on which the time of a part depends: all rows of a replica, of one tp rank, or of all replicas; the rows of a
# rank's experts; the exchanged rows; pairs of tokens and positions; none; rows handed to the next stage; rows of the
# head.
Rows: TypeAlias = Literal["replica", "rank", "all", "expert", "exchanged", "pairs", "none", "stage", "last"]


@dataclass(frozen=True)
class Part:
    """A part of a step in one stage. The quantities of a particular step are not yet filled in."""

    name: str
    template: str
    constants: Mapping[str, float]
    count: int
    kind: Kind
    rows: Rows = "replica"
    window: int | None = None  # maximum positions that a token attends to; None: no limit


@dataclass(frozen=True)
class Term:
    """One summand of the time of a step."""

    formula: Formula
    count: int  # occurrences in the step
    kind: Kind
    stage: int  # pipeline stage

    @property
    def seconds(self) -> float:
        return self.formula.value * self.count


PRODUCTS = "max({parameters} x {bytes} / {memory_bandwidth}, 2 x {parameters} x {tokens} / {rate})"
# Decoding reads the KV cache for every pair. In prefill many tokens share each position read, so it is compute-bound.
ATTENTION = (
    "max({decode_pairs} x {cache_bytes} / {memory_bandwidth}, {decode_pairs} x {decode_operations} / {rate}) "
    "+ {prompt_pairs} x {prompt_operations} / {rate}"
)
# Only weights of used experts are read. A token does not use a given slot with probability 1 - chosen / all slots.
EXPERTS = (
    "max({slots} x (1 - (1 - {chosen} / {all_slots}) ^ {tokens}) x {parameters} x {bytes} / {memory_bandwidth}"
    ", 2 x {parameters} x {tokens} x {chosen} / {ranks} x {imbalance} / {rate})"
)
# Values that matrix products write and other kernels read and write: norms, rotary positions, quantization, sorting.
VALUES = "{passes} x {tokens} x {values} x {bytes} / {memory_bandwidth}"
# Time for which the kernels of a direct exchange occupy the cores, during which no other kernel runs.
ON_CORES = "{seconds}"
# Time of one dispatch or one combine. Links inside the node and the network transfer at the same time.
EXCHANGE = (
    "{tokens} x max({node_rows} x {width} x {bytes} / {node_bandwidth}, "
    "{network_rows} x {width} x {bytes} / {network_bandwidth}) x {imbalance} + {latency}"
)
# All-gather of a replica's rows over its tp ranks before attention or a dense network, and reduce-scatter after it.
GATHER = "2 x ({tokens} x (1 - 1 / {tp}) x {width} x {bytes} / {bandwidth} + {latency})"
# Transfer of the residual stream from each rank of a stage to one rank of the next stage.
HANDOVER = "{tokens} x {width} x {bytes} / {bandwidth} + {latency}"
# If tokens are routed independently, a rank's rows follow about a Poisson distribution: their deviation is sqrt(mean).
# The largest of n independent normal values lies about z deviations above their mean (Blom, 1958).
BALANCE = "max({placement}, min({placement} + {z} x ({placement} / {mean_rows}) ^ 0.5, {highest}))"


def rows_that_leave(exchange: str, num_ranks: int, ranks_per_node: int, chosen: int) -> tuple[Formula, Formula]:
    """Return the rows per token that leave a rank: rows to other ranks of its node, and rows to other nodes.

    All experts are assumed to be equally loaded. With "by_node", one rank of each other node receives a row, and
    forwards it once for each expert on another rank of that node.
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
