"""Stand-ins for what a GPU does, on a CPU: results that come late, and graphs that are replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moeserve.ops.reading import Reading
from moeserve.worker.device_copies import GpuCopies
from moeserve.worker.request_table import RequestTable
from moeserve.worker.step_runner import StepOutputs


class LateReading:
    """Results that the host has only after it has waited for them, or has looked several times."""

    def __init__(self, tensors: Sequence[Tensor], num_looks: int) -> None:
        self._tensors = [each.clone() for each in tensors]
        self._num_looks = num_looks

    @property
    def is_done(self) -> bool:
        self._num_looks -= 1
        return self._num_looks < 0

    def wait(self) -> list[Tensor]:
        self._num_looks = 0
        return self._tensors


class LateCopies(GpuCopies):
    """The copies of a GPU, in the memory of the CPU."""

    def __init__(self, table: RequestTable, num_looks: int = 3) -> None:
        super().__init__(table, torch.device("cpu"))
        self.num_looks = num_looks
        self.num_tokens_kept = 0  # without a copy on the host

    def keep_tokens(self, slots_L: Tensor, token_ids_L: Tensor) -> None:
        self.num_tokens_kept += len(slots_L)
        super().keep_tokens(slots_L, token_ids_L)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def start_reading(self, tensors: Sequence[Tensor]) -> Reading:
        return LateReading(tensors, self.num_looks)


def captured(run: Callable[[], StepOutputs]) -> tuple[Callable[[], None], StepOutputs]:
    """Capture a graph without a GPU. A replay calls the function again and overwrites the first results."""
    first = run()

    def tensors(outputs: StepOutputs) -> list[Tensor]:
        found = [outputs.hidden_TD, outputs.logits_TV, *(outputs.chosen_T or ())]
        return [each for each in found if each is not None]

    memory = [each.clone() for each in tensors(first)]

    def replay() -> None:
        for own, new in zip(memory, tensors(run()), strict=True):
            own.copy_(new)

    if first.logits_TV is None:
        return replay, StepOutputs(memory[0])
    return replay, StepOutputs(memory[0], memory[1], (memory[2], memory[3]))


def plant(name: str, argument: str) -> None:
    """Give a rank in a process of its own such copies; see sitecustomize.py."""
    from moeserve.worker import model_runner

    model_runner.copies_for = lambda table, device: LateCopies(table, num_looks=6)
