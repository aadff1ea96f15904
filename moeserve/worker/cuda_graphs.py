"""Decode steps on a GPU as one launch each: what a step asks of the GPU is recorded once, and asked for again at once.

Graphs exist for some numbers of tokens. A decode step is padded to the next of them, on all replicas to the same, since
what goes between ranks is part of a graph; the lockstep agreement decides which, before the step. All graphs work in
one pool of memory, the largest first, which the others then fit into. Other steps run layer by layer.

Padding has no key and no value, is sent to no expert, and nobody reads what becomes of it.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moeserve.distributed.mesh import Mesh, share_of, share_sizes
from moeserve.models.decoder import Decoder
from moeserve.scheduling.lockstep import Agreement
from moeserve.step_inputs import ChunkSpan, StepInputs
from moeserve.worker.kv_cache import free_gpu_memory

SMALL_SIZES = (1, 2, 4, 8)
STEP, LARGE_STEP = 8, 32  # between sizes: up to LARGE_FROM, and beyond
LARGE_FROM = 128
MAX_SIZE = 512  # tokens; in larger steps the GPU has enough to do while it is told what comes next
WARM_UPS = 2  # runs in the stream of a recording before it, in which libraries set up what they need there


class Capture(Protocol):
    """Records what a function asks of a GPU. Recordings of one `Capture` share memory: only one plays at a time."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What does it again, and where its result then lies."""
        ...


class TorchCapture:
    """By torch's CUDA graphs."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """
        Args:
            stream: in which all of them are recorded, and no graph that is given up earlier. torch keeps memory for
                cuBLAS by the stream, which graphs go on using, and frees it when one recorded there is given up.
        """
        self._stream = stream
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
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
    """Numbers of tokens for which there are graphs, ascending: enough that little of a step is padding.

    All tp ranks have equally many of them, as NCCL takes them at once.

    Args:
        is_capturable: whether a graph is to hold a step, by the tokens of each ep rank. Others run layer by layer.
    """
    largest = min(max_num_seqs, MAX_SIZE)
    sizes = [*SMALL_SIZES, *range(2 * STEP, LARGE_FROM, STEP), *range(LARGE_FROM, largest + LARGE_STEP, LARGE_STEP)]
    shares = sorted({-(-min(size, largest) // mesh.tp) for size in sizes})
    return tuple(share * mesh.tp for share in shares if is_capturable((share,) * mesh.world_size))


def memory_of_graphs(record: Callable[[Sequence[int]], object], sizes: Sequence[int]) -> int:
    """Bytes of the GPU that graphs of these sizes will take: what the largest takes, and for each other one as much
    more as the smallest does. Three recordings, which are let go again. Collective: all ranks.

    Args:
        record: makes graphs of some sizes, ascending, which live as long as what it returns.
    """

    def taken(some: Sequence[int]) -> int:
        before = free_gpu_memory()
        graphs = record(some)
        bytes_taken = before - free_gpu_memory()
        del graphs
        return max(0, bytes_taken)

    if not sizes:
        return 0
    taken(sizes[-1:])  # also what stays and is not taken again: kernels' code, libraries' memory, connections
    alone = taken(sizes[-1:])
    if len(sizes) == 1:
        return alone
    return alone + max(0, taken([sizes[0], sizes[-1]]) - alone) * (len(sizes) - 1)


class CudaGraphs:
    """Runs a GPU rank's part of a model; decode steps from graphs. All ranks make theirs together."""

    def __init__(
        self,
        model: Decoder,
        caches: list[Any],
        mesh: Mesh,
        tp_rank: int,
        max_blocks: int,
        sizes: Sequence[int],
        capture: Capture,
    ) -> None:
        """Records all graphs. Collective: all ranks, as the layers' steps are.

        Args:
            tp_rank: of this rank in its replica.
            max_blocks: of a request, at most.
            sizes: numbers of tokens, ascending; the same on all ranks.
        """
        self.model = model
        self.caches = caches
        self.sizes = tuple(sizes)
        device = model.embedding.weight.device
        self._inputs = _empty_inputs(max(sizes, default=0), max_blocks, device)
        self._steps: dict[int, StepInputs] = {}
        self._recorded: dict[int, tuple[Callable[[], None], Tensor]] = {}
        self._counts: dict[int, tuple[int, ...]] = {}  # of collectives in each
        for size in reversed(sizes):
            step = _first_rows(self._inputs, size, mesh, tp_rank)
            self._steps[size] = step
            before = model.groups.count_collectives()
            model(step, caches)  # once as it is: connections are made as they are first used
            self._counts[size] = tuple(
                after - count for after, count in zip(model.groups.count_collectives(), before, strict=True)
            )
            self._recorded[size] = capture(functools.partial(model, step, caches))

    def size_for(self, agreement: Agreement) -> int | None:
        """To how many tokens each replica pads this step; None: it runs layer by layer."""
        place = bisect.bisect_left(self.sizes, agreement.padded_tokens)
        if not agreement.is_decode_only or not agreement.padded_tokens or place == len(self.sizes):
            return None
        return self.sizes[place]

    def __call__(self, step: StepInputs, caches: list[Any]) -> Tensor:
        """Hidden states [T, D], as the model's own call gives them. They stay as they are until the next call.

        Args:
            step: padded to the size that `size_for` gave, or not padded.
        """
        if step.padding is None:
            return self.model(step, caches)
        assert caches is self.caches
        size = len(step.token_ids)
        own = self._steps[size]
        for name in ("token_ids", "positions", "cache_slots", "context_lens", "padding"):
            getattr(own, name).copy_(getattr(step, name), non_blocking=True)
        own.block_table[:, : step.block_table.shape[1]].copy_(step.block_table, non_blocking=True)
        self.model.dispatchers.prepare(own.tokens_per_rank)  # collective: all ep ranks
        play, result_TD = self._recorded[size]
        play()
        self.model.groups.add_replayed(self._counts[size])
        return result_TD


def _empty_inputs(size: int, max_blocks: int, device: torch.device) -> StepInputs:
    """A step of nothing but padding, in memory that stays."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return StepInputs(
        token_ids=zeros(size, dtype=torch.int64),
        positions=zeros(size, dtype=torch.int64),
        cache_slots=torch.full((size,), -1, dtype=torch.int64, device=device),
        row_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=zeros(size, dtype=torch.int32),
        block_table=zeros(size, max_blocks, dtype=torch.int32),
        logits_rows=zeros(0, dtype=torch.int64),
        spans=tuple(ChunkSpan(first_row=row, num_rows=1, context_len=0) for row in range(size)),
        tp_sizes=(),
        tokens_per_rank=(),
        padding=torch.ones(size, dtype=torch.bool, device=device),
    )


def _first_rows(inputs: StepInputs, size: int, mesh: Mesh, tp_rank: int) -> StepInputs:
    """A smaller step in the same memory, as every replica brings one of this size."""
    tp_sizes = share_sizes(size, mesh.tp)
    assert inputs.padding is not None
    return dataclasses.replace(
        inputs,
        token_ids=inputs.token_ids[:size],
        positions=inputs.positions[:size],
        cache_slots=inputs.cache_slots[:size],
        row_starts=inputs.row_starts[: size + 1],
        context_lens=inputs.context_lens[:size],
        block_table=inputs.block_table[:size],
        spans=inputs.spans[:size],
        tp_sizes=tp_sizes,
        tokens_per_rank=tp_sizes * mesh.dp,
        padding=inputs.padding[:size],
        own_rows=share_of(size, tp_rank, mesh.tp),
    )
