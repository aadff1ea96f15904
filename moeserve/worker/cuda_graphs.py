"""CUDA graphs: the kernels of a decode step, captured once and launched together.

Graphs are captured for some numbers of tokens. All replicas pad a decode step to the same number, which the lockstep
agreement determines, because the exchange between ranks is part of a graph. All graphs share one memory pool, and the
largest is captured first so that the others fit into it. Other steps run layer by layer.

Padding rows are not sent to experts, their keys and values are not stored, and their results are not read.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from moeserve.distributed.mesh import Mesh, share_of, share_sizes
from moeserve.kv.rank.cache import free_gpu_memory
from moeserve.models.rank_model import RankModel
from moeserve.ops import sampling
from moeserve.scheduling.lockstep import Agreement
from moeserve.step_inputs import NUM_SETTINGS, ChunkSpan, GroupTable, StepInputs
from moeserve.worker.overlap import overlapped
from moeserve.worker.rank_context import RankContext
from moeserve.worker.step_runner import StepOutputs, do_nothing

SMALL_SIZES = (1, 2, 4, 8)
STEP, LARGE_STEP = 8, 32  # distance between sizes, up to LARGE_FROM and above
LARGE_FROM = 128
MAX_SIZE = 512  # tokens; a larger step keeps the GPU busy while the host launches it
Result = TypeVar("Result")
WARM_UPS = 2  # runs in the capturing stream before a capture, so that libraries are initialised


class Capture(Protocol):
    """A function that captures the kernels launched by another function, for later replays.

    All captures by one `Capture` share memory, so only one of them may be replayed at a time.
    """

    def __call__(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Return a function that replays the launches, and the tensors that then hold the results."""
        ...


class TorchCapture:
    """A `Capture` with `torch.cuda.CUDAGraph`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """
        Args:
            stream: the stream of all captures. torch keeps cuBLAS workspaces per stream, and frees them when a graph
                captured there is dropped, even if other graphs still use them.
        """
        self._stream = stream
        self._pool: Any = None

    def __call__(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = run()
        self._pool = self._pool or graph.pool()
        return graph.replay, result


def graph_sizes(max_num_seqs: int, mesh: Mesh, is_capturable: Callable[[Sequence[int]], bool]) -> tuple[int, ...]:
    """Return the numbers of tokens to capture, ascending, and dense enough to keep padding small.

    Each number is a multiple of tp, because the tp ranks exchange equal shares.

    Args:
        is_capturable: returns True if steps with these numbers of tokens per ep rank can be captured. Other steps run
            layer by layer.
    """
    largest = min(max_num_seqs, MAX_SIZE)
    sizes = [*SMALL_SIZES, *range(2 * STEP, LARGE_FROM, STEP), *range(LARGE_FROM, largest + LARGE_STEP, LARGE_STEP)]
    shares = sorted({-(-min(size, largest) // mesh.tp) for size in sizes})
    return tuple(share * mesh.tp for share in shares if is_capturable((share,) * mesh.world_size))


def memory_of_graphs(capture_sizes: Callable[[Sequence[int]], object], sizes: Sequence[int]) -> int:
    """Estimate the GPU memory in bytes of graphs of these sizes. Collective: all ranks.

    The estimate is the memory of the largest graph, plus that of the smallest graph for each other size. Three trial
    captures are made and dropped.

    Args:
        capture_sizes: captures graphs of the given sizes, ascending. The graphs exist as long as the returned object.
    """

    def measure(some: Sequence[int]) -> int:
        before = free_gpu_memory()
        graphs = capture_sizes(some)
        bytes_taken = before - free_gpu_memory()
        del graphs
        return max(0, bytes_taken)

    if not sizes:
        return 0
    measure(sizes[-1:])  # so that permanent memory is allocated first: kernels' code, libraries' memory, connections
    largest = measure(sizes[-1:])
    if len(sizes) == 1:
        return largest
    return largest + max(0, measure([sizes[0], sizes[-1]]) - largest) * (len(sizes) - 1)


class CudaGraphs:
    """A `StepRunner` for GPU ranks. All ranks together capture all graphs in the constructor."""

    def __init__(
        self, model: RankModel, caches: list[Any], context: RankContext, sizes: Sequence[int], capture: Capture
    ) -> None:
        """Capture all graphs. Collective: all ranks.

        Args:
            sizes: numbers of tokens, ascending, and the same on all ranks.
        """
        self.model = model
        self._choose_tokens = sampling.make(model.context.backend).choose_tokens
        self.caches = caches
        self.sizes = tuple(sizes)
        self.on_layers: Callable[[], None] = do_nothing
        inputs = _empty_inputs(max(sizes, default=0), context)
        self._steps: dict[int, StepInputs] = {}
        self._captured: dict[int, tuple[Callable[[], None], StepOutputs]] = {}
        self._num_collectives: dict[int, tuple[int, ...]] = {}
        self._logits_TV: Tensor | None = None  # memory for the logits of all graphs, of the largest size
        # A collection within a capture could free GPU memory, which fails there. Little of what exists by now becomes
        # garbage, so collections leave it out until `Worker.close`, and take no milliseconds of a step.
        gc.collect()
        gc.freeze()
        for size in reversed(sizes):
            step = _first_rows(inputs, size, context.mesh, context.tp_rank)
            if context.overlap.applies(size, is_decode_only=True):
                step = overlapped(step, tp=context.mesh.tp, tp_rank=context.tp_rank)
            before = model.groups.count_collectives()
            self._run(step)  # once without a graph, because connections are created at their first use
            self._num_collectives[size] = tuple(
                after - count for after, count in zip(model.groups.count_collectives(), before, strict=True)
            )
            self._steps[size] = step
            self._captured[size] = capture(functools.partial(self._run, step))

    def padded_size(self, agreement: Agreement) -> int | None:
        place = bisect.bisect_left(self.sizes, agreement.padded_tokens)
        if not agreement.is_decode_only or not agreement.padded_tokens or place == len(self.sizes):
            return None
        return self.sizes[place]

    def free_memory(self) -> None:
        """Do nothing: only engines on CPUs sleep."""

    def capture_ahead(self) -> bool:
        return False  # all sizes are captured

    def _run(self, step: StepInputs) -> StepOutputs:
        """Run the layers, compute the logits of all rows, and choose each row's token by its request's settings."""
        hidden_TD = self.model(step, self.caches)
        if self.model.head is None:  # a later pipeline stage has the LM head
            return StepOutputs(hidden_TD)
        logits_TV = self.model.logits(hidden_TD)  # collective: tp ranks
        assert step.settings is not None
        chosen_T = self._choose_tokens(logits_TV, step.settings, step.positions)
        if self._logits_TV is None:  # in the first run, which is outside of a graph and has the largest size
            self._logits_TV = torch.empty_like(logits_TV)
        kept_TV = self._logits_TV[: len(logits_TV)]  # shared, because otherwise each graph would keep its own logits
        kept_TV.copy_(logits_TV)
        return StepOutputs(hidden_TD, kept_TV, chosen_T)

    def __call__(self, step: StepInputs) -> StepOutputs:
        if step.padding is None:
            self.on_layers()
            return StepOutputs(self.model(step, self.caches))
        size = len(step.token_ids)
        own = self._steps[size]
        own.copy_tensors(step)
        for name in ("positions", "padding", "settings"):  # read before and after the layers
            getattr(own, name).copy_(getattr(step, name))
        # Both halves are dispatched with the size of the larger half. Collective: all ep ranks.
        self.model.dispatchers.prepare(own.halves[0].most_per_rank if own.halves else own.tokens_per_rank)
        replay, outputs = self._captured[size]
        replay()
        self.on_layers()  # the GPU computes the layers while this thread prepares the LM head
        self.model.groups.add_replayed(self._num_collectives[size])
        return outputs


def _empty_inputs(size: int, context: RankContext) -> StepInputs:
    """Return a step of padding rows, whose memory all graphs read."""
    device = context.device

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    step = StepInputs(
        token_ids=zeros(size, dtype=torch.int64),
        positions=zeros(size, dtype=torch.int64),
        **GroupTable.none(size, size, context.max_blocks, device)._asdict(),
        row_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=zeros(size, dtype=torch.int32),
        logits_rows=zeros(0, dtype=torch.int64),
        spans=tuple(ChunkSpan(first_row=row, num_rows=1, context_len=0) for row in range(size)),
        tp_sizes=(),
        tokens_per_rank=(),
        padding=torch.ones(size, dtype=torch.bool, device=device),
        settings=zeros(size, NUM_SETTINGS, dtype=torch.int64),
    )
    return context.with_all_groups(step)


def _first_rows(inputs: StepInputs, size: int, mesh: Mesh, tp_rank: int) -> StepInputs:
    """Return the step of the first `size` rows of this memory, for `size` rows on every replica."""
    tp_sizes = share_sizes(size, mesh.tp)
    assert inputs.padding is not None
    assert inputs.settings is not None
    return dataclasses.replace(
        inputs.with_tensors(tensor[:size] for tensor in inputs.tensors()),
        positions=inputs.positions[:size],
        row_starts=inputs.row_starts[: size + 1],
        spans=inputs.spans[:size],
        tp_sizes=tp_sizes,
        tokens_per_rank=tp_sizes * mesh.dp,
        padding=inputs.padding[:size],
        settings=inputs.settings[:size],
        own_rows=share_of(size, tp_rank, mesh.tp),
    )
