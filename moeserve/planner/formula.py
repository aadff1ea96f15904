"""Figures that can show the formula they come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Formula:
    """A figure and its formula."""

    name: str
    template: str  # arithmetic; names in braces stand for the numbers
    numbers: Mapping[str, float]
    value: float
    unit: str = "s"

    @property
    def in_words(self) -> str:
        return re.sub(r"{(\w+)}", lambda name: name[1].replace("_", " "), self.template)

    @property
    def with_numbers(self) -> str:
        return re.sub(r"{(\w+)}", lambda name: f"{self.numbers[name[1]]:.12g}", self.template)

    def as_text(self) -> str:
        value = shown_seconds(self.value) if self.unit == "s" else f"{self.value:.4g} {self.unit}".rstrip()
        return f"{self.name}: {value}\n    = {self.in_words}\n    = {self.with_numbers}"


def shown_seconds(seconds: float) -> str:
    """Return a time such as "120.96 us", "14.76 ms" or "2.00 s"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"
