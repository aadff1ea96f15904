"""A stand-in on the CPU for the package flashinfer, by its published contract.

Signatures, shapes, dtypes and errors are those of https://github.com/flashinfer-ai/flashinfer (the modules decode, xqa,
jit.xqa and prefill of 0.6 and 0.7). Undefined behaviour is made harmful: masked positions of a block are multiplied by
zero, so that NaN there spoils the result, and rows without a position are NaN.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

VERSION = "1.2.3"
SEMAPHORES = 8 * 2**20  # bytes at the beginning of a workspace that are zero before and after each call


class Refused(RuntimeError):
    """An error that a library's own checks raise."""


def need(condition: Any, what: str) -> None:
    if not condition:
        raise Refused(what)


def attend(
    query_RNH: Tensor,
    key_CGH: Tensor,  # of whole pages
    value_CGH: Tensor,
    context_len: int,
    *,
    scale: float,
    window_left: int,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return [R, N, H]. The rows are the last of the context."""
    num_rows, group = len(query_RNH), query_RNH.shape[1] // key_CGH.shape[1]
    keys, values = (each.float().repeat_interleave(group, dim=1) for each in (key_CGH, value_CGH))
    places = torch.arange(context_len - num_rows, context_len)[:, None]
    others = torch.arange(len(keys))
    hidden = (others > places) | (others >= context_len)
    if window_left >= 0:
        hidden |= others < places - window_left
    scores_NRC = torch.einsum("rnh,cnh->nrc", query_RNH.float(), keys) * scale
    scores_NRC = torch.where(hidden, -torch.inf, scores_NRC)
    if sinks_N is not None:
        sinks = sinks_N[:, None, None].expand(-1, num_rows, 1)
        weights = torch.cat([scores_NRC, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores_NRC.softmax(-1)
    weights = torch.where(hidden, 0.0, weights)
    return torch.einsum("nrc,cnh->rnh", weights, values).to(query_RNH.dtype)


def pages(cache: Tensor, ids: Tensor) -> Tensor:
    """Return [C, G, H] from a cache [num_pages, G, page_size, H]."""
    need(((ids >= 0) & (ids < len(cache))).all(), "a page that the cache does not have")
    return cache[ids.long()].transpose(1, 2).flatten(0, 1)


class FlashInfer:
    """The package. Its limits may be relaxed, for models smaller than it supports."""

    def __init__(
        self, *, dtypes: tuple[torch.dtype, ...], chunk_head_sizes: tuple[int, ...], head_multiple: int
    ) -> None:
        self.dtypes = dtypes
        self.chunk_head_sizes = chunk_head_sizes
        self.head_multiple = head_multiple
        self.num_decodes = self.num_plans = self.num_runs = 0

    def check_caches(self, query: Tensor, caches: tuple[Tensor, Tensor]) -> None:
        need(isinstance(caches, tuple) and len(caches) == 2, "the caches are a pair")
        for cache in caches:
            need(cache.dtype == query.dtype, f"queries are {query.dtype}, the cache {cache.dtype}")
            need(
                cache.dim() == 4 and cache.shape[3] == query.shape[2], "a cache is [pages, heads, page_size, head_dim]"
            )
            need(query.shape[1] % cache.shape[1] == 0, "query heads are no multiple of the others")
        need(query.dtype in self.dtypes, f"no kernel for {query.dtype}")
        need(query.is_contiguous(), "without contiguous, the result is incorrect")

    def trtllm_batch_decode_with_kv_cache(
        self,
        query: Tensor,
        kv_cache: Any,
        workspace_buffer: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        bmm1_scale: float = 1.0,
        bmm2_scale: float = 1.0,
        window_left: int = -1,
        sinks: Any = None,
        kv_layout: str = "HND",
        backend: str = "auto",
    ) -> Tensor:
        self.num_decodes += 1
        need(backend in ("auto", "xqa"), f"Backend {backend} not supported on this GPU")
        need(kv_layout == "HND", "this stand-in supports HND only")
        self.check_caches(query, kv_cache)
        keys, values = kv_cache
        page_size, head_dim = keys.shape[2:]
        need(page_size in (16, 32, 64, 128), f"Invalid page_size: {page_size}, only 16, 32, 64, 128 are supported")
        need(head_dim % self.head_multiple == 0 and head_dim <= 256, f"Invalid head_dim: {head_dim}")
        need(bmm2_scale == 1.0, "this stand-in supports nothing else")
        batch = len(query)
        need(batch > 0, "an empty batch is undefined")
        need(block_tables.dtype == torch.int32 and block_tables.is_contiguous(), "block_tables are int32, contiguous")
        need(block_tables.shape[0] == batch, f"{len(block_tables)} rows of block_tables for {batch} queries")
        need(seq_lens.dtype == torch.uint32 and seq_lens.shape == (batch,), "seq_lens are uint32, one for each request")
        need(max_seq_len == block_tables.shape[1] * page_size, "max_seq_len is the capacity of the block_tables")
        lengths = seq_lens.to(torch.int64)
        need(((lengths >= 1) & (lengths <= max_seq_len)).all(), "a length of 0 is undefined")
        need(workspace_buffer.dtype == torch.uint8, "the workspace is uint8")
        need(len(workspace_buffer) > SEMAPHORES, "the workspace is too small")
        need(not workspace_buffer[:SEMAPHORES].any(), "the workspace must be zero before its first use")
        workspace_buffer[SEMAPHORES : SEMAPHORES + 4096] = 255
        if sinks is not None:
            need(
                sinks.dtype == torch.float32 and sinks.shape == query.shape[1:2], "sinks are float32, one for each head"
            )
        rows = []
        for row, table, length in zip(query, block_tables, lengths.tolist(), strict=True):
            ids = table[: -(-length // page_size)]
            context = pages(keys, ids), pages(values, ids)
            rows.append(attend(row[None], *context, length, scale=bmm1_scale, window_left=window_left, sinks_N=sinks))
        return torch.cat(rows)

    def as_module(self) -> ModuleType:
        flashinfer, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
        flashinfer.__version__ = VERSION  # type: ignore[attr-defined]
        decode.trtllm_batch_decode_with_kv_cache = self.trtllm_batch_decode_with_kv_cache  # type: ignore[attr-defined]
        flashinfer.decode = decode  # type: ignore[attr-defined]
        package = self

        class BatchPrefillWithPagedKVCacheWrapper(PrefillWrapper):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(package, *args, **options)

        flashinfer.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
        return flashinfer


class PrefillWrapper:
    """The wrapper for chunks, outside of CUDA graphs."""

    def __init__(
        self,
        package: FlashInfer,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
    ) -> None:
        need(kv_layout == "HND" and not use_cuda_graph, "this stand-in supports HND only, and no graphs")
        need(float_workspace_buffer.dtype == torch.uint8, "the workspace is uint8")
        float_workspace_buffer.fill_(255)
        self.package = package
        self.planned: dict[str, Any] | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        disable_split_kv: bool = False,
    ) -> None:
        self.package.num_plans += 1
        starts, page_starts = qo_indptr.tolist(), paged_kv_indptr.tolist()
        batch = len(starts) - 1
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            need(each.dtype == torch.int32 and each.dim() == 1, "indices are int32, in one dimension")
        need(batch > 0 and len(page_starts) == batch + 1, "both kinds of starts are one more than requests")
        need(len(paged_kv_last_page_len) == batch, "a last page for each request")
        need(starts[0] == page_starts[0] == 0, "starts begin with 0")
        need(starts == sorted(starts) and page_starts == sorted(page_starts), "starts ascend")
        need(page_starts[-1] == len(paged_kv_indices), f"{len(paged_kv_indices)} pages, not {page_starts[-1]}")
        counts = (paged_kv_indptr[1:] - paged_kv_indptr[:-1]).long()
        last = paged_kv_last_page_len.long()
        need(
            ((last >= 1) | (counts == 0)).all() and (last <= page_size).all(), "a last page has 1 to page_size entries"
        )
        need(((last == 0) | (counts > 0)).all(), "entries without a page")
        need(head_dim_qk in self.package.chunk_head_sizes, f"no kernel for heads of {head_dim_qk}")
        need(q_data_type in self.package.dtypes, f"no kernel for {q_data_type}")
        need(kv_data_type in (None, q_data_type), "caches of another type are another kernel")
        need(causal and sm_scale is not None, "this stand-in is for causal attention")
        self.planned = dict(
            starts=starts,
            page_starts=page_starts,
            indices=paged_kv_indices.clone(),
            lengths=((counts - 1).clamp(min=0) * page_size + last).tolist(),
            shape=(num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type),
            scale=sm_scale,
            window_left=window_left,
        )

    def run(self, q: Tensor, paged_kv_cache: Any, *args: Any) -> Tensor:
        self.package.num_runs += 1
        if self.planned is None:
            raise Refused("plan info is not initialized")
        plan = self.planned
        need(len(q) == plan["starts"][-1], f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({plan['starts'][-1]})")
        self.package.check_caches(q, paged_kv_cache)
        keys, values = paged_kv_cache
        shape = (q.shape[1], keys.shape[1], q.shape[2], keys.shape[2], q.dtype)
        need(shape == plan["shape"], f"planned for {plan['shape']}, run with {shape}")
        out = torch.full_like(q, torch.nan)
        for request, length in enumerate(plan["lengths"]):
            rows = slice(*plan["starts"][request : request + 2])
            ids = plan["indices"][slice(*plan["page_starts"][request : request + 2])]
            if rows.start < rows.stop and len(ids):
                need(length >= rows.stop - rows.start, "rows before the first position")
                context = pages(keys, ids), pages(values, ids)
                out[rows] = attend(q[rows], *context, length, scale=plan["scale"], window_left=plan["window_left"])
        return out


def install(monkeypatch: pytest.MonkeyPatch, flashinfer: FlashInfer) -> None:
    """Make `import flashinfer` find the stand-in."""
    module = flashinfer.as_module()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", module.decode)


def strict() -> FlashInfer:
    """Return the package with its real limits."""
    return FlashInfer(dtypes=(torch.float16, torch.bfloat16), chunk_head_sizes=(64, 128, 256), head_multiple=16)
