"""Checkpoints in int4 as GPTQ, AWQ and compressed-tensors write them, encoded by the formats' definitions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from reference_models import Reference
from safetensors.torch import load_file
from torch import Tensor

# O outputs, I inputs, G groups of inputs

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "desc_act": False, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": False},
                "input_activations": None,
            }
        },
        "ignore": ["lm_head"],
    },
}


@dataclass(frozen=True)
class Quantized:
    """weight = (codes - zeros) * scales"""

    codes_OI: Tensor  # int32
    scales_OG: Tensor
    zeros_OG: Tensor  # int32

    @property
    def values_OI(self) -> Tensor:
        """float32"""
        group_size = self.codes_OI.shape[1] // self.zeros_OG.shape[1]
        zeros_OI, scales_OI = (of.repeat_interleave(group_size, 1) for of in (self.zeros_OG, self.scales_OG))
        return (self.codes_OI - zeros_OI) * scales_OI.float()


def quantize(weight_OI: Tensor, group_size: int, dtype: torch.dtype = torch.float16) -> Quantized:
    """Quantise to the range of each group. Codes 0 and 15 need not occur, because zero points are integers."""
    groups = weight_OI.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(-1), groups.amax(-1)
    scales_OG = ((high - low) / 13).clamp(min=1e-4).to(dtype)
    zeros_OG = (-low / scales_OG.float()).round().int().clamp(1, 15)
    codes = (groups / scales_OG.float()[..., None]).round().int() + zeros_OG[..., None]
    return Quantized(codes.clamp(0, 15).flatten(1), scales_OG, zeros_OG)


def packed(values: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 words of eight values along a dimension of a matrix; that of the lowest bits is order[0]."""
    eights = values.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    words = sum(eights[..., place] << 4 * index for index, place in enumerate(order))
    assert isinstance(words, Tensor)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def encode(kind: str, prefix: str, weight: Quantized) -> dict[str, Tensor]:
    """Return the stored tensors of the weight `prefix`.weight."""
    codes_IO, scales_GO, zeros_GO = weight.codes_OI.T, weight.scales_OG.T.contiguous(), weight.zeros_OG.T
    num_outputs, num_inputs = weight.codes_OI.shape
    match kind:
        case "gptq" | "gptq_v2":
            group_I = torch.arange(num_inputs, dtype=torch.int32) * len(scales_GO) // num_inputs
            return {
                f"{prefix}.qweight": packed(codes_IO, 0),
                f"{prefix}.qzeros": packed(zeros_GO - int(kind == "gptq"), 1),
                f"{prefix}.scales": scales_GO,
                f"{prefix}.g_idx": group_I,
            }
        case "awq":
            return {
                f"{prefix}.qweight": packed(codes_IO, 1, AWQ_ORDER),
                f"{prefix}.qzeros": packed(zeros_GO, 1, AWQ_ORDER),
                f"{prefix}.scales": scales_GO,
            }
    assert kind == "compressed-tensors"
    return {
        f"{prefix}.weight_packed": packed(weight.codes_OI, 1),
        f"{prefix}.weight_zero_point": packed(weight.zeros_OG, 0),
        f"{prefix}.weight_scale": weight.scales_OG,
        f"{prefix}.weight_shape": torch.tensor([num_outputs, num_inputs]),
    }


def encoded_and_decoded(
    original: Reference, kind: str, group_size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Return tensors with projections and experts in int4, the same tensors decoded, and the quantization_config."""
    encoded: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    dtype = torch.bfloat16 if kind == "compressed-tensors" else torch.float16
    for key, tensor in load_file(original.folder / "model.safetensors").items():
        if re.search(r"(_proj|kv_a_proj_with_mqa|w[123])\.weight$", key):
            weight = quantize(tensor, group_size, dtype)
            encoded |= encode(kind, key.removesuffix(".weight"), weight)
            decoded[key] = weight.values_OI
        else:
            encoded[key] = decoded[key] = tensor
    return encoded, decoded, CONFIGS[kind]
