"""Formulas that can be evaluated, and shown in words and in numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType

_FUNCTIONS = {"__builtins__": {}, "max": max, "min": min}


@dataclass(frozen=True)
class Formula:
    """A figure, defined by arithmetic on named numbers."""

    name: str
    template: str  # +, -, x, /, ^, max and min; names in braces stand for the numbers
    numbers: Mapping[str, float]
    unit: str = "s"

    @property
    def value(self) -> float:
        return float(eval(_compiled(self.template), _FUNCTIONS, self.numbers))

    def as_text(self) -> str:
        shown = shown_seconds(self.value) if self.unit == "s" else f"{self.value:.4g} {self.unit}".rstrip()
        in_words = re.sub(r"{(\w+)}", lambda name: name[1].replace("_", " "), self.template)
        in_numbers = re.sub(r"{(\w+)}", lambda name: f"{self.numbers[name[1]]:.12g}", self.template)
        return f"{self.name}: {shown}\n    = {in_words}\n    = {in_numbers}"


@functools.cache
def _compiled(template: str) -> CodeType:
    expression = template.replace(" x ", " * ").replace("^", "**").replace("{", "").replace("}", "")
    return compile(expression, "<formula>", "eval")


def shown_seconds(seconds: float) -> str:
    """Return a time such as "120.96 us", "14.76 ms" or "2.00 s"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"
