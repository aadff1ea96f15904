"""Conversion of a dense Llama-style checkpoint to an equivalent Mixtral checkpoint.

There are two exact methods. Replicate: every expert is a copy of the feed-forward network, and the router is random.
The weights of the chosen experts add up to one, so the weighted sum is the dense output, whichever experts are chosen.
Split: each of E experts holds a share of the neurons, all experts are chosen with weight 1/E, and the down projection
is multiplied by E. Omitting an expert, or weighting it differently, changes the output, so such a model tests routing.

Source: "Sparse Upcycling" (arXiv 2212.05055).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from moeserve.config.settings import DtypeName
from moeserve.errors import CheckpointError, SettingsError
from moeserve.models.checkpoint.model_files import find_model
from moeserve.models.checkpoint.shard_writer import (
    MAX_SHARD_BYTES,
    all_or_nothing,
    check_unused,
    write_json,
    write_shards,
)
from moeserve.models.dense import DenseCheckpoint, DenseFolder, DenseSpec, check_dense
from moeserve.models.gguf.file import GgufFile
from moeserve.progress import progress_bar

UpcycleMode = Literal["replicate", "split"]

_DEFAULT_TOP_K = 2
_EXPERT_WEIGHT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # Mixtral's names of these weights


def upcycle(
    dense: str | Path,
    out: Path,
    *,
    num_experts: int = 4,
    top_k: int | None = None,
    mode: UpcycleMode = "replicate",
    dtype: Literal["auto"] | DtypeName = "auto",
    seed: int = 0,
    revision: str | None = None,
    download_dir: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    show_progress: bool = True,
) -> None:
    """Write a Mixtral checkpoint that gives the same logits as a dense one.

    The folder is written under a temporary name and then renamed to `out`, so `out` is never incomplete.

    Args:
        dense: a GGUF file of architecture llama, or a folder with a Llama or Mistral checkpoint in safetensors, or the
            name of either in a hub; see `find_model`.
        out: the folder to write; it must be empty or not exist.
        num_experts: experts per layer.
        top_k: experts per token; None: all in mode "split", otherwise 2 (1 if there is only one expert).
        mode: the method, "replicate" or "split", see the module's docstring.
        dtype: dtype of the written weights; "auto": the dtype of the dense checkpoint, or float32 for a GGUF file.
        seed: seed of the random routers.
        revision, download_dir: as for `find_model`.
        max_shard_bytes: maximum bytes of the tensors in a file; a larger tensor gets a file of its own.

    Raises:
        SettingsError: an argument is out of range or contradicts another.
        CheckpointError: the dense checkpoint is damaged or cannot be converted, or `out` cannot be written.
    """
    top_k = _checked_top_k(num_experts, top_k, mode)
    out = Path(os.path.abspath(out))
    check_unused(out)
    files = find_model(dense, revision=revision, download_dir=download_dir)
    if files.hub_model is not None:  # refuse a model before its weights are fetched
        check_dense(_open(files.describe(with_headers=True)))
    source = _open(files.fetch(shows_progress=show_progress))
    check_dense(source)
    dtype_name = source.config.dtype if dtype == "auto" else dtype
    recipe = _Recipe(num_experts, top_k, mode, getattr(torch, dtype_name), seed)
    try:
        with all_or_nothing(out) as folder:
            source.write_companions(folder)  # first, so that an error is raised before the long conversion
            with progress_bar("upcycle", total=None, is_shown=show_progress) as progress:
                write_shards(folder, _mixtral_tensors(source, recipe), progress, max_shard_bytes)
            write_json(folder / "config.json", _mixtral_config(source.config, recipe, dtype_name))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"writing {out} failed: {error}") from error


@dataclass(frozen=True)
class _Recipe:
    num_experts: int
    top_k: int
    mode: UpcycleMode
    dtype: torch.dtype
    seed: int

    def expert_width(self, config: DenseSpec) -> int:
        """Return the number of neurons per expert. The last experts are padded with zeros if necessary."""
        width = config.intermediate_size
        return width if self.mode == "replicate" else -(-width // self.num_experts)


def _checked_top_k(num_experts: int, top_k: int | None, mode: str) -> int:
    if num_experts < 1:
        raise SettingsError(f"num_experts={num_experts} must be at least 1")
    if top_k is None:
        return num_experts if mode == "split" else min(_DEFAULT_TOP_K, num_experts)
    if not 1 <= top_k <= num_experts:
        raise SettingsError(f"top_k={top_k} must be from 1 to num_experts={num_experts}")
    if mode == "split" and top_k != num_experts:
        raise SettingsError(
            f"top_k={top_k} contradicts mode='split': every token needs all {num_experts} experts; "
            "leave top_k out, or use mode='replicate'"
        )
    return top_k


def _open(dense: Path) -> DenseCheckpoint:
    if dense.is_file():
        return GgufFile(dense)
    if not dense.is_dir():
        raise CheckpointError(
            f"{dense} does not exist; give a GGUF file, a folder in Hugging Face layout, or OWNER/NAME in a hub"
        )
    return DenseFolder(dense)


def _mixtral_tensors(dense: DenseCheckpoint, recipe: _Recipe) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the Mixtral checkpoint with its name. Tensors do not share memory."""
    generator = torch.Generator().manual_seed(recipe.seed)
    expert_width = recipe.expert_width(dense.config)
    for name, _ in dense.config.tensors():
        weight = dense.tensor(name)
        layer, is_feed_forward, projection = name.removesuffix(".weight").partition(".mlp.")
        if not is_feed_forward:
            yield name, _converted(weight, recipe.dtype, name)
            continue
        if projection == "gate_proj":  # the router, once per layer
            yield f"{layer}.block_sparse_moe.gate.weight", _router(dense.config.hidden_size, recipe, generator)
        for expert, part in enumerate(_expert_parts(weight, projection, recipe, expert_width)):
            expert_name = f"{layer}.block_sparse_moe.experts.{expert}.{_EXPERT_WEIGHT[projection]}.weight"
            yield expert_name, _converted(part, recipe.dtype, name)


def _router(hidden_size: int, recipe: _Recipe, generator: torch.Generator) -> Tensor:
    if recipe.mode == "split":
        return torch.zeros(recipe.num_experts, hidden_size, dtype=recipe.dtype)
    # Router inputs are normalised, so weights of this size give logits of standard deviation 1, and all experts are
    # used.
    router = torch.randn(recipe.num_experts, hidden_size, generator=generator) / math.sqrt(hidden_size)
    return router.to(recipe.dtype)


def _expert_parts(weight: Tensor, projection: str, recipe: _Recipe, expert_width: int) -> tuple[Tensor, ...]:
    """Return each expert's part of one feed-forward matrix."""
    if recipe.mode == "replicate":
        return (weight,) * recipe.num_experts
    neuron_dim = 1 if projection == "down_proj" else 0
    num_zeros = expert_width * recipe.num_experts - weight.shape[neuron_dim]
    padded = torch.nn.functional.pad(weight, (0, num_zeros) if neuron_dim == 1 else (0, 0, 0, num_zeros))
    if projection == "down_proj":
        padded = padded.float() * recipe.num_experts
    return torch.split(padded, expert_width, dim=neuron_dim)


def _converted(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    converted: Tensor = weight.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if dtype == torch.float16 and not bool(converted.isfinite().all()):
        raise CheckpointError(f"tensor {name!r} holds values beyond the range of float16; choose bfloat16 or float32")
    return converted


def _mixtral_config(config: DenseSpec, recipe: _Recipe, dtype_name: DtypeName) -> dict[str, Any]:
    """Return the values of config.json. All versions of transformers read these keys of rotary settings and dtype."""
    values = dataclasses.asdict(config)
    del values["dtype"]
    return values | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": recipe.expert_width(config),
        "num_local_experts": recipe.num_experts,
        "num_experts_per_tok": recipe.top_k,
        "hidden_act": "silu",
        "torch_dtype": dtype_name,
    }
