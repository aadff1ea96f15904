"""Rows times the weights of their experts, on a GPU: one persistent kernel for all numbers of rows.

Rows are sorted by expert. How many each expert has, only the GPU knows: each program reads the counts, finds from them
which tiles there are, and computes every so many-th. No tile is made for an expert without rows.
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

# S source rows, R rows, e weights side by side, O outputs, I inputs, C columns: the outputs, or half as many after an
# activation, to which the first half are gates and the second are ups, B blocks of 128 inputs, G blocks of 128 outputs,
# M rows of a tile, N weight rows of a tile

Activation = Literal["swiglu", "clamped_swiglu"]
ACTIVATIONS = {None: 0, "swiglu": 1, "clamped_swiglu": 2}
NUM_INTERPRETED_PROGRAMS = 3  # on a CPU: more than one, and each with several tiles


def grouped_matmul(
    rows_SI: Tensor,
    weight_eOI: Tensor,
    counts_e: Tensor,
    *,
    indices_R: Tensor | None = None,
    divisor: int = 1,
    bias_eO: Tensor | None = None,
    activation: Activation | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    expected_rows: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """activation(row @ weight.T + bias), each row with the weight of its expert.

    In float32 from the product to the activation's result, which is rounded once. A result's bytes depend on its row
    and its weight alone, not on the rows beside it.

    Memory moved: each weight that has rows once, O * I values (again for every 32 tiles of its rows); I values of each
    row, from the L2 cache for every tile of outputs; R * C results. Operations: 2 * R * O * I.

    Args:
        rows_SI: [S, I], bfloat16, float16 or float32; rows may be strided. Sorted by expert: the first counts_e[0] rows
            have weight 0, and so on. Spare rows may follow, of which nothing is read or written.
        weight_eOI: [e, O, I], same dtype, contiguous. With an activation, the first half of O are gates, the other ups.
        counts_e: [e] int64 or int32, contiguous.
        indices_R: [R] int64: if given, row r is rows_SI[indices_R[r] // divisor], and R rows are sorted instead.
        bias_eO: [e, O].
        activation: "swiglu": silu(gate) * up. "clamped_swiglu": gate * sigmoid(alpha * gate) * (up + 1), with gate at
            most `limit` and up within it on both sides.
        expected_rows: about how many count, where most are spare; None: all. Changes how the work is cut, no result.
        config: how the work is cut; None: the best known for these shapes.

    Returns:
        [R, C] in the dtype of rows_SI. Rows after the last that counts are not written.
    """
    assert weight_eOI.dtype == rows_SI.dtype, f"weights in {weight_eOI.dtype}, rows in {rows_SI.dtype}"
    num_rows = rows_SI.shape[0] if indices_R is None else indices_R.shape[0]
    columns = num_columns(weight_eOI, activation)
    output_RC = torch.empty(num_rows, columns, dtype=rows_SI.dtype, device=rows_SI.device)
    rows_SI = rows_SI if rows_SI.stride(1) == 1 else rows_SI.contiguous()
    operands = Operands(rows_SI, None, weight_eOI, None, counts_e, indices_R, divisor, bias_eO)
    _launch(operands, output_RC, None, activation, alpha, limit, expected_rows, config)
    return output_RC


def grouped_matmul_fp8(
    rows_SI: Tensor,
    row_scale_SB: Tensor,
    weight_eOI: Tensor,
    weight_scale_eGB: Tensor,
    counts_e: Tensor,
    *,
    indices_R: Tensor | None = None,
    divisor: int = 1,
    bias_eO: Tensor | None = None,
    activation: Activation | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    out_dtype: torch.dtype = torch.bfloat16,
    expected_rows: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """`grouped_matmul` of float8_e4m3fn blocks, in DeepSeek-V3's format: a block's values times its scale.

    Products of 128 inputs are added by the tensor cores, then times both scales to a float32 sum.

    Memory moved: half of what bfloat16 takes, and scales: 4 bytes for each 128 values of rows and 16384 of weights.

    Args:
        rows_SI: [S, I] float8_e4m3fn.
        row_scale_SB: [S, ceil(I / 128)] float32: of each row's blocks of 128 values.
        weight_eOI: [e, O, I] float8_e4m3fn.
        weight_scale_eGB: [e, G, ceil(I / 128)] float32, a checkpoint's `weight_scale_inv`: of blocks of 128 x 128. G is
            ceil(O / 128), or with an activation ceil(C / 128) for gates and as many for ups.
        out_dtype: of the results.
        and the rest as `grouped_matmul`.
    """
    num_rows = rows_SI.shape[0] if indices_R is None else indices_R.shape[0]
    columns = num_columns(weight_eOI, activation)
    output_RC = torch.empty(num_rows, columns, dtype=out_dtype, device=rows_SI.device)
    rows_SI = rows_SI if rows_SI.stride(1) == 1 else rows_SI.contiguous()
    operands = Operands(
        rows_SI, row_scale_SB.contiguous(), weight_eOI, weight_scale_eGB, counts_e, indices_R, divisor, bias_eO
    )
    _launch(operands, output_RC, None, activation, alpha, limit, expected_rows, config)
    return output_RC


def grouped_matmul_slots(
    slots_eSI: Tensor,
    weight_eOI: Tensor,
    counts_e: Tensor,
    *,
    bias_eO: Tensor | None = None,
    activation: Activation | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    expected_rows: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """`grouped_matmul` of as many slots for each expert, of which the first counts_e[i] hold rows: [e, S, C].

    The others are neither read nor written.

    Args:
        slots_eSI: [e, S, I], contiguous.
        expected_rows: about how many slots hold rows. Worth saying: slots have room for the worst case.
        and the rest as `grouped_matmul`.
    """
    assert weight_eOI.dtype == slots_eSI.dtype, f"weights in {weight_eOI.dtype}, rows in {slots_eSI.dtype}"
    return _multiply_slots(
        slots_eSI,
        None,
        weight_eOI,
        None,
        counts_e,
        bias_eO,
        activation,
        alpha,
        limit,
        slots_eSI.dtype,
        expected_rows,
        config,
    )


def grouped_matmul_slots_fp8(
    slots_eSI: Tensor,
    slot_scale_eSB: Tensor,
    weight_eOI: Tensor,
    weight_scale_eGB: Tensor,
    counts_e: Tensor,
    *,
    bias_eO: Tensor | None = None,
    activation: Activation | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    out_dtype: torch.dtype = torch.bfloat16,
    expected_rows: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """`grouped_matmul_slots` of blocks with scales, as `grouped_matmul_fp8`.

    Args:
        slot_scale_eSB: [e, S, ceil(I / 128)] float32. Copied if it is not contiguous, as DeepEP's is not.
    """
    return _multiply_slots(
        slots_eSI,
        slot_scale_eSB,
        weight_eOI,
        weight_scale_eGB,
        counts_e,
        bias_eO,
        activation,
        alpha,
        limit,
        out_dtype,
        expected_rows,
        config,
    )


def _multiply_slots(
    slots_eSI: Tensor,
    slot_scale_eSB: Tensor | None,
    weight_eOI: Tensor,
    weight_scale_eGB: Tensor | None,
    counts_e: Tensor,
    bias_eO: Tensor | None,
    activation: Activation | None,
    alpha: float,
    limit: float,
    out_dtype: torch.dtype,
    expected_rows: int | None,
    config: Config | None,
) -> Tensor:
    assert slots_eSI.is_contiguous(), "slots that are not contiguous"
    num_experts, num_slots, _ = slots_eSI.shape
    columns = num_columns(weight_eOI, activation)
    output_eSC = torch.empty(num_experts, num_slots, columns, dtype=out_dtype, device=slots_eSI.device)
    scale = None if slot_scale_eSB is None else slot_scale_eSB.flatten(0, 1).contiguous()
    operands = Operands(slots_eSI.flatten(0, 1), scale, weight_eOI, weight_scale_eGB, counts_e, None, 1, bias_eO)
    _launch(operands, output_eSC, num_slots, activation, alpha, limit, expected_rows, config)
    return output_eSC


@dataclass(frozen=True)
class Operands:
    """What a launch multiplies: see the functions above."""

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
    num_experts, num_outputs, num_inputs = weight_eOI.shape
    columns = output.shape[-1]
    num_rows = output.numel() // max(columns, 1)
    assert source_SI.shape[1] == num_inputs, f"rows of {source_SI.shape[1]} for weights of {num_inputs}"
    assert operands.counts_e.shape == (num_experts,), f"{tuple(operands.counts_e.shape)} counts, {num_experts} weights"
    assert operands.counts_e.is_contiguous(), "counts that are not contiguous"
    assert weight_eOI.is_contiguous(), "weights that are not contiguous"
    assert num_outputs * num_inputs < 2**31, f"a weight of {num_outputs} x {num_inputs}"  # offsets in one are 32 bits
    assert num_rows < 2**31, f"{num_rows} rows"
    assert indices_R is None or indices_R.is_contiguous(), "indices that are not contiguous"
    assert operands.bias_eO is None or operands.bias_eO.is_contiguous(), "biases that are not contiguous"
    if num_rows == 0 or num_experts == 0 or columns == 0:
        return
    if operands.weight_scale_eGB is not None:
        _check_scales(operands, columns)

    if config is None:
        problem = Problem(
            kind=kind_of(source_SI.dtype),
            is_gated=activation is not None,
            num_experts=num_experts,
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            num_rows=num_rows if expected_rows is None else expected_rows,
        )
        config = choose_config(problem, _device_name(source_SI.device))
    num_tiles = max_tiles(num_rows, num_experts, columns, activation, config)
    grouped_matmul_kernel[(min(num_tiles, _num_programs(source_SI.device, config.programs_per_sm)),)](
        source_SI,
        operands.source_scale_SB,
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


def num_columns(weight_eOI: Tensor, activation: Activation | None) -> int:
    return weight_eOI.shape[1] // (1 if activation is None else 2)


def kind_of(dtype: torch.dtype) -> Kind:
    """Of a product whose operands are of a dtype."""
    if dtype == torch.float8_e4m3fn:
        return "fp8"
    return "fp32" if dtype == torch.float32 else "bf16"


def max_tiles(num_rows: int, num_experts: int, columns: int, activation: Activation | None, config: Config) -> int:
    """Upper bound of the tiles: each expert's last one may hold a single row."""
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
) -> dict[str, Any]:
    """What the kernel is compiled for, beside the types of its arguments."""
    has_scales = dtype == torch.float8_e4m3fn
    if has_scales:
        # A step has the products of one block: with others, sums would be rounded elsewhere. A tile's gates or ups have
        # one scale of the weight.
        assert config.block_k == FP8_BLOCK, config
        assert FP8_BLOCK % (config.block_n // (1 if activation is None else 2)) == 0, config
    assert config.block_n >= (64 if config.is_swapped else 16), config  # the tensor cores' left operand
    return {
        "ACTIVATION": ACTIVATIONS[activation],
        "HAS_SCALES": has_scales,
        "HAS_BIAS": has_bias,
        "HAS_INDICES": has_indices,
        "HAS_SLOTS": has_slots,
        "IS_SWAPPED": config.is_swapped,
        "HAS_WHOLE_STEPS": num_inputs % config.block_k == 0,
        "INPUT_PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
    }


def compile_options(config: Config) -> dict[str, Any]:
    """How the kernel is compiled."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


@functools.cache
def _num_programs(device: torch.device, programs_per_sm: int) -> int:
    """As many as run at a time: each computes every so many-th tile."""
    if device.type != "cuda":
        return NUM_INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count * programs_per_sm


@triton.jit(do_not_specialize=["num_experts", "num_slots", "divisor"])
def grouped_matmul_kernel(
    source_ptr,  # [S, I], rows source_stride elements apart; or [e * num_slots, I]
    source_scale_ptr,  # [S, B] float32, contiguous; only if HAS_SCALES
    weight_ptr,  # [e, O, I], contiguous
    weight_scale_ptr,  # [e, parts * G, B] float32, contiguous; only if HAS_SCALES
    bias_ptr,  # [e, O], contiguous; only if HAS_BIAS
    counts_ptr,  # [e] int64 or int32
    indices_ptr,  # [R] int64; only if HAS_INDICES
    output_ptr,  # [R, C], contiguous
    source_stride,
    num_experts,
    num_columns,
    num_inputs,
    num_slots,  # of each expert; only if HAS_SLOTS
    divisor,  # of indices
    alpha,
    limit,
    ACTIVATION: tl.constexpr,  # a value of ACTIVATIONS
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    HAS_WHOLE_STEPS: tl.constexpr,  # whether BLOCK_K divides the inputs
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
    last_tiles = tl.cumsum(tiles_of_expert, 0)  # the number of each expert's last tile, plus one
    num_tiles = tl.sum(tiles_of_expert, 0).to(tl.int32)

    places_n = tl.arange(0, BLOCK_N)
    if ACTIVATION:
        # A gate and its up are held by one thread: neighbours along a row of the accumulator, or 8 rows apart.
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
    num_blocks_k = tl.cdiv(num_inputs, 128)
    num_blocks_c = tl.cdiv(num_columns, 128)

    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # Which expert's, by what is before it.
        is_before = last_tiles <= tile
        expert = tl.sum(is_before.to(tl.int32), 0)
        tile_of_expert = tile - tl.sum(tl.where(is_before, tiles_of_expert, 0), 0).to(tl.int32)
        first_row = expert.to(tl.int64) * num_slots if HAS_SLOTS else tl.sum(tl.where(is_before, counts, 0), 0)
        count = tl.load(counts_ptr + expert).to(tl.int32)

        # Tiles of one part of the weight run together, for a group of tiles of rows at a time.
        num_m = tl.cdiv(count, BLOCK_M)
        first_m = tile_of_expert // (GROUP_M * num_n) * GROUP_M
        place_in_group = tile_of_expert - first_m * num_n
        group_m = tl.minimum(num_m - first_m, GROUP_M)
        m = first_m + place_in_group % group_m
        n = place_in_group // group_m

        rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
        sources = first_row + tl.minimum(rows, count - 1)  # a row too many is the last one again
        if HAS_INDICES:
            sources = tl.load(indices_ptr + sources) // divisor
        columns = tl.minimum(n * BLOCK_C + places_c, num_columns - 1)
        outputs = part * num_columns + columns

        source_ptrs = source_ptr + sources[:, None] * source_stride + steps_k[None, :]
        weight_of_expert = weight_ptr + expert.to(tl.int64) * num_outputs * num_inputs
        weight_ptrs = weight_of_expert + outputs[:, None] * num_inputs + steps_k[None, :]
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
                weight_NK = tl.load(weight_ptrs, mask=is_input, other=0.0)
            if HAS_SCALES:
                # Loaded before the product, so that they come while it is computed.
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
            else:
                if IS_SWAPPED:
                    accumulator = tl.dot(weight_NK, tl.trans(source_MK), accumulator, input_precision=INPUT_PRECISION)
                else:
                    accumulator = tl.dot(source_MK, tl.trans(weight_NK), accumulator, input_precision=INPUT_PRECISION)
            source_ptrs += BLOCK_K
            weight_ptrs += BLOCK_K

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
