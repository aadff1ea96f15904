"""Capture and replay of kernel calls."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch
from paged_steps import kernels, needs_kernels, same_bytes

pytestmark = needs_kernels


def test_replay_uses_the_current_contents_of_memory() -> None:
    a, b, total, normed = (torch.randn(3, 8) for _ in range(4))
    weight = torch.randn(8)
    graph = kernels.CpuGraph()
    graph.begin_capture()
    kernels.add(a, b, total)
    kernels.rms_norm(total, weight, 1e-5, normed)
    graph.end_capture()
    kernels.add(a, a, torch.empty_like(a))
    assert graph.num_calls == 2

    for _ in range(2):
        a.copy_(torch.randn(3, 8))
        graph.replay()
        assert same_bytes(total, a + b)
        expected = torch.empty_like(total)
        kernels.rms_norm(total, weight, 1e-5, expected)
        assert same_bytes(normed, expected)


def test_captured_calls_are_not_executed() -> None:
    a, total, graph = torch.ones(2, 4), torch.zeros(2, 4), kernels.CpuGraph()
    graph.begin_capture()
    kernels.add(a, a, total)
    graph.end_capture()
    assert total.eq(0).all()
    kernels.add(a, a, total)
    assert total.eq(2).all()


def test_a_graph_keeps_memory_alive() -> None:
    out, graph = torch.empty(2, 4), kernels.CpuGraph()
    graph.begin_capture()
    kernels.add(torch.full((2, 4), 1.5), torch.full((2, 4), 2.0), out)
    graph.end_capture()
    gc.collect()
    others = [torch.zeros(2, 4) for _ in range(1000)]  # would reuse freed memory
    out.zero_()
    graph.replay()
    assert out.eq(3.5).all()
    del others


def test_tensors_in_the_given_address_range_are_not_kept_alive() -> None:
    memory = torch.zeros(100)
    inside, outside = memory[10:14].view(1, 4), torch.ones(1, 4)
    before = sys.getrefcount(inside), sys.getrefcount(outside)
    graph = kernels.CpuGraph(memory.data_ptr(), memory.nbytes)
    graph.begin_capture()
    kernels.add(inside, outside, inside)
    graph.end_capture()
    assert sys.getrefcount(inside) == before[0]
    assert sys.getrefcount(outside) > before[1]
    past_its_end = kernels.CpuGraph(memory.data_ptr(), inside.storage_offset() * 4)
    past_its_end.begin_capture()
    kernels.add(outside, outside, inside)
    past_its_end.end_capture()
    assert sys.getrefcount(inside) > before[0]


def test_a_failed_call_is_not_captured() -> None:
    graph = kernels.CpuGraph()
    graph.begin_capture()
    with pytest.raises(ValueError, match="b has shape"):
        kernels.add(torch.empty(2, 4), torch.empty(2, 5), torch.empty(2, 4))
    graph.end_capture()
    assert graph.num_calls == 0


def test_a_replayed_call_must_return_the_captured_value() -> None:
    keys, order, counts = torch.tensor([1, 0, 1]), torch.empty(3, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
    graph = kernels.CpuGraph()
    graph.begin_capture()
    assert kernels.sort_pairs(keys, 0, 3, order, counts) == 3  # all pairs
    graph.end_capture()
    keys[0] = 0
    graph.replay()
    assert counts.tolist() == [2, 1]
    keys[0] = -1
    with pytest.raises(RuntimeError, match="another value"):
        graph.replay()


def test_capture_is_per_thread_and_one_graph_at_a_time() -> None:
    first, second = kernels.CpuGraph(), kernels.CpuGraph()
    a = torch.ones(1, 4)

    def add() -> None:
        kernels.add(a, a, torch.empty_like(a))

    first.begin_capture()
    with pytest.raises(RuntimeError, match="capturing a graph already"):
        second.begin_capture()
    with pytest.raises(RuntimeError, match="is capturing"):
        second.replay()
    other = threading.Thread(target=add)
    other.start()
    other.join()
    assert first.num_calls == 0
    add()
    second.end_capture()  # not the graph being captured
    add()
    first.end_capture()
    assert (first.num_calls, second.num_calls) == (2, 0)
