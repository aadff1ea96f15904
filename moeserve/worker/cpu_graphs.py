"""CPU graphs: the kernels of a decode step, captured once and replayed with one call.

A decode step has the same number of tokens for each request: one, its draft tokens, and perhaps accepted draft tokens
that are computed again. A few numbers therefore determine all shapes, on one rank and on ranks that share memory and
exchange few tokens. Every such step runs the same kernels on the same memory. Replaying them without Python saves a few
microseconds per kernel, up to a fifth of a step of a small model. Results are equal to the last bit. Capturing records
the kernels without executing them, so it does not need a request.

All graphs use the same memory, so only one runs at a time. A rank may replay a step that another rank runs layer by
layer, because the collectives are the same.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moeserve.distributed.groups import Groups
from moeserve.layers.rotary import Rotations
from moeserve.memory import Arena, without_pool
from moeserve.models.decoder import Decoder
from moeserve.scheduling.lockstep import Agreement
from moeserve.step_inputs import StepInputs, decode_step
from moeserve.worker.rank_context import RankContext
from moeserve.worker.step_runner import StepOutputs, do_nothing

MAX_TOKENS = 64  # maximum tokens of a captured step; in larger steps, Python takes little of the time
MAX_TOKENS_PER_REQUEST = 16  # maximum tokens per request of a captured step
MEMORY_BYTES = 2**26  # memory for the outputs of captured kernels, shared by all graphs
MAX_CPU_GRAPHS = 256
MAX_SIZES_SEEN = 4096
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
HOST_READS = ("tolist", "numpy", "__array__", "__dlpack__")  # reads that torch's dispatch does not see


class StepSizes(NamedTuple):
    """The sizes that determine all shapes of a step, used as the key of its graph."""

    num_tokens: int
    tokens_per_request: int
    tokens_per_rank: tuple[int, ...]  # number of tokens that each ep rank dispatches
    drafts_per_request: int = 0  # draft tokens among the tokens of each request

    @classmethod
    def of(cls, step: StepInputs) -> StepSizes | None:
        """Return the sizes of a step; None if the step cannot be captured.

        Steps in which recurrent states are passed between tokens of a chunk, or experts are forced, cannot be captured.
        """
        num_tokens, num_rows = len(step.token_ids), step.max_rows_per_chunk
        if step.forced_routes is not None:
            return None
        if not 0 < num_tokens <= MAX_TOKENS or any(span.num_rows != num_rows for span in step.spans):
            return None
        num_drafts = step.spans[0].num_drafts
        if any(span.num_drafts != num_drafts for span in step.spans):
            return None
        has_drafts = num_drafts > 0 and num_rows <= MAX_TOKENS_PER_REQUEST and step.states is None
        return cls(num_tokens, num_rows, step.tokens_per_rank, num_drafts) if num_rows == 1 or has_drafts else None


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedStep:
    """A graph, with the memory of its inputs and its result."""

    replay: Callable[[], None]
    num_collectives: tuple[int, ...]  # number of collectives in the graph, by group
    hidden_tD: Tensor
    rotations: Rotations
    step: StepInputs
    result: Tensor

    def run(self) -> Tensor:
        """Return the result of the layers for the copied inputs, valid until the next run.

        Raises:
            DistributedError: a collective failed, as in eager execution.
        """
        self.replay()
        return self.result

    def copy_inputs(self, hidden_tD: Tensor, rotations: Rotations, step: StepInputs) -> None:
        self.hidden_tD.copy_(hidden_tD)
        for config, rotation in rotations.items():
            self.rotations[config].cosines.copy_(rotation.cosines)
            self.rotations[config].sines.copy_(rotation.sines)
        self.step.copy_tensors(step)


class CpuGraphs:
    """A `StepRunner` for CPU ranks, which replays decode steps from graphs.

    Likely sizes are captured while the rank is idle. Other sizes are captured when they occur for the second time. A
    capture takes about as long as running the layers without a graph.
    """

    def __init__(
        self, model: Decoder, caches: list[Any], groups: Groups, context: RankContext, max_num_seqs: int
    ) -> None:
        """
        Args:
            groups: the groups that the model's layers use.
            max_num_seqs: maximum number of requests in one step.
        """
        self.model = model
        self.groups = groups
        self.caches = caches
        self._context = context
        self.on_layers: Callable[[], None] = do_nothing
        self.memory = Arena(MEMORY_BYTES)
        self.captured: OrderedDict[StepSizes, CapturedStep | None] = OrderedDict()  # LRU; None: cannot be captured
        self._sizes_seen: OrderedDict[StepSizes, None] = OrderedDict()
        # With several ranks, nothing is captured ahead: the first layer's input comes from a collective, and sizes are
        # combinations of the sizes of all ranks.
        num_ahead = min(MAX_TOKENS, max_num_seqs) if groups.mesh.world_size == 1 else 0
        self._sizes_ahead = deque(range(1, num_ahead + 1))
        self._inputs: dict[str, Tensor] = {}  # shared by all graphs

    def padded_size(self, agreement: Agreement) -> int | None:
        return None

    def capture_ahead(self) -> bool:
        if not self._sizes_ahead:
            return False
        step = self._context.with_all_groups(decode_step(self._sizes_ahead.popleft()))
        sizes = StepSizes.of(step)
        assert sizes is not None
        if sizes not in self.captured:
            self._capture(sizes, *self.model.receive(step), step)
        return True

    def free_memory(self) -> None:
        self.memory.free()

    def __call__(self, step: StepInputs) -> StepOutputs:
        if step.halves:  # steps of many rows, in which Python takes little of the time
            self.on_layers()
            return StepOutputs(self.model(step, self.caches))
        hidden_tD, rotations = self.model.receive(step)
        return StepOutputs(self.model.send(self._run_layers(hidden_tD, rotations, step)))

    def _run_layers(self, hidden_tD: Tensor, rotations: Rotations, step: StepInputs) -> Tensor:
        sizes = StepSizes.of(step)
        if sizes is not None:
            if sizes in self._sizes_seen and sizes not in self.captured:
                self._capture(sizes, hidden_tD, rotations, step)
            if sizes in self.captured:
                self.captured.move_to_end(sizes)
            if (captured := self.captured.get(sizes)) is not None:
                captured.copy_inputs(hidden_tD, rotations, step)
                self.on_layers()
                result = captured.run()
                self.groups.add_replayed(captured.num_collectives)
                return result
            self._sizes_seen[sizes] = None
            if len(self._sizes_seen) > MAX_SIZES_SEEN:
                self._sizes_seen.popitem(last=False)
        self.on_layers()
        return self.model.run_layers(hidden_tD, rotations, self.caches, step)

    def _capture(self, sizes: StepSizes, hidden_tD: Tensor, rotations: Rotations, step: StepInputs) -> None:
        """Capture the layers of a step of these sizes, without executing a kernel."""
        make_graph = self.model.context.backend.make_step_graph
        assert make_graph is not None
        graph = make_graph(self.memory.address, self.memory.num_bytes)
        own_step = dataclasses.replace(
            step.with_tensors(self._step_memory(index, like) for index, like in enumerate(step.tensors())),
            row_starts=step.row_starts.clone(),
        )
        own_step.write_nothing()  # operations of torch are executed during the capture
        captured = CapturedStep(
            replay=graph.replay,
            num_collectives=(),
            hidden_tD=self._input_memory("hidden", hidden_tD),
            rotations={
                config: dataclasses.replace(
                    rotation,
                    cosines=self._input_memory(f"cosines {config}", rotation.cosines),
                    sines=self._input_memory(f"sines {config}", rotation.sines),
                )
                for config, rotation in rotations.items()
            },
            step=own_step,
            result=hidden_tD,
        )
        check, before = OnlyKernels(self.memory), self.groups.count_collectives()
        alias = None
        graph.begin_capture()
        try:
            # Check for reads on the host only in the first capture: the check takes as long as the rest, and its result
            # does not depend on the number of tokens.
            with check, nullcontext() if self.captured else check.reads, without_pool():
                result = self.model.run_layers(captured.hidden_tD, captured.rotations, self.caches, captured.step)
            alias = self.memory.alias(result)  # a reference would keep this memory from all other graphs
        except Exception as error:  # an operation may fail on values that no kernel has computed
            check.missed.add(f"an operation that fails here: {error!r:.200}")
        finally:
            graph.end_capture()
        counts = tuple(after - count for after, count in zip(self.groups.count_collectives(), before, strict=True))
        self.groups.add_replayed([-count for count in counts])
        if check.missed or alias is None:
            missed = ", ".join(sorted(check.missed)) or "an operation whose result is not in the graph's memory"
            logger.info("decode steps of %d tokens are not captured: the layers also call %s", sizes.num_tokens, missed)
            self.captured[sizes] = None
        else:
            self.captured[sizes] = dataclasses.replace(captured, num_collectives=counts, result=alias)
        if len(self.captured) > MAX_CPU_GRAPHS:
            self.captured.popitem(last=False)

    def _step_memory(self, index: int, like: Tensor) -> Tensor:
        """Return the memory of one of a step's `tensors`.

        A tensor with two dimensions is a block table of any width.
        """
        columns = [self._context.max_blocks] * (like.ndim - 1)
        return self._input_memory(f"step {index}", like, columns)

    def _input_memory(self, name: str, like: Tensor, columns: Sequence[int] | None = None) -> Tensor:
        """Return the leading rows of the memory from which all graphs read an input.

        Args:
            columns: dimensions of a row, if they differ from those of `like`.
        """
        if name not in self._inputs:
            self._inputs[name] = like.new_zeros(MAX_TOKENS, *(like.shape[1:] if columns is None else columns))
        return self._inputs[name][: len(like)]


class OnlyKernels(TorchDispatchMode):
    """A mode that lists the torch operations that a graph would miss, except allocations and views.

    Memory is allocated from an arena. The mode `reads` must be entered as well.
    """

    def __init__(self, memory: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self.missed: set[str] = set()
        self.reads = HostReads(self.missed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not import its compiler of 900 modules."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        if name in ALLOCATIONS:
            allocated = self.memory.empty(result.shape, result.dtype) if result.is_contiguous() else None
            if allocated is None:
                self.missed.add(f"{func.name()} of {result.nbytes} bytes")
            return result if allocated is None else allocated
        if name.endswith("_") or not _are_views(result, args):
            self.missed.add(func.name())
        return result


class HostReads(TorchFunctionMode):
    """A mode that lists reads of tensor values on the host, because these may differ in a replay."""

    def __init__(self, missed: set[str]) -> None:
        super().__init__()
        self.missed = missed

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (name := getattr(func, "__name__", "")) in HOST_READS:
            self.missed.add(name)
        return func(*args, **(kwargs or {}))


def _are_views(result: Any, args: tuple[Any, ...]) -> bool:
    """Return True if the results are views of the first argument."""
    results = result if isinstance(result, (list, tuple)) else [result]
    if not args or not isinstance(args[0], Tensor) or not all(isinstance(each, Tensor) for each in results):
        return False
    memory = args[0].untyped_storage().data_ptr()
    return all(each.untyped_storage().data_ptr() == memory for each in results)
