"""Rows of the weight mapping for experts, in the layouts that checkpoints store.

- each expert by itself: `experts.7.gate_proj.weight` [width, hidden], `up_proj`, and `down_proj` [hidden, width];
- stacked: `experts.gate_proj.weight` [experts, width, hidden], `up_proj`, and `down_proj` [experts, hidden, width];
- fused: `experts.gate_up_proj` [experts, 2 * width, hidden], gates before ups, and `experts.down_proj`; experts without
  gates have `up_proj` [experts, width, hidden] instead;
- transposed: `experts.gate_up_proj` [experts, hidden, 2 * width], and `experts.down_proj` [experts, width, hidden];
- interleaved: the same shapes under `experts.interleaved`, with alternating outputs of gate and up;
- in turns: `experts.in_turns.gate_up_proj` [experts, 2 * width, hidden], with alternating rows of gate and up, and
  `down_proj` as in the fused layout;
- one below the other: `experts.below.gate_proj` [experts * width, hidden], `up_proj`, and `down_proj` transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from moeserve.layers.rows import (
    At,
    Destination,
    Row,
    mxfp4_matrix,
    one_of_stack,
    rows_of_heads,
    some_columns,
    some_rows,
    whole,
)
from moeserve.layers.weights import AnyWeights

if TYPE_CHECKING:
    from moeserve.layers.moe.layer import MoELayer

GATE_UP = ("gate_proj", "up_proj")


def expert_rows(at: At, moe: MoELayer) -> Iterator[Row]:
    """Yield the weight mapping of all experts.

    Args:
        at: the place of the experts.
    """
    num_parts = moe.experts.gate_up.open.num_parts
    if moe.config.num_fixed:
        num_routed = moe.placement.num_logical - moe.config.num_fixed
        yield from _some_fused(at, moe, range(num_routed))
        yield from _some_fused(at.under("fixed"), moe, range(num_routed, moe.placement.num_logical))
        return
    fused = "gate_up_proj" if num_parts == 2 else "up_proj"
    if at.has(f"0.{GATE_UP[-1]}.weight"):
        yield from _separate(at, moe)
    elif any(at.has(f"interleaved.{name}") for name in ("gate_up_proj", "gate_up_proj_blocks")):
        yield from _interleaved(at.under("interleaved"), moe)
    elif at.has("in_turns.gate_up_proj"):
        yield from _some_fused(at, moe, range(moe.placement.num_logical))
    elif at.has("below.up_proj"):
        yield from _one_below_the_other(at.under("below"), moe)
    elif at.has(f"transposed.{fused}"):
        yield from _transposed(at.under("transposed"), moe)
    elif at.has(fused):
        is_transposed = at.stored[at(fused)][2:] not in ((), (moe.experts.down.shape[1],))
        yield from (_transposed if is_transposed else _fused)(at, moe)
    elif at.has(f"{GATE_UP[-num_parts]}.weight"):
        yield from _stacked(at, moe)
    else:
        yield from _separate(at, moe)


def _separate(at: At, moe: MoELayer) -> Iterator[Row]:
    gate_up, down, share, width = moe.experts.gate_up, moe.experts.down, moe.experts.width, moe.config.expert_width
    num_parts = gate_up.open.num_parts
    inner_names = GATE_UP[-num_parts:]
    for slot, expert in enumerate(moe.local_experts):
        if gate_up.is_mxfp4:
            inner = list(_mxfp4_matrices(gate_up, slot, num_parts))
            (of_down,) = _mxfp4_matrices(down, slot, 1)
        else:
            parts = gate_up.open.weight_eOI[slot].chunk(num_parts)
            inner = [some_rows(part_ID, share, width, gate_up) for part_ID in parts]
            of_down = some_columns(down.open.weight_eOI[slot], share, width, down)
        own = at.under(str(expert))
        for name, place in zip(inner_names, inner, strict=True):
            yield own(f"{name}.weight"), place
        yield own("down_proj.weight"), of_down
        if gate_up.bias is not None:
            for name, bias_I in zip(inner_names, gate_up.bias[slot].chunk(num_parts), strict=True):
                yield own(f"{name}.bias"), some_rows(bias_I, share, width)
            yield own("down_proj.bias"), None  # on only one of the ranks that share an expert
        if down.bias is not None:
            yield own("down_proj.bias"), whole(down.bias[slot])
    # Zero experts have no weights, but transformers saves unused weights for them.
    num_stored = moe.placement.num_logical + moe.config.router.num_zero_experts + moe.config.num_unused_experts
    for expert in set(range(num_stored)) - set(moe.local_experts):
        for name in (*GATE_UP, "down_proj"):
            yield at(f"{expert}.{name}.weight"), None
            yield at(f"{expert}.{name}.bias"), None


def _mxfp4_matrices(weights: AnyWeights, slot: int, num_parts: int) -> Iterator[Destination]:
    """Yield the destinations of the matrices that are stacked in a weight, such as gate and up."""
    codes_eOI, scales_eOG = weights.open.weight_eOI, weights.open.scales_eGB
    assert scales_eOG is not None
    for codes_OI, scales_OG in zip(codes_eOI[slot].chunk(num_parts), scales_eOG[slot].chunk(num_parts), strict=True):
        yield mxfp4_matrix(codes_OI, scales_OG, weights)


def _fused(at: At, moe: MoELayer) -> Iterator[Row]:
    gate_up, down, share, width = moe.experts.gate_up, moe.experts.down, moe.experts.width, moe.config.expert_width
    num_experts, hidden_size = moe.placement.num_logical, down.shape[1]
    num_parts = gate_up.open.num_parts
    name = "gate_up_proj" if num_parts == 2 else "up_proj"
    parts = [slice(0, num_parts * width)]  # gates come before ups
    if share != slice(0, width):
        parts = [slice(part * width + share.start, part * width + share.stop) for part in range(num_parts)]
    yield at(name), None
    yield at("down_proj"), None
    num_stored = num_experts + moe.config.router.num_zero_experts  # transformers has gates of zero experts, not used
    if at.stored[at(name)][:1] != (num_stored,):
        num_stored = num_experts
    for slot, expert in enumerate(moe.local_experts):
        one = slice(expert, expert + 1)
        memories = gate_up.open.weight_eOI[slot : slot + 1].chunk(len(parts), dim=1)
        for memory, part in zip(memories, parts, strict=True):
            yield at(name), Destination(memory, (num_stored, num_parts * width, hidden_size), (one, part), gate_up)
        shape = num_experts, hidden_size, width
        place = Destination(down.open.weight_eOI[slot : slot + 1], shape, (one, slice(0, hidden_size), share), down)
        yield at("down_proj"), place


def _some_fused(at: At, moe: MoELayer, experts: range) -> Iterator[Row]:
    """Yield the weight mapping of some experts: fused, with alternating gate and up rows, or in separate tensors."""
    gate_up, down, share, width = moe.experts.gate_up, moe.experts.down, moe.experts.width, moe.config.expert_width
    hidden_size = down.shape[1]
    gates_ups = gate_up.open.weight_eOI.unflatten(1, (2, -1))
    table: list[tuple[str, Tensor, int, slice, AnyWeights]]
    if at.has("in_turns.gate_up_proj"):
        at = at.under("in_turns")
        table = [("gate_up_proj", gates_ups.transpose(1, 2), 2 * width, rows_of_heads(share, 2), gate_up)]
    elif at.has("gate_proj"):
        gate, up = gates_ups.unbind(1)
        table = [("gate_proj", gate, width, share, gate_up), ("up_proj", up, width, share, gate_up)]
    else:
        table = [
            ("gate_up_proj", part, 2 * width, slice(first + share.start, first + share.stop), gate_up)
            for first, part in zip((0, width), gates_ups.unbind(1), strict=True)
        ]
    for name in {"down_proj", *(name for name, *_ in table)}:
        yield at(name), None
    for slot, expert in enumerate(moe.local_experts):
        if expert not in experts:
            continue
        one = slice(expert - experts.start, expert - experts.start + 1)
        for name, memory, num_rows, rows, owner in table:
            yield (
                at(name),
                Destination(memory[slot : slot + 1], (len(experts), num_rows, hidden_size), (one, rows), owner),
            )
        shape, parts = (len(experts), hidden_size, width), (one, slice(0, hidden_size), share)
        yield at("down_proj"), Destination(down.open.weight_eOI[slot : slot + 1], shape, parts, down)


def _stacked(at: At, moe: MoELayer) -> Iterator[Row]:
    gate_up, down, share, width = moe.experts.gate_up, moe.experts.down, moe.experts.width, moe.config.expert_width
    num_experts, hidden_size = moe.placement.num_logical, down.shape[1]
    num_parts = gate_up.open.num_parts
    inner_names, inner = GATE_UP[-num_parts:], gate_up.open.weight_eOI.chunk(num_parts, dim=1)
    for name in (*inner_names, "down_proj"):
        yield at(f"{name}.weight"), None
    for slot, expert in enumerate(moe.local_experts):
        one, of_slot = slice(expert, expert + 1), slice(slot, slot + 1)
        if gate_up.is_mxfp4:
            matrices = *_mxfp4_matrices(gate_up, slot, num_parts), *_mxfp4_matrices(down, slot, 1)
            places = [one_of_stack(matrix, expert, num_experts) for matrix in matrices]
        else:
            shape = num_experts, width, hidden_size
            places = [Destination(memory_eID[of_slot], shape, (one, share), gate_up) for memory_eID in inner]
            shape, parts = (num_experts, hidden_size, width), (one, slice(0, hidden_size), share)
            places.append(Destination(down.open.weight_eOI[of_slot], shape, parts, down))
        for name, place in zip((*inner_names, "down_proj"), places, strict=True):
            yield at(f"{name}.weight"), place
        if gate_up.bias is not None:
            biases = gate_up.bias[of_slot].chunk(num_parts, dim=1)
            for name, memory_eI in zip(inner_names, biases, strict=True):
                yield at(f"{name}.bias"), Destination(memory_eI, (num_experts, width), (one, share))
            yield at("down_proj.bias"), None  # on one of the ranks that share an expert
        if down.bias is not None:
            yield at("down_proj.bias"), Destination(down.bias[of_slot], (num_experts, hidden_size), (one,))


def _transposed(at: At, moe: MoELayer) -> Iterator[Row]:
    gate_up, down, share, width = moe.experts.gate_up, moe.experts.down, moe.experts.width, moe.config.expert_width
    num_experts, hidden_size = moe.placement.num_logical, down.shape[1]
    gate_up_eDI2, down_eID = gate_up.open.weight_eOI.transpose(1, 2), down.open.weight_eOI.transpose(1, 2)
    yield at("gate_up_proj"), None
    yield at("down_proj"), None
    for slot, expert in enumerate(moe.local_experts):
        one, of_slot = slice(expert, expert + 1), slice(slot, slot + 1)
        for part, memory_eDI in enumerate(gate_up_eDI2[of_slot].chunk(2, dim=2)):
            columns_of_part = slice(part * width + share.start, part * width + share.stop)
            shape = num_experts, hidden_size, 2 * width
            place = Destination(memory_eDI, shape, (one, slice(0, hidden_size), columns_of_part), gate_up)
            yield at("gate_up_proj"), place
        yield at("down_proj"), Destination(down_eID[of_slot], (num_experts, width, hidden_size), (one, share), down)


def _one_below_the_other(at: At, moe: MoELayer) -> Iterator[Row]:
    gate_up, down, share, width = moe.experts.gate_up, moe.experts.down, moe.experts.width, moe.config.expert_width
    gate_eID, up_eID = gate_up.open.weight_eOI.chunk(2, dim=1)
    down_eID = down.open.weight_eOI.transpose(1, 2)
    for name, memory, owner in (
        ("gate_proj", gate_eID, gate_up),
        ("up_proj", up_eID, gate_up),
        ("down_proj", down_eID, down),
    ):
        yield at(name), None
        for slot, expert in enumerate(moe.local_experts):
            own = slice(expert * width + share.start, expert * width + share.stop)
            yield at(name), some_rows(memory[slot], own, moe.placement.num_logical * width, owner)


def _interleaved(at: At, moe: MoELayer) -> Iterator[Row]:
    """Yield the weight mapping. In memory, all gate rows of an expert come before its up rows."""
    gate_up, down, share, width = moe.experts.gate_up, moe.experts.down, moe.experts.width, moe.config.expert_width
    num_experts, hidden_size = moe.placement.num_logical, down.shape[1]
    inputs, outputs = slice(0, hidden_size), rows_of_heads(share, 2)
    table: list[tuple[str, Tensor, tuple[int, ...], tuple[slice, ...], AnyWeights | None]] = []
    if gate_up.is_mxfp4:
        table += _mxfp4_experts(gate_up, down)
    else:
        gate_up_eDI2 = gate_up.open.weight_eOI.unflatten(1, (2, -1)).permute(0, 3, 2, 1)
        table.append(("gate_up_proj", gate_up_eDI2, (hidden_size, 2 * width), (inputs, outputs), gate_up))
        table.append(("down_proj", down.open.weight_eOI.transpose(1, 2), (width, hidden_size), (share,), down))
    if gate_up.bias is not None:
        bias_eI2 = gate_up.bias.unflatten(1, (2, -1)).transpose(1, 2)
        table.append(("gate_up_proj_bias", bias_eI2, (2 * width,), (outputs,), None))
        yield at("down_proj_bias"), None  # only one of the ranks that share an expert has the bias
    if down.bias is not None:
        table.append(("down_proj_bias", down.bias, (hidden_size,), (), None))
    for name, memory, shape, part, owner in table:
        yield at(name), None
        for slot, expert in enumerate(moe.local_experts):
            one = slice(expert, expert + 1)
            yield at(name), Destination(memory[slot : slot + 1], (num_experts, *shape), (one, *part), owner)


def _mxfp4_experts(
    gate_up: AnyWeights, down: AnyWeights
) -> Iterator[tuple[str, Tensor, tuple[int, ...], tuple[slice, ...], AnyWeights | None]]:
    """Yield name, memory, shape, part and owner of codes and scales.

    Codes are stored as [experts, outputs, groups, 16], and scales as [experts, outputs, groups].
    """
    for name, weights in (("gate_up_proj", gate_up), ("down_proj", down)):
        codes_eOI, scales_eOG = weights.open.weight_eOI, weights.open.scales_eGB
        assert scales_eOG is not None
        _, num_outputs, num_groups = scales_eOG.shape
        for part, memory in (("blocks", codes_eOI.unflatten(2, (num_groups, -1))), ("scales", scales_eOG)):
            in_order = memory.unflatten(1, (2, -1)).transpose(1, 2) if weights is gate_up else memory
            yield f"{name}_{part}", in_order, (num_outputs, *memory.shape[2:]), (), weights
