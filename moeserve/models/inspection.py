"""The report of `moeserve inspect` on a checkpoint's config.json and, if it has shards, their headers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeserve.config.resolve_parallel import layers_of_stages
from moeserve.config.settings import CacheDtypeName, DtypeName, QuantizationName
from moeserve.distributed.groups import unconnected
from moeserve.distributed.mesh import Mesh
from moeserve.errors import CheckpointError
from moeserve.kv.layer_cache import CacheNeeds
from moeserve.machine import free_memory, shown_bytes
from moeserve.models.checkpoint.names import translated
from moeserve.models.checkpoint.shards import Checkpoint, open_checkpoint, read_headers
from moeserve.models.checkpoint.weight_format import MXFP4_OF_COMPRESSED_TENSORS, WeightFormat
from moeserve.models.expert_store.budget import AUTO_SHARE, outlook
from moeserve.models.experts_beside_gpu import host_outlook
from moeserve.models.registry import Description, describe, folder_of
from moeserve.models.summary import Part, quantised_bytes, summarize

_QUANTIZATIONS: tuple[QuantizationName, ...] = ("int8", "int4")  # formats to which loading can quantise any weights


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The size of a checkpoint's shards."""

    num_shards: int
    num_bytes: int
    bytes_of_dtype: dict[str, int]  # by safetensors' name of the dtype, such as BF16 or F8_E4M3


@dataclass(frozen=True, kw_only=True)
class StageSize:
    """The size of one pipeline stage."""

    num_layers: int
    weight_bytes: int
    cache: CacheNeeds


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The facts of a checkpoint that are known without loading it. Except in `stored`, sizes are bytes in memory."""

    model: str
    architecture: str
    family: str
    hidden_size: int
    num_layers: int
    sparse_layers: tuple[int, ...]  # numbers of the layers with experts
    num_skipped_layers: int  # multi-token prediction layers
    num_experts: int  # experts of each sparse layer
    num_experts_per_token: int
    shared_expert_width: int  # 0: no shared experts
    num_parameters: int
    num_active_parameters: int
    max_position_embeddings: int
    cache: CacheNeeds
    dtype: DtypeName
    parts: tuple[Part, ...]
    weight_bytes: int
    quantised_bytes: dict[QuantizationName, int]  # memory of the weights with this setting of `quantization`
    encodings: tuple[str, ...]  # descriptions of the encodings of quantised weights
    is_here: bool  # False: the weights have yet to be fetched from a hub
    stored: Stored | None  # None: the folder holds no weights, or they are damaged
    stored_problem: str | None  # why the shards cannot be loaded; None if no error was found
    free_bytes: int  # free memory of this machine
    stages: tuple[StageSize, ...]  # empty if there is only one stage


def inspect(
    folder: Path,
    dtype: DtypeName | None,
    *,
    kv_cache_dtype: CacheDtypeName = "auto",
    num_stages: int = 1,
    pipeline_layers: Sequence[int] | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
) -> Inspection:
    """Return the facts of a checkpoint, from config.json and the headers of its shards.

    Args:
        dtype: dtype in which weights would be loaded; None: the checkpoint's dtype.
        num_stages: number of pipeline stages, of one rank each.
        pipeline_layers: number of layers of each stage; None: an even division.
        hf_overrides: changes to config.json.

    Raises:
        CheckpointError: the config is wrong or not supported.
        SettingsError: the layers cannot be divided into these stages, or `kv_cache_dtype` does not support this model.
    """
    description = describe(folder, hf_overrides=hf_overrides)
    stored, problem = _stored(folder_of(folder), description.weight_format)
    dtype = dtype or description.dtype
    checkpoint = None if stored is None else kept_checkpoint(folder, description, dtype)
    summary = summarize(description, dtype, kv_cache_dtype=kv_cache_dtype, checkpoint=checkpoint)
    first_layers = description.model.first_layers
    stage_layers = layers_of_stages(summary.num_layers, num_stages, pipeline_layers, first_layers)
    moe = description.model.first_moe
    return Inspection(
        model=str(folder),
        architecture=description.family.architecture,
        family=description.family.name,
        hidden_size=description.model.hidden_size,
        num_layers=summary.num_layers,
        sparse_layers=description.model.sparse_layers,
        num_skipped_layers=description.model.num_skipped_layers,
        num_experts=moe.router.num_experts if moe else 0,
        num_experts_per_token=moe.router.top_k if moe else 0,
        shared_expert_width=moe.shared.width if moe and moe.shared else 0,
        num_parameters=summary.num_parameters,
        num_active_parameters=summary.num_active,
        max_position_embeddings=description.model.max_position_embeddings,
        cache=summary.cache,
        dtype=summary.dtype,
        parts=summary.parts,
        weight_bytes=summary.weight_bytes,
        quantised_bytes={name: quantised_bytes(description, dtype, name) for name in _QUANTIZATIONS},
        encodings=description.weight_format.words,
        is_here=True,
        stored=stored,
        stored_problem=problem,
        free_bytes=free_memory(),
        stages=_stages(description, dtype, kv_cache_dtype, stage_layers, checkpoint) if num_stages > 1 else (),
    )


def kept_checkpoint(folder: Path, description: Description, dtype: DtypeName) -> Checkpoint | None:
    """Return the checkpoint if a CPU would keep its weights in their stored form, else None.

    Raises:
        CheckpointError: shards are missing or damaged.
    """
    if not description.keeps_stored(dtype):
        return None
    checkpoint = open_checkpoint(folder_of(folder), description.weight_format)
    return translated(checkpoint, description.family, description.model.num_decoder_layers)


def as_text(found: Inspection) -> str:
    """Return the report as text."""
    num_dense = found.num_layers - len(found.sparse_layers)
    layers = f"{found.num_layers}" + (f", {num_dense} of them dense" if num_dense else ", all with experts")
    if found.num_skipped_layers:
        layers += "; layers for multi-token prediction are not loaded"
    shared = f"; shared experts of width {found.shared_expert_width}" if found.shared_expert_width else ""
    context, bytes_per_token = found.max_position_embeddings, found.cache.bytes_per_token
    windows = "".join(
        f", of which {shown_bytes(num_bytes // found.cache.block_size)} are kept only for the last "
        f"{rule.num_kept(context)} tokens"
        for rule, num_bytes in zip(found.cache.rules.tables[1:], found.cache.block_bytes[1:], strict=True)
    )
    quantised = "".join(
        f", {shown_bytes(size)} with --quantization {name}" for name, size in found.quantised_bytes.items()
    )
    facts = {
        "family": f"{found.family} ({found.architecture})",
        "layers": layers,
        "experts": f"{found.num_experts} in a layer, {found.num_experts_per_token} per token{shared}",
        "parameters": f"{_count(found.num_parameters)}, {_count(found.num_active_parameters)} active per token "
        "(counting one row of the embedding)",
        "KV cache": f"{shown_bytes(bytes_per_token)} per token ({bytes_per_token} bytes){windows}, "
        f"{shown_bytes(found.cache.bytes_of_tokens(context))} for the longest context of {context} tokens",
        "on disk" if found.is_here else "in the hub": _stored_text(found),
        "in memory": f"{shown_bytes(found.weight_bytes)} as {found.dtype}{quantised}; this machine has "
        f"{shown_bytes(found.free_bytes)} free",
    }
    if (from_disk := outlook(found.parts, int(found.free_bytes * (1 - AUTO_SHARE)))) is not None:
        facts["from disk"] = from_disk
    if (beside := host_outlook(found.parts, found.sparse_layers)) is not None:
        facts["with a GPU"] = beside
    if found.cache.row_bytes:
        facts["states"] = f"{shown_bytes(found.cache.row_bytes)} for each running request and each saved state"
    lines = [f"{name:<12}{text}" for name, text in facts.items()]
    lines += ["", f"{'part':<16}{'dtype':<10}{'parameters':>12}{'per token':>12}{'memory':>12}"]
    total = Part("total", "float32", found.num_parameters, found.num_active_parameters, found.weight_bytes)
    for part in (*found.parts, total):
        dtype = "" if part is total else part.dtype
        counts = f"{_count(part.num_parameters):>12}{_count(part.num_active):>12}{shown_bytes(part.num_bytes):>12}"
        lines.append(f"{part.name:<16}{dtype:<10}{counts}")
    if found.stages:
        lines += ["", f"{'stage':<16}{'layers':>10}{'memory':>12}{'KV cache per token':>22}"]
    for number, stage in enumerate(found.stages):
        sizes = f"{shown_bytes(stage.weight_bytes):>12}{shown_bytes(stage.cache.bytes_per_token):>22}"
        lines.append(f"{number:<16}{stage.num_layers:>10}{sizes}")
    return "\n".join(lines)


def _stages(
    description: Description,
    dtype: DtypeName,
    kv_cache_dtype: CacheDtypeName,
    stage_layers: Sequence[int],
    checkpoint: Checkpoint | None,
) -> tuple[StageSize, ...]:
    mesh = Mesh(tp=1, dp=1, pp=len(stage_layers))
    ends = itertools.accumulate(stage_layers, initial=0)
    sizes = []
    for rank, (first, end) in enumerate(itertools.pairwise(ends)):
        groups, stage = unconnected(mesh, rank), range(first, end)
        summary = summarize(description, dtype, groups, None, stage, kv_cache_dtype, checkpoint)
        sizes.append(
            StageSize(
                num_layers=end - first,
                weight_bytes=summary.weight_bytes,
                cache=summary.cache,
            )
        )
    return tuple(sizes)


def _stored(folder: Path, weight_format: WeightFormat) -> tuple[Stored | None, str | None]:
    """Return the size of the shards; or None and why they cannot be loaded; or None twice if there are no shards."""
    bytes_of_dtype: Counter[str] = Counter()
    if weight_format.is_gguf:
        from moeserve.models.gguf.checkpoint import bytes_of_types  # needs the gguf package

        shards = set(folder.glob("*.gguf"))
        bytes_of_dtype += bytes_of_types(folder)
    elif any(folder.glob("*.safetensors*")):
        try:
            tensors = read_headers(folder).values()
        except CheckpointError as error:
            return None, str(error)
        for tensor in tensors:
            bytes_of_dtype[tensor.dtype] += tensor.num_bytes
        shards = {tensor.shard for tensor in tensors}
    else:
        return None, None
    stored = Stored(
        num_shards=len(shards),
        num_bytes=sum(shard.stat().st_size for shard in shards),
        bytes_of_dtype=dict(bytes_of_dtype.most_common()),
    )
    return stored, None


def _stored_text(found: Inspection) -> str:
    encoding = ", ".join(_encoding_text(words, found.parts) for words in found.encodings) or "not quantised"
    if found.stored_problem is not None:
        return f"cannot be loaded: {found.stored_problem}; {encoding}"
    if found.stored is None:
        return f"no weights in this {'folder' if found.is_here else 'repository'}; {encoding}"
    dtypes = ", ".join(f"{name} {shown_bytes(size)}" for name, size in found.stored.bytes_of_dtype.items())
    size = f"{shown_bytes(found.stored.num_bytes)} in {_plural(found.stored.num_shards, 'shard')} ({dtypes})"
    return f"{size}{'' if found.is_here else ', not all fetched yet'}; {encoding}"


def _encoding_text(words: str, parts: Sequence[Part]) -> str:
    """Return the description of an encoding, with the form in which such weights are loaded."""
    keeps = ", or kept with quantization='int4'" if "int4" in words else ""
    if words == "GGUF" and (kept := dict.fromkeys(part.dtype for part in parts if part.is_stored)):
        return f"{words}, {' and '.join(kept)} kept as stored, others dequantised when loaded"
    if words in ("GGUF", MXFP4_OF_COMPRESSED_TENSORS) and any(part.dtype == "mxfp4" for part in parts):
        return f"{words}, experts kept in mxfp4, others dequantised when loaded"
    if any(part.dtype in words.split() for part in parts):
        return f"{words}, kept in memory"
    return f"{words}, dequantised when loaded{keeps}"


def _plural(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _count(number: int) -> str:
    """Return a count as text, such as "12.30 B", "45.60 M" or "789.00 K"."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
