"""Expert load as a picture: heat maps of the load of experts and ranks, relative to the mean. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moeserve.errors import missing_extra
from moeserve.telemetry.expert_load import LoadWindow, layers_max_over_mean, ranks_max_over_mean, summed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EXPERT_SCALE, RANK_SCALE = 8.0, 2.0  # colours range from mean / scale to mean * scale
NO_LOAD_COLOUR = "#7d8a97"
WIDTH, MAP_HEIGHT = 11.0, 3.6  # inches


def load_figure(windows: Sequence[LoadWindow], planned: Sequence[Sequence[float]] | None = None) -> Figure:
    """Draw maps below each other: experts by layer, ranks by layer, planned ranks by layer, and ranks over time.

    Args:
        windows: windows of one model, in order.
        planned: tokens by layer and by rank under another placement; None: draw no such map.

    Raises:
        SettingsError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("pictures need matplotlib", "viz", error) from None
    total = summed(windows)
    over_time = np.array([np.sum(window.tokens_of_rank, axis=0) for window in windows]).T
    figures = [ranks_max_over_mean(window) for window in windows]

    figure = Figure(figsize=(WIDTH, MAP_HEIGHT * (3 if planned is None else 4)), layout="constrained")
    first, *others, last = figure.subplots(3 if planned is None else 4, 1)
    _draw(first, total.tokens_of_expert, EXPERT_SCALE, f"Experts of {total.num_tokens:,} tokens", ("expert", "layer"))
    by_layer = [("Ranks", total.tokens_of_rank), ("Ranks as planned", planned)]
    for axes, (title, tokens) in zip(others, by_layer, strict=False):
        assert tokens is not None
        even = layers_max_over_mean(tokens)
        _draw(axes, tokens, RANK_SCALE, f"{title}: fullest over mean {even:.2f}", ("rank", "layer"))
    for axes in (first, *others):
        _label_layers(axes, total.layers)
    title = f"Ranks over time: fullest over mean {min(figures):.2f} to {max(figures):.2f}"
    _draw(last, over_time, RANK_SCALE, title, ("window", "rank"), mean_axis=0)
    return figure


def _draw(
    axes: Axes,
    tokens: Sequence[Sequence[float]] | np.ndarray,
    scale: float,
    title: str,
    names: tuple[str, str],
    mean_axis: int = 1,
) -> None:
    """Draw counts divided by their mean along `mean_axis`, on a logarithmic scale. `names` label columns and rows."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    table = np.asarray(tokens, dtype=np.float64)
    means = table.mean(axis=mean_axis, keepdims=True)
    ratios = np.divide(table, means, out=np.zeros_like(table), where=means > 0)
    image = axes.imshow(
        np.ma.masked_equal(ratios, 0.0),
        norm=LogNorm(1 / scale, scale, clip=True),
        cmap="inferno",
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_facecolor(NO_LOAD_COLOUR)
    axes.set_title(title)
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    ticks = [1 / scale, 1.0, scale]
    assert axes.figure is not None
    bar = axes.figure.colorbar(image, ax=axes, ticks=ticks, label="load / mean")
    bar.minorticks_off()
    bar.ax.set_yticklabels([f"1/{scale:g}", "1", f"{scale:g}"])


def _label_layers(axes: Axes, layers: Sequence[int]) -> None:
    """Label rows with the indices of their layers in the model."""
    axes.yaxis.set_major_formatter(lambda row, _: str(layers[round(row)]) if 0 <= round(row) < len(layers) else "")
