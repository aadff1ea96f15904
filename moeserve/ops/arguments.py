"""Configurations as the keyword arguments that kernels take."""

from __future__ import annotations

from typing import Any

from moeserve.ops.interfaces import (
    Activation,
    ClampedSwiGLU,
    CutSwiGLU,
    GeGLU,
    LimitedSwiGLU,
    RouterConfig,
    SquaredReLU,
    SwiGLU,
)


def router_arguments(config: RouterConfig) -> dict[str, Any]:
    """Return the rule of a router, without the number of experts that it chooses."""
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
