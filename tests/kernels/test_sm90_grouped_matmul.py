"""Machine code of the experts' kernels for sm_90, at production shapes and with the tiles of their launches."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compiled_kernels import MAX_SHARED_BYTES, MachineCode, compile_kernel

from moeserve.triton_kernels.tune import Layer
from moeserve.triton_kernels.tuning import Problem, config_by_rule

pairs = pytest.importorskip("moeserve.triton_kernels.pairs", reason="triton is not installed")

SHARED_BYTES_OF_SM = 228 * 1024
REGISTERS_OF_SM = 65536


@dataclass(frozen=True)
class Model:
    layer: Layer
    activation: str = "swiglu"
    has_bias: bool = False


MODELS = {
    "Mixtral-8x7B": Model(Layer("bf16", 8, 4096, 14336, 2)),
    "DeepSeek-V2-Lite": Model(Layer("bf16", 64, 2048, 1408, 6)),
    "DeepSeek-V3": Model(Layer("fp8", 256, 7168, 2048, 8)),
    "Qwen3-30B-A3B": Model(Layer("bf16", 128, 2048, 768, 8)),
    "gpt-oss-20b": Model(Layer("bf16", 32, 2880, 2880, 4), "clamped_swiglu", has_bias=True),
    # Those of the checkpoints with which `bench.gpu` compares the engine's tokens.
    "small DeepSeek": Model(Layer("fp32", 8, 64, 32, 3)),
    "small gpt-oss": Model(Layer("fp32", 6, 64, 96, 2), "clamped_swiglu", has_bias=True),
}
# Model, tokens and whether it is the product of gates and ups: each config by rule, with and without scales.
PRODUCTS = [
    *(("Mixtral-8x7B", num_tokens, True) for num_tokens in (1, 64, 128, 4096)),
    *(("Mixtral-8x7B", num_tokens, False) for num_tokens in (1, 4096)),
    *(("DeepSeek-V3", num_tokens, True) for num_tokens in (1, 512, 1024, 16384)),
    *(("DeepSeek-V3", num_tokens, False) for num_tokens in (1, 16384)),
    *(("gpt-oss-20b", 1, True), ("gpt-oss-20b", 4096, True), ("gpt-oss-20b", 4096, False)),
]
ELEMENTS = {
    "bf16": (torch.bfloat16, "*bf16", "*bf16"),
    "fp8": (torch.float8_e4m3fn, "*fp8e4nv", "*bf16"),
    "fp32": (torch.float32, "*fp32", "*fp32"),
    "mxfp4": (torch.bfloat16, "*bf16", "*bf16"),
}


def product(name: str, num_tokens: int, is_gated: bool, kind: str | None = None) -> tuple[Problem, dict[str, Any]]:
    """Return one grouped product of a published model, and the keyword arguments of `compiled` for it."""
    model = MODELS[name]
    layer = model.layer if kind is None else dataclasses.replace(model.layer, kind=kind)
    problem = layer.problems(num_tokens)[0 if is_gated else 1]
    return problem, dict(activation=model.activation if is_gated else None, has_bias=model.has_bias)


def compiled(
    problem: Problem, *, activation: str | None = None, has_bias: bool = False, has_slots: bool = False
) -> MachineCode:
    """Compile the kernel with the config by rule. Gates and ups in 8-bit blocks feed a product of such blocks."""
    import triton.language as tl

    config, is_mxfp4 = config_by_rule(problem), problem.kind == "mxfp4"
    quantizes = problem.kind == "fp8" and problem.is_gated and config.block_n == 256
    is_split = config.num_splits > 1
    from moeserve.triton_kernels.grouped_matmul import compile_options, grouped_matmul_kernel, kernel_constants

    dtype, element, result = ELEMENTS[problem.kind]
    constants = kernel_constants(
        config,
        dtype,
        problem.num_experts,
        problem.num_inputs,
        activation,
        has_bias=has_bias,
        has_indices=problem.is_gated and not has_slots and problem.num_experts > 1,
        has_slots=has_slots,
        is_mxfp4=is_mxfp4,
    )
    pointers = {
        "source_ptr": element,
        "source_scale_ptr": "*fp32" if constants["HAS_SCALES"] else None,
        "weight_ptr": "*u8" if is_mxfp4 else element,
        "weight_scale_ptr": "*u8" if is_mxfp4 else "*fp32" if constants["HAS_SCALES"] else None,
        "bias_ptr": result if has_bias else None,
        "counts_ptr": None if problem.can_split else "*i64",
        "indices_ptr": "*i64" if constants["HAS_INDICES"] else None,
        "output_ptr": element if quantizes else result,
        "output_scale_ptr": "*fp32" if quantizes else None,
        "partial_ptr": "*fp32" if is_split else None,
        "arrivals_ptr": "*i32" if is_split else None,
    }
    sizes = ("source_stride", "num_rows", "num_experts", "num_columns", "num_inputs", "num_slots", "divisor")
    sizes += ("scale_expert_stride", "scale_row_stride")
    constants |= {"scale_block_stride": 1, "ROUNDED": tl.bfloat16}
    signature = {name: kind for name, kind in pointers.items() if kind is not None}
    signature |= dict.fromkeys(sizes, "i32") | dict.fromkeys(("alpha", "limit"), "fp32")
    absent = {name: None for name, kind in pointers.items() if kind is None}
    return compile_kernel(
        grouped_matmul_kernel,
        signature,
        constants | absent,
        compile_options(config),
        # Launches are not specialised on these, nor have rows a multiple of 16 scales.
        not_divisible=("num_rows", "num_experts", "num_slots", "divisor", "scale_row_stride"),
    )


def check(problem: Problem, code: MachineCode) -> None:
    config = config_by_rule(problem)
    assert code.spilled_bytes == 0
    assert code.shared_bytes <= MAX_SHARED_BYTES
    assert config.programs_per_sm * (code.shared_bytes + 1024) <= SHARED_BYTES_OF_SM
    num_registers = -(-code.registers // 8) * 8 * 32 * config.num_warps
    assert config.programs_per_sm * num_registers <= REGISTERS_OF_SM
    assert code.num_wgmma > 0
    assert code.num_cp_async > 0
    element = "e4m3.e4m3" if problem.kind == "fp8" else "bf16.bf16"
    assert set(re.findall(r"wgmma\.mma_async\S+\.f32\.(\S+)", code.ptx)) == {element}
    # The inner loop copies from memory to shared memory and multiplies from there, without registers in between.
    (step,) = [part for part in re.split(r"\n\$L__BB\S+:|\bbra\b", code.ptx) if "wgmma.mma_async" in part]
    assert "cp.async" in step
    assert not re.search(r"\b(ld|st)\.shared|ldmatrix|stmatrix", step)


@pytest.mark.parametrize(("name", "num_tokens", "is_gated"), PRODUCTS)
def test_products_of_models(name: str, num_tokens: int, is_gated: bool) -> None:
    problem, options = product(name, num_tokens, is_gated)
    check(problem, compiled(problem, **options))


@pytest.mark.parametrize(
    ("num_tokens", "is_gated", "has_slots"),
    [(1, True, False), (128, True, True), (4096, True, False), (1, False, True), (4096, False, False)],
)
def test_weights_in_mxfp4(num_tokens: int, is_gated: bool, has_slots: bool) -> None:
    """Codes and rows are copied asynchronously; weights are decoded in registers and multiplied from there."""
    problem, options = product("gpt-oss-20b", num_tokens, is_gated, "mxfp4")
    code = compiled(problem, has_slots=has_slots, **options)
    assert code.spilled_bytes == 0
    config = config_by_rule(problem)
    assert config.programs_per_sm * (code.shared_bytes + 1024) <= SHARED_BYTES_OF_SM
    assert config.programs_per_sm * -(-code.registers // 8) * 8 * 32 * config.num_warps <= REGISTERS_OF_SM
    (step,) = [part for part in re.split(r"\n\$L__BB\S+:|\bbra\b", code.ptx) if "wgmma.mma_async" in part]
    assert step.count("cp.async.c") >= 4
    left_operands = re.findall(r"wgmma\.mma_async\S+\.f32\.bf16\.bf16 \{[^}]*\}, (.)", step)
    assert left_operands
    assert set(left_operands) == {"{"}, "registers, not shared memory"


@pytest.mark.parametrize(
    ("name", "num_tokens", "is_gated", "kind", "has_slots"),
    [
        ("small gpt-oss", 16, True, "fp32", False),
        ("gpt-oss-20b", 16, False, "fp32", True),
        ("small gpt-oss", 48, True, "bf16", False),
        ("small DeepSeek", 1, False, "bf16", False),
    ],
)
def test_small_models_and_float32_fit(name: str, num_tokens: int, is_gated: bool, kind: str, has_slots: bool) -> None:
    problem, options = product(name, num_tokens, is_gated, kind)
    code = compiled(problem, has_slots=has_slots, **options)
    assert code.spilled_bytes == 0
    assert code.shared_bytes <= MAX_SHARED_BYTES
    assert kind == "bf16" or "mma" not in code.ptx, "tensor cores have no float32"


@pytest.mark.parametrize(("kind", "is_gated"), [("bf16", False), ("fp8", True)])
def test_slots(kind: str, is_gated: bool) -> None:
    """Compile for DeepSeek-V3 on 32 ranks with DeepEP's low-latency mode."""
    problem = Layer(kind, 8, 7168, 2048, 8).problems(16)[0 if is_gated else 1]
    check(problem, compiled(problem, activation="swiglu" if is_gated else None, has_slots=True))


@pytest.mark.parametrize(("kind", "num_rows"), [("bf16", 6), ("bf16", 24576), ("fp8", 24576)])
def test_experts_without_gates(kind: str, num_rows: int) -> None:
    """Compile the up projections of Nemotron 3 Nano."""
    problem = Problem(kind, False, 128, 1856, 2688, num_rows)
    check(problem, compiled(problem, activation="squared_relu"))


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "is_gated"),
    [
        (2 * 10944, 2048, True),  # the dense network of DeepSeek-V2-Lite, whose width is not a multiple of 128
        (2048, 10944, False),
        (2 * 2048, 7168, True),  # shared experts, compressed queries and output of DeepSeek-V3
        (1536, 7168, False),
        (7168, 16384, False),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 16, 128, 4096])
def test_single_weight_in_blocks(num_outputs: int, num_inputs: int, is_gated: bool, num_tokens: int) -> None:
    problem = Problem("fp8", is_gated, 1, num_outputs, num_inputs, num_tokens, can_split=True)
    check(problem, compiled(problem, activation="swiglu" if is_gated else None))


def test_few_rows_of_a_single_weight_fill_the_gpu() -> None:
    """Programs share the inputs of few tiles, so that nearly all multiprocessors have a part; many rows do not."""
    for num_outputs, num_inputs, is_gated in ((1536, 7168, False), (576, 7168, False), (4096, 7168, True)):
        problem = Problem("fp8", is_gated, 1, num_outputs, num_inputs, 1, can_split=True)
        for num_tokens in (1, 16, 64, 128):
            config = config_by_rule(dataclasses.replace(problem, num_rows=num_tokens))
            num_tiles = -(-num_tokens // config.block_m) * -(-num_outputs // config.block_n)
            assert config.num_splits == 1 or num_tiles * config.num_splits <= 264
            most = num_inputs // (8 * num_tokens)  # sums of splits are no more bytes than the weight
            assert num_tiles * config.num_splits >= min(100, num_tiles * min(most, num_inputs // 512))
        assert config_by_rule(dataclasses.replace(problem, num_rows=4096)).num_splits == 1
        assert config_by_rule(dataclasses.replace(problem, can_split=False)).num_splits == 1


KEYS: dict[str, Any] = dict(
    keys_ptr="*i64", stride_t="i64", stride_k="i64", top_k="i32", num_pairs="i32", first="i32", num_counted="i32"
)
NOT_DIVISIBLE = ("stride_t", "stride_k", "top_k", "num_pairs", "first", "num_counted", "num_blocks", "num_rows")
PAIR_KERNELS: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("rank_pairs_kernel", KEYS | dict(pairs_ptr="*i64", counts_ptr="*i64", load_ptr="*i64"), pairs.RANK_BLOCKS),
    ("count_keys_kernel", KEYS | dict(counts_ptr="*i32", num_blocks="i32"), pairs.PLACE_BLOCKS),
    (
        "start_blocks_kernel",
        dict.fromkeys(("counts_ptr", "totals_ptr"), "*i32")
        | dict.fromkeys(("output_ptr", "load_ptr"), "*i64")
        | dict.fromkeys(("num_blocks", "num_counted"), "i32"),
        pairs.START_BLOCKS,
    ),
    (
        "place_pairs_kernel",
        KEYS | dict(starts_ptr="*i32", totals_ptr="*i32", pairs_ptr="*i64", num_blocks="i32"),
        pairs.PLACE_BLOCKS,
    ),
    *(
        (
            "move_rows_kernel",
            dict(from_ptr=bits, indices_ptr="*i64", to_ptr=bits, from_stride="i32", width="i32", divisor="i32"),
            dict(IS_SCATTER=is_scatter, BLOCK_D=2048, num_warps=4),
        )
        for is_scatter, bits in ((False, "*i16"), (True, "*i32"))
    ),
    ("invert_kernel", dict(pair_of_row_ptr="*i64", row_of_pair_ptr="*i32", num_rows="i32"), pairs.INVERT_BLOCKS),
    *(
        (
            "weighted_sum_kernel",
            dict(
                output_ptr=element,
                rows_ptr="*i64" if block_rows > 1 else "*i32",
                weights_ptr="*fp32",
                total_ptr=element,
                output_stride="i32",
                weights_stride="i32",
                width="i32",
                num_rows="i32",
            ),
            dict(IS_SEARCHED=block_rows > 1, TOP_K=8, BLOCK_R=block_rows, BLOCK_D=1024) | pairs.sum_options(),
        )
        for block_rows, element in ((1, "*bf16"), (pairs.SEARCHED_ROWS[-1], "*bf16"), (pairs.SEARCHED_ROWS[0], "*fp32"))
    ),
    (
        "weigh_rows_kernel",
        dict(
            rows_ptr="*bf16",
            weights_ptr="*fp32",
            num_counted_ptr="*i32",
            output_ptr="*bf16",
            row_stride="i32",
            width="i32",
        ),
        dict(BLOCK_D=1024, num_warps=4),
    ),
]


@pytest.mark.parametrize(("name", "signature", "constants"), PAIR_KERNELS)
def test_pairs(name: str, signature: dict[str, str], constants: dict[str, Any]) -> None:
    kernel = getattr(pairs, name)
    blocks = {constant: value for constant, value in constants.items() if constant in kernel.arg_names}
    options = {option: value for option, value in constants.items() if option not in blocks}
    not_divisible = [argument for argument in NOT_DIVISIBLE if argument in signature]
    code = compile_kernel(kernel, signature, blocks, options, not_divisible=not_divisible)
    assert code.spilled_bytes == 0
    assert code.registers <= 128
    assert code.shared_bytes <= 8192
    if name == "move_rows_kernel":
        assert "ld.global.v4.b32" in code.ptx  # 16 bytes at a time
