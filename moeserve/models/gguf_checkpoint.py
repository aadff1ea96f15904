"""Present a GGUF file as a Hugging Face checkpoint: its metadata as config.json, its tensors under the usual names.

`checkpoint_folder` writes config.json, the tokenizer and links to the files into a cache folder, which is then loaded
like any other checkpoint. The gguf package dequantises weights row by row.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; names of tensors and keys: the gguf package.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from moeserve.config.environment import cache_folder
from moeserve.errors import CheckpointError
from moeserve.models.config_values import ConfigValues
from moeserve.models.gguf_file import as_written, dequantised, open_gguf
from moeserve.models.gguf_tokenizer import write_tokenizer
from moeserve.models.quantization import CheckpointTensor, ReadRows

if TYPE_CHECKING:
    import gguf

# O rows, I columns, H heads, K and V rows of a head's keys and values, L latent

_VERSION = 1  # format version of the cache folders; increase it when their files change
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_SIGMOID = 2  # GGUF's number of the sigmoid gating function


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture, and how to translate its metadata and tensor names to those of a Hugging Face model."""

    model: str  # the value of `architectures` in config.json
    read: Callable[[ConfigValues, str], dict[str, Any]]  # (metadata, prefix of its keys) -> more values of config.json
    layer_names: Mapping[str, str]  # GGUF's tensor names in a layer -> Hugging Face's
    paired_rows: Mapping[str, str]  # tensors whose heads are rotated in adjacent pairs -> key of the head count


_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_LATENT_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{name}_exps": f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def _read_mixtral(metadata: ConfigValues, prefix: str) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.integer(f"{prefix}.feed_forward_length"),
        "num_local_experts": metadata.integer(f"{prefix}.expert_count"),
        "sliding_window": metadata.integer(f"{prefix}.attention.sliding_window", 0, low=0) or None,
    }


def _read_qwen(metadata: ConfigValues, prefix: str) -> dict[str, Any]:
    shared = metadata.integer(f"{prefix}.expert_shared_feed_forward_length", 0, low=0)
    return {
        "intermediate_size": metadata.integer(f"{prefix}.feed_forward_length"),
        "moe_intermediate_size": metadata.integer(f"{prefix}.expert_feed_forward_length"),
        "num_experts": metadata.integer(f"{prefix}.expert_count"),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": prefix == "qwen3moe",
    }


def _read_deepseek(metadata: ConfigValues, prefix: str) -> dict[str, Any]:
    rotary = metadata.integer(f"{prefix}.rope.dimension_count")
    # Files written before 2025-04 have no `*_mla` keys. In these files, the other keys hold the sizes of a head.
    key_size = metadata.integer(
        f"{prefix}.attention.key_length_mla", metadata.integer(f"{prefix}.attention.key_length")
    )
    value_size = metadata.integer(
        f"{prefix}.attention.value_length_mla", metadata.integer(f"{prefix}.attention.value_length")
    )
    is_v3 = metadata.integer(f"{prefix}.expert_gating_func", 1) == _SIGMOID
    num_groups = metadata.integer(f"{prefix}.expert_group_count", 1)
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "intermediate_size": metadata.integer(f"{prefix}.feed_forward_length"),
        "moe_intermediate_size": metadata.integer(f"{prefix}.expert_feed_forward_length"),
        "n_routed_experts": metadata.integer(f"{prefix}.expert_count"),
        "n_shared_experts": metadata.integer(f"{prefix}.expert_shared_count"),
        "first_k_dense_replace": metadata.integer(f"{prefix}.leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": as_written(metadata.number(f"{prefix}.expert_weights_scale", 1.0)),
        "norm_topk_prob": metadata.flag(f"{prefix}.expert_weights_norm", default=False),
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "topk_method": "noaux_tc" if is_v3 else "group_limited_greedy" if num_groups > 1 else "greedy",
        "n_group": num_groups,
        "topk_group": metadata.integer(f"{prefix}.expert_group_used_count", 1),
        "q_lora_rank": metadata.integer(f"{prefix}.attention.q_lora_rank", 0, low=0) or None,
        "kv_lora_rank": metadata.integer(f"{prefix}.attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key_size - rotary,
        "v_head_dim": value_size,
        # The latent is one head in these files, but each head has keys and values of its own.
        "num_key_value_heads": metadata.integer(f"{prefix}.attention.head_count"),
        "head_dim": None,
    }


_QWEN2_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}
_DEEPSEEK_SHARED = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
_ROTATED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
ARCHITECTURES = {
    "llama": Architecture("MixtralForCausalLM", _read_mixtral, _ATTENTION_NAMES | _EXPERT_NAMES, _ROTATED),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _read_qwen, _ATTENTION_NAMES | _EXPERT_NAMES | _QWEN2_SHARED, {}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _read_qwen, _ATTENTION_NAMES | _EXPERT_NAMES, {}),
    "deepseek2": Architecture(
        "DeepseekV3ForCausalLM",
        _read_deepseek,
        _ATTENTION_NAMES | _LATENT_NAMES | _EXPERT_NAMES | _DEEPSEEK_SHARED,
        {},
    ),
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file, of any number of dimensions."""

    is_encoded: ClassVar[bool] = True
    shard: Path
    stored: gguf.ReaderTensor
    num_paired_heads: int = 0  # heads whose rows are in adjacent-pair order; 0: rows are in the model's order
    is_row: bool = False  # a one-row matrix, stored as a vector

    @property
    def shape(self) -> tuple[int, ...]:
        # GGUF lists dimensions from the innermost outwards.
        shape = tuple(reversed(self.stored.shape.tolist()))
        return (1, *shape) if self.is_row else shape

    def check(self) -> None:
        """Check nothing: the gguf package reports an unsupported type when the tensor is read."""

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        if self.is_row:
            return torch.from_numpy(dequantised(self.shard, self.stored))[None][start:stop]
        if not self.num_paired_heads:
            return torch.from_numpy(dequantised(self.shard, self.stored, slice(start, stop)))
        # GGUF rotates adjacent pairs (0, 1), (2, 3), ...; the model rotates i with i + half.
        order = np.arange(self.shape[0]).reshape(self.num_paired_heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return torch.from_numpy(dequantised(self.shard, self.stored, order[start:stop]))


@dataclass(frozen=True)
class HeadMapsTensor:
    """The up-projections from the latent to keys and values [H * (K + V), L], which GGUF stores as two tensors."""

    is_encoded: ClassVar[bool] = True
    keys: GgufTensor  # [H, L, K], transposed
    values: GgufTensor  # [H, V, L]

    @property
    def shape(self) -> tuple[int, ...]:
        num_heads, latent, key_size = self.keys.shape
        return num_heads * (key_size + self.values.shape[1]), latent

    @property
    def shard(self) -> Path:
        return self.keys.shard

    def check(self) -> None:
        num_heads, latent, _ = self.keys.shape
        if len(self.values.shape) != 3 or (self.values.shape[0], self.values.shape[2]) != (num_heads, latent):
            raise CheckpointError(
                f"{self.shard}: {self.keys.stored.name!r} has shape {list(self.keys.shape)} and "
                f"{self.values.stored.name!r} {list(self.values.shape)}; both must have the same heads and latent"
            )

    def read(self, read_rows: ReadRows, start: int, stop: int) -> Tensor:
        size = self.shape[0] // self.keys.shape[0]
        first, last = start // size, -(-stop // size)
        keys_HKL = self.keys.read(read_rows, first, last).transpose(1, 2)
        maps = torch.cat([keys_HKL, self.values.read(read_rows, first, last)], dim=1).flatten(0, 1)
        return maps[start - first * size : stop - first * size]


def checkpoint_folder(path: Path) -> Path:
    """Return the cache folder that represents a GGUF file as a checkpoint. It is written on first use.

    Args:
        path: the file, or any of its parts (`model-00001-of-00003.gguf`), which must be in one folder.

    Raises:
        CheckpointError: the file or a part is missing or damaged, the architecture or tokenizer is not supported, or
            the cache cannot be written.
    """
    files = _parts_of(path)
    facts = [_VERSION, *(f"{file.resolve()} {(state := file.stat()).st_size} {state.st_mtime_ns}" for file in files)]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    whole = _PART.fullmatch(path.name)
    folder = cache_folder() / "gguf" / f"{whole[1] if whole else path.stem}-{digest}"
    if (folder / "config.json").is_file():
        return folder
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        try:
            _write_companions(files, partial)
            partial.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # no other process has written it in the meantime
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder} ({error}); set MOESERVE_CACHE to a writable folder") from error
    return folder


def tensors_of(folder: Path) -> dict[str, CheckpointTensor]:
    """Return the tensors of the GGUF files in a folder that `checkpoint_folder` returned, by the model's names.

    Raises:
        CheckpointError: a file is damaged, or holds a tensor that the model does not have.
    """
    files = sorted(folder.glob("*.gguf"))
    metadata, _ = _open(files[0])
    name_of_architecture = metadata.values["general.architecture"]
    architecture = ARCHITECTURES[name_of_architecture]
    heads = {name: metadata.integer(f"{name_of_architecture}.{key}") for name, key in architecture.paired_rows.items()}
    found: dict[str, CheckpointTensor] = {}
    apart: dict[str, dict[str, GgufTensor]] = {}
    stored_tensors = [(file, stored) for file in files for stored in _open(file)[1].values()]
    for shard, stored in stored_tensors:
        kind = stored.name.rpartition(".")[0].split(".")[-1]
        tensor = GgufTensor(shard, stored, heads.get(kind, 0), is_row=kind == "ffn_gate_inp_shexp")
        if kind in ("attn_k_b", "attn_v_b"):
            layer = re.sub(r"^blk\.(\d+)\..*", r"model.layers.\1", stored.name)
            apart.setdefault(f"{layer}.self_attn.kv_b_proj.weight", {})[kind] = tensor
        else:
            found[_name_of(stored.name, architecture)] = tensor
    for name, parts in apart.items():
        if parts.keys() >= {"attn_k_b", "attn_v_b"}:
            found[name] = HeadMapsTensor(parts["attn_k_b"], parts["attn_v_b"])
    return found


def bytes_of_types(folder: Path) -> Counter[str]:
    """Return how many bytes are stored in each type of GGUF, in a folder that `checkpoint_folder` returned."""
    found: Counter[str] = Counter()
    for file in folder.glob("*.gguf"):
        for stored in _open(file)[1].values():
            found[stored.tensor_type.name] += int(stored.n_bytes)
    return found


def _name_of(name: str, architecture: Architecture) -> str:
    """Return the Hugging Face name of a tensor, or its GGUF name if the model has no such tensor."""
    stem, _, end = name.rpartition(".")
    if stem in _MODEL_NAMES:
        return f"{_MODEL_NAMES[stem]}.{end}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer is None or layer[2] not in architecture.layer_names:
        return name
    own = architecture.layer_names[layer[2]]
    return f"model.layers.{layer[1]}.{own}" + ("" if layer[2] == "exp_probs_b" else f".{end}")


def _parts_of(path: Path) -> list[Path]:
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    parts = [path.with_name(f"{match[1]}-{number + 1:05d}-of-{match[2]}.gguf") for number in range(int(match[2]))]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path} is one of {len(parts)} parts; {', '.join(missing)} must be in the same folder")
    return parts


@functools.lru_cache(maxsize=64)
def _open(path: Path) -> tuple[ConfigValues, dict[str, gguf.ReaderTensor]]:
    return open_gguf(path)


def _write_companions(files: list[Path], folder: Path) -> None:
    metadata, _ = _open(files[0])
    shapes = {stored.name: stored.shape for file in files for stored in _open(file)[1].values()}
    config = _config_of(metadata, shapes)
    for file in files:
        (folder / file.name).symlink_to(file.resolve())
    prefix = "tokenizer."
    of_tokenizer = {key[len(prefix) :]: value for key, value in metadata.values.items() if key.startswith(prefix)}
    write_tokenizer(files[0], of_tokenizer, folder, max_length=config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _config_of(metadata: ConfigValues, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json that describes the model of a GGUF file."""
    name = metadata.values.get("general.architecture")
    if name not in ARCHITECTURES or not metadata.integer(f"{name}.expert_count", 0, low=0):
        raise metadata.wrong(
            "general.architecture",
            f"with {name}.expert_count={metadata.values.get(f'{name}.expert_count', 0)} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}, with experts (`moeserve upcycle` turns dense Llama models into Mixtral ones)",
        )
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{metadata.path} holds no token embedding (token_embd.weight)")
    vocab_size = int(shapes["token_embd.weight"][1])
    num_heads = metadata.integer(f"{name}.attention.head_count")
    hidden_size = metadata.integer(f"{name}.embedding_length")
    ids = {
        kind: metadata.token_id(f"tokenizer.ggml.{kind}_token_id", high=vocab_size - 1)
        for kind in ("bos", "eos", "eot", "eom", "padding")
    }
    ends = list(dict.fromkeys(token_id for kind in ("eos", "eot", "eom") if (token_id := ids[kind]) is not None))
    theta = as_written(metadata.number(f"{name}.rope.freq_base", 10_000.0))
    config = {
        "architectures": [ARCHITECTURES[name].model],
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf"},
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.integer(f"{name}.block_count", high=2**12),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer(f"{name}.attention.head_count_kv", num_heads),
        "head_dim": metadata.integer(f"{name}.attention.key_length", hidden_size // num_heads),
        "num_experts_per_tok": metadata.integer(f"{name}.expert_used_count"),
        "max_position_embeddings": metadata.integer(f"{name}.context_length"),
        "rms_norm_eps": as_written(metadata.number(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, name),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": ids["bos"],
        "eos_token_id": ends or None,
        "pad_token_id": ids["padding"],
    }
    return config | ARCHITECTURES[name].read(metadata, name)


def _rope_scaling(metadata: ConfigValues, name: str) -> dict[str, Any] | None:
    key = f"{name}.rope.scaling"
    kind = metadata.values.get(f"{key}.type", "none")
    if kind == "none":
        return None
    metadata.require(f"{key}.type", "none", "linear", "yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": as_written(metadata.number(f"{key}.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.integer(f"{key}.original_context_length")
        multiplier = metadata.number(f"{key}.yarn_log_multiplier", 0.0)
        if multiplier:  # a tenth of DeepSeek's mscale_all_dim
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * as_written(multiplier), 6))
    return scaling
