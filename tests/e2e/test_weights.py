"""Loading: how much memory it takes, shards, dtypes, quantised checkpoints, dummy weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference_models import Reference
from safetensors.torch import save_file
from transformers import MixtralConfig

from moeserve import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

MEASURE_PEAK = """
import sys
from pathlib import Path
import torch
from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.models import registry
from moeserve.models.checkpoint import shards as checkpoint
from moeserve.models.checkpoint import loading as weight_loading
from moeserve.worker.loading import load_model

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

checkpoint.REMAP_BYTES = 8 * 2**20  # small, as these checkpoints are
facts = registry.read_facts(sys.argv[1])
config = resolve(parse_settings({"packed_cache": 0}), facts, MachineFacts(num_cores=1))
torch.ones(4).bfloat16() @ torch.ones(4, 4).bfloat16()  # what torch needs once
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
with torch.inference_mode():
    model = load_model(config, groups_of_one_rank(), show_progress=False).model
weights = sum(weight.nbytes for weight in [*model.parameters(), *model.buffers()])
print((resident("VmHWM") - before) / weights, weights)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "fp8", "fused"])
def test_peak_memory_while_loading_is_little_more_than_the_weights(kind: str, tmp_path: Path) -> None:
    """The peak is at most 1.25 times the weights, mapped pages included.

    A fused tensor is larger than one mapping, and one matrix in float32 would be larger than the margin.
    """
    config = large_config(num_experts=2, expert_width=12288) if kind == "fp8" else large_config(4, 3072)
    stored: dict[str, torch.Tensor] = {}
    for name, shape in plain_layout(config).items():
        if kind == "fp8" and name.endswith(FP8_MATRICES):
            stored[name] = torch.full(shape, 7, dtype=torch.uint8).view(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = torch.ones([-(-size // 128) for size in shape])
        elif kind != "fused":
            stored[name] = torch.zeros(shape, dtype=torch.bfloat16)
        elif ".experts." not in name:
            stored[name.replace("block_sparse_moe", "mlp")] = torch.zeros(shape, dtype=torch.bfloat16)
    if kind == "fused":
        for name, shape in {"gate_up_proj": (4, 6144, 2048), "down_proj": (4, 2048, 3072)}.items():
            stored[f"model.layers.0.mlp.experts.{name}"] = torch.zeros(shape, dtype=torch.bfloat16)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]} if kind == "fp8" else None
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": quantization}))
    command = [sys.executable, "-c", MEASURE_PEAK, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    ratio, num_bytes = map(float, run.stdout.split())
    assert num_bytes > 1.5e8
    assert 1.0 <= ratio <= 1.25


def large_config(num_experts: int, expert_width: int) -> MixtralConfig:
    return MixtralConfig(
        architectures=["MixtralForCausalLM"],
        vocab_size=1000,
        hidden_size=2048,
        intermediate_size=expert_width,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=num_experts,
        dtype=torch.bfloat16,
    )


def plain_layout(config: MixtralConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a Mixtral checkpoint of one layer, as published."""
    width, expert_width = config.hidden_size, config.intermediate_size
    kv_width = width // config.num_attention_heads * config.num_key_value_heads
    layer = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        f"{layer}.input_layernorm.weight": (width,),
        f"{layer}.self_attn.q_proj.weight": (width, width),
        f"{layer}.self_attn.k_proj.weight": (kv_width, width),
        f"{layer}.self_attn.v_proj.weight": (kv_width, width),
        f"{layer}.self_attn.o_proj.weight": (width, width),
        f"{layer}.post_attention_layernorm.weight": (width,),
        f"{layer}.block_sparse_moe.gate.weight": (config.num_local_experts, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (config.vocab_size, width),
    }
    for expert in range(config.num_local_experts):
        for matrix, shape in (
            ("w1", (expert_width, width)),
            ("w2", (width, expert_width)),
            ("w3", (expert_width, width)),
        ):
            shapes[f"{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight"] = shape
    return shapes


FP8_MATRICES = tuple(f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"))


def test_auto_dtype_is_the_checkpoints(plain: Reference, tmp_path: Path) -> None:
    config = json.loads((plain.folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(plain.folder / "model.safetensors")
    with LLM(tmp_path) as llm:
        assert llm.config.weights.dtype == "bfloat16"
        dtypes = {weight.dtype for weight in llm.core.replicas[0].executor.worker.runner.model.parameters()}
        assert dtypes == {torch.bfloat16, torch.float32}  # routers stay in float32


def test_dummy_weights_need_a_config_only_and_follow_the_seed(plain: Reference, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((plain.folder / "config.json").read_text())
    prompts = plain.prompts(9, 20)

    def tokens(seed: int) -> list[list[int]]:
        with LLM(tmp_path, load_format="dummy", seed=seed) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
