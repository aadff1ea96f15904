"""A layer between ranks in a CUDA graph: nothing in it is read on the host, and replays carry the current values.

The device is simulated on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import fake_device
import pytest
import torch
from torch import Tensor

from moeserve.distributed.groups import groups_of_one_rank
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.factory import TorchDispatchers
from moeserve.layers.moe.layer import MoELayer, MoESpec
from moeserve.layers.moe.placement.placement import Placement
from moeserve.layers.moe.shared import SharedExpertsSpec
from moeserve.layers.network import Run
from moeserve.layers.weights import allocate_weights
from moeserve.ops.backend import TRITON
from moeserve.ops.routing.interface import RouterSpec
from moeserve.ops.side_stream import CudaSideStream
from moeserve.step_inputs import StepInputs

WIDTH, NUM_TOKENS = 32, 6


@pytest.fixture
def device() -> Iterator[fake_device.FakeDevice]:
    with fake_device.installed() as installed:
        yield installed


class TwinGroup:
    """Two ranks that have the same tokens and the same experts, by operations that a graph can hold."""

    rank_in_group, world_size, node_of_rank, num_bytes_sent = 0, 2, (0, 0), 0

    def begin_all_gather(self, x: Tensor, sizes: Sequence[int]) -> Any:
        return SimpleNamespace(wait=lambda: torch.cat([x, x]))

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return torch.cat([x, x])

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return x[: sizes[0]] * 2


def make_layer() -> MoELayer:
    backend = dataclasses.replace(TRITON, side_stream=CudaSideStream())
    context = BuildContext(backend, groups_of_one_rank(), torch.float32, torch.device("cpu"))
    config = MoESpec(router=RouterSpec(num_experts=4, top_k=2), expert_width=16, shared=SharedExpertsSpec(width=16))
    dispatchers = TorchDispatchers("all_to_all", cast(Any, TwinGroup()), context)
    layer = MoELayer(config, WIDTH, Placement(((0, 1), (2, 3)), 4), dispatchers, context)
    allocate_weights(layer)
    generator = torch.Generator().manual_seed(0)
    for weight in layer.parameters():
        weight.normal_(0.0, 0.5, generator=generator)
    return layer


def step_with(padding: Tensor | None) -> StepInputs:
    step = SimpleNamespace(
        tokens_per_rank=(NUM_TOKENS, NUM_TOKENS), padding=padding, own_rows=slice(None), most_per_rank=(), rows_before=0
    )
    return cast(StepInputs, step)


@torch.inference_mode()
def test_a_graph_of_a_layer_between_ranks(device: fake_device.FakeDevice) -> None:
    layer = make_layer()
    padding_T = torch.zeros(NUM_TOKENS, dtype=torch.bool)
    hidden_TD = torch.zeros(NUM_TOKENS, WIDTH)
    step = step_with(padding_T)
    layer(hidden_TD, Run(step, {}))
    graph = fake_device.FakeGraph()
    with torch.cuda.graph(graph):  # type: ignore[arg-type]
        output_TD = layer(hidden_TD, Run(step, {}))
    for seed, num_padding in ((1, 0), (2, 3)):
        hidden_TD.normal_(generator=torch.Generator().manual_seed(seed))
        padding_T[NUM_TOKENS - num_padding :] = True
        graph.replay()
        counted = layer.load.rows_e.clone()
        expected_TD = layer(hidden_TD, Run(step, {}))
        assert torch.equal(output_TD[: NUM_TOKENS - num_padding], expected_TD[: NUM_TOKENS - num_padding])
        assert not torch.equal(layer.load.rows_e, counted)
    # Rows are counted where the device has them, once in each replay.
    layer.load.rows_e.zero_()
    graph.replay()
    once = layer.load.rows_e.clone()
    graph.replay()
    assert torch.equal(layer.load.rows_e, 2 * once)
    assert once.sum() > 0


@torch.inference_mode()
def test_a_large_step_is_refused_in_a_graph(device: fake_device.FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the sizes of its exchanges."""
    from moeserve.layers.moe.dispatch import allgather

    monkeypatch.setattr(allgather, "SUMS_OF_RANKS", dataclasses.replace(allgather.SUMS_OF_RANKS, eager=-1))
    layer = make_layer()
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(fake_device.FakeGraph()):  # type: ignore[arg-type]
        layer(torch.ones(NUM_TOKENS, WIDTH), Run(step_with(None), {}))
