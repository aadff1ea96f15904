"""An engine logs on what its results depend besides the request. Numbers of tp ranks that keep the bytes of one."""

from __future__ import annotations

import dataclasses
import logging
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from reference_models import Reference

from moeserve import LLM
from moeserve.layers.chunked_sums import keeps_bytes, num_expert_chunks, num_input_chunks, share_experts, share_inputs
from moeserve.layers.grouped_query.attention import AttentionSpec
from moeserve.layers.latent.attention import LatentAttentionSpec
from moeserve.layers.rotary import NO_ROTARY
from moeserve.models.model_config import Layer, ModelSpec
from moeserve.models.registry import describe
from moeserve.ops.backend import TRITON, in_order
from moeserve.ops.native import native_kernels
from moeserve.ops.products.interface import InputChunks
from moeserve.ops.select import select_backend
from moeserve.worker import worker
from moeserve.worker.notes import note_on_bytes


def with_heads(model: ModelSpec, num_heads: int) -> ModelSpec:
    attention = AttentionSpec(num_heads=num_heads, num_kv_heads=1, head_dim=8, rotary=NO_ROTARY)
    return dataclasses.replace(model, layers=tuple(Layer.of(attention, *layer.networks[1:]) for layer in model.layers))


@pytest.mark.parametrize(
    ("change", "num_heads", "note"),
    [
        ({}, 8, None),
        ({"tensor_parallel_size": 8}, 16, None),
        ({"tensor_parallel_size": 3}, 6, "tensor_parallel_size=3 differ from those of one rank; .* with 1, 2"),
        ({"device": "cuda"}, 8, "device='cuda'"),
        ({"device": "cuda", "dtype": "float16", "batch_invariant": True}, 8, None),
        ({"dtype": "float16"}, 8, "dtype='float16'"),
    ],
)
def test_notes(plain: Reference, change: dict[str, Any], num_heads: int, note: str | None) -> None:
    values = SimpleNamespace(
        **dict(device="cpu", dtype="bfloat16", tensor_parallel_size=1, batch_invariant=False) | change
    )
    config = SimpleNamespace(weights=values, compute=values, parallel=values)
    model = with_heads(describe(str(plain.folder)).model, num_heads)
    cpu = select_backend(torch.device("cpu"), getattr(torch, config.weights.dtype))
    found = note_on_bytes(cast(Any, config), model, cpu if config.compute.device == "cpu" else in_order(TRITON))
    if native_kernels() is None and "device" not in change:
        note = "C\\+\\+ kernels"
    if note is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(note, found)


@pytest.mark.skipif(native_kernels() is None, reason="the C++ kernels are not built")
def test_the_note_is_logged(plain: Reference, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=worker.__name__):
        for dtype in ("float32", "float16"):
            LLM(model=str(plain.folder), dtype=dtype, num_threads=1).shutdown()
            assert ("dtype='float16'" in caplog.text) == (dtype == "float16")


def test_missing_kernels_are_logged_once_with_their_cost_and_remedy(plain: Reference) -> None:
    code = (
        "import sys; sys.modules['moeserve._cpu'] = None\n"  # as if it had not been built
        "from moeserve import LLM\n"
        "LLM(model=sys.argv[1], num_threads=1).shutdown()\n"
    )
    run = subprocess.run([sys.executable, "-c", code, plain.folder], capture_output=True, text=True, check=True)
    assert run.stderr.count("3 to 5 times slower") == 1
    assert "apt install g++" in run.stderr


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "sizes"),
    [
        (32, 8, [1, 2, 4, 8]),
        (16, 1, [1, 2, 4, 8]),
        (12, 4, [1, 2, 4]),
        (9, 3, [1, 3]),
        (6, 3, [1, 3, 6]),
        (25, 5, [1, 5]),
        (11, 11, [1]),
    ],
)
def test_sizes_that_keep_the_bytes_of_one(num_heads: int, num_kv_heads: int, sizes: list[int]) -> None:
    attention = AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8, rotary=NO_ROTARY)
    num_chunks = num_input_chunks(attention.can_divide)
    assert [size for size in range(1, 33) if attention.can_divide(size) and keeps_bytes(num_chunks, size)] == sizes


def test_latent_attention_divides_all_heads() -> None:
    sizes = dict(query_rank=None, latent_size=16, key_dim=8, rotary=NO_ROTARY, value_dim=8)
    assert num_input_chunks(LatentAttentionSpec(num_heads=128, **sizes).can_divide) == 8  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "num_slices"), [(14336, 8), (1547, 4), (803, 2), (2880, 4), (768, 2)])
def test_slices_of_experts_have_the_chunks_of_whole_ones(width: int, num_slices: int) -> None:
    """Chunks hold whole groups of 32 inputs, which share a scale in int4."""

    def share(rank: int, num_slices: int) -> tuple[slice, InputChunks]:
        tp = SimpleNamespace(rank_in_group=rank, world_size=num_slices)
        given = share_experts(
            width, num_slices, cast(Any, SimpleNamespace(tp=tp, is_batch_invariant=True, quantization=None))
        )
        assert given.chunks is not None
        return given.inputs, given.chunks

    whole, chunks = share(0, 1)
    assert (whole, chunks.size % 32, chunks.keeps_float32) == (slice(0, width), 0, False)
    assert keeps_bytes(num_expert_chunks(width), num_slices)
    slices = [share(rank, num_slices) for rank in range(num_slices)]
    assert [place for inputs, _ in slices for place in range(width)[inputs]] == [*range(width)]
    assert {(each.size, each.keeps_float32) for _, each in slices} == {(chunks.size, True)}
    assert {inputs.start % chunks.size for inputs, _ in slices} == {0}


def test_narrow_experts_have_one_chunk() -> None:
    assert [num_expert_chunks(width) for width in (9, 767, 768, 1536, 3072)] == [1, 1, 2, 4, 8]


@pytest.mark.parametrize("num_inputs", [64, 61, 9, 10944])
def test_chunks_are_those_of_one_rank(num_inputs: int) -> None:
    """Also where they do not divide the inputs, and where there are too few inputs for all chunks."""

    def share(rank: int, num_ranks: int) -> tuple[slice, InputChunks]:
        tp = SimpleNamespace(rank_in_group=rank, world_size=num_ranks)
        given = share_inputs(num_inputs, 8, cast(Any, SimpleNamespace(tp=tp, is_batch_invariant=True)))
        assert given.chunks is not None
        return given.inputs, given.chunks

    def cuts(rank: int, num_ranks: int) -> list[int]:
        inputs, chunks = share(rank, num_ranks)
        return list(range(inputs.start, inputs.stop, chunks.size))

    for num_ranks in (2, 4, 8):
        assert [cut for rank in range(num_ranks) for cut in cuts(rank, num_ranks)] == cuts(0, 1)
        assert all(share(rank, num_ranks)[1].keeps_float32 for rank in range(num_ranks))
    assert not share(0, 1)[1].keeps_float32
