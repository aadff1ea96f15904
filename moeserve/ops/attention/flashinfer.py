"""Grouped-query attention by FlashInfer (https://docs.flashinfer.ai). Only this module imports its package.

- One row per chunk: `decode.trtllm_batch_decode_with_kv_cache` with its kernel "xqa". It reads block tables and lengths
  on the GPU, so a CUDA graph can capture it. FlashInfer's wrapper for decoding would need all lengths on the host at
  each replay.
- Other steps, which are never captured: `BatchPrefillWithPagedKVCacheWrapper`. It needs a plan of each step, made on
  the host. The first layer of a step makes the plan, and the other layers of the same shape reuse it.

The decoding kernel multiplies the values behind the end of a context, in its last block, by zero. Caches must therefore
hold finite numbers there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moeserve.ops.attention.interface import KeyValueCache
from moeserve.ops.attention.library import Attend, AttentionProblem, StepKind
from moeserve.ops.attention.plans import Plans
from moeserve.ops.libraries import LibraryUnusable, capability
from moeserve.ops.upload import upload
from moeserve.step_inputs import ChunkSpan, StepInputs

# T tokens, N query heads, G key-value heads, H head size, S chunks, B blocks of all chunks

DTYPES = (torch.float16, torch.bfloat16)
MAJOR_CAPABILITIES = (9, 10, 12)  # of the decoding kernel: flashinfer/xqa.py
DECODE_BLOCK_SIZES = (16, 32, 64, 128)  # flashinfer/jit/xqa.py
MAX_DECODE_HEAD_SIZE, DECODE_HEAD_MULTIPLE = 256, 16  # the same
CHUNK_HEAD_SIZES = (64, 128, 256)
DECODE_WORKSPACE = 2**27  # bytes, as its documentation recommends; must be zeros before the first use
CHUNK_WORKSPACE = 2**24  # bytes; little is needed because contexts are not split

DECODE_NEEDS = {
    *("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale", "bmm2_scale"),
    *("window_left", "sinks", "kv_layout", "backend"),
}
PLAN_NEEDS = {
    *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads", "num_kv_heads"),
    *("head_dim_qk", "page_size", "causal", "sm_scale", "window_left", "q_data_type", "kv_data_type"),
    *("non_blocking", "disable_split_kv"),
}


def open_flashinfer(device: torch.device) -> FlashInfer:
    """Return the library, if it is installed and supports this GPU.

    Raises:
        LibraryUnusable: FlashInfer is not installed, has the wrong version, or does not support this GPU.
    """
    flashinfer = import_flashinfer()
    if missing := _missing(flashinfer):
        version = getattr(flashinfer, "__version__", "of no version")
        raise LibraryUnusable(f"this flashinfer ({version}) has no {missing}; install a newer one")
    found = capability(device)
    if found and found[0] not in MAJOR_CAPABILITIES:
        raise LibraryUnusable(f"its decoding kernel is not made for GPUs of capability {found[0]}.{found[1]}")
    return FlashInfer(flashinfer, device)


def import_flashinfer() -> ModuleType:
    try:
        flashinfer = importlib.import_module("flashinfer")
        importlib.import_module("flashinfer.decode")
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise LibraryUnusable(f"flashinfer cannot be imported ({reason}); pip install flashinfer-python") from None
    return flashinfer


def _missing(flashinfer: ModuleType) -> str:
    """Return the function or argument that this version lacks, or an empty string."""
    decode = getattr(getattr(flashinfer, "decode", None), "trtllm_batch_decode_with_kv_cache", None)
    wrapper = getattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", None)
    if decode is None or wrapper is None:
        return "trtllm_batch_decode_with_kv_cache" if decode is None else "BatchPrefillWithPagedKVCacheWrapper"
    return lacking_argument(
        ("trtllm_batch_decode_with_kv_cache", decode, DECODE_NEEDS),
        ("BatchPrefillWithPagedKVCacheWrapper.plan", wrapper.plan, PLAN_NEEDS),
    )


def lacking_argument(*needs: tuple[str, Callable[..., Any], set[str]]) -> str:
    """Return the first needed argument that a function lacks, as `name(argument=)`, or an empty string."""
    for name, function, needed in needs:
        arguments = inspect.signature(function).parameters
        takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
        if not takes_any and (lacking := sorted(needed - set(arguments))):
            return f"{name}({lacking[0]}=)"
    return ""


class FlashInfer:
    """FlashInfer as an `AttentionLibrary`. Layers share the workspaces, because they run one after another."""

    def __init__(self, flashinfer: ModuleType, device: torch.device) -> None:
        self.label = f"flashinfer {flashinfer.__version__}"
        self._flashinfer = flashinfer
        self._device = device
        self._decode_workspace = torch.zeros(DECODE_WORKSPACE, dtype=torch.uint8, device=device)

    def why_unavailable(self, problem: AttentionProblem, kind: StepKind) -> str | None:
        shape = problem.shape
        size = shape.head_size
        if shape.dtype not in DTYPES:
            return f"it computes in 16 bits, not in {shape.dtype}"
        if shape.window is not None and shape.window < 0:
            return "it has no chunks of positions"
        if shape.value_size not in (None, size):
            return f"its keys and values have one size, not {size} and {shape.value_size}"
        if kind == "decode":
            if problem.block_size not in DECODE_BLOCK_SIZES:
                return f"its blocks have {listed(DECODE_BLOCK_SIZES)} positions, not {problem.block_size}"
            if size % DECODE_HEAD_MULTIPLE or size > MAX_DECODE_HEAD_SIZE:
                return f"its heads have multiples of {DECODE_HEAD_MULTIPLE} up to {MAX_DECODE_HEAD_SIZE}, not {size}"
            return None
        if shape.has_sinks:
            return "it has no sinks in chunks of several rows"
        if size not in CHUNK_HEAD_SIZES:
            return f"its heads have {listed(CHUNK_HEAD_SIZES)} values, not {size}"
        return None

    def make_attend(self, problem: AttentionProblem, kind: StepKind) -> Attend:
        if kind == "decode":
            decode = self._flashinfer.decode.trtllm_batch_decode_with_kv_cache
            return DecodeAttention(decode, problem, self._decode_workspace)
        workspace = torch.empty(CHUNK_WORKSPACE, dtype=torch.uint8, device=self._device)
        wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        make_wrapper = functools.partial(wrapper, workspace, kv_layout="HND")
        return ChunkAttention(Plans(make_wrapper, self._device), problem)


class DecodeAttention:
    """Attention of decode steps: one row per chunk."""

    def __init__(self, decode: Callable[..., Any], problem: AttentionProblem, workspace: Tensor) -> None:
        """
        Args:
            decode: `trtllm_batch_decode_with_kv_cache`.
            workspace: memory filled with zeros, used by nothing else.
        """
        self._decode = decode
        self._problem = problem
        self._workspace = workspace

    def __call__(
        self, query_TNH: Tensor, cache: KeyValueCache, step: StepInputs, sinks_N: Tensor | None = None
    ) -> Tensor:
        problem = self._problem
        # The kernel's result for an empty context is undocumented, so padding attends to one position. The results of
        # padding are never read.
        lengths_S = step.context_lens.clamp(min=1)
        output_TNH: Tensor = self._decode(
            query=query_TNH.contiguous(),
            kv_cache=(cache.keys, cache.values),
            workspace_buffer=self._workspace,
            block_tables=step.block_table,
            seq_lens=lengths_S.view(torch.uint32),
            max_seq_len=step.block_table.shape[1] * problem.block_size,
            bmm1_scale=problem.shape.scale,
            bmm2_scale=1.0,
            window_left=_window_left(problem),
            sinks=sinks_N,
            kv_layout="HND",
            backend="xqa",
        )
        return output_TNH


class ChunkAttention:
    """Attention of chunks of any length, for layers of one shape. It cannot be captured in a CUDA graph."""

    def __init__(self, plans: Plans[Any, None], problem: AttentionProblem) -> None:
        self._plans = plans
        self._problem = problem

    def __call__(
        self, query_TNH: Tensor, cache: KeyValueCache, step: StepInputs, sinks_N: Tensor | None = None
    ) -> Tensor:
        assert sinks_N is None
        wrapper, _ = self._plans.of(step, functools.partial(self._plan, step))
        output_TNH: Tensor = wrapper.run(query_TNH.contiguous(), (cache.keys, cache.values))
        return output_TNH

    def _plan(self, step: StepInputs, wrapper: Any) -> None:
        """Plan a step from its spans on the host, without waiting for the GPU."""
        problem = self._problem
        size = problem.block_size
        block_starts, places_B = places_of_blocks(step, size, list(enumerate(step.spans)))
        ends = [span.last_row + 1 for span in step.spans]
        wrapper.plan(
            qo_indptr=numbers([0, *ends]),
            paged_kv_indptr=numbers(block_starts),
            paged_kv_indices=step.block_table.flatten()[upload(places_B, step.block_table.device)],
            paged_kv_last_page_len=numbers(
                [(span.context_len - 1) % size + 1 if span.context_len else 0 for span in step.spans]
            ),
            num_qo_heads=problem.shape.num_heads,
            num_kv_heads=problem.shape.num_kv_heads,
            head_dim_qk=problem.shape.head_size,
            page_size=size,
            causal=True,
            sm_scale=problem.shape.scale,
            window_left=_window_left(problem),
            q_data_type=problem.shape.dtype,
            kv_data_type=problem.shape.dtype,
            non_blocking=True,
            disable_split_kv=True,  # the order of a row's sum must not depend on the rest of the step
        )


def places_of_blocks(
    step: StepInputs, block_size: int, chunks: list[tuple[int, ChunkSpan]]
) -> tuple[list[int], Tensor]:
    """Return the indices at which the block ids of some chunks lie in the block table.

    Args:
        chunks: index and span of each chunk.

    Returns:
        The number of blocks before each chunk, S + 1 numbers, and for each block the index of its id in the flattened
        block table, [B] int64 on the host.
    """
    counts_S = torch.tensor([-(-span.context_len // block_size) for _, span in chunks])
    block_starts = [0, *counts_S.cumsum(0).tolist()]
    tables_S = torch.tensor([chunk for chunk, _ in chunks]) * step.block_table.shape[1]
    before_S = tables_S - torch.tensor(block_starts[:-1])
    return block_starts, torch.arange(block_starts[-1]) + before_S.repeat_interleave(counts_S)


def numbers(values: list[int]) -> Tensor:
    """Return a list as an int32 tensor on the host."""
    return torch.tensor(values, dtype=torch.int32)


def _window_left(problem: AttentionProblem) -> int:
    """Return the maximum number of positions before its own that a token attends to; -1: all."""
    window = problem.shape.window
    return -1 if window is None else window - 1


def listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
