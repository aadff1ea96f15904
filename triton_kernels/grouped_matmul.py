"""Grouped matrix products on a GPU: rows times the weights of their experts, in one persistent kernel.

Rows are sorted by expert. Only the GPU knows how many rows each expert has: every program reads the counts, derives
the tiles from them, and computes every n-th tile. Experts without rows have no tiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.tuning import FP8_BLOCK, Config, Kind, Problem, choose_config

# S source rows, R rows, e experts, O outputs, I inputs, C columns of a result, B blocks of 128 inputs, G blocks of 128
# outputs, M rows of a tile, N weight rows of a tile. C is O, or O / 2 with an activation: the first half of the outputs
# are gates, the second half are ups.

Activation = Literal["swiglu", "clamped_swiglu"]
ACTIVATIONS = {None: 0, "swiglu": 1, "clamped_swiglu": 2}
NUM_INTERPRETED_PROGRAMS = 3  # on a CPU: several programs, each with several tiles


def grouped_matmul(
    rows_SI: Tensor,
    weight_eOI: Tensor,
    counts_e: Tensor,
    *,
    row_scale_SB: Tensor | None = None,
    weight_scale_eGB: Tensor | None = None,
    indices_R: Tensor | None = None,
    divisor: int = 1,
    bias_eO: Tensor | None = None,
    activation: Activation | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    out_dtype: torch.dtype | None = None,
    expected_rows: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """Compute activation(row @ weight.T + bias), each row with the weight of its expert.

    Products, sums and activations are float32; results are rounded once. A result depends on its row and its weight
    alone, bit for bit, not on the other rows.

    With scales, rows and weights are float8_e4m3fn in DeepSeek-V3's format (arXiv 2412.19437). The tensor cores add the
    products of 128 inputs; their sum is multiplied by both scales and added to a float32 accumulator.

    Memory moved: each weight that has rows once, O * I values (again for every 32 tiles of its rows); I values of each
    row, from the L2 cache for every tile of outputs; R * C results; 4 bytes for each 128 values of rows and each 16384
    of weights with scales. Operations: 2 * R * O * I.

    Args:
        rows_SI: [S, I] bfloat16, float16, float32 or, with scales, float8_e4m3fn; rows may be strided. Sorted by
            expert: the first counts_e[0] rows have weight 0, and so on. Unused rows may follow; they are not read.
        weight_eOI: [e, O, I], same dtype, contiguous. With an activation, the first half of O are gates, the other ups.
            Or in MXFP4: codes [e, O, I / 2] uint8 as a checkpoint stores them; tensor cores multiply them as bfloat16.
        counts_e: [e] int64 or int32, contiguous.
        row_scale_SB: [S, ceil(I / 128)] float32, one scale for each 128 values of a row.
        weight_scale_eGB: [e, G, ceil(I / 128)] float32, one scale for each 128 x 128 values (`weight_scale_inv` of a
            checkpoint). G is ceil(O / 128), or ceil(C / 128) for gates and as many for ups. Of weights in MXFP4: the
            exponents [e, O, I / 32] uint8, contiguous; those of 0 may count as scales of zero.
        indices_R: [R] int64: row r is rows_SI[indices_R[r] // divisor]; these R rows are sorted instead.
        bias_eO: [e, O].
        activation: "swiglu": silu(gate) * up. "clamped_swiglu": gate * sigmoid(alpha * gate) * (up + 1), with gate
            clamped to at most `limit` and up to ± `limit`.
        out_dtype: dtype of the results; default: that of the rows, or bfloat16 with scales.
        expected_rows: approximate number of used rows, if many are unused. Affects the tiles, not the results.
        config: the tiles; default: the best known for these shapes.

    Returns:
        [R, C]; rows beyond the last used row are not written.
    """
    num_rows = rows_SI.shape[0] if indices_R is None else indices_R.shape[0]
    output_RC = torch.empty(
        num_rows,
        _num_columns(weight_eOI, activation),
        dtype=_result_dtype(rows_SI, out_dtype),
        device=rows_SI.device,
    )
    rows_SI = rows_SI if rows_SI.stride(1) == 1 else rows_SI.contiguous()
    operands = Operands(rows_SI, row_scale_SB, weight_eOI, weight_scale_eGB, counts_e, indices_R, divisor, bias_eO)
    _launch(operands, output_RC, None, activation, alpha, limit, expected_rows, config)
    return output_RC


def grouped_matmul_slots(
    slots_eSI: Tensor,
    weight_eOI: Tensor,
    counts_e: Tensor,
    *,
    slot_scale_eSB: Tensor | None = None,
    weight_scale_eGB: Tensor | None = None,
    bias_eO: Tensor | None = None,
    activation: Activation | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    out_dtype: torch.dtype | None = None,
    expected_rows: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """Compute `grouped_matmul` for experts that have S slots each, of which the first counts_e[i] hold rows.

    Other slots are neither read nor written.

    Args:
        slots_eSI: [e, S, I], contiguous.
        slot_scale_eSB: [e, S, ceil(I / 128)] float32; copied if it is not contiguous, as DeepEP's is not.
        expected_rows: approximate number of slots in use. Slots have room for the worst case, so this matters.
        Other arguments: see `grouped_matmul`.

    Returns:
        [e, S, C]
    """
    assert slots_eSI.is_contiguous(), "slots that are not contiguous"
    num_experts, num_slots, _ = slots_eSI.shape
    output_eSC = torch.empty(
        num_experts,
        num_slots,
        _num_columns(weight_eOI, activation),
        dtype=_result_dtype(slots_eSI, out_dtype),
        device=slots_eSI.device,
    )
    scale_RB = None if slot_scale_eSB is None else slot_scale_eSB.flatten(0, 1)
    operands = Operands(slots_eSI.flatten(0, 1), scale_RB, weight_eOI, weight_scale_eGB, counts_e, None, 1, bias_eO)
    _launch(operands, output_eSC, num_slots, activation, alpha, limit, expected_rows, config)
    return output_eSC


@dataclass(frozen=True)
class Operands:
    """The tensors that one launch reads; see `grouped_matmul`."""

    source_SI: Tensor
    source_scale_SB: Tensor | None
    weight_eOI: Tensor
    weight_scale_eGB: Tensor | None
    counts_e: Tensor
    indices_R: Tensor | None
    divisor: int
    bias_eO: Tensor | None


def _launch(
    operands: Operands,
    output: Tensor,
    num_slots: int | None,
    activation: Activation | None,
    alpha: float,
    limit: float,
    expected_rows: int | None,
    config: Config | None,
) -> None:
    source_SI, weight_eOI, indices_R = operands.source_SI, operands.weight_eOI, operands.indices_R
    is_mxfp4 = weight_eOI.dtype == torch.uint8
    num_experts, num_outputs, num_inputs = weight_eOI.shape
    num_inputs *= 2 if is_mxfp4 else 1
    columns = output.shape[-1]
    num_rows = output.numel() // max(columns, 1)
    assert is_mxfp4 or weight_eOI.dtype == source_SI.dtype, f"weights in {weight_eOI.dtype}, rows in {source_SI.dtype}"
    assert source_SI.shape[1] == num_inputs, f"rows of {source_SI.shape[1]} for weights of {num_inputs}"
    assert operands.counts_e.shape == (num_experts,), f"{tuple(operands.counts_e.shape)} counts, {num_experts} weights"
    assert operands.counts_e.is_contiguous(), "counts that are not contiguous"
    assert weight_eOI.is_contiguous(), "weights that are not contiguous"
    assert num_outputs * num_inputs < 2**31, f"a weight of {num_outputs} x {num_inputs}"  # its offsets are 32 bits
    assert num_rows < 2**31, f"{num_rows} rows"
    assert indices_R is None or indices_R.is_contiguous(), "indices that are not contiguous"
    assert operands.bias_eO is None or operands.bias_eO.is_contiguous(), "biases that are not contiguous"
    if num_rows == 0 or num_experts == 0 or columns == 0:
        return
    has_scales = source_SI.dtype == torch.float8_e4m3fn
    assert (has_scales or is_mxfp4) == (operands.weight_scale_eGB is not None), f"{source_SI.dtype}: wrong scales"
    if has_scales:
        _check_scales(operands, columns)
    if is_mxfp4:
        assert operands.weight_scale_eGB is not None
        assert operands.weight_scale_eGB.shape == (num_experts, num_outputs, num_inputs // 32)
        assert operands.weight_scale_eGB.is_contiguous(), "exponents that are not contiguous"

    if config is None:
        problem = Problem(
            kind="mxfp4" if is_mxfp4 else _kind_of(source_SI.dtype),
            is_gated=activation is not None,
            num_experts=num_experts,
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            num_rows=num_rows if expected_rows is None else expected_rows,
        )
        config = choose_config(problem, _device_name(source_SI.device))
    num_tiles = max_tiles(num_rows, num_experts, columns, activation, config)
    source_scale_SB = operands.source_scale_SB
    grouped_matmul_kernel[(min(num_tiles, _num_programs(source_SI.device, config.programs_per_sm)),)](
        source_SI,
        None if source_scale_SB is None else source_scale_SB.contiguous(),
        weight_eOI,
        operands.weight_scale_eGB,
        operands.bias_eO,
        operands.counts_e,
        indices_R,
        output,
        source_SI.stride(0),
        num_experts,
        columns,
        num_inputs,
        num_slots or 0,
        operands.divisor,
        alpha,
        limit,
        **kernel_constants(
            config,
            source_SI.dtype,
            num_experts,
            num_inputs,
            activation,
            has_bias=operands.bias_eO is not None,
            has_indices=indices_R is not None,
            has_slots=num_slots is not None,
            is_mxfp4=is_mxfp4,
            is_interpreted=source_SI.device.type != "cuda",
        ),
        **compile_options(config),
    )


def _check_scales(operands: Operands, columns: int) -> None:
    num_experts, num_outputs, num_inputs = operands.weight_eOI.shape
    num_blocks = -(-num_inputs // FP8_BLOCK)
    expected = (num_experts, num_outputs // columns * -(-columns // FP8_BLOCK), num_blocks)
    assert operands.weight_scale_eGB is not None
    assert operands.weight_scale_eGB.shape == expected, (tuple(operands.weight_scale_eGB.shape), expected)
    assert operands.weight_scale_eGB.is_contiguous(), "scales that are not contiguous"
    assert operands.source_scale_SB is not None
    assert operands.source_scale_SB.shape == (len(operands.source_SI), num_blocks), operands.source_scale_SB.shape


def _result_dtype(rows: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is not None:
        return out_dtype
    return torch.bfloat16 if rows.dtype == torch.float8_e4m3fn else rows.dtype


def _num_columns(weight_eOI: Tensor, activation: Activation | None) -> int:
    return weight_eOI.shape[1] // (1 if activation is None else 2)


def _kind_of(dtype: torch.dtype) -> Kind:
    """Return the kind of a product whose operands have this dtype."""
    if dtype == torch.float8_e4m3fn:
        return "fp8"
    return "fp32" if dtype == torch.float32 else "bf16"


def max_tiles(num_rows: int, num_experts: int, columns: int, activation: Activation | None, config: Config) -> int:
    """Return an upper bound of the number of tiles: the last tile of each expert may hold a single row."""
    tiles_m = min(num_rows, (num_rows + num_experts * (config.block_m - 1)) // config.block_m)
    return tiles_m * -(-columns // (config.block_n // (1 if activation is None else 2)))


def kernel_constants(
    config: Config,
    dtype: torch.dtype,
    num_experts: int,
    num_inputs: int,
    activation: Activation | None,
    *,
    has_bias: bool,
    has_indices: bool,
    has_slots: bool,
    is_mxfp4: bool = False,
    is_interpreted: bool = False,
) -> dict[str, Any]:
    """Return the compile-time arguments of the kernel."""
    has_scales = dtype == torch.float8_e4m3fn
    if has_scales:
        # One step multiplies one block of inputs, as scales change between blocks. The gates or ups of a tile share one
        # scale of the weight.
        assert config.block_k == FP8_BLOCK, config
        assert FP8_BLOCK % (config.block_n // (1 if activation is None else 2)) == 0, config
    assert config.block_n >= (64 if config.is_swapped else 16), config  # the tensor cores' left operand
    return {
        "ACTIVATION": ACTIVATIONS[activation],
        "HAS_SCALES": has_scales,
        "IS_MXFP4": is_mxfp4,
        # Triton's interpreter has no dot_scaled.
        "USES_DOT_SCALED": is_mxfp4 and dtype == torch.bfloat16 and not is_interpreted,
        "HAS_BIAS": has_bias,
        "HAS_INDICES": has_indices,
        "HAS_SLOTS": has_slots,
        "IS_SWAPPED": config.is_swapped and not is_mxfp4,
        "HAS_WHOLE_STEPS": num_inputs % config.block_k == 0,
        "INPUT_PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
    }


def compile_options(config: Config) -> dict[str, Any]:
    """Return the options that the kernel is compiled with."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@functools.cache
def _num_programs(device: torch.device, programs_per_sm: int) -> int:
    """Return the number of programs that run at a time, on all multiprocessors."""
    if device.type != "cuda":
        return NUM_INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm


@triton.jit
def decode_mxfp4(codes_NW, exponent_NG, dtype: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return weights [N, K] for codes [N, K / 2] and exponents [N, K / 32]."""
    code_NK = tl.reshape(tl.join(codes_NW & 15, codes_NW >> 4), (BLOCK_N, BLOCK_K)).to(tl.int32)
    # Exponent and mantissa in the place of float32's are 2**-126 times the value, because the biases are 1 and 127.
    value_NK = ((code_NK & 7) << 22 | (code_NK & 8) << 28).to(tl.float32, bitcast=True) * 8.507059173023462e37
    bits_NG = exponent_NG.to(tl.int32) << 23
    power_NG = tl.where(exponent_NG == 0, 0x400000, bits_NG).to(tl.float32, bitcast=True)  # 2**-127 is subnormal
    power_NG1 = tl.reshape(power_NG, (BLOCK_N, BLOCK_K // 32, 1))
    weight_NG32 = tl.reshape(value_NK, (BLOCK_N, BLOCK_K // 32, 32)) * power_NG1
    return tl.reshape(weight_NG32, (BLOCK_N, BLOCK_K)).to(dtype)


@triton.jit(do_not_specialize=["num_experts", "num_slots", "divisor"])
def grouped_matmul_kernel(
    source_ptr,  # [S, I], rows source_stride elements apart; or [e * num_slots, I]
    source_scale_ptr,  # [S, B] float32, contiguous; only if HAS_SCALES
    weight_ptr,  # [e, O, I], contiguous; if IS_MXFP4, [e, O, I / 2] uint8
    weight_scale_ptr,  # [e, parts * G, B] float32, contiguous, if HAS_SCALES; [e, O, I / 32] uint8 if IS_MXFP4
    bias_ptr,  # [e, O], contiguous; only if HAS_BIAS
    counts_ptr,  # [e] int64 or int32
    indices_ptr,  # [R] int64; only if HAS_INDICES
    output_ptr,  # [R, C], contiguous
    source_stride,
    num_experts,
    num_columns,
    num_inputs,
    num_slots,  # slots of each expert; only if HAS_SLOTS
    divisor,  # row r is source row indices[r] // divisor
    alpha,
    limit,
    ACTIVATION: tl.constexpr,  # a value of ACTIVATIONS
    HAS_SCALES: tl.constexpr,
    IS_MXFP4: tl.constexpr,
    USES_DOT_SCALED: tl.constexpr,  # weights in MXFP4 are decoded by tl.dot_scaled; rows are bfloat16
    HAS_BIAS: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    HAS_WHOLE_STEPS: tl.constexpr,  # BLOCK_K divides the number of inputs
    INPUT_PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr,  # power of two, at least e
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    NUM_PARTS: tl.constexpr = 2 if ACTIVATION else 1
    BLOCK_C: tl.constexpr = BLOCK_N // NUM_PARTS
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0).to(tl.int64)
    num_n = tl.cdiv(num_columns, BLOCK_C)
    tiles_of_expert = (counts + BLOCK_M - 1) // BLOCK_M * num_n
    last_tiles = tl.cumsum(tiles_of_expert, 0)  # the number of each expert's last tile plus one
    num_tiles = tl.sum(tiles_of_expert, 0).to(tl.int32)

    places_n = tl.arange(0, BLOCK_N)
    if ACTIVATION:
        # One thread holds a gate and its up: they are neighbours in a row of the accumulator, or 8 rows apart.
        if IS_SWAPPED:
            part = places_n // 8 % 2
            places_c = places_n // 16 * 8 + places_n % 8
        else:
            part = places_n % 2
            places_c = places_n // 2
    else:
        part = places_n * 0
        places_c = places_n
    num_outputs = num_columns * NUM_PARTS
    steps_k = tl.arange(0, BLOCK_K)
    BLOCK_W: tl.constexpr = BLOCK_K // 2 if IS_MXFP4 else BLOCK_K
    if IS_MXFP4:
        steps_g = tl.arange(0, BLOCK_K // 32)
    steps_w = tl.arange(0, BLOCK_W)
    num_blocks_k = tl.cdiv(num_inputs, 128)
    num_blocks_c = tl.cdiv(num_columns, 128)

    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # Find the expert of the tile from the tiles before it.
        is_before = last_tiles <= tile
        expert = tl.sum(is_before.to(tl.int32), 0)
        tile_of_expert = tile - tl.sum(tl.where(is_before, tiles_of_expert, 0), 0).to(tl.int32)
        first_row = expert.to(tl.int64) * num_slots if HAS_SLOTS else tl.sum(tl.where(is_before, counts, 0), 0)
        count = tl.load(counts_ptr + expert).to(tl.int32)

        # GROUP_M tiles of rows share one part of the weight before the next part, so that it stays in the L2 cache.
        num_m = tl.cdiv(count, BLOCK_M)
        first_m = tile_of_expert // (GROUP_M * num_n) * GROUP_M
        place_in_group = tile_of_expert - first_m * num_n
        group_m = tl.minimum(num_m - first_m, GROUP_M)
        m = first_m + place_in_group % group_m
        n = place_in_group // group_m

        rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
        sources = first_row + tl.minimum(rows, count - 1)  # rows beyond the count repeat the last row
        if HAS_INDICES:
            sources = tl.load(indices_ptr + sources) // divisor
        columns = tl.minimum(n * BLOCK_C + places_c, num_columns - 1)
        outputs = part * num_columns + columns

        source_ptrs = source_ptr + sources[:, None] * source_stride + steps_k[None, :]
        weight_bytes = num_inputs // 2 if IS_MXFP4 else num_inputs  # elements of the tensor, for one output
        weight_of_expert = weight_ptr + expert.to(tl.int64) * num_outputs * weight_bytes
        weight_ptrs = weight_of_expert + outputs[:, None] * weight_bytes + steps_w[None, :]
        if IS_MXFP4:
            num_groups = num_inputs // 32
            exponents_of_expert = weight_scale_ptr + expert.to(tl.int64) * num_outputs * num_groups
            exponent_ptrs = exponents_of_expert + outputs[:, None] * num_groups + steps_g[None, :]
            next_NG = tl.load(exponent_ptrs, mask=steps_g[None, :] < num_groups, other=0)
        if HAS_SCALES:
            source_scale_ptrs = source_scale_ptr + sources * num_blocks_k
            scale_of_expert = weight_scale_ptr + expert.to(tl.int64) * NUM_PARTS * num_blocks_c * num_blocks_k
            gate_scale_ptr = scale_of_expert + n * BLOCK_C // 128 * num_blocks_k  # a tile is within one block
            up_scale_ptr = gate_scale_ptr + num_blocks_c * num_blocks_k

        if IS_SWAPPED:
            accumulator = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, num_inputs, BLOCK_K):
            if HAS_WHOLE_STEPS:
                source_MK = tl.load(source_ptrs)
                weight_NK = tl.load(weight_ptrs)
            else:
                is_input = steps_k[None, :] < num_inputs - k
                source_MK = tl.load(source_ptrs, mask=is_input, other=0.0)
                if IS_MXFP4:
                    weight_NK = tl.load(weight_ptrs, mask=steps_w[None, :] < (num_inputs - k) // 2, other=0)
                else:
                    weight_NK = tl.load(weight_ptrs, mask=is_input, other=0.0)
            if IS_MXFP4:
                # Exponents are too small for asynchronous copies: load those of the next step during this one.
                exponent_NG = next_NG
                exponent_ptrs += BLOCK_K // 32
                next_NG = tl.load(exponent_ptrs, mask=steps_g[None, :] < (num_inputs - k - BLOCK_K) // 32, other=0)
            if HAS_SCALES:
                # Load scales before the product, so that their latency overlaps with it.
                scale_M = tl.load(source_scale_ptrs + k // 128)
                gate_scale_M = scale_M * tl.load(gate_scale_ptr + k // 128)
                up_scale_M = scale_M * tl.load(up_scale_ptr + k // 128) if ACTIVATION else gate_scale_M
                if IS_SWAPPED:
                    product = tl.dot(weight_NK, tl.trans(source_MK))
                    scale = tl.where(part[:, None] == 0, gate_scale_M[None, :], up_scale_M[None, :])
                else:
                    product = tl.dot(source_MK, tl.trans(weight_NK))
                    scale = tl.where(part[None, :] == 0, gate_scale_M[:, None], up_scale_M[:, None])
                accumulator += product * scale
            elif USES_DOT_SCALED:
                # Weights are decoded in registers and become the left operand of the tensor cores.
                codes_WN = tl.trans(weight_NK)
                accumulator = tl.dot_scaled(
                    source_MK, None, "bf16", codes_WN, exponent_NG, "e2m1", accumulator, fast_math=True
                )
            else:
                if IS_MXFP4:
                    weight_NK = decode_mxfp4(weight_NK, exponent_NG, source_MK.dtype, BLOCK_N, BLOCK_K)
                if IS_SWAPPED:
                    accumulator = tl.dot(weight_NK, tl.trans(source_MK), accumulator, input_precision=INPUT_PRECISION)
                else:
                    accumulator = tl.dot(source_MK, tl.trans(weight_NK), accumulator, input_precision=INPUT_PRECISION)
            source_ptrs += BLOCK_K
            weight_ptrs += BLOCK_W

        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * num_outputs + outputs).to(tl.float32)
            accumulator += bias[:, None] if IS_SWAPPED else bias[None, :]
        if ACTIVATION:
            if IS_SWAPPED:
                pairs = tl.reshape(accumulator, (BLOCK_N // 16, 2, 8, BLOCK_M))
                gate, up = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
                gate = tl.reshape(gate, (BLOCK_C, BLOCK_M))
                up = tl.reshape(up, (BLOCK_C, BLOCK_M))
            else:
                gate, up = tl.split(tl.reshape(accumulator, (BLOCK_M, BLOCK_C, 2)))
            if ACTIVATION == 1:
                result = gate / (1 + tl.exp(-gate)) * up
            else:
                gate = tl.minimum(gate, limit)
                up = tl.minimum(tl.maximum(up, -limit), limit)
                result = gate / (1 + tl.exp(-alpha * gate)) * (up + 1)
        else:
            result = accumulator
        result = result.to(output_ptr.dtype.element_ty)
        result_MC = tl.trans(result) if IS_SWAPPED else result
        out_columns = n * BLOCK_C + tl.arange(0, BLOCK_C)
        output_ptrs = output_ptr + (first_row + rows)[:, None] * num_columns + out_columns[None, :]
        tl.store(output_ptrs, result_MC, mask=(rows < count)[:, None] & (out_columns < num_columns)[None, :])
