"""Plans of FlashInfer's wrappers, made on the host while the GPU may still run the previous step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from moeserve.step_inputs import StepInputs

Wrapper = TypeVar("Wrapper")
Plan = TypeVar("Plan")
NUM_TURNS = 2  # the step that runs, and the step that is being prepared


def started_copies(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that follows the copies queued on the current stream; None if the device has no streams."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(frozen=True)
class Turn(Generic[Wrapper, Plan]):
    """A planned step, and the wrapper that holds its plan."""

    step: StepInputs
    wrapper: Wrapper
    plan: Plan
    copies: torch.cuda.Event | None


class Plans(Generic[Wrapper, Plan]):
    """The plans of the last steps, shared by the layers of a step.

    A wrapper's `plan` writes to pinned memory of the wrapper, and starts copying it to the GPU. Another plan could
    overwrite memory that is still being copied. Steps therefore alternate between wrappers, and a wrapper is planned
    again only after its last copy has finished.
    """

    def __init__(self, make_wrapper: Callable[[], Wrapper], device: torch.device) -> None:
        self._make_wrapper = make_wrapper
        self._device = device
        self._turns: deque[Turn[Wrapper, Plan]] = deque()

    def of(self, step: StepInputs, plan: Callable[[Wrapper], Plan]) -> tuple[Wrapper, Plan]:
        """Return the wrapper and the plan of a step. The first layer of the step makes the plan.

        Args:
            plan: function that plans the step with a wrapper.
        """
        for turn in self._turns:
            if turn.step is step:
                return turn.wrapper, turn.plan
        if len(self._turns) < NUM_TURNS:
            wrapper = self._make_wrapper()
        else:
            oldest = self._turns.popleft()
            wrapper = oldest.wrapper
            if oldest.copies is not None:
                oldest.copies.synchronize()
        planned = plan(wrapper)
        self._turns.append(Turn(step, wrapper, planned, started_copies(self._device)))
        return wrapper, planned
