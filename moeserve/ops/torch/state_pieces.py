"""The chunks of a step one after another, each from a state to the next."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.step_inputs import StepInputs


def run_pieces(step: StepInputs, states: Tensor, run: Callable[[slice, Tensor], Tensor]) -> None:
    """Run all chunks, in two pieces where a state within the chunk is saved, and update the states.

    Args:
        states: [rows, ...]; see `StateRows`.
        run: called with the rows of at least one token and the state before them; returns the state after them.
    """
    assert step.states is not None
    moves = zip(*(rows.tolist() for rows in step.states), strict=True)
    for span, (load, store, save, num_before_save) in zip(step.spans, moves, strict=True):
        state = states[load].clone() if load >= 0 else torch.zeros_like(states[0])
        first, last = span.first_row, span.first_row + span.num_rows
        pieces = [(slice(first, last), store)]
        if save >= 0:
            middle = first + num_before_save
            pieces = [(slice(first, middle), save), (slice(middle, last), store)]
        for rows, target in pieces:
            if rows.start < rows.stop:
                state = run(rows, state)
            if target >= 0:
                states[target] = state
