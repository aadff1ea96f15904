"""Dense Llama-style checkpoints as input of `moeserve upcycle`, and a reader for the Hugging Face layout."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from moeserve.config.settings import DtypeName
from moeserve.errors import CheckpointError
from moeserve.models.checkpoint.shards import list_names, open_shard, read_headers
from moeserve.models.checkpoint.tied_head import EMBEDDING, HEAD, holds_same
from moeserve.models.config_values import ConfigValues

DENSE_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
ROTARY_KEYS = ("rope_theta", "partial_rotary_factor", "type")  # rotary settings that do not belong to a scaling
COMPANION_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "*.model",
)
# Defaults of transformers for keys that are missing in config.json.
DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_MISTRAL_WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """The config of a dense checkpoint, with transformers' names."""

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
    rope_scaling: dict[str, Any] | None  # rope_type and its parameters; None: no scaling
    sliding_window: int | None
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_id: list[int] | None
    pad_token_id: int | None
    dtype: DtypeName

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor, in the order of the forward pass."""
        width, ffn_width = self.hidden_size, self.intermediate_size
        query_width, key_width = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        yield EMBEDDING, (self.vocab_size, width)
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
            yield HEAD, (self.vocab_size, width)


class DenseCheckpoint(Protocol):
    """A dense model: its config, and its tensors one at a time."""

    path: Path
    config: DenseSpec
    shapes: dict[str, tuple[int, ...]]  # shape of every stored tensor, by Hugging Face name

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, either a copy or mapped from the file."""
        ...

    def write_companions(self, folder: Path) -> None:
        """Write the tokenizer and generation_config.json, if the checkpoint has them, into `folder`."""
        ...


def check_dense(dense: DenseCheckpoint) -> None:
    """Raise CheckpointError if the stored tensors do not match the config."""
    expected, shapes = dict(dense.config.tensors()), dense.shapes
    missing = sorted(expected.keys() - shapes.keys())
    if missing:
        raise CheckpointError(f"{dense.path} lacks tensors that its config needs: {list_names(missing)}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{dense.path}: tensor {name!r} has shape {list(shapes[name])}, its config needs {list(shape)}"
            )
    # Ignore rotary frequencies, which are computed, and a head that equals the embedding.
    extra = sorted(name for name in shapes.keys() - expected if "rotary_emb" not in name and name != HEAD)
    if extra:
        raise CheckpointError(
            f"{dense.path} holds tensors that a Mixtral model does not have, such as biases: {list_names(extra)}; only "
            "plain Llama and Mistral models can be upcycled"
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
        self._stored = stored = read_headers(folder)
        if HEAD in stored and EMBEDDING in stored and not holds_same(stored[HEAD], stored[EMBEDDING]):
            self.config = replace(self.config, tie_word_embeddings=False)
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}

    def tensor(self, name: str) -> Tensor:
        # Reopen the shard for each tensor, so that mapped pages already read do not accumulate in memory.
        with open_shard(self._stored[name].shard) as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor

    def write_companions(self, folder: Path) -> None:
        for pattern in COMPANION_FILES:
            for path in self.path.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)


def upcycle_refusal(config: ConfigValues) -> str | None:
    """Return the reason why a model cannot be upcycled, judged by its config.json; None if it can be."""
    try:
        _read_config(config)
    except CheckpointError as error:
        return str(error).removeprefix(f"{config.path}: ")
    return None


def _read_config(config: ConfigValues) -> DenseSpec:
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
    config.refuse("quantization_config")

    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    head_dim = config.optional_integer("head_dim") or hidden_size // num_heads
    rotary = config.rotary(head_dim, default_fraction=1.0, default_theta=DEFAULT_ROPE_THETA)
    settings = config.rotary_settings()
    if rotary.dim != head_dim:
        raise settings.wrong("partial_rotary_factor", "is not supported: a Mixtral model rotates whole heads")
    if settings.values["rope_type"] == "dynamic":
        raise settings.wrong(
            "rope_type", "is not supported: other engines would scale contexts that are not served here"
        )
    scaling = {name: value for name, value in settings.values.items() if name not in ROTARY_KEYS}
    # A value of null means no window; a missing key means the default window.
    window = config.optional_integer("sliding_window") if "sliding_window" in config.values else DEFAULT_MISTRAL_WINDOW
    return DenseSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_hidden_layers=config.integer("num_hidden_layers", high=2**12),
        num_attention_heads=num_heads,
        num_key_value_heads=config.integer("num_key_value_heads", default=None if is_mistral else num_heads),
        head_dim=head_dim,
        max_position_embeddings=config.integer("max_position_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps"),
        rope_theta=rotary.theta,
        rope_scaling=None if rotary.scaling is None else scaling,
        sliding_window=window if is_mistral else None,
        tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        bos_token_id=config.token_id("bos_token_id"),
        eos_token_id=config.token_ids("eos_token_id") or None,
        pad_token_id=config.token_id("pad_token_id"),
        dtype=config.dtype(default="float32"),
    )
