"""Descriptions of arguments, made from the dataclasses that define them. `help` and `--help` show the same text."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

WIDTH = 110  # characters of a line of `help`, without its margin


def argument_section(
    title: str, arguments: type, allowed: Callable[[dataclasses.Field[Any]], str], *, without: Iterable[str] = ()
) -> str:
    """Return a section of a docstring that describes the fields of a dataclass, as arguments of a call.

    Args:
        allowed: returns the allowed values of a field in words.
        without: names of fields that are left out.
    """
    entries = [
        describe_argument(field, allowed(field)) for field in dataclasses.fields(arguments) if field.name not in without
    ]
    return f"{title}:\n" + textwrap.indent("\n".join(entries), "    ")


def describe_argument(field: dataclasses.Field[Any], allowed: str) -> str:
    """Return the entry of one argument in the section of a docstring: its meaning, allowed values and default."""
    text = f"{field.name}: {field.metadata['help']} ({allowed}; default: {default_of(field)!r})."
    return textwrap.fill(text, WIDTH - 4, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field of a dataclass."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def extended(docstring: str | None, sections: Iterable[str]) -> str:
    """Return a docstring, without its margin, with further sections at its end."""
    return "\n\n".join([inspect.cleandoc(docstring or ""), *sections]) + "\n"


def bound(number: float) -> str:
    """Return a bound of a range as text, a large one as a power of two."""
    for exponent in (31, 63, 64):
        if number == 2**exponent - 1:
            return f"2**{exponent} - 1"
        if number == -(2**exponent):
            return f"-2**{exponent}"
    return f"{number:g}" if isinstance(number, float) else str(number)
