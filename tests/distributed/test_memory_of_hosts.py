"""A model that two hosts can hold and none of them alone: it loads, and its KV cache is sized by both hosts' memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import MEMORY_GROUPS, Host, hosts, memory_limit, why_impossible
from safetensors.torch import save_file
from test_hosts import SECONDS, Engine

from moeserve.bench.checkpoints import small_mixtral_config

pytestmark = [pytest.mark.ranks, pytest.mark.soak, pytest.mark.timeout(600)]

MIB = 2**20
LIMITS = (1680 * MIB, 1310 * MIB)  # of the hosts
WIDTH, EXPERT_WIDTH, NUM_LAYERS, NUM_EXPERTS, VOCABULARY = 1024, 2560, 13, 8, 1024  # 1.6 GiB in bfloat16
CONFIG = small_mixtral_config(
    hidden_size=WIDTH,
    expert_size=EXPERT_WIDTH,
    num_layers=NUM_LAYERS,
    num_experts=NUM_EXPERTS,
    vocab_size=VOCABULARY,
)
BLOCK_SIZE = 16
SETTINGS: dict[str, Any] = dict(
    dtype="bfloat16",
    num_threads=1,
    max_model_len=4096,
    max_num_seqs=256,
    max_num_batched_tokens=256,
    block_size=BLOCK_SIZE,
    kv_cache_memory=None,
    packed_cache=0,
)
SHARE = 0.5  # of the memory that is free after loading, for the KV cache


def write_checkpoint(folder: Path) -> int:
    """Write a checkpoint of random weights, one layer at a time. Return its bytes."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).mul_(0.02).to(torch.bfloat16)

    def shard(index: int) -> Path:
        return folder / f"model-{index + 1:05}-of-{NUM_LAYERS + 1:05}.safetensors"

    (folder / "config.json").write_text(json.dumps(CONFIG))
    kv_width = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    names = {"model.embed_tokens": (VOCABULARY, WIDTH), "lm_head": (VOCABULARY, WIDTH)}
    tensors = {f"{name}.weight": random(*shape) for name, shape in names.items()}
    save_file(tensors | {"model.norm.weight": torch.ones(WIDTH, dtype=torch.bfloat16)}, shard(0))
    expert = {"w1": (EXPERT_WIDTH, WIDTH), "w2": (WIDTH, EXPERT_WIDTH), "w3": (EXPERT_WIDTH, WIDTH)}
    for layer in range(NUM_LAYERS):
        mixer = {"q_proj": WIDTH, "k_proj": kv_width, "v_proj": kv_width, "o_proj": WIDTH}
        tensors = {f"self_attn.{name}.weight": random(rows, WIDTH) for name, rows in mixer.items()}
        tensors["block_sparse_moe.gate.weight"] = random(NUM_EXPERTS, WIDTH)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
        for index in range(NUM_EXPERTS):
            weights = {f"block_sparse_moe.experts.{index}.{name}.weight": random(*expert[name]) for name in expert}
            tensors |= weights
        prefixed = {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}
        save_file(prefixed, shard(1 + layer), metadata={"format": "pt"})
    return sum(path.stat().st_size for path in folder.iterdir())


def free_bytes(group: Path) -> int:
    """Return what is left of a control group's limit. Cached files count as free."""
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    active = max(0, int(statistics["total_active_file"]) - int(statistics["total_mapped_file"]))
    cached = int(statistics["total_inactive_file"]) + active
    used = int((group / "memory.usage_in_bytes").read_text()) - cached
    return int((group / "memory.limit_in_bytes").read_text()) - used


@pytest.fixture
def limited() -> Iterator[tuple[list[Host], list[Path]]]:
    """Two hosts, and the control groups of their memory."""
    if reason := why_impossible() or ("" if MEMORY_GROUPS.is_dir() else f"{MEMORY_GROUPS} (cgroups v1) is missing"):
        pytest.skip(reason)
    with hosts(2) as machines, ExitStack() as stack:
        yield machines, [stack.enter_context(memory_limit(*each)) for each in zip(machines, LIMITS, strict=True)]


def test_a_model_that_one_host_cannot_hold(limited: tuple[list[Host], list[Path]], tmp_path: Path) -> None:
    (machines, groups), model = limited, tmp_path / "model"
    model.mkdir()
    size = write_checkpoint(model)
    settings = {"model": str(model)} | SETTINGS
    alone = f"from moeserve import LLM; LLM(**{settings!r})"
    process = machines[0].start([sys.executable, "-c", alone], tmp_path / "alone.log", OMP_NUM_THREADS="1")
    assert process.wait(SECONDS) == 1
    output = (tmp_path / "alone.log").read_text()
    assert "do not fit in memory" in output.splitlines()[-1], output

    run = Engine(machines, tmp_path, machines[0].address, settings | {"tensor_parallel_size": 2})
    try:
        cache_bytes = run.answer()["num_blocks"] * BLOCK_SIZE * NUM_LAYERS * 2 * CONFIG["head_dim"] * 2
        left = [free_bytes(group) for group in groups]
        (tokens,) = run.ask("generate", prompts=[[1, 2, 3]], max_tokens=8)["tokens"]
    finally:
        run.end()
    assert len(tokens) == 8
    shown = f"model {size / MIB:.0f}, KV cache {cache_bytes / MIB:.0f} on each, free {[each // MIB for each in left]}"
    print(f"MiB: {shown}", file=sys.stderr)
    assert 0.6 * SHARE * min(left) < cache_bytes < SHARE * min(left) + 50 * MIB, shown
    assert cache_bytes < 0.8 * SHARE * max(left), shown  # the other host has more
