"""Determines whether a checkpoint stores all experts in MXFP4. Only then can experts be kept in this format."""

from __future__ import annotations

import re
from pathlib import Path

from moeserve.models.checkpoint.float4_tensors import Mxfp4Matrices
from moeserve.models.checkpoint.names import Translation
from moeserve.models.checkpoint.shards import has_shards, open_checkpoint
from moeserve.models.checkpoint.weight_format import WeightFormat
from moeserve.models.family import Family

_OF_EXPERTS = re.compile(r"\.mlp\.experts\.(?!.*bias$)")
_LAYOUTS = re.compile(r".*\.mlp\.experts\.(\d+\.)?(gate|up|down)_proj\.weight")  # layouts whose codes can be kept


def are_in_mxfp4(folder: Path, weight_format: WeightFormat, family: Family, num_layers: int) -> bool:
    """Return True if all experts are stored in MXFP4, one matrix per projection, or if the folder has no weights.

    Raises:
        CheckpointError: a shard is missing or damaged.
    """
    if not has_shards(folder):
        return True
    translation = Translation(family, num_layers)
    stored = open_checkpoint(folder, weight_format).tensors
    experts = {
        name: tensor for old, tensor in stored.items() if (name := translation(old)) and _OF_EXPERTS.search(name)
    }
    return bool(experts) and all(
        _LAYOUTS.fullmatch(name) and isinstance(tensor, Mxfp4Matrices) and tensor.is_mxfp4
        for name, tensor in experts.items()
    )
