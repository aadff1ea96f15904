"""Replicas that have lost ranks are left out, and start again. Survivors keep their weights; no request notices."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from constant_load import Load
from planted import Planted
from rank_processes import assert_gone, living_ranks
from reference_models import Reference

from moeserve import LLM, SamplingParams
from moeserve.engine import growing_back

pytestmark = pytest.mark.ranks

SETTINGS: dict[str, Any] = dict(
    dtype="float32", max_model_len=256, kv_cache_memory="8MiB", max_num_seqs=16, num_threads=1
)
NUM_STREAMS = 16


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("mixtral")


def by_number(processes: list[psutil.Process]) -> dict[int, psutil.Process]:
    return {int(process.name().split()[1]): process for process in processes}


@pytest.mark.parametrize("layout", ["dp4", pytest.param("tp2dp3", marks=pytest.mark.slow)])
def test_replicas_are_left_out_one_after_the_other_and_join_again(
    reference: Reference, caplog: pytest.LogCaptureFixture, layout: str
) -> None:
    num_tp, num_replicas = (1, 4) if layout == "dp4" else (2, 3)
    sizes = dict(data_parallel_size=num_replicas, tensor_parallel_size=num_tp)
    pauses: dict[str, float] = {}
    with (
        LLM(reference.folder, **sizes, **SETTINGS, on_failure="shrink") as llm,
        Load(llm, reference, NUM_STREAMS) as load,
    ):
        left = by_number(living_ranks())
        for replica in [1, 3, 0][: num_replicas - 1] if num_tp == 1 else [1, 0]:
            lost = [left.pop(replica * num_tp + tp) for tp in range(num_tp)]
            since = time.monotonic()
            lost[-1].kill()
            load.wait_for(2 * NUM_STREAMS)
            assert_gone(lost)
            assert {each.pid for each in living_ranks()} == {each.pid for each in left.values()}
            assert len(llm.core.replica_stats) == len(left) // num_tp
            pauses[f"{len(left) // num_tp} left"] = load.longest_pause_s(since)
        for size in range(2, num_replicas + 1):
            since = time.monotonic()
            llm.scale(size)
            load.wait_for(2 * NUM_STREAMS)
            pauses[f"{size} again"] = load.longest_pause_s(since)
            assert len(living_ranks()) == size * num_tp
    assert sum("left out" in message for message in caplog.messages) == num_replicas - 1
    print(layout, {name: round(pause_s, 2) for name, pause_s in pauses.items()}, file=sys.stderr)


def work_of_replicas(llm: LLM, reference: Reference) -> list[tuple[int, int]]:
    """Return the numbers of tokens and of steps in which each replica computes 16 requests together with the others."""

    def totals() -> list[tuple[int, int]]:
        return [(each.steps.num_tokens, sum(each.steps.num_steps_of_size)) for each in llm.core.replica_stats]

    before, params = totals(), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llm.generate(reference.prompts(*[12] * NUM_STREAMS, seed=7), params, use_tqdm=False)
    return [(now[0] - then[0], now[1] - then[1]) for now, then in zip(totals(), before, strict=True)]


@pytest.mark.slow
def test_replicas_that_have_joined_again_do_the_work_in_as_many_steps_as_new_ones(reference: Reference) -> None:
    options = dict(data_parallel_size=4) | SETTINGS
    with LLM(reference.folder, **options) as llm:
        fresh = work_of_replicas(llm, reference)
    with LLM(reference.folder, **options, on_failure="shrink") as llm:
        for replica in (3, 1, 0):
            by_number(living_ranks())[replica].kill()
            llm.generate([[1, 2, 3]], use_tqdm=False)
        assert len(llm.core.replica_stats) == 1
        llm.scale(4)
        again = work_of_replicas(llm, reference)
    assert [num_tokens for num_tokens, _ in again] == [num_tokens for num_tokens, _ in fresh]
    assert max(num_steps for _, num_steps in again) <= 1.1 * max(num_steps for _, num_steps in fresh)


def test_a_replica_that_cannot_be_replaced_is_left_out_until_it_can_start_again(
    reference: Reference,
    plant: Callable[..., Planted],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growing_back, "FIRST_DELAY_S", 0.5)
    planted = plant(rank=1, point="loading", action="refuse")
    with (
        LLM(reference.folder, data_parallel_size=2, **SETTINGS, on_failure="recover") as llm,
        Load(llm, reference, NUM_STREAMS) as load,
    ):
        before = by_number(living_ranks())
        planted.trigger()
        before[1].kill()
        while len(llm.core.replica_stats) == 2:
            load.wait_for(1)
        assert before[0].is_running()
        while len(llm.core.replica_stats) == 1:
            load.wait_for(1)
        load.wait_for(NUM_STREAMS)
    assert any("cannot be replaced" in message for message in caplog.messages)
    assert any("left out: 1 replica(s) serve on" in message for message in caplog.messages)
