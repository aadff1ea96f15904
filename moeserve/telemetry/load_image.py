"""Load of experts as one picture: a cell for each expert of each layer, coloured by its load over the layer's mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeserve.telemetry.expert_load import LoadWindow, summed
from moeserve.telemetry.heat import (
    BINARY_STEPS,
    DECIMAL_STEPS,
    NO_LOAD,
    NUM_SHADES,
    OF_EXPERTS,
    colours,
    over_mean,
    ticks,
)
from moeserve.telemetry.png import GLYPH_HEIGHT, Pixels, encode, text_width, write

PAPER, INK, GREY, NOTHING, FIRST_SHADE = range(5)  # places in the palette
PALETTE = ((255, 255, 255), (0x1B, 0x1F, 0x24), (0xB6, 0xBC, 0xC4), NO_LOAD, *colours())

MAP_WIDTH, MAP_HEIGHT, LARGEST_CELL = 1024, 768, 48  # in pixels; a map of more experts or layers than pixels is larger
SIZE_WITH_GAP = 12  # cells so large have a line between them
MARGIN, LETTER = 20, 2
LINE = GLYPH_HEIGHT * LETTER + 10
LEGEND_STEP, LEGEND_HEIGHT = 6, 16
MIN_WIDTH = 820  # for the lines of text


@dataclass(frozen=True)
class Map:
    """Where the cells are, in pixels."""

    left: int
    top: int
    cell_width: int
    cell_height: int
    gap: int  # of a cell's size, at its right and bottom

    @classmethod
    def of(cls, num_layers: int, num_experts: int) -> Map:
        width = min(LARGEST_CELL, max(1, MAP_WIDTH // num_experts))
        height = min(LARGEST_CELL, max(1, MAP_HEIGHT // num_layers))
        left = MARGIN + text_width("LAYER", LETTER) + 12
        return cls(left, MARGIN + 3 * LINE, width, height, 1 if min(width, height) >= SIZE_WITH_GAP else 0)


def as_png(windows: Sequence[LoadWindow]) -> bytes:
    """A PNG file of the windows together: layers from top to bottom, experts from left to right."""
    total = summed(windows)
    num_layers, num_experts = len(total.layers), total.num_experts
    cells = Map.of(num_layers, num_experts)
    map_width, map_height = num_experts * cells.cell_width, num_layers * cells.cell_height
    width = max(MIN_WIDTH, cells.left + map_width + MARGIN)
    legend_top = cells.top + map_height + 2 * LINE + 12
    pixels = np.full((legend_top + LEGEND_HEIGHT + LINE + MARGIN, width), PAPER, dtype=np.uint8)

    write(pixels, MARGIN, MARGIN, "Tokens of each expert / mean of its layer", INK, LETTER)
    sizes = f"{num_layers} layers, {num_experts} experts, {total.num_ranks} ranks"
    write(pixels, MARGIN, MARGIN + LINE, f"{sizes}, {total.num_tokens} tokens", INK, LETTER)

    shades = OF_EXPERTS.shades(over_mean(total.tokens_of_expert))
    places = np.where(shades < 0, NOTHING, shades + FIRST_SHADE).astype(np.uint8)
    enlarged = places.repeat(cells.cell_height, axis=0).repeat(cells.cell_width, axis=1)
    if cells.gap:
        enlarged[cells.cell_height - 1 :: cells.cell_height] = PAPER
        enlarged[:, cells.cell_width - 1 :: cells.cell_width] = PAPER
    pixels[cells.top : cells.top + map_height, cells.left : cells.left + map_width] = enlarged

    _write_axes(pixels, cells, total)
    _write_legend(pixels, cells.left, legend_top)
    return encode(pixels, PALETTE)


def _write_axes(pixels: Pixels, cells: Map, total: LoadWindow) -> None:
    write(pixels, MARGIN, cells.top - LINE + 4, "Layer", INK, LETTER)
    line_height = GLYPH_HEIGHT * LETTER
    most = max(1, len(total.layers) * cells.cell_height // LINE)
    for place in ticks(total.layers, most, DECIMAL_STEPS):
        text = str(total.layers[place])
        middle = cells.top + place * cells.cell_height + cells.cell_height // 2
        pixels[middle, cells.left - 6 : cells.left - 2] = GREY
        left = max(0, cells.left - 10 - text_width(text, LETTER))
        write(pixels, left, max(0, middle - line_height // 2), text, INK, LETTER)

    bottom = cells.top + len(total.layers) * cells.cell_height
    widest = text_width(str(total.num_experts - 1), LETTER) + 16
    most = max(1, total.num_experts * cells.cell_width // widest)
    for place in ticks(range(total.num_experts), most, BINARY_STEPS):
        text = str(place)
        middle = cells.left + place * cells.cell_width + cells.cell_width // 2
        pixels[bottom + 2 : bottom + 6, middle] = GREY
        write(pixels, max(0, middle - text_width(text, LETTER) // 2), bottom + 9, text, INK, LETTER)
    write(pixels, cells.left, bottom + 9 + LINE, "Expert", INK, LETTER)


def _write_legend(pixels: Pixels, left: int, top: int) -> None:
    for shade in range(NUM_SHADES):
        start = left + shade * LEGEND_STEP
        pixels[top : top + LEGEND_HEIGHT, start : start + LEGEND_STEP] = FIRST_SHADE + shade
    width = NUM_SHADES * LEGEND_STEP
    for place, (ratio, text) in enumerate(OF_EXPERTS.ticks):
        text = f"<{text}" if place == 0 else f">{text}" if place == len(OF_EXPERTS.ticks) - 1 else text
        middle = left + round(OF_EXPERTS.position(ratio) * width)
        write(pixels, middle - text_width(text, LETTER) // 2, top + LEGEND_HEIGHT + 6, text, INK, LETTER)
    write(pixels, left + width + 12, top + 1, "x mean", INK, LETTER)
    start = left + width + 12 + text_width("x mean", LETTER) + 40
    pixels[top : top + LEGEND_HEIGHT, start : start + LEGEND_HEIGHT] = NOTHING
    write(pixels, start + LEGEND_HEIGHT + 10, top + 1, "no tokens", INK, LETTER)
