"""Weights in int4 of GPTQ, AWQ and compressed-tensors: decoding against the formats' definitions, and every refusal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from int4_checkpoints import CONFIGS, Quantized, encode, quantize
from safetensors.torch import save_file
from torch import Tensor

from moeserve import CheckpointError
from moeserve.layers.rows import Destination, whole
from moeserve.layers.rows import some_columns as columns
from moeserve.layers.rows import some_rows as rows
from moeserve.models.checkpoint.loading import PIECE_VALUES, Destinations, load_weights
from moeserve.models.checkpoint.shards import open_checkpoint
from moeserve.models.checkpoint.weight_format import WeightFormat, read_weight_format
from moeserve.models.config_values import ConfigValues

# O outputs, I inputs, G groups of inputs

Stored = dict[str, Tensor]


def format_of(quantization: object) -> WeightFormat:
    return read_weight_format(ConfigValues(Path("config.json"), {"quantization_config": quantization}))


def random(num_outputs: int, num_inputs: int, group_size: int) -> Quantized:
    weight_OI = torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(num_inputs))
    return quantize(weight_OI, group_size)


def load(
    folder: Path, stored: Stored, quantization: object, *places: Destination, piece_values: int = PIECE_VALUES
) -> None:
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    checkpoint, into = open_checkpoint(folder, format_of(quantization)), Destinations({"a.weight": list(places)})
    load_weights(checkpoint, into, show_progress=False, piece_values=piece_values)


@pytest.mark.parametrize("group_size", [16, 48, 96])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("piece_values", [300, 2**21])  # pieces that begin inside a word, and all at once
def test_whole_tensors_and_parts(kind: str, group_size: int, piece_values: int, tmp_path: Path) -> None:
    weight = random(40, 96, group_size)
    memory_OI, some_rows, some_columns = torch.empty(40, 96), torch.empty(13, 96), torch.empty(40, 25)
    places = [whole(memory_OI), rows(some_rows, slice(11, 24), 40), columns(some_columns, slice(30, 55), 96)]
    load(tmp_path, encode(kind, "a", weight), CONFIGS[kind], *places, piece_values=piece_values)
    assert torch.equal(memory_OI, weight.values_OI)
    assert torch.equal(some_rows, weight.values_OI[11:24])
    assert torch.equal(some_columns, weight.values_OI[:, 30:55])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["gptq", "gptq_v2", "compressed-tensors"])
def test_every_number_of_bits(kind: str, bits: int, tmp_path: Path) -> None:
    weight_OI = torch.randn(64, 96, generator=torch.Generator().manual_seed(bits))
    weight = quantize(weight_OI, 32, bits=bits)
    stored = encode(kind, "a", weight)
    config = CONFIGS[kind] | ({"bits": bits} if kind != "compressed-tensors" else {})
    if kind == "compressed-tensors":
        config = symmetric(num_bits=bits, symmetric=False)
    memory_OI, some_rows = torch.empty(64, 96), torch.empty(13, 96)
    places = [whole(memory_OI), rows(some_rows, slice(11, 24), 64)]
    load(tmp_path, stored, config, *places, piece_values=700)  # pieces that begin inside of a word
    assert torch.equal(memory_OI, weight.values_OI)
    assert torch.equal(some_rows, weight.values_OI[11:24])


def test_a_row_may_end_inside_of_a_word(tmp_path: Path) -> None:
    """Two sizes of codes, so that the shape is read; 99 inputs with a scale for each output."""
    stored, exact = {}, {}
    for name, bits in (("a", 3), ("b", 4)):
        weight_OI = torch.randn(16, 99, generator=torch.Generator().manual_seed(bits))
        weight = quantize(weight_OI, 99, bits=bits)
        weight = dataclasses.replace(weight, zeros_OG=torch.full_like(weight.zeros_OG, 2 ** (bits - 1)))
        stored |= encode("compressed-tensors", name, weight)
        del stored[f"{name}.weight_zero_point"]
        exact[f"{name}.weight"] = weight.values_OI
    groups = [symmetric(num_bits=bits, strategy="channel")["config_groups"]["group_0"] for bits in (3, 4)]
    config = CONFIGS["compressed-tensors"] | {
        "config_groups": {str(number): each for number, each in enumerate(groups)}
    }
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    read = {name: torch.empty(16, 99) for name in exact}
    into = {name: [whole(memory)] for name, memory in read.items()}
    load_weights(open_checkpoint(tmp_path, format_of(config)), Destinations(into), show_progress=False)
    assert all(torch.equal(read[name], exact[name]) for name in exact)


def test_act_order_without_groups_of_inputs_is_refused(tmp_path: Path) -> None:
    stored = encode("gptq", "a", random(16, 64, 32))
    del stored["a.g_idx"]
    with pytest.raises(CheckpointError, match=r"'a\.qweight' has inputs in the order"):
        load(tmp_path, stored, CONFIGS["gptq"] | {"desc_act": True}, whole(torch.empty(16, 64)))


def test_without_zero_points_the_middle_code_is_zero(tmp_path: Path) -> None:
    weight = dataclasses.replace(random(16, 64, 32), zeros_OG=torch.full((16, 2), 8))
    stored = encode("compressed-tensors", "a", weight)
    del stored["a.weight_zero_point"]
    memory_OI = torch.empty(16, 64)
    load(tmp_path, stored, symmetric(), whole(memory_OI))
    assert torch.equal(memory_OI, weight.values_OI)


def symmetric(**changes: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True} | changes
    return CONFIGS["compressed-tensors"] | {"config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize("kind", ["gptq", "compressed-tensors"])
def test_groups_of_inputs_that_are_no_neighbours(kind: str, tmp_path: Path) -> None:
    weight = random(16, 64, 16)
    group_I = torch.arange(64).remainder(4).int()
    exact_OI = (weight.codes_OI - weight.zeros_OG[:, group_I]) * weight.scales_OG[:, group_I].float()
    name = "a.g_idx" if kind == "gptq" else "a.weight_g_idx"
    config = CONFIGS[kind] | ({"desc_act": True} if kind == "gptq" else {})
    memory_OI = torch.empty(16, 64)
    load(tmp_path, encode(kind, "a", weight) | {name: group_I}, config, whole(memory_OI))
    assert torch.equal(memory_OI, exact_OI)


def test_every_zero_point_of_gptq(tmp_path: Path) -> None:
    """From 1 to 16: they are stored as one less."""
    zeros_OG = torch.arange(1, 17).view(8, 2)
    weight = dataclasses.replace(random(8, 64, 32), zeros_OG=zeros_OG)
    memory_OI = torch.empty(8, 64)
    load(tmp_path, encode("gptq", "a", weight), CONFIGS["gptq"], whole(memory_OI))
    assert torch.equal(memory_OI, weight.values_OI)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s | {"a.qweight": s["a.qweight"].long()}, r"'a.qweight' is I64"),
        (lambda s: s | {"a.qzeros": s["a.qzeros"].short()}, r"'a.qzeros' is I16"),
        (lambda s: s | {"a.scales": s["a.scales"].double()}, r"'a.scales' is F64"),
        (lambda s: s | {"a.scales": s["a.scales"][:, 1:]}, r"'a.scales' has shape \[4, 15\].*\[16, 64\]"),
        (lambda s: s | {"a.scales": s["a.scales"][:3]}, r"'a.qzeros' has shape \[4, 2\].*\[3, 2\]"),
        (lambda s: s | {"a.qzeros": s["a.qzeros"][:3]}, r"'a.qzeros' has shape \[3, 2\].*\[4, 2\]"),
        (lambda s: s | {"a.qweight": s["a.qweight"][None]}, r"'a.qweight' has shape \[1, 8, 16\]"),
        (lambda s: s | {"a.qweight": s["a.qweight"][1:], "a.scales": s["a.scales"][:1]}, r"'a.qzeros' has shape"),
        (lambda s: s | {"a.scales": s["a.scales"] * torch.inf}, r"'a.scales' holds NaN or infinity"),
        (lambda s: s | {"a.g_idx": s["a.g_idx"][1:]}, r"'a.g_idx' has shape \[63\]"),
        (lambda s: s | {"a.g_idx": s["a.g_idx"] + 1}, r"'a.g_idx' names groups"),
    ],
)
def test_bad_tensors(change: Callable[[Stored], Stored], says: str, tmp_path: Path) -> None:
    stored = change(encode("gptq", "a", random(16, 64, 16)))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor " + says):
        load(tmp_path, stored, CONFIGS["gptq"] | {"desc_act": True}, whole(torch.empty(16, 64)))


@pytest.mark.parametrize("missing", ["a.qweight", "a.qzeros", "a.scales"])
def test_a_part_without_its_partners_is_refused(missing: str, tmp_path: Path) -> None:
    stored = encode("awq", "a", random(16, 64, 16))
    del stored[missing]
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors .*: a\.weight;"):
        load(tmp_path, stored, CONFIGS["awq"], whole(torch.empty(16, 64)))


@pytest.mark.parametrize("quantization", [*CONFIGS.values(), symmetric(), symmetric(strategy="channel")])
def test_supported_configs(quantization: dict[str, Any]) -> None:
    assert format_of(quantization).is_int4


@pytest.mark.parametrize(
    "quantization",
    [
        CONFIGS["gptq"] | {"bits": 5},
        CONFIGS["gptq"] | {"dynamic": {"+:.*down.*": {"bits": 6}}},
        CONFIGS["gptq"] | {"dynamic": {"+:.*down.*": 8}},
        CONFIGS["gptq"] | {"checkpoint_format": "marlin"},
        CONFIGS["gptq"] | {"checkpoint_format": ["gptq"]},
        CONFIGS["awq"] | {"version": "gemv"},
        CONFIGS["awq"] | {"bits": 3},
        symmetric(num_bits=6),
        symmetric(type="float"),
        symmetric(strategy="tensor"),
        symmetric() | {"format": "int-quantized"},
        symmetric(num_bits=8, strategy="channel", symmetric=False) | {"format": "int-quantized"},
        symmetric() | {"config_groups": {}},
    ],
)
def test_unsupported_configs_are_refused(quantization: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config="):
        format_of(quantization)
