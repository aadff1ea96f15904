"""Rows as people read them, on a terminal and in Markdown. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def comparison(row: Mapping[str, Any]) -> str:
    """The engines of a row that `figures` and `ratio` of the harness have filled."""
    lines = [f"{'':<16}{row['unit']:>10}{'of limit':>10}   rounds"]
    for name, figure in row["engines"].items():
        rounds = " ".join(number(each["rate"]) for each in figure["rounds"])
        lines.append(f"{name:<16}{number(figure['rate']):>10}{figure['fraction_of_limit']:>10.0%}   {rounds}")
    lines += [f"{each['engine']} / {each['baseline']}: {each['median']:.2f}" for each in row["ratios"]]
    return "\n".join(lines)


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table. The first column is of text, the others of numbers."""
    rule = [":--", *(["--:"] * (len(head) - 1))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))
