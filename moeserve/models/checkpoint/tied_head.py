"""Determines whether the output head is the embedding, by the stored weights rather than the config."""

from __future__ import annotations

from pathlib import Path

import torch

from moeserve.models.checkpoint.names import Translation
from moeserve.models.checkpoint.shards import has_shards, open_checkpoint, open_shard
from moeserve.models.checkpoint.tensors import PlainTensor, StoredTensor
from moeserve.models.checkpoint.weight_format import WeightFormat
from moeserve.models.family import Family

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROWS_AT_ONCE = 4096


def stored_head_is_tied(folder: Path, weight_format: WeightFormat, family: Family) -> bool | None:
    """Return True if a checkpoint stores no head, or a head equal to the embedding; None if it stores no weights.

    Some configs say that the head is the embedding although another head is stored, because configs of multimodal
    models write the default of their own flag.

    Raises:
        CheckpointError: a shard is missing or damaged.
    """
    if weight_format.is_gguf or not has_shards(folder):
        return None
    translation, stored = Translation(family, 0), open_checkpoint(folder, weight_format).tensors
    tensors = {translation(name): tensor for name, tensor in stored.items()}
    head, embedding = (tensors.get(name) for name in (HEAD, EMBEDDING))
    if head is None:
        return True
    if not isinstance(head, PlainTensor) or not isinstance(embedding, PlainTensor):
        return False
    return holds_same(head.stored, embedding.stored)


def holds_same(first: StoredTensor, second: StoredTensor) -> bool:
    """Return True if two stored tensors have the same shape and values."""
    if first.shape != second.shape:
        return False
    with open_shard(first.shard) as shard, open_shard(second.shard) as other_shard:
        tensor, other = shard.get_slice(first.name), other_shard.get_slice(second.name)
        pieces = (slice(start, start + ROWS_AT_ONCE) for start in range(0, first.shape[0], ROWS_AT_ONCE))
        return all(torch.equal(tensor[rows], other[rows]) for rows in pieces)
