"""Synthetic checkpoints for benchmarks.

    python -m moeserve.bench.checkpoints mixtral-mini [FOLDER]

Weights are random, so the generated text is meaningless, but a step takes the same time and memory as in a trained
model of the same shape. There is no tokenizer: benchmarks send token ids.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moeserve.config.environment import cache_folder
from moeserve.errors import CheckpointError, missing_extra
from moeserve.models.checkpoint.model_files import find_model


def make_checkpoint(name: str, folder: Path | None = None) -> Path:
    """Write a checkpoint in Hugging Face layout with transformers, unless it exists already.

    The files are written to a temporary folder, which is renamed once complete.

    Args:
        folder: folder to write; None: a folder in moeserve's cache.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: the folder has other content.
        SettingsError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("the checkpoints of benchmarks are made by transformers", "transformers", error) from None

    folder = folder or cache_folder() / "bench" / name
    config = CONFIGS[name]
    if folder.exists() and any(folder.iterdir()):
        path = folder / "config.json"
        if not path.exists() or json.loads(path.read_text()) != config:
            raise CheckpointError(f"{folder} holds something other than {name}; delete it or name another folder")
        return folder

    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(partial), dtype=torch.bfloat16
        )
    model.save_pretrained(partial, max_shard_size=2**29)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
    return folder


def find_checkpoint(name: str) -> Path:
    """Return the folder of a synthetic checkpoint, which is written if needed, or of another that is named or in a hub.

    Raises:
        CheckpointError: `name` is neither a synthetic checkpoint nor another, or it cannot be fetched.
    """
    if name in CONFIGS:
        return make_checkpoint(name)
    folder = find_model(name).fetch(shows_progress=True)
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{name}: no such checkpoint; known names are {', '.join(CONFIGS)}")
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeserve.bench.checkpoints", description="Write a synthetic checkpoint."
    )
    parser.add_argument("name", choices=CONFIGS)
    parser.add_argument("folder", type=Path, nargs="?", help="default: a folder in moeserve's cache")
    options = parser.parse_args(arguments)
    print(make_checkpoint(options.name, options.folder))


def small_mixtral_config(
    *, hidden_size: int, expert_size: int, num_layers: int, num_experts: int, vocab_size: int
) -> dict[str, Any]:
    """Return a Mixtral config.json for engines with `load_format="dummy"`: top-2 routing, head size 64 or 32."""
    num_heads = max(4, hidden_size // 64)
    return MIXTRAL | {
        "hidden_size": hidden_size,
        "intermediate_size": expert_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // num_heads,
        "num_hidden_layers": num_layers,
        "num_local_experts": num_experts,
        "vocab_size": vocab_size,
    }


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
MIXTRAL: dict[str, Any] = COMMON | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
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
MIXTRAL_TINY: dict[str, Any] = MIXTRAL | {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
}
DEEPSEEK: dict[str, Any] = COMMON | {  # DeepSeek-V3's proportions, but narrower and with fewer layers
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
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
QWEN3: dict[str, Any] = COMMON | {  # many small experts
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "intermediate_size": 3072,  # of dense layers, but there are none
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
QWEN3_NEXT: dict[str, Any] = COMMON | {  # the proportions of Qwen3-Next-80B-A3B
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "intermediate_size": 3072,  # of dense layers, of which there are none
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "rope_theta": 10000000.0,
    "rope_scaling": None,
    "attention_bias": False,
}
DEEPSEEK_V4: dict[str, Any] = COMMON | {  # the proportions of DeepSeek-V4-Flash
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_act": "silu",
    "moe_intermediate_size": 512,
    "num_nextn_predict_layers": 0,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 512,
    "o_groups": 4,
    "o_lora_rank": 256,
    "layer_types": ["sliding_attention"] * 2 + ["compressed_sparse_attention", "heavily_compressed_attention"] * 7,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "sliding_window": 128,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 256,
    "hc_mult": 4,
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 13,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": None,
    "attention_bias": False,
}


CONFIGS: dict[str, dict[str, Any]] = {  # key names that both transformers 4.57 and 5 read
    "mixtral-mini": MIXTRAL,
    "deepseek-mini": DEEPSEEK,
    "qwen3-mini": QWEN3,
    "qwen3next-mini": QWEN3_NEXT,
    "dsv4-mini": DEEPSEEK_V4,
    "mixtral-small": MIXTRAL | {"num_hidden_layers": 4},  # for benchmarks that load several engines at once
    "mixtral-tiny": MIXTRAL_TINY,
}


if __name__ == "__main__":
    main()
