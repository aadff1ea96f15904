"""Estimates for the layouts of a model on accelerators: cache, exchange, balance, and tokens per second.

The figures follow from the hardware and from `Assumptions` on how well an engine uses it. They are not measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from moeserve.errors import SettingsError
from moeserve.layers.attention import AttentionConfig
from moeserve.layers.mla import LatentAttentionConfig
from moeserve.machine import shown_bytes
from moeserve.models.registry import Description, describe
from moeserve.planner.costs import Assumptions, LayoutCosts, RankShape, ReplicaLoad, StepLoad
from moeserve.planner.expert_rows import Balance, rows_that_leave
from moeserve.planner.formula import Formula, shown_seconds
from moeserve.planner.hardware import Hardware
from moeserve.planner.layout import BYTES_OF_DTYPE, Layout, Layouts, check_groups, group_topology
from moeserve.planner.traffic import Lengths, Traffic

DECODE_REQUESTS = 128
PREFILL_TOKENS = 4096
# The other parts are small or need precision.
FP8_PARTS = ("attention", "dense networks", "routed experts", "shared experts")


@dataclass(frozen=True, kw_only=True)
class PhaseEstimate:
    """Steps that only decode, or only compute prompts. All replicas have equally many tokens."""

    tokens_per_replica: int
    step_s: float
    exchange_s: float  # dispatch and combine, in one layer that has experts
    node_bytes: float  # sent by a rank in one such layer: to others of its node
    network_bytes: float  # and to other nodes
    fullest_rank: float  # its rows for experts, over the mean
    tokens_per_s: float  # of all replicas
    formulas: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One layout on some hardware."""

    tp: int
    dp: int
    weight_bytes: int  # of the rank that has most
    cache_tokens: int  # capacity of a replica's cache
    cache_requests: int  # the same in requests of average length while they decode
    refusal: str | None  # why no request fits into the memory
    memory_formulas: tuple[str, ...]
    decode: PhaseEstimate | None  # None: the cache does not hold a request
    prefill: PhaseEstimate | None


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The possible layouts, in their order."""

    hardware: str
    num_nodes: int
    ranks_per_node: int
    weights: str  # format of attention, experts and dense networks: fp8, or the name of a dtype
    assumptions: Assumptions
    lengths: Lengths
    traffic_note: str  # see `Traffic`
    layouts: tuple[Estimate, ...]


def estimate_layouts(
    found: Layouts,
    hardware: Hardware,
    traffic: Traffic,
    assumptions: Assumptions,
    *,
    ranks_per_node: int,
    decode_requests: int = DECODE_REQUESTS,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Estimates:
    """Estimate every possible layout.

    Args:
        found: layouts over whole nodes.
        decode_requests: requests that each replica decodes at once, if its cache holds them.
        prefill_tokens: prompt tokens that each replica computes in a step.

    Raises:
        SettingsError: a number of requests or tokens below one, or an exchange that does not fit the model.
        CheckpointError: see `describe`.
    """
    for name, number in (("decode_requests", decode_requests), ("prefill_tokens", prefill_tokens)):
        if number < 1:
            raise SettingsError(f"{name}={number}: a step has at least 1")
    assert found.num_ranks % ranks_per_node == 0
    description = describe(found.model)
    lengths = traffic.lengths

    def estimate(layout: Layout) -> Estimate:
        shape = rank_shape(description, found, layout, assumptions, ranks_per_node)
        costs = LayoutCosts(shape, hardware, assumptions)
        weights = _weights(layout, shape.is_fp8)
        cache = _cache(hardware, assumptions, weights.value, layout.cache_bytes_per_token)
        held = _held(cache.value, lengths)
        cache_tokens, cache_requests = int(cache.value), int(held.value)
        decoding, prefilling = min(decode_requests, cache_requests), min(prefill_tokens, cache_tokens)
        decode = ReplicaLoad(num_decoding=decoding, decode_pairs=decoding * lengths.decode_context)
        prefill = ReplicaLoad(num_prefill=prefilling, prefill_pairs=prefilling * lengths.pairs_per_prompt_token)
        return Estimate(
            tp=layout.tp,
            dp=layout.dp,
            weight_bytes=int(weights.value),
            cache_tokens=cache_tokens,
            cache_requests=cache_requests,
            refusal=None if cache_requests else _shortage(weights.value, hardware.memory * assumptions.memory_share),
            memory_formulas=(weights.as_text(), cache.as_text(), held.as_text()),
            decode=_phase(costs, decode) if decoding else None,
            prefill=_phase(costs, prefill) if prefilling else None,
        )

    return Estimates(
        hardware=hardware.name,
        num_nodes=found.num_ranks // ranks_per_node,
        ranks_per_node=ranks_per_node,
        weights="fp8" if _is_fp8(description, assumptions) else found.dtype,
        assumptions=assumptions,
        lengths=lengths,
        traffic_note=traffic.note,
        layouts=tuple(estimate(layout) for layout in found.layouts if layout.refusal is None),
    )


def rank_shape(
    description: Description, found: Layouts, layout: Layout, assumptions: Assumptions, ranks_per_node: int
) -> RankShape:
    """Return the numbers of a layout that the cost model needs.

    Raises:
        SettingsError: an exchange that does not fit the model or the placement of its experts.
    """
    config = description.model
    moe = config.first_moe
    num_sparse, num_layers = config.num_sparse_layers, len(config.layers)
    parameters = Counter({part.name: 0 for part in layout.parts})
    for part in layout.parts:
        parameters[part.name] += part.num_parameters
    is_fp8 = _is_fp8(description, assumptions)
    plain_bytes = BYTES_OF_DTYPE[found.dtype]
    chosen = moe.router.top_k + found.num_shared if moe else 0
    num_experts = found.num_experts + found.num_shared
    num_ranks = layout.tp * layout.dp
    slots = layout.experts_per_rank[1]
    if assumptions.exchange == "node_limited":
        topology = group_topology(moe, found.num_shared, max(1, num_ranks // ranks_per_node))
        check_groups([holder.experts for holder in layout.holders], num_experts, topology)
    decode_operations, prefill_operations = _operations(config.layers[0].attention, layout.tp)
    num_dense = max(1, num_layers - num_sparse)
    per_sparse = max(1, num_sparse)
    return RankShape(
        tp=layout.tp,
        dp=layout.dp,
        ranks_per_node=ranks_per_node,
        hidden_size=config.hidden_size,
        num_layers=num_layers,
        num_sparse_layers=num_sparse,
        num_layers_of_window=Counter(getattr(layer.attention, "window", None) for layer in config.layers),
        cache_bytes=layout.cache_bytes_per_token / num_layers,
        decode_operations=decode_operations,
        prefill_operations=prefill_operations,
        attention_parameters=parameters["attention"] / num_layers,
        dense_parameters=parameters["dense networks"] / num_dense,
        router_parameters=parameters["routers"] / per_sparse,
        shared_parameters=parameters["shared experts"] / per_sparse,
        expert_parameters=parameters["routed experts"] / per_sparse / max(1, slots),
        head_parameters=parameters["embedding" if config.tie_word_embeddings else "output head"],
        slots=slots,
        all_slots=sum(len(holder.experts) for holder in layout.holders),
        chosen=chosen,
        weight_bytes=1 if is_fp8 else plain_bytes,
        is_fp8=is_fp8,
        plain_bytes=plain_bytes,
        leaving=rows_that_leave(
            assumptions.exchange,
            num_ranks=num_ranks,
            ranks_per_node=ranks_per_node,
            num_experts=num_experts,
            chosen=chosen,
            num_groups=moe.router.num_groups if moe else 1,
            num_chosen_groups=moe.router.num_chosen_groups if moe else 1,
        ),
        balance=Balance(placement=layout.fullest_rank, num_ranks=num_ranks, num_experts=num_experts, chosen=chosen),
    )


def as_text(found: Estimates) -> str:
    """Return two tables, followed by the formulas if there is one layout."""
    lengths = found.lengths
    note = f"{found.traffic_note}; " if found.traffic_note else ""
    lines = [
        f"Estimates for {found.num_nodes} x {found.ranks_per_node} {found.hardware}, weights in {found.weights}, and "
        f"requests of {lengths.prompt_tokens:.0f} + {lengths.output_tokens:.0f} tokens ({note}"
        f"{lengths.decode_context:.0f} in the cache while they decode)",
        f"Assumed: {_assumed(found.assumptions)}",
        "",
        f"{'tp':>4}{'dp':>5}{'weights':>11}{'KV cache of a replica':>23}" + _PHASE_HEADS[0].format("requests decoded"),
        f"{'':>9}{'per rank':>11}{'tokens':>12}{'requests':>11}" + _PHASE_HEADS[1].format("by a replica"),
    ]
    for layout in found.layouts:
        start = f"{layout.tp:>4}{layout.dp:>5}{shown_bytes(layout.weight_bytes):>11}"
        if layout.decode is None:
            lines.append(f"{start}  does not fit: {layout.refusal}")
        else:
            lines.append(f"{start}{layout.cache_tokens:>12}{layout.cache_requests:>11}{_phase_text(layout.decode)}")
    prefills = [(layout, layout.prefill) for layout in found.layouts if layout.prefill is not None]
    if prefills:
        lines += [
            "",
            f"{'tp':>4}{'dp':>5}{'':>34}" + _PHASE_HEADS[0].format("tokens of prompts"),
            f"{'':>43}" + _PHASE_HEADS[1].format("in a replica"),
        ]
    for layout, prefill in prefills:
        lines.append(f"{layout.tp:>4}{layout.dp:>5}{'':>34}{_phase_text(prefill)}")
    if len(found.layouts) == 1:
        (layout,) = found.layouts
        lines += ["", "Memory:", *layout.memory_formulas]
        for name, phase in (("decode", layout.decode), ("prefill", layout.prefill)):
            if phase is not None:
                lines += ["", f"A step of {name}:", *phase.formulas]
    return "\n".join(lines)


_PHASE_HEADS = (
    f"{{:>19}}{'step':>11}{'tokens/s':>10}{'a layer with experts:':>24}{'fullest':>10}",
    f"{{:>19}}{'':>11}{'':>10}{'exchange':>12}{'sent':>12}{'rank':>10}",
)


def _phase_text(phase: PhaseEstimate) -> str:
    sent = shown_bytes(round(phase.node_bytes + phase.network_bytes))
    return (
        f"{phase.tokens_per_replica:>19}{shown_seconds(phase.step_s):>11}{phase.tokens_per_s:>10.0f}"
        f"{shown_seconds(phase.exchange_s):>12}{sent:>12}{phase.fullest_rank:>10.2f}"
    )


def _assumed(assumptions: Assumptions) -> str:
    overlap = "halves of a step overlap" if assumptions.overlap else "no overlap"
    return (
        f"{assumptions.memory_efficiency:g} of the memory bandwidth, {assumptions.compute_efficiency:g} of the rate of "
        f"products, {assumptions.link_efficiency:g} of the links, {shown_seconds(assumptions.exchange_latency)} for an "
        f"exchange, {assumptions.exchange} exchange, {overlap}"
    )


def _phase(costs: LayoutCosts, of_replica: ReplicaLoad) -> PhaseEstimate:
    shape, parts = costs.shape, costs.num_parts
    load = StepLoad.of((of_replica,) * shape.dp)
    seconds = costs.step_seconds(load).seconds
    own_tokens = load.most_tokens / shape.tp
    imbalance = shape.balance.imbalance(load.num_tokens / parts)
    exchange_s = costs.exchange.seconds(tokens=own_tokens / parts, imbalance=imbalance)
    return PhaseEstimate(
        tokens_per_replica=round(load.most_tokens),
        step_s=seconds,
        exchange_s=parts * exchange_s if costs.has_exchange else 0.0,
        node_bytes=costs.exchange.node_bytes * own_tokens,
        network_bytes=costs.exchange.network_bytes * own_tokens,
        fullest_rank=imbalance,
        tokens_per_s=load.num_tokens / seconds,
        formulas=tuple(_formulas(costs, load)),
    )


def _formulas(costs: LayoutCosts, load: StepLoad) -> Iterator[str]:
    """Yield the formula of each term of a step, with its numbers, and of their sum."""
    for term in costs.terms(load):
        yield f"{term.formula.as_text()}\n    x {term.count} = {shown_seconds(term.seconds)}"
    if costs.has_exchange:
        balance = costs.shape.balance.formula(load.num_tokens / costs.num_parts)
        for formula in (costs.shape.leaving.inside, costs.shape.leaving.outside, balance):
            yield formula.as_text()
    time = costs.step_seconds(load)
    template = "max({layers}, {exchange}) + {head}" if time.has_overlap else "{layers} + {exchange} + {head}"
    numbers = {"layers": time.layers, "exchange": time.exchange, "head": time.head}
    yield Formula("step", template, numbers, time.seconds).as_text()
    numbers = {"tokens_of_all_replicas": load.num_tokens, "step": time.seconds}
    rate = load.num_tokens / time.seconds
    yield Formula("tokens per second", "{tokens_of_all_replicas} / {step}", numbers, rate, unit="").as_text()


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


def _weights(layout: Layout, is_fp8: bool) -> Formula:
    in_fp8 = sum(part.num_parameters for part in layout.parts if is_fp8 and part.name in FP8_PARTS)
    others = sum(part.num_bytes for part in layout.parts if not (is_fp8 and part.name in FP8_PARTS))
    numbers = {"fp8_parameters": in_fp8, "bytes_of_others": others}
    return Formula("weights of a rank", "{fp8_parameters} + {bytes_of_others}", numbers, in_fp8 + others, unit="bytes")


def _cache(hardware: Hardware, assumptions: Assumptions, weight_bytes: float, bytes_per_token: int) -> Formula:
    numbers = {
        "memory": hardware.memory,
        "share": assumptions.memory_share,
        "weights": weight_bytes,
        "bytes_of_a_token": bytes_per_token,
    }
    value = max(0.0, (hardware.memory * assumptions.memory_share - weight_bytes) / bytes_per_token)
    template = "max(0, ({memory} x {share} - {weights}) / {bytes_of_a_token})"
    return Formula("KV cache of a replica", template, numbers, value, unit="tokens")


def _shortage(weight_bytes: float, usable_bytes: float) -> str:
    if weight_bytes < usable_bytes:
        return "no room for the KV cache of a request"
    return (
        f"the weights of a rank take {shown_bytes(round(weight_bytes))}, and weights and KV cache may take "
        f"{shown_bytes(round(usable_bytes))} of its memory"
    )


def _held(cache_tokens: float, lengths: Lengths) -> Formula:
    numbers = {"tokens": cache_tokens, "tokens_of_a_request": lengths.decode_context}
    value = cache_tokens / lengths.decode_context
    return Formula("the same", "{tokens} / {tokens_of_a_request}", numbers, value, unit="requests")


def _is_fp8(description: Description, assumptions: Assumptions) -> bool:
    if assumptions.weights == "auto":
        return "fp8" in (description.weight_format.stored_as or "")
    return assumptions.weights == "fp8"
