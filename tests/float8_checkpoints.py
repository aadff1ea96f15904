"""Checkpoints in DeepSeek's 8-bit blocks, encoded by the definition in DeepSeek's README."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from reference_models import SHAPES, Reference, Shape
from safetensors.torch import load_file, save_file

# Sizes of several blocks, the last of which are smaller.
LARGE: dict[str, dict[str, Any]] = {
    "mixtral": dict(hidden_size=160, intermediate_size=200, head_dim=64, initializer_range=0.1),
    "deepseek-v3": dict(
        hidden_size=256,
        intermediate_size=512,
        initializer_range=0.08,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=136,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=200,
    ),
    "deepseek-v32": dict(index_n_heads=4, index_head_dim=48),
    "gpt-oss": dict(hidden_size=192, intermediate_size=160, initializer_range=0.1),
}
LARGE["deepseek-v32"] |= LARGE["deepseek-v3"]


def large(name: str) -> Shape:
    shape = SHAPES[name]
    return dataclasses.replace(shape, settings=shape.settings | LARGE[name])


def write(folder: Path, original: Reference, tensors: dict[str, torch.Tensor], quantization: Any) -> None:
    """Copy a checkpoint with other weights and their quantization_config."""
    shutil.copytree(original.folder, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        values["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(values))


def to_fp8_blocks(weight_OI: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, ...]:
    """Return codes, scales and their values, block by block. The largest value of a block becomes 448."""
    num_rows, num_columns = weight_OI.shape
    codes_OI = torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn)
    values_OI = torch.empty(num_rows, num_columns)
    scale = torch.empty(-(-num_rows // height), -(-num_columns // width))
    for row in range(len(scale)):
        for column in range(scale.shape[1]):
            block = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
            scale[row, column] = weight_OI[block].abs().max() / 448
            codes_OI[block] = (weight_OI[block] / scale[row, column]).to(torch.float8_e4m3fn)
            values_OI[block] = codes_OI[block].float() * scale[row, column]
    return codes_OI, scale, values_OI


def encoded_and_decoded(
    original: Reference, block: tuple[int, int]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Return tensors with projections and experts in blocks, the same tensors decoded, and the quantization_config."""
    encoded: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(original.folder / "model.safetensors").items():
        if re.search(r"((?<!weights)_proj|kv_a_proj_with_mqa|w[123]|wq_b|wk)\.weight$", key):
            encoded[key], encoded[key + "_scale_inv"], decoded[key] = to_fp8_blocks(tensor, *block)
        else:
            encoded[key] = decoded[key] = tensor
    quantization = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic", "fmt": "e4m3"}
    return encoded, decoded, quantization
