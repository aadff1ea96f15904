"""Writes a Hugging Face checkpoint as a bf16 GGUF file, or quantizes a GGUF file.

    python -m adapters.write_gguf CHECKPOINT FILE.gguf
    python -m adapters.write_gguf BF16.gguf FILE.gguf q8_0

Runs in llama.cpp's environment. The file has a tokenizer if the checkpoint has one, which must be a byte-level BPE.
Weights stay bf16; norms and routers become float32, which llama.cpp requires. Quantization is done by llama.cpp itself.
"""

# D model width, H heads, P size of a head

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found, unused-ignore]
import numpy as np

EXPERT_PATTERN = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.weight)$")
ARCHITECTURES = {
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
}
MOSTLY_BF16 = 32  # llama.cpp's numbers of file types
QUANTISED_TYPES = {"q8_0": 7, "q4_0": 2, "q4_k_m": 15}


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    partial = target.with_name(f".{target.name}.partial")
    if len(sys.argv) > 3:
        quantise(source, partial, sys.argv[3])
    else:
        write(source, partial)
    partial.rename(target)


def write(checkpoint: Path, target: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"])
    if architecture is None:
        raise SystemExit(f"{checkpoint}: model_type {config['model_type']!r} is none of {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=True)
    writer.add_file_type(MOSTLY_BF16)
    _add_tokenizer(writer, checkpoint / "tokenizer.json", config)
    _add_settings(writer, config, architecture)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, weights in _tensors(checkpoint, config, architecture):
        own_name = names.get_name(name.replace("correction_bias", "correction.bias"), try_suffixes=(".weight", ".bias"))
        if own_name is None:
            raise SystemExit(f"GGUF has no name for {name}")
        if weights.ndim == 1 or name.endswith((".gate.weight", ".conv1d.weight")):
            writer.add_tensor(own_name, _float32(weights))
        else:  # numpy has no bf16, so the writer takes bytes
            data = np.ascontiguousarray(weights).view(np.uint8)
            writer.add_tensor(own_name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(source: Path, target: Path, kind: str) -> None:
    import llama_cpp  # type: ignore[import-not-found, unused-ignore]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = QUANTISED_TYPES[kind]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise SystemExit(f"llama.cpp could not quantise {source} to {kind}; see its messages above")


def _add_tokenizer(writer: Any, path: Path, config: dict[str, Any]) -> None:
    if not path.exists():
        writer.add_tokenizer_model("no_vocab")
        return
    content = json.loads(path.read_text())
    vocabulary, special = content["model"]["vocab"], {token["content"] for token in content["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if name in special else gguf.TokenType.NORMAL for name in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    ends = config["eos_token_id"]
    writer.add_bos_token_id(vocabulary.get("<s>", config["bos_token_id"]))
    writer.add_eos_token_id(vocabulary.get("</s>", ends[0] if isinstance(ends, list) else ends))


def _add_settings(writer: Any, config: dict[str, Any], architecture: Any) -> None:
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if architecture == gguf.MODEL_ARCH.DEEPSEEK2:
        rotary, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
        writer.add_head_count_kv(1)  # with a shared latent vector, there is one key and one value head
        writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_kv_lora_rank(latent)
        writer.add_key_length(latent + rotary)
        writer.add_value_length(latent)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_rope_dimension_count(rotary)
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(int(head_size * config.get("partial_rotary_factor", 1)))
    writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
    if architecture != gguf.MODEL_ARCH.LLAMA:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture == gguf.MODEL_ARCH.QWEN3NEXT:
        num_heads = config["linear_num_value_heads"]
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        writer.add_full_attention_interval(config["full_attention_interval"])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(num_heads)
        writer.add_ssm_inner_size(num_heads * config["linear_value_head_dim"])


def _tensors(checkpoint: Path, config: dict[str, Any], architecture: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the checkpoint's names and tensors in GGUF's form, with the experts of a projection in one tensor."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = _read(checkpoint)
    stacks: dict[str, dict[int, np.ndarray]] = {}  # by name of the projection without the expert, then by expert
    for name, weights in tensors.items():
        if match := EXPERT_PATTERN.match(name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = weights
        elif name.endswith("kv_b_proj.weight"):  # the keys' half is transposed, because it is applied to queries
            parts_HPD = weights.reshape(config["num_attention_heads"], -1, weights.shape[1])
            key_size = config["qk_nope_head_dim"]
            yield name.replace("kv_b", "k_b"), parts_HPD[:, :key_size].transpose(0, 2, 1)
            yield name.replace("kv_b", "v_b"), parts_HPD[:, key_size:]
        elif architecture == gguf.MODEL_ARCH.LLAMA and (num_heads := heads.get(name.split(".")[-2])):
            # llama.cpp rotates neighbouring values here, transformers the two halves of a head.
            halves = weights.reshape(num_heads, 2, -1, weights.shape[1])
            yield name, halves.swapaxes(1, 2).reshape(weights.shape)
        elif architecture == gguf.MODEL_ARCH.QWEN3NEXT:
            yield from _of_qwen3_next(name, weights, config)
        else:
            yield name, weights
    for name, experts in stacks.items():
        yield name, np.stack([experts[expert] for expert in sorted(experts)])


def _of_qwen3_next(name: str, weights: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a tensor of Qwen3-Next as llama.cpp has it.

    Norms multiply by the weight instead of by 1 plus the weight. Decay rates are stored instead of their logarithms.
    The rows of queries, keys, values and gates, which the checkpoint orders by key head, are ordered by kind.
    """
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, _float32(weights) + 1
    elif name.endswith(".A_log"):
        yield name, -np.exp(_float32(weights))
    elif name.endswith(".dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), weights
    elif name.endswith(".conv1d.weight"):
        yield name, weights.squeeze(1)
    elif name.endswith(".in_proj_qkvz.weight"):
        key_size, num_keys = config["linear_key_head_dim"], config["linear_num_key_heads"]
        value_size = config["linear_value_head_dim"] * config["linear_num_value_heads"] // num_keys
        ends = np.cumsum([key_size, key_size, value_size])
        parts = np.split(weights.reshape(num_keys, -1, weights.shape[1]), ends, axis=1)
        *qkv, gate = (part.reshape(-1, weights.shape[1]) for part in parts)
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate(qkv)
        yield name.replace("in_proj_qkvz", "in_proj_z"), gate
    else:
        yield name, weights


def _float32(weights: np.ndarray) -> np.ndarray:
    if weights.dtype == np.float32:
        return np.ascontiguousarray(weights)
    return (weights.astype(np.uint32) << 16).view(np.float32)  # bf16 is the upper half of a float32


def _read(checkpoint: Path) -> dict[str, np.ndarray]:
    """Map the tensors of a checkpoint. bf16 is read as uint16, because numpy has no bf16."""
    found = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        data = np.memmap(shard, np.uint8, mode="r")
        start = 8 + int(data[:8].view(np.uint64)[0])
        header = json.loads(data[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype = {"BF16": np.uint16, "F32": np.float32}[entry["dtype"]]
            found[name] = data[start + begin : start + end].view(dtype).reshape(entry["shape"])
    return found


if __name__ == "__main__":
    main()
