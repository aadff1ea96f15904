"""Conversion of GGUF files to the layout of Hugging Face checkpoints.

`checkpoint_folder` writes config.json, the tokenizer and links to the GGUF files into a cache folder. This folder is
then loaded like any other checkpoint, with Hugging Face's tensor names. The gguf package dequantises weights row by
row.

Sources: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; for names of tensors and keys, the gguf package.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.config.environment import cache_folder
from moeserve.errors import CheckpointError, shown
from moeserve.models.checkpoint.cache_folders import written_once
from moeserve.models.checkpoint.shards import GGUF_PART, list_names, names_of_parts
from moeserve.models.checkpoint.tensors import CheckpointTensor
from moeserve.models.checkpoint.tokenizer_files import UNREAD_TOKENIZER
from moeserve.models.config_values import ConfigValues
from moeserve.models.gguf.architecture import File, Part, numbers_of_layers
from moeserve.models.gguf.architectures import ARCHITECTURES
from moeserve.models.gguf.file import (
    LONGROPE_FACTORS,
    ROPE_FACTORS,
    TOKEN_ID_KEYS,
    as_written,
    scaling_of_divisors,
)
from moeserve.models.gguf.layouts import resolved
from moeserve.models.gguf.names import GgufName
from moeserve.models.gguf.reader import Metadata, StoredArray, open_gguf
from moeserve.models.gguf.tensors import GgufTensor, HeadMapsTensor, SmallTensor
from moeserve.models.gguf.tokenizer import write_tokenizer
from moeserve.models.unsupported import dense_model, unknown_in_gguf

logger = logging.getLogger(__name__)

_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_VERSION = 6  # format version of the cache folders; increase it when their files change


def checkpoint_folder(path: Path) -> Path:
    """Return the cache folder that represents a GGUF file as a checkpoint. Write the folder on first use.

    Args:
        path: the file, or any of its parts (`model-00001-of-00003.gguf`). All parts must be in one folder.

    Raises:
        CheckpointError: the file or a part is missing or damaged, the architecture or tokenizer is not supported, or
            the cache cannot be written.
    """
    files = _parts_of(path)
    facts = [_VERSION, *(f"{file.resolve()} {(state := file.stat()).st_size} {state.st_mtime_ns}" for file in files)]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    part = GGUF_PART.fullmatch(path.name)
    folder = cache_folder() / "gguf" / f"{part['stem'] if part else path.stem}-{digest}"
    is_complete = (folder / "config.json").is_file
    return written_once(folder, is_complete, lambda partial: _write_companions(files, partial))


def tensors_of(folder: Path) -> dict[str, CheckpointTensor]:
    """Return the tensors of the GGUF files in a folder that `checkpoint_folder` returned, by Hugging Face name.

    Raises:
        CheckpointError: a file is damaged, or holds a tensor that the model does not have.
    """
    files = sorted(folder.glob("*.gguf"))
    metadata, _ = _open(files[0])
    architecture, values = _architecture_of(metadata, files[0])
    described = ARCHITECTURES[architecture]
    parts = described.parts(values)
    found: dict[str, CheckpointTensor] = {}
    apart: dict[str, dict[str, GgufTensor]] = {}
    for shard, stored in resolved(_tensors_in(files).values(), described.own_scales):
        name = GgufName.parse(stored.name)
        if name.kind in ("attn_k_b", "attn_v_b"):
            apart.setdefault(f"{name.prefix}self_attn.kv_b_proj.weight", {})[name.kind] = GgufTensor(shard, stored)
            continue
        for part in parts.get(name.kind, (Part(name.kind),)):
            translated = dataclasses.replace(name, kind=part.name).translated() or stored.name
            if translated in found:
                raise CheckpointError(f"{shard}: {stored.name!r} and another tensor are both the model's {translated}")
            if stored.name not in (ROPE_FACTORS, *LONGROPE_FACTORS.values()):
                found[translated] = _reshaped(GgufTensor(shard, stored, part.rows, part.columns), name.kind)
    for full_name, maps in apart.items():
        if full_name not in found and maps.keys() >= {"attn_k_b", "attn_v_b"}:  # some files have both forms
            found[full_name] = HeadMapsTensor(maps["attn_k_b"], maps["attn_v_b"])
    return found


def _reshaped(tensor: GgufTensor, kind: str) -> GgufTensor | SmallTensor:
    """Return a tensor in the model's shape, because files leave out or add dimensions of size 1."""
    size = math.prod(tensor.shape)
    if kind == "ffn_gate_inp_shexp":
        return SmallTensor(tensor, (1, size))
    if kind.startswith(("ssm_conv1d", "shortconv.conv")) and len(tensor.shape) > 1:
        num_taps = tensor.shape[-1]
        return SmallTensor(tensor, (size // num_taps, 1, num_taps))
    is_matrix = size > max(tensor.shape)  # Mamba-1 has several decays for each channel, and a projection of steps
    if kind in ("ssm_d", "ssm_norm") or (kind in ("ssm_a", "ssm_dt") and not is_matrix):
        return SmallTensor(tensor, (size,), is_decay=kind == "ssm_a")
    if kind == "ssm_a":
        return SmallTensor(tensor, tensor.shape, is_decay=True)
    return tensor


def bytes_of_types(folder: Path) -> Counter[str]:
    """Return the stored bytes of each GGUF type, in a folder that `checkpoint_folder` returned."""
    found: Counter[str] = Counter()
    for _, stored in _tensors_in(sorted(folder.glob("*.gguf"))).values():
        found[stored.kind.name] += stored.data.nbytes
    return found


def _parts_of(path: Path) -> list[Path]:
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    match = GGUF_PART.fullmatch(path.name)
    if match is None:
        return [path]
    parts = [path.with_name(name) for name in names_of_parts(match)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path} is one of {len(parts)} parts; {list_names(missing)} must be in the same folder")
    return parts


@functools.lru_cache(maxsize=64)
def _open_state(path: Path, num_bytes: int, modified_ns: int) -> tuple[Metadata, dict[str, StoredArray]]:
    return open_gguf(path)


def _open(path: Path) -> tuple[Metadata, dict[str, StoredArray]]:
    """Return a file's metadata and tensors. The header is read again only if the file has changed."""
    state = path.stat()
    return _open_state(path, state.st_size, state.st_mtime_ns)


def _write_companions(files: list[Path], folder: Path) -> None:
    metadata, _ = _open(files[0])
    num_parts = metadata.get("split.count", 0)
    if num_parts not in (0, 1, len(files)):
        raise CheckpointError(
            f"{files[0]} is one of {num_parts} parts; give them their names, such as model-00001-of-00003.gguf"
        )
    config = _config_of(metadata, _tensors_in(files), files[0])
    for file in files:
        (folder / file.name).symlink_to(file.resolve())
    try:
        write_tokenizer(files[0], metadata.under("tokenizer."), folder, max_length=config["max_position_embeddings"])
    except CheckpointError as error:  # an error only if the setting `tokenizer` names no other tokenizer
        (folder / UNREAD_TOKENIZER).write_text(str(error), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tensors_in(files: list[Path]) -> dict[str, tuple[Path, StoredArray]]:
    """Return the tensors of all parts of a model by name, each with its file.

    Raises:
        CheckpointError: two parts have the same tensor.
    """
    found: dict[str, tuple[Path, StoredArray]] = {}
    for file in files:
        _, tensors = _open(file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise CheckpointError(f"{file} and other parts hold the same tensors: {list_names(twice)}")
        found |= {name: (file, stored) for name, stored in tensors.items()}
    return found


def _architecture_of(metadata: Metadata, path: Path) -> tuple[str, ConfigValues]:
    """Return the name of the architecture, and the metadata under its prefix, keyed without this prefix."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ConfigValues(path, metadata.chosen("general.architecture")).wrong(
            "general.architecture", "must be a text"
        )
    prefix = f"{name}."
    values = ConfigValues(path, dict(metadata.under(prefix)), prefix)
    if not values.integer("expert_count", 0, low=0):
        refusal = None if name == "llama" else f"general.architecture={shown(name)} is not llama"
        raise dense_model(path, name, path, refusal)
    if name not in ARCHITECTURES:
        raise unknown_in_gguf(path, name, ARCHITECTURES)
    return name, values


def _config_of(metadata: Metadata, tensors: Mapping[str, tuple[Path, StoredArray]], path: Path) -> dict[str, Any]:
    """Return the config.json that describes the model of a GGUF file."""
    name, values = _architecture_of(metadata, path)
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path} holds no token embedding (token_embd.weight)")
    vocab_size = tensors["token_embd.weight"][1].shape[0]
    num_heads = max(numbers_of_layers(values, "attention.head_count", 0))
    if num_heads < 1:
        raise values.wrong("attention.head_count", "must be at least 1")
    hidden_size = values.integer("embedding_length")
    head_dim = values.integer("attention.key_length", hidden_size // num_heads)
    of_tokenizer = ConfigValues(path, metadata.chosen(*TOKEN_ID_KEYS.values()))
    ids = {kind: of_tokenizer.token_id(key) for kind, key in TOKEN_ID_KEYS.items()}
    outside = [kind for kind, token_id in ids.items() if token_id is not None and token_id >= vocab_size]
    for kind in outside:  # some files have ids of tokens that were never added
        logger.warning("%s: %s=%d is outside the vocabulary and is not used", path, TOKEN_ID_KEYS[kind], ids[kind])
        ids[kind] = None
    ends = list(dict.fromkeys(token_id for kind in ("eos", "eot", "eom") if (token_id := ids[kind]) is not None))
    theta = as_written(values.number("rope.freq_base", 10_000.0))
    num_draft_layers = values.integer("nextn_predict_layers", 0, low=0)
    parsed = [GgufName.parse(each) for each in tensors]
    shapes = {each: stored.shape for each, (_, stored) in tensors.items()}
    kinds = frozenset(each.kind + each.end for each in parsed)
    factors = {length: tensors[name][1] for length, name in LONGROPE_FACTORS.items() if name in tensors}
    config = {
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf", "expert_dtype": _dtype_of_experts(name, tensors)},
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": values.integer("block_count", high=2**12) - num_draft_layers,
        "num_nextn_predict_layers": num_draft_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(numbers_of_layers(values, "attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "attention_bias": "attn_q.bias" in kinds,
        "use_qk_norm": "attn_q_norm.weight" in kinds,
        "partial_rotary_factor": values.integer("rope.dimension_count", head_dim, low=0) / head_dim,
        "num_experts_per_tok": values.integer("expert_used_count"),
        "max_position_embeddings": values.integer("context_length"),
        "rms_norm_eps": as_written(values.number(values.key_of(*_EPSILONS))),
        "rope_theta": theta,
        "rope_scaling": _longrope(values, factors) if factors else _rope_scaling(values),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": ids["bos"],
        "eos_token_id": ends or None,
        "pad_token_id": ids["padding"],
    }
    if ROPE_FACTORS in tensors:
        divisors = tensors[ROPE_FACTORS][1].read()
        config["rope_scaling"] = scaling_of_divisors(path, divisors, head_dim, theta)
    return config | ARCHITECTURES[name].config(File(values, shapes, kinds, config))


def _dtype_of_experts(architecture: str, tensors: Mapping[str, tuple[Path, StoredArray]]) -> str | None:
    """Return "fp4" if all experts are in MXFP4, else None. "fp4" is the value in DeepSeek-V4's config.json."""
    arrays = resolved(tensors.values(), ARCHITECTURES[architecture].own_scales)
    experts = [array for _, array in arrays if array.name.endswith("_exps.weight")]
    is_mxfp4 = [array.kind.name == "MXFP4" and array.scale is None for array in experts]
    return "fp4" if experts and all(is_mxfp4) else None


def _longrope(values: ConfigValues, factors: dict[str, StoredArray]) -> dict[str, Any]:
    mscale = as_written(values.number("rope.scaling.attn_factor", 1.0))
    lists = {length: [as_written(each) for each in array.read().tolist()] for length, array in factors.items()}
    return {
        "rope_type": "longrope",
        **{f"{length}_factor": each for length, each in lists.items()},
        **{f"{length}_mscale": mscale for length in lists},
        "original_max_position_embeddings": values.integer("rope.scaling.original_context_length"),
    }


def _rope_scaling(values: ConfigValues) -> dict[str, Any] | None:
    values.require("rope.scale_linear", 1.0)  # the key that files of 2023 use
    values.require("rope.scaling.attn_factor", 1.0)
    kind = values.values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    values.require("rope.scaling.type", "none", "linear", "yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": as_written(values.number("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = values.integer("rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            if (beta := values.optional_number(f"rope.scaling.yarn_{name}")) is not None:
                scaling[name] = as_written(beta)
        multiplier = values.optional_number("rope.scaling.yarn_log_multiplier")
        if multiplier is not None:  # the multiplier is a tenth of DeepSeek's mscale_all_dim
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * as_written(multiplier), 6))
    return scaling
