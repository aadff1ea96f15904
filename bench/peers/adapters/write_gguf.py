"""Writes a Hugging Face checkpoint as a bf16 GGUF file, and quantises one. Knows the layouts, runs no model.

    python -m adapters.write_gguf CHECKPOINT FILE.gguf
    python -m adapters.write_gguf BF16.gguf FILE.gguf q8_0

Runs in llama.cpp's environment. The file has no tokenizer, as synthetic checkpoints have none. Weights stay bf16 to the
bit; norms and routers become float32, which is how llama.cpp wants them. Quantising is llama.cpp's own.
"""

# D model width, H heads, P size of a head

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found, unused-ignore]
import numpy as np

ENDS_OF_NAMES = {  # names of tensors of a layer in a checkpoint -> in a GGUF file, for all families
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
EXPERT_NAMES = {
    "w1": "ffn_gate_exps.weight",
    "w3": "ffn_up_exps.weight",
    "w2": "ffn_down_exps.weight",
    "gate_proj": "ffn_gate_exps.weight",
    "up_proj": "ffn_up_exps.weight",
    "down_proj": "ffn_down_exps.weight",
}
EXPERT_PATTERN = re.compile(r"(.*\.experts\.)(\d+)\.(\w+)\.weight$")
HEADS_OF_ROTATED = {
    "self_attn.q_proj.weight": ("attn_q.weight", "num_attention_heads"),
    "self_attn.k_proj.weight": ("attn_k.weight", "num_key_value_heads"),
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "deepseek_v3": "deepseek2"}
SIGMOID = 2  # llama.cpp's number of this gating function
MOSTLY_BF16 = 32  # ... and of these file types
QUANTISED_TYPES = {"q8_0": 7, "q4_0": 2}


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
    writer = gguf.GGUFWriter(target, architecture, use_temp_file=False)
    writer.add_file_type(MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    _add_settings(writer, config, architecture)

    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    tensors = _Tensors(checkpoint, index["weight_map"])
    # Shapes first, weights after: one tensor is in memory at a time.
    plan = list(_plan(tensors, config))
    for entry in plan:
        _announce(writer, entry)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in plan:
        weights = entry.make()
        assert weights.shape == entry.shape
        writer.write_tensor_data(
            _float32(weights) if entry.is_float32 else np.ascontiguousarray(weights).view(np.uint8)
        )
    writer.close()


def _announce(writer: Any, entry: _Entry) -> None:
    size = math.prod(entry.shape)
    if entry.is_float32:
        kind = gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), 4 * size, raw_dtype=kind)
    else:  # numpy has no bf16, so the writer takes the shape of the bytes
        kind = gguf.GGMLQuantizationType.BF16
        byte_shape = (*entry.shape[:-1], 2 * entry.shape[-1])
        writer.add_tensor_info(entry.name, byte_shape, np.dtype(np.uint8), 2 * size, raw_dtype=kind)


def quantise(source: Path, target: Path, kind: str) -> None:
    import llama_cpp  # type: ignore[import-not-found, unused-ignore]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = QUANTISED_TYPES[kind]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise SystemExit(f"llama.cpp could not quantise {source} to {kind}; it says why above")


def _add_settings(writer: Any, config: dict[str, Any], architecture: str) -> None:
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
    if architecture == "deepseek2":
        rotary, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
        writer.add_head_count_kv(1)  # the form with a shared latent: one key, one value
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
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType(SIGMOID))
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file, not made yet."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]
    is_float32: bool = False


def _plan(tensors: _Tensors, config: dict[str, Any]) -> Iterator[_Entry]:
    for name, target in TOP_NAMES.items():
        shape = tensors.shape(name)
        yield _Entry(target, shape, functools.partial(tensors.read, name), is_float32=len(shape) == 1)
    for index in range(config["num_hidden_layers"]):
        for entry in _plan_layer(tensors, config, f"model.layers.{index}."):
            yield dataclasses.replace(entry, name=f"blk.{index}.{entry.name}")


def _plan_layer(tensors: _Tensors, config: dict[str, Any], layer: str) -> Iterator[_Entry]:
    experts: dict[str, int] = {}  # name of a projection with * for the expert -> how many experts have it
    for name in tensors.names(layer):
        end = name.removeprefix(layer)
        shape = tensors.shape(name)
        read = functools.partial(tensors.read, name)
        if end in ENDS_OF_NAMES:
            is_float32 = len(shape) == 1 or end.endswith("gate.weight")
            yield _Entry(ENDS_OF_NAMES[end], shape, read, is_float32)
        elif end in HEADS_OF_ROTATED:
            target, heads_key = HEADS_OF_ROTATED[end]
            is_paired = config["model_type"] == "mixtral"  # llama.cpp rotates neighbours in this architecture
            make = functools.partial(_pair_neighbours, read, config[heads_key]) if is_paired else read
            yield _Entry(target, shape, make)
        elif end == "self_attn.kv_b_proj.weight":
            heads, key_size, value_size = (
                config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
            )
            keys = functools.partial(_latent_keys, read, heads, key_size)
            values = functools.partial(_latent_values, read, heads, key_size)
            yield _Entry("attn_k_b.weight", (heads, shape[1], key_size), keys)
            yield _Entry("attn_v_b.weight", (heads, value_size, shape[1]), values)
        elif match := EXPERT_PATTERN.match(name):
            projection = f"{match[1]}*.{match[3]}.weight"
            experts[projection] = experts.get(projection, 0) + 1
        else:
            raise SystemExit(f"no place in a GGUF file is known for {name}")
    for projection, count in experts.items():
        names = [projection.replace("*", str(expert)) for expert in range(count)]
        target = EXPERT_NAMES[projection.split(".")[-2]]
        yield _Entry(target, (count, *tensors.shape(names[0])), functools.partial(_stack, tensors, names))


def _stack(tensors: _Tensors, names: list[str]) -> np.ndarray:
    return np.stack([tensors.read(name) for name in names])


def _latent_keys(read: Callable[[], np.ndarray], num_heads: int, key_size: int) -> np.ndarray:
    """The keys' half of the projection out of the latent, turned over: applied to queries."""
    weight = read()
    return weight.reshape(num_heads, -1, weight.shape[1])[:, :key_size].transpose(0, 2, 1)


def _latent_values(read: Callable[[], np.ndarray], num_heads: int, key_size: int) -> np.ndarray:
    weight = read()
    return weight.reshape(num_heads, -1, weight.shape[1])[:, key_size:]


def _pair_neighbours(read: Callable[[], np.ndarray], num_heads: int) -> np.ndarray:
    """[H * P, D] whose head has its two halves rotated together -> the same with each pair side by side."""
    weight = read()
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _float32(weights: np.ndarray) -> np.ndarray:
    if weights.dtype == np.float32:
        return np.ascontiguousarray(weights)
    return (weights.astype(np.uint32) << 16).view(np.float32)  # bf16 is the upper half of a float32


class _Tensors:
    """The tensors of a checkpoint, mapped. bf16 comes as uint16, which numpy can hold."""

    def __init__(self, folder: Path, weight_map: dict[str, str]) -> None:
        self._places: dict[str, tuple[np.ndarray, str, tuple[int, ...]]] = {}
        for shard in sorted(set(weight_map.values())):
            data = np.memmap(folder / shard, np.uint8, mode="r")
            header_bytes = int(data[:8].view(np.uint64)[0])
            header = json.loads(data[8 : 8 + header_bytes].tobytes())
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
                    self._places[name] = data[begin:end], entry["dtype"], tuple(entry["shape"])

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._places if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name][2]

    def read(self, name: str) -> np.ndarray:
        data, dtype, shape = self._places[name]
        return data.view({"BF16": np.uint16, "F32": np.float32}[dtype]).reshape(shape)


if __name__ == "__main__":
    main()
