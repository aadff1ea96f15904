"""Less common layouts of GGUF files: scales in separate tensors, and gate and up projections in one tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from moeserve.errors import CheckpointError
from moeserve.models.gguf.reader import StoredArray

_GATE_UP = ".ffn_gate_up_exps."
_SCALE = ".scale"  # in files with NVFP4: one number for a matrix, or one for each expert
_UNUSED = ".input_scale"  # for quantised activations, which moeserve does not have


def resolved(
    stored: Iterable[tuple[Path, StoredArray]], own_scales: tuple[str, ...] = ()
) -> list[tuple[Path, StoredArray]]:
    """Return tensors with their scales applied, and with gate and up projections as separate tensors.

    Args:
        own_scales: kinds of tensors whose scales are not applied, because they are tensors of the model.

    Raises:
        CheckpointError: a scale does not fit its tensor, or gate and up projections have different numbers of rows.
    """
    by_name = {array.name: (path, array) for path, array in stored}
    found: list[tuple[Path, StoredArray]] = []
    for name, (path, array) in by_name.items():
        if name.endswith(tuple(f".{kind}{end}" for kind in own_scales for end in (_SCALE, ".weight"))):
            found.append((path, array))
            continue
        if name.endswith(_UNUSED) or (name.endswith(_SCALE) and _weight_of(name) in by_name):
            continue
        if (of_scale := by_name.get(name.removesuffix(".weight") + _SCALE)) is not None and name.endswith(".weight"):
            array = _scaled(array, of_scale[1])
        if _GATE_UP in name:
            found += [(path, half) for half in _halves(array)]
        else:
            found.append((path, array))
    return found


def _weight_of(name: str) -> str:
    return name.removesuffix(_SCALE) + ".weight"


def _scaled(array: StoredArray, scale: StoredArray) -> StoredArray:
    if scale.shape not in ((1,), array.shape[:1]):
        raise CheckpointError(
            f"{scale.path}: tensor {scale.name!r} of shape {list(scale.shape)} fits no {array.name!r}"
        )
    return dataclasses.replace(array, scale=scale.read())


def _halves(array: StoredArray) -> list[StoredArray]:
    """Divide a tensor [E, 2 * I, ...] into the gate and up projections, [E, I, ...] each."""
    if len(array.shape) < 2 or array.shape[1] % 2:
        raise CheckpointError(f"{array.path}: tensor {array.name!r} of shape {list(array.shape)} has no halves")
    num_experts, num_rows, *others = array.shape
    half = num_rows // 2
    return [
        dataclasses.replace(
            array,
            name=array.name.replace(_GATE_UP, f".ffn_{name}_exps."),
            shape=(num_experts, half, *others),
            data=array.data[:, start : start + half],
        )
        for name, start in (("gate", 0), ("up", half))
    ]
