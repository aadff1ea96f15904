"""Read a dense Llama-style model from a GGUF file: its config, and its tensors one by one.

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
from moeserve.models.config_values import ConfigValues
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

# Keys that change what the model computes: those with the one value that Mixtral can express, and those it cannot.
_ONLY_VALUES = {
    "llama.expert_count": 0,
    "llama.attention.causal": True,
    "llama.rope.scale_linear": 1.0,
    "llama.rope.scaling.attn_factor": 1.0,
    "llama.use_parallel_residual": False,
}
_UNSUPPORTED = (
    "llama.attention.clamp_kqv",
    "llama.attention.scale",
    "llama.attention.sliding_window_pattern",
    "llama.embedding_scale",
    "llama.logit_scale",
    "llama.residual_scale",
    "llama.rope.scaling.yarn_log_multiplier",
)


class GgufFile:
    """A GGUF file of architecture llama. The file is mapped; reading a tensor dequantises that one alone."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its metadata.

        Raises:
            CheckpointError: not a GGUF file, damaged, or not a dense Llama; or the gguf package is missing.
        """
        reader = _open(path)
        self.path = path
        self._metadata = ConfigValues(path, _read_metadata(path, reader))
        self._metadata.require("general.architecture", "llama")
        for key, value in _ONLY_VALUES.items():
            self._metadata.require(key, value)
        for key in _UNSUPPORTED:
            self._metadata.refuse(key)

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

    @property
    def tokenizer_metadata(self) -> dict[str, Any]:
        """The values under `tokenizer.`, without that prefix."""
        prefix = "tokenizer."
        return {key[len(prefix) :]: value for key, value in self._metadata.values.items() if key.startswith(prefix)}

    def write_tokenizer(self, folder: Path) -> None:
        metadata = self.tokenizer_metadata
        if len(metadata.get("ggml.tokens") or []) > self.config.vocab_size:
            raise CheckpointError(
                f"{self.path}: {len(metadata['ggml.tokens'])} tokens for an embedding of {self.config.vocab_size} rows"
            )
        write_tokenizer(self.path, metadata, folder, max_length=self.config.max_position_embeddings)

    def _read_config(self, rope_factors: np.ndarray | None) -> DenseConfig:
        metadata = self._metadata
        embedding = self.shapes.get("model.embed_tokens.weight", ())
        if len(embedding) != 2:
            raise CheckpointError(f"{self.path} holds no token embedding (token_embd.weight)")
        vocab_size, hidden_size = embedding
        num_heads = metadata.integer("llama.attention.head_count")
        head_dim = metadata.integer(
            "llama.attention.key_length", metadata.integer("llama.rope.dimension_count", hidden_size // num_heads)
        )
        metadata.require("llama.rope.dimension_count", head_dim)
        metadata.require("llama.attention.value_length", head_dim)
        theta = _as_written(metadata.number("llama.rope.freq_base", 10_000.0))
        ids = {
            name: metadata.token_id(f"tokenizer.ggml.{name}_token_id", high=vocab_size - 1)
            for name in ("bos", "eos", "eot", "eom", "padding")
        }
        ends = list(dict.fromkeys(token_id for name in ("eos", "eot", "eom") if (token_id := ids[name]) is not None))
        return DenseConfig(
            vocab_size=vocab_size,
            hidden_size=metadata.integer("llama.embedding_length"),
            intermediate_size=metadata.integer("llama.feed_forward_length"),
            num_hidden_layers=metadata.integer("llama.block_count"),
            num_attention_heads=num_heads,
            num_key_value_heads=metadata.integer("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position_embeddings=metadata.integer("llama.context_length"),
            rms_norm_eps=_as_written(metadata.number("llama.attention.layer_norm_rms_epsilon")),
            rope_theta=theta,
            rope_scaling=self._rope_scaling(rope_factors, head_dim, theta),
            sliding_window=metadata.integer("llama.attention.sliding_window", 0, low=0) or None,
            tie_word_embeddings="lm_head.weight" not in self.shapes,
            bos_token_id=ids["bos"],
            eos_token_id=ends[0] if len(ends) == 1 else ends or None,
            pad_token_id=ids["padding"],
            dtype="float32",  # quantised values are stored dequantised: no format of ours holds them
        )

    def _rope_scaling(self, rope_factors: np.ndarray | None, head_dim: int, theta: float) -> dict[str, Any] | None:
        metadata, key = self._metadata, "llama.rope.scaling.type"
        if rope_factors is not None:
            scaling = _llama3_scaling(rope_factors, head_dim, theta)
            if metadata.values.get(key, "none") != "none" or scaling is None:
                raise CheckpointError(
                    f"{self.path}: {_ROPE_FACTORS} is not Llama 3's scaling of the rotary frequencies, the only one "
                    "that can be converted; give the checkpoint in Hugging Face layout instead"
                )
            return scaling
        metadata.require(key, "none", "linear")
        if metadata.values.get(key, "none") == "none":
            return None
        return {"rope_type": "linear", "factor": _as_written(metadata.number("llama.rope.scaling.factor"))}


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


def _read_metadata(path: Path, reader: gguf.GGUFReader) -> dict[str, Any]:
    values = {}
    for key, field in reader.fields.items():
        try:
            values[key] = field.contents()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: {key} is not UTF-8 text: {error}") from None
    return values


def _dequantised(path: Path, tensor: gguf.ReaderTensor) -> np.ndarray:
    """Return the tensor's values as float32, in memory of their own."""
    from gguf.quants import dequantize

    try:
        return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} of type {tensor.tensor_type.name} cannot be read: {error}"
        ) from None


def _as_written(value: float) -> float:
    """Return the short decimal of a 32-bit float: files store 0.00001 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _hugging_face_name(name: str) -> str:
    """Return a tensor's name in Hugging Face layout, or its own name if Llama has no such tensor."""
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _LAYER_TENSORS:
        return name
    return f"model.layers.{match[1]}.{_LAYER_TENSORS[match[2]]}.weight"


def _halves_from_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder each head's rows: GGUF rotates neighbours (0, 1), (2, 3), ...; transformers rotates i with i + half."""
    paired = weight.view(num_heads, -1, 2, weight.shape[1])
    return paired.transpose(1, 2).reshape(weight.shape)


def _llama3_scaling(factors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Return the settings of Llama 3's scaling that give these divisors of the frequencies; None if none do.

    The file holds only the divisors: 1 for short wavelengths, `factor` for long ones, and a blend between. All
    Llama 3 models share the other settings, so the largest divisor is the only unknown; the rest is compared.
    """
    factor = round(float(factors.max()), 3) if factors.size else 0.0
    if factors.shape != (head_dim // 2,) or factor < 1.0:
        return None
    low, high = _LLAMA3_SCALING["low_freq_factor"], _LLAMA3_SCALING["high_freq_factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    rotations = _LLAMA3_SCALING["original_max_position_embeddings"] / wavelengths
    blend = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / (blend + (1.0 - blend) / factor)
    if not np.allclose(factors, expected, rtol=1e-4):
        return None
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_SCALING}
