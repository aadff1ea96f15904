"""Counts the launches of a step on a GPU, without a GPU.

The model is built from a config.json on torch's "meta" device, whose tensors have no values, and kernels are recorded
instead of launched. Published shapes therefore need neither a GPU nor memory. Operations that wait for the device fail.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.recording import Launch, facts, recorded_launches
from moeserve.config.settings import QuantizationName
from moeserve.distributed.groups import groups_of_one_rank
from moeserve.layers.cache import CacheSize
from moeserve.layers.context import ModelContext
from moeserve.layers.hyper_connections import Streams
from moeserve.layers.indexer import Choice
from moeserve.models.decoder import Decoder
from moeserve.models.registry import describe
from moeserve.moe.dispatch.factory import TorchDispatchers
from moeserve.moe.layer import run_in_turn
from moeserve.ops.interfaces import Kernels
from moeserve.ops.triton.table import TRITON_KERNELS
from moeserve.step_inputs import NUM_SETTINGS, ChunkSpan, StateRows

META = torch.device("meta")
BLOCK_SIZE = 16
# torch operations that launch nothing.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh"}


class Operations(TorchDispatchMode):
    """Appends the torch operations that launch a kernel to a list."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        name = func.overloadpacket.__name__
        if isinstance(first, Tensor) and first.device == META and name not in ALLOCATIONS:
            is_written = name.endswith("_") or "out" in (kwargs or {})
            is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]
            is_view = any(isinstance(each, Tensor) and is_alias(first, each) for each in args)
            if is_written or not is_view:
                self._launches.append(Launch(f"torch {name}", {"results": facts(result), "arguments": facts(args)}))
        return result


def make_model(
    folder: Path,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    quantization: QuantizationName | None = None,
) -> Decoder:
    """Return the model of a config.json for a single rank, with uninitialised weights."""
    groups = groups_of_one_rank()
    context = ModelContext(kernels, groups, dtype, device, quantization=quantization)
    config = describe(folder).model
    return Decoder(config, config.place_experts(1), TorchDispatchers("local", groups.ep, context), context)


def record_step(
    folder: Path,
    spans: list[ChunkSpan],
    quantization: QuantizationName | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> list[list[Launch]]:
    """Return the launches of each layer, followed by those of the embedding, the norm and the head.

    Args:
        folder: folder with a config.json.
        spans: the chunks of the step.
    """
    model = make_model(folder, TRITON_KERNELS, dtype, META, quantization)
    caches = model.make_caches(CacheSize(4, BLOCK_SIZE, num_states=len(spans)))
    source = Source(torch.device("cpu"), torch.Generator(), dtype)
    drawn = source.step([(span.num_rows, span.context_len) for span in spans], BLOCK_SIZE)
    tensors: Any = {name: each.to(META) for name, each in vars(drawn).items() if isinstance(each, Tensor)}
    states = StateRows.none(len(spans), META) if model.has_states else None
    step = dataclasses.replace(drawn, **tensors, states=states)
    settings_LW = torch.zeros(len(spans), NUM_SETTINGS, dtype=torch.int64, device=META)
    of_layers = []
    with torch.inference_mode(), recorded_launches() as launches, Operations(launches):
        hidden_tD: Any
        hidden_tD, rotations = model.receive(step)
        hidden_tD = hidden_tD if model.config.streams is None else Streams(hidden_tD)
        update_tD, choice = None, Choice()
        for layer, cache in zip(model.layers, caches, strict=True):
            num_before = len(launches)
            for _ in range(2):  # the first run also clears memory that kernels keep
                del launches[num_before:]
                sum_tD, input_tD = layer.mix(hidden_tD, update_tD, rotations, cache, step, choice)
                (following_tD,) = run_in_turn([layer.feed(input_tD, step)])
            hidden_tD, update_tD = sum_tD, following_tD
            of_layers.append(launches[num_before:])
            del launches[num_before:]
        assert model.norm is not None
        _, normed_TD = model.norm.after_adding(update_tD, hidden_tD)
        logits_LV = model.logits(step.rows_for_logits(normed_TD))
        TRITON_KERNELS.choose_tokens(logits_LV, settings_LW, step.logits_rows)
    return [*of_layers, launches]


def launches(folder: Path, spans: list[ChunkSpan], quantization: QuantizationName | None = None) -> list[Counter[str]]:
    """Return the number of launches by name: for each layer, and then outside of layers; see `record_step`."""
    return [Counter(launch.name for launch in part) for part in record_step(folder, spans, quantization)]


def decode(num_requests: int, context_len: int) -> list[ChunkSpan]:
    return [ChunkSpan(row, 1, context_len) for row in range(num_requests)]


def prefill(num_rows: int, context_len: int) -> list[ChunkSpan]:
    return [ChunkSpan(0, num_rows, context_len)]
