"""Bar charts as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, NAMES_WIDTH, VALUES_WIDTH = 720, 150, 60
BAR, GROUP_GAP, TOP = 16, 30, 40
COLOURS = ("#2563a8", "#6ba3d6", "#a9cbe8", "#d9822b", "#8a6fb0", "#c9a27a", "#7a7a7a", "#b5b5b5")  # as many as engines


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    shown: str


@dataclass(frozen=True)
class Group:
    """Bars under one title."""

    title: str
    bars: tuple[Bar, ...]


def bar_chart(title: str, groups: Sequence[Group]) -> str:
    """Return an SVG image. A name has the same colour in all groups, and all bars have the same scale."""
    names = list(dict.fromkeys(bar.name for group in groups for bar in group.bars))
    colour_of = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    largest = max(bar.value for group in groups for bar in group.bars)
    scale = (WIDTH - NAMES_WIDTH - VALUES_WIDTH) / largest
    parts = [_text(10, 22, title, "bold 15px")]
    y = TOP
    for group in groups:
        parts.append(_text(10, y + 14, group.title, "bold 12px"))
        y += 20
        for bar in group.bars:
            length = bar.value * scale
            parts.append(_text(20, y + 12, bar.name, "12px"))
            size = f'width="{length:.1f}" height="{BAR - 3}"'
            parts.append(f'<rect x="{NAMES_WIDTH}" y="{y}" {size} fill="{colour_of[bar.name]}"/>')
            parts.append(_text(NAMES_WIDTH + length + 5, y + 12, bar.shown, "12px"))
            y += BAR
        y += GROUP_GAP - BAR
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}">'
    background = f'<rect width="{WIDTH}" height="{y}" fill="white"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, font: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" style="font: {font} sans-serif">{escape(text)}</text>'
