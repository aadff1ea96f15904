"""Writes small GGUF files for tests, the way that llama.cpp's converter lays out a Llama model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_families import add_value
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A random model, with weights large enough that a wrong one shows in the logits."""
    numbers = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**(numbers | changes))).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


def write_gguf(
    path: Path, model: LlamaForCausalLM, tensors: dict[str, np.ndarray] | None = None, **metadata: Any
) -> None:
    """Writes `model`, with more tensors and more or other metadata (`__` in a name stands for a dot)."""
    config = model.config
    facts = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.model": "no_vocab",
    }
    facts |= {name.replace("__", "."): value for name, value in metadata.items()}
    writer = gguf.GGUFWriter(path, facts.pop("general.architecture", "llama"))
    for key, value in facts.items():
        add_value(writer, key, value)
    for name, weight in gguf_tensors(model).items():
        writer.add_tensor(name, weight)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem = name.removesuffix(".weight")
        if stem in MODEL_NAMES:
            tensors[f"{MODEL_NAMES[stem]}.weight"] = weight.numpy()
            continue
        _, _, layer, kind = stem.split(".", 3)
        if kind == "self_attn.q_proj":
            weight = interleaved(weight, model.config.num_attention_heads)
        elif kind == "self_attn.k_proj":
            weight = interleaved(weight, model.config.num_key_value_heads)
        tensors[f"blk.{layer}.{LAYER_NAMES[kind]}.weight"] = weight.numpy()
    return tensors


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Row i of each head, and the row half a head further on, become neighbours."""
    head_dim = weight.shape[0] // num_heads
    order = [row for i in range(head_dim // 2) for row in (i, i + head_dim // 2)]
    return weight.view(num_heads, head_dim, -1)[:, order].reshape(weight.shape).contiguous()
