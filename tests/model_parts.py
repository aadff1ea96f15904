"""The parts of a rank's model."""

from __future__ import annotations

from typing import Any

from moeserve.layers.network import OverTP


def networks_of(model: Any) -> list[list[Any]]:
    """Return the networks of each layer of a `Decoder`, without what gathers their rows from tp ranks."""
    of_layer: dict[int, list[Any]] = {}
    for block in model.blocks:
        network = block.network.network if isinstance(block.network, OverTP) else block.network
        of_layer.setdefault(block.layer, []).append(network)
    return list(of_layer.values())
