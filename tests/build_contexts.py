"""The context in which tests build layers of a single rank on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch

from moeserve.distributed.groups import Groups, groups_of_one_rank
from moeserve.layers.build_context import BuildContext
from moeserve.ops.select import select_backend

CPU = torch.device("cpu")


def cpu_context(dtype: torch.dtype = torch.float32, groups: Groups | None = None) -> BuildContext:
    return BuildContext(select_backend(CPU, dtype), groups or groups_of_one_rank(), dtype, CPU)


def with_tp(tp: object, dtype: torch.dtype = torch.float32) -> BuildContext:
    """Return a context whose tp group is a stand-in."""
    return cpu_context(dtype, dataclasses.replace(groups_of_one_rank(), tp=cast(Any, tp)))
