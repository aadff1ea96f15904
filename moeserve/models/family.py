"""What one family of models adds to all that is common: how its config.json reads, and how it names its experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeserve.models.config_values import ConfigValues
from moeserve.models.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class MoENames:
    """What a checkpoint calls the tensors of a mixture-of-experts layer, after `model.layers.3.`.

    Experts come one tensor each (`<experts>.7.<gate>.weight`), or all of a layer in one (`<experts>.gate_up_proj`,
    [experts, 2 * width, hidden], and `<experts>.down_proj`, [experts, hidden, width]).
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    # Fused experts stand transposed, [experts, inputs, outputs], and gate and up alternate among the outputs.
    is_interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family. A new one is one of these, in a file of its own, and a line in registry.py."""

    name: str
    read: Callable[[ConfigValues], ModelConfig]
    names: tuple[MoENames, ...] = (MoENames(),)  # the first whose router a checkpoint holds is the one it follows
