"""A loop over the chunks of a step, which updates the state of each request."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeserve.step_inputs import StepInputs


def run_pieces(step: StepInputs, states: Tensor, run: Callable[[slice, Tensor], Tensor]) -> None:
    """Run all chunks and update the states. A chunk is split in two if a state within it must be saved.

    Args:
        states: [rows, ...]; see `StateRows`.
        run: called with a slice of at least one row and the state before these rows; returns the state after them.
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
