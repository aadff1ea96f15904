"""Checkpoints of integers as GPTQ, AWQ and compressed-tensors write them, encoded by the formats' definitions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
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
    bits: int = 4
    group_I: Tensor | None = None  # int32; None: the inputs of a group are neighbours

    @property
    def groups_of_inputs(self) -> Tensor:
        num_inputs, num_groups = self.codes_OI.shape[1], self.zeros_OG.shape[1]
        in_order = torch.arange(num_inputs, dtype=torch.int32) * num_groups // num_inputs
        return in_order if self.group_I is None else self.group_I

    @property
    def values_OI(self) -> Tensor:
        """float32"""
        group_I = self.groups_of_inputs.long()
        return (self.codes_OI - self.zeros_OG[:, group_I]) * self.scales_OG[:, group_I].float()


def quantize(
    weight_OI: Tensor, group_size: int, dtype: torch.dtype = torch.float16, *, bits: int = 4, is_reordered: bool = False
) -> Quantized:
    """Quantise to the range of each group. The lowest and highest codes need not occur: zero points are integers.

    Args:
        is_reordered: groups have any inputs, as with act-order.
    """
    num_inputs = weight_OI.shape[1]
    order_I = torch.arange(num_inputs)
    if is_reordered:
        order_I = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))
    groups, highest = weight_OI.float()[:, order_I].unflatten(1, (-1, group_size)), 2**bits - 1
    low, high = groups.amin(-1), groups.amax(-1)
    scales_OG = ((high - low) / (highest - 2)).clamp(min=1e-4).to(dtype)
    zeros_OG = (-low / scales_OG.float()).round().int().clamp(1, highest)
    codes = (groups / scales_OG.float()[..., None]).round().int() + zeros_OG[..., None]
    codes_OI = codes.clamp(0, highest).flatten(1)[:, order_I.argsort()]
    group_I = (order_I.argsort() // group_size).int() if is_reordered else None
    return Quantized(codes_OI, scales_OG, zeros_OG, bits, group_I)


def packed(values: Tensor, dim: int, order: tuple[int, ...] | None = None, bits: int = 4) -> Tensor:
    """int32 words of values along a dimension of a matrix, bit after bit, that of the lowest bits first.

    Args:
        order: the values of each word by their places in it, from the lowest bits.
    """
    rows = values.long().movedim(dim, -1)
    if order is not None:
        rows = rows.unflatten(-1, (-1, len(order)))[..., list(order)].flatten(-2)
    bits_of_rows = (rows[..., None] >> torch.arange(bits) & 1).flatten(-2).numpy()
    padded = np.pad(bits_of_rows, [(0, 0)] * (bits_of_rows.ndim - 1) + [(0, -bits_of_rows.shape[-1] % 32)])
    words = np.packbits(padded.astype(np.uint8), axis=-1, bitorder="little").view(np.int32)
    return torch.from_numpy(words.copy()).movedim(-1, dim).contiguous()


def encode(kind: str, prefix: str, weight: Quantized) -> dict[str, Tensor]:
    """Return the stored tensors of the weight `prefix`.weight."""
    codes_IO, scales_GO, zeros_GO = weight.codes_OI.T, weight.scales_OG.T.contiguous(), weight.zeros_OG.T
    num_outputs, num_inputs = weight.codes_OI.shape
    match kind:
        case "gptq" | "gptq_v2":
            return {
                f"{prefix}.qweight": packed(codes_IO, 0, bits=weight.bits),
                f"{prefix}.qzeros": packed(zeros_GO - int(kind == "gptq"), 1, bits=weight.bits),
                f"{prefix}.scales": scales_GO,
                f"{prefix}.g_idx": weight.groups_of_inputs,
            }
        case "awq":
            return {
                f"{prefix}.qweight": packed(codes_IO, 1, AWQ_ORDER),
                f"{prefix}.qzeros": packed(zeros_GO, 1, AWQ_ORDER),
                f"{prefix}.scales": scales_GO,
            }
    assert kind == "compressed-tensors"
    return {
        f"{prefix}.weight_packed": packed(weight.codes_OI, 1, bits=weight.bits),
        f"{prefix}.weight_zero_point": packed(weight.zeros_OG, 0, bits=weight.bits),
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
