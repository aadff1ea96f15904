"""Checkpoints of gpt-oss with experts in MXFP4, encoded by the definition in the OCP Microscaling specification."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from reference_models import SHAPES, Reference
from safetensors.torch import load_file

FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

_SMALL = SHAPES["gpt-oss"]
SHAPE = dataclasses.replace(_SMALL, settings=_SMALL.settings | {"hidden_size": 64, "intermediate_size": 96})


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks, scales and the values that they stand for, of [..., columns] in groups of 32 columns."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(dim=-1) / 6.0).log2().ceil().clamp(-127, 127)
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - FP4_VALUES).abs().argmin(dim=-1)
    values = (FP4_VALUES[codes] * exponents.exp2()[..., None]).flatten(-2)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8), values


def encoded_and_decoded(original: Reference) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
    """Return the tensors of a checkpoint in MXFP4, the same decoded, and the quantization_config."""
    encoded, decoded = {}, {}
    for key, tensor in load_file(original.folder / "model.safetensors").items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):  # [experts, inputs, outputs]
            blocks, scales, values = to_mxfp4(tensor.transpose(1, 2))
            encoded[f"{key}_blocks"], encoded[f"{key}_scales"] = blocks, scales
            decoded[key] = values.transpose(1, 2).contiguous()
        else:
            encoded[key] = decoded[key] = tensor
    assert len(encoded) - len(decoded) == 2 * original.model.config.num_hidden_layers
    return encoded, decoded, QUANTIZATION
