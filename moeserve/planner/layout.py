"""The layouts of a model over a number of ranks: contents of each rank, memory, and bytes exchanged.

Weights are counted on a model without memory (see models/summary.py), built as the rank would build it. Exchanged bytes
are those that all ranks together send for one token in one layer with experts, if all ranks have equally many tokens
and a router chooses all experts equally often. Dispatch is that of large steps; in small ones both dispatchers use
all-gather (moe/dispatch/allgather.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moeserve.config.settings import DtypeName
from moeserve.distributed.groups import unconnected
from moeserve.distributed.mesh import Mesh, share_of
from moeserve.errors import SettingsError, shown
from moeserve.expert_placement.eplb import Topology, eplb, imbalance, place_experts, rank_loads
from moeserve.expert_placement.placement import Placement, read_loads
from moeserve.machine import shown_bytes
from moeserve.models.registry import Description, describe
from moeserve.models.summary import Part, summarize
from moeserve.moe.layer import MoEConfig

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
BYTES_OF_CHOICE = 8  # expert ids travel as int64
MAX_RANKS = 4096
MAX_RANKS_LISTED = 16  # with more, the text lists ranks only if a single layout is shown


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The heads and experts of one rank."""

    rank: int
    replica: int
    heads: tuple[int, int]  # first and last
    experts: tuple[int, ...]  # of the first layer with experts; without loads, of each


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to use all ranks: dp replicas of attention, each divided over tp ranks; experts over all of them."""

    tp: int
    dp: int
    refusal: str | None = None  # why the layout is impossible; all other fields are then zero or empty
    heads_per_rank: int = 0
    experts_per_rank: tuple[int, int] = (0, 0)  # fewest and most
    fullest_rank: float = 0.0  # expected rows of the fullest rank over the mean; mean of the layers
    weight_bytes: int = 0  # of the rank that has most
    parts: tuple[Part, ...] = ()  # the same by kind
    cache_bytes_per_token: int = 0  # of one rank, for each token of its replica
    # Sent by all ranks together, per token and layer, in large steps:
    attention_bytes: int = 0  # gathered before attention, scattered after it
    dispatch_bytes: float = 0.0  # expert ids to all ranks, rows to those that need them, outputs back
    allgather_bytes: float = 0.0  # the same if rows go to all ranks instead
    holders: tuple[Holder, ...] = ()  # by rank


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The layouts of a model over a number of ranks: all of them, or one."""

    model: str
    num_ranks: int
    dtype: DtypeName
    num_experts: int
    num_shared: int  # further experts that every token chooses; 0: shared experts are on every rank
    num_group_parts: int  # equal parts of the ranks that hold whole groups of experts each; 1: experts are anywhere
    layouts: tuple[Layout, ...]


def find_layouts(
    folder: Path,
    num_ranks: int,
    dtype: DtypeName | None,
    tp: int | None = None,
    *,
    loads: Path | None = None,
    num_redundant: int = 0,
    shared_as_routed: bool = False,
    num_nodes: int = 1,
    keeps_groups: bool = False,
) -> Layouts:
    """Return all layouts of `num_ranks` ranks, from most replicas to fewest, or only the one with this tp.

    Args:
        loads: file of the tokens of each routed expert; see `read_loads`.
        num_redundant: slots beyond one for each expert, over all ranks together.
        shared_as_routed: place shared experts as routed ones that every token chooses, with copies as needed, as
            DeepSeek-V3 does on 320 ranks (arXiv 2412.19437, section 3.4.2); otherwise each rank has them.
        num_nodes: equal ones, in which the ranks are.
        keeps_groups: nodes hold whole groups of the router's experts, or groups whole nodes, as the "node_limited"
            exchange assumes; otherwise an expert may be anywhere.

    Raises:
        SettingsError: an impossible number of ranks, tp or number of slots, loads of another model, shared experts of
            another width than the routed ones, or groups that cannot be kept.
        CheckpointError: see `describe`.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise SettingsError(f"ranks={shown(num_ranks)} cannot be laid out; choose from 1 to {MAX_RANKS} ranks")
    description = describe(folder)
    dtype = dtype or description.dtype
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    if tp is not None:
        _refuse_tp(description, tp, num_ranks, sizes)
        sizes = [tp]
    moe = description.model.first_moe
    num_shared = _num_shared(moe) if shared_as_routed else 0
    topology = group_topology(moe, num_shared, num_nodes) if keeps_groups else Topology()
    placed = _place(description, num_ranks, loads, num_redundant, num_shared, topology)
    return Layouts(
        model=str(folder),
        num_ranks=num_ranks,
        dtype=dtype,
        num_experts=moe.router.num_experts if moe else 0,
        num_shared=num_shared,
        num_group_parts=topology.num_nodes,
        layouts=tuple(_layout(description, Mesh(tp=size, dp=num_ranks // size), dtype, placed) for size in sizes),
    )


def as_text(found: Layouts) -> str:
    """Return a table, followed by the contents of each rank if the ranks are few or there is one layout."""
    lines = [
        f"{found.num_ranks} ranks, {found.num_experts} experts in a layer{_shared_text(found)}, {found.dtype}",
        *_groups_text(found),
        "",
        f"{'tp':>4}{'dp':>5}{'heads':>7}{'experts':>10}{'weights':>12}{'cache/token':>13}"
        f"{'attention':>12}{'all-to-all':>12}{'all-gather':>12}",
        f"{'':>4}{'':>5}{'per rank':>17}{'per rank':>12}{'per rank':>13}{'bytes sent by all ranks,':>36}",
        f"{'':>51}{'per token and layer, in large steps':>36}",
    ]
    for layout in found.layouts:
        start = f"{layout.tp:>4}{layout.dp:>5}"
        if layout.refusal is not None:
            lines.append(f"{start}  {layout.refusal}")
            continue
        fewest, most = layout.experts_per_rank
        experts = f"{most}" if fewest == most else f"{fewest}-{most}"
        lines.append(
            f"{start}{layout.heads_per_rank:>7}{experts:>10}{shown_bytes(layout.weight_bytes):>12}"
            f"{layout.cache_bytes_per_token:>13}{layout.attention_bytes:>12}{layout.dispatch_bytes:>12.0f}"
            f"{layout.allgather_bytes:>12.0f}"
        )
    is_one = len(found.layouts) == 1
    for layout in found.layouts:
        if layout.holders and (is_one or found.num_ranks <= MAX_RANKS_LISTED):
            lines += ["", f"tp {layout.tp}, dp {layout.dp}", *map(_holder_line, layout.holders)]
    return "\n".join(lines)


def _shared_text(found: Layouts) -> str:
    shared = range(found.num_experts, found.num_experts + found.num_shared)
    return f" and {_named('expert', shared)} chosen by every token" if shared else ""


def _groups_text(found: Layouts) -> list[str]:
    if found.num_group_parts == 1:
        return []
    return [f"each {found.num_ranks // found.num_group_parts} ranks in order hold whole groups of the router's experts"]


def _holder_line(holder: Holder) -> str:
    first, last = holder.heads
    heads, experts = _named("head", range(first, last + 1)), _named("expert", holder.experts)
    return f"rank {holder.rank}: replica {holder.replica}, {heads}, {experts}"


def _refuse_tp(description: Description, tp: int, num_ranks: int, sizes: list[int]) -> None:
    """Raise SettingsError for a tp that does not divide the ranks or the heads."""
    refusal_to_divide = description.model.refusal_to_divide
    usable = ", ".join(str(size) for size in sizes if refusal_to_divide(size) is None)
    if tp not in sizes:
        raise SettingsError(f"tp={shown(tp)} does not divide ranks={num_ranks}; use one of {usable}")
    refusal = refusal_to_divide(tp)
    if refusal is not None:
        raise SettingsError(f"tp={tp}: {refusal}; use one of {usable}")


@dataclass(frozen=True)
class _Placed:
    """The placement of experts, which depends on the number of ranks alone and is the same for all layouts."""

    slots: tuple[tuple[int, ...], ...]  # by rank: of the first layer with experts
    expected: tuple[float, ...]  # by rank: expected number of its experts that a token chooses
    fullest_rank: float
    num_shared: int


def _num_shared(moe: MoEConfig | None) -> int:
    """Return the number of routed experts that equal the shared ones, which form one network."""
    if moe is None or moe.shared is None:
        raise SettingsError("shared_as_routed: the model has no shared experts")
    if moe.shared.width % moe.expert_width:
        raise SettingsError(
            f"shared_as_routed: shared experts of width {moe.shared.width} cannot be divided into experts of width "
            f"{moe.expert_width}, which share their slots"
        )
    return moe.shared.width // moe.expert_width


def group_topology(moe: MoEConfig | None, num_shared: int, num_nodes: int) -> Topology:
    """Return the parts of the ranks that must hold whole groups: nodes, or several nodes if they outnumber groups.

    Raises:
        SettingsError: there are no groups, they cannot be divided over nodes, or some experts belong to none.
    """
    num_groups = moe.router.num_groups if moe else 1
    if num_groups == 1:
        raise SettingsError("exchange=node_limited: the model's router does not choose groups of experts; use by_node")
    if num_shared:
        raise SettingsError(
            "exchange=node_limited: with shared_as_routed, tokens also choose experts that are in no group, on nodes "
            "anywhere; use by_node"
        )
    if num_groups % num_nodes and num_nodes % num_groups:
        raise SettingsError(
            f"exchange=node_limited: {num_groups} groups of experts and {num_nodes} nodes: one number must divide the "
            f"other, so that nodes hold whole groups or groups whole nodes; use by_node"
        )
    return Topology(num_nodes=min(num_nodes, num_groups), num_groups=num_groups)


def check_groups(slots: Sequence[Sequence[int]], num_experts: int, topology: Topology) -> None:
    """Check that each part of the ranks has whole groups of experts.

    Args:
        slots: by rank, its experts.

    Raises:
        SettingsError: a group is divided.
    """
    part_of_group: dict[int, int] = {}
    for rank, experts in enumerate(slots):
        part = rank * topology.num_nodes // len(slots)
        for group in {expert * topology.num_groups // num_experts for expert in experts}:
            if part_of_group.setdefault(group, part) != part:
                size = len(slots) // topology.num_nodes
                raise SettingsError(
                    f"exchange=node_limited: each {size} ranks in order must hold whole groups of experts, but "
                    f"{sum(map(len, slots))} slots on {len(slots)} ranks divide group {group} of the router's "
                    f"{topology.num_groups}; use by_node, or other numbers of redundant experts and ranks"
                )


def with_shared(loads: Sequence[float], top_k: int, num_shared: int) -> list[float]:
    """Return a layer's loads of routed experts, followed by those of shared ones, which every token chooses."""
    return [*loads, *[sum(loads) / top_k] * num_shared]


def _place(
    description: Description,
    num_ranks: int,
    path: Path | None,
    num_redundant: int,
    num_shared: int,
    topology: Topology,
) -> _Placed:
    config = description.model
    moe = config.first_moe
    if moe is None:
        if path is not None or num_redundant:
            raise SettingsError("loads and num_redundant: the model has no experts to place")
        return _Placed(((),) * num_ranks, (0.0,) * num_ranks, 1.0, 0)
    num_layers, num_experts, top_k = config.num_sparse_layers, config.num_experts, moe.router.top_k
    loads: Sequence[tuple[float, ...]] = ()
    if path is not None:
        loads = read_loads(path, num_layers=num_layers, num_experts=num_experts)
    alike = (1.0,) * num_experts
    if num_shared:
        loads = tuple(tuple(with_shared(of_layer, top_k, num_shared)) for of_layer in loads or (alike,) * num_layers)
    layers_of_loads = Counter(loads)  # many layers may be equal, and placing takes time
    placements: Sequence[Placement]
    if topology.num_nodes > 1:  # in order, copies would be away from their groups
        layers_of_loads = layers_of_loads or Counter([alike])
        num_slots = num_experts + num_redundant
        placements = [eplb(of_layer, num_ranks, num_slots, topology) for of_layer in layers_of_loads]
        for placement in placements:
            check_groups(placement.logical_of_slot, num_experts, topology)
    else:
        placements = place_experts(
            tuple(layers_of_loads),
            num_layers=len(layers_of_loads) or 1,
            num_experts=num_experts + num_shared,
            num_ranks=num_ranks,
            num_redundant=num_redundant,
        )
        layers_of_loads = layers_of_loads or Counter([alike])
    fullest = sum(
        imbalance(of_layer, placement) * count
        for placement, (of_layer, count) in zip(placements, layers_of_loads.items(), strict=True)
    )
    of_token = [top_k / num_experts] * num_experts + [1.0] * num_shared
    return _Placed(
        slots=placements[0].logical_of_slot,
        expected=rank_loads(of_token, placements[0]),
        fullest_rank=fullest / layers_of_loads.total(),
        num_shared=num_shared,
    )


def _layout(description: Description, mesh: Mesh, dtype: DtypeName, placed: _Placed) -> Layout:
    config = description.model
    refusal = config.refusal_to_divide(mesh.tp)
    if refusal is not None:
        return Layout(tp=mesh.tp, dp=mesh.dp, refusal=refusal)
    counts = [len(experts) for experts in placed.slots]
    parts, cache_bytes_per_token = _parts(description, mesh, dtype, max(counts), placed.num_shared)
    num_heads = config.layers[0].attention.num_heads
    row_bytes = config.hidden_size * BYTES_OF_DTYPE[dtype]
    dispatched, gathered = _exchange(config.first_moe, placed, row_bytes)
    return Layout(
        tp=mesh.tp,
        dp=mesh.dp,
        heads_per_rank=num_heads // mesh.tp,
        experts_per_rank=(min(counts), max(counts)),
        fullest_rank=placed.fullest_rank,
        weight_bytes=sum(part.num_bytes for part in parts),
        parts=parts,
        cache_bytes_per_token=cache_bytes_per_token,
        # A row from the token's rank to each other one of its replica, and a partial sum back from each.
        attention_bytes=2 * (mesh.tp - 1) * row_bytes,
        dispatch_bytes=dispatched,
        allgather_bytes=gathered,
        holders=tuple(_holder(rank, mesh, num_heads, experts) for rank, experts in enumerate(placed.slots)),
    )


def _parts(
    description: Description, mesh: Mesh, dtype: DtypeName, num_slots: int, num_shared: int
) -> tuple[tuple[Part, ...], int]:
    """Return the weights of a rank with this many slots for experts, and the bytes of its cache for a token."""
    # Each expert is counted once, then scaled to the slots, which are equally large. Ranks differ in their experts, and
    # by a row or two in weights that do not divide evenly: the fullest rank stands for all.
    placements = description.model.place_experts(mesh.world_size)
    counted = [len(experts) for experts in placements[0].logical_of_slot] if placements else [0]
    rank = counted.index(max(counted))
    summary = summarize(description, dtype, unconnected(mesh, rank), placements)
    parts = []
    for part in summary.parts:
        if part.name == "routed experts":
            part = replace(
                part,
                num_parameters=part.num_parameters * num_slots // counted[rank],
                num_bytes=part.num_bytes * num_slots // counted[rank],
            )
        if not (num_shared and part.name == "shared experts"):
            parts.append(part)
    return tuple(parts), summary.cache_bytes_per_token


def _holder(rank: int, mesh: Mesh, num_heads: int, experts: tuple[int, ...]) -> Holder:
    at = mesh.coordinates(rank)
    heads = share_of(num_heads, at.tp, mesh.tp)
    return Holder(rank=rank, replica=at.dp, heads=(heads.start, heads.stop - 1), experts=experts)


def _exchange(moe: MoEConfig | None, placed: _Placed, row_bytes: int) -> tuple[float, float]:
    """Return the bytes that all ranks send for a token in a large step, with all-to-all and with all-gather.

    In both, the expert ids go to every other rank, and one output row comes back per expert elsewhere. With all-to-all
    the token's row goes once to each other rank that has one of its experts. A rank with c of E experts is needed by a
    token of k experts with probability 1 - C(E - c, k) / C(E, k); a copy of an expert with n copies counts 1 / n.
    """
    num_ranks = len(placed.slots)
    if moe is None or num_ranks == 1:
        return 0.0, 0.0
    num_experts, top_k = moe.router.num_experts + placed.num_shared, moe.router.top_k + placed.num_shared
    needed = 0.0
    for expected in placed.expected:
        count = expected * num_experts / top_k
        chance_of_none = 1.0
        for chosen in range(top_k):
            chance_of_none *= max(0.0, num_experts - count - chosen) / (num_experts - chosen)
        needed += 1 - chance_of_none
    elsewhere = 1 - 1 / num_ranks  # share of ranks other than the token's own
    num_others = num_ranks - 1
    both_ways = num_others * top_k * BYTES_OF_CHOICE + top_k * elsewhere * row_bytes  # expert ids there, outputs back
    return both_ways + needed * elsewhere * row_bytes, both_ways + num_others * row_bytes


def _named(kind: str, numbers: Sequence[int]) -> str:
    """Return text such as "no heads", "head 3" or "heads 3-5, 9"."""
    if not numbers:
        return f"no {kind}s"
    return f"{kind} {numbers[0]}" if len(numbers) == 1 else f"{kind}s {_ranges(numbers)}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return 3, 4, 5, 9 as "3-5, 9"."""
    parts, first = [], numbers[0]
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        if following != number + 1:
            parts.append(f"{first}" if first == number else f"{first}-{number}")
            first = following if following is not None else first
    return ", ".join(parts)
