"""`VllmOption`: a setting or sampling parameter of vLLM that moeserve does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VllmOption:
    """A setting or sampling parameter of vLLM that moeserve does not have.

    Attributes:
        why: why other values than the harmless ones are refused, and what to do instead.
        harmless: values that change nothing here.
        is_harmless: no value changes anything here.
    """

    why: str
    harmless: tuple[Any, ...] = (None,)
    is_harmless: bool = False

    def accepts(self, value: Any) -> bool:
        """Return True for a value that changes nothing here."""
        return self.is_harmless or any(value is each or value == each for each in self.harmless)
