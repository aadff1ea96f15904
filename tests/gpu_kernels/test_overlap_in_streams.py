"""A captured overlapped step on a simulated CUDA device: its streams wait where they must, and only there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import fake_device
import pytest
import torch
from model_parts import networks_of

from moeserve.distributed.groups import groups_of_one_rank
from moeserve.kv.layer_cache import Places
from moeserve.kv.rules import CacheRules
from moeserve.layers.build_context import BuildContext
from moeserve.layers.moe.dispatch.base import Dispatched
from moeserve.layers.moe.dispatch.local import LocalDispatcher
from moeserve.models.decoder import Decoder
from moeserve.models.registry import describe
from moeserve.ops.backend import TRITON
from moeserve.ops.side_stream import CudaSideStream
from moeserve.step_inputs import StepInputs, decode_step
from moeserve.worker.overlap import overlapped

NUM_TOKENS = 4
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "torch_dtype": "float32",
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass
class Communicator:
    """A dispatcher that works in a stream of its own, as DeepEP and NCCL do."""

    within: LocalDispatcher
    stream: Any
    takes_float8: bool = False

    def begin(self, compute: Any) -> Pending:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            return Pending(compute().wait(), self.stream.record_event())

    def dispatch(self, *arguments: Any) -> PendingArrival:
        return PendingArrival(self, self.begin(lambda: self.within.dispatch(*arguments)))


@dataclass
class PendingArrival:
    communicator: Communicator
    pending: Pending

    def wait(self) -> Dispatched:
        arrived: Dispatched = self.pending.wait()
        combine = arrived.combine
        return dataclasses.replace(arrived, combine=lambda output: self.communicator.begin(lambda: combine(output)))


@dataclass
class Pending:
    result: Any
    event: Any

    def wait(self) -> Any:
        self.event.wait()
        return self.result


@pytest.fixture
def device() -> Iterator[fake_device.FakeDevice]:
    with fake_device.installed() as installed:
        yield installed


def make_step() -> StepInputs:
    """Return a decode step whose requests have a block each, and a token."""
    numbers = torch.arange(NUM_TOKENS)
    return dataclasses.replace(
        decode_step(NUM_TOKENS), token_ids=numbers + 1, cache_slots=numbers * 16, block_table=numbers[:, None].int()
    )


@pytest.mark.slow
@torch.inference_mode()
def test_streams(device: fake_device.FakeDevice, tmp_path: Path) -> None:
    """While one half computes, the communicator works for the other. A replay has the results of the whole step."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_MOE))
    config = describe(tmp_path).model
    backend = dataclasses.replace(TRITON, side_stream=CudaSideStream())
    context = BuildContext(backend, groups_of_one_rank(), torch.float32, torch.device("cpu"))
    communicator: Any = fake_device.FakeStream()

    @dataclass
    class Factory:
        group: Any

        def make(self, placement: Any, load_e: Any) -> Communicator:
            return Communicator(LocalDispatcher(placement, context, load_e), communicator)

    factory = cast(Any, Factory(context.groups.ep))
    model = Decoder(config, config.place_experts(1), factory, context)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.normal_(0.0, 0.3, generator=generator)
    caches = model.make_caches(Places.equal(CacheRules(), NUM_TOKENS))
    overlaps: list[bool] = []

    def note(*_: Any) -> None:
        """Note if work of the communicator is under way for which this stream has not waited."""
        now, number = torch.cuda.current_stream(), communicator.number
        overlaps.append(cast(Any, now).clock.get(number, 0) < communicator.clock.get(number, 0))

    for mixer, moe in networks_of(model):
        mixer.register_forward_pre_hook(note)
        moe.experts.register_forward_pre_hook(note)

    def replayed(step: StepInputs) -> torch.Tensor:
        overlaps.clear()
        torch.cuda.current_stream().wait_stream(communicator)
        graph: Any = fake_device.FakeGraph()
        with torch.cuda.graph(graph):
            result = model(step, caches)
        result.fill_(torch.nan)
        graph.replay()
        return result

    whole_TD = replayed(make_step()).clone()
    assert overlaps == [False] * 4
    overlapped_TD = replayed(overlapped(make_step(), tp=1, tp_rank=0))
    # Only at the first attention is nothing under way: then attention, experts, experts, attention, and so on.
    assert overlaps == [False, True, True, True, True, True, True, True]
    assert not whole_TD.isnan().any()
    # The last bits of torch's products depend on the number of rows.
    torch.testing.assert_close(overlapped_TD, whole_TD, rtol=1e-4, atol=1e-5)
