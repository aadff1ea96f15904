"""Charts as SVG, for light and for dark pages. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moeserve.errors import missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The same colour for the same bar in every chart
COLOURS = {
    "moeserve": "#2f7dc4", "llama.cpp-bf16": "#e08a2c", "ik_llama.cpp-bf16": "#4c9f70",
    "vllm": "#8d6cc0", "transformers": "#8a8f98",
    "median": "#2f7dc4", "p90": "#e08a2c", "p99": "#8d6cc0",
}  # fmt: skip
CURVES = ["#2f7dc4", "#e08a2c", "#8d6cc0", "#8a8f98"]
THEMES = {"": ("#1f2328", "#d0d7de"), "-dark": ("#f0f6fc", "#3d444d")}  # suffix of the file: text, grid
COLUMNS = 3


@dataclass(frozen=True)
class Panel:
    """Groups of bars under one title: values by name, by group."""

    title: str
    groups: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Curves:
    """Curves under one title: points by name."""

    title: str
    points: Mapping[str, Sequence[tuple[float, float]]]


def save_bars(path: Path, panels: Sequence[Panel], unit: str, form: str = "{x:g}") -> list[Path]:
    """Write a chart for light pages and one for dark ones, and return their paths. All panels have the same axis.

    Args:
        form: format of the values on the axis, named x.

    Raises:
        SettingsError: matplotlib is not installed.
    """
    if not panels:
        return []
    names = list(dict.fromkeys(name for panel in panels for group in panel.groups.values() for name in group))
    names.sort(key=[*COLOURS].index)
    columns = min(COLUMNS, len(panels))
    num_rows = -(-len(panels) // columns)

    def draw(figure: Figure) -> None:
        from matplotlib.patches import Patch

        axes = list(figure.subplots(num_rows, columns, sharey=True, squeeze=False).flat)
        for panel, area in zip(panels, axes, strict=False):
            shown = [name for name in names if any(name in group for group in panel.groups.values())]
            for place, name in enumerate(shown):
                offset = (place - (len(shown) - 1) / 2) * 0.8 / len(shown)
                bars = [(index, group[name]) for index, group in enumerate(panel.groups.values()) if name in group]
                positions = [index + offset for index, _ in bars]
                heights = [height for _, height in bars]
                area.bar(positions, heights, 0.8 / len(shown), color=COLOURS[name])
            labels = [name.replace(", ", "\n") for name in panel.groups]
            area.set_xticks(range(len(labels)), labels, fontsize=8)
            _trim(area, panel.title)
        for area in axes[len(panels) :]:
            area.set_axis_off()
        axes[0].yaxis.set_major_formatter(form)
        figure.supylabel(unit, fontsize=9)
        handles = [Patch(color=COLOURS[name], label=name) for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)

    return _save(path, (3.6 * columns + 0.6, 2.6 * num_rows + 0.5), draw)


def save_curves(
    path: Path, panels: Sequence[Curves], label: str, band: tuple[float, float] | None = None
) -> list[Path]:
    """Write charts of curves for light pages and for dark ones, two side by side, and return their paths.

    Args:
        label: of the horizontal axis.
        band: shaded part of the horizontal axis; None: no part is.

    Raises:
        SettingsError: matplotlib is not installed.
    """
    num_rows = -(-len(panels) // 2)

    def draw(figure: Figure) -> None:
        for panel, area in zip(panels, figure.subplots(num_rows, 2, squeeze=False).flat, strict=False):
            if band is not None:
                area.axvspan(*band, color=CURVES[-1], alpha=0.3, linewidth=0)
            for (name, points), colour in zip(panel.points.items(), CURVES, strict=False):
                area.plot([x for x, _ in points], [y for _, y in points], color=colour, label=name, linewidth=1.5)
            area.set_ylim(bottom=0)
            area.set_xlabel(label, fontsize=9)
            area.tick_params(labelsize=8)
            area.legend(frameon=False, fontsize=8)
            _trim(area, panel.title)

    return _save(path, (8.0, 2.8 * num_rows), draw)


def save_lines(path: Path, lines: Mapping[str, Sequence[float]], labels: tuple[str, str]) -> list[Path]:
    """Write a chart of values at steps 1, 2, ... for light pages and one for dark ones, and return their paths.

    Args:
        lines: values by name.
        labels: of the axes, the horizontal one first.

    Raises:
        SettingsError: matplotlib is not installed.
    """

    def draw(figure: Figure) -> None:
        area = figure.subplots()
        for (name, values), colour in zip(lines.items(), CURVES, strict=False):
            area.plot(range(1, len(values) + 1), values, label=name, color=colour, linewidth=1.4)
        area.set_ylim(bottom=0)
        area.set_xlabel(labels[0], fontsize=9)
        area.set_ylabel(labels[1], fontsize=9)
        _trim(area, "")
        figure.legend(loc="outside lower center", ncols=len(lines), frameon=False, fontsize=9)

    return _save(path, (6.0, 3.0), draw)


def _trim(area: Axes, title: str) -> None:
    area.set_title(title, fontsize=10)
    area.grid(axis="y", linewidth=0.6)
    area.set_axisbelow(True)
    area.spines[["top", "right", "left"]].set_visible(False)


def _save(path: Path, size: tuple[float, float], draw: Callable[[Figure], None]) -> list[Path]:
    """Write one figure in each theme.

    Args:
        size: width and height in inches.
        draw: called with each figure, with the colours of its theme set.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("charts need matplotlib", "viz", error) from None

    paths = []
    for suffix, (text, grid) in THEMES.items():
        style = {
            "text.color": text, "axes.labelcolor": text, "xtick.color": text, "ytick.color": text,
            "axes.edgecolor": grid, "grid.color": grid,
            "svg.fonttype": "none", "svg.hashsalt": "the same ids in every run",
        }  # fmt: skip
        with mpl.rc_context(style):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure)
            target = path.with_name(path.stem + suffix + path.suffix)
            target.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(target, transparent=True, metadata={"Date": None})
            paths.append(target)
    return paths
