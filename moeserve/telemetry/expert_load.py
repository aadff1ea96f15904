"""What experts and ranks were given while a model ran: records of it, their files, and figures over them.

Knows numbers only: not who counted them, and not where experts are. A token counts once for each expert it was given
to, so with k experts per token a layer's counts add up to k times its tokens. Padding is given to no expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from moeserve.errors import SettingsError, shown

MAX_LAYERS = 1024
MAX_EXPERTS = 4096
MAX_RANKS = 4096
MAX_COUNT = 2**53  # as far as every reader of JSON has whole numbers
MAX_SECONDS = 1e30
MAX_FILE_BYTES = 256 * 1024 * 1024

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
OfExperts = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_EXPERTS)]
OfRanks = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_RANKS)]
ByLayer = msgspec.Meta(max_length=MAX_LAYERS)


class LoadWindow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the experts of a model were given in some steps that followed each other.

    All layers have the same numbers of experts and of ranks, at least one of each, and in each layer the ranks were
    given as much as the experts.

    Raises:
        SettingsError: counts that do not agree.
    """

    first_step: Count  # counts steps that were executed, from 0
    num_steps: Count
    ended_at: Seconds  # since the epoch
    seconds: Seconds  # that these steps took
    placement_epoch: Count
    num_tokens: Count  # that went through the model, padding not among them
    num_padding_tokens: Count  # rows that were computed for nobody
    num_empty_turns: Count  # a replica had no token while another had one; counted by replica and step
    bytes_dispatched: Count  # that all ranks sent to other ranks, there and back
    # That ranks waited for each other inside collectives, beyond the one that waited least; the mean of all ranks.
    straggler_seconds: Seconds
    layers: Annotated[tuple[Count, ...], ByLayer]  # numbers of the model's layers that have experts, ascending
    tokens_of_expert: Annotated[tuple[OfExperts, ...], ByLayer]  # by layer, by logical expert
    tokens_of_rank: Annotated[tuple[OfRanks, ...], ByLayer]  # by layer, by rank
    # By layer, by rank: the logical expert in each of its slots, at the end.
    logical_of_slot: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def __post_init__(self) -> None:
        fault = _fault(self)
        if fault is not None:
            raise SettingsError(fault)

    @property
    def num_experts(self) -> int:
        return len(self.tokens_of_expert[0])

    @property
    def num_ranks(self) -> int:
        return len(self.tokens_of_rank[0])


def max_over_mean(counts: Sequence[float]) -> float:
    """How much more the fullest was given than the average one: 1 where all are even, or where nothing was counted."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def ranks_max_over_mean(window: LoadWindow) -> float:
    """`layers_max_over_mean` of a window's ranks."""
    return layers_max_over_mean(window.tokens_of_rank)


def layers_max_over_mean(of_ranks: Sequence[Sequence[float]]) -> float:
    """`max_over_mean` of ranks over all layers. Maxima of layers are added: in each, all wait for its fullest rank.

    Args:
        of_ranks: by layer, by rank: what they were given, or would have been.
    """
    total = sum(map(sum, of_ranks))
    return sum(map(max, of_ranks)) * len(of_ranks[0]) / total if total else 1.0


def evenness(counts: Sequence[float]) -> float:
    """Entropy of the shares over its largest possible value: 0 where one expert got all, 1 where all got the same.

    Also 1 where nothing was counted or where there is one expert alone: nothing is uneven there.
    """
    total = sum(counts)
    if not total or len(counts) == 1:
        return 1.0
    shares = [count / total for count in counts if count]
    entropy = -sum(share * math.log(share) for share in shares)
    return min(1.0, max(0.0, entropy / math.log(len(counts))))


def padding_share(window: LoadWindow) -> float:
    """Padding among all tokens of the steps, from 0 to 1; 0 where there were no tokens."""
    total = window.num_tokens + window.num_padding_tokens
    return window.num_padding_tokens / total if total else 0.0


def summed(windows: Sequence[LoadWindow]) -> LoadWindow:
    """Windows of one model, in their order, as a single one. Its placement epoch is that of the last."""
    assert windows
    assert all(_sizes(window) == _sizes(windows[0]) for window in windows)
    last = windows[-1]
    return LoadWindow(
        first_step=windows[0].first_step,
        num_steps=sum(window.num_steps for window in windows),
        ended_at=last.ended_at,
        seconds=math.fsum(window.seconds for window in windows),
        placement_epoch=last.placement_epoch,
        num_tokens=sum(window.num_tokens for window in windows),
        num_padding_tokens=sum(window.num_padding_tokens for window in windows),
        num_empty_turns=sum(window.num_empty_turns for window in windows),
        bytes_dispatched=sum(window.bytes_dispatched for window in windows),
        straggler_seconds=math.fsum(window.straggler_seconds for window in windows),
        layers=last.layers,
        logical_of_slot=last.logical_of_slot,
        tokens_of_expert=_added([window.tokens_of_expert for window in windows]),
        tokens_of_rank=_added([window.tokens_of_rank for window in windows]),
    )


def coarsened(windows: Sequence[LoadWindow], at_most: int) -> tuple[LoadWindow, ...]:
    """As few windows as asked for: so many that follow each other become one, the last of perhaps fewer."""
    size = max(1, math.ceil(len(windows) / at_most))
    return tuple(summed(windows[start : start + size]) for start in range(0, len(windows), size))


def write_window(file: BinaryIO, window: LoadWindow) -> None:
    """Adds one line of JSON, in one piece, so that whoever reads meanwhile finds whole lines but for the last."""
    file.write(msgspec.json.encode(window) + b"\n")
    file.flush()


def read_windows(path: Path) -> tuple[LoadWindow, ...]:
    """What `write_window` wrote, in its order. A last line without its end is still being written, and left out.

    Steps need not go on from window to window: an engine that was started anew begins again at step 0.

    Raises:
        SettingsError: no such file, too large a one, or not the records of one model on so many ranks.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"cannot read the expert loads in {path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise SettingsError(
            f"{path} is too large for records of expert load (more than {MAX_FILE_BYTES} bytes); take its last lines, "
            f"such as with `tail -n 1000`"
        )
    *lines, unfinished = content.split(b"\n")
    del content
    windows: list[LoadWindow] = []
    for number, line in enumerate(lines, start=1):
        windows.append(_window(line, f"{path}, line {number}"))
        if _sizes(windows[-1]) != _sizes(windows[0]):
            raise SettingsError(
                f"{path}, line {number} has {_shown_sizes(windows[-1])}, but line 1 has {_shown_sizes(windows[0])}; "
                f"records of different models or numbers of ranks belong in different files"
            )
    if not windows:
        state = "holds no whole line" if unfinished else "is empty"
        raise SettingsError(f"{path} {state}: there are no records of expert load to read")
    return tuple(windows)


_DECODER = msgspec.json.Decoder(LoadWindow)


def _window(line: bytes, where: str) -> LoadWindow:
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{where} is not a record of expert load: {error}") from None


def _sizes(window: LoadWindow) -> tuple[tuple[int, ...], int, int]:
    """What is the same in all windows of one model on so many ranks."""
    return window.layers, window.num_experts, window.num_ranks


def _shown_sizes(window: LoadWindow) -> str:
    return f"layers {shown(list(window.layers))} of {window.num_experts} experts on {window.num_ranks} ranks"


def _added(tables: Sequence[tuple[tuple[int, ...], ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*tables, strict=True))


def _fault(window: LoadWindow) -> str | None:
    """What is wrong with the counts of a window, in words."""
    layers = window.layers
    if not layers:
        return "layers is empty: a model without experts has no record of their load"
    if list(layers) != sorted(set(layers)):
        return f"layers={shown(list(layers))} must ascend"
    for name, table in (("tokens_of_expert", window.tokens_of_expert), ("tokens_of_rank", window.tokens_of_rank)):
        if len(table) != len(layers):
            return f"{name} has {len(table)} lists, one by layer, but layers names {len(layers)}"
        for layer, counts in zip(layers, table, strict=True):
            if len(counts) != len(table[0]) or not counts:
                return (
                    f"{name} has {len(counts)} counts in layer {layer} and {len(table[0])} in layer {layers[0]}; "
                    f"all layers must have as many, at least one"
                )
    for layer, of_experts, of_ranks in zip(layers, window.tokens_of_expert, window.tokens_of_rank, strict=True):
        if sum(of_experts) != sum(of_ranks):
            return f"in layer {layer}, experts were given {sum(of_experts)} tokens but ranks {sum(of_ranks)}"
    return None
