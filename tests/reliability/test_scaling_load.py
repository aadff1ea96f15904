"""Replicas that are added, removed and killed under constant load: every request has the tokens of a fixed engine."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from constant_load import Load
from hosts import hosts, why_impossible
from rank_processes import assert_gone, living_ranks
from ray_clusters import PRIORITY, ray_with_cpus
from reference_models import Reference

from moeserve import LLM
from moeserve.errors import ScaleError

pytestmark = pytest.mark.ranks

SETTINGS: dict[str, Any] = dict(
    dtype="float32", max_model_len=256, kv_cache_memory="8MiB", max_num_seqs=8, num_threads=1
)
NUM_UPDATES = 10  # while the size changes: more than can be on their way, and far fewer than there are
SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]
# Far more than two sizes need: Ray may notice late that a killed process has ended.
RAY_CPUS = 32


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("mixtral")


@contextlib.contextmanager
def serving(executor: str, reference: Reference, num_replicas: int, **settings: Any) -> Iterator[tuple[LLM, Load]]:
    """Give an engine that serves constant load."""
    must_start_ray = executor == "ray" and "RAY_ADDRESS" not in os.environ
    with (
        ray_with_cpus(RAY_CPUS) if must_start_ray else contextlib.nullcontext(),
        LLM(reference.folder, data_parallel_size=num_replicas, executor=executor, **SETTINGS | settings) as llm,
        Load(llm, reference) as load,
    ):
        yield llm, load


def members() -> set[psutil.Process]:
    """Return the processes of ranks and of replicas' engines: two for each replica."""
    names = ("rank ", "engine of", "ray::RankActor", "ray::EngineActor")
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and process.name().startswith(names):
                found.add(process)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["mp", pytest.param("ray", marks=SOAK)])
def test_sizes_change_under_load(reference: Reference, executor: str) -> None:
    with serving(executor, reference, 1) as (llm, load):
        for size in (2, 4, 2, 1):
            before = living_ranks()
            begun = time.monotonic()
            llm.scale(size)
            seconds = time.monotonic() - begun
            assert llm.config.parallel.data_parallel_size == len(llm.core.replica_stats) == size
            assert_gone(before)
            load.wait_for(8)
            num_updates = sum(begun < each < begun + seconds for each in load.updates)
            print(
                f"{executor}: {size} replicas after {seconds:.2f} s with {num_updates} updates meanwhile, "
                f"longest pause {load.longest_pause_s(begun):.3f} s"
            )
            assert num_updates > NUM_UPDATES


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_sizes_change_under_load_on_two_hosts(tmp_path: Path) -> None:
    """The other test runs on the first host, in a cluster where both sizes need the CPUs of both hosts."""
    if reason := why_impossible():
        pytest.skip(reason)
    test = f"{__file__}::{test_sizes_change_under_load.__name__}[ray]"
    with hosts(2) as machines:
        launch = [sys.executable, "-m", "moeserve", "launch", "--num-cpus", "3", "--nodes", "2"]
        launch += ["--head", machines[0].address, "--", sys.executable, "-m", "pytest", "-q", "-s", "-m", "soak", test]
        shared_token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
        environment = {"OMP_NUM_THREADS": "1"} | PRIORITY | shared_token
        logs = [tmp_path / host.address for host in machines]
        launched, _ = [host.start(launch, log, **environment) for host, log in zip(machines, logs, strict=True)]
        status = launched.wait()
        output = logs[0].read_text()
        print(output)
    assert status == 0
    for host in machines:
        assert f"0   0  {host.address}  1 thread" in output


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_ray_cluster_without_room_refuses_a_change(reference: Reference) -> None:
    with ray_with_cpus(2):
        llm = LLM(reference.folder, data_parallel_size=1, executor="ray", **SETTINGS)
        with llm, Load(llm, reference) as load:
            with pytest.raises(ScaleError, match="room"):
                llm.scale(2)
            assert llm.config.parallel.data_parallel_size == 1
            load.wait_for(4)


@pytest.mark.parametrize(
    ("executor", "victims", "on_failure", "num_faults"),
    [
        ("mp", "all", "restart", 4),
        pytest.param("mp", "all", "restart", 50, marks=SOAK),
        pytest.param("ray", "new", "restart", 20, marks=SOAK),
        pytest.param("ray", "old", "restart", 20, marks=SOAK),
        pytest.param("ray", "old", "shrink", 20, marks=SOAK),
    ],
)
def test_random_faults_while_the_size_changes(
    reference: Reference, executor: str, victims: str, on_failure: str, num_faults: int
) -> None:
    """A process of the old or of the new replicas is killed at a random moment."""
    dice = random.Random(1)
    num_refused = num_killed = 0
    with serving(executor, reference, 1, on_failure=on_failure) as (llm, load):
        begun = time.monotonic()
        llm.scale(2)
        longest_delay_s = time.monotonic() - begun
        for _ in range(num_faults):
            before = llm.config.parallel.data_parallel_size
            after = dice.choice([size for size in (1, 2, 3) if size != before])
            wait_until(lambda size=before: len(members()) == 2 * size)  # type: ignore[misc]
            old = members()
            delay_s = dice.uniform(0.0, longest_delay_s)
            is_over = threading.Event()
            killed: list[str] = []

            def kill(
                delay_s: float = delay_s,
                old: set[psutil.Process] = old,
                is_over: threading.Event = is_over,
                killed: list[str] = killed,
            ) -> None:
                time.sleep(delay_s)
                while not killed and not is_over.is_set():
                    found = members()
                    wanted = {"all": found, "old": found & old, "new": found - old}[victims]
                    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                        victim = dice.choice(sorted(wanted, key=lambda process: process.pid))
                        name = victim.name()
                        victim.kill()
                        killed.append(name)

            killer = threading.Thread(target=kill)
            killer.start()
            is_refused = False
            begun = time.monotonic()
            try:
                llm.scale(after)
            except ScaleError:
                is_refused = True
            is_over.set()
            killer.join()
            load.wait_for(6)
            found_size = llm.config.parallel.data_parallel_size
            print(
                f"{before} -> {after}: {killed or 'nothing'} killed after {delay_s:.2f} s, {found_size} replicas, "
                f"longest pause {load.longest_pause_s(begun):.2f} s",
                flush=True,
            )
            num_refused += is_refused
            num_killed += len(killed)
            sizes = {before, after} | ({max(1, before - 1), max(1, after - 1)} if on_failure == "shrink" else set())
            assert found_size in sizes
            if victims == "new" and is_refused:
                wait_until(lambda old=old: members() == old)  # type: ignore[misc]
        left = members()
    print(f"{num_killed} of {num_faults} killed, {num_refused} changes were refused")
    assert_gone(list(left), seconds=60.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "num_kills"),
    [("mp", 3), pytest.param("mp", 50, marks=SOAK), pytest.param("ray", 20, marks=SOAK)],
)
def test_shrink_drops_killed_replicas(reference: Reference, executor: str, num_kills: int) -> None:
    dice = random.Random(2)
    with serving(executor, reference, 3, on_failure="shrink") as (llm, load):
        for _ in range(num_kills):
            before = llm.config.parallel.data_parallel_size
            begun = time.monotonic()
            dice.choice(living_ranks()).kill()
            load.wait_for(8)
            after = llm.config.parallel.data_parallel_size
            print(f"{before} -> {after}: longest pause {load.longest_pause_s(begun):.2f} s", flush=True)
            assert after == max(1, before - 1)
            if after == 1:
                llm.scale(3)
                load.wait_for(2)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
