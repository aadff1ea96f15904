"""Makes the synthetic checkpoints that benchmarks run on. Knows their shapes, never how they are served.

    python -m moeserve.bench.checkpoints mixtral-mini [FOLDER]

Weights are random, so the text is nonsense, but the time and the bytes of a step are those of a trained model of
the same shape. There is no tokenizer: benchmarks send token ids.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from moeserve.config.environment import cache_folder
from moeserve.errors import CheckpointError

CheckpointName = Literal["mixtral-mini", "deepseek-mini", "qwen3-mini", "mixtral-small", "mixtral-tiny"]
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_STD = 0.02
BYTES_PER_WEIGHT = 2  # bf16
GATED_NAMES = ("gate_proj", "up_proj", "down_proj")


def make_checkpoint(
    name: CheckpointName, folder: Path | None = None, *, seed: int = 0, max_shard_bytes: int = 512 * 2**20
) -> Path:
    """Writes a checkpoint in Hugging Face layout, or finds it already written.

    The shards grow in a folder beside the final one, which takes its name only when all is complete. One shard is
    in memory at a time. The same name and seed always give the same weights.

    Args:
        folder: where to write; none: a folder in moeserve's cache.
        max_shard_bytes: most bytes of one safetensors file, unless a single tensor is larger.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the folder holds something else.
    """
    folder = folder or cache_folder() / "bench" / name
    config = model_config(name)
    if folder.exists() and any(folder.iterdir()):
        _require_same(folder, config, seed)
        return folder

    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_shards(partial, name, tensor_shapes(config), seed, max_shard_bytes)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
    return folder


def find_checkpoint(name: str) -> Path:
    """The folder of a checkpoint that is given by its name, and made if need be, or by its folder.

    Raises:
        CheckpointError: there is neither.
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
        prog="python -m moeserve.bench.checkpoints", description="Makes a synthetic checkpoint."
    )
    parser.add_argument("name", choices=get_args(CheckpointName))
    parser.add_argument("folder", type=Path, nargs="?", help="default: a folder in moeserve's cache")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(make_checkpoint(options.name, options.folder, seed=options.seed))


def model_config(name: CheckpointName) -> dict[str, Any]:
    """What config.json says of each checkpoint."""
    match name:
        case "mixtral-mini":
            return _mixtral_config(
                vocab_size=32000, hidden_size=1024, num_layers=16, num_heads=16, num_kv_heads=4,
                num_experts=8, num_experts_per_token=2, expert_size=3584,
            )  # fmt: skip
        case "deepseek-mini":
            return _deepseek_config(hidden_size=1024, num_layers=16, num_heads=16)
        case "qwen3-mini":
            return _qwen3_config(hidden_size=1024, num_layers=16, num_heads=16, num_kv_heads=4)
        case "mixtral-small":  # a quarter of mixtral-mini's layers, for benchmarks that start several engines
            return model_config("mixtral-mini") | {"num_hidden_layers": 4}
        case "mixtral-tiny":
            return _mixtral_config(
                vocab_size=160, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
                num_experts=4, num_experts_per_token=2, expert_size=96,
            )  # fmt: skip


def _mixtral_config(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    num_experts: int,
    num_experts_per_token: int,
    expert_size: int,
) -> dict[str, Any]:
    """A config.json that transformers 4.57 and 5 both read: the older names of keys, which 5 still takes."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": expert_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "num_local_experts": num_experts,
        "num_experts_per_tok": num_experts_per_token,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "initializer_range": WEIGHT_STD,
        "router_aux_loss_coef": 0.02,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _deepseek_config(*, hidden_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    """DeepSeek-V3 with the proportions of the published one, narrower and shallower."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
        "hidden_size": hidden_size,
        "intermediate_size": 2816,
        "moe_intermediate_size": 512,
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
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
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": WEIGHT_STD,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _qwen3_config(*, hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    """Qwen3-MoE with many small experts, narrower and shallower than the published ones."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
        "hidden_size": hidden_size,
        "intermediate_size": 3072,  # of dense layers, of which there are none
        "moe_intermediate_size": 384,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "initializer_range": WEIGHT_STD,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint under its original name."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes |= _latent_attention(layer, config) if "kv_lora_rank" in config else _attention(layer, config)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        match config["model_type"]:
            case "mixtral":
                shapes[f"{layer}.block_sparse_moe.gate.weight"] = (config["num_local_experts"], hidden)
                for expert in range(config["num_local_experts"]):
                    prefix = f"{layer}.block_sparse_moe.experts.{expert}"
                    shapes |= _gated(prefix, ("w1", "w3", "w2"), hidden, config["intermediate_size"])
            case "deepseek_v3" if index < config["first_k_dense_replace"]:
                shapes |= _gated(f"{layer}.mlp", GATED_NAMES, hidden, config["intermediate_size"])
            case "deepseek_v3":
                width = config["moe_intermediate_size"]
                shapes |= _experts(layer, config["n_routed_experts"], hidden, width)
                shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
                shared_width = width * config["n_shared_experts"]
                shapes |= _gated(f"{layer}.mlp.shared_experts", GATED_NAMES, hidden, shared_width)
            case "qwen3_moe":
                shapes |= _experts(layer, config["num_experts"], hidden, config["moe_intermediate_size"])
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _attention(layer: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query, key_value = (config[f"num_{which}_heads"] * head_dim for which in ("attention", "key_value"))
    prefix = f"{layer}.self_attn"
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.q_proj.weight": (query, hidden),
        f"{prefix}.k_proj.weight": (key_value, hidden),
        f"{prefix}.v_proj.weight": (key_value, hidden),
        f"{prefix}.o_proj.weight": (hidden, query),
    }
    if config["model_type"] == "qwen3_moe":
        shapes |= {f"{prefix}.q_norm.weight": (head_dim,), f"{prefix}.k_norm.weight": (head_dim,)}
    return shapes


def _latent_attention(layer: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    key, rotary, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query_rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
    prefix = f"{layer}.self_attn"
    return {
        f"{prefix}.q_a_proj.weight": (query_rank, hidden),
        f"{prefix}.q_a_layernorm.weight": (query_rank,),
        f"{prefix}.q_b_proj.weight": (num_heads * (key + rotary), query_rank),
        f"{prefix}.kv_a_proj_with_mqa.weight": (latent + rotary, hidden),
        f"{prefix}.kv_a_layernorm.weight": (latent,),
        f"{prefix}.kv_b_proj.weight": (num_heads * (key + value), latent),
        f"{prefix}.o_proj.weight": (hidden, num_heads * value),
    }


def _experts(layer: str, num_experts: int, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{layer}.mlp.gate.weight": (num_experts, hidden)}
    for expert in range(num_experts):
        shapes |= _gated(f"{layer}.mlp.experts.{expert}", GATED_NAMES, hidden, width)
    return shapes


def _gated(prefix: str, names: tuple[str, str, str], hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (width, hidden), down: (hidden, width), up: (width, hidden)}


def _write_shards(folder: Path, name: str, shapes: dict[str, tuple[int, ...]], seed: int, max_shard_bytes: int) -> None:
    """Writes all tensors, and the index that says which shard holds which."""
    shards = _divide(shapes, max_shard_bytes)
    total_bytes = sum(_num_bytes(shape) for shape in shapes.values())
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    with tqdm(desc=f"making {name}", total=total_bytes, unit="B", unit_scale=True, disable=None) as progress:
        for number, names in enumerate(shards, start=1):
            shard = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_shard(folder / shard, {tensor_name: shapes[tensor_name] for tensor_name in names}, generator)
            weight_map.update(dict.fromkeys(names, shard))
            progress.update(sum(_num_bytes(shapes[tensor_name]) for tensor_name in names))
    index = {"metadata": {"total_size": total_bytes, "seed": seed}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> None:
    tensors = {name: _weights(shape, generator) for name, shape in shapes.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _divide(shapes: dict[str, tuple[int, ...]], max_shard_bytes: int) -> list[list[str]]:
    """Names of the tensors of each shard, in order."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for tensor_name, shape in shapes.items():
        if shards[-1] and shard_bytes + _num_bytes(shape) > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(tensor_name)
        shard_bytes += _num_bytes(shape)
    return shards


def _num_bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * BYTES_PER_WEIGHT


def _weights(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Random matrices; ones for the norms, so that activations keep their size from layer to layer."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, WEIGHT_STD, generator=generator)


def _require_same(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Refuses a folder that is not this very checkpoint. A complete index means that all shards are there."""
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
