"""Forms in which quantised checkpoints are published: mixed formats, act-order, and experts in one tensor.

Each is encoded here by the formulas of its format. Tokens and logits are those of transformers with decoded weights.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from int4_checkpoints import encode, quantize
from mxfp4_checkpoints import FP4_VALUES
from reference_models import SHAPES, Reference, make_reference
from safetensors.torch import load_file
from test_quantized import assert_twins
from torch import Tensor

# e experts, O and I the last two dimensions of a tensor

Tensors = dict[str, Tensor]
Encoded = tuple[Tensors, Tensor]  # the stored parts of a weight, and its values
LINEAR = re.compile(r"(.*(_proj|_linear|w[123]))\.weight")


def original_of(folder: Path, name: str, **settings: int) -> Reference:
    shape = SHAPES[name]
    return make_reference(folder / "original", dataclasses.replace(shape, settings=shape.settings | settings))


def encoded_and_decoded(tensors: Tensors, encode_weight: Callable[[str, Tensor], Encoded | None]) -> tuple:
    """Return all tensors encoded, and all decoded. A weight for which a function returns None stays as it is."""
    encoded: Tensors = {}
    decoded: Tensors = {}
    for name, tensor in tensors.items():
        found = encode_weight(name, tensor)
        encoded |= {name: tensor} if found is None else found[0]
        decoded[name] = tensor if found is None else found[1]
    assert encoded.keys() != decoded.keys()
    return encoded, decoded


# --- mixed formats and act-order


def gptq(bits: int, *, is_reordered: bool = False) -> Callable[[str, Tensor], Encoded]:
    def encode_weight(name: str, weight_OI: Tensor) -> Encoded:
        weight = quantize(weight_OI, 32, bits=bits, is_reordered=is_reordered)
        return encode("gptq", name.removesuffix(".weight"), weight), weight.values_OI

    return encode_weight


OF_GPTQMODEL = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "dynamic": {
        "+:.*self_attn.*": {"bits": 8, "group_size": 32},
        "+:.*layers\\.1\\..*w2": {"bits": 3},
        "-:.*layers\\.0\\..*w1": {},
    },
}
OF_AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "extra_config": {
        "model.layers.0.self_attn.q_proj": {"bits": 8},
        ".*w2": {"bits": 3, "group_size": 32},
        "model.layers.0.block_sparse_moe.experts.0.w1": {"bits": 16, "data_type": "float"},
    },
}


@pytest.mark.slow_but("True-2", "quantization3")
@pytest.mark.parametrize(
    ("quantization", "is_reordered", "tp"),
    [(OF_GPTQMODEL, False, 1), (OF_GPTQMODEL, True, 1), (OF_GPTQMODEL, True, 2), (OF_AUTO_ROUND, False, 1)],
)
def test_several_sizes_of_codes_in_one_checkpoint(
    quantization: dict[str, Any], is_reordered: bool, tp: int, tmp_path: Path
) -> None:
    original = original_of(tmp_path, "mixtral", hidden_size=64, intermediate_size=96)

    def encode_weight(name: str, weight: Tensor) -> Encoded | None:
        if not LINEAR.fullmatch(name) or ("layers.0" in name and "w1" in name):
            return None
        bits = 8 if "self_attn" in name else 3 if "layers.1" in name and "w2" in name else 4
        return gptq(bits, is_reordered=is_reordered)(name, weight)

    encoded, decoded = encoded_and_decoded(load_file(original.folder / "model.safetensors"), encode_weight)
    config = quantization | {"desc_act": is_reordered}
    assert_twins(tmp_path, original, encoded, decoded, config, tp=tp)


# --- experts in one tensor


def fp8(name: str, weight: Tensor, scale: Tensor, suffix: str) -> Encoded:
    """Return a weight in E4M3 with scales that are broadcast to its shape."""
    of_values = scale.reshape(scale.shape + (1,) * (weight.dim() - scale.dim())).float()
    codes = (weight / of_values).to(torch.float8_e4m3fn)
    return {name: codes, name + suffix: scale}, codes.float() * of_values


def of_tensor(name: str, weight: Tensor) -> Encoded:
    return fp8(name, weight, weight.abs().max() / 448, "_scale" if name.endswith(".weight") else "_weight_scale")


def of_experts(name: str, weight: Tensor) -> Encoded:
    """Return a weight with a scale for each expert, or for a whole matrix."""
    scale = weight.flatten(1).abs().amax(1) / 448 if weight.dim() == 3 else weight.abs().max() / 448
    return fp8(name, weight, scale, "_scale" if name.endswith(".weight") else "_weight_scale")


def of_rows(name: str, weight: Tensor) -> Encoded:
    return fp8(name, weight, (weight.abs().amax(-1, keepdim=True) / 448).bfloat16(), "_scale")


def of_columns(name: str, weight: Tensor) -> Encoded:
    """Return a weight as FBGEMM stores it: experts have scales of columns."""
    dim = -2 if weight.dim() == 3 else -1
    return fp8(name, weight, weight.abs().amax(dim, keepdim=True) / 448, "_scale")


def of_blocks(name: str, weight: Tensor) -> Encoded:
    height, width = 16, 24
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[-1] % width, 0, -weight.shape[-2] % height))
    scale = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height)).abs().amax((-1, -3)) / 448
    of_values = scale.repeat_interleave(height, -2).repeat_interleave(width, -1)
    of_values = of_values[..., : weight.shape[-2], : weight.shape[-1]]
    codes = (weight / of_values).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}, codes.float() * of_values


def of_groups(width: int, *, in_powers: bool = False) -> Callable[[str, Tensor], Encoded]:
    """Return an encoder with a scale for each group of inputs, in E8M0 if it is a power of two."""

    def encode_weight(name: str, weight: Tensor) -> Encoded:
        scale = weight.unflatten(-1, (-1, width)).abs().amax(-1) / 448
        exponents = scale.log2().ceil()
        of_values = (exponents.exp2() if in_powers else scale).repeat_interleave(width, -1)
        codes = (weight / of_values).to(torch.float8_e4m3fn)
        suffix = "_scale" if name.endswith(".weight") else "_weight_scale"
        stored = (exponents + 127).to(torch.uint8) if in_powers else scale
        return {name: codes, name + suffix: stored}, codes.float() * of_values

    return encode_weight


def in_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes in pairs, scales of 16 inputs, the scale of all, and values, of [..., I]."""
    of_all = weight.abs().max() / 448 / 6
    groups = weight.unflatten(-1, (-1, 16))
    scales = (groups.abs().amax(-1) / 6 / of_all).to(torch.float8_e4m3fn)
    of_values = (scales.float() * of_all)[..., None]
    codes = ((groups / of_values)[..., None] - FP4_VALUES).abs().argmin(-1)
    values = (FP4_VALUES[codes] * of_values).flatten(-2)
    codes = codes.flatten(-2).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales, of_all, values


def nvfp4_of_compressed_tensors(name: str, weight: Tensor) -> Encoded:
    codes, scales, of_all, values = in_nvfp4(weight)
    return {f"{name}_packed": codes, f"{name}_scale": scales, f"{name}_global_scale": 1 / of_all.view(1)}, values


def nvfp4_of_modelopt(name: str, weight: Tensor) -> Encoded:
    """Return a weight with the groups along the inputs, which are the last dimension but one of experts."""
    is_expert = weight.dim() == 3
    codes, scales, of_all, values = in_nvfp4(weight.transpose(1, 2) if is_expert else weight)
    if is_expert:
        codes, scales, values = (each.transpose(1, 2).contiguous() for each in (codes, scales, values))
    prefix = f"{name}_" if is_expert else name.removesuffix("weight")
    scales_of = {"weight_scale": scales, "weight_scale_2": of_all, "input_scale": torch.ones(())}
    return {name: codes} | {prefix + end: scale for end, scale in scales_of.items()}, values


MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "exclude_modules": ["lm_head", "*router*"]}


def of_compressed_tensors(weights: dict[str, Any], format: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "type": "float"}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*router"],
    }


OF_ROWS = of_compressed_tensors({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized")
NVFP4 = of_compressed_tensors({"num_bits": 4, "type": "float", "strategy": "tensor_group"}, "nvfp4-pack-quantized")
OF_GROUPS = {"num_bits": 8, "type": "float", "strategy": "group"}
GROUPS = of_compressed_tensors(OF_GROUPS | {"group_size": 48}, "float-quantized")
MXFP8 = of_compressed_tensors(OF_GROUPS | {"group_size": 32, "scale_dtype": "torch.uint8"}, "mxfp8-quantized")
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 24]}
OF_16 = {"hidden_size": 64, "intermediate_size": 48}
OF_32 = {"hidden_size": 64, "intermediate_size": 96}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "encode_weight", "quantization", "tp"),
    [
        ("granite", {}, of_rows, OF_ROWS, 1),
        ("granite", {}, of_experts, MODELOPT | {"quant_algo": "FP8"}, 2),
        ("granite", OF_16, nvfp4_of_compressed_tensors, NVFP4, 1),
        ("granite-hybrid", {}, of_rows, OF_ROWS, 1),
        ("llama4", {}, of_tensor, MODELOPT | {"quant_algo": "FP8"}, 1),
        ("llama4", OF_16 | {"intermediate_size_mlp": 64}, nvfp4_of_modelopt, MODELOPT | {"quant_algo": "NVFP4"}, 2),
        ("llama4", {}, of_columns, {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, 1),
        ("gpt-oss", {}, of_tensor, MODELOPT | {"quant_algo": "FP8"}, 1),
        ("gpt-oss", OF_16 | {"head_dim": 16}, nvfp4_of_modelopt, MODELOPT | {"quant_algo": "NVFP4"}, 1),
        ("granite", OF_32, of_groups(32, in_powers=True), MODELOPT | {"quant_algo": "MXFP8"}, 2),
        ("mistral4", {}, of_blocks, BLOCKS, 1),
        ("gemma4", {}, of_rows, OF_ROWS, 1),
        ("step3p7", {}, of_rows, OF_ROWS, 1),
    ],
)
def test_experts_in_one_tensor(
    name: str,
    settings: dict[str, int],
    encode_weight: Callable[[str, Tensor], Encoded],
    quantization: dict[str, Any],
    tp: int,
    tmp_path: Path,
) -> None:
    original = original_of(tmp_path, name, **settings)

    def encode_some(of: str, weight: Tensor) -> Encoded | None:
        if "vision" in of or "multi_modal" in of:
            return None
        return encode_weight(of, weight) if (weight.dim() == 3 and "conv" not in of) or "o_proj.weight" in of else None

    tensors = load_file(original.folder / "model.safetensors")
    encoded, decoded = encoded_and_decoded(tensors, encode_some)
    assert any(tensor.dim() == 3 and tensor.dtype in (torch.uint8, torch.float8_e4m3fn) for tensor in encoded.values())
    assert_twins(tmp_path, original, encoded, decoded, quantization, tp=tp)


@pytest.mark.parametrize(
    ("settings", "encode_weight", "quantization"),
    [
        ({"hidden_size": 96, "intermediate_size": 144}, of_groups(48), GROUPS),
        (OF_32, of_groups(32, in_powers=True), MXFP8),
        (OF_32, of_groups(32, in_powers=True), MODELOPT | {"quant_algo": "MXFP8"}),
    ],
)
def test_scales_of_groups(
    settings: dict[str, int],
    encode_weight: Callable[[str, Tensor], Encoded],
    quantization: dict[str, Any],
    tmp_path: Path,
) -> None:
    original = original_of(tmp_path, "mixtral", **settings)

    def encode_some(of: str, weight: Tensor) -> Encoded | None:
        return encode_weight(of, weight) if LINEAR.fullmatch(of) else None

    encoded, decoded = encoded_and_decoded(load_file(original.folder / "model.safetensors"), encode_some)
    assert_twins(tmp_path, original, encoded, decoded, quantization)


@pytest.mark.slow_but("qwen3-moe", "nemotron-h")
@pytest.mark.parametrize("name", ["qwen3-moe", "nemotron-h", "deepseek-v4"])
def test_the_form_of_transformers_in_fp8(name: str, tmp_path: Path) -> None:
    original = original_of(tmp_path, name)
    own = tmp_path / "own"
    original.model.save_pretrained(own, save_original_format=False)
    reference = Reference(own, original.model)

    def encode_some(of: str, weight: Tensor) -> Encoded | None:
        return of_blocks(of, weight) if weight.dim() == 3 and "conv" not in of else None

    encoded, decoded = encoded_and_decoded(load_file(own / "model.safetensors"), encode_some)
    assert_twins(tmp_path, reference, encoded, decoded, BLOCKS)


@pytest.mark.parametrize("name", ["llama4", "gpt-oss"])
def test_experts_that_a_quantiser_has_separated(name: str, tmp_path: Path) -> None:
    """Quantisers of single matrices store each expert of its own, whatever the family's form."""
    original = original_of(tmp_path, name)
    separate: Tensors = {}
    stacked: Tensors = {}
    for of, tensor in load_file(original.folder / "model.safetensors").items():
        match = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?", of)
        if match is None:
            separate[of] = stacked[of] = tensor
            continue
        prefix, part, is_bias = match.groups()
        is_interleaved = name == "gpt-oss"
        values = []
        for expert, weight_IO in enumerate(tensor):
            if part == "down_proj":
                parts = {"down_proj": weight_IO}
            elif is_interleaved:
                parts = {"gate_proj": weight_IO[..., 0::2], "up_proj": weight_IO[..., 1::2]}
            else:
                parts = dict(zip(("gate_proj", "up_proj"), weight_IO.chunk(2, dim=-1), strict=True))
            read = []
            for each, weight in parts.items():
                if is_bias:
                    separate[f"{prefix}.{expert}.{each}.bias"] = weight.contiguous()
                    continue
                stored, of_each = of_rows(f"{prefix}.{expert}.{each}.weight", weight.T.contiguous())
                separate |= stored
                read.append(of_each.T)
            if read:
                values.append(torch.stack(read, -1).flatten(1) if is_interleaved else torch.cat(read, -1))
        stacked[of] = torch.stack(values) if values else tensor
    assert_twins(tmp_path, original, separate, stacked, OF_ROWS)
