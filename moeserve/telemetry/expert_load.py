"""Load windows: how many tokens each expert and each rank computed over some steps. Also their files and balance.

A token counts once for each expert that computes it. With k experts per token, the counts of a layer therefore add up
to k times its number of tokens. Padding rows are routed to no expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from moeserve.errors import SettingsError, shown

MAX_COUNT = 2**53  # the largest integer that all JSON readers represent exactly

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class DiskReads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of experts that steps found in memory or read from disk, on all ranks together (`expert_memory`)."""

    num_found: Count  # experts that a layer needed in a step, and found in memory
    num_read: Count  # experts that a layer needed in a step, and read from disk
    num_bytes: Count  # bytes read
    wait_seconds: Seconds  # seconds that ranks waited for reads
    num_released: Count = 0  # bytes of memory for experts that were given back, because memory became scarce


class LoadWindow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The expert load of consecutive steps.

    All layers have the same numbers of experts and of ranks, at least one of each. In each layer, the counts by rank
    and the counts by expert have the same sum.

    Raises:
        SettingsError: the sizes of the fields contradict each other.
    """

    first_step: Count  # index of the first step among all executed steps
    num_steps: Count
    ended_at: Seconds  # since the epoch
    seconds: Seconds  # duration of all steps
    placement_epoch: Count  # number of placement changes of layers so far
    num_tokens: Count  # tokens that the model processed, without padding
    num_padding_tokens: Count
    num_idle_steps: Count  # steps in which a replica had no tokens while another had some
    bytes_dispatched: Count  # bytes that ranks sent to each other in dispatch and combine
    # Time in collectives beyond the time of the rank that waited least; mean over the ranks.
    straggler_seconds: Seconds
    layers: tuple[Count, ...]  # indices of the MoE layers in the model, ascending
    tokens_of_expert: tuple[tuple[Count, ...], ...]  # by layer, by logical expert
    tokens_of_rank: tuple[tuple[Count, ...], ...]  # by layer, by rank
    # By layer, rank and slot: the logical expert at the end of the window.
    logical_of_slot: tuple[tuple[tuple[int, ...], ...], ...] = ()
    disk: DiskReads | None = None  # None: all experts are in memory

    def __post_init__(self) -> None:
        for name, table in (("tokens_of_expert", self.tokens_of_expert), ("tokens_of_rank", self.tokens_of_rank)):
            lengths = set(map(len, table))
            if len(table) != len(self.layers) or len(lengths) != 1 or 0 in lengths:
                raise SettingsError(
                    f"{name} must hold a list for each of layers={shown(list(self.layers))}, all of the same length"
                )

    @property
    def num_experts(self) -> int:
        return len(self.tokens_of_expert[0])

    @property
    def num_ranks(self) -> int:
        return len(self.tokens_of_rank[0])


def max_over_mean(counts: Sequence[float]) -> float:
    """Return the largest count divided by the mean count; 1 if all counts are equal or zero."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def ranks_max_over_mean(window: LoadWindow) -> float:
    """Return `layers_max_over_mean` of the tokens that a window counts for each rank."""
    return layers_max_over_mean(window.tokens_of_rank)


def layers_max_over_mean(of_ranks: Sequence[Sequence[float]]) -> float:
    """Return the tokens of the fullest rank of each layer, added over the layers, divided by the mean rank's tokens.

    In each layer, all ranks wait for the fullest rank, which may differ between layers.

    Args:
        of_ranks: tokens by layer and by rank.
    """
    total = sum(map(sum, of_ranks))
    return sum(map(max, of_ranks)) * len(of_ranks[0]) / total if total else 1.0


def evenness(counts: Sequence[float]) -> float:
    """Return the entropy of the experts' shares of all tokens, divided by the maximum entropy.

    The result is 0 if one expert got all tokens, and 1 if all experts got equally many tokens. It is also 1 if all
    counts are zero or there is only one expert.
    """
    total = sum(counts)
    if not total or len(counts) == 1:
        return 1.0
    shares = [count / total for count in counts if count]
    entropy = -sum(share * math.log(share) for share in shares)
    return min(1.0, max(0.0, entropy / math.log(len(counts))))


def padding_share(window: LoadWindow) -> float:
    """Return the fraction of padding in all processed rows; 0 if there were no rows."""
    total = window.num_tokens + window.num_padding_tokens
    return window.num_padding_tokens / total if total else 0.0


def summed(windows: Sequence[LoadWindow]) -> LoadWindow:
    """Merge consecutive windows of one model into one window. The placement is that of the last window."""
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
        num_idle_steps=sum(window.num_idle_steps for window in windows),
        bytes_dispatched=sum(window.bytes_dispatched for window in windows),
        straggler_seconds=math.fsum(window.straggler_seconds for window in windows),
        layers=last.layers,
        logical_of_slot=last.logical_of_slot,
        disk=_added_reads(windows),
        tokens_of_expert=_added([window.tokens_of_expert for window in windows]),
        tokens_of_rank=_added([window.tokens_of_rank for window in windows]),
    )


def joined(stages: Sequence[LoadWindow]) -> LoadWindow:
    """Join the windows of all pipeline stages over the same steps into one window that has the layers of all stages."""
    first = stages[0]
    return msgspec.structs.replace(
        first,
        seconds=max(window.seconds for window in stages),
        placement_epoch=sum(window.placement_epoch for window in stages),
        bytes_dispatched=sum(window.bytes_dispatched for window in stages),
        straggler_seconds=math.fsum(window.straggler_seconds for window in stages),
        layers=tuple(layer for window in stages for layer in window.layers),
        tokens_of_expert=tuple(counts for window in stages for counts in window.tokens_of_expert),
        tokens_of_rank=tuple(counts for window in stages for counts in window.tokens_of_rank),
        logical_of_slot=tuple(ranks for window in stages for ranks in window.logical_of_slot),
        disk=_added_reads(stages),
    )


def coarsened(windows: Sequence[LoadWindow], at_most: int) -> tuple[LoadWindow, ...]:
    """Merge groups of neighbouring windows, so that at most `at_most` windows remain."""
    size = max(1, math.ceil(len(windows) / at_most))
    return tuple(summed(windows[start : start + size]) for start in range(0, len(windows), size))


def write_window(file: BinaryIO, window: LoadWindow) -> None:
    """Append a window to the file as one line of JSON. If a write is cut short, only the last line is damaged."""
    file.write(msgspec.json.encode(window) + b"\n")
    file.flush()


def read_windows(path: Path) -> tuple[LoadWindow, ...]:
    """Read the windows written by `write_window`, in order. An incomplete last line is skipped.

    Step indices may start again at 0 between windows, because a restarted engine appends to the same file.

    Raises:
        SettingsError: the file cannot be read, or mixes models or numbers of ranks.
    """
    try:
        *lines, unfinished = path.read_bytes().split(b"\n")
    except OSError as error:
        raise SettingsError(f"cannot read the expert loads in {path}: {error.strerror}") from None
    windows: list[LoadWindow] = []
    for number, line in enumerate(lines, start=1):
        try:
            windows.append(_DECODER.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SettingsError(f"{path}, line {number} is not a record of expert load: {error}") from None
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


def _sizes(window: LoadWindow) -> tuple[tuple[int, ...], int, int]:
    """Return the properties that all windows of a file share."""
    return window.layers, window.num_experts, window.num_ranks


def _shown_sizes(window: LoadWindow) -> str:
    return f"layers {shown(list(window.layers))} of {window.num_experts} experts on {window.num_ranks} ranks"


def _added(tables: Sequence[tuple[tuple[int, ...], ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*tables, strict=True))


def _added_reads(windows: Sequence[LoadWindow]) -> DiskReads | None:
    reads = [window.disk for window in windows if window.disk is not None]
    if not reads:
        return None
    return DiskReads(
        num_found=sum(each.num_found for each in reads),
        num_read=sum(each.num_read for each in reads),
        num_bytes=sum(each.num_bytes for each in reads),
        wait_seconds=math.fsum(each.wait_seconds for each in reads),
        num_released=sum(each.num_released for each in reads),
    )
