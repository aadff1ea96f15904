"""Conversion of configurations to the keyword arguments of kernels."""

from __future__ import annotations

from typing import Any

from moeserve.ops.routing.interface import RouterConfig
from moeserve.ops.rows.activations import (
    Activation,
    ClampedSwiGLU,
    CutSwiGLU,
    GeGLU,
    LimitedSwiGLU,
    SquaredReLU,
    SwiGLU,
)


def router_arguments(config: RouterConfig) -> dict[str, Any]:
    """Return a router's rule as keyword arguments, without `top_k`."""
    return dict(
        scoring=config.scoring,
        num_groups=config.num_groups,
        num_chosen_groups=config.num_chosen_groups,
        experts_rating_group=config.experts_rating_group,
        is_normalized=config.is_normalized,
        scale=config.scale,
    )


def activation_arguments(activation: Activation | None) -> dict[str, Any]:
    match activation:
        case None:
            return {}
        case SwiGLU():
            return {"activation": "swiglu"}
        case ClampedSwiGLU(alpha=alpha, limit=limit):
            return {"activation": "clamped_swiglu", "alpha": alpha, "limit": limit}
        case LimitedSwiGLU(limit=limit):
            return {"activation": "limited_swiglu", "limit": limit}
        case CutSwiGLU(limit=limit):
            return {"activation": "cut_swiglu", "limit": limit}
        case SquaredReLU():
            return {"activation": "squared_relu"}
        case GeGLU():
            return {"activation": "geglu"}
        case _:
            raise AssertionError(f"no kernel has the activation {activation}")
