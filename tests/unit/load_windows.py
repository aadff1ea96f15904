"""Load windows with drawn counts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from moeserve.telemetry.expert_load import LoadWindow


def of_counts(
    tokens_of_expert: Sequence[Sequence[int]], tokens_of_rank: Sequence[Sequence[int]], **others: Any
) -> LoadWindow:
    """Return a window with these counts, and defaults for fields that are not given."""
    plain: dict[str, Any] = dict(
        first_step=0,
        num_steps=10,
        ended_at=1_700_000_000.0,
        seconds=2.0,
        placement_epoch=0,
        num_tokens=sum(tokens_of_expert[0]),
        num_padding_tokens=0,
        num_idle_steps=0,
        bytes_dispatched=1000,
        straggler_seconds=0.25,
        layers=tuple(range(len(tokens_of_expert))),
    )
    return LoadWindow(
        tokens_of_expert=tuple(map(tuple, tokens_of_expert)),
        tokens_of_rank=tuple(map(tuple, tokens_of_rank)),
        **(plain | others),
    )


def drawn(
    num_windows: int, num_layers: int, num_experts: int, num_ranks: int, seed: int = 0, **others: Any
) -> tuple[LoadWindow, ...]:
    """Return consecutive windows. Experts are dealt to ranks in turn; expert 0 gets no tokens."""
    dice = random.Random(seed)
    windows = []
    for number in range(num_windows):
        experts = [[0] + [int(dice.lognormvariate(5, 1)) for _ in range(num_experts - 1)] for _ in range(num_layers)]
        ranks = [[sum(of_layer[rank::num_ranks]) for rank in range(num_ranks)] for of_layer in experts]
        windows.append(of_counts(experts, ranks, first_step=10 * number, **others))
    return tuple(windows)
