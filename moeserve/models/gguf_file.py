"""Reads a dense Llama-style model from a GGUF file: its config, and its tensors one by one. Knows no experts.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.models.dense import DenseConfig, special_token_ids
from moeserve.models.gguf_tokenizer import write_tokenizer

if TYPE_CHECKING:
    import gguf

INSTALL_GGUF = "pip install 'moeserve[demo]'"

_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# Keys that change what the model computes, with the one value that a Mixtral model can take. None: no value at all.
_ONLY_VALUES: dict[str, Any] = {
    "llama.expert_count": 0,
    "llama.attention.causal": True,
    "llama.attention.clamp_kqv": None,
    "llama.attention.scale": None,
    "llama.attention.sliding_window_pattern": None,
    "llama.embedding_scale": None,
    "llama.logit_scale": None,
    "llama.residual_scale": None,
    "llama.rope.scale_linear": 1.0,
    "llama.rope.scaling.attn_factor": 1.0,
    "llama.rope.scaling.yarn_log_multiplier": None,
    "llama.use_parallel_residual": False,
}


class GgufFile:
    """A GGUF file of architecture llama. It is mapped; reading a tensor dequantises that one alone."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointError: not a GGUF file, damaged, or not a dense Llama; or the gguf package is missing.
        """
        reader = _open(path)
        self.path = path
        self._metadata = _Metadata(path, dict(reader.fields))
        self._metadata.require("general.architecture", "llama")
        for key, value in _ONLY_VALUES.items():
            self._metadata.require(key, value, optional=True)

        tensors = {tensor.name: tensor for tensor in reader.tensors}
        rope_factors = tensors.pop(_ROPE_FACTORS, None)
        self._tensors = {_hugging_face_name(name): tensor for name, tensor in tensors.items()}
        # GGUF lists dimensions from the innermost outwards.
        self.shapes = {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in self._tensors.items()}
        self.config = self._read_config(None if rope_factors is None else _dequantised(path, rope_factors))
        self.generation = special_token_ids(self.config)

    def tensor(self, name: str) -> Tensor:
        tensor = torch.from_numpy(_dequantised(self.path, self._tensors[name]))
        if name.endswith("self_attn.q_proj.weight"):
            return _halves_from_pairs(tensor, self.config.num_attention_heads)
        if name.endswith("self_attn.k_proj.weight"):
            return _halves_from_pairs(tensor, self.config.num_key_value_heads)
        return tensor

    def write_tokenizer(self, folder: Path) -> None:
        facts = self._metadata.beginning_with("tokenizer.")
        if len(facts.get("ggml.tokens") or []) > self.config.vocab_size:
            raise CheckpointError(
                f"{self.path}: {len(facts['ggml.tokens'])} tokens for an embedding of {self.config.vocab_size}"
            )
        write_tokenizer(self.path, facts, folder, max_length=self.config.max_position_embeddings)

    def _read_config(self, rope_factors: np.ndarray | None) -> DenseConfig:
        metadata = self._metadata
        if "model.embed_tokens.weight" not in self.shapes or len(self.shapes["model.embed_tokens.weight"]) != 2:
            raise CheckpointError(f"{self.path} holds no token embedding (token_embd.weight)")
        vocab_size, hidden_size = self.shapes["model.embed_tokens.weight"]
        num_heads = metadata.integer("llama.attention.head_count")
        rotated = metadata.integer("llama.rope.dimension_count", hidden_size // num_heads)
        head_dim = metadata.integer("llama.attention.key_length", rotated)
        metadata.require("llama.rope.dimension_count", head_dim, optional=True)
        metadata.require("llama.attention.value_length", head_dim, optional=True)
        theta = metadata.number("llama.rope.freq_base", 10_000.0)
        max_position_embeddings = metadata.integer("llama.context_length")

        ends = [metadata.token_id(f"tokenizer.ggml.{name}_token_id", vocab_size) for name in ("eos", "eot", "eom")]
        eos_token_ids = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
        window = metadata.integer("llama.attention.sliding_window", 0, low=0)
        return DenseConfig(
            vocab_size=vocab_size,
            hidden_size=metadata.integer("llama.embedding_length"),
            intermediate_size=metadata.integer("llama.feed_forward_length"),
            num_hidden_layers=metadata.integer("llama.block_count"),
            num_attention_heads=num_heads,
            num_key_value_heads=metadata.integer("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=metadata.number("llama.attention.layer_norm_rms_epsilon"),
            rope_theta=theta,
            rope_scaling=self._rope_scaling(rope_factors, head_dim, theta),
            sliding_window=window or None,
            tie_word_embeddings="lm_head.weight" not in self.shapes,
            bos_token_id=metadata.token_id("tokenizer.ggml.bos_token_id", vocab_size),
            eos_token_id=eos_token_ids[0] if len(eos_token_ids) == 1 else eos_token_ids or None,
            pad_token_id=metadata.token_id("tokenizer.ggml.padding_token_id", vocab_size),
            dtype="float32",  # what its numbers become: no format of ours holds quantised ones
        )

    def _rope_scaling(self, rope_factors: np.ndarray | None, head_dim: int, theta: float) -> dict[str, Any] | None:
        metadata = self._metadata
        rope_type = metadata.value("llama.rope.scaling.type", "none")
        if rope_factors is not None:
            scaling = _llama3_scaling(rope_factors, head_dim, theta)
            if rope_type != "none" or scaling is None:
                raise CheckpointError(
                    f"{self.path}: {_ROPE_FACTORS} is not Llama 3's scaling of the rotary frequencies, the only one "
                    "that can be translated; give the checkpoint in Hugging Face layout instead"
                )
            return scaling
        if rope_type == "none":
            return None
        if rope_type != "linear":
            raise metadata.wrong("llama.rope.scaling.type", "is not supported; supported: none, linear")
        return {"rope_type": "linear", "factor": metadata.number("llama.rope.scaling.factor")}


class _Metadata:
    """The key-value part of a GGUF file. Each getter names file, key and value when one is wrong."""

    def __init__(self, path: Path, fields: dict[str, gguf.ReaderField]) -> None:
        self._path = path
        self._fields = fields

    def beginning_with(self, prefix: str) -> dict[str, Any]:
        """The values of all keys that begin like this, under the rest of the key."""
        return {key[len(prefix) :]: self.value(key) for key in self._fields if key.startswith(prefix)}

    def value(self, key: str, default: Any = None) -> Any:
        if key not in self._fields:
            return default
        try:
            return self._fields[key].contents()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {key} is not UTF-8 text: {error}") from None

    def wrong(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {key}={self.value(key)!r:.100} {why}")

    def require(self, key: str, expected: Any, *, optional: bool = False) -> None:
        if self.value(key, expected if optional else None) != expected:
            supported = "files without this key" if expected is None else repr(expected)
            raise self.wrong(key, f"is not supported; supported: {supported}")

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
            raise self.wrong(key, f"must be an integer of at least {low}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value <= 0:
            raise self.wrong(key, "must be a number above 0")
        # Files store 32-bit floats: 0.00001 comes back as 9.999999747378752e-06. Take the short decimal it stood for.
        return float(str(np.float32(value)))

    def token_id(self, key: str, vocab_size: int) -> int | None:
        if key not in self._fields:
            return None
        if self.integer(key, low=0) >= vocab_size:
            raise self.wrong(key, f"is outside the vocabulary of {vocab_size} tokens")
        return self.integer(key, low=0)


def _open(path: Path) -> gguf.GGUFReader:
    try:
        import gguf
    except ImportError:
        raise CheckpointError(f"reading {path} needs the gguf package; install it with: {INSTALL_GGUF}") from None
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is damaged or incomplete ({path.stat().st_size} bytes: {error}); fetch it again"
        ) from None


def _dequantised(path: Path, tensor: gguf.ReaderTensor) -> np.ndarray:
    """The tensor's values as float32, in memory of their own."""
    from gguf.quants import dequantize

    try:
        return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} of type {tensor.tensor_type.name} cannot be read: {error}"
        ) from None


def _hugging_face_name(name: str) -> str:
    """The published name of a tensor; a tensor that Llama does not have keeps its own."""
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _LAYER_TENSORS:
        return name
    return f"model.layers.{match[1]}.{_LAYER_TENSORS[match[2]]}.weight"


def _halves_from_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Reorders each head's rows: GGUF rotates neighbours (0, 1), (2, 3), ...; transformers rotates i with i + half."""
    paired = weight.view(num_heads, -1, 2, weight.shape[1])
    return paired.transpose(1, 2).reshape(weight.shape)


def _llama3_scaling(factors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any] | None:
    """The settings of Llama 3's scaling that give these divisors of the frequencies; None if none do.

    The file holds only the divisors: 1 for short wavelengths, `factor` for long ones, and a blend between. All
    Llama 3 models share the other settings, so the largest divisor is the only unknown, and the rest is the proof.
    """
    factor = round(float(factors.max()), 3) if factors.size else 0.0
    if factors.shape != (head_dim // 2,) or factor < 1.0:
        return None
    low, high = _LLAMA3_SCALING["low_freq_factor"], _LLAMA3_SCALING["high_freq_factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_SCALING["original_max_position_embeddings"] / wavelengths
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / (blend + (1.0 - blend) / factor)
    if not np.allclose(factors, expected, rtol=1e-4):
        return None
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_SCALING}
