"""Machine code of the kernels that work row by row, for sm_90 at the shapes of known models, with no GPU at hand.

Each is compiled exactly as its wrapper would launch it: nothing may spill out of registers.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
from sm90 import MAX_SHARED_BYTES, MachineCode, compile_for_sm90

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter hides the compiler"),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(
    kernel: Any, types: dict[str, str], constexprs: dict[str, Any], options: dict[str, Any], **more: Any
) -> MachineCode:
    """Machine code that spills nothing. Arguments that are neither typed here nor constexprs are int32."""
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
    code = compile_for_sm90(kernel, signature, constexprs, options, **more)
    assert code.spilled_bytes == 0
    assert code.shared_bytes <= MAX_SHARED_BYTES
    return code


@pytest.mark.parametrize("has_update", [False, True])
@pytest.mark.parametrize(
    ("pointer", "width"),
    [
        *(("*bf16", width) for width in (64, 128, 512, 2048, 2880, 4096, 7168, 16384)),
        *(("*fp32", width) for width in (16, 32, 64, 7168)),
    ],
)
def test_rms_norm(pointer: str, width: int, has_update: bool) -> None:
    from moeserve.triton_kernels.rms_norm import block_sizes, compile_options, rms_norm_kernel

    types = dict(x_ptr=pointer, weight_ptr=pointer, output_ptr=pointer, epsilon="fp32")
    constexprs: dict[str, Any] = dict(block_sizes(width))
    if has_update:
        types |= dict(update_ptr=pointer, sum_ptr=pointer)
    else:
        constexprs |= dict(update_ptr=None, sum_ptr=None)
    options = compile_options(constexprs["BLOCK_D"])
    code = compiled(rms_norm_kernel, types, constexprs, options, not_divisible=["num_rows", "num_inner"])
    assert code.shared_bytes <= 2048  # partial sums of the warps, no more
    if width % 1024 == 0:
        assert re.search(r"ld\.global[.\w]*\.v[248]", code.ptx), "rows are loaded number by number"


@pytest.mark.parametrize(
    ("num_experts", "top_k", "scoring", "num_groups", "num_chosen_groups", "experts_rating_group", "has_correction"),
    [
        (8, 2, "softmax", 1, 1, 1, False),  # Mixtral
        (64, 6, "softmax", 1, 1, 1, False),  # DeepSeek-V2-Lite
        (160, 6, "softmax", 8, 3, 1, False),  # DeepSeek-V2
        (256, 8, "sigmoid", 8, 4, 2, True),  # DeepSeek-V3
        (128, 8, "softmax", 1, 1, 1, False),  # Qwen3
        (32, 4, "softmax_of_chosen", 1, 1, 1, False),  # gpt-oss
        (512, 16, "softmax", 1, 1, 1, False),
    ],
)
def test_routing(
    num_experts: int,
    top_k: int,
    scoring: str,
    num_groups: int,
    num_chosen_groups: int,
    experts_rating_group: int,
    has_correction: bool,
) -> None:
    from moeserve.triton_kernels.routing import launch_sizes, route_kernel

    types = dict(logits_ptr="*fp32", experts_ptr="*i64", weights_ptr="*fp32", scale="fp32")
    sizes = launch_sizes(num_experts, num_groups, top_k)
    options = {"num_warps": sizes.pop("num_warps")}
    constexprs: dict[str, Any] = dict(
        NUM_GROUPS=num_groups,
        GROUP_SIZE=num_experts // num_groups,
        TOP_K=top_k,
        SCORING=scoring,
        NUM_CHOSEN_GROUPS=num_chosen_groups,
        EXPERTS_RATING_GROUP=experts_rating_group,
        IS_NORMALIZED=True,
        **sizes,
    )
    if has_correction:
        types["correction_ptr"] = "*fp32"
    else:
        constexprs["correction_ptr"] = None
    compiled(route_kernel, types, constexprs, options)


@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
@pytest.mark.parametrize(
    ("head_size", "num_pairs", "is_interleaved", "is_in_place"),
    [
        (8, 4, True, False),
        (128, 64, False, True),
        (64, 32, False, True),
        (64, 32, True, True),
        (192, 32, True, False),
        (96, 20, False, False),
    ],
)
def test_rotary(head_size: int, num_pairs: int, is_interleaved: bool, is_in_place: bool, pointer: str) -> None:
    from moeserve.triton_kernels.rotary import choose_config, rotary_kernel

    config = choose_config(num_pairs, 0 if is_in_place else head_size - 2 * num_pairs)
    compiled(
        rotary_kernel,
        dict(heads_ptr=pointer, cosines_ptr="*fp32", sines_ptr="*fp32", out_ptr=pointer),
        dict(IS_INTERLEAVED=is_interleaved, BLOCK_N=config.BLOCK_N, BLOCK_F=config.BLOCK_F, BLOCK_H=config.BLOCK_H),
        dict(num_warps=config.num_warps),
        not_divisible=["num_heads", "num_pairs"],
    )


@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
@pytest.mark.parametrize(
    ("head_size", "num_pairs", "is_interleaved"),
    [(128, 64, False), (16, 8, False), (64, 32, False), (128, 64, True), (128, 32, False), (128, 32, True)],
)
def test_rotary_with_cache_write(head_size: int, num_pairs: int, is_interleaved: bool, pointer: str) -> None:
    from moeserve.triton_kernels.rotary import choose_config, rotary_with_cache_write_kernel

    config = choose_config(num_pairs, head_size)
    types = {f"{name}_ptr": pointer for name in ("query", "key", "value", "key_cache", "value_cache")}
    compiled(
        rotary_with_cache_write_kernel,
        types | dict(cosines_ptr="*fp32", sines_ptr="*fp32", slots_ptr="*i64"),
        dict(IS_INTERLEAVED=is_interleaved, BLOCK_N=config.BLOCK_N, BLOCK_F=config.BLOCK_F, BLOCK_H=config.BLOCK_H),
        dict(num_warps=config.num_warps),
        not_divisible=["num_heads", "num_kv_heads"],
    )


@pytest.mark.parametrize("is_clamped", [False, True])
@pytest.mark.parametrize("pointer", ["*bf16", "*fp16", "*fp32"])
def test_activation(pointer: str, is_clamped: bool) -> None:
    from moeserve.triton_kernels.activation import BLOCK_C, NUM_WARPS, gated_activation_kernel

    code = compiled(
        gated_activation_kernel,
        dict(gate_up_ptr=pointer, output_ptr=pointer, alpha="fp32", limit="fp32"),
        dict(IS_CLAMPED=is_clamped, BLOCK_C=BLOCK_C),
        dict(num_warps=NUM_WARPS),
    )
    assert re.search(r"ld\.global[.\w]*\.v4", code.ptx), "16 bytes at a time"


@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
def test_quantizing_rounds_by_the_instruction(pointer: str) -> None:
    """The GPU's own: to the nearest, to even between two, and to the largest code beyond it."""
    from moeserve.triton_kernels.fp8 import BLOCK, BLOCKS_AT_ONCE, NUM_WARPS, quantize_blocks_kernel

    code = compiled(
        quantize_blocks_kernel,
        dict(x_ptr=pointer, codes_ptr="*fp8e4nv", scales_ptr="*fp32"),
        dict(BLOCK=BLOCK, BLOCKS_AT_ONCE=BLOCKS_AT_ONCE),
        dict(num_warps=NUM_WARPS),
        not_divisible=["num_blocks"],
    )
    assert "cvt.rn.satfinite.e4m3x2.f32" in code.ptx
    assert re.search(r"\b(div|rcp)\.rn\.", code.ptx)  # exact, in the way of each version of Triton
    assert "min.NaN.f32" in code.ptx


@pytest.mark.parametrize("output", ["*bf16", "*fp32"])
@pytest.mark.parametrize("rows_per_scale", [1, 128])
def test_dequantizing(rows_per_scale: int, output: str) -> None:
    from moeserve.triton_kernels.fp8 import BLOCK, NUM_WARPS, ROWS_AT_ONCE, dequantize_kernel

    compiled(
        dequantize_kernel,
        dict(codes_ptr="*fp8e4nv", scales_ptr="*fp32", output_ptr=output),
        dict(ROWS_PER_SCALE=rows_per_scale, BLOCK_O=ROWS_AT_ONCE, BLOCK_I=BLOCK),
        dict(num_warps=NUM_WARPS),
        not_divisible=["scales_per_row", "num_rows"],
    )


@pytest.mark.parametrize("width", [160, 512, 32000, 151936, 262144])
def test_sampling(width: int) -> None:
    """The engine's settings are float32."""
    from moeserve.triton_kernels.sampling import choose_config, row_maximum_kernel, sample_kernel

    config = choose_config(width)
    settings = {f"{name}_ptr": "*fp32" for name in ("temperature", "top_p", "min_p")} | dict(uniform_ptr="*fp64")
    sizes, options = dict(BLOCK_V=config.BLOCK_V), dict(num_warps=config.num_warps)
    if width <= 32000:  # wider rows have the same configuration
        types = settings | dict(scores_ptr="*fp32", top_k_ptr="*i64", tokens_ptr="*i64")
        compiled(sample_kernel, types, sizes, options)
    else:
        assert config == choose_config(32000)
    for pointer in ("*bf16", "*fp32"):
        types = dict(rows_ptr=pointer, largest_ptr="*fp32", indices_ptr="*i64")
        compiled(row_maximum_kernel, types, sizes, options)
