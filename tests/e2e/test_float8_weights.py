"""Weights in 8-bit blocks as they are loaded for a GPU: copied from a checkpoint, or quantised.

These tests compare loaded weights. Products with them are tested in tests/gpu_kernels/test_engine_float8.py.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from build_contexts import cpu_context
from float8_checkpoints import encoded_and_decoded, large, write
from model_parts import networks_of
from reference_models import Reference, make_reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moeserve.distributed.groups import unconnected
from moeserve.distributed.mesh import Mesh
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.weights import Weights
from moeserve.models import registry
from moeserve.models.checkpoint.loading import PIECE_VALUES, fill_randomly, load_weights
from moeserve.models.checkpoint.names import translated
from moeserve.models.checkpoint.packing import Packer, weights_of
from moeserve.models.checkpoint.shards import open_checkpoint
from moeserve.models.decoder import Decoder
from moeserve.models.summary import loading_memory
from moeserve.models.weight_mapping import destinations
from moeserve.ops import select
from moeserve.ops.backend import REFERENCE

FLOAT8 = torch.float8_e4m3fn
Stored = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, weights stay open."""
    monkeypatch.setitem(select.BACKENDS, "cpu", lambda dtype: REFERENCE)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def of(name: str) -> Reference:
        if name not in made:
            made[name] = make_reference(tmp_path_factory.mktemp(name), large(name))
        return made[name]

    return of


@pytest.fixture(scope="module")
def deepseek(original: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Stored]:
    """As DeepSeek publishes it, and what its shard holds. No code is the largest: made anew, there would be others."""
    folder = tmp_path_factory.mktemp("encoded") / "deepseek"
    encoded, _, quantization = encoded_and_decoded(original("deepseek-v32"), (128, 128))
    for name, tensor in encoded.items():
        if tensor.dtype == FLOAT8:
            encoded[name] = (tensor.float() / 2).to(FLOAT8)
    write(folder, original("deepseek-v32"), encoded, quantization)
    return folder, encoded


def built(
    folder: Path, *, tp: int = 1, dp: int = 1, rank: int = 0, quantization: Any = "fp8", **changes: Any
) -> Decoder:
    description = registry.describe(folder)
    groups = unconnected(Mesh(tp=tp, dp=dp), rank)
    context = dataclasses.replace(cpu_context(torch.bfloat16, groups), quantization=quantization, **changes)
    dispatchers = TorchDispatchers("local" if tp * dp == 1 else "all_to_all", groups.ep, context)
    placements = description.model.place_experts(tp * dp)
    return Decoder(description.model, placements, dispatchers, context)


@torch.inference_mode()
def loaded(folder: Path, *, piece_values: int = PIECE_VALUES, **options: Any) -> Any:
    model = built(folder, **options)
    description = registry.describe(folder)
    checkpoint = open_checkpoint(folder, description.weight_format)
    checkpoint = translated(checkpoint, description.family, len(model.config.layers))
    packer = Packer(model)
    places = destinations(model, description.family.norm_offset, checkpoint.shapes)
    load_weights(checkpoint, places, on_filled=packer.on_filled, show_progress=False, piece_values=piece_values)
    packer.finish()
    return model


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def assert_taken(weights: Weights, number: int, *parts: tuple[Tensor, Tensor]) -> None:
    """Codes and scales are those of these parts, one below the other."""
    assert weights.memory is not None
    assert weights.scales is not None
    assert torch.equal(bits(weights.memory.data)[number], torch.cat([bits(codes) for codes, _ in parts]))
    assert torch.equal(weights.scales[number], torch.cat([scales for _, scales in parts]))


def assert_is_as_stored(model: Any, stored: Stored, tp: int, rank: int) -> None:
    """`rank` is that of the tp group, whose shares all begin at a block."""

    def part(name: str, *, rows: int | None = None, columns: int | None = None) -> tuple[Tensor, Tensor]:
        """All of it, or this rank's share of so many rows or columns."""
        codes, scales = stored[f"{name}.weight"], stored[f"{name}.weight_scale_inv"]
        if rows is not None:
            share = rows // tp
            codes = codes[rank * share : (rank + 1) * share]
            scales = scales[rank * share // 128 : -(-(rank + 1) * share // 128)]
        if columns is not None:
            share = columns // tp
            codes = codes[:, rank * share : (rank + 1) * share]
            scales = scales[:, rank * share // 128 : -(-(rank + 1) * share // 128)]
        return codes, scales

    for number, (attention, feed_forward) in enumerate(networks_of(model)):
        prefix = f"model.layers.{number}"
        assert_taken(attention.query.down.weights, 0, part(f"{prefix}.self_attn.q_a_proj"))
        assert_taken(attention.query.up.weights, 0, part(f"{prefix}.self_attn.q_b_proj", rows=256))
        assert_taken(attention.compress.weights, 0, part(f"{prefix}.self_attn.kv_a_proj_with_mqa"))
        assert_taken(attention.output.weights, 0, part(f"{prefix}.self_attn.o_proj", columns=256))
        assert_taken(attention.indexer.query.weights, 0, part(f"{prefix}.self_attn.indexer.wq_b"))
        assert_taken(attention.indexer.key.weights, 0, part(f"{prefix}.self_attn.indexer.wk"))
        assert attention.indexer.head_weights.weight.dtype == torch.bfloat16
        for maps in (attention.head_maps.keys, attention.head_maps.values):
            assert maps.memory.dtype == torch.bfloat16
            assert maps.scales is None
        if number == 0:
            mlp = f"{prefix}.mlp"
            gates, ups = part(f"{mlp}.gate_proj", rows=512), part(f"{mlp}.up_proj", rows=512)
            assert_taken(feed_forward.mlp.gate_up, 0, gates, ups)
            assert_taken(feed_forward.mlp.down.weights, 0, part(f"{mlp}.down_proj", columns=512))
            continue
        moe = feed_forward
        for slot, expert in enumerate(moe.local_experts):
            name = f"{prefix}.mlp.experts.{expert}"
            assert_taken(moe.experts.gate_up, slot, part(f"{name}.gate_proj"), part(f"{name}.up_proj"))
            assert_taken(moe.experts.down, slot, part(f"{name}.down_proj"))
        shared, name = moe.shared_experts.mlp, f"{prefix}.mlp.shared_experts"
        assert_taken(shared.gate_up, 0, part(f"{name}.gate_proj"), part(f"{name}.up_proj"))
        assert_taken(shared.down.weights, 0, part(f"{name}.down_proj"))


class Allocations(TorchDispatchMode):
    """Counts the bytes of floating-point tensors by `torch.empty`, by which weights are allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and result.is_floating_point() and not result.is_meta:
            self.num_bytes += result.nbytes
        return result


def bytes_in_blocks(model: Decoder) -> int:
    every = [weights.open for weights in weights_of(model).values()]
    return sum(each.weight_eOI.nbytes + each.scales_eGB.nbytes for each in every if each.scales_eGB is not None)


def all_bytes(model: Decoder) -> int:
    return sum({weight.data_ptr(): weight.nbytes for weight in model.parameters()}.values())


def counted(folder: Path, *, tp: int = 1, dp: int = 1, rank: int = 0, quantization: Any = "fp8") -> int:
    model = built(folder, tp=tp, dp=dp, rank=rank, quantization=quantization, has_memory=False, backend=REFERENCE)
    memory = loading_memory(model)
    assert memory.peak == memory.kept
    return memory.kept


@pytest.mark.parametrize(("tp", "dp", "rank"), [(1, 1, 0), (2, 1, 1), (1, 2, 1)])
def test_blocks_are_taken_as_they_are_stored(deepseek: tuple[Path, Stored], tp: int, dp: int, rank: int) -> None:
    folder, stored = deepseek
    model = loaded(folder, tp=tp, dp=dp, rank=rank, piece_values=1)
    num_local = 8 // (tp * dp)
    assert networks_of(model)[1][1].local_experts == tuple(range(num_local * rank, num_local * rank + num_local))
    assert_is_as_stored(model, stored, tp, rank if tp > 1 else 0)
    assert all_bytes(model) == counted(folder, tp=tp, dp=dp, rank=rank)
    if tp == dp == 1:
        assert all_bytes(model) < 0.7 * counted(folder, quantization=None)


def test_a_share_that_begins_inside_a_block_is_dequantised(deepseek: tuple[Path, Stored]) -> None:
    folder, stored = deepseek
    model = loaded(folder, tp=4, rank=1)
    attention = networks_of(model)[0][0]
    scales = stored["model.layers.0.self_attn.q_b_proj.weight_scale_inv"]
    values = stored["model.layers.0.self_attn.q_b_proj.weight"][64:128].float()
    values *= scales[0].repeat_interleave(128)[: values.shape[1]]
    assert torch.equal(attention.query.up.weight, values.bfloat16())
    assert attention.output.weight.dtype == torch.bfloat16
    assert attention.compress.weight.dtype == FLOAT8
    assert networks_of(model)[0][1].mlp.down.weight.dtype == FLOAT8  # its share is of 128
    assert all_bytes(model) == counted(folder, tp=4, rank=1)


@pytest.mark.parametrize("name", ["deepseek-v3", "mixtral", "gpt-oss"])
def test_nothing_is_allocated_beside_what_is_kept(name: str, original: Callable[[str], Reference]) -> None:
    folder = original(name).folder
    with Allocations() as allocations:
        model = built(folder)
    assert bytes_in_blocks(model) < allocations.num_bytes <= all_bytes(model)


def plainly_quantized(values_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of one part, block by block."""
    num_rows, width = values_RI.shape
    codes = torch.empty(num_rows, width, dtype=FLOAT8)
    scales = torch.empty(-(-num_rows // 128), -(-width // 128))
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scales[row, column] = values_RI[block].abs().max() / 448
            codes[block] = (values_RI[block] / scales[row, column]).to(FLOAT8)
    return codes, scales


@pytest.mark.parametrize(("name", "num_in_blocks"), [("deepseek-v3", 14), ("mixtral", 8), ("gpt-oss", 9)])
def test_other_checkpoints_are_quantised_within_half_a_step(
    name: str, num_in_blocks: int, original: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A code is off by 1/16 of its number at most, or by half of the least step where numbers are near zero."""
    monkeypatch.setattr("moeserve.ops.products.weight_blocks.QUANTIZED_AT_ONCE", 1)
    folder = original(name).folder
    exact = weights_of(loaded_as_float32(folder))
    model = loaded(folder, piece_values=1)
    in_blocks = {name: weights for name, weights in weights_of(model).items() if weights.scales is not None}
    assert len(in_blocks) == num_in_blocks
    for place, weights in in_blocks.items():
        assert weights.memory is not None
        assert weights.scales is not None
        values = exact[place].open.weight_eOI
        for number in range(len(values)):
            parts = values[number].chunk(1 if weights.activation is None else 2)
            quantized = [plainly_quantized(part) for part in parts]
            assert_taken(weights, number, *quantized)
            for part, (codes, scales) in zip(parts, quantized, strict=True):
                of_value = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: part.shape[0], : part.shape[1]]
                error = (codes.float() * of_value - part).abs()
                assert (error <= 1.00001 * torch.maximum(part.abs() / 16, of_value * 2**-10)).all()
    assert all_bytes(model) == counted(folder)


@torch.inference_mode()
def loaded_as_float32(folder: Path) -> Decoder:
    description = registry.describe(folder)
    context = cpu_context()
    dispatchers = TorchDispatchers("local", context.groups.ep, context)
    model = Decoder(description.model, description.model.place_experts(1), dispatchers, context)
    checkpoint = open_checkpoint(folder, description.weight_format)
    checkpoint = translated(checkpoint, description.family, len(model.config.layers))
    load_weights(
        checkpoint, destinations(model, description.family.norm_offset, checkpoint.shapes), show_progress=False
    )
    return model


def test_blocks_of_another_size_are_made_anew(original: Callable[[str], Reference], tmp_path: Path) -> None:
    encoded, decoded, quantization = encoded_and_decoded(original("mixtral"), (64, 32))
    write(tmp_path / "encoded", original("mixtral"), encoded, quantization)
    down = networks_of(loaded(tmp_path / "encoded"))[1][1].experts.down
    for expert in range(4):
        values = decoded[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"]
        assert_taken(down, expert, plainly_quantized(values))


def test_zeros_stay_zeros(original: Callable[[str], Reference], tmp_path: Path) -> None:
    _, decoded, _ = encoded_and_decoded(original("mixtral"), (128, 128))
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    write(tmp_path / "zeros", original("mixtral"), decoded | {name: torch.zeros_like(decoded[name])}, None)
    down = networks_of(loaded(tmp_path / "zeros"))[0][1].experts.down
    assert not bits(down.memory.data)[2].any()
    assert (down.scales[2] > 0).all()
    assert (down.scales[2] < 1e-30).all()


def test_an_expert_moves_with_its_scales(deepseek: tuple[Path, Stored]) -> None:
    """As rebalancing moves it: all bytes of a slot, whatever they are."""
    folder, stored = deepseek
    experts = networks_of(loaded(folder))[1][1].experts
    memory = experts.memory_of_each
    assert sum(each.shape[1] for each in memory) == 3 * 200 * 256 + 4 * (2 * 2 * 2 + 2 * 2)
    for of_slots in memory:
        of_slots[5] = of_slots[2].clone()
    name = "model.layers.1.mlp.experts.2"
    codes = {which: stored[f"{name}.{which}_proj.weight"] for which in ("gate", "up", "down")}
    scales = {which: stored[f"{name}.{which}_proj.weight_scale_inv"] for which in ("gate", "up", "down")}
    assert_taken(experts.gate_up, 5, (codes["gate"], scales["gate"]), (codes["up"], scales["up"]))
    assert_taken(experts.down, 5, (codes["down"], scales["down"]))


@torch.inference_mode()
def test_dummy_weights_are_as_large_as_others(original: Callable[[str], Reference]) -> None:
    models = [built(original("mixtral").folder) for _ in range(2)]
    for model in models:
        fill_randomly(model, seed=3)
    for weights, others in zip(*(weights_of(model).values() for model in models), strict=True):
        assert torch.equal(bits(weights.open.weight_eOI.data), bits(others.open.weight_eOI.data))
        if weights.scales is not None:
            size = weights.scales.repeat_interleave(128, 2)[:, :1, : weights.shape[2]]
            values = weights.open.weight_eOI[:, :128].float() * size
            assert 0.018 < values.std() < 0.022
            assert abs(values.mean()) < 0.001


def test_which_gpus_multiply_8_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, has_triton, expected in (
        ((9, 0), True, True),
        ((8, 9), True, True),
        ((8, 6), True, False),
        ((9, 0), False, False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=has_triton: found or None)
        assert select.supports_float8_products() == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not select.supports_float8_products()
