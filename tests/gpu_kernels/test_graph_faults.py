"""Replays of a captured decode step give its results, and faults are found, on a device simulated on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import fake_device
import pytest
import torch
from planted_operations import plant
from torch import Tensor

from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.models import BLOCK_SIZE, capture_step, make_model
from moeserve.bench.gpu.rehearsal import rehearsing
from moeserve.kv.layer_cache import Places
from moeserve.kv.rules import CacheRules
from moeserve.ops import attention, pairs, side_stream
from moeserve.ops import rows as row_operations
from moeserve.ops.backend import Backend
from moeserve.ops.rows.interface import RowOperations
from moeserve.ops.side_stream import CudaSideStream
from moeserve.worker.cuda_graphs import TorchCapture

CONFIG = dict(
    architectures=["Qwen2MoeForCausalLM"], rms_norm_eps=1e-6, max_position_embeddings=64, rope_theta=1e4,
    num_hidden_layers=1, vocab_size=1024, hidden_size=48, intermediate_size=48, num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=24, shared_expert_intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


@pytest.fixture
def backend() -> Iterator[Backend]:
    with fake_device.installed(), rehearsing() as backend:
        yield dataclasses.replace(backend, side_stream=CudaSideStream(), supports_cuda_graphs=True)


@torch.inference_mode()
def are_replayed(backend: Backend) -> list[bool]:
    """Capture a decode step with shared experts in the side stream. Are replays of other steps as without a graph?"""
    source = Source(torch.device("cpu"), torch.Generator().manual_seed(1), torch.float32)
    model, are_equal = make_model(CONFIG, backend, source), []
    caches = model.make_caches(Places.equal(CacheRules(), 8))
    replay = capture_step(model, caches, backend, source, 2, max_blocks=4)
    for contexts in ((20, 40), (37, 5)):
        for tensor in (tensor for cache in caches for tensor in cache.tensors):
            tensor.copy_(source.normal(*tensor.shape))
        step = source.step([(1, length) for length in contexts], BLOCK_SIZE)
        step = dataclasses.replace(step, token_ids=source.integers(0, 1024, 2))
        expected_TD = model(step, caches)
        are_equal.append(torch.allclose(replay(step).hidden_TD, expected_TD, rtol=1e-4, atol=1e-5))
    return are_equal


class Changed:
    """An object with one method that gets the original's as its first argument."""

    def __init__(self, right: Any, method: str, change: Callable[..., Any]) -> None:
        self._right = right
        setattr(self, method, lambda *args, **options: change(getattr(right, method), *args, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)


def stale_input(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Attention that keeps the lengths of the first step that it gets in some memory."""
    kept: dict[int, Tensor] = {}

    def attend(original: Any, query: Tensor, cache: Any, step: Any, *others: Any) -> Tensor:
        lengths = kept.setdefault(id(step), step.context_lens.clone())
        result: Tensor = original(query, cache, dataclasses.replace(step, context_lens=lengths), *others)
        return result

    plant(monkeypatch, attention.TABLE, "triton", lambda right: Changed(right, "attend", attend))
    return backend


def host_read(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """An order of pairs whose counts are read on the host."""

    def order(original: Any, *args: Any) -> tuple[Tensor, Tensor]:
        ordered, counts = original(*args)
        return ordered, torch.tensor(counts.tolist())

    plant(monkeypatch, pairs.TABLE, "triton", lambda right: Changed(right, "order", order))
    return backend


def host_size(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """An order of pairs that is indexed by a mask, so that the host reads the number of pairs."""

    def order(original: Any, *args: Any) -> tuple[Tensor, Tensor]:
        ordered, counts = original(*args)
        return ordered[ordered >= 0], counts

    plant(monkeypatch, pairs.TABLE, "triton", lambda right: Changed(right, "order", order))
    return backend


def host_wait(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    def order(original: Any, *args: Any) -> tuple[Tensor, Tensor]:
        torch.cuda.synchronize()
        found: tuple[Tensor, Tensor] = original(*args)
        return found

    plant(monkeypatch, pairs.TABLE, "triton", lambda right: Changed(right, "order", order))
    return backend


def wrong_stream(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A side stream that does not wait for its input."""

    def start(self: Any, compute: Callable[[Tensor], Tensor], input: Tensor) -> side_stream.Pending:
        with torch.cuda.stream(self._stream):
            return side_stream.Pending(compute(input), self._stream)

    monkeypatch.setattr(side_stream.CudaSideStream, "start", start)
    return backend


def early_wait(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A side stream that waits for the stream of the capture before its input is computed, and not after."""

    def change(right: RowOperations) -> RowOperations:
        def rms_norm(*args: Any, **options: Any) -> Tensor:
            backend.side_stream._stream.wait_stream(torch.cuda.current_stream())  # type: ignore[attr-defined]
            return right.rms_norm(*args, **options)

        return right._replace(rms_norm=rms_norm)

    plant(monkeypatch, row_operations.TABLE, "triton", change)
    return wrong_stream(backend, monkeypatch)


def no_wait_for_a_result(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(side_stream.Pending, "wait", lambda self: self.result)
    return backend


def stale_output(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A capture that returns a copy of the result, which replays do not write to."""
    capture = TorchCapture.__call__

    def copied(self: TorchCapture, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        replay, result = capture(self, run)
        return replay, dataclasses.replace(result, hidden_TD=result.hidden_TD.clone())

    monkeypatch.setattr(TorchCapture, "__call__", copied)
    return backend


GRAPH_FAULTS: dict[Callable[[Backend, pytest.MonkeyPatch], Backend], str] = {
    stale_input: "False",
    stale_output: "False",
    host_read: "Tensor.tolist reads a tensor on the host",
    host_size: "reads a tensor on the host",
    host_wait: "the host waits for the device",
    wrong_stream: "not part of the capture",
    early_wait: "uses memory of another stream without waiting for it",
    no_wait_for_a_result: "uses memory of another stream without waiting for it",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", GRAPH_FAULTS, ids=lambda fault: fault.__name__)
def test_fault_around_a_graph_is_found(
    fault: Callable[[Backend, pytest.MonkeyPatch], Backend], backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = fault(backend, monkeypatch)
    try:
        outcome = str(are_replayed(backend))
    except RuntimeError as error:
        outcome = str(error)
    assert GRAPH_FAULTS[fault] in outcome


def test_replays_give_the_results_of_steps_without_a_graph(backend: Backend) -> None:
    assert are_replayed(backend) == [True, True]


def test_streams_may_read_the_same_memory(backend: Backend) -> None:
    """Two streams read one tensor, and write to their own."""
    rows, side = torch.ones(3), fake_device.FakeStream()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            beside = rows + 1
        own = rows * 2
        torch.cuda.current_stream().wait_stream(side)
        total = own + beside
    rows.fill_(5)
    graph.replay()
    assert total.tolist() == [16.0] * 3


def test_stream_that_is_never_joined_is_refused(backend: Backend) -> None:
    rows, side = torch.ones(3), fake_device.FakeStream()

    def run() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                rows.add_(1)

    with pytest.raises(RuntimeError, match="unjoined"):
        run()
