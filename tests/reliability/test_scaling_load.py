"""Replicas that are added, removed and killed under constant load: every request has the tokens of a fixed engine."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from rank_processes import assert_gone, living_ranks
from ray_clusters import ray_with_cpus
from reference_models import Reference

from moeserve import LLM, SamplingParams
from moeserve.errors import ScaleError

pytestmark = pytest.mark.ranks

SETTINGS: dict[str, Any] = dict(
    dtype="float32", max_model_len=256, kv_cache_memory="8MiB", max_num_seqs=8, num_threads=1, executor="mp"
)
NUM_TOKENS = 60
LONGEST_PAUSE_S = 5.0  # far more than a change takes on a machine that does nothing else
SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]


class Load:
    """Requests that follow each other in several threads until the end of the context. All outputs are checked."""

    def __init__(self, llm: LLM, reference: Reference, num_threads: int = 4) -> None:
        self.llm = llm
        self.prompts = reference.prompts(*[3, 17, 9, 30], seed=2)
        self.params = [
            SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=NUM_TOKENS, ignore_eos=True)
            for index in range(len(self.prompts))
        ]
        outputs = llm.generate(self.prompts, self.params, use_tqdm=False)
        self.expected = [output.outputs[0].token_ids for output in outputs]
        self.num_ended = 0
        self.updates: list[float] = []  # when they came
        self._num_threads = num_threads
        self._has_ended = threading.Event()

    def __enter__(self) -> Load:
        self._threads = ThreadPoolExecutor(self._num_threads)
        self._results = [self._threads.submit(self._run, index) for index in range(self._num_threads)]
        self.wait_for(2)
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._threads.shutdown()
        for result in self._results:
            result.result()

    def wait_for(self, num_requests: int) -> None:
        """Wait until further requests have ended."""
        target = self.num_ended + num_requests
        while self.num_ended < target:
            assert not any(result.done() for result in self._results), [each.exception() for each in self._results]
            time.sleep(0.01)

    def longest_pause_s(self, since: float) -> float:
        """Return the longest time without any update."""
        times = [since, *(each for each in self.updates if each > since)]
        return max(after - before for before, after in itertools.pairwise(times))

    def _run(self, index: int) -> None:
        while not self._has_ended.is_set():
            index = (index + 1) % len(self.prompts)
            token_ids: list[int] = []
            for output in self.llm.stream(self.prompts[index], self.params[index]):
                found = output.outputs[0].token_ids
                assert found[: len(token_ids)] == token_ids
                token_ids = found
                self.updates.append(time.monotonic())
            assert token_ids == self.expected[index]
            self.num_ended += 1


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("mixtral")


def check_sizes(llm: LLM, reference: Reference, longest_s: float) -> None:
    with llm, Load(llm, reference) as load:
        for size in (2, 4, 2, 1):
            before = living_ranks()
            begun = time.monotonic()
            llm.scale(size)
            seconds = time.monotonic() - begun
            assert llm.config.data_parallel_size == len(llm.core.replica_stats) == size
            assert_gone(before)
            load.wait_for(8)
            pause_s = load.longest_pause_s(begun)
            print(f"{size} replicas after {seconds:.2f} s, longest pause {pause_s:.3f} s")
            assert pause_s < longest_s


def test_sizes_change_under_load(reference: Reference) -> None:
    check_sizes(LLM(reference.folder, data_parallel_size=1, **SETTINGS), reference, LONGEST_PAUSE_S)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_sizes_change_under_load_on_ray(reference: Reference) -> None:
    with ray_with_cpus(6):
        settings = SETTINGS | {"executor": "ray"}
        check_sizes(LLM(reference.folder, data_parallel_size=1, **settings), reference, 30.0)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_ray_cluster_without_room_refuses_a_change(reference: Reference) -> None:
    with ray_with_cpus(2):
        llm = LLM(reference.folder, data_parallel_size=1, **SETTINGS | {"executor": "ray"})
        with llm, Load(llm, reference) as load:
            with pytest.raises(ScaleError, match="room"):
                llm.scale(2)
            assert llm.config.data_parallel_size == 1
            load.wait_for(4)


def children() -> list[psutil.Process]:
    """Return the processes of ranks and of replicas' engines."""
    found = psutil.Process().children(recursive=True)
    return [each for each in found if each.is_running() and each.name().startswith(("rank ", "engine of"))]


@pytest.mark.parametrize("num_faults", [4, pytest.param(50, marks=SOAK)])
def test_random_faults_while_the_size_changes(reference: Reference, num_faults: int) -> None:
    """A process of the old or of the new replicas is killed at a random moment."""
    dice = random.Random(1)
    refused = 0
    with (
        LLM(reference.folder, data_parallel_size=1, on_failure="restart", **SETTINGS) as llm,
        Load(llm, reference) as load,
    ):
        for _ in range(num_faults):
            before = llm.config.data_parallel_size
            after = dice.choice([size for size in (1, 2, 3) if size != before])
            delay_s = dice.uniform(0.0, 0.3)

            def kill(delay_s: float = delay_s) -> None:
                time.sleep(delay_s)
                with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                    dice.choice(children()).kill()

            killer = threading.Thread(target=kill)
            killer.start()
            try:
                llm.scale(after)
            except ScaleError:
                refused += 1
            killer.join()
            load.wait_for(6)
            assert llm.config.data_parallel_size in (before, after)
            assert len(living_ranks()) == llm.config.data_parallel_size
    print(f"{refused} of {num_faults} changes were refused")
    assert_gone(children())


@pytest.mark.parametrize("num_kills", [3, pytest.param(50, marks=SOAK)])
def test_shrink_drops_killed_replicas(reference: Reference, num_kills: int) -> None:
    dice = random.Random(2)
    with (
        LLM(reference.folder, data_parallel_size=3, on_failure="shrink", **SETTINGS) as llm,
        Load(llm, reference) as load,
    ):
        for _ in range(num_kills):
            before = llm.config.data_parallel_size
            os.kill(dice.choice(living_ranks()).pid, signal.SIGKILL)
            load.wait_for(8)
            after = llm.config.data_parallel_size
            assert after == max(1, before - 1)
            if after == 1:
                llm.scale(3)
                load.wait_for(2)
