"""Formulas that can be evaluated, and printed with the names and the values of their inputs."""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Value = Callable[[Mapping[str, float]], float]
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {"max": max, "min": min}


@dataclass(frozen=True)
class Formula:
    """A named quantity, computed by arithmetic on named numbers."""

    name: str
    template: str  # operators +, -, x, /, ^, max and min on {names} of numbers
    numbers: Mapping[str, float]
    unit: str = "s"

    @property
    def value(self) -> float:
        return float(_parsed(self.template)(self.numbers))

    def as_text(self) -> str:
        shown = shown_seconds(self.value) if self.unit == "s" else f"{self.value:.4g} {self.unit}".rstrip()
        in_words = re.sub(r"{(\w+)}", lambda name: name[1].replace("_", " "), self.template)
        in_numbers = re.sub(r"{(\w+)}", lambda name: f"{self.numbers[name[1]]:.12g}", self.template)
        return f"{self.name}: {shown}\n    = {in_words}\n    = {in_numbers}"


@functools.cache
def _parsed(template: str) -> Value:
    expression = template.replace(" x ", " * ").replace("^", "**").replace("{", "").replace("}", "")
    return _value_of(ast.parse(expression, mode="eval").body)


def _value_of(node: ast.expr) -> Value:
    """Return a function that evaluates an expression, given the values of its names."""
    match node:
        case ast.Constant(value=(int() | float()) as constant):
            return lambda _: constant
        case ast.Name(id=name):
            return operator.itemgetter(name)
        case ast.BinOp(left=left, op=symbol, right=right):
            operation, first, second = _OPERATIONS[type(symbol)], _value_of(left), _value_of(right)
            return lambda numbers: operation(first(numbers), second(numbers))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            function, values = _FUNCTIONS[name], [_value_of(argument) for argument in arguments]
            return lambda numbers: function(*(value(numbers) for value in values))
    raise AssertionError(f"not a formula: {ast.unparse(node)}")


def shown_seconds(seconds: float) -> str:
    """Return a time such as "120.96 us", "14.76 ms" or "2.00 s"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.2f} us"
