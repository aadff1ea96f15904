"""How a rank runs its steps: the model layer by layer, or decode steps replayed from captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moeserve.distributed.mesh import Mesh
from moeserve.models.decoder import Decoder
from moeserve.scheduling.lockstep import Agreement
from moeserve.step_inputs import StepInputs
from moeserve.worker.halves import HalvingLimits


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The constants of a rank's steps."""

    mesh: Mesh
    tp_rank: int  # of this rank in its replica
    block_size: int  # tokens
    max_blocks: int  # of one request
    device: torch.device
    halving: HalvingLimits = HalvingLimits()
    has_states: bool = False  # a layer of this rank keeps a state for each request
    has_windows: bool = False  # layers with windows have blocks of their own, on any rank


@dataclass(frozen=True)
class StepOutputs:
    """The results of a step's layers, valid until the next step."""

    hidden_TD: Tensor
    logits_TV: Tensor | None = None  # of all rows, if they were computed too
    chosen_T: tuple[Tensor, Tensor] | None = None  # by the settings of the step; see `ChooseTokens`


class StepReplay(Protocol):
    """Runs steps on one rank, replaying a captured graph where one fits."""

    on_layers: Callable[[], None]  # called once in each step, when its inputs are prepared and its layers begin

    def padded_size(self, agreement: Agreement) -> int | None:
        """Return the number of rows to which all replicas pad this step, or None for no padding."""
        ...

    def capture_ahead(self) -> bool:
        """Capture a likely step before it occurs. Return False if there is none left."""
        ...

    def __call__(self, step: StepInputs) -> StepOutputs:
        """Run a step. Collective: all ranks.

        Args:
            step: padded to `padded_size`, if that was not None.
        """
        ...


def do_nothing() -> None:
    return


class EagerSteps:
    """Runs every step layer by layer."""

    def __init__(self, model: Decoder, caches: list[Any]) -> None:
        self.model = model
        self.caches = caches
        self.on_layers: Callable[[], None] = do_nothing

    def padded_size(self, agreement: Agreement) -> int | None:
        return None

    def capture_ahead(self) -> bool:
        return False

    def __call__(self, step: StepInputs) -> StepOutputs:
        self.on_layers()
        return StepOutputs(self.model(step, self.caches))


@dataclass(frozen=True)
class ReplayFactory:
    """Makes the `StepReplay` of a rank, once its KV cache exists."""

    reserved_bytes: Callable[[], int]  # memory to keep free beside the KV cache. Collective: all ranks
    make: Callable[[list[Any]], StepReplay]  # takes the caches. Collective: all ranks
