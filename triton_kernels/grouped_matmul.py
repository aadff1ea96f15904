"""Grouped matrix products on a GPU: rows times the weights of their experts, in one persistent kernel.

Rows are sorted by expert. Only the GPU knows how many rows each expert has: every program reads the counts, derives
the tiles from them, and computes every n-th tile. Experts without rows have no tiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.triton_kernels.activation import ACTIVATIONS, UNGATED, Activation, num_parts_of, squared_relu
from moeserve.triton_kernels.arrivals import is_last_to_arrive
from moeserve.triton_kernels.device import device_name, is_interpreted, num_programs
from moeserve.triton_kernels.fp8 import quantize_blocks, scale_blocks
from moeserve.triton_kernels.sizes import ceil_div, next_power_of_2
from moeserve.triton_kernels.tuning import FP8_BLOCK, Config, Kind, Problem, choose_config

# S source rows, R rows, e experts, O outputs, I inputs, C columns of a result, B blocks of 128 inputs, G blocks of 128
# outputs, M rows of a tile, N weight rows of a tile. C is O, or O / 2 with a gated activation: the first half of the
# outputs are gates, the second half are ups. F blocks of 128 columns.

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
NUM_ARRIVALS = 264  # programs that may share the tiles of one weight: two for each multiprocessor


def grouped_matmul(
    rows_SI: Tensor,
    weight_eOI: Tensor,
    counts_e: Tensor | None,
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
    out_scale_RF: Tensor | None = None,
    arrivals: Tensor | None = None,
    expected_rows: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """Compute activation(row @ weight.T + bias), each row with the weight of its expert.

    Products, sums and activations are float32; results are rounded once. A result depends on its row and its weight
    alone, bit for bit, not on the other rows. Only with `arrivals` its last bits may also depend on the number of rows.

    With scales, rows and weights are float8_e4m3fn in DeepSeek-V3's format (arXiv 2412.19437). The tensor cores add the
    products of 128 inputs; their sum is multiplied by both scales and added to a float32 accumulator.

    Memory moved: each weight that has rows once, O * I values (again for every 32 tiles of its rows); I values of each
    row, from the L2 cache for every tile of outputs; R * C results; 4 bytes for each 128 values of rows and each 16384
    of weights with scales. Operations: 2 * R * O * I.

    Args:
        rows_SI: [S, I] bfloat16, float16, float32 or, with scales, float8_e4m3fn; rows may be strided. Sorted by
            expert: the first counts_e[0] rows have weight 0, and so on. Unused rows may follow; they are not read.
        weight_eOI: [e, O, I], same dtype, contiguous. With a gated activation, the first half of O are gates, the
            other ups. Or in MXFP4: codes [e, O, I / 2] uint8 as a checkpoint stores them; tensor cores multiply them as
            bfloat16.
        counts_e: [e] int64 or int32, contiguous. None: there is one weight, for all rows.
        row_scale_SB: [S, ceil(I / 128)] float32, one scale for each 128 values of a row; any strides.
        weight_scale_eGB: [e, G, ceil(I / 128)] float32, one scale for each 128 x 128 values (`weight_scale_inv` of a
            checkpoint). G is ceil(O / 128), or ceil(C / 128) for gates and as many for ups. Of weights in MXFP4: the
            exponents [e, O, I / 32] uint8, contiguous; those of 0 may count as scales of zero.
        indices_R: [R] int64: row r is rows_SI[indices_R[r] // divisor]; these R rows are sorted instead.
        bias_eO: [e, O].
        activation: "swiglu": silu(gate) * up. "clamped_swiglu": gate * sigmoid(alpha * gate) * (up + 1), with gate
            clamped to at most `limit` and up to ± `limit`. See `activate` for all.
        out_dtype: dtype of the results; default: that of the rows, or bfloat16 with scales.
        out_scale_RF: [R, ceil(C / 128)] float32. If given, results are rounded to `out_dtype` and then quantised as by
            `quantize_blocks`; their scales are written here, and their codes returned.
        arrivals: [NUM_ARRIVALS] int32, zeros, and zeros again afterwards; without counts. Programs may then share the
            inputs of a tile of few rows: each adds a part of them, and the last one to arrive adds the sums in a fixed
            order. Launches that may run at the same time must not share this memory.
        expected_rows: approximate number of used rows, if many are unused. Affects the tiles, not the results.
        config: the tiles; default: the best known for these shapes.

    Returns:
        [R, C]; rows beyond the last used row are not written.
    """
    return _launch(
        rows_SI if rows_SI.stride(1) == 1 else rows_SI.contiguous(),
        None if row_scale_SB is None else row_scale_SB[None],
        weight_eOI,
        weight_scale_eGB,
        counts_e,
        indices_R,
        divisor,
        bias_eO,
        activation,
        alpha,
        limit,
        arrivals,
        None,
        out_dtype,
        out_scale_RF,
        expected_rows,
        config,
    )


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
    out_scale_eSF: Tensor | None = None,
    expected_rows: int | None = None,
    config: Config | None = None,
) -> Tensor:
    """Compute `grouped_matmul` for experts that have S slots each, of which the first counts_e[i] hold rows.

    Other slots are neither read nor written.

    Args:
        slots_eSI: [e, S, I], contiguous.
        slot_scale_eSB: [e, S, ceil(I / 128)] float32; any strides, since DeepEP's are not contiguous.
        out_scale_eSF: [e, S, ceil(C / 128)], contiguous; see `out_scale_RF`.
        expected_rows: approximate number of slots in use. Slots have room for the worst case, so this matters.
        Other arguments: see `grouped_matmul`.

    Returns:
        [e, S, C]
    """
    num_experts, num_slots, _ = slots_eSI.shape
    output_RC = _launch(
        slots_eSI.flatten(0, 1),
        slot_scale_eSB,
        weight_eOI,
        weight_scale_eGB,
        counts_e,
        None,
        1,
        bias_eO,
        activation,
        alpha,
        limit,
        None,
        num_slots,
        out_dtype,
        None if out_scale_eSF is None else out_scale_eSF.flatten(0, 1),
        expected_rows,
        config,
    )
    return output_RC.view(num_experts, num_slots, output_RC.shape[1])


def check_weights(
    weight_eOI: Tensor, weight_scale_eGB: Tensor | None, bias_eO: Tensor | None, num_parts: int = 1
) -> None:
    """Check weights as `grouped_matmul` describes them. Launches do not check them again.

    Args:
        num_parts: 2 if the weights are gates and ups.
    """
    num_experts, num_outputs, num_stored = weight_eOI.shape
    assert weight_eOI.is_contiguous(), "weights that are not contiguous"
    assert bias_eO is None or bias_eO.is_contiguous(), "biases that are not contiguous"
    assert (weight_scale_eGB is None) == (weight_eOI.dtype in TYPES), f"weights in {weight_eOI.dtype}: wrong scales"
    if weight_scale_eGB is None:
        return
    expected = (num_experts, num_outputs, num_stored // 16)
    if weight_eOI.dtype != torch.uint8:
        num_blocks = ceil_div(num_outputs // num_parts, FP8_BLOCK)
        expected = (num_experts, num_parts * num_blocks, ceil_div(num_stored, FP8_BLOCK))
    assert weight_scale_eGB.shape == expected, (tuple(weight_scale_eGB.shape), expected)
    assert weight_scale_eGB.is_contiguous(), "scales that are not contiguous"


def _launch(
    source_SI: Tensor,
    source_scale_eSB: Tensor | None,  # [1, S, B] without slots
    weight_eOI: Tensor,
    weight_scale_eGB: Tensor | None,
    counts_e: Tensor | None,
    indices_R: Tensor | None,
    divisor: int,
    bias_eO: Tensor | None,
    activation: Activation | None,
    alpha: float,
    limit: float,
    arrivals: Tensor | None,
    num_slots: int | None,
    out_dtype: torch.dtype | None,
    out_scale_RF: Tensor | None,
    expected_rows: int | None,
    config: Config | None,
) -> Tensor:
    num_experts, num_outputs, num_stored = weight_eOI.shape
    dtype, device = source_SI.dtype, source_SI.device
    num_rows = source_SI.shape[0] if indices_R is None else indices_R.shape[0]
    plan = plan_launch(
        dtype,
        device,
        activation,
        num_experts,
        num_outputs,
        num_stored,
        num_rows,
        expected_rows,
        weight_eOI.dtype,
        arrivals is not None,
        bias_eO is not None,
        indices_R is not None,
        num_slots is not None,
        out_scale_RF is not None,
        out_dtype,
        config,
    )
    output_RC = torch.empty(num_rows, plan.num_columns, dtype=plan.out_dtype, device=device)
    if output_RC.numel() == 0 or num_experts == 0:
        return output_RC if out_scale_RF is None else output_RC.to(torch.float8_e4m3fn)
    partial = torch.empty(plan.num_partial, dtype=torch.float32, device=device) if plan.num_partial else None
    grouped_matmul_kernel[plan.grid](
        source_SI,
        source_scale_eSB,
        weight_eOI,
        weight_scale_eGB,
        bias_eO,
        counts_e,
        indices_R,
        output_RC,
        out_scale_RF if plan.quantizes else None,
        partial,
        None if partial is None else arrivals,
        source_SI.stride(0),
        *((0, 0, 0) if source_scale_eSB is None else source_scale_eSB.stride()),
        num_rows,
        num_experts,
        plan.num_columns,
        plan.num_inputs,
        num_slots or 0,
        divisor,
        alpha,
        limit,
        **plan.options,
    )
    if out_scale_RF is None or plan.quantizes:
        return output_RC
    return quantize_blocks(output_RC, counts_e=counts_e, num_slots=num_slots, out_scale_TB=out_scale_RF)[0]


@dataclass(frozen=True)
class Plan:
    """The decisions of the host about a launch, which follow from shapes alone."""

    grid: tuple[int]
    num_columns: int
    num_inputs: int
    num_partial: int  # float32 numbers that programs share; 0: none
    quantizes: bool  # the kernel also quantises its results
    out_dtype: torch.dtype
    options: dict[str, Any]  # compile-time arguments and options


@functools.lru_cache(maxsize=1024)  # the layers of a step have a few plans; the next step may have others
def plan_launch(
    dtype: torch.dtype,
    device: torch.device,
    activation: Activation | None,
    num_experts: int,
    num_outputs: int,
    num_stored: int,
    num_rows: int,
    expected_rows: int | None,
    weight_dtype: torch.dtype,
    can_split: bool,
    has_bias: bool,
    has_indices: bool,
    has_slots: bool,
    has_out_scale: bool,
    out_dtype: torch.dtype | None,
    config: Config | None,
) -> Plan:
    """Return the plan of a launch with such operands; see `grouped_matmul`.

    Args:
        dtype: dtype of the rows.
        num_stored: columns of the stored weights: the inputs, or half as many in MXFP4.
        num_rows: rows for which there is memory.
        out_dtype, config: None: the default.
    """
    is_mxfp4 = weight_dtype == torch.uint8
    num_inputs = num_stored * (2 if is_mxfp4 else 1)
    assert is_mxfp4 or weight_dtype == dtype, f"weights in {weight_dtype}, rows in {dtype}"
    assert num_outputs * num_inputs < 2**31, f"a weight of {num_outputs} x {num_inputs}"  # its offsets are 32 bits
    assert num_rows < 2**31, f"{num_rows} rows"
    if out_dtype is None:
        out_dtype = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    if config is None:
        problem = Problem(
            kind="mxfp4" if is_mxfp4 else _kind_of(dtype),
            is_gated=num_parts_of(activation) > 1,
            num_experts=num_experts,
            num_outputs=num_outputs,
            num_inputs=num_inputs,
            num_rows=num_rows if expected_rows is None else expected_rows,
            can_split=can_split,
        )
        config = choose_config(problem, device_name(device))
    num_columns = num_outputs // num_parts_of(activation)
    num_tiles = max_tiles(num_rows, num_experts, num_columns, activation, config)
    assert config.num_splits == 1 or (can_split and num_tiles <= NUM_ARRIVALS), (num_tiles, config)
    # The tiles of many rows are too narrow for a block of results, which are then quantised from memory.
    quantizes = has_out_scale and block_columns(config, activation) == FP8_BLOCK
    constants = kernel_constants(
        config,
        dtype,
        num_experts,
        num_inputs,
        activation,
        has_bias=has_bias,
        has_indices=has_indices,
        has_slots=has_slots,
        is_mxfp4=is_mxfp4,
        is_interpreted=is_interpreted(),
    )
    return Plan(
        grid=(min(num_tiles * config.num_splits, num_programs(device, config.programs_per_sm)),),
        num_columns=num_columns,
        num_inputs=num_inputs,
        num_partial=0 if config.num_splits == 1 else num_tiles * config.num_splits * config.block_m * config.block_n,
        quantizes=quantizes,
        out_dtype=torch.float8_e4m3fn if quantizes else out_dtype,
        options={"ROUNDED": TYPES[out_dtype], **constants, **compile_options(config)},
    )


def _kind_of(dtype: torch.dtype) -> Kind:
    """Return the kind of a product whose operands have this dtype."""
    if dtype == torch.float8_e4m3fn:
        return "fp8"
    return "fp32" if dtype == torch.float32 else "bf16"


def max_tiles(num_rows: int, num_experts: int, columns: int, activation: Activation | None, config: Config) -> int:
    """Return an upper bound of the number of tiles: the last tile of each expert may hold a single row."""
    tiles_m = min(num_rows, (num_rows + num_experts * (config.block_m - 1)) // config.block_m)
    return tiles_m * ceil_div(columns, block_columns(config, activation))


def block_columns(config: Config, activation: Activation | None) -> int:
    """Return the columns of the results of a tile."""
    return config.block_n // num_parts_of(activation)


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
        assert FP8_BLOCK % block_columns(config, activation) == 0, config
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
        "BLOCK_E": next_power_of_2(num_experts),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "NUM_SPLITS": config.num_splits,
    }


def compile_options(config: Config) -> dict[str, Any]:
    """Return the options that the kernel is compiled with."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


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


@triton.jit(do_not_specialize=["num_rows", "num_experts", "num_slots", "divisor"])
def grouped_matmul_kernel(
    source_ptr,  # [S, I], rows source_stride elements apart; or [e * num_slots, I]
    source_scale_ptr,  # [S, B] float32, or [e, num_slots, B]; only if HAS_SCALES
    weight_ptr,  # [e, O, I], contiguous; if IS_MXFP4, [e, O, I / 2] uint8
    weight_scale_ptr,  # [e, parts * G, B] float32, contiguous, if HAS_SCALES; [e, O, I / 32] uint8 if IS_MXFP4
    bias_ptr,  # [e, O], contiguous; only if HAS_BIAS
    counts_ptr,  # [e] int64 or int32; None: one weight, all rows
    indices_ptr,  # [R] int64; only if HAS_INDICES
    output_ptr,  # [R, C], contiguous
    output_scale_ptr,  # [R, F] float32, contiguous, of results that are quantised; otherwise None
    partial_ptr,  # sums of parts of the inputs, float32, of each tile and split; only if NUM_SPLITS > 1
    arrivals_ptr,  # int32 for each tile; only if NUM_SPLITS > 1
    source_stride,
    scale_expert_stride,
    scale_row_stride,
    scale_block_stride,
    num_rows,  # only without counts
    num_experts,
    num_columns,
    num_inputs,
    num_slots,  # slots of each expert; only if HAS_SLOTS
    divisor,  # row r is source row indices[r] // divisor
    alpha,
    limit,
    ROUNDED: tl.constexpr,  # type of the results before they are quantised
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
    NUM_SPLITS: tl.constexpr,  # programs that share the inputs of a tile
):
    IS_GATED: tl.constexpr = ACTIVATION > 0 and ACTIVATION < UNGATED
    NUM_PARTS: tl.constexpr = 2 if IS_GATED else 1
    BLOCK_C: tl.constexpr = BLOCK_N // NUM_PARTS
    experts = tl.arange(0, BLOCK_E)
    if counts_ptr is None:
        counts = experts.to(tl.int64) + num_rows  # of expert 0
    else:
        counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0).to(tl.int64)
    num_n = tl.cdiv(num_columns, BLOCK_C)
    tiles_of_expert = (counts + BLOCK_M - 1) // BLOCK_M * num_n
    last_tiles = tl.cumsum(tiles_of_expert, 0)  # the number of each expert's last tile plus one
    num_tiles = tl.sum(tiles_of_expert, 0).to(tl.int32)

    places_n = tl.arange(0, BLOCK_N)
    if IS_GATED:
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

    for unit in tl.range(tl.program_id(0), num_tiles * NUM_SPLITS, tl.num_programs(0)):
        tile = unit // NUM_SPLITS
        # Find the expert of the tile from the tiles before it.
        is_before = last_tiles <= tile
        expert = tl.sum(is_before.to(tl.int32), 0)
        tile_of_expert = tile - tl.sum(tl.where(is_before, tiles_of_expert, 0), 0).to(tl.int32)
        first_row = expert.to(tl.int64) * num_slots if HAS_SLOTS else tl.sum(tl.where(is_before, counts, 0), 0)
        count = num_rows if counts_ptr is None else tl.load(counts_ptr + expert).to(tl.int32)

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
            source_scale_ptrs = source_scale_ptr + sources * scale_row_stride
            if HAS_SLOTS:
                source_scale_ptrs += expert.to(tl.int64) * scale_expert_stride - first_row * scale_row_stride
            scale_of_expert = weight_scale_ptr + expert.to(tl.int64) * NUM_PARTS * num_blocks_c * num_blocks_k
            gate_scale_ptr = scale_of_expert + n * BLOCK_C // 128 * num_blocks_k  # a tile is within one block
            up_scale_ptr = gate_scale_ptr + num_blocks_c * num_blocks_k

        if IS_SWAPPED:
            accumulator = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        first_k, end_k = 0, num_inputs
        if NUM_SPLITS > 1:
            inputs_of_split = tl.cdiv(tl.cdiv(num_inputs, BLOCK_K), NUM_SPLITS) * BLOCK_K
            first_k = unit % NUM_SPLITS * inputs_of_split
            end_k = tl.minimum(first_k + inputs_of_split, num_inputs)
            source_ptrs += first_k
            weight_ptrs += first_k
        for k in range(first_k, end_k, BLOCK_K):
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
                scale_M = tl.load(source_scale_ptrs + k // 128 * scale_block_stride)
                gate_scale_M = scale_M * tl.load(gate_scale_ptr + k // 128)
                up_scale_M = scale_M * tl.load(up_scale_ptr + k // 128) if IS_GATED else gate_scale_M
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

        if NUM_SPLITS > 1:
            SIZE: tl.constexpr = BLOCK_M * BLOCK_N
            if IS_SWAPPED:
                places = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
            else:
                places = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(partial_ptr + unit * SIZE + places, accumulator)
            is_last = is_last_to_arrive(arrivals_ptr + tile, NUM_SPLITS)
            count = tl.where(is_last, count, 0)  # the others store no results
            accumulator = tl.zeros_like(accumulator)
            for split in range(0, tl.where(is_last, NUM_SPLITS, 0)):
                part_ptr = partial_ptr + (tile * NUM_SPLITS + split) * SIZE
                accumulator += tl.load(part_ptr + places, cache_modifier=".cg")
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * num_outputs + outputs).to(tl.float32)
            accumulator += bias[:, None] if IS_SWAPPED else bias[None, :]
        if IS_GATED:
            if IS_SWAPPED:
                pairs = tl.reshape(accumulator, (BLOCK_N // 16, 2, 8, BLOCK_M))
                gate, up = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
                gate = tl.reshape(gate, (BLOCK_C, BLOCK_M))
                up = tl.reshape(up, (BLOCK_C, BLOCK_M))
            else:
                gate, up = tl.split(tl.reshape(accumulator, (BLOCK_M, BLOCK_C, 2)))
            if ACTIVATION == 1:
                result = gate / (1 + tl.exp(-gate)) * up
            elif ACTIVATION == 3:
                up = tl.minimum(tl.maximum(up, -limit), limit)
                result = tl.minimum(gate / (1 + tl.exp(-gate)), limit) * up
            elif ACTIVATION == 4:
                gate = tl.minimum(gate, limit)
                result = gate / (1 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)
            else:
                gate = tl.minimum(gate, limit)
                up = tl.minimum(tl.maximum(up, -limit), limit)
                result = gate / (1 + tl.exp(-alpha * gate)) * (up + 1)
        elif ACTIVATION:
            result = squared_relu(accumulator)
        else:
            result = accumulator
        if output_scale_ptr is not None:  # a tile has the columns of one block
            result, scale_M = scale_blocks(result.to(ROUNDED).to(tl.float32), 0 if IS_SWAPPED else 1)
            tl.store(output_scale_ptr + (first_row + rows) * num_blocks_c + n, scale_M, mask=rows < count)
        result = result.to(output_ptr.dtype.element_ty)
        result_MC = tl.trans(result) if IS_SWAPPED else result
        out_columns = n * BLOCK_C + tl.arange(0, BLOCK_C)
        output_ptrs = output_ptr + (first_row + rows)[:, None] * num_columns + out_columns[None, :]
        tl.store(output_ptrs, result_MC, mask=(rows < count)[:, None] & (out_columns < num_columns)[None, :])
