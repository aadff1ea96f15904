"""The differences between one family of models and another: how its config.json reads, and its tensor names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeserve.models.config_values import ConfigValues
from moeserve.models.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class MoENames:
    """Tensor names of a mixture-of-experts layer, after `model.layers.3.`.

    A checkpoint stores each expert in tensors of its own (`<experts>.7.<gate>.weight`), or all experts of a layer in
    one (`<experts>.gate_up_proj`, [experts, 2 * width, hidden], and `<experts>.down_proj`, [experts, hidden, width]).
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    is_interleaved: bool = False  # one tensor for all experts, [experts, inputs, outputs], gate and up outputs in turn


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models. Each is a file in `moeserve/models/families`."""

    name: str
    architecture: str  # the name in config.json under `architectures`
    read: Callable[[ConfigValues], ModelConfig]  # raises CheckpointError for a config that is not supported
    names: tuple[MoENames, ...] = (MoENames(),)  # a checkpoint follows the first whose router it holds
