"""Stand-ins on the CPU for FlashInfer's latent attention and ragged prefill, by their published contract.

Signatures, shapes, dtypes and errors are those of https://github.com/flashinfer-ai/flashinfer (mla, prefill and cascade
of 0.7). Positions behind a context, in its last page, are multiplied by zero.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from attention_stand_ins import Refused, need
from torch import Tensor


def attend(
    query_RNQ: Tensor, key_CNQ: Tensor, value_CNV: Tensor, scale: float, hidden_RC: Tensor
) -> tuple[Tensor, Tensor]:
    """Return [R, N, V] and the log-sum-exp [R, N] in base 2."""
    scores_NRC = torch.einsum("rnq,cnq->nrc", query_RNQ.float(), key_CNQ.float()) * scale
    scores_NRC = torch.where(hidden_RC, -torch.inf, scores_NRC)
    weights_NRC = torch.where(hidden_RC, 0.0, scores_NRC.softmax(-1))
    output_RNV = torch.einsum("nrc,cnv->rnv", weights_NRC, value_CNV.float()).to(query_RNQ.dtype)
    return output_RNV, (scores_NRC.logsumexp(-1) / math.log(2)).T.contiguous()


@dataclass(frozen=True)
class MLAPlanMetadata:
    qo_indptr: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    kv_len_arr: Tensor | None = None

    @classmethod
    def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> MLAPlanMetadata:
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class BatchMLAPagedAttentionWrapper:
    num_plans = num_runs = 0

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        need(float_workspace_buffer.dtype == torch.uint8 and not use_cuda_graph, "this stand-in has no graphs")
        need(backend in ("fa2", "fa3"), "backends of other GPUs")
        self.planned: dict[str, Any] | None = None

    def plan(
        self,
        *,
        metadata: MLAPlanMetadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        type(self).num_plans += 1
        tensors = (metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr)
        for each in tensors:
            need(each is not None and each.dtype == torch.int32 and each.dim() == 1, "metadata are int32")
        rows, starts, pages, lengths = (each.tolist() for each in tensors)  # type: ignore[union-attr]
        need(len(rows) == len(starts) == len(lengths) + 1, "both kinds of starts are one more than requests")
        need(
            q_data_type in (torch.float16, torch.bfloat16) and kv_data_type == q_data_type, "no kernel for these types"
        )
        need(head_dim_ckv in (128, 256, 512) and head_dim_kpe % 64 == 0, "no kernel for these sizes")
        need(causal, "this stand-in is for causal attention")
        mean_pairs = rows[-1] * num_heads // len(lengths)
        tile = 128 if mean_pairs > 64 else 64
        for request, length in enumerate(lengths):
            need(starts[request + 1] - starts[request] == -(-length // page_size), "pages do not match the length")
            num_rows = rows[request + 1] - rows[request]
            need(0 < num_rows <= length, "rows before the first position")
            for end in range(tile, num_rows * num_heads, tile):
                row, remainder = divmod(end, num_heads)
                position = length - num_rows + row
                need(not (remainder and position % 64 == 0), "causal tile boundary is unsupported")
        self.planned = dict(rows=rows, starts=starts, pages=pages, lengths=lengths, scale=sm_scale, page_size=page_size)
        self.sizes = (num_heads, head_dim_ckv, head_dim_kpe)

    def run(self, *, query: Tensor, kv_cache: Tensor, out: Tensor) -> Tensor:
        type(self).num_runs += 1
        if self.planned is None:
            raise Refused("run() called before plan()")
        plan, (num_heads, latent, rotary) = self.planned, self.sizes
        need(query.shape == (plan["rows"][-1], num_heads, latent + rotary), "the query was planned otherwise")
        need(kv_cache.dim() == 3 and kv_cache.shape[1:] == (plan["page_size"], latent + rotary), "another cache")
        need(
            out.shape == (*query.shape[:2], latent) and out.is_contiguous() and out.dtype == query.dtype,
            "another result",
        )
        out.fill_(torch.nan)
        for request, length in enumerate(plan["lengths"]):
            rows = slice(*plan["rows"][request : request + 2])
            pages = torch.tensor(plan["pages"][slice(*plan["starts"][request : request + 2])])
            key_CQ = kv_cache[pages].flatten(0, 1)
            key_CNQ = key_CQ[:, None].expand(-1, num_heads, -1)
            last_R = torch.arange(length - (rows.stop - rows.start), length)
            hidden_RC = torch.arange(len(key_CQ)) > last_R[:, None]
            out[rows] = attend(query[rows], key_CNQ, key_CNQ[..., :latent], plan["scale"], hidden_RC)[0]
        return out


class BatchPrefillWithRaggedKVCacheWrapper:
    num_plans = num_runs = 0

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
    ) -> None:
        need(float_workspace_buffer.dtype == torch.uint8 and not use_cuda_graph, "this stand-in has no graphs")
        need(kv_layout == "NHD" and backend == "auto", "this stand-in supports NHD only")
        self.planned: dict[str, Any] | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        disable_split_kv: bool = False,
    ) -> None:
        type(self).num_plans += 1
        rows, starts = qo_indptr.tolist(), kv_indptr.tolist()
        need(qo_indptr.dtype == kv_indptr.dtype == torch.int32, "starts are int32")
        need(len(rows) == len(starts) > 1 and rows[0] == starts[0] == 0, "starts begin with 0")
        need(all(a < b for each in (rows, starts) for a, b in itertools.pairwise(each)), "starts ascend")
        need((head_dim_qk, head_dim_vo) == (192, 128), "no kernel for these sizes")
        need(
            q_data_type == kv_data_type and q_data_type in (torch.float16, torch.bfloat16), "no kernel for these types"
        )
        need(num_qo_heads == num_kv_heads and sm_scale is not None, "this stand-in has a key-value head for each head")
        self.planned = dict(rows=rows, starts=starts, heads=num_qo_heads, causal=causal, scale=sm_scale)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor | None = None, return_lse: bool = False
    ) -> tuple[Tensor, Tensor]:
        type(self).num_runs += 1
        if self.planned is None:
            raise Refused("plan info is not initialized")
        plan = self.planned
        need(out is None and return_lse, "this stand-in returns new tensors")
        need(q.shape == (plan["rows"][-1], plan["heads"], 192), "the query was planned otherwise")
        need(k.shape == (plan["starts"][-1], plan["heads"], 192), "the keys were planned otherwise")
        need(v.shape == (plan["starts"][-1], plan["heads"], 128), "the values were planned otherwise")
        need(q.stride(2) == k.stride(2) == v.stride(2) == 1, "the last dimension must be contiguous")
        outputs, sums = [], []
        for request in range(len(plan["rows"]) - 1):
            rows, positions = (slice(*plan[name][request : request + 2]) for name in ("rows", "starts"))
            num_rows, num_positions = rows.stop - rows.start, positions.stop - positions.start
            last_R = torch.arange(num_positions - num_rows, num_positions)
            hidden_RC = torch.arange(num_positions) > last_R[:, None]
            hidden_RC &= torch.tensor(plan["causal"])
            output, lse = attend(q[rows], k[positions], v[positions], plan["scale"], hidden_RC)
            outputs.append(output)
            sums.append(lse)
        return torch.cat(outputs), torch.cat(sums)


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    need(v.shape == v_other.shape and s.shape == s_other.shape == v.shape[:2], "states of other shapes")
    need(s.dtype == s_other.dtype == torch.float32 and v.is_contiguous() and s.is_contiguous(), "sums are float32")
    merged = torch.logaddexp2(s, s_other)
    shares = [torch.exp2(each - merged)[..., None] for each in (s, s_other)]
    v.copy_(v.float() * shares[0] + v_other.float() * shares[1])
    s.copy_(merged)


def make_package(version: str = "1.2.3") -> Any:
    """Return the package, whose classes count their calls anew."""
    mla = SimpleNamespace(
        BatchMLAPagedAttentionWrapper=type("BatchMLAPagedAttentionWrapper", (BatchMLAPagedAttentionWrapper,), {}),
        MLAPlanMetadata=MLAPlanMetadata,
    )
    ragged = type("BatchPrefillWithRaggedKVCacheWrapper", (BatchPrefillWithRaggedKVCacheWrapper,), {})
    return SimpleNamespace(
        __version__=version,
        mla=mla,
        BatchPrefillWithRaggedKVCacheWrapper=ragged,
        merge_state_in_place=merge_state_in_place,
    )
