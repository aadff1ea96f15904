"""The benchmark of parallelism: its arithmetic. It is run in tests/distributed/test_parallel_bench.py."""

from __future__ import annotations

import pytest
import torch

from moeserve.bench import parallel
from moeserve.bench.parallel_rank import TimedGroup, TimeDispatch, Timing, random_tokens
from moeserve.distributed.group import group_of_one


def test_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert parallel.percentile(values, 0.99) == 198
    assert parallel.percentile(values, 0.5) == 100
    assert parallel.percentile(values, 1.0) == 200
    assert parallel.percentile([7.0], 0.99) == 7


def test_every_call_of_every_rank_counts_alike() -> None:
    timings = [Timing(seconds=[1.0, 3.0], seconds_in_collectives=1.5), Timing(seconds=[4.0, 4.0])]
    assert parallel.mean_seconds(timings) == 3
    assert parallel.median_seconds(timings) == 3.5
    assert parallel.share_exchanging(timings) == pytest.approx(0.75 / 3)


def test_names_tell_layouts_apart() -> None:
    layouts = [
        parallel.Layout(tp, dp, dispatcher) for tp, dp in parallel.LAYOUTS for dispatcher in parallel.DISPATCHERS
    ]
    names = [layout.name for layout in (parallel.ONE_RANK, *layouts)]
    assert names[:2] == ["one rank", "tp 2, dp 1, allgather"]
    assert len(set(names)) == 5


def test_ranks_send_other_tokens_and_the_same_ones_each_time() -> None:
    order = TimeDispatch(dispatcher="allgather", num_tokens=400, hidden_size=8, num_experts=16, top_k=4, num_calls=1)
    hidden_TD, routing = random_tokens(order, 0)
    again_TD, same = random_tokens(order, 0)
    _, other = random_tokens(order, 1)
    assert torch.equal(hidden_TD, again_TD)
    assert torch.equal(routing.experts_TK, same.experts_TK)
    assert not torch.equal(routing.experts_TK, other.experts_TK)
    assert hidden_TD.dtype == torch.bfloat16
    assert all(len(set(experts)) == 4 for experts in routing.experts_TK.tolist())
    counts = routing.experts_TK.flatten().bincount(minlength=16)
    assert counts.min() > 50  # of 100 on average
    assert counts.max() < 150


def test_what_stays_on_a_rank_is_not_sent() -> None:
    group = TimedGroup(group_of_one("ep"))
    x = torch.zeros(3, 5)
    assert group.all_gather(x, [3]) is x
    assert group.all_to_all(x, [3], [3]).wait() is x
    assert group.bytes_sent == 0
