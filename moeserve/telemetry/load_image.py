"""Load of experts and of ranks as one picture: maps below each other, whose cells are coloured by load over mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeserve.telemetry.expert_load import LoadWindow, coarsened, layers_max_over_mean, ranks_max_over_mean, summed
from moeserve.telemetry.heat import (
    BINARY_STEPS,
    DECIMAL_STEPS,
    NO_LOAD,
    NUM_SHADES,
    OF_EXPERTS,
    OF_RANKS,
    Scale,
    colours,
    over_mean,
    ticks,
)
from moeserve.telemetry.png import GLYPH_HEIGHT, Pixels, encode, text_width, write

PAPER, INK, GREY, NOTHING, FIRST_SHADE = range(5)  # places in the palette
PALETTE = ((255, 255, 255), (0x1B, 0x1F, 0x24), (0xB6, 0xBC, 0xC4), NO_LOAD, *colours())

MAX_WINDOWS_SHOWN = 256
MAP_WIDTH, MAP_HEIGHT, LARGEST_CELL = 1024, 768, 48  # in pixels; a map of more columns or rows than pixels is larger
SIZE_WITH_GAP = 12  # cells so large have a line between them
MARGIN, LETTER = 20, 2
LINE = GLYPH_HEIGHT * LETTER + 10
LEGEND_STEP, LEGEND_HEIGHT = 6, 16
MIN_WIDTH = 820  # for the lines of text


@dataclass(frozen=True)
class Axis:
    name: str
    numbers: Sequence[int]  # of its places, ascending
    steps: Sequence[int]  # of which some are written, see `ticks`


@dataclass(frozen=True)
class Chart:
    """A map of loads, and what is written beside it."""

    title: str
    note: str
    rows: Axis
    columns: Axis
    ratios: npt.NDArray[np.float64]  # [row, column]: load over mean
    scale: Scale


@dataclass(frozen=True)
class Map:
    """Where the cells of a chart are, in pixels."""

    left: int
    top: int
    cell_width: int
    cell_height: int
    gap: int  # of a cell's size, at its right and bottom

    @classmethod
    def of(cls, num_rows: int, num_columns: int, start: int = MARGIN) -> Map:
        """Of a chart that begins so many pixels below the edge."""
        width = min(LARGEST_CELL, max(1, MAP_WIDTH // num_columns))
        height = min(LARGEST_CELL, max(1, MAP_HEIGHT // num_rows))
        left = MARGIN + text_width("LAYER", LETTER) + 12
        return cls(left, start + 3 * LINE, width, height, 1 if min(width, height) >= SIZE_WITH_GAP else 0)


def as_png(windows: Sequence[LoadWindow], planned: Sequence[Sequence[float]] | None = None) -> bytes:
    """A PNG file: see `charts`."""
    shown = charts(windows, planned)
    maps, height = placed(shown)
    right = max(cells.left + chart.ratios.shape[1] * cells.cell_width for cells, chart in zip(maps, shown, strict=True))
    pixels = np.full((height, max(MIN_WIDTH, right + MARGIN)), PAPER, dtype=np.uint8)
    for chart, cells in zip(shown, maps, strict=True):
        _draw(pixels, chart, cells)
    return encode(pixels, PALETTE)


def charts(windows: Sequence[LoadWindow], planned: Sequence[Sequence[float]] | None = None) -> tuple[Chart, ...]:
    """Experts by layer, ranks by layer, the same as planned, and ranks over time.

    Args:
        windows: of one model, in their order.
        planned: by layer, by rank: what ranks would have been given with another placement; None: not shown.
    """
    total = summed(windows)
    layers = Axis("Layer", total.layers, DECIMAL_STEPS)
    ranks = Axis("Rank", range(total.num_ranks), BINARY_STEPS)
    sizes = f"{len(total.layers)} layers, {total.num_experts} experts, {total.num_ranks} ranks"

    def ranks_chart(title: str, of_ranks: Sequence[Sequence[float]]) -> Chart:
        note = f"Fullest rank / mean: {layers_max_over_mean(of_ranks):.2f} in all layers together"
        return Chart(title, note, layers, ranks, over_mean(of_ranks), OF_RANKS)

    shown = coarsened(windows, MAX_WINDOWS_SHOWN)
    in_each = math.ceil(len(windows) / len(shown))
    over_time = [[sum(of_rank) for of_rank in zip(*window.tokens_of_rank, strict=True)] for window in shown]
    figures = [ranks_max_over_mean(window) for window in shown]
    found = [
        Chart(
            "Tokens of each expert / mean of its layer",
            f"{sizes}, {total.num_tokens} tokens",
            layers,
            Axis("Expert", range(total.num_experts), BINARY_STEPS),
            over_mean(total.tokens_of_expert),
            OF_EXPERTS,
        ),
        ranks_chart("Tokens of each rank / mean of its layer, as it was", total.tokens_of_rank),
        Chart(
            "Tokens of each rank over time / mean of ranks",
            f"Fullest rank / mean: {min(figures):.2f} to {max(figures):.2f} in all layers together",
            ranks,
            Axis("Window" if in_each == 1 else f"{in_each} windows", range(len(shown)), DECIMAL_STEPS),
            over_mean(over_time).T,
            OF_RANKS,
        ),
    ]
    if planned is not None:
        found.insert(2, ranks_chart("Tokens of each rank / mean of its layer, as planned", planned))
    return tuple(found)


def placed(charts: Sequence[Chart]) -> tuple[list[Map], int]:
    """Where charts are, one below the other, and how high a picture of them is."""
    maps, start = [], MARGIN
    for chart in charts:
        cells = Map.of(len(chart.rows.numbers), len(chart.columns.numbers), start)
        maps.append(cells)
        start = _legend_top(chart, cells) + LEGEND_HEIGHT + 2 * LINE
    return maps, start - LINE + MARGIN


def _draw(pixels: Pixels, chart: Chart, cells: Map) -> None:
    start = cells.top - 3 * LINE
    write(pixels, MARGIN, start, chart.title, INK, LETTER)
    write(pixels, MARGIN, start + LINE, chart.note, INK, LETTER)
    shades = chart.scale.shades(chart.ratios)
    places = np.where(shades < 0, NOTHING, shades + FIRST_SHADE).astype(np.uint8)
    enlarged = places.repeat(cells.cell_height, axis=0).repeat(cells.cell_width, axis=1)
    if cells.gap:
        enlarged[cells.cell_height - 1 :: cells.cell_height] = PAPER
        enlarged[:, cells.cell_width - 1 :: cells.cell_width] = PAPER
    height, width = enlarged.shape
    pixels[cells.top : cells.top + height, cells.left : cells.left + width] = enlarged
    _write_axes(pixels, chart, cells)
    _write_legend(pixels, chart.scale, cells.left, _legend_top(chart, cells))


def _legend_top(chart: Chart, cells: Map) -> int:
    return cells.top + len(chart.rows.numbers) * cells.cell_height + 2 * LINE + 12


def _write_axes(pixels: Pixels, chart: Chart, cells: Map) -> None:
    rows, columns = chart.rows, chart.columns
    write(pixels, MARGIN, cells.top - LINE + 4, rows.name, INK, LETTER)
    line_height = GLYPH_HEIGHT * LETTER
    most = max(1, len(rows.numbers) * cells.cell_height // LINE)
    for place in ticks(rows.numbers, most, rows.steps):
        text = str(rows.numbers[place])
        middle = cells.top + place * cells.cell_height + cells.cell_height // 2
        pixels[middle, cells.left - 6 : cells.left - 2] = GREY
        left = max(0, cells.left - 10 - text_width(text, LETTER))
        write(pixels, left, max(0, middle - line_height // 2), text, INK, LETTER)

    bottom = cells.top + len(rows.numbers) * cells.cell_height
    widest = text_width(str(columns.numbers[-1]), LETTER) + 16
    most = max(1, len(columns.numbers) * cells.cell_width // widest)
    for place in ticks(columns.numbers, most, columns.steps):
        text = str(columns.numbers[place])
        middle = cells.left + place * cells.cell_width + cells.cell_width // 2
        pixels[bottom + 2 : bottom + 6, middle] = GREY
        write(pixels, max(0, middle - text_width(text, LETTER) // 2), bottom + 9, text, INK, LETTER)
    write(pixels, cells.left, bottom + 9 + LINE, columns.name, INK, LETTER)


def _write_legend(pixels: Pixels, scale: Scale, left: int, top: int) -> None:
    for shade in range(NUM_SHADES):
        start = left + shade * LEGEND_STEP
        pixels[top : top + LEGEND_HEIGHT, start : start + LEGEND_STEP] = FIRST_SHADE + shade
    width = NUM_SHADES * LEGEND_STEP
    for place, (ratio, text) in enumerate(scale.ticks):
        text = f"<{text}" if place == 0 else f">{text}" if place == len(scale.ticks) - 1 else text
        middle = left + round(scale.position(ratio) * width)
        write(pixels, middle - text_width(text, LETTER) // 2, top + LEGEND_HEIGHT + 6, text, INK, LETTER)
    write(pixels, left + width + 12, top + 1, "x mean", INK, LETTER)
    start = left + width + 12 + text_width("x mean", LETTER) + 40
    pixels[top : top + LEGEND_HEIGHT, start : start + LEGEND_HEIGHT] = NOTHING
    write(pixels, start + LEGEND_HEIGHT + 10, top + 1, "no tokens", INK, LETTER)
