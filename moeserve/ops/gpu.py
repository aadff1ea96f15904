"""The operations on a GPU: each as its Triton kernel takes it. It needs triton, so it is imported only where it serves.

None of them waits for the GPU, if it does not say so.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moeserve.ops.activation import ClampedSwiGLU, SwiGLU
from moeserve.ops.attention import TorchAttention
from moeserve.ops.latent_attention import TorchLatentAttention
from moeserve.ops.pairs import Keys, TorchPairs
from moeserve.ops.products import Gather, OpenWeights, TorchProduct, activation_arguments
from moeserve.ops.rotary import Turn
from moeserve.ops.routing import RouterConfig, kernel_rules
from moeserve.step_inputs import StepInputs
from moeserve.triton_kernels.activation import clamped_silu_multiply, silu_multiply
from moeserve.triton_kernels.fp8 import quantize_blocks
from moeserve.triton_kernels.grouped_matmul import (
    grouped_matmul,
    grouped_matmul_fp8,
    grouped_matmul_slots,
    grouped_matmul_slots_fp8,
)
from moeserve.triton_kernels.latent_attention import latent_attention, write_latents
from moeserve.triton_kernels.paged_attention import paged_attention, write_cache
from moeserve.triton_kernels.pairs import gather_rows, order_pairs, scatter_rows, weigh_rows, weighted_sum
from moeserve.triton_kernels.rotary import rotary_with_cache_write
from moeserve.triton_kernels.routing import route

# T tokens, N query heads, G key-value heads, H head size, K experts per token, E experts, R rows, D width of a row,
# I inputs, B blocks of 128 inputs, C columns; see the protocols


def route_in_float32(
    config: RouterConfig, hidden_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, correction_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits by torch, all that follows in one kernel."""
    logits_TE = functional.linear(hidden_TD.float(), weight_ED, bias_E)
    return route(logits_TE, correction_E, top_k=config.top_k, **kernel_rules(config))


class GpuPairs:
    """Triton kernels. Nothing but `sort`, which gives as many pairs as there are, waits for the GPU."""

    def __init__(self) -> None:
        reference = TorchPairs()
        self.count, self.join = reference.count, reference.join  # one operation of torch each

    def sort(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        pairs_P, counts = self.order(keys_TK, keys)
        return pairs_P[: int(counts.sum())], counts

    def order(self, keys_TK: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        return order_pairs(keys_TK, keys.first, keys.num_counted)

    def gather(self, source_SD: Tensor, indices_R: Tensor, divisor: int = 1) -> Tensor:
        return gather_rows(source_SD, indices_R, divisor)

    def scatter(self, rows_RD: Tensor, indices_R: Tensor, num_rows: int) -> Tensor:
        return scatter_rows(rows_RD, indices_R, num_rows)

    def weighted_sum(self, output_RD: Tensor, pair_of_row_R: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
        return weighted_sum(output_RD, pair_of_row_R, weights_TK, dtype)

    def weigh(self, rows_RD: Tensor, weights_R: Tensor, num_counted: Tensor) -> Tensor:
        return weigh_rows(rows_RD, weights_R, num_counted)


class GpuProduct:
    """Triton kernels for weights side by side; torch's own product for a single one, and small ones for each head."""

    def __init__(self, weights: OpenWeights) -> None:
        self.weights = weights
        self.reference = TorchProduct(weights)
        self.activation = activation_arguments(weights.activation)

    def multiply(self, input_TI: Tensor) -> Tensor:
        (weight_OI,) = self.weights.weight_eOI
        bias_eO = self.weights.bias_eO
        output_TO = functional.linear(input_TI, weight_OI, None if bias_eO is None else bias_eO[0])
        match self.weights.activation:
            case None:
                return output_TO
            case SwiGLU():
                return silu_multiply(output_TO)
            case ClampedSwiGLU(alpha=alpha, limit=limit):
                return clamped_silu_multiply(output_TO, alpha=alpha, limit=limit)
            case other:
                raise AssertionError(f"no kernel has the activation {other}")

    def multiply_rows(
        self,
        rows_RI: Tensor,
        counts_e: Tensor,
        has_spare_rows: bool = False,
        gather: Gather | None = None,
        expected_rows: int | None = None,
    ) -> Tensor:
        return grouped_matmul(
            rows_RI,
            self.weights.weight_eOI,
            counts_e,
            indices_R=None if gather is None else gather.indices_R,
            divisor=1 if gather is None else gather.divisor,
            bias_eO=self.weights.bias_eO,
            expected_rows=expected_rows,
            **self.activation,
        )

    def multiply_slots(self, slots_eSI: Tensor, counts_e: Tensor, expected_rows: int | None = None) -> Tensor:
        return grouped_matmul_slots(
            slots_eSI,
            self.weights.weight_eOI,
            counts_e,
            bias_eO=self.weights.bias_eO,
            expected_rows=expected_rows,
            **self.activation,
        )

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        return self.reference.multiply_each(input_TeI, out_TeC)


class GpuBlockProduct:
    """Triton kernels for weights in 8-bit blocks. Rows become such too before each product: 128 values have a scale."""

    def __init__(self, weights: OpenWeights) -> None:
        assert weights.scales_eGB is not None
        self.operands = weights.weight_eOI, weights.scales_eGB
        self.options = {"bias_eO": weights.bias_eO} | activation_arguments(weights.activation)

    def multiply(self, input_TI: Tensor) -> Tensor:
        return self.multiply_rows(input_TI, input_TI.new_full((1,), len(input_TI), dtype=torch.int64))

    def multiply_rows(
        self,
        rows_RI: Tensor,
        counts_e: Tensor,
        has_spare_rows: bool = False,
        gather: Gather | None = None,
        expected_rows: int | None = None,
    ) -> Tensor:
        return grouped_matmul_fp8(
            *quantize_blocks(rows_RI),
            *self.operands,
            counts_e,
            indices_R=None if gather is None else gather.indices_R,
            divisor=1 if gather is None else gather.divisor,
            out_dtype=rows_RI.dtype,
            expected_rows=expected_rows,
            **self.options,
        )

    def multiply_slots(self, slots_eSI: Tensor, counts_e: Tensor, expected_rows: int | None = None) -> Tensor:
        """Slots without rows are quantised too: only the GPU knows which."""
        codes_RI, scales_RB = quantize_blocks(slots_eSI.flatten(0, 1))
        codes_eSI, scales_eSB = (rows.unflatten(0, slots_eSI.shape[:2]) for rows in (codes_RI, scales_RB))
        return grouped_matmul_slots_fp8(
            codes_eSI,
            scales_eSB,
            *self.operands,
            counts_e,
            out_dtype=slots_eSI.dtype,
            expected_rows=expected_rows,
            **self.options,
        )

    def multiply_each(self, input_TeI: Tensor, out_TeC: Tensor | None = None) -> Tensor:
        raise AssertionError("weights that have an input of their own each are not held in blocks")


class GpuAttention:
    """Triton kernels. A row's result does not depend on the chunks beside its own."""

    def __init__(self, reference: TorchAttention) -> None:
        self.reference = reference

    def write(
        self, key_TGH: Tensor, value_TGH: Tensor, key_cache: Tensor, value_cache: Tensor, step: StepInputs
    ) -> None:
        write_cache(key_TGH, value_TGH, key_cache, value_cache, step.cache_slots)

    def turn_and_write(
        self,
        query_TNH: Tensor,
        key_TGH: Tensor,
        value_TGH: Tensor,
        turn: Turn,
        key_cache: Tensor,
        value_cache: Tensor,
        step: StepInputs,
    ) -> Tensor:
        angles = turn.cosines, turn.sines, turn.is_interleaved
        caches = key_cache, value_cache, step.cache_slots
        return rotary_with_cache_write(query_TNH, key_TGH, value_TGH, *angles, *caches)

    def attend(
        self,
        query_TNH: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: StepInputs,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        return paged_attention(
            query_TNH,
            key_cache,
            value_cache,
            step.block_table,
            step.row_starts,
            step.context_lens,
            scale=self.reference.scale,
            window=self.reference.window,
            sinks_N=sinks_N,
            max_rows_per_chunk=step.max_rows_per_chunk,
            max_context=step.block_table.shape[1] * key_cache.shape[2],
        )


class GpuLatentAttention:
    """Triton kernels. Long chunks are expanded: where there are many rows, arithmetic is what takes time."""

    takes_all_rows = False

    def __init__(self, reference: TorchLatentAttention) -> None:
        self.reference = reference

    def write(self, latent_TP: Tensor, cache: Tensor, step: StepInputs) -> None:
        write_latents(latent_TP, cache, step.cache_slots)

    def attend(self, query_TNP: Tensor, cache: Tensor, step: StepInputs, max_rows: int | None = None) -> Tensor:
        return latent_attention(
            query_TNP,
            cache,
            step.block_table,
            step.row_starts,
            step.context_lens,
            scale=self.reference.scale,
            latent_size=self.reference.latent_size,
            max_rows_per_chunk=step.max_rows_per_chunk,
            max_context=step.block_table.shape[1] * cache.shape[1],
            max_rows=max_rows,
        )

    def gather(self, cache: Tensor, block_ids: Tensor, context_len: int) -> Tensor:
        return self.reference.gather(cache, block_ids, context_len)
