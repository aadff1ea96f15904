"""The ways to lay out a model over a number of ranks: who holds what, what it takes, and what travels.

Weights are counted on a model without memory (see models/summary.py), built as the rank would build it. What travels is
counted for one token in one layer, under the assumption that a router chooses all experts equally often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moeserve.config import DtypeName
from moeserve.distributed.group import unconnected
from moeserve.distributed.mesh import Mesh, share_of
from moeserve.machine import shown_bytes
from moeserve.models.registry import Description, describe
from moeserve.models.summary import summarize
from moeserve.moe.layer import MoEConfig
from moeserve.moe.placement import Placement

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to use all ranks: dp replicas of attention, each divided over tp ranks; experts over all of them."""

    tp: int
    dp: int
    refusal: str | None  # why it cannot be; the figures below are then zero
    heads_per_rank: int
    experts_per_rank: tuple[int, int]  # fewest and most
    weight_bytes: int  # of the rank that has most
    cache_bytes_per_token: int  # of one rank, for each token of its replica
    attention_bytes: float  # received by a rank per token of its replica and layer: gathered before, divided after
    dispatch_bytes: float  # sent by a rank per token of its own and layer, to the experts' ranks and back
    allgather_bytes: float  # the same if tokens are sent to all ranks instead


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """All layouts of a model over so many ranks."""

    model: str
    num_ranks: int
    dtype: DtypeName
    num_experts: int
    layouts: tuple[Layout, ...]


def find_layouts(folder: Path, num_ranks: int, dtype: DtypeName | None) -> Layouts:
    """Every pair of sizes whose product is `num_ranks`, from most replicas to fewest.

    Raises:
        CheckpointError: see `describe`.
    """
    description = describe(folder)
    dtype = dtype or description.dtype
    sizes = [tp for tp in range(1, num_ranks + 1) if num_ranks % tp == 0]
    moe = description.model.first_moe
    return Layouts(
        model=str(folder),
        num_ranks=num_ranks,
        dtype=dtype,
        num_experts=moe.router.num_experts if moe else 0,
        layouts=tuple(_layout(description, Mesh(tp=tp, dp=num_ranks // tp), dtype) for tp in sizes),
    )


def as_text(found: Layouts) -> str:
    """A table for people, and who holds what in the layouts of few ranks."""
    lines = [
        f"{found.num_ranks} ranks, {found.num_experts} experts in a layer, {found.dtype}",
        "",
        f"{'tp':>4}{'dp':>5}{'heads':>7}{'experts':>10}{'weights':>12}{'cache/token':>13}"
        f"{'attention':>12}{'all-to-all':>12}{'all-gather':>12}",
        f"{'':>4}{'':>5}{'per rank':>17}{'per rank':>12}{'per rank':>13}{'bytes per token and layer':>36}",
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
            f"{layout.cache_bytes_per_token:>13}{layout.attention_bytes:>12.0f}{layout.dispatch_bytes:>12.0f}"
            f"{layout.allgather_bytes:>12.0f}"
        )
    return "\n".join(lines)


def who_holds_what(folder: Path, mesh: Mesh) -> Iterator[str]:
    """One line per rank: its replica, its heads and its experts."""
    model = describe(folder).model
    moe = model.first_moe
    num_heads = model.layers[0].attention.num_heads
    placement = Placement.even(moe.router.num_experts, mesh.world_size) if moe else None
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        heads = share_of(num_heads, at.tp, mesh.tp)
        experts = _ranges(placement.logical_of_slot[rank]) if placement else "none"
        yield f"rank {rank}: replica {at.dp}, heads {heads.start}-{heads.stop - 1}, experts {experts}"


def _layout(description: Description, mesh: Mesh, dtype: DtypeName) -> Layout:
    config = description.model
    refusal = config.refusal_to_divide(mesh.tp)
    if refusal is not None:
        return Layout(
            tp=mesh.tp,
            dp=mesh.dp,
            refusal=refusal,
            heads_per_rank=0,
            experts_per_rank=(0, 0),
            weight_bytes=0,
            cache_bytes_per_token=0,
            attention_bytes=0,
            dispatch_bytes=0,
            allgather_bytes=0,
        )
    moe = config.first_moe
    counts = [0] * mesh.world_size
    if moe is not None:
        slots = Placement.even(moe.router.num_experts, mesh.world_size).logical_of_slot
        counts = [len(experts) for experts in slots]
    # Ranks differ in their experts, and by a row or two in what does not divide: the fullest stands for all.
    fullest = counts.index(max(counts))
    summary = summarize(description, dtype, unconnected(mesh, fullest))
    row_bytes = config.hidden_size * BYTES_OF_DTYPE[dtype]
    dispatched, gathered = _exchange(moe, counts, row_bytes)
    return Layout(
        tp=mesh.tp,
        dp=mesh.dp,
        refusal=None,
        heads_per_rank=config.layers[0].attention.num_heads // mesh.tp,
        experts_per_rank=(min(counts), max(counts)),
        weight_bytes=summary.weight_bytes,
        cache_bytes_per_token=summary.cache_bytes_per_token,
        attention_bytes=2 * (mesh.tp - 1) / mesh.tp * row_bytes,
        dispatch_bytes=dispatched,
        allgather_bytes=gathered,
    )


def _exchange(moe: MoEConfig | None, counts: list[int], row_bytes: int) -> tuple[float, float]:
    """Bytes that a token's rank sends for it and gets back: with all-to-all, and with all-gather.

    A token's row goes once to each other rank that has one of its experts. With experts chosen alike, the chance that a
    rank with c of E experts is needed by a token of k experts is 1 - C(E - c, k) / C(E, k). What comes back is one row
    per expert elsewhere.
    """
    if moe is None or len(counts) == 1:
        return 0.0, 0.0
    num_experts, top_k = moe.router.num_experts, moe.router.top_k
    needed = 0.0
    for count in counts:
        chance_of_none = 1.0
        for chosen in range(top_k):
            chance_of_none *= max(0, num_experts - count - chosen) / (num_experts - chosen)
        needed += 1 - chance_of_none
    elsewhere = 1 - 1 / len(counts)  # of the ranks, on average over the tokens' own
    back = top_k * elsewhere * row_bytes
    return needed * elsewhere * row_bytes + back, (len(counts) - 1) * row_bytes + back


def _ranges(numbers: tuple[int, ...]) -> str:
    """3, 4, 5, 9 as "3-5, 9"."""
    if not numbers:
        return "none"
    parts, first = [], numbers[0]
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        if following != number + 1:
            parts.append(f"{first}" if first == number else f"{first}-{number}")
            first = following if following is not None else first
    return ", ".join(parts)
