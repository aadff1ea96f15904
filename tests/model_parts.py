"""The parts of a rank's model."""

from __future__ import annotations

from typing import Any


def networks_of(model: Any) -> list[list[Any]]:
    """Return the networks of each layer of a `Decoder`."""
    of_layer: dict[int, list[Any]] = {}
    for block in model.blocks:
        of_layer.setdefault(block.layer, []).append(block.network)
    return list(of_layer.values())
