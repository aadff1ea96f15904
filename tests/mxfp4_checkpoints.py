"""Checkpoints of gpt-oss with experts in MXFP4, encoded by the definition in the OCP Microscaling specification."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from reference_models import SHAPES, Reference, Shape
from safetensors.torch import load_file

FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
DEEPSEEK_V4 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head", "re:.*gate$"],
}


def in_whole_groups(name: str, **settings: float) -> Shape:
    shape = SHAPES[name]
    return dataclasses.replace(shape, settings=shape.settings | {"hidden_size": 64, "intermediate_size": 96} | settings)


SHAPE = in_whole_groups("gpt-oss")
OF_GGUF = in_whole_groups("gpt-oss", swiglu_limit=7.0)  # which the file does not say
OF_COMPRESSED_TENSORS = in_whole_groups("mixtral")


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks, scales and the values that they stand for, of [..., columns] in groups of 32 columns."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(dim=-1) / 6.0).log2().ceil().clamp(-127, 127)
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - FP4_VALUES).abs().argmin(dim=-1)
    values = (FP4_VALUES[codes] * exponents.exp2()[..., None]).flatten(-2)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8), values


def encoded_like_deepseek_v4(plain: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return tensors with experts in MXFP4 and some matrices in fp8, of random codes, and the same decoded."""
    generator = torch.Generator().manual_seed(0)
    encoded, decoded = dict(plain), dict(plain)
    for name, weight in plain.items():
        if not name.endswith(tuple(f"{end}.weight" for end in ("w1", "w2", "w3", "wq_b", "wo_b"))):
            continue
        is_expert = ".experts." in name and "shared" not in name
        group = 32 if is_expert else 128
        groups = [-(-size // step) for size, step in zip(weight.shape, (1 if is_expert else 128, group), strict=True)]
        exponents = torch.randint(119, 123, groups, generator=generator, dtype=torch.uint8)
        scales = torch.exp2(exponents.float() - 127).repeat_interleave(group, dim=1)[:, : weight.shape[1]]
        if is_expert:
            codes = torch.randint(0, 16, weight.shape, generator=generator)
            values = FP4_VALUES[codes]
            encoded[name] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
        else:
            scales = scales.repeat_interleave(128, dim=0)[: len(weight)]
            values = torch.randn(weight.shape, generator=generator).mul(4).to(torch.float8_e4m3fn)
            encoded[name], values = values, values.float()
        encoded[name.removesuffix("weight") + "scale"] = exponents.view(torch.float8_e8m0fnu)
        decoded[name] = values * scales
    assert len(encoded) > len(plain) + 12
    return encoded, decoded


def encoded_like_compressed_tensors(
    plain: dict[str, torch.Tensor], *, without: str = "-"
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return tensors with experts and attention in MXFP4 except those whose name contains `without`, and decoded."""
    encoded, decoded = {}, {}
    for name, weight in plain.items():
        if name.endswith(tuple(f"{end}.weight" for end in ("w1", "w2", "w3", "o_proj"))) and without not in name:
            blocks, encoded[f"{name}_scale"], decoded[name] = to_mxfp4(weight)
            encoded[f"{name}_packed"] = blocks.flatten(-2)
        else:
            encoded[name] = decoded[name] = weight
    assert len(encoded) > len(decoded)
    return encoded, decoded


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
