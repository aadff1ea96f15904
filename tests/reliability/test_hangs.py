"""Ranks that are stopped or hang: which one is named, how soon, and that slow ranks are no failures.

The rule itself is tested in tests/unit/test_hang_watch.py, with records that are made up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planted import Planted
from rank_processes import living_ranks
from reference_models import SHAPES, Reference, Shape, make_reference

from moeserve import LLM, EngineError, SamplingParams
from moeserve.machine import usable_cores

pytestmark = pytest.mark.ranks

SETTINGS: dict[str, Any] = dict(dtype="float32", max_model_len=256, kv_cache_memory="8MiB", max_num_seqs=8)
TWO_BY_TWO: dict[str, Any] = dict(tensor_parallel_size=2, data_parallel_size=2)
STAGES: dict[str, Any] = dict(pipeline_parallel_size=2, data_parallel_size=2)
PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
# The longest that the rule waits is 8 s. More is for cores that the ranks of other tests take.
NOTICED_S = 10.0  # with a core for each thread that could run


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("mixtral")


def tokens_with_a_fault(llm: LLM, reference: Reference, fail: Callable[[], object]) -> list[list[int]]:
    """Return the tokens of several streams, and call `fail` once each has given some."""
    prompts = reference.prompts(9, 20, 3, 14)
    streams = [llm.stream(prompt, PARAMS) for prompt in prompts]
    for stream in streams:
        next(stream)
    fail()
    return [list(stream)[-1].outputs[0].token_ids for stream in streams]


FAULTS = [
    ("experts", "stop", 2, TWO_BY_TWO),
    ("step", "stop", 1, TWO_BY_TWO),
    ("experts", "loop", 1, TWO_BY_TWO),
    ("experts", "loop_natively", 3, TWO_BY_TWO),
    ("wait", "loop_in_a_collective", 2, TWO_BY_TWO),
    ("replayed", "loop_natively", 1, TWO_BY_TWO),
    ("attention", "loop_natively", 3, STAGES),
]


@pytest.mark.slow_but("experts-loop-")
@pytest.mark.parametrize(
    ("point", "action", "rank", "layout"), FAULTS, ids=[f"{point}-{action}-{rank}" for point, action, rank, _ in FAULTS]
)
def test_a_stopped_or_hung_rank_is_named_and_requests_continue(
    reference: Reference,
    plant: Callable[..., Planted],
    caplog: pytest.LogCaptureFixture,
    point: str,
    action: str,
    rank: int,
    layout: dict[str, Any],
) -> None:
    planted = plant(rank=rank, point=point, action=action)
    with LLM(reference.folder, **layout, **SETTINGS, enforce_eager=point != "replayed") as llm:
        found = tokens_with_a_fault(llm, reference, planted.trigger)
        expected = tokens_with_a_fault(llm, reference, lambda: None)
    (message,) = caplog.messages
    assert f"rank {rank} (replica {rank // 2}" in message
    assert [name for name in map("rank {} (".format, range(4)) if name in message] == [f"rank {rank} ("], message
    assert ("stopped" if action == "stop" else "hangs") in message
    seconds = caplog.records[0].created - (planted.folder / "done").stat().st_mtime
    print(f"{point}, {action}: named after {seconds:.1f} s", file=sys.stderr)
    assert seconds <= NOTICED_S * max(1.0, os.getloadavg()[0] / usable_cores())
    assert found == expected


def test_a_stopped_engine_of_a_replica_is_named(reference: Reference) -> None:
    with LLM(reference.folder, data_parallel_size=2, on_failure="end", **SETTINGS) as llm:
        engine = llm.core.replicas[1].handle  # type: ignore[attr-defined]
        with pytest.raises(EngineError, match=r"engine of replica 1: stopped"):
            tokens_with_a_fault(llm, reference, lambda: os.kill(engine.pid, signal.SIGSTOP))


SOAK = pytest.mark.soak


def assert_no_alarm(
    reference: Reference, caplog: pytest.LogCaptureFixture, disturb: Callable[[], object], **settings: Any
) -> float:
    """Check that streams have the same bytes with a disturbance as without. Return the seconds of the former."""
    with LLM(reference.folder, **TWO_BY_TWO, **SETTINGS | settings) as llm:
        began = time.monotonic()
        found = tokens_with_a_fault(llm, reference, disturb)
        seconds = time.monotonic() - began
        assert found == tokens_with_a_fault(llm, reference, lambda: None)
    assert caplog.messages == []
    return seconds


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_two_seconds_is_no_failure(
    reference: Reference, plant: Callable[..., Planted], caplog: pytest.LogCaptureFixture
) -> None:
    planted = plant(rank=2, point="step", action="stop")

    def stop_and_continue() -> None:
        planted.trigger()
        awaits, resumes = f"while ! test -e {planted.folder}/done", f"kill -CONT `cat {planted.folder}/pid`"
        subprocess.Popen(["sh", "-c", f"{awaits}; do sleep 0.1; done; sleep 2; {resumes}"])

    assert assert_no_alarm(reference, caplog, stop_and_continue, enforce_eager=True) >= 2.0


# A step is longer than any rank may be without progress (8 s), but no layer is.
@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "num_steps"), [(2, 3), (5, 1), pytest.param(15, 2, marks=SOAK)])
def test_slow_layers_are_no_failure(
    reference_named: Callable[[str], Reference],
    tmp_path: Path,
    plant: Callable[..., Planted],
    caplog: pytest.LogCaptureFixture,
    num_layers: int,
    num_steps: int,
) -> None:
    """Each layer of some steps of one rank sleeps for 2 s."""
    own = Shape("Mixtral", SHAPES["mixtral"].settings | dict(num_hidden_layers=num_layers), seed=5)
    reference = reference_named("mixtral") if num_layers == 2 else make_reference(tmp_path / "deep", own)
    planted = plant(rank=2, point="experts", action="doze", num_calls=num_layers, num_steps=num_steps)
    seconds = assert_no_alarm(reference, caplog, planted.trigger, enforce_eager=True)
    assert seconds >= 2.0 * num_layers * num_steps


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [6, pytest.param(15, marks=SOAK)])
def test_a_reader_that_was_stopped_blames_no_rank(
    reference: Reference, caplog: pytest.LogCaptureFixture, seconds: int
) -> None:
    def stop_myself() -> None:
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    assert assert_no_alarm(reference, caplog, stop_myself) > seconds - 1.0


@pytest.mark.parametrize("seconds", [pytest.param(10, marks=pytest.mark.slow), pytest.param(120, marks=SOAK)])
def test_a_busy_machine_is_no_failure(reference: Reference, caplog: pytest.LogCaptureFixture, seconds: int) -> None:
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(4 * (os.cpu_count() or 1))]
    try:
        with LLM(reference.folder, **TWO_BY_TWO, **SETTINGS) as llm:
            deadline = time.monotonic() + seconds
            first = tokens_with_a_fault(llm, reference, lambda: None)
            while time.monotonic() < deadline:
                assert tokens_with_a_fault(llm, reference, lambda: None) == first
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert caplog.messages == []
    assert living_ranks() == []
