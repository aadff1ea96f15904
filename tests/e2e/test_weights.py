"""Loading: how much memory it takes, shards, dtypes, quantised checkpoints, dummy weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from reference_models import Reference, save_large_mixtral
from safetensors.torch import save_file
from transformers import MixtralConfig

from moeserve import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

MEASURE_PEAK = """
import sys
from pathlib import Path
import torch
from moeserve.config.resolve import MachineFacts, resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.models import registry, weight_loading
from moeserve.worker.loading import load_model

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

weight_loading.REMAP_BYTES = 16 * 2**20  # small, as these checkpoints are
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


def test_peak_memory_while_loading_is_little_more_than_the_weights(tmp_path: Path) -> None:
    """The peak is at most 1.2 times the weights, mapped pages included. The shard is larger than one mapping."""
    save_large_mixtral(tmp_path, hidden_size=512, expert_width=1536)  # 300 MB in one file
    assert_peak_memory_is_little(tmp_path)


def assert_peak_memory_is_little(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE_PEAK, str(folder)], capture_output=True, text=True, check=True, timeout=200
    )
    ratio, num_bytes = map(float, run.stdout.split())
    assert num_bytes > 3e8
    assert 1.0 <= ratio <= 1.2


def test_peak_memory_while_loading_fp8(tmp_path: Path) -> None:
    """Only the slice being decoded is held in float32: a matrix of 12288 x 2048 would take 101 MB."""
    config = large_config(num_experts=2, expert_width=12288)
    stored: dict[str, torch.Tensor] = {}
    for name, shape in plain_layout(config).items():
        if name.endswith(FP8_MATRICES):
            stored[name] = torch.full(shape, 7, dtype=torch.uint8).view(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = torch.ones([-(-size // 128) for size in shape])
        else:
            stored[name] = torch.zeros(shape, dtype=torch.bfloat16)
    write_checkpoint(tmp_path, config, stored, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert_peak_memory_is_little(tmp_path)


def test_peak_memory_while_loading_fused_experts(tmp_path: Path) -> None:
    """All experts of a layer are in one tensor of 201 MB, which is more than one mapping."""
    config = large_config(num_experts=8, expert_width=3072)
    stored = {}
    for name, shape in plain_layout(config).items():
        if ".experts." not in name:
            stored[name.replace("block_sparse_moe", "mlp")] = torch.zeros(shape, dtype=torch.bfloat16)
    shapes = {"gate_up_proj": (8, 6144, 2048), "down_proj": (8, 2048, 3072)}
    for name, shape in shapes.items():
        stored[f"model.layers.0.mlp.experts.{name}"] = torch.zeros(shape, dtype=torch.bfloat16)
    write_checkpoint(tmp_path, config, stored)
    assert_peak_memory_is_little(tmp_path)


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


def write_checkpoint(
    folder: Path,
    config: MixtralConfig,
    tensors: dict[str, torch.Tensor],
    quantization: dict[str, Any] | None = None,
) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    values = config.to_dict() | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(values))


FP8_MATRICES = tuple(f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"))


def test_sharded_checkpoint_loads_alike(plain: Reference, tmp_path: Path) -> None:
    plain.model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    prompts = plain.prompts(9, 20)
    with LLM(tmp_path, dtype="float32") as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    assert tokens == [plain.greedy(prompt, 16) for prompt in prompts]


def test_auto_dtype_is_the_checkpoints(plain: Reference, tmp_path: Path) -> None:
    with LLM(plain.folder) as llm:
        assert llm.config.dtype == "float32"
    for file in plain.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path) as llm:
        assert llm.config.dtype == "bfloat16"
        assert {weight.dtype for weight in llm.core.executor.worker.runner.model.parameters()} == {
            torch.bfloat16,
            torch.float32,
        }  # routers stay in float32


def test_dummy_weights_need_a_config_only_and_follow_the_seed(plain: Reference, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((plain.folder / "config.json").read_text())
    prompts = plain.prompts(9, 20)

    def tokens(seed: int) -> list[list[int]]:
        with LLM(tmp_path, load_format="dummy", seed=seed) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
