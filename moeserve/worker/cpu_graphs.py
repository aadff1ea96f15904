"""Decode steps as one call each: the layers' kernels are recorded on a graph, and played for every step of that size.

A decode step brings one token of each request, so for a number of requests all shapes are known: on one rank, and where
all ranks share memory and have few tokens together. Then the layers are always the same calls in the same memory, and
only the numbers change. Between kernels Python takes a few microseconds each time; on small models that adds up to a
fifth of a step. Results are those of the layers themselves, to the last bit.

All graphs work in the same memory, one at a time, and each uses it again from layer to layer.

Whether a rank plays its graph or runs its layers makes no difference to the other ranks: the collectives are the same.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moeserve.distributed.group import Groups
from moeserve.layers.rotary import Rotation
from moeserve.memory import Arena, without_pool
from moeserve.models.decoder import Decoder
from moeserve.ops.native import native_kernels
from moeserve.step_inputs import StepInputs

MAX_TOKENS = 64  # of a step that is recorded; larger ones have more to do than to wait for Python
MEMORY_BYTES = 2**26  # of what kernels on graphs write, all graphs together
MAX_CPU_GRAPHS = 256
MAX_SIZES = 4096  # remembered, of steps that were seen or refused
TAKING_MEMORY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
READING_NUMBERS = ("tolist", "numpy", "__array__", "__dlpack__")  # on the host, past what torch dispatches

Sizes = tuple[int, tuple[int, ...]]  # of a step: the replica's tokens, and those that each ep rank brings to dispatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedStep:
    """A graph, and the memory where its inputs and its result lie."""

    replay: Callable[[], None]
    counts: tuple[int, ...]  # of collectives on the graph
    hidden_tD: Tensor
    rotation: Rotation
    step: StepInputs
    result_TD: Tensor

    def run(self, hidden_tD: Tensor, rotation: Rotation, step: StepInputs) -> Tensor:
        """The result, which stays as it is until the next run. DistributedError as of the layers."""
        _fill(self.hidden_tD, self.rotation, self.step, hidden_tD, rotation, step)
        self.replay()
        return self.result_TD


class CpuGraphs:
    """Runs a CPU rank's part of a model, and decode steps of sizes that it has seen before from graphs."""

    def __init__(self, model: Decoder, caches: list[Any], groups: Groups, max_blocks: int) -> None:
        """
        Args:
            groups: those that the model's layers call.
            max_blocks: of a request, at most.
        """
        self.model = model
        self.groups = groups
        self.caches = caches
        self.memory = Arena(MEMORY_BYTES)
        self.inputs = {"block_table": torch.zeros(MAX_TOKENS, max_blocks, dtype=torch.int32)}  # of all graphs
        self.is_possible = native_kernels() is not None and groups.supports_cpu_graphs
        self.was_refused: OrderedDict[Sizes, bool] = (
            OrderedDict()
        )  # of sizes that were seen: whether they gave no graph
        self.recorded: OrderedDict[Sizes, CapturedStep] = OrderedDict()  # the one used last at the end

    def __call__(self, step: StepInputs, caches: list[Any]) -> Tensor:
        """Hidden states [T, D], as the model's own call gives them. They stay as they are until the next call."""
        assert caches is self.caches
        hidden_tD, rotation = self.model.embed(step)
        sizes = len(step.token_ids), step.tokens_per_rank
        if not self.is_possible or not 0 < sizes[0] <= MAX_TOKENS or not _is_decode(step):
            return self.model.run_layers(hidden_tD, rotation, caches, step)
        if recorded := self.recorded.get(sizes):
            self.recorded.move_to_end(sizes)
            result_TD = recorded.run(hidden_tD, rotation, step)
            self.groups.add_replayed(recorded.counts)
            return result_TD
        was_refused = self.was_refused.get(sizes)
        if was_refused is None:  # it may be the only one
            self.was_refused[sizes] = False
            if len(self.was_refused) > MAX_SIZES:
                self.was_refused.popitem(last=False)
        if was_refused is not False:
            return self.model.run_layers(hidden_tD, rotation, caches, step)
        return self._record(sizes, hidden_tD, rotation, step)

    def _record(self, sizes: Sizes, hidden_tD: Tensor, rotation: Rotation, step: StepInputs) -> Tensor:
        """The step's result, and from now on a graph for such steps, where there can be one."""
        own_hidden_tD = self._own("hidden", hidden_tD)
        own_rotation = dataclasses.replace(
            rotation, cosines=self._own("cosines", rotation.cosines), sines=self._own("sines", rotation.sines)
        )
        own_step = dataclasses.replace(
            step,
            cache_slots=self._own("cache_slots", step.cache_slots),
            context_lens=self._own("context_lens", step.context_lens),
            row_starts=step.row_starts.clone(),
            block_table=self._own("block_table", step.block_table),
        )
        _fill(own_hidden_tD, own_rotation, own_step, hidden_tD, rotation, step)

        kernels = native_kernels()
        assert kernels is not None
        graph = kernels.CpuGraph(self.memory.address, self.memory.num_bytes)
        watch, counts = OnlyKernels(self.memory), self.groups.count_collectives()
        graph.begin_capture()
        try:
            with watch, watch.reads, without_pool():
                result_TD = self.model.run_layers(own_hidden_tD, own_rotation, self.caches, own_step)
        finally:
            graph.end_capture()
        own_result_TD = self.memory.alias(result_TD)  # holding its memory would take it from all other graphs
        if watch.strangers or own_result_TD is None:
            strangers = ", ".join(sorted(watch.strangers)) or "what gives no memory of theirs"
            logger.info("decode steps of %d tokens are not recorded: the layers also call %s", sizes[0], strangers)
            self.was_refused[sizes] = True
            return result_TD
        counts = tuple(after - before for after, before in zip(self.groups.count_collectives(), counts, strict=True))
        recorded = CapturedStep(graph.replay, counts, own_hidden_tD, own_rotation, own_step, own_result_TD)
        self.recorded[sizes] = recorded
        if len(self.recorded) > MAX_CPU_GRAPHS:
            self.recorded.popitem(last=False)
        return result_TD

    def _own(self, name: str, like: Tensor) -> Tensor:
        """Rows for an input, where all graphs have theirs."""
        if name not in self.inputs:
            self.inputs[name] = like.new_empty(MAX_TOKENS, *like.shape[1:])
        return self.inputs[name][: len(like)]


class OnlyKernels(TorchDispatchMode):
    """Watches what torch itself is asked to do: taking memory and looking at it leave nothing to be done again.

    Memory is taken from an arena. `reads` is to be entered too.
    """

    def __init__(self, memory: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.strangers: set[str] = set()  # what a graph would miss
        self.reads = HostReads(self.strangers)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        if name in TAKING_MEMORY:
            taken = self.memory.empty(result.shape, result.dtype) if result.is_contiguous() else None
            if taken is None:
                self.strangers.add(f"{func.name()} of {result.nbytes} bytes")
            return result if taken is None else taken
        if name.endswith("_") or not _shares_memory(result, args):
            self.strangers.add(func.name())
        return result


class HostReads(TorchFunctionMode):
    """Watches who reads numbers out of tensors, which may be others when a graph is played."""

    def __init__(self, strangers: set[str]) -> None:
        super().__init__()
        self.strangers = strangers

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (name := getattr(func, "__name__", "")) in READING_NUMBERS:
            self.strangers.add(name)
        return func(*args, **(kwargs or {}))


def _shares_memory(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether the results are views of the first argument."""
    results = result if isinstance(result, (list, tuple)) else [result]
    if not args or not isinstance(args[0], Tensor) or not all(isinstance(each, Tensor) for each in results):
        return False
    memory = args[0].untyped_storage().data_ptr()
    return all(each.untyped_storage().data_ptr() == memory for each in results)


def _is_decode(step: StepInputs) -> bool:
    """Whether each request brings one token."""
    return len(step.spans) == len(step.token_ids) and all(span.num_rows == 1 for span in step.spans)


def _fill(
    own_hidden_tD: Tensor,
    own_rotation: Rotation,
    own_step: StepInputs,
    hidden_tD: Tensor,
    rotation: Rotation,
    step: StepInputs,
) -> None:
    """Copies a step to where a graph finds it. Rows start at the same places in all decode steps of one size."""
    own_hidden_tD.copy_(hidden_tD)
    own_rotation.cosines.copy_(rotation.cosines)
    own_rotation.sines.copy_(rotation.sines)
    own_step.cache_slots.copy_(step.cache_slots)
    own_step.context_lens.copy_(step.context_lens)
    own_step.block_table[:, : step.block_table.shape[1]].copy_(step.block_table)
