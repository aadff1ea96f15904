"""Writes a Hugging Face checkpoint as a bf16 GGUF file, and quantises one.

    python -m adapters.write_gguf CHECKPOINT FILE.gguf
    python -m adapters.write_gguf BF16.gguf FILE.gguf q8_0

Runs in llama.cpp's environment. The file has no tokenizer, as synthetic checkpoints have none. Weights stay bf16;
norms and routers become float32, which llama.cpp requires. llama.cpp itself quantises.
"""

# D model width, H heads, P size of a head

from __future__ import annotations

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

EXPERT_PATTERN = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.weight)$")
ARCHITECTURES = {
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}
MOSTLY_BF16 = 32  # llama.cpp's numbers of file types
QUANTISED_TYPES = {"q8_0": 7, "q4_0": 2}


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    partial = target.with_name(f".{target.name}.partial")
    if len(sys.argv) > 3:
        quantise(source, partial, sys.argv[3])
    else:
        write(source, partial)
    partial.rename(target)


@dataclass(frozen=True)
class Entry:
    """A tensor of the file, whose data is made when it is written."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]
    is_float32: bool = False


def write(checkpoint: Path, target: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"])
    if architecture is None:
        raise SystemExit(f"{checkpoint}: model_type {config['model_type']!r} is none of {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=False)
    writer.add_file_type(MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    _add_settings(writer, config, architecture)

    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    entries = list(_entries(Tensors(checkpoint, index["weight_map"]), config, architecture))
    for entry in entries:  # all shapes before any data: one tensor is in memory at a time
        size = math.prod(entry.shape)
        dtype: type[np.generic]
        if entry.is_float32:
            kind, shape, dtype, num_bytes = gguf.GGMLQuantizationType.F32, entry.shape, np.float32, 4 * size
        else:  # numpy has no bf16, so the writer takes the shape in bytes
            kind, dtype, num_bytes = gguf.GGMLQuantizationType.BF16, np.uint8, 2 * size
            shape = (*entry.shape[:-1], 2 * entry.shape[-1])
        writer.add_tensor_info(entry.name, shape, np.dtype(dtype), num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        weights = entry.make()
        assert weights.shape == entry.shape
        writer.write_tensor_data(
            _float32(weights) if entry.is_float32 else np.ascontiguousarray(weights).view(np.uint8)
        )
    writer.close()


def quantise(source: Path, target: Path, kind: str) -> None:
    import llama_cpp  # type: ignore[import-not-found, unused-ignore]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = QUANTISED_TYPES[kind]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise SystemExit(f"llama.cpp could not quantise {source} to {kind}; see its messages above")


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
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
    if architecture == gguf.MODEL_ARCH.QWEN3MOE:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _entries(tensors: Tensors, config: dict[str, Any], architecture: Any) -> Iterator[Entry]:
    """Yield the tensors of the file: those of the checkpoint, with the experts of a projection stacked into one."""
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def gguf_name(name: str) -> str:
        found = names.get_name(name.replace("correction_bias", "correction.bias"), try_suffixes=(".weight", ".bias"))
        if found is None:
            raise SystemExit(f"GGUF has no name for {name}")
        return str(found)

    stacks: dict[str, list[str]] = {}  # names of all experts, by the name of their projection without the expert
    for name in tensors.names:
        shape, read = tensors.shape(name), functools.partial(tensors.read, name)
        if match := EXPERT_PATTERN.match(name):
            stacks.setdefault(f"{match[1]}.{match[3]}", []).append(name)
        elif name.endswith("kv_b_proj.weight"):
            num_heads, key_size, value_size = (
                config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
            )
            keys, values = (
                functools.partial(part, read, num_heads, key_size) for part in (_latent_keys, _latent_values)
            )
            yield Entry(gguf_name(name.replace("kv_b", "k_b")), (num_heads, shape[1], key_size), keys)
            yield Entry(gguf_name(name.replace("kv_b", "v_b")), (num_heads, value_size, shape[1]), values)
        else:
            projection = name.split(".")[-2]
            if projection in heads and architecture == gguf.MODEL_ARCH.LLAMA:  # where llama.cpp rotates neighbours
                read = functools.partial(_pair_neighbours, read, heads[projection])
            yield Entry(gguf_name(name), shape, read, is_float32=len(shape) == 1 or name.endswith(".gate.weight"))
    for projection, experts in stacks.items():
        experts.sort(key=lambda name: int(name.split(".")[-3]))
        stack = functools.partial(_stack, tensors, experts)
        yield Entry(gguf_name(projection), (len(experts), *tensors.shape(experts[0])), stack)


def _stack(tensors: Tensors, names: list[str]) -> np.ndarray:
    return np.stack([tensors.read(name) for name in names])


def _latent_keys(read: Callable[[], np.ndarray], num_heads: int, key_size: int) -> np.ndarray:
    """Return the keys' half of the projection from the latent, transposed, as it is applied to queries."""
    weight = read()
    return weight.reshape(num_heads, -1, weight.shape[1])[:, :key_size].transpose(0, 2, 1)


def _latent_values(read: Callable[[], np.ndarray], num_heads: int, key_size: int) -> np.ndarray:
    weight = read()
    return weight.reshape(num_heads, -1, weight.shape[1])[:, key_size:]


def _pair_neighbours(read: Callable[[], np.ndarray], num_heads: int) -> np.ndarray:
    """Reorder rows [H * P, D]: from heads whose two halves are rotated together to heads with neighbouring pairs."""
    weight = read()
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _float32(weights: np.ndarray) -> np.ndarray:
    if weights.dtype == np.float32:
        return np.ascontiguousarray(weights)
    return (weights.astype(np.uint32) << 16).view(np.float32)  # bf16 is the upper half of a float32


class Tensors:
    """The mapped tensors of a checkpoint. bf16 is read as uint16, since numpy has no bf16."""

    def __init__(self, folder: Path, weight_map: dict[str, str]) -> None:
        self._found: dict[str, tuple[np.ndarray, str, tuple[int, ...]]] = {}
        for shard in sorted(set(weight_map.values())):
            data = np.memmap(folder / shard, np.uint8, mode="r")
            header_bytes = int(data[:8].view(np.uint64)[0])
            header = json.loads(data[8 : 8 + header_bytes].tobytes())
            for name, entry in header.items():
                if name != "__metadata__":
                    begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
                    self._found[name] = data[begin:end], entry["dtype"], tuple(entry["shape"])

    @property
    def names(self) -> list[str]:
        return list(self._found)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._found[name][2]

    def read(self, name: str) -> np.ndarray:
        data, dtype, shape = self._found[name]
        return data.view({"BF16": np.uint16, "F32": np.float32}[dtype]).reshape(shape)


if __name__ == "__main__":
    main()
