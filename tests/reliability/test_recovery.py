"""Failed ranks that are replaced while all others keep their processes and weights. No request notices."""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from planted import Planted
from rank_processes import assert_gone, living_ranks
from reference_models import Reference

from moeserve import LLM, EngineError, SamplingParams

pytestmark = pytest.mark.ranks

SETTINGS: dict[str, Any] = dict(
    dtype="float32", max_model_len=256, kv_cache_memory="8MiB", max_num_seqs=16, num_threads=1, on_failure="recover"
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": dict(data_parallel_size=2),
    "dp4": dict(data_parallel_size=4),
    "tp2": dict(tensor_parallel_size=2),
    "pp2": dict(pipeline_parallel_size=2),
    "tp2dp2": dict(tensor_parallel_size=2, data_parallel_size=2),
    "pp2dp2": dict(pipeline_parallel_size=2, data_parallel_size=2),
}
PARAMS = [
    SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=80, ignore_eos=True) for index in range(8)
]
REPLACED, RESTARTED = "failed ranks are replaced", "the engine is restarted"
SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("mixtral")


class Run:
    """Requests of an engine whose processes fail meanwhile."""

    def __init__(self, llm: LLM, reference: Reference) -> None:
        self.llm = llm
        self.prompts = reference.prompts(9, 20, 3, 14, 7, 30, 11, 5)
        self.expected = [each.outputs[0].token_ids for each in llm.generate(self.prompts, PARAMS, use_tqdm=False)]
        self.gaps: list[float] = []

    def with_failure(self, fail: Callable[[], object], num_tokens: int = 1) -> None:
        """Call `fail` after some tokens, and check that all requests complete with the same tokens."""
        streams = [self.llm.stream(prompt, each) for prompt, each in zip(self.prompts, PARAMS, strict=True)]
        found = [next(stream).outputs[0] for stream in streams]
        while len(found[0].token_ids) < num_tokens:  # an output may have several new tokens
            found[0] = next(streams[0]).outputs[0]
        fail()
        arrivals = [time.monotonic()]
        for index, stream in enumerate(streams):
            for output in stream:
                arrivals.append(time.monotonic())
                found[index] = output.outputs[0]
        assert [output.token_ids for output in found] == self.expected
        assert {output.finish_reason for output in found} == {"length"}
        self.gaps.append(max((later - earlier for earlier, later in pairwise(arrivals)), default=0.0))


def ranks_by_number() -> dict[int, psutil.Process]:
    return {int(process.name().split()[1]): process for process in living_ranks()}


def assert_replaced(before: dict[int, psutil.Process], lost: set[int]) -> None:
    """Check that these ranks are new processes, and that all others are the same as before."""
    after = ranks_by_number()
    assert before.keys() == after.keys()
    assert {rank for rank in before if before[rank].pid != after[rank].pid} == lost
    assert_gone([before[rank] for rank in lost])


@pytest.mark.slow_but("dp2]", "tp2]")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_rank_is_replaced_and_no_other(
    reference: Reference, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], layout: str
) -> None:
    with LLM(reference.folder, **LAYOUTS[layout], **SETTINGS) as llm:
        run = Run(llm, reference)
        for rank in ranks_by_number():
            before = ranks_by_number()
            capfd.readouterr()
            run.with_failure(before[rank].kill, num_tokens=5 * rank + 1)
            assert_replaced(before, {rank})
            assert f"rank {rank} (replica" in caplog.messages[-1]
            assert caplog.messages[-1].startswith(REPLACED)
        run.with_failure(lambda: None)
    assert len(caplog.messages) == len(before)


# Points of a step at which a rank fails; see `planted.py`.
POINTS = ["step", "agreement", "attention", "router", "dispatch", "wait", "experts", "combine", "logits", "replayed"]
FAULTS = [
    *((point, "kill", 2) for point in POINTS),
    *((point, "kill", rank) for point in ("wait", "replayed") for rank in (0, 1, 3)),
    ("experts", "divide", 1),
    ("experts", "stop", 2),
    ("attention", "loop_natively", 3),
]


@pytest.mark.slow_but("dispatch-kill-2]", "divide")
@pytest.mark.parametrize(("point", "action", "rank"), FAULTS)
def test_a_rank_that_fails_in_a_step_is_replaced(
    reference: Reference,
    plant: Callable[..., Planted],
    caplog: pytest.LogCaptureFixture,
    point: str,
    action: str,
    rank: int,
) -> None:
    planted = plant(rank=rank, point=point, action=action)
    with LLM(reference.folder, **LAYOUTS["tp2dp2"], **SETTINGS, enforce_eager=point != "replayed") as llm:
        run = Run(llm, reference)
        before = ranks_by_number()
        run.with_failure(planted.trigger)
        assert_replaced(before, {rank})
    (message,) = caplog.messages
    assert message.startswith(REPLACED)
    assert f"rank {rank} (replica {rank // 2}" in message


def test_ranks_that_fail_together_are_replaced_together(reference: Reference, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(reference.folder, **LAYOUTS["tp2dp2"], **SETTINGS) as llm:
        run = Run(llm, reference)
        before = ranks_by_number()
        run.with_failure(lambda: [before[rank].kill() for rank in (1, 2)])
        assert_replaced(before, {1, 2})
    assert caplog.messages[0].startswith(REPLACED)
    assert all(message.startswith("further ranks are replaced") for message in caplog.messages[1:])


def test_a_killed_engine_of_a_replica_is_replaced_with_its_ranks(
    reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(reference.folder, **LAYOUTS["tp2dp2"], **SETTINGS) as llm:
        run = Run(llm, reference)
        before = ranks_by_number()
        engine = llm.core.replicas[1].handle  # type: ignore[attr-defined]
        run.with_failure(engine.kill)
        assert_replaced(before, {2, 3})
    (message,) = caplog.messages
    assert "engine of replica 1: killed by SIGKILL" in message


def test_an_idle_engine_recovers_with_the_next_request(reference: Reference) -> None:
    with LLM(reference.folder, **LAYOUTS["dp2"], **SETTINGS) as llm:
        run = Run(llm, reference)
        before = ranks_by_number()
        before[1].kill()
        assert_gone([before[1]])
        run.with_failure(lambda: None)
        assert_replaced(before, {1})


@pytest.mark.slow_but("recover-mixtral", "shrink-mixtral")
@pytest.mark.parametrize("name", ["mixtral", "jamba"])  # the second has recurrent states
@pytest.mark.parametrize("on_failure", ["recover", "shrink"])
def test_survivors_keep_their_cached_prefixes(
    reference_named: Callable[[str], Reference], name: str, on_failure: str
) -> None:
    reference = reference_named(name)
    prompts = reference.prompts(*range(66, 74))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(reference.folder, data_parallel_size=3, **SETTINGS | dict(on_failure=on_failure)) as llm:
        before = llm.generate(prompts, params, use_tqdm=False)
        lost = ranks_by_number()[1]
        lost.kill()
        assert_gone([lost])
        after = llm.generate(prompts, params, use_tqdm=False)
        fresh = llm.generate(reference.prompts(70, seed=9), params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in after] == [each.outputs[0].token_ids for each in before]
    hits = [each.num_cached_tokens > 0 for each in after]
    assert 0 < sum(hits) < len(hits)  # the prompts of the lost replica are computed again
    assert fresh[0].num_cached_tokens == 0


@pytest.mark.parametrize("action", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_rank_that_fails_during_a_recovery_is_replaced_too(
    reference: Reference, plant: Callable[..., Planted], caplog: pytest.LogCaptureFixture, action: str
) -> None:
    """The new rank fails while it loads. If it is stopped, its heartbeat stands."""
    planted = plant(rank=1, point="loading", action=action)
    with LLM(reference.folder, **LAYOUTS["dp2"], **SETTINGS) as llm:
        run = Run(llm, reference)
        before = ranks_by_number()

        def kill() -> None:
            planted.trigger()
            before[1].kill()

        run.with_failure(kill)
        assert run.gaps[-1] < 15.0
        assert_replaced(before, {1})
    first, second = caplog.messages
    assert first.startswith(REPLACED)
    assert re.match(r"further ranks are replaced: rank 1 .*(killed|stopped)", second)


def test_all_ranks_are_started_again_if_experts_may_have_moved(
    reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    moving = dict(rebalance="auto", num_redundant_experts=2)
    with LLM(reference.folder, **LAYOUTS["dp2"], **SETTINGS, **moving) as llm:
        run = Run(llm, reference)
        before = ranks_by_number()
        run.with_failure(before[1].kill)
        assert_replaced(before, {0, 1})
    reason, restarted = caplog.messages
    assert "rebalance" in reason
    assert restarted.startswith(RESTARTED)


@pytest.mark.slow
def test_files_that_have_changed_are_never_loaded_beside_old_weights(
    reference: Reference, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(reference.folder, folder)
    with LLM(folder, **LAYOUTS["dp2"], **SETTINGS) as llm:
        run = Run(llm, reference)
        before = ranks_by_number()

        def change_and_kill() -> None:
            config = folder / "config.json"
            config.write_text(config.read_text() + "\n")
            before[1].kill()

        with pytest.raises(EngineError, match=r"config\.json"):
            run.with_failure(change_and_kill)


@pytest.mark.parametrize("num_kills", [pytest.param(30, marks=pytest.mark.slow), pytest.param(2000, marks=SOAK)])
@pytest.mark.parametrize("layout", ["dp4", "tp2dp2"])
def test_many_failures_leave_nothing_behind(reference: Reference, num_kills: int, layout: str) -> None:
    """Processes of ranks and engines, the user's process, and the process of the fork server."""
    dice = random.Random(1)

    def resources() -> dict[str, tuple[int, int]]:
        processes = [me, *me.children(recursive=True)]
        return {f"{each.name()} {each.pid}": (each.num_fds(), each.num_threads()) for each in processes}

    with LLM(reference.folder, **LAYOUTS[layout], **SETTINGS) as llm:
        run, me = Run(llm, reference), psutil.Process()
        survivor = ranks_by_number()[0]
        run.with_failure(ranks_by_number()[1].kill)
        before = resources()
        for _ in range(num_kills):
            victim, action = ranks_by_number()[dice.randrange(1, 4)].pid, dice.choice([signal.SIGKILL, signal.SIGTERM])
            run.with_failure(functools.partial(os.kill, victim, action), num_tokens=1 + dice.randrange(40))
        after = resources()
        assert ranks_by_number()[0].pid == survivor.pid
    for name in before.keys() & after.keys():
        assert all(now <= then + 3 for now, then in zip(after[name], before[name], strict=True)), (name, before, after)
    gaps = sorted(run.gaps)
    print(f"{layout}: gap p50 {gaps[len(gaps) // 2]:.2f} s, longest {gaps[-1]:.2f} s", file=sys.stderr)


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["dp4", "tp2dp2"])
def test_the_longest_gap_of_tokens_by_fault(reference: Reference, layout: str) -> None:
    """Measures only. Prints the figures of docs/parallelism.md."""
    dice = random.Random(1)

    def signal_one(number: signal.Signals) -> None:
        os.kill(ranks_by_number()[dice.randrange(4)].pid, number)

    with LLM(reference.folder, **LAYOUTS[layout], **SETTINGS) as llm:
        run = Run(llm, reference)

        def kill_an_engine() -> None:
            dice.choice(llm.core.replicas).handle.kill()  # type: ignore[attr-defined]

        faults: dict[str, Callable[[], object]] = {
            "no fault": lambda: None,
            "a rank is killed": lambda: signal_one(signal.SIGKILL),
            "the engine of a replica is killed": kill_an_engine,
            "a rank is stopped": lambda: signal_one(signal.SIGSTOP),
        }
        for name, fail in faults.items():
            run.gaps.clear()
            for _ in range(9):
                run.with_failure(fail, num_tokens=1 + dice.randrange(40))
            gaps = sorted(run.gaps)
            load = os.getloadavg()[0]
            print(
                f"{layout}, {name}: median {gaps[4]:.2f} s, longest {gaps[8]:.2f} s, load {load:.0f}", file=sys.stderr
            )
