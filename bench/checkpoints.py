"""Synthetic checkpoints for benchmarks.

    python -m moeserve.bench.checkpoints mixtral-mini [FOLDER]

Weights are random, so the text is nonsense, but a step takes the time and bytes of a trained model of the same shape.
There is no tokenizer: benchmarks send token ids.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import safe_open

from moeserve.config.environment import cache_folder
from moeserve.errors import CheckpointError

CheckpointName = Literal["mixtral-mini", "deepseek-mini", "qwen3-mini", "mixtral-small", "mixtral-tiny"]
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 512 * 2**20


def make_checkpoint(
    name: CheckpointName, folder: Path | None = None, *, seed: int = 0, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Path:
    """Write a checkpoint in Hugging Face layout with transformers, or find it already written.

    The files are written to a temporary folder, which is renamed once complete.

    Args:
        folder: the target; None: a folder in moeserve's cache.
        max_shard_bytes: maximum bytes of one safetensors file, unless a single tensor is larger.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the folder holds something else.
    """
    import transformers

    folder = folder or cache_folder() / "bench" / name
    config = model_config(name)
    if folder.exists() and any(folder.iterdir()):
        _require_same(folder, config, seed)
        return folder

    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(config))
    random_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(partial), dtype=torch.bfloat16
    )
    torch.set_rng_state(random_state)
    model.save_pretrained(partial, max_shard_size=max_shard_bytes)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_index(partial, seed)
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
    return folder


def find_checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint: of a synthetic one by its name, which is written if needed, or `name` itself.

    Raises:
        CheckpointError: `name` is neither a known name nor the folder of a checkpoint.
    """
    known: tuple[CheckpointName, ...] = get_args(CheckpointName)
    for synthetic in known:
        if name == synthetic:
            return make_checkpoint(synthetic)
    if not (Path(name) / "config.json").exists():
        raise CheckpointError(f"{name}: no such checkpoint; known names are {', '.join(known)}")
    return Path(name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.checkpoints", description="Write a synthetic checkpoint."
    )
    parser.add_argument("name", choices=get_args(CheckpointName))
    parser.add_argument("folder", type=Path, nargs="?", help="default: a folder in moeserve's cache")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(make_checkpoint(options.name, options.folder, seed=options.seed))


def model_config(name: CheckpointName) -> dict[str, Any]:
    """Return the config.json of a synthetic checkpoint. Keys have the names that transformers 4.57 and 5 both read."""
    match name:
        case "mixtral-mini":
            return _config("mixtral", "MixtralForCausalLM", MIXTRAL)
        case "mixtral-small":  # a quarter of the layers, for benchmarks that load several engines at once
            return model_config("mixtral-mini") | {"num_hidden_layers": 4}
        case "mixtral-tiny":
            return model_config("mixtral-mini") | MIXTRAL_TINY
        case "deepseek-mini":
            return _config("deepseek_v3", "DeepseekV3ForCausalLM", DEEPSEEK)
        case "qwen3-mini":
            return _config("qwen3_moe", "Qwen3MoeForCausalLM", QWEN3)


def small_mixtral_config(
    *, hidden_size: int, expert_size: int, num_layers: int, num_experts: int, vocab_size: int
) -> dict[str, Any]:
    """Return a Mixtral config.json for engines with `load_format="dummy"`: top-2 of the experts, heads of 64 or 32."""
    num_heads = max(4, hidden_size // 64)
    return model_config("mixtral-mini") | {
        "hidden_size": hidden_size,
        "intermediate_size": expert_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // num_heads,
        "num_hidden_layers": num_layers,
        "num_local_experts": num_experts,
        "vocab_size": vocab_size,
    }


def _config(model_type: str, architecture: str, own: dict[str, Any]) -> dict[str, Any]:
    return COMMON | own | {"model_type": model_type, "architectures": [architecture]}


COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MIXTRAL: dict[str, Any] = {
    "intermediate_size": 3584,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "router_aux_loss_coef": 0.02,
    "router_jitter_noise": 0.0,
    "output_router_logits": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTRAL_TINY: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
}
DEEPSEEK: dict[str, Any] = {  # the proportions of DeepSeek-V3, narrower and with fewer layers
    "intermediate_size": 2816,
    "moe_intermediate_size": 512,
    "num_nextn_predict_layers": 0,
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
}
QWEN3: dict[str, Any] = {  # many small experts
    "intermediate_size": 3072,  # of dense layers, of which there are none
    "moe_intermediate_size": 384,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
}


def _write_index(folder: Path, seed: int) -> None:
    """Record the seed in the index of the shards, which is made for a single file too."""
    path = folder / INDEX_FILE
    if path.exists():
        index = json.loads(path.read_text())
    else:
        (shard,) = folder.glob("*.safetensors")
        with safe_open(shard, framework="pt") as tensors:
            index = {"metadata": {}, "weight_map": dict.fromkeys(tensors.keys(), shard.name)}
    index["metadata"]["seed"] = seed
    path.write_text(json.dumps(index, indent=2) + "\n")


def _require_same(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Refuse a folder with another checkpoint. A complete index implies that all shards are there."""
    try:
        same_config = json.loads((folder / "config.json").read_text()) == config
        same_seed = json.loads((folder / INDEX_FILE).read_text())["metadata"]["seed"] == seed
    except (OSError, ValueError, KeyError):
        same_config = same_seed = False
    if not (same_config and same_seed):
        raise CheckpointError(
            f"{folder} holds something other than this checkpoint with seed {seed}; delete it or name another folder"
        )


if __name__ == "__main__":
    main()
