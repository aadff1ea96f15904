"""Ranks in actors of Ray that are stopped or hang: which one is named, and how soon. See `test_hangs.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planted import Planted
from ray_clusters import ray_with_cpus
from reference_models import Reference
from test_hangs import NOTICED_S, tokens_with_a_fault

from moeserve import LLM, EngineError
from moeserve.machine import usable_cores

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = dict(
    executor="ray",
    tensor_parallel_size=2,
    expert_parallel=True,
    num_threads=1,
    enforce_eager=True,
    dtype="float32",
    max_model_len=256,
    kv_cache_memory="8MiB",
    max_num_seqs=8,
)
HOOK = "planted.plant_in_actors"
STOPPED = "(stopped|no answer for 7 s)"  # whichever is noticed first


@pytest.fixture(autouse=True)
def hook_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("mixtral")


def check_time(planted: Planted, noticed_s: float, what: str) -> None:
    """Check that a fault was noticed soon. `noticed_s` is a time of `time.time`."""
    seconds = noticed_s - (planted.folder / "done").stat().st_mtime
    print(f"{what}: named after {seconds:.1f} s", file=sys.stderr)
    assert seconds <= NOTICED_S * max(1.0, os.getloadavg()[0] / usable_cores())


@pytest.mark.parametrize(
    ("point", "action", "verdict"),
    [("experts", "loop", "hangs"), ("wait", "loop_as_if_waiting", "hangs"), ("experts", "loop_natively", STOPPED)],
)
def test_a_rank_that_hangs_is_named(
    reference: Reference, plant: Callable[..., Planted], point: str, action: str, verdict: str
) -> None:
    """No call of an actor is answered while native code has Python's lock: it counts as stopped, but later."""
    planted = plant(rank=1, point=point, action=action)
    with ray_with_cpus(2, worker_process_setup_hook=HOOK), LLM(reference.folder, on_failure="end", **SETTINGS) as llm:
        with pytest.raises(EngineError, match=rf"in flight: rank 1 \(replica 0, tp 1\) on node [0-9.]+: {verdict}"):
            tokens_with_a_fault(llm, reference, planted.trigger)
        check_time(planted, time.time(), action)


def test_requests_of_a_stopped_rank_continue(
    reference: Reference, plant: Callable[..., Planted], caplog: pytest.LogCaptureFixture
) -> None:
    planted = plant(rank=0, point="step", action="stop")
    with ray_with_cpus(2, worker_process_setup_hook=HOOK), LLM(reference.folder, **SETTINGS) as llm:
        found = tokens_with_a_fault(llm, reference, planted.trigger)
        expected = tokens_with_a_fault(llm, reference, lambda: None)
    (message,) = caplog.messages
    assert "rank 0 (replica 0, tp 0) on node" in message
    assert re.search(STOPPED, message)
    check_time(planted, caplog.records[0].created, "stop")
    assert found == expected


def test_a_rank_that_is_stopped_for_five_seconds_is_no_failure(
    reference: Reference, plant: Callable[..., Planted], caplog: pytest.LogCaptureFixture
) -> None:
    planted = plant(rank=1, point="step", action="stop")

    def stop_and_continue() -> None:
        planted.trigger()
        awaits, resumes = f"while ! test -e {planted.folder}/done", f"kill -CONT `cat {planted.folder}/pid`"
        subprocess.Popen(["sh", "-c", f"{awaits}; do sleep 0.1; done; sleep 5; {resumes}"])

    with ray_with_cpus(2, worker_process_setup_hook=HOOK), LLM(reference.folder, **SETTINGS) as llm:
        tokens_with_a_fault(llm, reference, stop_and_continue)
    assert planted.seconds_since() >= 5.0
    assert caplog.messages == []
