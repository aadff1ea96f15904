"""The config and the tensors of a dense Llama-style model in a GGUF file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.models.config_values import ConfigValues
from moeserve.models.dense import DenseSpec
from moeserve.models.gguf.reader import open_gguf
from moeserve.models.gguf.tokenizer import write_tokenizer

ROPE_FACTORS = "rope_freqs.weight"
LONGROPE_FACTORS = {length: f"rope_factors_{length}.weight" for length in ("short", "long")}
TOKEN_ID_KEYS = {name: f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "padding")}
_LLAMA3_CONTEXT = 8192  # positions that the models were trained with before their context was extended
_LLAMA3_HIGH_FACTORS = (4.0, 1.0)  # for Llama 3 and for Llama 4
_NO_ROTATION = 1e29  # minimum divisor of frequencies that do not rotate (llama.cpp's converter writes 1e30)

# Keys that change the results of the model: first keys for which Mixtral supports a single value, then keys that
# Mixtral does not support.
_ONLY_VALUES = {
    "general.architecture": "llama",
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
    """A GGUF file of architecture llama. The file is mapped; reading a tensor dequantises only this tensor."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its metadata.

        Raises:
            CheckpointError: the file is damaged, is not a GGUF file, holds no dense Llama, or the gguf package is
                missing.
        """
        metadata, tensors = open_gguf(path)
        self.path = path
        self.tokenizer_metadata = metadata.under("tokenizer.")
        self._metadata = ConfigValues(path, metadata.chosen("general.architecture", "llama.", *TOKEN_ID_KEYS.values()))
        for key, value in _ONLY_VALUES.items():
            self._metadata.require(key, value)
        for key in _UNSUPPORTED:
            self._metadata.refuse(key)

        rope_factors = tensors.pop(ROPE_FACTORS, None)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.config = self._read_config(shapes, None if rope_factors is None else rope_factors.read())
        import gguf

        gguf_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, self.config.num_hidden_layers)
        names = {gguf_names.get_name(name, (".weight",)): name for name, _ in self.config.tensors()}
        self._tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
        self.shapes = {names.get(name, name): shape for name, shape in shapes.items()}

    def tensor(self, name: str) -> Tensor:
        tensor = torch.from_numpy(self._tensors[name].read())
        if name.endswith("self_attn.q_proj.weight"):
            return _halves_from_pairs(tensor, self.config.num_attention_heads)
        if name.endswith("self_attn.k_proj.weight"):
            return _halves_from_pairs(tensor, self.config.num_key_value_heads)
        return tensor

    def write_companions(self, folder: Path) -> None:
        write_tokenizer(self.path, self.tokenizer_metadata, folder, max_length=self.config.max_position_embeddings)

    def _read_config(self, shapes: dict[str, tuple[int, ...]], rope_factors: np.ndarray | None) -> DenseSpec:
        metadata = self._metadata
        if len(shapes.get("token_embd.weight", ())) != 2:
            raise CheckpointError(f"{self.path} holds no token embedding (token_embd.weight)")
        vocab_size, hidden_size = shapes["token_embd.weight"]
        num_heads = metadata.integer("llama.attention.head_count")
        head_dim = metadata.integer(
            "llama.attention.key_length", metadata.integer("llama.rope.dimension_count", hidden_size // num_heads)
        )
        metadata.require("llama.rope.dimension_count", head_dim)
        metadata.require("llama.attention.value_length", head_dim)
        theta = as_written(metadata.number("llama.rope.freq_base", 10_000.0))
        ids = {name: metadata.token_id(key, high=vocab_size - 1) for name, key in TOKEN_ID_KEYS.items()}
        ends = list(dict.fromkeys(token_id for name in ("eos", "eot", "eom") if (token_id := ids[name]) is not None))
        return DenseSpec(
            vocab_size=vocab_size,
            hidden_size=metadata.integer("llama.embedding_length"),
            intermediate_size=metadata.integer("llama.feed_forward_length"),
            num_hidden_layers=metadata.integer("llama.block_count", high=2**12),
            num_attention_heads=num_heads,
            num_key_value_heads=metadata.integer("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position_embeddings=metadata.integer("llama.context_length"),
            rms_norm_eps=as_written(metadata.number("llama.attention.layer_norm_rms_epsilon")),
            rope_theta=theta,
            rope_scaling=self._rope_scaling(rope_factors, head_dim, theta),
            sliding_window=metadata.integer("llama.attention.sliding_window", 0, low=0) or None,
            tie_word_embeddings="output.weight" not in shapes,
            bos_token_id=ids["bos"],
            eos_token_id=ends or None,
            pad_token_id=ids["padding"],
            dtype="float32",  # quantised tensors are written dequantised, because no format of ours can hold them
        )

    def _rope_scaling(self, rope_factors: np.ndarray | None, head_dim: int, theta: float) -> dict[str, Any] | None:
        metadata, key = self._metadata, "llama.rope.scaling.type"
        if rope_factors is not None:
            metadata.require(key, "none")
            return llama3_scaling(self.path, rope_factors, head_dim, theta)
        metadata.require(key, "none", "linear")
        if metadata.values.get(key, "none") == "none":
            return None
        return {"rope_type": "linear", "factor": as_written(metadata.number("llama.rope.scaling.factor"))}


def scaling_of_divisors(path: Path, divisors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any]:
    """Return the rotary settings that divide the frequencies by `divisors`.

    These are Llama 3's scaling, or a fraction of each head that is rotated.

    Raises:
        CheckpointError: no settings give the divisors.
    """
    num_rotated = int((divisors == 1.0).sum())
    if num_rotated < divisors.size and (divisors[num_rotated:] >= _NO_ROTATION).all():
        return {"rope_type": "proportional", "partial_rotary_factor": 2 * num_rotated / head_dim}
    return llama3_scaling(path, divisors, head_dim, theta)


def llama3_scaling(path: Path, divisors: np.ndarray, head_dim: int, theta: float) -> dict[str, Any]:
    """Return the settings of Llama 3's scaling that divide the frequencies by `divisors`.

    The file holds only the divisors: 1 for short wavelengths, `factor` for long ones, and a blend between. The other
    settings are the same in all Llama 3 models, and in all Llama 4 models. So only the largest divisor is unknown; the
    others are compared.

    Raises:
        CheckpointError: no settings give the divisors.
    """
    factor, low = round(float(divisors.max()), 3), 1.0
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    rotations = _LLAMA3_CONTEXT / wavelengths
    for high in _LLAMA3_HIGH_FACTORS:
        blend = np.clip((rotations - low) / (high - low), 0.0, 1.0) if high > low else (rotations >= high)
        expected = 1.0 / (blend + (1.0 - blend) / factor)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": _LLAMA3_CONTEXT,
            }
    raise CheckpointError(
        f"{path}: {ROPE_FACTORS} is not Llama 3's scaling of the rotary frequencies, the only one that can be "
        "converted; give the checkpoint in Hugging Face layout instead"
    )


def as_written(value: float) -> float:
    """Return the float of the shortest decimal with the same 32-bit float: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _halves_from_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder each head's rows: GGUF rotates neighbours (0, 1), (2, 3), ...; transformers rotates i with i + half."""
    paired = weight.view(num_heads, -1, 2, weight.shape[1])
    return paired.transpose(1, 2).reshape(weight.shape)
