"""The interface by which a rank runs steps, either layer by layer or by replaying captured graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moeserve.distributed.mesh import Mesh
from moeserve.kv.rules import CacheRules
from moeserve.models.rank_model import RankModel
from moeserve.scheduling.lockstep import Agreement
from moeserve.step_inputs import GroupTable, StateRows, StepInputs
from moeserve.worker.halves import HalvingLimits


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The constants of a rank's steps."""

    mesh: Mesh
    tp_rank: int  # tp rank in its replica
    block_size: int  # tokens per block
    max_blocks: int  # maximum number of blocks of one request
    device: torch.device
    halving: HalvingLimits = HalvingLimits()
    rules: CacheRules = CacheRules()  # of the model's cache groups

    def with_all_groups(self, step: StepInputs) -> StepInputs:
        """Return a step of the first cache group with tables and state rows of all others, to which it writes nothing.

        Tables are as large as those of the first group.
        """
        num_tokens, (num_chunks, max_blocks) = len(step.token_ids), step.block_table.shape
        return dataclasses.replace(
            step,
            other_tables=tuple(
                GroupTable.none(num_tokens, num_chunks, max_blocks, self.device) for _ in self.rules.tables[1:]
            ),
            states=StateRows.none(num_chunks, self.device) if self.rules.rows else None,
        )


@dataclass(frozen=True)
class StepOutputs:
    """The results of a step's layers, valid until the next step."""

    hidden_TD: Tensor
    logits_TV: Tensor | None = None  # logits of all rows, if already computed
    chosen_T: tuple[Tensor, Tensor] | None = None  # tokens chosen by the settings of the step; see `ChooseTokens`


class StepReplay(Protocol):
    """The execution of steps on one rank, which may replay captured graphs."""

    on_layers: Callable[[], None]  # called once in each step, after its inputs have been prepared and its layers begin

    def padded_size(self, agreement: Agreement) -> int | None:
        """Return the number of rows to which all replicas pad this step, or None for no padding."""
        ...

    def capture_ahead(self) -> bool:
        """Capture a likely step before it occurs. Return False if there is no such step left."""
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

    def __call__(self, step: StepInputs) -> StepOutputs:
        self.on_layers()
        return StepOutputs(self.model(step, self.caches))


@dataclass(frozen=True)
class ReplayFactory:
    """The factory of a rank's `StepReplay`, used after its KV cache has been created."""

    reserved_bytes: Callable[[], int]  # memory to keep free beside the KV cache. Collective: all ranks
    make: Callable[[list[Any]], StepReplay]  # takes the caches. Collective: all ranks
