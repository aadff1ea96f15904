"""Machine code of paged and latent attention for sm_90 at production shapes. Needs no GPU.

Chunks of many rows use wgmma. Chunks of one row use it if 64 queries or more share keys and values; with fewer queries
they use mma, whose smallest tile has 16 rows, and memory bounds the time.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import pytest
from compiled_kernels import MAX_SHARED_BYTES, MachineCode, compile_kernel

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs the Triton compiler",
)


@dataclass(frozen=True)
class Shape:
    """Attention of one model on one GPU."""

    num_heads: int
    num_kv_heads: int
    value_size: int
    window: int | None = None
    has_sinks: bool = False
    extra_size: int = 0  # of a key, beyond the size of a value
    cache_block: int = 16
    has_float8_cache: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def is_latent(self) -> bool:
        return self.extra_size > 0 and self.num_kv_heads == 1


SHAPES = {
    "Mixtral": Shape(32, 8, 128),
    "Mixtral, cache of 8-bit floats": Shape(32, 8, 128, has_float8_cache=True),
    "gpt-oss, cache of 8-bit floats": Shape(64, 8, 64, window=128, has_sinks=True, has_float8_cache=True),
    "heads of 256, cache of 8-bit floats": Shape(16, 8, 256, has_float8_cache=True),
    "gpt-oss": Shape(64, 8, 64, window=128, has_sinks=True),
    "heads of 256": Shape(16, 8, 256, window=4096, cache_block=48),
    "MiMo-V2-Flash": Shape(64, 8, 128, extra_size=64, window=129, has_sinks=True),
    "MiMo-V2-Flash, cache of 8-bit floats": Shape(64, 4, 128, extra_size=64, has_float8_cache=True),
    "DeepSeek-V2-Lite": Shape(16, 1, 512, extra_size=64),
    "DeepSeek-V3, TP 4": Shape(32, 1, 512, extra_size=64, cache_block=64),
    "DeepSeek-V3, TP 2": Shape(64, 1, 512, extra_size=64, cache_block=64),
    "DeepSeek-V3": Shape(128, 1, 512, extra_size=64, cache_block=64),
    "DeepSeek-V3.2, chosen positions": Shape(128, 1, 512, extra_size=64, cache_block=1),
}
# Shapes of the checkpoints with which `bench.gpu` compares the engine's tokens.
SMALL_SHAPES = {
    "small gpt-oss": Shape(4, 2, 16, window=9, has_sinks=True),
    "small DeepSeek": Shape(4, 1, 32, extra_size=8),
}


def configs(shape: Shape, element_size: int = 2) -> tuple[Any, Any, Any]:
    """Return the configs of tiles and of splits, and the splits, as a launch chooses them."""
    from moeserve.triton_kernels import latent_attention, paged_attention

    if shape.is_latent:
        chosen = latent_attention
        split = chosen.split_config(shape.num_heads, shape.value_size, element_size)
        return chosen.tile_config(shape.value_size, element_size), split, chosen.choose_splits(shape.num_heads)
    chosen = paged_attention
    head_size = shape.value_size + shape.extra_size
    split = chosen.split_config(shape.group, head_size, element_size, shape.has_float8_cache)
    tile = chosen.tile_config(head_size, element_size, shape.has_float8_cache)
    return tile, split, chosen.choose_splits(shape.num_kv_heads)


def compile_attention(
    kernel: Any, shape: Shape, constexprs: dict[str, Any], options: dict[str, Any], dtype: str
) -> Any:
    pointers = {
        "row_starts_ptr": "*i32",
        "context_lens_ptr": "*i32",
        "block_table_ptr": "*i32",
        "partial_ptr": "*fp32",
        "maximum_ptr": "*fp32",
        "total_ptr": "*fp32",
        "balanced_ptr": "*i32",
        "sinks_ptr": "*fp32",
    }
    signature = {}
    for name in kernel.arg_names:
        if name in constexprs:
            continue
        is_none = {
            "value_cache_ptr": shape.is_latent,
            "sinks_ptr": not shape.has_sinks,
            "balanced_ptr": not shape.is_latent,
            "key_scales_ptr": not shape.has_float8_cache,
            "value_scales_ptr": not shape.has_float8_cache,
        }
        if is_none.get(name, False):
            constexprs[name] = None
        elif name in ("key_cache_ptr", "value_cache_ptr") and shape.has_float8_cache:
            signature[name] = "*u8"
        elif name.endswith("_ptr"):
            signature[name] = pointers.get(name, f"*{dtype}")
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    counts = {
        "num_chunks", "num_heads", "num_kv_heads", "num_splits", "num_balanced", "num_tiles", "table_stride",
        "max_attended_rows",
    }  # fmt: skip
    return compile_kernel(kernel, signature, constexprs, options, not_divisible=counts)


def sizes(shape: Shape) -> dict[str, Any]:
    from moeserve.triton_kernels.paged_launch import kernel_sizes

    return kernel_sizes(
        group=shape.group,
        window=shape.window,
        cache_block=shape.cache_block,
        value_size=shape.value_size,
        extra_size=shape.extra_size,
        shares_value=shape.is_latent,
    )


def compiled(kind: str, shape: Shape, dtype: str = "bf16") -> MachineCode:
    """Compile the kernel of chunks of many rows ("tiles") or of one row ("splits", or "few" of them)."""
    from moeserve.triton_kernels.latent_attention import few_config
    from moeserve.triton_kernels.paged_launch import CHUNKS_AT_ONCE
    from moeserve.triton_kernels.paged_splits import attend_split_kernel
    from moeserve.triton_kernels.paged_tiles import attend_tile_kernel

    tile_config, split_config, splits = configs(shape, 4 if dtype == "fp32" else 2)
    own: dict[str, Any] = sizes(shape) | {"CHUNKS_AT_ONCE": CHUNKS_AT_ONCE}
    if kind == "tiles":
        kernel, config = attend_tile_kernel, tile_config
        own |= {"LEAST_ROWS": 2}
    else:
        kernel, config = attend_split_kernel, split_config if kind == "splits" else few_config(shape.num_heads, 2)
        own |= {"PIECE_SIZE": splits.piece_size, "NUM_PARTS": config.num_parts}
        own["BLOCK_V"] //= config.num_parts
    blocks = {"BLOCK_M": config.block_pairs, "BLOCK_C": config.block_positions}
    code: MachineCode = compile_attention(kernel, shape, blocks | own, config.compile_options, dtype)
    assert code.spilled_bytes == 0
    assert code.shared_bytes <= MAX_SHARED_BYTES
    return code


@pytest.mark.slow_but("[gpt-oss-", "[DeepSeek-V3-", "[Mixtral, cache")
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, kind) for name in SHAPES for kind in ("tiles", "splits")), ("DeepSeek-V3", "few")]
)
def test_production_shapes_copy_asynchronously_and_use_wgmma_for_many_rows(name: str, kind: str) -> None:
    code = compiled(kind, SHAPES[name])
    assert code.num_cp_async > 0
    is_wide = kind != "splits" or SHAPES[name].group >= 64
    assert not is_wide or code.num_wgmma > 0


@pytest.mark.slow_but("small gpt-oss", "DeepSeek-V3-fp32-splits")
@pytest.mark.parametrize("kind", ["tiles", "splits"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bf16") for name in SMALL_SHAPES), *((name, "fp32") for name in ("gpt-oss", "DeepSeek-V3"))],
)
def test_small_models_and_float32_fit(name: str, dtype: str, kind: str) -> None:
    code = compiled(kind, (SHAPES | SMALL_SHAPES)[name], dtype)
    assert dtype == "bf16" or "mma." not in code.ptx, "tensor cores have no float32"


@pytest.mark.parametrize("name", ["gpt-oss", "DeepSeek-V2-Lite", "DeepSeek-V3"])
def test_merging_fits(name: str) -> None:
    from moeserve.triton_kernels.paged_launch import BLOCK_MERGED, MERGE_WARPS, SPLITS_AT_ONCE
    from moeserve.triton_kernels.paged_splits import merge_splits_kernel

    shape = SHAPES[name]
    splits = configs(shape)[2]
    constants = {"WINDOW": shape.window, "PIECE_SIZE": splits.piece_size, "MAX_SPLITS": splits.max_splits}
    constants["SPLITS_AT_ONCE"] = min(SPLITS_AT_ONCE, splits.max_splits)
    block_values = sizes(shape)["BLOCK_V"]
    block = {"VALUE_SIZE": shape.value_size, "NUM_PARTS": 1, "PART_SIZE": block_values}
    block["BLOCK_V"] = min(block_values, BLOCK_MERGED)
    options = {"num_warps": MERGE_WARPS}
    code = compile_attention(merge_splits_kernel, shape, constants | block, options, "bf16")
    assert code.spilled_bytes == 0
    assert code.shared_bytes <= 32 * 1024  # so that several programs run at a time


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((128, 64, 128, 576), "bf16"), ((128, 64, 128, 576), "fp32"), ((16, 8, 16, 40), "bf16")],
    ids=["DeepSeek", "DeepSeek in float32", "small"],
)
def test_expanded_attention(sizes: tuple[int, int, int, int], dtype: str) -> None:
    """Parts of a key, value and vector of DeepSeek-V2-Lite and DeepSeek-V3; the number of heads changes no code."""
    from moeserve.triton_kernels import expanded_attention as expanded
    from moeserve.triton_kernels.paged_launch import CHUNKS_AT_ONCE

    config = expanded.tile_config(4 if dtype == "fp32" else 2)
    constants = {"BLOCK_M": config.block_pairs, "BLOCK_C": config.block_positions, "CHUNKS_AT_ONCE": CHUNKS_AT_ONCE}
    constants |= expanded.kernel_sizes(*sizes)
    code = compile_expanded(expanded.attend_expanded_kernel, constants, config.compile_options, dtype)
    assert code.spilled_bytes == 0
    assert code.shared_bytes <= MAX_SHARED_BYTES
    assert dtype == "fp32" or (code.num_wgmma > 0 and code.num_cp_async > 0)
    assert dtype == "bf16" or "mma" not in code.ptx, "tensor cores have no float32"


def test_gathering_vectors() -> None:
    from moeserve.triton_kernels import expanded_attention as expanded
    from moeserve.triton_kernels.paged_launch import CHUNKS_AT_ONCE

    constants = {"VECTOR_SIZE": 576, "CACHE_BLOCK": 64, "BLOCK_P": 1024, "BLOCK_C": expanded.GATHERED_POSITIONS}
    constants |= {"CHUNKS_AT_ONCE": CHUNKS_AT_ONCE}
    code = compile_expanded(expanded.gather_vectors_kernel, constants, {"num_warps": expanded.GATHER_WARPS}, "bf16")
    assert code.spilled_bytes == 0
    assert "st.global.v4.b32" in code.ptx  # 16 bytes at a time


def compile_expanded(kernel: Any, constants: dict[str, Any], options: dict[str, Any], dtype: str) -> MachineCode:
    types = dict.fromkeys(("starts_ptr", "row_starts_ptr", "context_lens_ptr", "block_table_ptr"), "*i32")
    types |= dict.fromkeys(("state_ptr", "maximum_ptr", "total_ptr"), "*fp32") | {"scale": "fp32"}
    signature = {
        name: types.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
        if name not in constants
    }
    changing = {"table_stride", "num_chunks", "num_tiles", "first", "num_positions"}
    return compile_kernel(kernel, signature, constants, options, not_divisible=changing)


def test_writing_latents_needs_no_shared_memory() -> None:
    from moeserve.triton_kernels.latent_attention import WRITE_WARPS, write_latents_kernel

    signature = {"latent_ptr": "*bf16", "cache_ptr": "*bf16", "slots_ptr": "*i64"}
    signature |= dict.fromkeys(("token_stride", "cache_block_stride", "cache_position_stride", "vector_size"), "i32")
    constexprs = {"element_stride": 1, "CACHE_BLOCK": 16, "BLOCK_P": 1024}  # a launch makes constants of ones
    code = compile_kernel(write_latents_kernel, signature, constexprs, {"num_warps": WRITE_WARPS})
    assert code.spilled_bytes == code.shared_bytes == 0
    assert "st.global.v4.b32" in code.ptx  # 16 bytes at a time
