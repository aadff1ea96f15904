"""Finds tensors of a checkpoint that the model does not read, but that could change its output.

A name alone is no proof, so values are compared where they matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from moeserve.models.checkpoint.tensors import CheckpointTensor, PlainTensor, ReadRows

# The KV cache has scales of its own, and activations are not quantised.
SCALES = re.compile(
    r".*(\.(kv|k|v|q)_(scale|zero_point)|[._](output|activation|input)(_global)?_(scale(_ub)?|zero_point))"
)
VALUE_HEAD = re.compile(r"(model\.)?(v_head|value_head)(\.summary)?\.(weight|bias)")  # for reinforcement learning
FREQUENCIES = re.compile(r".*\brotary_emb\.(original_)?inv_freq")
FREQUENCY_TOLERANCE = 2**-7  # relative error of bfloat16, in which some checkpoints store frequencies


def harmful(
    names: Iterable[str],
    tensors: dict[str, CheckpointTensor],
    frequencies: Sequence[Tensor],
    read_rows: ReadRows,
) -> list[str]:
    """Return the names of unused tensors that could change the output.

    Args:
        frequencies: frequencies of the model's rotary embeddings, [F] each.
    """
    return [name for name in names if not _is_harmless(name, tensors[name], frequencies, read_rows)]


def _is_harmless(name: str, tensor: CheckpointTensor, frequencies: Sequence[Tensor], read_rows: ReadRows) -> bool:
    if not isinstance(tensor, PlainTensor):
        return False
    if 0 in tensor.shape:  # from networks of width 0
        return True
    if SCALES.fullmatch(name):
        return True
    if VALUE_HEAD.fullmatch(name):  # a head with one value per token
        return tensor.shape[:1] in ((), (1,))

    def values() -> Tensor:
        return read_rows(tensor.stored, 0, tensor.shape[0] if tensor.shape else 1)

    if name.endswith(".bias"):  # AutoGPTQ writes biases of zero for layers that have none
        return not bool(values().any())
    if FREQUENCIES.fullmatch(name):
        stored_F = values().float()
        return any(
            stored_F.shape == each_F.shape
            and torch.allclose(stored_F, each_F.to(stored_F.device), rtol=FREQUENCY_TOLERANCE, atol=0.0)
            for each_F in frequencies
        )
    return False
