"""Ranks as on a POSIX system other than Linux: no pidfds, fork server, memfds, futexes or abstract names of sockets."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import other_system
import pytest
from rank_processes import assert_gone, living_ranks, shared_memory_of
from ranks import Place, Ranks
from reference_models import Reference
from test_shared_memory import SMALL_SLOTS, USUAL_SLOTS, exchange_until_it_fails, extra_seconds, wait_until

from moeserve import LLM, EngineError, SamplingParams
from moeserve.processes.local import SpawnedProcess

SETTINGS: dict[str, Any] = dict(
    kv_cache_memory="8MiB", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, dtype="float32"
)


def run(ranks: Ranks, num_ranks: int, function: str, **arguments: Any) -> list[Any]:
    """Run a function of another test on ranks of another system."""
    return ranks.run(num_ranks, "other_system:call", within_s=120, target=function, arguments=arguments)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, also of processes that start later."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}])
def test_an_engine_gives_the_tokens_of_transformers_and_leaves_nothing(
    layout: dict[str, int],
    reference_named: Callable[[str], Reference],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = reference_named("mixtral")
    prompts = reference.prompts(3, 20, 33)
    for name, value in other_system.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    other_system.pretend(monkeypatch)
    with LLM(reference.folder, **layout, **SETTINGS) as llm:
        (engine, *_) = llm.core.replicas  # type: ignore[attr-defined]
        assert isinstance(engine.handle, SpawnedProcess)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        processes = living_ranks()
        assert len(processes) == 2
        for process in processes:  # it shares memory
            assert "/dev/shm/moeserve-" in Path(f"/proc/{process.pid}/maps").read_text()
    assert [output.outputs[0].token_ids for output in outputs] == reference.continuations(prompts, 12)
    assert_gone(processes)
    assert shared_memory_of(process.pid for process in processes) == []
    assert list(folder.glob("moeserve-*")) == []  # files of sockets


@pytest.mark.slow
def test_a_killed_rank_ends_the_requests_and_is_named(
    reference_named: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_named("mixtral")
    for name, value in other_system.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    other_system.pretend(monkeypatch)
    with LLM(reference.folder, tensor_parallel_size=2, on_failure="end", **SETTINGS) as llm:
        processes = living_ranks()
        stream = llm.stream(reference.prompts(5)[0], SamplingParams(temperature=0, max_tokens=200))
        next(stream)
        next(process for process in processes if process.name().startswith("rank 1")).kill()
        with pytest.raises(EngineError, match=r"rank 1 .*killed by SIGKILL"):
            list(stream)
    assert_gone(processes)


@pytest.mark.parametrize(
    ("num_ranks", "num_calls", "largest", "slots"), [(2, 150, 3000, USUAL_SLOTS), (3, 100, 300, SMALL_SLOTS)]
)
def test_bytes_are_those_of_gloo(
    ranks: Ranks, num_ranks: int, num_calls: int, largest: int, slots: dict[str, int]
) -> None:
    arguments = dict(seed=num_ranks, num_calls=num_calls, largest=largest, slots=slots)
    run(ranks, num_ranks, "test_shared_memory:compare_with_gloo", **arguments)


def test_overlapping_collectives_of_slow_ranks(ranks: Ranks) -> None:
    arguments = dict(seed=4, num_calls=200, slots=SMALL_SLOTS, delay_s=0.02)
    assert min(run(ranks, 4, "test_shared_memory:overlap", **arguments)) > 100


def test_a_napping_rank_takes_no_core(ranks: Ranks) -> None:
    _, (used, waited, sleeps) = run(ranks, 2, "test_shared_memory:wait_for_a_late_rank", seconds=1.5)
    assert waited > 1.4
    assert used / waited < 0.1
    assert sleeps < waited / 1e-3  # naps of up to 2 ms; shorter ones follow each check of the connections


def test_a_napping_rank_notices_data_soon(ranks: Ranks) -> None:
    """Another program may delay it, so it may try three times."""
    tries = (run(ranks, 3, "test_shared_memory:wake_sleeping_ranks", num_calls=15) for _ in range(3))
    assert any(extra_seconds(seconds) < 0.005 for seconds in tries)


def test_ctrl_c_ends_a_nap(ranks: Ranks) -> None:
    assert run(ranks, 2, "test_shared_memory:interrupt_a_wait") == [[0, 1]] * 2


@pytest.mark.slow
def test_a_killed_rank_is_noticed_and_leaves_no_file(folder: Path) -> None:
    (folder / "begun").mkdir()
    own = Ranks()  # whose temporary files are in this folder
    try:
        begin = own.start(3, "other_system:call", target="test_other_systems:exchange", arguments=dict(seed=0))
        wait_until(lambda: len(os.listdir(folder / "begun")) == 3)
        time.sleep(random.Random(0).random() * 0.3)
        begin.processes[1].kill()
        outcomes = begin.outcomes()
        for rank in (0, 2):
            assert "No failure report from rank 1:" in outcomes[rank].value, outcomes[rank]
        assert list(folder.glob("moeserve-*")) == []  # files of sockets
        assert shared_memory_of(process.pid for process in begin.processes) == []
    finally:
        own.close()


def exchange(place: Place, seed: int) -> str:
    """Exchange until a rank is killed. Return the error."""
    message: str = exchange_until_it_fails(place, seed, f"{os.environ['TMPDIR']}/begun")[0]
    return message
