"""The experts that the ranks of a simulated engine hold: which, in which slots, and of which version of the weights."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from moeserve.config.engine_config import EngineConfig
from moeserve.layers.moe.placement.placement import Placement
from moeserve.models import registry
from moeserve.worker.loading import place_experts

Require = Callable[[bool, str, str], None]  # of the simulation: what must hold, the invariant, a message


@functools.cache
def model_folder(num_experts: int) -> str:
    """Return a folder with the config of a model that has no weights."""
    folder = tempfile.TemporaryDirectory()
    _FOLDERS.append(folder)
    config = dict(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=num_experts,
        num_experts_per_tok=2,
        vocab_size=100,
        max_position_embeddings=40,
    )
    Path(folder.name, "config.json").write_text(json.dumps(config))
    return folder.name


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # removed at exit


def placements_of(config: EngineConfig) -> tuple[Placement, ...]:
    num_ranks = config.parallel.num_ranks
    return place_experts(config, registry.describe(config.weights.model_path), num_ranks, [0] * num_ranks)


class HeldExperts:
    """The experts of one rank, by layer and slot."""

    def __init__(self) -> None:
        self.version = 0  # number of updates since the checkpoint was loaded
        self.slots: list[tuple[int, ...]] = []  # by layer; empty until it has loaded

    def take(self, placements: Sequence[Placement], rank: int, require: Require) -> None:
        """Load all experts, or keep those that this rank has, and load those that it takes over."""
        placed = [placement.logical_of_slot[rank] for placement in placements]
        for own, now in zip(self.slots, placed, strict=False):
            require(now[: len(own)] == own, "survivors", f"rank {rank} had {own} and must load {now}")
        self.slots = placed


def check_experts(placements: Sequence[Placement], held: Sequence[HeldExperts], require: Require) -> None:
    """Check ranks that are about to serve together.

    I2: a token finds each of its experts, since every expert has a slot on the rank where senders look for it. I8: all
    copies of an expert are of the same version.
    """
    for layer, placement in enumerate(placements):
        found = {expert for each in held for expert in each.slots[layer]}
        require(found == set(range(placement.num_logical)), "I2", f"layer {layer} has only {len(found)} experts")
        is_placed = all(each.slots[layer] == placement.logical_of_slot[rank] for rank, each in enumerate(held))
        require(is_placed, "I2", f"experts of layer {layer} are not where {placement} says")
    require(len({each.version for each in held}) == 1, "I8", f"versions: {[each.version for each in held]}")
