"""The layouts of a model over a number of ranks: the contents of each rank, its memory, and the bytes exchanged.

Weights are counted on a model without memory (see models/summary.py), built as the rank would build it. The bytes
exchanged are the bytes that all ranks together send per token in one MoE layer, if all ranks have equally many tokens
and all experts are equally loaded. These bytes are for large steps. In small steps, both dispatchers use all-gather
(moe/dispatch/allgather.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moeserve.config.expert_layout import BYTES_OF_DTYPE, ExpertShape, Numbers, resolve_expert_parallel
from moeserve.config.resolve_parallel import layers_of_stages
from moeserve.config.settings import CacheDtypeName, DtypeName, ParallelSettings, QuantizationName
from moeserve.distributed.groups import unconnected
from moeserve.distributed.mesh import Mesh, share_of
from moeserve.errors import CheckpointError, SettingsError, shown
from moeserve.kv.layer_cache import CacheNeeds
from moeserve.layers.moe.placement.eplb import imbalance, rank_loads
from moeserve.layers.moe.placement.placement import Placement, read_loads
from moeserve.machine import shown_bytes
from moeserve.models.checkpoint.shards import Checkpoint
from moeserve.models.inspection import kept_checkpoint
from moeserve.models.model_config import ModelSpec
from moeserve.models.registry import Description, describe
from moeserve.models.summary import Part, summarize

BYTES_OF_CHOICE = 8  # expert ids are sent as int64
MAX_RANKS = 4096
MAX_RANKS_LISTED = 16  # with more ranks, as_text lists them only for a single layout


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The heads and experts of one rank."""

    rank: int
    replica: int
    stage: int = 0
    heads: tuple[int, int]  # first and last index
    experts: tuple[int, ...]  # experts of the first MoE layer; without loads, all layers are alike


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, which holds consecutive layers. Sizes are those of the stage's rank with the most weights."""

    first_layer: int
    num_layers: int
    weight_bytes: int
    parts: tuple[Part, ...]  # the weights by kind
    cache: CacheNeeds


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to use all ranks: dp replicas, each divided over tp ranks in each of pp pipeline stages.

    The experts of a layer are divided over the tp x dp ranks of its stage.
    """

    tp: int
    dp: int
    pp: int = 1
    refusal: str | None = None  # the reason why the layout is impossible; sizes are then unset
    heads_per_rank: int = 0
    experts_per_rank: tuple[int, int] = (0, 0)  # fewest and most
    expert_slices: int = 1  # above 1: each rank has a slice of every expert
    fullest_rank: float = 0.0  # expected rows of the fullest rank over the mean; mean over the layers
    weight_bytes: int = 0  # on the rank with the most weights
    cache_bytes_per_token: int = 0  # on the rank with the largest cache, per token of its replica
    stages: tuple[Stage, ...] = ()
    # Bytes that all ranks together send per token and layer in large steps:
    attention_bytes: int = 0  # all-gather before attention and reduce-scatter after it
    dispatch_bytes: float = 0.0  # all-to-all: expert ids to all ranks, rows to ranks of their experts, outputs
    allgather_bytes: float = 0.0  # all-gather: the same, but rows go to all ranks
    holders: tuple[Holder, ...] = ()  # by rank


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """All layouts of a model over a number of ranks, or the only one with a given tp."""

    model: str
    num_ranks: int
    dtype: DtypeName
    num_experts: int
    layouts: tuple[Layout, ...]
    hf_overrides: Mapping[str, Any] | None = None  # changes to config.json


def find_layouts(
    folder: Path,
    num_ranks: int,
    dtype: DtypeName | None,
    tp: int | None = None,
    *,
    kv_cache_dtype: CacheDtypeName = "auto",
    pp: int = 1,
    pipeline_layers: Sequence[int] | None = None,
    loads: Path | None = None,
    num_redundant: int = 0,
    expert_parallel: Literal["auto"] | bool = True,
    keeps_stored: bool = False,
    hf_overrides: Mapping[str, Any] | None = None,
) -> Layouts:
    """Return all layouts of `num_ranks` ranks, from most replicas to fewest, or only the one with the given tp.

    Args:
        pp: pipeline stages of each replica.
        pipeline_layers: number of layers of each stage; None: even shares.
        loads: file with the tokens of each routed expert; see `read_loads`.
        num_redundant: slots beyond one per expert, over all ranks together.
        expert_parallel: the engine's setting on a CPU with kernels. False: a layout of one replica slices its experts.
        keeps_stored: True: count weights as a CPU keeps them, if the shards exist. False: in `dtype`, or MXFP4.
        hf_overrides: changes to config.json.

    Raises:
        SettingsError: an impossible number of ranks, tp, stages or slots, loads of another model, a KV cache that
            the model does not support, or experts that cannot be sliced.
        CheckpointError: see `describe`.
    """
    _refuse_ranks(num_ranks, pp)
    description = describe(folder, hf_overrides=hf_overrides)
    config, dtype = description.model, dtype or description.dtype
    stage_layers = layers_of_stages(len(config.layers), pp, pipeline_layers, config.first_layers)
    sizes = _sizes(description, num_expert_ranks := num_ranks // pp, tp)
    # The placement depends only on the number of ranks of a stage, so all layouts share it.
    placements, fullest_rank = _place(config, num_expert_ranks, loads, num_redundant)
    parallel = ParallelSettings(
        tensor_parallel_size=num_expert_ranks,
        num_redundant_experts=num_redundant,
        expert_loads=None if loads is None else str(loads),
        expert_parallel=expert_parallel,
    )
    is_sliced = num_expert_ranks in sizes and _is_sliced(parallel, description, dtype)  # with a single replica
    checkpoint = _kept_checkpoint(folder, description, dtype) if keeps_stored else None
    layouts = []
    for size in sizes:
        mesh = Mesh(tp=size, dp=num_expert_ranks // size, pp=pp)
        placed = config.slice_experts(size) if is_sliced and mesh.dp == 1 else placements
        layout = _layout(description, mesh, dtype, kv_cache_dtype, placed, stage_layers, fullest_rank, checkpoint)
        layouts.append(layout)
    return Layouts(
        model=str(folder),
        num_ranks=num_ranks,
        dtype=dtype,
        num_experts=config.num_experts,
        hf_overrides=hf_overrides,
        layouts=tuple(layouts),
    )


def _kept_checkpoint(folder: Path, description: Description, dtype: DtypeName) -> Checkpoint | None:
    """Return the checkpoint if a CPU keeps its weights as they are stored; None if it does not, or has no shards."""
    with contextlib.suppress(CheckpointError):
        return kept_checkpoint(folder, description, dtype)
    return None


def _place(
    config: ModelSpec, num_ranks: int, loads: Path | None, num_redundant: int
) -> tuple[tuple[Placement, ...], float]:
    """Return the placement of experts in each layer, and the fullest rank's rows over the mean (mean of layers)."""
    loads_of_layer: Sequence[Sequence[float]] = ()
    if loads is not None:
        loads_of_layer = read_loads(loads, num_layers=config.num_sparse_layers, num_experts=config.num_experts)
    placements = config.place_experts(num_ranks, loads=loads_of_layer, num_redundant=num_redundant)
    loads_of_layer = loads_of_layer or [(1.0,) * config.num_experts] * len(placements)
    imbalances = list(map(imbalance, loads_of_layer, placements))
    return placements, sum(imbalances) / len(imbalances) if imbalances else 1.0


def _is_sliced(parallel: ParallelSettings, description: Description, dtype: DtypeName) -> bool:
    """Return True if each rank of a single replica on CPUs holds a slice of every expert."""
    quantization: QuantizationName | None = "mxfp4" if description.keeps_mxfp4(dtype) else None
    numbers = Numbers(device="cpu", dtype=dtype, quantization=quantization, keeps_bytes=dtype != "float16")
    return not resolve_expert_parallel(parallel, description.model.expert_shape, numbers)


def as_text(found: Layouts) -> str:
    """Return the layouts as a table. The contents of each rank follow if there are few ranks or one layout."""
    lines = [
        f"{found.num_ranks} ranks, {found.num_experts} experts in a layer, {found.dtype}",
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
        if layout.expert_slices > 1:
            experts += f" x 1/{layout.expert_slices}"
        lines.append(
            f"{start}{layout.heads_per_rank:>7}{experts:>10}{shown_bytes(layout.weight_bytes):>12}"
            f"{layout.cache_bytes_per_token:>13}{layout.attention_bytes:>12}{layout.dispatch_bytes:>12.0f}"
            f"{layout.allgather_bytes:>12.0f}"
        )
    is_one = len(found.layouts) == 1
    for layout in found.layouts:
        if layout.pp > 1 and is_one:
            lines += ["", *map(_stage_line, range(layout.pp), layout.stages)]
        if layout.holders and (is_one or found.num_ranks <= MAX_RANKS_LISTED):
            pp = f", pp {layout.pp}" if layout.pp > 1 else ""
            lines += ["", f"tp {layout.tp}, dp {layout.dp}{pp}"]
            lines += [_holder_line(holder, layout) for holder in layout.holders]
    return "\n".join(lines)


def _stage_line(number: int, stage: Stage) -> str:
    layers = _named("layer", range(stage.first_layer, stage.first_layer + stage.num_layers))
    return (
        f"stage {number}: {layers}, weights of {shown_bytes(stage.weight_bytes)} on a rank, "
        f"cache of {stage.cache.bytes_per_token} bytes per token"
    )


def _holder_line(holder: Holder, layout: Layout) -> str:
    first, last = holder.heads
    heads, experts = _named("head", range(first, last + 1)), _named("expert", holder.experts)
    stage = f" stage {holder.stage}," if layout.pp > 1 else ""
    share = f"1/{layout.expert_slices} of " if layout.expert_slices > 1 else ""
    return f"rank {holder.rank}: replica {holder.replica},{stage} {heads}, {share}{experts}"


def _refuse_ranks(num_ranks: int, pp: int) -> None:
    """Raise SettingsError for a number of ranks that is too large, or is not divisible by the number of stages."""
    if not 1 <= num_ranks <= MAX_RANKS:
        raise SettingsError(f"ranks={shown(num_ranks)} cannot be laid out; choose from 1 to {MAX_RANKS} ranks")
    if pp < 1 or num_ranks % pp:
        raise SettingsError(f"pipeline_parallel_size={shown(pp)} does not divide ranks={num_ranks}")


def _sizes(description: Description, num_ranks: int, tp: int | None) -> list[int]:
    """Return each tp that divides the ranks, or only the given one.

    Raises:
        SettingsError: the given tp does not divide the ranks or the heads.
    """
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    if tp is None:
        return sizes
    refusal_to_divide = description.model.refusal_to_divide
    refusal = f": {refusal_to_divide(tp)}" if tp in sizes else f" does not divide ranks={num_ranks}"
    if tp not in sizes or refusal_to_divide(tp) is not None:
        usable = ", ".join(str(size) for size in sizes if refusal_to_divide(size) is None)
        raise SettingsError(f"tp={shown(tp)}{refusal}; use one of {usable}")
    return [tp]


def _layout(
    description: Description,
    mesh: Mesh,
    dtype: DtypeName,
    kv_cache_dtype: CacheDtypeName,
    placements: Sequence[Placement],
    stage_layers: Sequence[int],
    fullest_rank: float,
    checkpoint: Checkpoint | None,
) -> Layout:
    config = description.model
    refusal = config.refusal_to_divide(mesh.tp)
    if refusal is not None:
        return Layout(tp=mesh.tp, dp=mesh.dp, pp=mesh.pp, refusal=refusal)
    slots = placements[0].logical_of_slot if placements else ((),) * (mesh.tp * mesh.dp)
    counts = list(map(len, slots))
    # Ranks of a stage differ in their number of experts, and by a row or two of weights that do not divide evenly.
    # The rank with the most experts represents its stage.
    fullest = counts.index(max(counts))
    ends = list(itertools.accumulate(stage_layers, initial=0))
    stages = []
    for number, layers in enumerate(itertools.starmap(range, itertools.pairwise(ends))):
        groups = unconnected(mesh, mesh.group("ep", number * mesh.tp)[fullest])
        found = summarize(description, dtype, groups, placements, layers, kv_cache_dtype, checkpoint)
        stages.append(Stage(layers.start, len(layers), found.weight_bytes, found.parts, found.cache))
    num_heads = config.costs_of_attention(mesh.tp)[0].num_heads
    row_bytes = config.hidden_size * BYTES_OF_DTYPE[dtype]
    dispatched, gathered = (
        _exchange(config.expert_shape, placements, BYTES_OF_DTYPE[dtype]) if placements else (0.0, 0.0)
    )
    return Layout(
        tp=mesh.tp,
        dp=mesh.dp,
        pp=mesh.pp,
        heads_per_rank=num_heads // mesh.tp,
        experts_per_rank=(min(counts), max(counts)),
        expert_slices=placements[0].num_slices if placements else 1,
        fullest_rank=1.0 if placements and placements[0].num_slices > 1 else fullest_rank,
        weight_bytes=max(stage.weight_bytes for stage in stages),
        cache_bytes_per_token=max(stage.cache.bytes_per_token for stage in stages),
        stages=tuple(stages),
        # A row goes from its token's rank to each other rank of the replica, and each of these returns a partial sum.
        attention_bytes=2 * (mesh.tp - 1) * row_bytes,
        dispatch_bytes=dispatched,
        allgather_bytes=gathered,
        holders=tuple(_holder(rank, mesh, num_heads, slots) for rank in range(mesh.world_size)),
    )


def _holder(rank: int, mesh: Mesh, num_heads: int, slots: Sequence[tuple[int, ...]]) -> Holder:
    at = mesh.coordinates(rank)
    heads = share_of(num_heads, at.tp, mesh.tp)
    experts = slots[at.dp * mesh.tp + at.tp]
    return Holder(rank=rank, replica=at.dp, stage=at.pp, heads=(heads.start, heads.stop - 1), experts=experts)


def _exchange(shape: ExpertShape | None, placements: Sequence[Placement], value_bytes: int) -> tuple[float, float]:
    """Return the bytes that all ranks send per token in a large step, with all-to-all and with all-gather.

    Both send the expert ids to every other rank, and return one output row for each expert on another rank. All-to-all
    sends a token's row once to each other rank that has one of the token's experts. With k experts per token, a rank
    with c of the E experts is needed with probability 1 - C(E - c, k) / C(E, k). One of n copies of an expert counts as
    1 / n.
    """
    assert shape is not None
    num_experts, top_k, num_ranks = shape.num_experts, shape.top_k, placements[0].num_ranks
    row_bytes = shape.hidden_size * value_bytes
    num_others = num_ranks - 1
    if placements[0].num_slices > 1:
        # Each other rank receives the row and its expert ids, and returns a float32 partial sum for each expert.
        sum_bytes = shape.hidden_size * BYTES_OF_DTYPE["float32"]
        sliced = num_others * (top_k * BYTES_OF_CHOICE + row_bytes + top_k * sum_bytes)
        return sliced, sliced
    needed = 0.0
    for count in rank_loads([1.0] * num_experts, placements[0]):
        chance_of_none = 1.0
        for chosen in range(top_k):
            chance_of_none *= max(0.0, num_experts - count - chosen) / (num_experts - chosen)
        needed += 1 - chance_of_none
    elsewhere = num_others / num_ranks  # fraction of the ranks other than the token's own
    both_ways = num_others * top_k * BYTES_OF_CHOICE + top_k * elsewhere * row_bytes  # expert ids there, outputs back
    return both_ways + needed * elsewhere * row_bytes, both_ways + num_others * row_bytes


def _named(kind: str, numbers: Sequence[int]) -> str:
    """Return text such as "no heads", "head 3" or "heads 3-5, 9"."""
    if not numbers:
        return f"no {kind}s"
    return f"{kind} {numbers[0]}" if len(numbers) == 1 else f"{kind}s {_ranges(numbers)}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text: "3-5, 9" for 3, 4, 5, 9."""
    # Consecutive numbers differ from their indices by the same amount.
    runs = itertools.groupby(enumerate(numbers), key=lambda each: each[1] - each[0])
    ends = ((run[0][1], run[-1][1]) for run in (list(each) for _, each in runs))
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)
