"""Latent attention with FlashInfer: its MLA kernel if weights are absorbed, its ragged prefill if keys are expanded.

- Absorbed: `BatchMLAPagedAttentionWrapper` over the paged cache. The wrapper splits contexts by the lengths of the
  whole step, so the last bits of a request's results depend on the batch.
- Expanded: `BatchPrefillWithRaggedKVCacheWrapper` attends from the chunks to themselves, then to their prefixes, piece
  by piece; `merge_state_in_place` merges each piece into the result by its log-sum-exp.

Both wrappers are planned on the host, once for all layers of a step, so CUDA graphs cannot capture them.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from moeserve.ops.attention.flashinfer import numbers, places_of_blocks
from moeserve.ops.attention.plans import Plans
from moeserve.ops.latent_attention.interface import ExpandLatents, LatentAttentionBackend, LatentShape
from moeserve.ops.libraries import capability, listed, missing_part
from moeserve.ops.upload import upload
from moeserve.step_inputs import ChunkSpan, StepInputs

# K size of the unrotated part of a head's key, E of the rotated part, Q = K + E, L latent size, P = L + E, S chunks,
# B blocks of all chunks, C positions

DTYPES = (torch.float16, torch.bfloat16)
LATENT_SIZES = (128, 256, 512)  # supported by FlashInfer's kernel for sm_90: flashinfer/mla
ROTARY_MULTIPLE = 64  # required by the same kernel
TILE_ROWS = 128  # pairs of row and head in a tile; a tile that ends inside a row may omit a position
MAX_ABSORBED_ROWS = 8192  # rows of a step; a plan holds at most 16384 tiles of 128 heads and splits
EXPANDED_SIZES = (192, 128)  # key and value size: is_fa3_prefill_head_dim_supported in flashinfer/utils.py
WORKSPACE = 2**27  # bytes, as FlashInfer's documentation recommends
MAX_EXPANDED_BYTES = 2**29  # maximum bytes of the keys and values of one piece of the prefixes
MAX_PIECES = 16  # each piece has two wrappers of 16 MiB; steps with longer prefixes run on our kernels

NEEDS = {
    "mla.BatchMLAPagedAttentionWrapper.plan": {
        *("metadata", "num_heads", "head_dim_ckv", "head_dim_kpe", "page_size", "causal", "sm_scale"),
        *("q_data_type", "kv_data_type"),
    },
    "mla.BatchMLAPagedAttentionWrapper.run": {"query", "kv_cache", "out"},
    "mla.MLAPlanMetadata": set[str](),
    "BatchPrefillWithRaggedKVCacheWrapper.plan": {
        *("qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "causal"),
        *("sm_scale", "q_data_type", "kv_data_type", "non_blocking", "disable_split_kv"),
    },
    "BatchPrefillWithRaggedKVCacheWrapper.run": {"q", "k", "v", "out", "return_lse"},
    "merge_state_in_place": set[str](),
}

logger = logging.getLogger(__name__)

Attend = TypeVar("Attend")


@dataclass(frozen=True)
class LatentProblem:
    """The facts that determine if FlashInfer supports a layer's latent attention.

    With absorbed weights, all heads share a key, whose unrotated part is also the value. With expanded keys and values,
    each head has its own key and value.
    """

    is_absorbed: bool
    num_heads: int  # number of heads of this rank
    key_size: int  # size of a key without its rotated part
    rotary_size: int
    value_size: int
    dtype: torch.dtype
    scale: float


class FlashInferLatent:
    """The opened FlashInfer library. Layers share the workspace, because layers run one after another.

    The head sizes of a layer are known only at its first call. Layers of one shape share a function and its plan.
    """

    def __init__(self, flashinfer: ModuleType, device: torch.device) -> None:
        self._flashinfer = flashinfer
        self._device = device
        self._missing = missing_part(flashinfer, NEEDS)
        self._workspace: Tensor | None = None
        self.absorbed = functools.cache(functools.partial(self._choose, self.make_absorbed))
        self.expanded = functools.cache(functools.partial(self._choose, self.make_expanded))

    def attention(self, own: LatentAttentionBackend, shape: LatentShape) -> LatentAttentionBackend:
        """Return the attention of a layer. `own` serves the steps that FlashInfer cannot serve."""
        return FlashInferLatentAttention(own, self, shape)

    def _choose(self, make: Callable[[LatentProblem], Attend], problem: LatentProblem) -> Attend | None:
        """Return FlashInfer's function, or None if our own kernels must be used."""
        if reason := self.why_not(problem):
            logger.info("latent attention (%s) runs on our kernels, not FlashInfer: %s", problem, reason)
            return None
        return make(problem)

    def why_not(self, problem: LatentProblem) -> str | None:
        """Return the reason why FlashInfer cannot serve a layer with these facts, as a clause; None if it can."""
        if self._missing:
            return f"this version has no {self._missing}"
        if problem.dtype not in DTYPES:
            return f"it computes in 16 bits, not in {problem.dtype}"
        sizes = problem.key_size + problem.rotary_size, problem.value_size
        if not problem.is_absorbed:
            return None if sizes == EXPANDED_SIZES else f"its keys and values have {EXPANDED_SIZES} values, not {sizes}"
        if problem.value_size not in LATENT_SIZES:
            return f"its latent vectors have {listed(LATENT_SIZES)} values, not {problem.value_size}"
        if problem.rotary_size % ROTARY_MULTIPLE:
            return f"its rotated keys have multiples of {ROTARY_MULTIPLE} values, not {problem.rotary_size}"
        if TILE_ROWS % problem.num_heads:
            return f"its tiles have whole rows of heads that divide {TILE_ROWS}, not of {problem.num_heads}"
        return None

    def make_absorbed(self, problem: LatentProblem) -> AbsorbedAttention:
        found = capability(self._device)
        backend = "fa3" if found is None or found[0] == 9 else "fa2"
        wrapper = self._flashinfer.mla.BatchMLAPagedAttentionWrapper
        make_wrapper = functools.partial(wrapper, self._shared_workspace(), backend=backend)
        return AbsorbedAttention(Plans(make_wrapper, self._device), self._flashinfer.mla.MLAPlanMetadata.csr, problem)

    def make_expanded(self, problem: LatentProblem) -> ExpandedAttention:
        wrapper = self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper
        make_wrapper = functools.partial(wrapper, self._shared_workspace(), kv_layout="NHD")
        return ExpandedAttention(
            Plans(list, self._device), make_wrapper, self._flashinfer.merge_state_in_place, problem
        )

    def _shared_workspace(self) -> Tensor:
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=self._device)
        return self._workspace


class FlashInferLatentAttention:
    """A `LatentAttentionBackend` with FlashInfer. Steps with padding, as in CUDA graphs, run on our kernels."""

    takes_all_rows = False

    def __init__(self, own: LatentAttentionBackend, library: FlashInferLatent, shape: LatentShape) -> None:
        self._own = own
        self._library = library
        self._shape = shape
        self.write = own.write
        self.attend_chosen = own.attend_chosen

    def attend(
        self,
        query_TNP: Tensor,
        cache: Tensor,
        step: StepInputs,
        max_rows: int | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        num_heads, vector_size = query_TNP.shape[1:]
        size, scale = self._shape.latent_size, self._shape.scale
        problem = LatentProblem(True, num_heads, size, vector_size - size, size, query_TNP.dtype, scale)
        absorbed: AbsorbedAttention | None = self._library.absorbed(problem)
        most = step.max_rows_per_chunk if max_rows is None else max_rows
        if absorbed is not None and step.padding is None and absorbed.serves(step, most):
            return absorbed(query_TNP, cache, step, most)
        return self._own.attend(query_TNP, cache, step, max_rows, sinks_N)

    def attend_expanded(
        self,
        query_TNK: Tensor,
        query_TNE: Tensor,
        cache: Tensor,
        step: StepInputs,
        max_rows: int,
        expand: ExpandLatents,
        out_TNV: Tensor,
    ) -> None:
        num_heads, key_size = query_TNK.shape[1:]
        sizes = (num_heads, key_size, query_TNE.shape[2], out_TNV.shape[2])
        problem = LatentProblem(False, *sizes, query_TNK.dtype, self._shape.scale)
        expanded: ExpandedAttention | None = self._library.expanded(problem)
        attend: Callable[..., None] = self._own.attend_expanded
        if expanded is not None and step.padding is None and expanded.serves(step, max_rows):
            attend = expanded
        attend(query_TNK, query_TNE, cache, step, max_rows, expand, out_TNV)


class AbsorbedAttention:
    """Attention of short chunks to latent vectors, for layers of one shape."""

    def __init__(
        self, plans: Plans[Any, Tensor | None], make_metadata: Callable[..., Any], problem: LatentProblem
    ) -> None:
        """
        Args:
            plans: plans of the last steps. A plan is the indices [R] of the planned chunks' rows among the step's
                tokens; None: all rows.
            make_metadata: `MLAPlanMetadata.csr`.
        """
        self._plans = plans
        self._make_metadata = make_metadata
        self._problem = problem

    def serves(self, step: StepInputs, max_rows: int) -> bool:
        """Return True if the kernel supports the chunks of this step that have at most `max_rows` rows."""
        spans = [span for _, span in _chunks(step, max_rows, is_long=False)]
        has_positions = all(0 < span.num_rows <= span.context_len for span in spans)
        return has_positions and 0 < sum(span.num_rows for span in spans) <= MAX_ABSORBED_ROWS

    def __call__(self, query_TNP: Tensor, cache: Tensor, step: StepInputs, max_rows: int) -> Tensor:
        plan = functools.partial(self._plan, step, max_rows, cache.shape[1])
        wrapper, rows_R = self._plans.of(step, plan)
        query_RNP = query_TNP.contiguous() if rows_R is None else query_TNP[rows_R]
        output_RNL = query_TNP.new_empty(*query_RNP.shape[:2], self._problem.value_size)
        wrapper.run(query=query_RNP, kv_cache=cache, out=output_RNL)
        if rows_R is None:
            return output_RNL
        output_TNL = query_TNP.new_zeros(*query_TNP.shape[:2], self._problem.value_size)
        output_TNL[rows_R] = output_RNL
        return output_TNL

    def _plan(self, step: StepInputs, max_rows: int, block_size: int, wrapper: Any) -> Tensor | None:
        """Plan the short chunks of a step from its spans on the host, without waiting for the GPU."""
        problem, device = self._problem, step.block_table.device
        chunks = _chunks(step, max_rows, is_long=False)
        spans = [span for _, span in chunks]
        block_starts, places_B = places_of_blocks(step, block_size, chunks)
        wrapper.plan(
            metadata=self._make_metadata(
                qo_indptr=numbers([0, *itertools.accumulate(span.num_rows for span in spans)]),
                kv_indptr=numbers(block_starts),
                kv_indices=step.block_table.flatten()[upload(places_B, device)],
                kv_len_arr=numbers([span.context_len for span in spans]),
            ),
            num_heads=problem.num_heads,
            head_dim_ckv=problem.value_size,
            head_dim_kpe=problem.rotary_size,
            page_size=block_size,
            causal=True,
            sm_scale=problem.scale,
            q_data_type=problem.dtype,
            kv_data_type=problem.dtype,
        )
        return None if len(chunks) == len(step.spans) else upload(_rows_of(spans), device)


class ExpandedAttention:
    """Attention of long chunks to the keys and values of each head, for layers of one shape."""

    def __init__(
        self,
        plans: Plans[list[Any], ExpandedPlan],
        make_wrapper: Callable[[], Any],
        merge: Callable[..., None],
        problem: LatentProblem,
    ) -> None:
        """
        Args:
            plans: plans of the last steps, each with one wrapper from `make_wrapper` for each piece.
            make_wrapper: returns a new `BatchPrefillWithRaggedKVCacheWrapper`.
            merge: `merge_state_in_place`.
        """
        self._plans = plans
        self._make_wrapper = make_wrapper
        self._merge = merge
        self._problem = problem
        keys_and_values = 2 * problem.key_size + problem.rotary_size + problem.value_size  # includes a copy of the keys
        self._piece_size = max(MAX_EXPANDED_BYTES // (problem.num_heads * keys_and_values * problem.dtype.itemsize), 1)

    def serves(self, step: StepInputs, max_rows: int) -> bool:
        """Return True if the kernel supports the chunks of this step that have more than `max_rows` rows."""
        prefixes = [span.context_len - span.num_rows for _, span in _chunks(step, max_rows, is_long=True)]
        return min(prefixes) >= 0 and sum(prefixes) <= MAX_PIECES * self._piece_size

    def __call__(
        self,
        query_TNK: Tensor,
        query_TNE: Tensor,
        cache: Tensor,
        step: StepInputs,
        max_rows: int,
        expand: ExpandLatents,
        out_TNV: Tensor,
    ) -> None:
        wrappers, plan = self._plans.of(step, functools.partial(self._plan, step, max_rows, cache.shape[1]))
        query_RNQ = torch.cat([query_TNK[plan.rows_R], query_TNE[plan.rows_R]], dim=-1)
        latents = cache.flatten(0, 1)
        output_RNV = sums_RN = None
        for piece, wrapper in zip(plan.pieces, wrappers, strict=False):
            key_CNQ, value_CNV = self._expanded(latents[piece.slots_C], expand)
            part_RNV, part_RN = wrapper.run(query_RNQ[piece.rows], key_CNQ, value_CNV, return_lse=True)
            if output_RNV is None or sums_RN is None:
                output_RNV, sums_RN = part_RNV, part_RN  # the first piece has all rows
            else:
                self._merge(output_RNV[piece.rows], sums_RN[piece.rows], part_RNV, part_RN)
            del key_CNQ, value_CNV  # before the keys and values of the next piece are allocated
        assert output_RNV is not None
        out_TNV[plan.rows_R] = output_RNV

    def _expanded(self, vectors_CP: Tensor, expand: ExpandLatents) -> tuple[Tensor, Tensor]:
        """Return the keys [C, N, K + E] and values [C, N, V] of latent vectors. The values may be strided."""
        problem = self._problem
        latent_CL, rotated_CE = vectors_CP.split([vectors_CP.shape[1] - problem.rotary_size, problem.rotary_size], 1)
        key_NCK, value_NCV = expand(latent_CL)
        num_positions = len(vectors_CP)
        key_CNQ = vectors_CP.new_empty(num_positions, problem.num_heads, problem.key_size + problem.rotary_size)
        key_CNQ[..., : problem.key_size] = key_NCK.transpose(0, 1)
        key_CNQ[..., problem.key_size :] = rotated_CE[:, None]
        return key_CNQ, value_NCV.transpose(0, 1)

    def _plan(self, step: StepInputs, max_rows: int, block_size: int, wrappers: list[Any]) -> ExpandedPlan:
        """Divide the long chunks' contexts into pieces and plan each, without waiting for the GPU.

        The first piece holds the positions of the chunks themselves. The other pieces divide the concatenated prefixes.
        """
        device = step.block_table.device
        chunks = _chunks(step, max_rows, is_long=True)
        chunks.sort(key=lambda chunk: chunk[1].context_len == chunk[1].num_rows)  # chunks without a prefix come last
        spans = [span for _, span in chunks]
        row_ends = [0, *itertools.accumulate(span.num_rows for span in spans)]
        ends = [0, *itertools.accumulate(span.context_len - span.num_rows for span in spans)]

        rows_R = upload(_rows_of(spans), device)
        pieces = [Piece(slice(0, row_ends[-1]), step.cache_slots[rows_R])]
        num_pieces = 1 + -(-ends[-1] // self._piece_size)
        wrappers += [self._make_wrapper() for _ in range(num_pieces - len(wrappers))]
        self._plan_piece(wrappers[0], row_ends, row_ends, causal=True)

        for wrapper, first in zip(wrappers[1:], range(0, ends[-1], self._piece_size), strict=False):
            last = min(first + self._piece_size, ends[-1])
            own = [i for i in range(len(spans)) if ends[i] < last and ends[i + 1] > first]
            positions = [torch.arange(max(first, ends[i]), min(last, ends[i + 1])) - ends[i] for i in own]
            before = [chunks[i][0] * step.block_table.shape[1] for i in own]
            places_C = torch.cat([a + each // block_size for a, each in zip(before, positions, strict=True)])
            offsets_C = torch.cat(positions) % block_size
            blocks_C = step.block_table.flatten()[upload(places_C, device)].long()
            slots_C = blocks_C * block_size + upload(offsets_C, device)
            rows = slice(row_ends[own[0]], row_ends[own[-1] + 1])
            pieces.append(Piece(rows, slots_C))
            self._plan_piece(
                wrapper,
                [row_ends[i] - rows.start for i in (*own, own[-1] + 1)],
                [0, *itertools.accumulate(map(len, positions))],
                causal=False,
            )
        return ExpandedPlan(rows_R, pieces)

    def _plan_piece(self, wrapper: Any, row_starts: list[int], starts: list[int], *, causal: bool) -> None:
        problem = self._problem
        wrapper.plan(
            qo_indptr=numbers(row_starts),
            kv_indptr=numbers(starts),
            num_qo_heads=problem.num_heads,
            num_kv_heads=problem.num_heads,
            head_dim_qk=problem.key_size + problem.rotary_size,
            head_dim_vo=problem.value_size,
            causal=causal,
            sm_scale=problem.scale,
            q_data_type=problem.dtype,
            kv_data_type=problem.dtype,
            non_blocking=True,
            disable_split_kv=True,  # the order of a row's sum must not depend on the rest of the step
        )


@dataclass(frozen=True)
class Piece:
    """One piece of the context: its positions, and the rows that attend to them."""

    rows: slice  # among the rows of all planned chunks
    slots_C: Tensor  # int64, indices of the positions in the flattened cache


@dataclass(frozen=True)
class ExpandedPlan:
    """The plan of a step's long chunks."""

    rows_R: Tensor  # indices of the chunks' rows among the step's tokens
    pieces: list[Piece]


def _chunks(step: StepInputs, max_rows: int, *, is_long: bool) -> list[tuple[int, ChunkSpan]]:
    """Return index and span of each chunk with more than `max_rows` rows if `is_long`, else of each other chunk."""
    spans = enumerate(step.spans)
    return [(chunk, span) for chunk, span in spans if (min(span.num_rows, span.context_len) > max_rows) is is_long]


def _rows_of(spans: list[ChunkSpan]) -> Tensor:
    """Return the row indices of some chunks, int64 on the host."""
    return torch.cat([torch.arange(span.first_row, span.last_row + 1) for span in spans])
