"""Number of compiled variants of each kernel, which must not depend on sizes that change from step to step."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

SIZES = (1, 2, 5, 16, 17, 32, 48, 64, 100, 256, 999)


class Launches(dict[str, set[Any]]):
    """Distinct compilations of each kernel, by its name."""

    def add(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        values = dict(zip(kernel.arg_names, args, strict=False)) | options
        parameters = {parameter.name: parameter for parameter in kernel.params}
        seen = []
        for name, value in values.items():
            parameter = parameters.get(name)
            if parameter is None or parameter.is_constexpr or value is None:
                seen.append((name, value))
            elif isinstance(value, Tensor):
                seen.append((name, value.dtype, value.data_ptr() % 16))
            elif isinstance(value, int):
                kind = value.bit_length() > 31
                seen.append((name, kind) if parameter.do_not_specialize else (name, kind, value == 1, value % 16 == 0))
        self.setdefault(kernel.fn.__name__, set()).add(tuple(seen))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Record launches without running them."""
    from triton.runtime.jit import JITFunction

    found = Launches()
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, grid, warmup, **options: found.add(self, args, options))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    return found


def counts(launches: Launches) -> dict[str, int]:
    return {name: len(variants) for name, variants in launches.items()}


def attend(num_chunks: int, rows_of_first: int, max_blocks: int) -> None:
    from moeserve.triton_kernels.latent_attention import latent_attention
    from moeserve.triton_kernels.paged_attention import paged_attention

    num_rows = rows_of_first + num_chunks - 1
    integers = dict(dtype=torch.int32)
    step = (
        torch.zeros(num_chunks, max_blocks, **integers),
        torch.zeros(num_chunks + 1, **integers),
        torch.ones(num_chunks, **integers),
    )
    sizes: dict[str, Any] = dict(max_rows_per_chunk=rows_of_first, max_context=16 * max_blocks, scale=1.0)
    caches = torch.zeros(2, 3, 2, 16, 32)
    paged_attention(torch.zeros(num_rows, 4, 32), *caches, *step, **sizes)
    latent_attention(torch.zeros(num_rows, 4, 48), torch.zeros(3, 16, 48), *step, latent_size=32, **sizes)


def test_attention_of_any_step_is_compiled_once(launches: Launches) -> None:
    """Vary the numbers of chunks, rows and blocks. Each kernel is compiled once for each of two kinds of attention."""
    for size in SIZES:
        attend(size, 1, 40)
        attend(3, size, 40)
        attend(3, 7, size)
    assert counts(launches) == {"attend_tile_kernel": 2, "attend_split_kernel": 2, "merge_splits_kernel": 2}


def test_norms_of_any_step_are_compiled_once(launches: Launches) -> None:
    from moeserve.triton_kernels.rms_norm import rms_norm

    for size in SIZES:
        rms_norm(torch.zeros(size, 64), torch.ones(64), 1e-6)
    assert counts(launches) == {"rms_norm_kernel": 1}


def test_sums_of_any_step_are_compiled_a_few_times(launches: Launches) -> None:
    from moeserve.triton_kernels.pairs import SEARCHED_ROWS, weigh_rows, weighted_sum

    for size in (*SIZES, 4096, 10001):
        weighted_sum(torch.zeros(2 * size, 64), torch.zeros(2 * size).long(), torch.zeros(size, 2), torch.float32)
        weigh_rows(torch.zeros(size, 64), torch.zeros(size), torch.zeros(1).int())
    assert counts(launches) == {
        "weighted_sum_kernel": len(SEARCHED_ROWS) + 1,
        "invert_kernel": 1,
        "weigh_rows_kernel": 1,
    }


def test_order_of_any_step_is_compiled_once(launches: Launches) -> None:
    from moeserve.triton_kernels.pairs import order_pairs

    for size in (*SIZES, 4096, 10001):
        order_pairs(torch.zeros(size, 6).long(), 0, 64)
    assert set(counts(launches).values()) == {1}


def test_routing_of_any_step_is_compiled_twice(launches: Launches) -> None:
    """Few tokens are routed with the router's weights, and many from logits."""
    from moeserve.ops.routing.interface import RouterSpec
    from moeserve.ops.routing.triton import TritonRouter

    router = TritonRouter(RouterSpec(num_experts=8, top_k=2))
    for size in SIZES:
        router(torch.zeros(size, 64), torch.zeros(8, 64), None, None)
    assert counts(launches) == {"route_kernel": 2}
