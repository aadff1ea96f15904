"""Weight formats: decoding against torch, transformers and the formats' definitions, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moeserve import CheckpointError
from moeserve.layers.rows import Destination, whole
from moeserve.models.checkpoint.float4_tensors import decode_fp4, e8m0_values
from moeserve.models.checkpoint.float8_tensors import decode_fp8
from moeserve.models.checkpoint.loading import PIECE_VALUES, Destinations, load_weights
from moeserve.models.checkpoint.shards import open_checkpoint
from moeserve.models.checkpoint.tensors import StoredTensor
from moeserve.models.checkpoint.weight_format import WeightFormat, read_weight_format
from moeserve.models.config_values import ConfigValues

# O rows, I columns, B blocks in a row, G groups of 32 values in a row, e experts

FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
MXFP4_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_bytes(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_fp8(rows: int, columns: int, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    scale = random(-(-rows // block[0]), -(-columns // block[1]), seed=1).abs() + 0.01
    return random(rows, columns).mul(50).to(torch.float8_e4m3fn), scale


def dequantised(weight_OI: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The definition, with a scale for each value."""
    of_value = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return weight_OI.float() * of_value[: weight_OI.shape[0], : weight_OI.shape[1]]


def format_of(quantization: object) -> WeightFormat:
    return read_weight_format(ConfigValues(Path("config.json"), {"quantization_config": quantization}))


def fp8(block: tuple[int, int] = (128, 128)) -> WeightFormat:
    return format_of(FP8_CONFIG | {"weight_block_size": [*block]})


def load(
    folder: Path, weight_format: WeightFormat, into: dict[str, Destination], piece_values: int = PIECE_VALUES
) -> None:
    places = Destinations({name: [place] for name, place in into.items()})
    load_weights(open_checkpoint(folder, weight_format), places, show_progress=False, piece_values=piece_values)


def test_every_fp8_code_decodes_as_in_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes_OI = codes[(codes & 0x7F) != 0x7F].view(2, 127)
    exact_OI = codes_OI.view(torch.float8_e4m3fn).float()
    assert torch.equal(decode_fp8(codes_OI, torch.ones(2, 1), 127), exact_OI)
    assert torch.equal(decode_fp8(codes_OI, torch.ones(2, 1), 127).signbit(), exact_OI.signbit())
    assert exact_OI.abs().max() == 448
    scale_OB = torch.tensor([[0.3, 7.0, 1e-30], [1e30, 0.01, 3.0]])
    assert torch.equal(decode_fp8(codes_OI, scale_OB, 50), exact_OI * scale_OB.repeat_interleave(50, 1)[:, :127])


@pytest.mark.parametrize(
    ("shape", "block"),
    [((256, 128), (128, 128)), ((200, 136), (128, 128)), ((70, 100), (32, 48)), ((5, 3), (128, 128))],
)
@pytest.mark.parametrize("piece_values", [500, 2**21])  # pieces that begin inside a block, and all at once
def test_fp8_blocks(tmp_path: Path, shape: tuple[int, int], block: tuple[int, int], piece_values: int) -> None:
    weight_OI, scale = random_fp8(*shape, block)
    norm = random(shape[1])
    save_file({"a.weight": weight_OI, "a.weight_scale_inv": scale, "n": norm}, tmp_path / "model.safetensors")
    memory_OI, memory_n = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape[1])
    load(tmp_path, fp8(block), {"a.weight": whole(memory_OI), "n": whole(memory_n)}, piece_values)
    assert torch.equal(memory_OI, dequantised(weight_OI, scale, block).bfloat16())
    assert torch.equal(memory_n, norm)


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (200,), (200, 1)])
def test_fp8_with_a_scale_for_the_matrix_or_each_row(tmp_path: Path, shape: tuple[int, ...], suffix: str) -> None:
    weight_OI, _ = random_fp8(200, 136, (128, 128))
    scale = random(*shape).abs()
    stored = {"a.weight": weight_OI, f"a.weight{suffix}": scale, "a.input_scale": torch.tensor(0.5)}
    save_file(stored, tmp_path / "model.safetensors")
    memory_OI = torch.empty(200, 136)
    static = {"quant_method": "fp8", "activation_scheme": "static"}
    load(tmp_path, format_of(static), {"a.weight": whole(memory_OI)}, piece_values=5000)
    assert torch.equal(memory_OI, weight_OI.float() * (scale[:, None] if scale.dim() == 1 else scale))


def test_modelopt_beside_a_config_that_does_not_name_it(tmp_path: Path) -> None:
    """Layers in FP8 and in NVFP4: value = code * scale of 16 inputs * scale of the matrix."""
    codes_OP, (fp8_OI, _) = random_bytes(10, 32), random_fp8(10, 64, (128, 128))
    scales_OG = random(10, 4, seed=2).abs().to(torch.float8_e4m3fn)
    stored = {"a.weight": codes_OP, "a.weight_scale": scales_OG, "a.weight_scale_2": torch.tensor(0.3)}
    stored |= {"a.input_scale": torch.tensor(1.0), "k_proj.k_scale": torch.tensor(1.0)}
    stored |= {"b.weight": fp8_OI, "b.weight_scale": torch.tensor(0.7), "c.weight": random(3, 4)}
    save_file(stored, tmp_path / "model.safetensors")
    layers = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}})
    )
    weight_format = read_weight_format(ConfigValues(tmp_path / "config.json", {}))
    assert weight_format.stored_as == "nvfp4 and fp8"
    a_OI, b_OI, c_OI = torch.empty(10, 64), torch.empty(10, 64), torch.empty(3, 4)
    load(tmp_path, weight_format, {"a.weight": whole(a_OI), "b.weight": whole(b_OI), "c.weight": whole(c_OI)})
    codes_OI = torch.stack([codes_OP % 16, codes_OP // 16], dim=-1).flatten(1).long()
    scales_OI = (scales_OG.float() * 0.3).repeat_interleave(16, dim=1)
    assert torch.equal(a_OI, torch.tensor(E2M1)[codes_OI] * scales_OI)
    assert torch.equal(b_OI, fp8_OI.float() * 0.7)
    assert torch.equal(c_OI, stored["c.weight"])


def test_fp8_scales_in_bfloat16_and_in_another_shard(tmp_path: Path) -> None:
    weight_OI, scale = random_fp8(200, 136, (128, 128))
    scale = scale.bfloat16()
    save_file({"a.weight": weight_OI}, tmp_path / "1.safetensors")
    save_file({"a.weight_scale_inv": scale}, tmp_path / "2.safetensors")
    index = {"weight_map": {"a.weight": "1.safetensors", "a.weight_scale_inv": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    memory_OI = torch.empty(200, 136)
    checkpoint = open_checkpoint(tmp_path, fp8())
    load_weights(checkpoint, Destinations({"a.weight": [whole(memory_OI)]}), show_progress=False)
    assert torch.equal(memory_OI, dequantised(weight_OI, scale, (128, 128)))
    assert set(checkpoint.names) == {"a.weight"}
    assert checkpoint.stored_bytes == sum(shard.stat().st_size for shard in tmp_path.glob("*.safetensors"))


def test_every_mxfp4_code_with_every_scale() -> None:
    """By the definition: low nibble first, an exponent of bias 127."""
    low, high = torch.arange(256).view(16, 16).remainder(16), torch.arange(256).view(16, 16) // 16
    blocks = (low + 16 * high).to(torch.uint8).expand(255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16)
    stored = StoredTensor("scales", Path("shard"), "U8", (255, 16))
    values = decode_fp4(blocks.contiguous(), e8m0_values(stored, scales.contiguous())).view(255, 256, 2)
    codes = torch.tensor([[byte % 16, byte // 16] for byte in range(256)])
    powers = torch.tensor([2.0 ** (byte - 127) for byte in range(255)], dtype=torch.float64)
    exact = torch.tensor(E2M1, dtype=torch.float64)[codes] * powers[:, None, None]
    assert torch.equal(values, exact.float())
    assert torch.equal(values.signbit(), exact.signbit())


def test_mxfp4_decodes_as_in_transformers(tmp_path: Path) -> None:
    blocks, scales = random_bytes(3, 10, 4, 16), random_bytes(3, 10, 4, low=110, high=135)
    bias = random(3, 10)
    stored = {"p_blocks": blocks, "p_scales": scales, "p_bias": bias}
    save_file(stored, tmp_path / "model.safetensors")
    memory_eIO, memory_eO = torch.empty(3, 128, 10), torch.empty(3, 10)
    load(tmp_path, format_of(MXFP4_CONFIG), {"p": whole(memory_eIO), "p_bias": whole(memory_eO)})
    assert torch.equal(memory_eIO, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    assert torch.equal(memory_eO, bias)


def test_destination_whose_dimensions_are_split(tmp_path: Path) -> None:
    """gpt-oss publishes [e, D, 2I] with gate and up in turn; here memory is [e, 2I, D], all of gate before up."""
    num_experts, width, expert_width = 2, 64, 5
    blocks, scales = random_bytes(2, 10, 2, 16), random_bytes(2, 10, 2, low=120, high=130)
    published = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file({"p_blocks": blocks, "p_scales": scales}, tmp_path / "model.safetensors")
    memory = torch.empty(num_experts, 2 * expert_width, width, dtype=torch.bfloat16)
    view = memory.unflatten(1, (2, expert_width)).permute(0, 3, 2, 1)
    load(tmp_path, format_of(MXFP4_CONFIG), {"p": Destination(view, (num_experts, width, 2 * expert_width), ())})
    assert torch.equal(memory[:, :expert_width], published[..., 0::2].transpose(1, 2).bfloat16())
    assert torch.equal(memory[:, expert_width:], published[..., 1::2].transpose(1, 2).bfloat16())


@pytest.mark.parametrize("piece_values", [1, 30, 2**21])
def test_destination_whose_first_dimension_is_split(tmp_path: Path, piece_values: int) -> None:
    published = random(6, 7)
    save_file({"p": published}, tmp_path / "model.safetensors")
    memory = torch.empty(2, 3, 7)
    load(tmp_path, WeightFormat(), {"p": Destination(memory.transpose(0, 1), (6, 7), ())}, piece_values)
    assert torch.equal(memory, published.view(3, 2, 7).transpose(0, 1))


def test_ignored_tensors_may_be_anything_and_are_not_read(tmp_path: Path) -> None:
    """As multi-token-prediction layers are: in shards of their own, of which only the header need be right."""
    save_file({"a": torch.ones(3)}, tmp_path / "1.safetensors")
    mtp = {"mtp.a": torch.ones(2, dtype=torch.int64), "mtp.weight": random_fp8(200, 136, (128, 128))[0]}
    save_file(mtp | {"mtp.weight_scale_inv": torch.full((7,), torch.nan)}, tmp_path / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors"} | dict.fromkeys([*mtp, "mtp.weight_scale_inv"], "2.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    memory = torch.empty(3)
    checkpoint = open_checkpoint(tmp_path, fp8())
    (tmp_path / "2.safetensors").unlink()
    ignoring = Destinations({"a": [whole(memory)]}, is_ignored=lambda name: name.startswith("mtp."))
    load_weights(checkpoint, ignoring, show_progress=False)
    assert memory.tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=r"mtp\.a, mtp\.weight"):
        load_weights(checkpoint, Destinations({"a": [whole(memory)]}), show_progress=False)


def test_the_log_has_the_sizes_before_and_after_dequantising(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight_OI, scale = random_fp8(1024, 1024, (128, 128))  # 1 MiB, twice that in bfloat16
    save_file({"a.weight": weight_OI, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    load(tmp_path, fp8(), {"a.weight": whole(torch.empty(1024, 1024, dtype=torch.bfloat16))})
    assert "1.00 MiB" in caplog.text
    assert "2.00 MiB" in caplog.text
    caplog.clear()
    save_file({"a.weight": random(4, 4)}, tmp_path / "model.safetensors")
    load(tmp_path, WeightFormat(), {"a.weight": whole(torch.empty(4, 4))})
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (lambda w, s: {"a.weight": w}, r"'a.weight' is F8_E4M3"),
        (lambda w, s: {"a.weight": w, "a.weight_scale_inv": s[:1]}, r"\[1, 2\].*\[2, 2\]"),
        (lambda w, s: {"a.weight": w, "a.weight_scale_inv": s.double()}, r"'a.weight_scale_inv' is F64"),
        (lambda w, s: {"a.weight": w.half(), "a.weight_scale_inv": s}, r"'a.weight' is F16"),
        (lambda w, s: {"a.weight": w[None], "a.weight_scale_inv": s[None]}, r"\[1, 200, 136\]"),
        (lambda w, s: {"a.weight": w.to(torch.float8_e5m2)}, r"'a.weight' is F8_E5M2"),
        (lambda w, s: {"a.weight": w[1:], "a.weight_scale_inv": s}, r"'a.weight' has shape \[199, 136\]"),
        (lambda w, s: {"a.weight": with_nan(w), "a.weight_scale_inv": s}, r"'a.weight' holds NaN"),
    ],
)
def test_bad_fp8(tmp_path: Path, stored: Callable[[Tensor, Tensor], dict[str, Tensor]], says: str) -> None:
    tensors = stored(*random_fp8(200, 136, (128, 128)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .*" + says):
        load(tmp_path, fp8(), {"a.weight": whole(torch.empty(200, 136))})


def with_nan(weight_OI: Tensor) -> Tensor:
    damaged = weight_OI.clone().view(torch.uint8)
    damaged[199, 135] = 0xFF
    return damaged.view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (lambda b, s: {"p_blocks": b, "p_scales": s[:, 1:]}, r"'p_scales' has shape \[2, 9, 2\].*\[2, 10, 2\]"),
        (lambda b, s: {"p_blocks": b[..., 1:], "p_scales": s}, r"\[2, 10, 2, 15\]"),
        (lambda b, s: {"p_blocks": b[0], "p_scales": s[0]}, r"\[10, 2, 16\]"),
        (lambda b, s: {"p_blocks": b.to(torch.int8), "p_scales": s}, r"'p_blocks' is I8"),
        (lambda b, s: {"p_blocks": b, "p_scales": s.float()}, r"'p_scales' is F32"),
        (lambda b, s: {"p_blocks": b, "p_scales": s.index_fill(1, torch.tensor(9), 255)}, r"'p_scales' .*255"),
        (lambda b, s: {"p_blocks": b[:1], "p_scales": s[:1]}, r"'p' has shape \[1, 64, 10\].*\[2, 64, 10\]"),
    ],
)
def test_bad_mxfp4(tmp_path: Path, stored: Callable[[Tensor, Tensor], dict[str, Tensor]], says: str) -> None:
    tensors = stored(random_bytes(2, 10, 2, 16), random_bytes(2, 10, 2, high=255))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .*" + says):
        load(tmp_path, format_of(MXFP4_CONFIG), {"p": whole(torch.empty(2, 64, 10))})


def test_a_part_without_its_partner_is_refused(tmp_path: Path) -> None:
    for name in ("p_blocks", "p_scales"):
        save_file({name: random_bytes(2, 10, 2)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"lacks 1 tensors .*: p;"):
            load(tmp_path, format_of(MXFP4_CONFIG), {"p": whole(torch.empty(2, 64, 10))})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"a.weight": random_bytes(10, 31)}, r"'a.weight' has shape \[10, 31\].*groups of 16"),
        ({"a.weight": random_bytes(10, 32).to(torch.int8)}, r"'a.weight' is I8; nvfp4 needs U8"),
        ({"a.weight_scale": torch.ones(10, 4)}, r"'a.weight_scale' is F32; nvfp4 needs F8_E4M3"),
        ({"a.weight_scale": torch.ones(10, 2).to(torch.float8_e4m3fn)}, r"\[10, 2\]; 'a.weight' needs \[10, 4\]"),
        ({"a.weight_scale_2": torch.ones(2)}, r"'a.weight_scale_2' has shape \[2\]"),
        ({"a.weight_scale_2": torch.tensor(torch.nan)}, r"'a.weight_scale' or 'a.weight_scale_2' holds NaN"),
    ],
)
def test_bad_nvfp4(tmp_path: Path, change: dict[str, Tensor], says: str) -> None:
    scales_OG = torch.ones(10, 4).to(torch.float8_e4m3fn)
    good = {"a.weight": random_bytes(10, 32), "a.weight_scale": scales_OG, "a.weight_scale_2": torch.tensor(0.3)}
    save_file(good | change, tmp_path / "model.safetensors")
    weight_format = format_of({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .*" + says):
        load(tmp_path, weight_format, {"a.weight": whole(torch.empty(10, 64))})


@pytest.mark.parametrize(
    ("quantization", "stored_as"),
    [
        (None, None),
        (FP8_CONFIG | {"weight_block_size": [32, 48], "scale_fmt": "ue8m0"}, "fp8 in blocks of 32 x 48"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 in blocks of 128 x 128"),
        (
            FP8_CONFIG | {"weight_block_size": [128, 128], "expert_dtype": "fp4"},
            "fp8 in blocks of 128 x 128 and experts in mxfp4",
        ),
        (MXFP4_CONFIG, "mxfp4"),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}}, "fp8"),
    ],
)
def test_formats_by_config(quantization: object, stored_as: str | None) -> None:
    assert format_of(quantization).stored_as == stored_as


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq"},
        {"quant_method": "awq", "bits": 8},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"quant_method": "quark", "global_quant_config": {}},
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "data_type": "mx_fp"},
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
        {"bits": 4},
        "fp8",
        FP8_CONFIG | {"fmt": "e5m2"},
        FP8_CONFIG | {"weight_block_size": [128]},
        FP8_CONFIG | {"weight_block_size": [128, 0]},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {}}},
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": 8}},
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": {"weights": {}}},
        },
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}},
    ],
)
def test_unsupported_formats_are_refused(quantization: object) -> None:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config=.*quant_method={method!r}"):
        format_of(quantization)
