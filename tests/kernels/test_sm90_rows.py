"""Machine code of the kernels that process rows, for sm_90 at the shapes of published models. Needs no GPU.

Kernels are compiled as their launches compile them. None may spill registers.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_kernels import MAX_SHARED_BYTES, MachineCode, compile_kernel

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
    """Compile a kernel, and check its resources. Arguments without a type or constexpr are int32."""
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
    code = compile_kernel(kernel, signature, constexprs, options, **more)
    assert code.spilled_bytes == 0
    assert code.shared_bytes <= MAX_SHARED_BYTES
    return code


@pytest.mark.slow_but("*bf16-128", "*bf16-7168", "*fp32-64")
@pytest.mark.parametrize(
    ("pointer", "width", "has_update", "quantizes"),
    [
        ("*bf16", 128, False, False),
        ("*bf16", 2880, True, True),
        ("*bf16", 4096, False, False),
        ("*bf16", 7168, True, True),
        ("*bf16", 16384, True, False),
        ("*fp32", 64, True, False),
        ("*fp32", 7168, False, False),
    ],
)
def test_rms_norm(pointer: str, width: int, has_update: bool, quantizes: bool) -> None:
    from moeserve.triton_kernels.rms_norm import block_sizes, compile_options, rms_norm_kernel

    types = dict(x_ptr=pointer, weight_ptr=pointer, output_ptr=pointer, epsilon="fp32")
    constexprs: dict[str, Any] = dict(block_sizes(width))
    if has_update:
        types |= dict(update_ptr=pointer, sum_ptr=pointer)
    else:
        constexprs |= dict(update_ptr=None, sum_ptr=None)
    if quantizes:
        types |= dict(codes_ptr="*fp8e4nv", scales_ptr="*fp32")
    else:
        constexprs |= dict(codes_ptr=None, scales_ptr=None)
    options = compile_options(constexprs["BLOCK_D"])
    code = compiled(rms_norm_kernel, types, constexprs, options, not_divisible=["num_rows", "num_inner"])
    # Partial sums of the warps; quantised rows are ordered by block there.
    assert code.shared_bytes <= (2 * constexprs["BLOCK_D"] if quantizes else 2048)
    if width % 1024 == 0:
        assert re.search(r"ld\.global[.\w]*\.v[248]", code.ptx), "loads are not vectorised"


@pytest.mark.slow_but("bf16-8", "bf16-1")
@pytest.mark.parametrize(
    ("pointer", "num_chunks", "has_bias"),
    [("*bf16", 1, False), ("*bf16", 8, True), ("*bf16", 7, False), ("*fp32", 8, False)],
)
def test_products_in_chunks(pointer: str, num_chunks: int, has_bias: bool) -> None:
    from moeserve.triton_kernels.chunked_matmul import OPTIONS, chunked_matmul_kernel, kernel_constants

    dtype = torch.float32 if pointer == "*fp32" else torch.bfloat16
    types = dict(rows_ptr=pointer, weight_ptr=pointer, output_ptr=pointer)
    constexprs = dict(CHUNK=2048 // num_chunks, NUM_CHUNKS=num_chunks, **kernel_constants(dtype))
    if has_bias:
        types["bias_ptr"] = pointer
    else:
        constexprs["bias_ptr"] = None
    code = compiled(chunked_matmul_kernel, types, constexprs, OPTIONS, not_divisible=["num_rows"])
    assert pointer == "*fp32" or code.num_wgmma > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_experts", "top_k", "scoring", "groups", "has_correction"),
    [
        (160, 6, "softmax", (8, 3, 1), False),  # DeepSeek-V2
        (256, 8, "sigmoid", (8, 4, 2), True),  # DeepSeek-V3
        (32, 4, "softmax_of_chosen", (1, 1, 1), False),  # gpt-oss
        (512, 16, "softmax", (1, 1, 1), False),
        (8, 2, "softmax", (1, 1, 1), False),  # Mixtral
        (256, 6, "sqrt_softplus", (1, 1, 1), True),  # DeepSeek-V4-Flash
    ],
)
@pytest.mark.parametrize("width", [None, 4096, 7168], ids=lambda width: "logits" if width is None else f"width-{width}")
def test_routing(
    num_experts: int,
    top_k: int,
    scoring: str,
    groups: tuple[int, int, int],
    has_correction: bool,
    width: int | None,
) -> None:
    from moeserve.triton_kernels.routing import launch_sizes, route_kernel, weighing_sizes

    num_groups, num_chosen_groups, experts_rating_group = groups
    types = dict(rows_ptr="*fp32", experts_ptr="*i64", weights_ptr="*fp32", scale="fp32")
    sizes = launch_sizes(num_experts, num_groups, top_k)
    of_weights = ("weight_ptr", "bias_ptr", "partial_ptr", "arrivals_ptr")
    absent = of_weights if width is None else ("bias_ptr",)
    if width is not None:
        sizes = weighing_sizes(sizes, width)
        types |= dict(rows_ptr="*bf16", weight_ptr="*fp32", partial_ptr="*fp32", arrivals_ptr="*i32")
    options = {"num_warps": sizes.pop("num_warps")}
    constexprs: dict[str, Any] = dict(
        **dict.fromkeys(absent),
        NUM_INPUTS=width or num_experts,
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


@pytest.mark.parametrize(
    ("head_size", "num_pairs", "is_interleaved", "is_in_place", "pointer"),
    [
        (128, 64, False, True, "*bf16"),
        (64, 32, True, True, "*bf16"),
        (192, 32, True, False, "*bf16"),
        (96, 20, False, False, "*fp32"),
    ],
)
def test_rotary(head_size: int, num_pairs: int, is_interleaved: bool, is_in_place: bool, pointer: str) -> None:
    from moeserve.triton_kernels.rotary import launch_sizes, rotary_kernel

    sizes = dict(launch_sizes(num_pairs, 0 if is_in_place else head_size - 2 * num_pairs))
    options = {"num_warps": sizes.pop("num_warps")}
    compiled(
        rotary_kernel,
        dict(heads_ptr=pointer, cosines_ptr="*fp32", sines_ptr="*fp32", out_ptr=pointer),
        dict(IS_INTERLEAVED=is_interleaved, **sizes),
        options,
        not_divisible=["num_heads", "num_pairs"],
    )


@pytest.mark.slow_but("128-64-False-*bf16-True", "16-8-False-*fp32-False")
@pytest.mark.parametrize("has_float8_cache", [False, True])
@pytest.mark.parametrize(
    ("head_size", "num_pairs", "is_interleaved", "pointer"),
    [(128, 64, False, "*bf16"), (128, 32, True, "*bf16"), (16, 8, False, "*fp32")],
)
def test_rotary_with_cache_write(
    head_size: int, num_pairs: int, is_interleaved: bool, pointer: str, has_float8_cache: bool
) -> None:
    from moeserve.triton_kernels.rotary import launch_sizes, rotary_with_cache_write_kernel

    sizes = dict(launch_sizes(num_pairs, head_size))
    options = {"num_warps": sizes.pop("num_warps")}
    types = {f"{name}_ptr": pointer for name in ("query", "key", "value")}
    caches, scales = ["key_cache_ptr", "value_cache_ptr"], ["key_scales_ptr", "value_scales_ptr"]
    types |= dict.fromkeys(caches, "*u8" if has_float8_cache else pointer)
    types |= dict.fromkeys(scales, "*bf16") if has_float8_cache else {}
    compiled(
        rotary_with_cache_write_kernel,
        types | dict(cosines_ptr="*fp32", sines_ptr="*fp32", slots_ptr="*i64"),
        dict(IS_INTERLEAVED=is_interleaved, **sizes, **({} if has_float8_cache else dict.fromkeys(scales))),
        options,
        not_divisible=["num_heads", "num_kv_heads"],
    )


@pytest.mark.parametrize(("pointer", "activation"), [("*bf16", 1), ("*bf16", 2), ("*fp32", 1), ("*bf16", 4)])
def test_activation(pointer: str, activation: int) -> None:
    from moeserve.triton_kernels.activation import BLOCK_C, NUM_WARPS, activation_kernel

    code = compiled(
        activation_kernel,
        dict(rows_ptr=pointer, output_ptr=pointer, alpha="fp32", limit="fp32"),
        dict(ACTIVATION=activation, BLOCK_C=BLOCK_C),
        dict(num_warps=NUM_WARPS),
    )
    assert re.search(r"ld\.global[.\w]*\.v4", code.ptx), "16 bytes at a time"


@pytest.mark.parametrize(
    ("activation", "has_counts", "has_slots"), [(0, False, False), (0, True, False), (1, True, True), (4, True, False)]
)
def test_quantisation_rounds_with_the_instruction(activation: int, has_counts: bool, has_slots: bool) -> None:
    """The instruction rounds to nearest, ties to even, and saturates."""
    from moeserve.triton_kernels.fp8 import BLOCK, BLOCKS_AT_ONCE, NUM_WARPS, quantize_blocks_kernel

    code = compiled(
        quantize_blocks_kernel,
        dict(x_ptr="*bf16", codes_ptr="*fp8e4nv", scales_ptr="*fp32", alpha="fp32", limit="fp32")
        | (dict(counts_ptr="*i64") if has_counts else {}),
        dict(BLOCK=BLOCK, BLOCKS_AT_ONCE=BLOCKS_AT_ONCE, BLOCK_E=32, ACTIVATION=activation, HAS_SLOTS=has_slots)
        | ({} if has_counts else dict(counts_ptr=None)),
        dict(num_warps=NUM_WARPS),
        not_divisible=["num_rows", "num_blocks", "num_experts", "num_slots"],
    )
    assert "cvt.rn.satfinite.e4m3x2.f32" in code.ptx
    assert re.search(r"\b(div|rcp)\.rn\.", code.ptx)  # exact division, with either instruction
    assert "min.NaN.f32" in code.ptx


@pytest.mark.slow_but("bf16")
@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
def test_choice_of_tokens(pointer: str) -> None:
    from moeserve.triton_kernels.sampling import choose_kernel, launch_sizes

    sizes = launch_sizes(32000)
    assert sizes == launch_sizes(262144)
    options = {"num_warps": sizes.pop("num_warps")}
    types = dict(scores_ptr=pointer, settings_ptr="*i64", positions_ptr="*i64", largest_ptr="*fp32", tokens_ptr="*i64")
    compiled(choose_kernel, types, sizes, options)


@pytest.mark.parametrize(("pointer", "width"), [("*bf16", 160), ("*fp32", 151936)])
def test_row_maximum(pointer: str, width: int) -> None:
    from moeserve.triton_kernels.sampling import launch_sizes, row_maximum_kernel

    sizes = launch_sizes(width)
    options = {"num_warps": sizes.pop("num_warps")}
    types = dict(rows_ptr=pointer, largest_ptr="*fp32", indices_ptr="*i64")
    compiled(row_maximum_kernel, types, sizes, options)


STATE_ROWS = dict.fromkeys(("load_ptr", "store_ptr", "save_ptr", "before_save_ptr"), "*i64")
STATE_ROWS |= {"row_starts_ptr": "*i32"}


@pytest.mark.slow_but("bf16")
@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
@pytest.mark.parametrize("rule", ["delta", "channels", "state space"])
def test_linear_attention(pointer: str, rule: str) -> None:
    """Shapes of Qwen3-Next, Kimi-Linear and Nemotron-3-Nano. 128 x 32 values of a state are in registers."""
    from moeserve.triton_kernels.linear_attention import VALUES, gate_kernel, recurrence_kernel

    is_delta, group_size = rule != "state space", 512 if rule == "state space" else 128
    types = linear_attention_types(pointer)
    flags = dict(IS_DELTA=is_delta, HAS_CHANNEL_DECAYS=rule == "channels", HAS_FLOOR=rule == "channels")
    sizes: dict[str, Any] = dict(BLOCK_K=128, VALUES=VALUES, TILED_ROWS=16)
    if is_delta:
        sizes["skip_ptr"] = None
    assert compiled(recurrence_kernel, types, sizes | flags, {}).registers <= 128
    types = dict(output_ptr="*fp32", gates_ptr=pointer, norm_ptr="*fp32", out_ptr=pointer, epsilon="fp32")
    flags = dict(WITH_SIGMOID=rule == "channels", BEFORE_NORM=not is_delta)
    compiled(gate_kernel, types, dict(BLOCK=group_size) | flags, {})


@pytest.mark.slow
@pytest.mark.slow_but("bf16")
@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
@pytest.mark.parametrize("rule", ["delta", "channels", "state space"])
def test_linear_attention_in_tiles(pointer: str, rule: str) -> None:
    from moeserve.triton_kernels import linear_attention_tiles as tiles

    dtype = torch.float32 if pointer == "*fp32" else torch.bfloat16
    is_delta, has_channel_decays = rule != "state space", rule == "channels"
    config = tiles.tile_config(dtype, has_channel_decays=has_channel_decays)
    types, value_dim = linear_attention_types(pointer), 128 if is_delta else 64
    constants = tiles.kernel_constants(config, dtype, 128, value_dim)
    constants |= dict(IS_DELTA=is_delta, HAS_CHANNEL_DECAYS=has_channel_decays)
    of_delta: dict[str, Any] = {} if is_delta else dict(reads_ptr=None, changes_ptr=None)
    sizes: dict[str, Any] = dict(BLOCK_V=value_dim, HAS_FLOOR=has_channel_decays, CHUNKS_AT_ONCE=tiles.CHUNKS_AT_ONCE)
    options = dict(num_warps=config.prepare_warps)
    varying = ["num_chunks", "num_tokens"]
    prepared = compiled(tiles.prepare_tiles_kernel, types, constants | of_delta | sizes, options, not_divisible=varying)
    sizes = dict(VALUES=config.values) | (dict(skip_ptr=None) if is_delta else {})
    options = dict(num_warps=config.attend_warps, num_stages=config.attend_stages)
    attended = compiled(
        tiles.attend_tiles_kernel, types, constants | of_delta | sizes, options, not_divisible=varying[1:]
    )
    if pointer == "*bf16":
        assert attended.num_wgmma > 0
        assert has_channel_decays or prepared.num_wgmma > 0


def linear_attention_types(pointer: str) -> dict[str, str]:
    names = "mixed", "states", "output", "log_decay", "decay_bias", "skip", "totals", "pairs", "factors"
    types = dict.fromkeys([f"{name}_ptr" for name in (*names, "reads", "changes")], "*fp32") | STATE_ROWS
    types |= dict(decays_ptr=pointer, rates_ptr=pointer, query_scale="fp32", decay_floor="fp32")
    return types | dict(context_lens_ptr="*i32")


@pytest.mark.slow_but("bf16")
@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
def test_short_convolution(pointer: str, is_gated: bool) -> None:
    from moeserve.triton_kernels.short_convolution import (
        CHANNELS,
        CHUNKS_AT_ONCE,
        TOKENS,
        convolve_kernel,
        store_states_kernel,
    )

    types = STATE_ROWS | dict(input_ptr=pointer, states_ptr=pointer, taps_ptr="*fp32", bias_ptr="*fp32")
    types["out_ptr"] = pointer if is_gated else "*fp32"
    constants = dict(NUM_TAPS=4, CHANNELS=CHANNELS, IS_GATED=is_gated)
    compiled(store_states_kernel, types, constants, {})
    constants |= dict(TOKENS=TOKENS, STORES_STATES=not is_gated, CHUNKS_AT_ONCE=CHUNKS_AT_ONCE)
    compiled(convolve_kernel, types, constants, {}, not_divisible=["num_chunks"])


@pytest.mark.parametrize(("ratio", "num_series"), [(4, 2), (128, 1)])
def test_compressed_entries(ratio: int, num_series: int) -> None:
    """Shapes of DeepSeek-V4 with chosen entries and with all."""
    from moeserve.triton_kernels import compressed_attention as entries

    tables = dict.fromkeys(("table_ptr", "window_table_ptr", "row_starts_ptr", "context_lens_ptr"), "*i32")
    slots = dict.fromkeys(("slots_ptr", "positions_ptr", "entry_slots_ptr"), "*i64")
    types = tables | slots | dict.fromkeys(("bias_ptr", "before_ptr", "tails_ptr"), "*fp32")
    types |= dict(projected_ptr="*bf16", pooled_ptr="*bf16")
    sizes, varying = dict(BLOCK_SIZE=128, RATIO=ratio), ["num_chunks", "table_stride"]
    at_once = dict(CHUNKS_AT_ONCE=entries.CHUNKS_AT_ONCE)
    channels = dict(CHANNELS=entries.CHANNELS)
    compiled(entries.copy_tails_kernel, types, dict(BLOCK_SIZE=128) | channels, {}, not_divisible=["table_stride"])
    compiled(
        entries.pool_windows_kernel, types, sizes | at_once | channels | dict(NUM_SERIES=num_series), {},
        not_divisible=varying,
    )  # fmt: skip
    constants = sizes | dict(ENTRIES=128 // ratio, TOKENS=entries.TOKENS)
    compiled(entries.entry_slots_kernel, types, constants, {}, not_divisible=["num_tokens"])
    names = ["listed_ptr", "count_ptr", "starts_ptr"] + ["chosen_ptr", "chosen_counts_ptr"] * (num_series == 2)
    absent = dict(chosen_ptr=None, chosen_counts_ptr=None) if num_series == 1 else {}
    constants = sizes | at_once | absent | dict(ENTRIES=128 // ratio, WINDOW=128, PLACES=entries.PLACES)
    varying += ["num_tokens", "num_listed", "window_stride"]
    compiled(entries.list_vectors_kernel, tables | dict.fromkeys(names, "*i32"), constants, {}, not_divisible=varying)


@pytest.mark.parametrize("is_last", [False, True])
def test_hyper_connections(is_last: bool) -> None:
    from moeserve.triton_kernels.hyper_connections import BLOCK_D, NUM_WARPS, collapse_kernel, expand_kernel

    names = ("mapped_ptr", "base_ptr", "scales_ptr", "coefficients_ptr")
    types = dict.fromkeys(names, "*fp32") | dict(epsilon="fp32", norm_epsilon="fp32")
    types |= dict.fromkeys(("streams_ptr", "collapsed_ptr", "update_ptr", "expanded_ptr"), "*bf16")
    sizes = dict(NUM_STREAMS=4, BLOCK_S=4, BLOCK_D=BLOCK_D)
    constants = sizes | dict(NUM_COEFFICIENTS=4 if is_last else 24, NUM_ITERATIONS=20)
    compiled(collapse_kernel, types, constants, dict(num_warps=NUM_WARPS))
    compiled(expand_kernel, types, sizes, dict(num_warps=NUM_WARPS))


@pytest.mark.slow_but("bf16")
@pytest.mark.parametrize(("pointer", "num_heads"), [("*bf16", 64), ("*fp32", 32)])
def test_indexer(pointer: str, num_heads: int) -> None:
    """Shapes of DeepSeek-V3.2 and GLM-5."""
    from moeserve.triton_kernels.indexer import (
        CHOOSE_ENTRIES,
        CHOOSE_WARPS,
        DIGITS,
        choose_entries_kernel,
        kernel_sizes,
        score_config,
        score_entries_kernel,
    )

    tables = dict.fromkeys(("block_table_ptr", "row_starts_ptr", "context_lens_ptr"), "*i32") | {"scores_ptr": "*fp32"}
    sizes = kernel_sizes(2048, 1, 16)
    config = score_config(num_heads, 2 if pointer == "*bf16" else 4)
    numbers = dict.fromkeys(("query_ptr", "weights_ptr", "cache_ptr"), pointer)
    tile = dict(NUM_HEADS=num_heads, HEAD_SIZE=128, BLOCK_H=128)
    tile |= dict(BLOCK_N=config.block_heads, BLOCK_E=config.block_entries)
    options = dict(num_warps=config.num_warps)
    varying = ["table_stride", "num_chunks", "first_row"]
    code = compiled(score_entries_kernel, tables | numbers, sizes | tile, options, not_divisible=varying)
    assert pointer == "*fp32" or "wgmma" in code.ptx or "mma.sync" in code.ptx
    results = dict.fromkeys(("slots_ptr", "counts_ptr", "starts_ptr"), "*i32")
    constants = sizes | dict(DIGITS=DIGITS, BLOCK_E=CHOOSE_ENTRIES)
    varying.append("num_tokens")
    compiled(choose_entries_kernel, tables | results, constants, dict(num_warps=CHOOSE_WARPS), not_divisible=varying)
