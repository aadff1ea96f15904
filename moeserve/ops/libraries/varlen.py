"""Grouped-query attention by torch's `torch.nn.attention.varlen`, which calls FlashAttention.

It reads block tables and lengths on the GPU, so one call serves steps of any kind, also inside a CUDA graph. The caches
that it can read depend on the version of FlashAttention. Version 2, which is part of torch, needs blocks of a multiple
of 256 positions. Version 3, for Hopper alone, takes blocks of any size; it is used if its package is installed, and
then all of torch calls it in this process.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from moeserve.ops.interfaces import KeyValueCache
from moeserve.ops.libraries.interface import Attend, AttentionProblem, LibraryUnusable, StepKind, capability
from moeserve.step_inputs import StepInputs

# T tokens, N query heads, G key-value heads, H head size

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_SIZE, HEAD_MULTIPLE = 256, 8
FA2_BLOCK_MULTIPLE = 256
FA3_PACKAGE = "flash_attn_interface"
FA3_MAJOR_CAPABILITY = 9
MIN_MAJOR_CAPABILITY = 8  # of version 2

NEEDS = {
    *("out", "query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size", "enable_gqa"),
    *("seqused_k", "block_table"),
}

Implementation = Literal["FA2", "FA3"]


def open_varlen(device: torch.device) -> Varlen:
    """Return the library, if this torch and this GPU support it.

    Raises:
        LibraryUnusable: see `open_library`.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn_out
    except ImportError:
        raise LibraryUnusable(f"torch {torch.__version__} has no varlen attention that writes; 2.13 has it") from None
    if lacking := sorted(NEEDS - set(inspect.signature(varlen_attn_out).parameters)):
        raise LibraryUnusable(f"torch {torch.__version__} has varlen attention without {lacking[0]}; 2.13 has it")
    found = capability(device)
    if found and found[0] < MIN_MAJOR_CAPABILITY:
        raise LibraryUnusable(f"FlashAttention is not made for GPUs of capability {found[0]}.{found[1]}")
    return Varlen(varlen_attn_out, _activated(is_hopper=found is not None and found[0] == FA3_MAJOR_CAPABILITY))


def _activated(*, is_hopper: bool) -> Implementation:
    """Activate FlashAttention 3 if it can be used, and return the version that torch calls."""
    from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

    if current_flash_attention_impl() is None and is_hopper and importlib.util.find_spec(FA3_PACKAGE) is not None:
        activate_flash_attention_impl("FA3")
    match current_flash_attention_impl():
        case None:
            return "FA2"
        case "FA3":
            return "FA3"
        case other:
            raise LibraryUnusable(f"other code made torch call {other} in this process, not FlashAttention 2 or 3")


class Varlen:
    """See `AttentionLibrary`. Calls one version of FlashAttention."""

    def __init__(self, varlen_attn_out: Callable[..., Any], implementation: Implementation) -> None:
        self.label = f"varlen {torch.__version__} {implementation}"
        self.implementation = implementation
        self._varlen_attn_out = varlen_attn_out

    def why_unavailable(self, problem: AttentionProblem, kind: StepKind) -> str | None:
        shape = problem.shape
        if shape.dtype not in DTYPES:
            return f"it computes in 16 bits, not in {shape.dtype}"
        if shape.has_sinks:
            return "it has no sinks"
        if shape.head_size % HEAD_MULTIPLE or shape.head_size > MAX_HEAD_SIZE:
            return f"its heads have multiples of {HEAD_MULTIPLE} up to {MAX_HEAD_SIZE}, not {shape.head_size}"
        if self.implementation == "FA2" and problem.block_size % FA2_BLOCK_MULTIPLE:
            return (
                f"FlashAttention 2 reads blocks of multiples of {FA2_BLOCK_MULTIPLE} positions, not "
                f"{problem.block_size}, and no package {FA3_PACKAGE} with version 3 is installed"
            )
        return None

    def make_attend(self, problem: AttentionProblem, kind: StepKind) -> Attend:
        return VarlenAttention(self._varlen_attn_out, self.implementation, problem)


class VarlenAttention:
    """Attention of steps of any kind."""

    def __init__(
        self, varlen_attn_out: Callable[..., Any], implementation: Implementation, problem: AttentionProblem
    ) -> None:
        self._varlen_attn_out = varlen_attn_out
        self._problem = problem
        # Version 2 takes row starts of keys too, and ignores them with block tables and lengths; version 3 takes none.
        self._has_key_starts = implementation == "FA2"
        window = problem.shape.window
        left = -1 if window is None else window - 1  # positions before a token's own
        self._window_size = (left, 0)

    def __call__(
        self, query_TNH: Tensor, cache: KeyValueCache, step: StepInputs, sinks_N: Tensor | None = None
    ) -> Tensor:
        assert sinks_N is None
        output_TNH = query_TNH.new_empty(query_TNH.shape)  # contiguous, also where the query is a view
        self._varlen_attn_out(
            output_TNH,
            query_TNH,
            cache.keys.transpose(1, 2),  # [num_blocks, block_size, G, H]
            cache.values.transpose(1, 2),
            step.row_starts,
            step.row_starts if self._has_key_starts else None,
            step.max_rows_per_chunk,
            step.block_table.shape[1] * self._problem.block_size,
            scale=self._problem.shape.scale,
            window_size=self._window_size,
            enable_gqa=self._problem.shape.num_heads != self._problem.shape.num_kv_heads,
            seqused_k=step.context_lens,
            block_table=step.block_table,
        )
        return output_TNH
