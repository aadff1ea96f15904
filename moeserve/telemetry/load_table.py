"""Expert load as a table for a terminal, at most 120 characters wide and 60 lines long."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeserve.machine import shown_bytes
from moeserve.telemetry.expert_load import (
    LoadWindow,
    coarsened,
    evenness,
    layers_max_over_mean,
    max_over_mean,
    padding_share,
    ranks_max_over_mean,
    summed,
)

MAX_LAYERS_LISTED = 48
MAX_WINDOWS_SHOWN = 80
BARS_WIDTH = 22  # characters
_BARS = "▁▂▃▄▅▆▇█"
_NOTHING = "·"


def as_text(windows: Sequence[LoadWindow], planned: Sequence[Sequence[float]] | None = None) -> str:
    """Return a summary, one line per layer, and the imbalance over time.

    Args:
        windows: windows of one model, in order.
        planned: tokens by layer and by rank under another placement; None: show no such column.
    """
    total = summed(windows)
    figures = [max_over_mean(counts) for counts in total.tokens_of_rank]
    worst = figures.index(max(figures))
    lines = [*_summary(windows, total, worst, planned), "", *_head(total, planned is not None)]
    listed = sorted(sorted(range(len(figures)), key=lambda place: -figures[place])[:MAX_LAYERS_LISTED])
    lines += [_layer_line(total, place, planned) for place in listed]
    if len(listed) < len(figures):
        lines.append(f"The least even {len(listed)} of {len(figures)} layers.")
    return "\n".join([*lines, "", *_over_time(windows, worst)])


def _summary(
    windows: Sequence[LoadWindow], total: LoadWindow, worst: int, planned: Sequence[Sequence[float]] | None
) -> tuple[str, str, str]:
    """Return three lines: the number of layers, steps and so on; tokens and waiting time; and the balance of ranks."""
    even = f"fullest rank over mean: {ranks_max_over_mean(total):.2f} in all layers together, "
    even += f"{max_over_mean(total.tokens_of_rank[worst]):.2f} in layer {total.layers[worst]}"
    if planned is not None:
        even += f"; {layers_max_over_mean(planned):.2f} if placed as planned"
    waited = total.straggler_seconds / total.seconds if total.seconds else 0.0
    return (
        f"{_counted(len(total.layers), 'layer')} with {_counted(total.num_experts, 'expert')} on "
        f"{_counted(total.num_ranks, 'rank')}: {_counted(len(windows), 'window')}, "
        f"{_counted(total.num_steps, 'step')}, {total.seconds:.1f} s, placement {total.placement_epoch}",
        f"{_counted(total.num_tokens, 'token')}, {padding_share(total):.1%} padding, "
        f"{shown_bytes(total.bytes_dispatched)} dispatched, {waited:.1%} of the time spent waiting for slow ranks",
        even,
    )


def _counted(number: int, name: str) -> str:
    """Return text such as "1 layer" or "4,096 experts"."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Return a bar chart with one character per value. A value of `low` has the lowest bar, `high` the full bar."""
    top = len(_BARS) - 1
    heights = [(value - low) / (high - low) if high > low else 0.0 for value in values]
    return "".join(_BARS[min(top, max(0, int(height * len(_BARS))))] for height in heights)


def _head(total: LoadWindow, has_plan: bool) -> list[str]:
    planned = f"{'planned':>9}" if has_plan else ""
    names = f"{'layer':>5}{'tokens':>15}{'hottest expert':>17}{'experts':>9}{'ranks':>9}{planned}{'even':>7}  "
    units = f"{'':>5}{'to experts':>15}{'and its share':>17}{'max/mean':>9}{'max/mean':>9}"
    units += f"{'max/mean':>9}" if has_plan else ""
    names += f"{'experts':<{BARS_WIDTH}}  ranks"
    units += f"{'0 to 1':>7}  {_per_bar(total.num_experts):<{BARS_WIDTH}}  {_per_bar(total.num_ranks)}"
    return [names, units.rstrip()]


def _per_bar(count: int) -> str:
    size = math.ceil(count / BARS_WIDTH)
    return f"most of each {size}" if size > 1 else ""


def _layer_line(total: LoadWindow, place: int, planned: Sequence[Sequence[float]] | None) -> str:
    of_experts, of_ranks = total.tokens_of_expert[place], total.tokens_of_rank[place]
    num_tokens = sum(of_experts)
    hottest = of_experts.index(max(of_experts))
    share = f"{hottest}: {of_experts[hottest] / num_tokens:6.2%}" if num_tokens else "none"
    plan = f"{max_over_mean(planned[place]):>9.2f}" if planned is not None else ""
    return (
        f"{total.layers[place]:>5}{num_tokens:>15,}{share:>17}{max_over_mean(of_experts):>9.2f}"
        f"{max_over_mean(of_ranks):>9.2f}{plan}{evenness(of_experts):>7.3f}  "
        f"{_bars(of_experts):<{BARS_WIDTH}}  {_bars(of_ranks)}"
    )


def _bars(counts: Sequence[int]) -> str:
    """Return a bar chart of counts relative to the largest. With many counts, a bar shows the maximum of several."""
    size = math.ceil(len(counts) / BARS_WIDTH)
    largest = [max(counts[start : start + size]) for start in range(0, len(counts), size)]
    bars = sparkline(largest, 0, max(largest))
    return "".join(bar if count else _NOTHING for bar, count in zip(bars, largest, strict=True))


def _over_time(windows: Sequence[LoadWindow], worst: int) -> list[str]:
    shown = coarsened(windows, MAX_WINDOWS_SHOWN)
    merged = math.ceil(len(windows) / MAX_WINDOWS_SHOWN)
    of_all = [ranks_max_over_mean(window) for window in shown]
    of_worst = [max_over_mean(window.tokens_of_rank[worst]) for window in shown]
    padding = [padding_share(window) for window in shown]
    each = "window by window" if merged == 1 else f"{merged} windows by {merged}"
    head = f"Over time, {each}: fullest rank over mean, and padding"
    rows = (
        ("all layers", of_all, f"{min(of_all):.2f} to {max(of_all):.2f}", 1.0),
        (f"layer {windows[0].layers[worst]}", of_worst, f"{min(of_worst):.2f} to {max(of_worst):.2f}", 1.0),
        ("padding", padding, f"{min(padding):.1%} to {max(padding):.1%}", 0.0),
    )
    return [head, *(f"{name:<11}{span:>17}  {sparkline(values, low, max(values))}" for name, values, span, low in rows)]
