"""Weights that compressed-tensors' own library wrote are read with the values that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from moeserve.layers.rows import whole
from moeserve.models.checkpoint.loading import Destinations, load_weights
from moeserve.models.checkpoint.shards import open_checkpoint
from moeserve.models.checkpoint.weight_format import read_weight_format
from moeserve.models.config_values import ConfigValues

pytest.importorskip("compressed_tensors", reason="needs Python 3.11")
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

# O outputs, I inputs


def groups_of(weight_OI: Tensor, weights: QuantizationArgs) -> Tensor:
    """Return the values that share a scale, in the last dimension."""
    match weights.strategy:
        case "tensor":
            return weight_OI.reshape(1, -1)
        case "channel":
            return weight_OI[:, None]
        case "block":
            height, width = weights.block_structure
            return weight_OI.unflatten(0, (-1, height)).unflatten(2, (-1, width)).transpose(1, 2).flatten(2)
    return weight_OI.unflatten(1, (-1, weights.group_size))


def quantize(linear: nn.Linear, weights: QuantizationArgs) -> None:
    """Set the scales and zero points of a layer, by the range of each group."""
    groups = groups_of(linear.weight.data, weights)
    global_scale = None
    if weights.strategy == "tensor_group":
        global_scale = generate_gparam(linear.weight.amin(), linear.weight.amax())
        linear.weight_global_scale.data.copy_(global_scale)
    found = calculate_qparams(groups.amin(-1), groups.amax(-1), weights, global_scale=global_scale)
    for parameter, values in zip((linear.weight_scale, linear.weight_zero_point), found, strict=True):
        parameter.data.copy_(values.reshape(parameter.shape))


def written_and_read(
    folder: Path, presets: dict[str, str], changes: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """Write a checkpoint of one layer for each preset, by the layer's name. Weights are quantised with some changes.

    Return the layers as the library reads them, and the quantization_config.
    """
    torch.manual_seed(0)
    model = nn.Module()
    groups = {}
    for number, (name, preset) in enumerate(presets.items()):
        setattr(model, name, nn.Linear(384, 256, bias=False))
        groups[f"group_{number}"] = scheme = preset_name_to_scheme(preset, [f"re:{name}"])
        scheme.weights = scheme.weights.model_copy(update=changes)
    apply_quantization_config(model, QuantizationConfig(config_groups=groups))
    with torch.no_grad():
        for layer in model.children():
            nn.init.normal_(layer.weight)
            quantize(layer, layer.quantization_scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    config = compressor.quantization_config.model_dump(mode="json")
    compressor.decompress_model(model)
    return model, config


@pytest.mark.parametrize(
    ("presets", "changes", "stored_as"),
    [
        ({"a": "FP8"}, {}, "fp8"),
        ({"a": "FP8_DYNAMIC"}, {}, "fp8"),
        ({"a": "FP8_BLOCK"}, {}, "fp8 in blocks of 128 x 128"),
        ({"a": "FP8_DYNAMIC"}, {"strategy": "group", "group_size": 48}, "fp8 in blocks of 1 x 48"),
        ({"a": "FP8_BLOCK"}, {"block_structure": [32, 96]}, "fp8 in blocks of 32 x 96"),
        ({"a": "MXFP8"}, {}, "mxfp8"),
        ({"a": "MXFP8A16"}, {}, "mxfp8"),
        ({"a": "MXFP8", "b": "FP8_BLOCK", "c": "FP8"}, {}, None),
        ({"a": "NVFP4A16"}, {}, "nvfp4"),
        ({"a": "NVFP4"}, {}, "nvfp4"),
        ({"a": "MXFP4A16"}, {}, "mxfp4 of compressed-tensors"),
        ({"a": "W4A16"}, {"group_size": 32}, "int4 of compressed-tensors"),
        ({"a": "W4A16_ASYM"}, {"group_size": 32}, "int4 of compressed-tensors"),
        ({"a": "W4A16"}, {"group_size": 128}, "int4 of compressed-tensors"),
        ({"a": "W4A16_ASYM"}, {"group_size": 128}, "int4 of compressed-tensors"),
        ({"a": "W8A16"}, {}, "int8 of compressed-tensors"),
        ({"a": "W8A8"}, {}, "int8 of compressed-tensors"),
        ({"a": "FP8_DYNAMIC", "b": "NVFP4A16"}, {}, "nvfp4 and fp8"),
        ({"a": "FP8_DYNAMIC", "b": "FP8_BLOCK", "c": "W8A8"}, {}, None),
        ({"a": "W4A16", "b": "W8A16", "c": "MXFP4A16"}, {}, None),
        ({"a": "W4A16_ASYM", "b": "W4A16", "c": "W8A8"}, {}, None),
    ],
)
def test_values_are_those_that_the_library_reads(
    tmp_path: Path, presets: dict[str, str], changes: dict[str, Any], stored_as: str | None
) -> None:
    model, config = written_and_read(tmp_path, presets, changes)
    weight_format = read_weight_format(ConfigValues(tmp_path / "config.json", {"quantization_config": config}))
    assert stored_as is None or weight_format.stored_as == stored_as
    checkpoint = open_checkpoint(tmp_path, weight_format)
    read = {f"{name}.weight": torch.empty(256, 384) for name in presets}
    load_weights(checkpoint, Destinations({name: [whole(read[name])] for name in read}), show_progress=False)
    for name, preset in presets.items():
        exact = model.get_submodule(name).weight
        # The library computes 4-bit floats in bfloat16: the scale is rounded, and so is its product with a value.
        tolerance = 2**-8 + 2**-9 if "FP4" in preset else 1e-6
        assert exact.abs().max() > 1
        torch.testing.assert_close(read[f"{name}.weight"], exact.float(), rtol=tolerance, atol=0)
