"""Descriptions of GGUF architectures: how metadata become a config.json, and which tensors are cut or reordered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moeserve.models.config_values import ConfigValues
from moeserve.models.gguf.file import as_written

MAX_ROWS = 2**24  # maximum rows of a projection whose rows are reordered

SIGMOID = 2  # GGUF's number for the sigmoid gating function

# Key of config.json -> key of the metadata without `<architecture>.`, or a pair of this key and a default.
Keys = Mapping[str, str | tuple[str, Any]]


@dataclass(frozen=True)
class Part:
    """A tensor of the model that is stored as a part of a tensor in the file."""

    name: str  # in GGUF's scheme, without the ending `.weight` or `.bias`
    rows: np.ndarray | None = None  # indices of stored rows, in the model's order; None: all rows
    columns: np.ndarray | None = None


@dataclass(frozen=True)
class File:
    """The metadata and tensor names of a GGUF file, from which an `Architecture` derives a config.json."""

    values: ConfigValues  # this architecture's metadata, keyed without the `<architecture>.` prefix
    shapes: Mapping[str, tuple[int, ...]]  # shapes of the tensors, by name
    kinds: frozenset[str]  # names of the tensors, without the numbers of layers
    config: dict[str, Any]  # the entries of config.json that are read in the same way for all architectures

    def layers_with(self, kind: str) -> list[bool]:
        """Return one flag for each decoder layer: True if the file has the tensor `blk.<layer>.<kind>`."""
        return [f"blk.{layer}.{kind}" in self.shapes for layer in range(self.config["num_hidden_layers"])]

    def width_of(self, kind: str) -> int | None:
        """Return the number of rows of the first tensor `blk.<layer>.<kind>`; None if no layer has such a tensor."""
        of_layers = (self.shapes.get(f"blk.{layer}.{kind}") for layer in range(self.config["num_hidden_layers"]))
        return next((shape[0] for shape in of_layers if shape), None)

    def sizes_of_layers(self, key: str) -> list[int]:
        """Return the value of a key for each layer. The metadata hold one number for all layers, or a list."""
        value, num_layers = self.values.values.get(key), self.values.integer("block_count", high=2**12)
        numbers: list[Any] = value if isinstance(value, list) else [value] * num_layers
        if len(numbers) < num_layers or not all(type(number) is int and number >= 0 for number in numbers):
            raise self.values.wrong(key, f"must be a number, or a number for each of the {num_layers} layers")
        return numbers


def numbers_of_layers(values: ConfigValues, key: str, default: int) -> list[int]:
    """Return the list of integers under a key. A single number, or the default for a missing key, gives one item."""
    numbers = values.values.get(key, default)
    is_list = isinstance(numbers, list) and numbers and all(type(each) is int for each in numbers)
    return list(numbers) if is_list else [values.integer(key, default)]


def _nothing(file: File) -> dict[str, Any]:
    return {}


def _as_stored(values: ConfigValues) -> dict[str, tuple[Part, ...]]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture, and how to translate its metadata and tensors to those of a Hugging Face model."""

    model: str  # the value of `architectures` in config.json
    keys: Keys
    constants: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[File], dict[str, Any]] = _nothing  # further entries of config.json, computed from the file
    parts: Callable[[ConfigValues], Mapping[str, tuple[Part, ...]]] = _as_stored  # by kind of stored tensor
    own_scales: tuple[str, ...] = ()  # kinds of tensors whose scales are separate tensors of the model

    def config(self, file: File) -> dict[str, Any]:
        """Return the entries of config.json that this architecture defines."""
        found = {"architectures": [self.model], **self.constants}
        for name, key in self.keys.items():
            key, default = key if isinstance(key, tuple) else (key, None)
            value = file.values.values.get(key, default)
            if value is None and not isinstance(self.keys[name], tuple):
                raise file.values.missing(key)
            found[name] = as_written(value) if isinstance(value, float) else value
        return found | self.read(file)


def rows_of_heads(heads: np.ndarray, size: int, order: np.ndarray | None = None) -> np.ndarray:
    """Return the row numbers of heads that have `size` rows each. `order` reorders the rows within each head."""
    return (heads[:, None] * size + (np.arange(size) if order is None else order)).reshape(-1)
