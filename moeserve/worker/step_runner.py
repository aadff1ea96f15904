"""The interface by which a rank runs steps, either layer by layer or by replaying captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from moeserve.models.rank_model import RankModel
from moeserve.scheduling.lockstep import Agreement
from moeserve.step_inputs import StepInputs


@dataclass(frozen=True)
class StepOutputs:
    """The results of a step's layers, valid until the next step."""

    hidden_TD: Tensor
    logits_TV: Tensor | None = None  # logits of all rows, if already computed
    chosen_T: tuple[Tensor, Tensor] | None = None  # tokens chosen by the settings of the step; see `ChooseTokens`


class StepRunner(Protocol):
    """The execution of steps on one rank, which may replay captured graphs."""

    on_layers: Callable[[], None]  # called once in each step, after its inputs have been prepared and its layers begin

    def padded_size(self, agreement: Agreement) -> int | None:
        """Return the number of rows to which all replicas pad this step, or None for no padding."""
        ...

    def capture_ahead(self) -> bool:
        """Capture a likely step before it occurs. Return False if there is no such step left."""
        ...

    def free_memory(self) -> None:
        """Return memory of outputs to the system. No step may run."""
        ...

    def __call__(self, step: StepInputs) -> StepOutputs:
        """Run a step. Collective: all ranks.

        Args:
            step: the step, padded to `padded_size` if that was not None.
        """
        ...


def do_nothing() -> None:
    return


class EagerSteps:
    """Runs every step layer by layer."""

    def __init__(self, model: RankModel, caches: list[Any]) -> None:
        self.model = model
        self.caches = caches
        self.on_layers: Callable[[], None] = do_nothing

    def padded_size(self, agreement: Agreement) -> int | None:
        return None

    def capture_ahead(self) -> bool:
        return False

    def free_memory(self) -> None:
        """Do nothing: no memory is kept between steps."""

    def __call__(self, step: StepInputs) -> StepOutputs:
        self.on_layers()
        return StepOutputs(self.model(step, self.caches))


@dataclass(frozen=True)
class StepRunnerFactory:
    """The factory of a rank's `StepRunner`, used after its KV cache has been created."""

    reserved_bytes: Callable[[], int]  # memory to keep free beside the KV cache. Collective: all ranks
    make: Callable[[list[Any]], StepRunner]  # takes the caches. Collective: all ranks
