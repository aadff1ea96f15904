"""`moeserve inspect`: published figures of real models, recounts of checkpoints on disk, and its speed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from moeserve import cli
from moeserve.models.inspection import inspect

DEEPSEEK_V3: dict[str, Any] = dict(
    architectures=["DeepseekV3ForCausalLM"],
    attention_bias=False,
    first_k_dense_replace=3,
    hidden_act="silu",
    hidden_size=7168,
    intermediate_size=18432,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=128,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_key_value_heads=128,
    num_nextn_predict_layers=1,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    quantization_config=dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]),
    rms_norm_eps=1e-6,
    rope_scaling=dict(
        beta_fast=32,
        beta_slow=1,
        factor=40,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
        type="yarn",
    ),
    rope_theta=10000,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    tie_word_embeddings=False,
    topk_group=4,
    topk_method="noaux_tc",
    torch_dtype="bfloat16",
    v_head_dim=128,
    vocab_size=129280,
)
MIXTRAL_8X7B: dict[str, Any] = dict(
    architectures=["MixtralForCausalLM"],
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=14336,
    max_position_embeddings=32768,
    num_attention_heads=32,
    num_experts_per_tok=2,
    num_hidden_layers=32,
    num_key_value_heads=8,
    num_local_experts=8,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    vocab_size=32000,
)
QWEN3_30B_A3B: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"],
    attention_bias=False,
    decoder_sparse_step=1,
    head_dim=128,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=6144,
    max_position_embeddings=40960,
    mlp_only_layers=[],
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1e6,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    use_sliding_window=False,
    vocab_size=151936,
)
GPT_OSS_20B: dict[str, Any] = dict(
    architectures=["GptOssForCausalLM"],
    attention_bias=True,
    head_dim=64,
    hidden_act="silu",
    hidden_size=2880,
    intermediate_size=2880,
    layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072,
    num_attention_heads=64,
    num_experts_per_tok=4,
    num_hidden_layers=24,
    num_key_value_heads=8,
    num_local_experts=32,
    quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"]),
    rms_norm_eps=1e-5,
    rope_scaling=dict(
        beta_fast=32.0,
        beta_slow=1.0,
        factor=32.0,
        original_max_position_embeddings=4096,
        rope_type="yarn",
        truncate=False,
    ),
    rope_theta=150000,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
    vocab_size=201088,
)


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "total", "active", "cache_bytes"),
    [
        # the technical report's 671 B and 37 B, and 70.272 KB per token (arXiv 2505.09343, table 1)
        (DEEPSEEK_V3, 671.0e9, 37.6e9, 70272),
        (MIXTRAL_8X7B, 46.7e9, 12.9e9, 2 * 32 * 8 * 128 * 2),  # the report's 47 B and 13 B
        (QWEN3_30B_A3B, 30.5e9, 3.35e9, 2 * 48 * 4 * 128 * 2),  # the model card's 30.5 B and 3.3 B
        (GPT_OSS_20B, 20.9e9, 4.19e9, 2 * 24 * 8 * 64 * 2),  # the model card's 20.9 B; it names no dtype
    ],
)
def test_published_figures(
    config: dict[str, Any], total: float, active: float, cache_bytes: int, tmp_path: Path
) -> None:
    found = inspect(folder_of(tmp_path, config), None)
    assert found.num_parameters == pytest.approx(total, rel=2e-3)
    assert found.num_active_parameters == pytest.approx(active, rel=4e-3)
    assert found.cache_bytes_per_token == cache_bytes
    assert found.stored is None
    assert found.weight_bytes == sum(part.num_bytes for part in found.parts)


def timed(*arguments: str | Path) -> tuple[float, str]:
    """Seconds and output of a run of Python."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - started, done.stdout


def test_a_model_of_256_experts_and_61_layers_in_2_seconds(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, DEEPSEEK_V3)
    # A free machine takes 1.1 s to import torch alone; on a busy one, no more than that share of the time is ours.
    runs = [(timed("-m", "moeserve", "inspect", folder), timed("-c", "import torch")[0]) for _ in range(3)]
    assert min(seconds for (seconds, _), _ in runs) < max(2.0, 1.6 * min(torch_alone for _, torch_alone in runs))
    output = runs[0][0][1]
    assert "671.03 B, of which a token uses 37.55 B" in output
    assert "no weights in this folder; fp8 in blocks of 128 x 128, to be dequantised" in output


def test_a_recount_of_what_is_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Qwen2MoeConfig(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=31,
        moe_intermediate_size=17,
        shared_expert_intermediate_size=23,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=5,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    )
    model = Qwen2MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    found = inspect(tmp_path, "float32")
    num_parameters = sum(weight.numel() for weight in model.parameters())
    assert found.num_parameters == num_parameters
    assert found.num_active_parameters == num_parameters - 2 * 3 * (3 * 24 * 17)  # 2 layers, 3 experts not used
    assert found.weight_bytes == 4 * num_parameters
    assert found.stored is not None
    assert found.stored.bytes_of_dtype == {"F32": 4 * num_parameters}
    assert (found.num_layers, found.num_sparse_layers, found.shared_expert_width) == (3, 2, 23)

    assert cli.main(["inspect", str(tmp_path), "--json", "--dtype", "bfloat16"]) == 0
    told = json.loads(capsys.readouterr().out)
    routers = 2 * 5 * 24  # these stay in float32
    assert told["weight_bytes"] == 2 * num_parameters + 2 * routers
    assert told["family"] == "Qwen2-MoE"


def test_what_is_wrong_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, DEEPSEEK_V3 | {"num_experts_per_tok": 300})
    assert cli.main(["inspect", str(folder)]) == 1
    assert "num_experts_per_tok=300 is more than n_routed_experts=256" in capsys.readouterr().err

    folder_of(tmp_path, DEEPSEEK_V3)
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert cli.main(["inspect", str(folder)]) == 1
    assert "damaged or incomplete" in capsys.readouterr().err
