"""Grouped-query attention with FlashInfer (https://docs.flashinfer.ai). Only this module imports the package.

- One row per chunk: `decode.trtllm_batch_decode_with_kv_cache` with its kernel "xqa". The kernel reads block tables and
  lengths on the GPU, so a CUDA graph can capture it. FlashInfer's wrapper for decoding would need all lengths on the
  host at each replay.
- Other steps, which are never captured: `BatchPrefillWithPagedKVCacheWrapper`. The wrapper needs a plan of each step,
  made on the host. The first layer of a step makes the plan, and the other layers of the same shape reuse the plan.

The decoding kernel multiplies the values behind the end of a context, in its last block, by zero. Caches must therefore
hold finite numbers there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from moeserve.errors import SettingsError
from moeserve.ops.attention.interface import AttentionBackend, AttentionShape, KeyValueCache
from moeserve.ops.attention.plans import Plans
from moeserve.ops.backend import Backend
from moeserve.ops.libraries import LibraryUnusable, capability, import_library, listed, missing_part
from moeserve.ops.measured import attention_key, is_ever_fastest, measured_on
from moeserve.ops.upload import upload
from moeserve.step_inputs import ChunkSpan, StepInputs

if TYPE_CHECKING:
    from moeserve.config.settings import AttentionChoice

# S chunks, B blocks of all chunks

logger = logging.getLogger(__name__)

StepKind = Literal["decode", "chunks"]  # "decode": one row in each chunk; "chunks": all other steps
DTYPES = (torch.float16, torch.bfloat16)
MAJOR_CAPABILITIES = (9, 10, 12)  # GPUs that the decoding kernel supports: flashinfer/xqa.py
DECODE_BLOCK_SIZES = (16, 32, 64, 128)  # supported by the decoding kernel: flashinfer/jit/xqa.py
MAX_DECODE_HEAD_SIZE, DECODE_HEAD_MULTIPLE = 256, 16  # supported by the decoding kernel: flashinfer/jit/xqa.py
CHUNK_HEAD_SIZES = (64, 128, 256)
DECODE_WORKSPACE = 2**27  # bytes, as FlashInfer's documentation recommends; zeros before the first use
CHUNK_WORKSPACE = 2**24  # bytes; little is needed because contexts are not split

NEEDS = {
    "decode.trtllm_batch_decode_with_kv_cache": {
        *("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale"),
        *("bmm2_scale", "window_left", "sinks", "kv_layout", "backend"),
    },
    "BatchPrefillWithPagedKVCacheWrapper.plan": {
        *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads"),
        *("num_kv_heads", "head_dim_qk", "page_size", "causal", "sm_scale", "window_left", "q_data_type"),
        *("kv_data_type", "non_blocking", "disable_split_kv"),
    },
}


def with_flashinfer(own: Backend, choice: AttentionChoice, device: torch.device, block_size: int) -> Backend:
    """Return the backend, changed to compute attention with FlashInfer where FlashInfer supports the layer.

    Args:
        choice: with "measured", the backend is returned unchanged unless FlashInfer can be used and was measured to be
            the fastest for grouped-query attention.

    Raises:
        SettingsError: FlashInfer cannot be used here.
    """
    if choice == "measured" and not ("triton" in own.names and is_ever_fastest("flashinfer", device)):
        return own
    try:
        if "triton" not in own.names:
            raise LibraryUnusable("keys and values are written by Triton kernels, and triton is not installed")
        package = open_flashinfer(device)
    except LibraryUnusable as error:
        if choice != "measured":
            raise SettingsError(f"attention_backend={choice!r} cannot be used: {error}. Use 'triton'") from None
        logger.info("attention runs on our kernels, although FlashInfer was measured to be faster: %s", error)
        return own
    if choice == "measured":
        return own.with_library("flashinfer", FlashInfer(package, device, block_size, measured_on(device)))
    from moeserve.ops.latent_attention.flashinfer import FlashInferLatent

    backend = own.with_library("flashinfer", FlashInfer(package, device, block_size))
    return backend.with_library("flashinfer latent", FlashInferLatent(package, device))


def open_flashinfer(device: torch.device) -> ModuleType:
    """Return the package, if it is installed and supports this GPU.

    Raises:
        LibraryUnusable: FlashInfer is not installed, has the wrong version, or does not support this GPU.
    """
    flashinfer = import_library("flashinfer", "flashinfer-python")
    import_library("flashinfer.decode", "flashinfer-python")
    if missing := missing_part(flashinfer, NEEDS):
        version = getattr(flashinfer, "__version__", "of no version")
        raise LibraryUnusable(f"this flashinfer ({version}) has no {missing}; install a newer one")
    found = capability(device)
    if found and found[0] not in MAJOR_CAPABILITIES:
        raise LibraryUnusable(f"its decoding kernel is not made for GPUs of capability {found[0]}.{found[1]}")
    return flashinfer


class Attend(Protocol):
    """A function like `AttentionBackend.attend`, called only if there is at least one row.

    Results of rows without a position, which are padding, may be undefined.
    """

    def __call__(
        self, query_TNH: Tensor, cache: KeyValueCache, step: StepInputs, sinks_N: Tensor | None = None
    ) -> Tensor: ...


class FlashInfer:
    """Selects the attention of each layer: FlashInfer for the kinds of steps that it supports, else our own kernels.

    Layers share the workspaces, because they run one after another.
    """

    def __init__(
        self,
        flashinfer: ModuleType,
        device: torch.device,
        block_size: int,
        measured: Mapping[str, Mapping[int, str]] | None = None,
    ) -> None:
        """
        Args:
            block_size: number of positions in a block of the caches.
            measured: measurements; FlashInfer serves only the kinds of steps for which it was mostly the fastest. None:
                FlashInfer serves all steps that it supports.
        """
        self._flashinfer = flashinfer
        self._device = device
        self._block_size = block_size
        self._measured = measured
        self._decode_workspace = torch.zeros(DECODE_WORKSPACE, dtype=torch.uint8, device=device)
        self._chosen = functools.cache(self._choose)  # shared by layers of a shape, like their plans

    def attention(self, own: AttentionBackend, shape: AttentionShape) -> AttentionBackend:
        """Return the attention of a layer. `own` computes the kinds of steps that FlashInfer does not."""
        decode, chunks = self._chosen(shape, "decode"), self._chosen(shape, "chunks")
        if decode is None and chunks is None:
            return own
        return FlashInferAttention(own, decode or own.attend, chunks or own.attend)

    def _choose(self, shape: AttentionShape, kind: StepKind) -> Attend | None:
        """Return FlashInfer's function for steps of kind `kind`, or None if our own kernels must serve these steps."""
        if self._measured is not None:
            fastest = list(self._measured.get(attention_key(shape, kind), {}).values())
            if 2 * fastest.count("flashinfer") <= len(fastest):
                return None
        if reason := self.why_not(shape, kind):
            logger.info("attention (%s, %s) runs on our kernels, not FlashInfer: %s", shape, kind, reason)
            return None
        return self.make_attend(shape, kind)

    def why_not(self, shape: AttentionShape, kind: StepKind) -> str | None:
        """Return the reason why FlashInfer cannot run steps of kind `kind`, as a clause; None if it can."""
        size = shape.head_size
        if shape.dtype not in DTYPES:
            return f"it computes in 16 bits, not in {shape.dtype}"
        if shape.window is not None and shape.window < 0:
            return "it has no chunks of positions"
        if shape.value_size not in (None, size):
            return f"its keys and values have one size, not {size} and {shape.value_size}"
        if kind == "decode":
            if self._block_size not in DECODE_BLOCK_SIZES:
                return f"its blocks have {listed(DECODE_BLOCK_SIZES)} positions, not {self._block_size}"
            if size % DECODE_HEAD_MULTIPLE or size > MAX_DECODE_HEAD_SIZE:
                return f"its heads have multiples of {DECODE_HEAD_MULTIPLE} up to {MAX_DECODE_HEAD_SIZE}, not {size}"
            return None
        if shape.has_sinks:
            return "it has no sinks in chunks of several rows"
        if size not in CHUNK_HEAD_SIZES:
            return f"its heads have {listed(CHUNK_HEAD_SIZES)} values, not {size}"
        return None

    def make_attend(self, shape: AttentionShape, kind: StepKind) -> Attend:
        """Return the function for steps of a supported kind. A CUDA graph can capture the function for "decode"."""
        if kind == "decode":
            decode = self._flashinfer.decode.trtllm_batch_decode_with_kv_cache
            return DecodeAttention(decode, shape, self._decode_workspace)
        workspace = torch.empty(CHUNK_WORKSPACE, dtype=torch.uint8, device=self._device)
        wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        make_wrapper = functools.partial(wrapper, workspace, kv_layout="HND")
        return ChunkAttention(Plans(make_wrapper, self._device), shape)


class FlashInferAttention:
    """An `AttentionBackend` with one function for each kind of step. Our kernels write to the cache."""

    def __init__(self, own: AttentionBackend, decode: Attend, chunks: Attend) -> None:
        self.own = own
        self.decode = decode
        self.chunks = chunks
        self.rotate_and_write = own.rotate_and_write

    def attend(
        self,
        query_TNH: Tensor,
        cache: KeyValueCache,
        step: StepInputs,
        sinks_N: Tensor | None = None,
        biases_TNE: Tensor | None = None,
    ) -> Tensor:
        assert biases_TNE is None
        num_rows = len(query_TNH)
        attend: Attend = self.own.attend
        if num_rows:
            is_decode = num_rows == len(step.spans) and step.max_rows_per_chunk == 1
            attend = self.decode if is_decode else self.chunks
        return attend(query_TNH, cache, step, sinks_N)


class DecodeAttention:
    """Attention of decode steps: one row per chunk."""

    def __init__(self, decode: Callable[..., Any], shape: AttentionShape, workspace: Tensor) -> None:
        """
        Args:
            decode: `trtllm_batch_decode_with_kv_cache`.
            workspace: memory filled with zeros, used by nothing else.
        """
        self._decode = decode
        self._shape = shape
        self._workspace = workspace

    def __call__(
        self, query_TNH: Tensor, cache: KeyValueCache, step: StepInputs, sinks_N: Tensor | None = None
    ) -> Tensor:
        # The kernel's result for an empty context is undocumented, so padding attends to one position. The results of
        # padding are never read.
        lengths_S = step.context_lens.clamp(min=1)
        output_TNH: Tensor = self._decode(
            query=query_TNH.contiguous(),
            kv_cache=(cache.keys, cache.values),
            workspace_buffer=self._workspace,
            block_tables=step.block_table,
            seq_lens=lengths_S.view(torch.uint32),
            max_seq_len=step.block_table.shape[1] * cache.keys.shape[2],
            bmm1_scale=self._shape.scale,
            bmm2_scale=1.0,
            window_left=_window_left(self._shape),
            sinks=sinks_N,
            kv_layout="HND",
            backend="xqa",
        )
        return output_TNH


class ChunkAttention:
    """Attention of chunks of any length, for layers of one shape, which CUDA graphs cannot capture."""

    def __init__(self, plans: Plans[Any, None], shape: AttentionShape) -> None:
        self._plans = plans
        self._shape = shape

    def __call__(
        self, query_TNH: Tensor, cache: KeyValueCache, step: StepInputs, sinks_N: Tensor | None = None
    ) -> Tensor:
        assert sinks_N is None
        wrapper, _ = self._plans.of(step, functools.partial(self._plan, step, cache.keys.shape[2]))
        output_TNH: Tensor = wrapper.run(query_TNH.contiguous(), (cache.keys, cache.values))
        return output_TNH

    def _plan(self, step: StepInputs, block_size: int, wrapper: Any) -> None:
        """Plan a step from its spans on the host, without waiting for the GPU."""
        shape = self._shape
        block_starts, places_B = places_of_blocks(step, block_size, list(enumerate(step.spans)))
        ends = [span.last_row + 1 for span in step.spans]
        wrapper.plan(
            qo_indptr=numbers([0, *ends]),
            paged_kv_indptr=numbers(block_starts),
            paged_kv_indices=step.block_table.flatten()[upload(places_B, step.block_table.device)],
            paged_kv_last_page_len=numbers(
                [(span.context_len - 1) % block_size + 1 if span.context_len else 0 for span in step.spans]
            ),
            num_qo_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim_qk=shape.head_size,
            page_size=block_size,
            causal=True,
            sm_scale=shape.scale,
            window_left=_window_left(shape),
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
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
        Two results: S + 1 numbers, which are the number of blocks before each chunk and then the total; and the index
        of each block's id in the flattened block table, [B] int64 on the host.
    """
    counts_S = torch.tensor([-(-span.context_len // block_size) for _, span in chunks])
    block_starts = [0, *counts_S.cumsum(0).tolist()]
    tables_S = torch.tensor([chunk for chunk, _ in chunks]) * step.block_table.shape[1]
    before_S = tables_S - torch.tensor(block_starts[:-1])
    return block_starts, torch.arange(block_starts[-1]) + before_S.repeat_interleave(counts_S)


def numbers(values: list[int]) -> Tensor:
    """Return a list as an int32 tensor on the host."""
    return torch.tensor(values, dtype=torch.int32)


def _window_left(shape: AttentionShape) -> int:
    """Return the maximum number of earlier positions that a token attends to; -1: no maximum."""
    return -1 if shape.window is None else shape.window - 1
