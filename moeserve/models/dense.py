"""Dense Llama-style checkpoints, the input of upcycling, and the reader of those in Hugging Face layout."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from moeserve.config.settings import DtypeName
from moeserve.errors import CheckpointError
from moeserve.models.checkpoint import read_headers
from moeserve.models.config_values import ConfigValues, read_json

DENSE_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
ROTARY_KEYS = ("rope_theta", "partial_rotary_factor", "type", "rope_type")  # of a scaling, without its numbers
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "*.model",
)
# Defaults of transformers for keys that config.json lacks
DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_MISTRAL_WINDOW = 4096
NAMES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """The config of a dense checkpoint, under transformers' names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # rope_type and its numbers; None: plain rotary embedding
    sliding_window: int | None
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    dtype: DtypeName

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor, in the order of the forward pass."""
        width, ffn_width = self.hidden_size, self.intermediate_size
        query_width, key_width = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, width)
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (width,)
            yield f"{prefix}.self_attn.q_proj.weight", (query_width, width)
            yield f"{prefix}.self_attn.k_proj.weight", (key_width, width)
            yield f"{prefix}.self_attn.v_proj.weight", (key_width, width)
            yield f"{prefix}.self_attn.o_proj.weight", (width, query_width)
            yield f"{prefix}.post_attention_layernorm.weight", (width,)
            yield f"{prefix}.mlp.gate_proj.weight", (ffn_width, width)
            yield f"{prefix}.mlp.up_proj.weight", (ffn_width, width)
            yield f"{prefix}.mlp.down_proj.weight", (width, ffn_width)
        yield "model.norm.weight", (width,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, width)


class DenseCheckpoint(Protocol):
    """A dense model: its config, and its tensors one at a time."""

    path: Path
    config: DenseConfig
    generation: dict[str, Any]  # contents of its generation_config.json
    shapes: dict[str, tuple[int, ...]]  # of every stored tensor, by Hugging Face name

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, in memory of its own or mapped from the file."""
        ...

    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json and its companions into `folder`, if the checkpoint has a tokenizer."""
        ...


def check_dense(dense: DenseCheckpoint) -> None:
    """Raise CheckpointError if numbers of the config contradict each other or the stored tensors."""
    config, shapes = dense.config, dense.shapes
    if config.num_attention_heads % config.num_key_value_heads:
        raise CheckpointError(
            f"{dense.path}: num_key_value_heads={config.num_key_value_heads} must divide "
            f"num_attention_heads={config.num_attention_heads}"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{dense.path}: head_dim={config.head_dim} must be even for rotary embedding")
    known: set[str] = set()
    missing: list[str] = []
    for name, expected in config.tensors():
        known.add(name)
        if name not in shapes:
            missing.append(name)
            if len(missing) == NAMES_SHOWN:  # a config may claim billions of layers: do not list them all
                break
        elif shapes[name] != expected:
            raise CheckpointError(
                f"{dense.path}: tensor {name!r} has shape {list(shapes[name])}, its config needs {list(expected)}"
            )
    if missing:
        raise CheckpointError(f"{dense.path} lacks tensors that its config needs: {', '.join(missing)}")

    # transformers ignores these two as well: frequencies are computed, and a tied head is the embedding.
    extra = sorted(name for name in shapes.keys() - known if "rotary_emb" not in name and name != "lm_head.weight")
    if extra:
        reason = "a Mixtral model has no biases" if any(name.endswith(".bias") for name in extra) else "it is unknown"
        raise CheckpointError(
            f"{dense.path} holds tensors that a Mixtral checkpoint cannot take over ({reason}): "
            f"{', '.join(extra[:NAMES_SHOWN])}; only plain Llama and Mistral models can be upcycled"
        )


class DenseFolder:
    """A Llama or Mistral checkpoint in Hugging Face layout, in one safetensors file or several."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            ggufs = sorted(folder.glob("*.gguf"))
            hint = f"; give the GGUF file itself: {ggufs[0]}" if ggufs else ", so it is not a checkpoint"
            raise CheckpointError(f"{folder} holds no config.json{hint}")
        self.path = folder
        self.config = _read_config(ConfigValues.of_folder(folder))
        generation_path = folder / "generation_config.json"
        self.generation = read_json(generation_path) if generation_path.is_file() else special_token_ids(self.config)
        self._stored = read_headers(folder)
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}

    def tensor(self, name: str) -> Tensor:
        # Reopened for each tensor, so that mapped pages already read do not accumulate in memory.
        with safe_open(self._stored[name].shard, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is {tensor.dtype}; give a float32, bfloat16 or float16 checkpoint"
            )
        return tensor

    def write_tokenizer(self, folder: Path) -> None:
        for pattern in TOKENIZER_FILES:
            for path in self.path.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)


def special_token_ids(config: DenseConfig) -> dict[str, Any]:
    """Return the contents of a generation_config.json for a checkpoint without one."""
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def _read_config(config: ConfigValues) -> DenseConfig:
    architecture = config.architecture()
    if architecture not in DENSE_ARCHITECTURES:
        raise CheckpointError(
            f"{config.path}: architecture {architecture!r} cannot be upcycled; "
            f"supported: {', '.join(DENSE_ARCHITECTURES)}"
        )
    is_mistral = architecture == "MistralForCausalLM"
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)
    config.require("mlp_bias", False)
    if config.values.get("quantization_config") is not None:
        raise config.wrong("quantization_config", "is not supported; give a float32, bfloat16 or float16 checkpoint")

    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_dim = config.optional_integer("head_dim") or hidden_size // num_heads
    rotary = config.rotary(head_dim, default_fraction=1.0, default_theta=DEFAULT_ROPE_THETA)
    key, settings = config.rotary_settings()
    if rotary.dim != head_dim:
        raise config.wrong(key, "rotates only a part of each head, which a Mixtral model cannot do")
    scaling = {name: value for name, value in settings.items() if name not in ROTARY_KEYS}
    # null means no window, unlike a missing key
    window = config.optional_integer("sliding_window") if "sliding_window" in config.values else DEFAULT_MISTRAL_WINDOW
    eos = config.token_ids("eos_token_id")
    return DenseConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_hidden_layers=config.integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=config.integer("num_key_value_heads", default=None if is_mistral else num_heads),
        head_dim=head_dim,
        max_position_embeddings=config.integer("max_position_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps"),
        rope_theta=rotary.theta,
        rope_scaling=None if rotary.scaling is None else {"rope_type": config.rotary_type(), **scaling},
        sliding_window=window if is_mistral else None,
        tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        bos_token_id=config.token_id("bos_token_id"),
        eos_token_id=eos[0] if len(eos) == 1 else eos or None,
        pad_token_id=config.token_id("pad_token_id"),
        dtype=config.dtype(default="float32"),
    )
