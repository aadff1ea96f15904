"""Ranks on several hosts, in a Ray cluster that `moeserve launch` makes: the tokens of one rank, and failures."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, hosts, why_impossible
from reference_models import Reference

pytestmark = pytest.mark.timeout(600)

PROGRAM = Path(__file__).parent / "node_program.py"
SETTINGS: dict[str, Any] = dict(
    kv_cache_memory="16MiB", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, dtype="float32"
)
CORES = 2  # of each host, as Ray is told
NUM_TOKENS = 8
LONG = 240  # tokens: for steps to be under way when something dies
SECONDS_TO_LAUNCH = 120
RANK, ENGINE = "ray::RankProcess", "ray::EngineProcess"


class Cluster:
    """Hosts with `moeserve launch` on each, and the program on the first."""

    def __init__(self, machines: list[Host], folder: Path) -> None:
        self.hosts = machines
        self._folder = folder
        self._orders = folder / "orders"
        self._answers = folder / "answers"
        os.mkfifo(self._orders)
        self._num_answers = 0
        program = [sys.executable, str(PROGRAM), str(self._orders), str(self._answers)]
        self._launch = [sys.executable, "-m", "moeserve", "launch", "--head", machines[0].address]
        self._launch += ["--nodes", str(len(machines)), "--num-cpus", str(CORES)]
        self.launches = [
            host.start([*self._launch, "--", *program], self.log(host), **_environment()) for host in machines
        ]
        self._pipe = os.open(self._orders, os.O_RDWR)  # does not wait for the reader

    def log(self, host: Host) -> Path:
        return self._folder / f"{host.address}.log"

    def tell(self, do: str, **order: Any) -> None:
        os.write(self._pipe, (json.dumps({"do": do} | order) + "\n").encode())

    def answer(self, seconds: float = SECONDS_TO_LAUNCH) -> dict[str, Any]:
        """The next one."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                lines = self._answers.read_text().splitlines()
                if len(lines) > self._num_answers:
                    self._num_answers += 1
                    found: dict[str, Any] = json.loads(lines[self._num_answers - 1])
                    return found
            assert self.launches[0].poll() is None, self.shown_logs()
            time.sleep(0.05)
        raise AssertionError(f"no answer within {seconds} s\n{self.shown_logs()}")

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        self.tell(do, **order)
        return self.answer()

    def shown_logs(self) -> str:
        return "\n".join(f"--- {host.address}\n{self.log(host).read_text()[-3000:]}" for host in self.hosts)

    def ranks(self, host: Host) -> list[str]:
        return [command for command in host.processes().values() if command.startswith(RANK)]

    def actors(self, host: Host) -> list[str]:
        return [command for command in host.processes().values() if command.startswith((RANK, ENGINE))]

    def wait_for(self, holds: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.shown_logs()
            time.sleep(0.1)

    def end(self) -> None:
        os.close(self._pipe)
        self.hosts[0].kill(str(PROGRAM))


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("deepseek-v3-four-heads")


@pytest.fixture(scope="module")
def namespaces() -> None:
    if reason := why_impossible():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, namespaces: None) -> Iterator[Cluster]:
    with hosts(3) as machines:
        cluster = Cluster(machines, tmp_path_factory.mktemp("cluster"))
        try:
            yield cluster
        finally:
            cluster.end()


@pytest.mark.usefixtures("namespaces")
def test_a_node_that_cannot_read_the_model_ends_the_launch_with_its_name(reference: Reference, tmp_path: Path) -> None:
    with hosts(2) as machines:
        hide = ["mount", "-t", "tmpfs", "none", str(reference.folder)]
        subprocess.run(machines[1].command(hide), check=True)
        launch = [sys.executable, "-m", "moeserve", "launch", "--head", machines[0].address, "--nodes", "2"]
        launch += ["--num-cpus", "1", "--model", str(reference.folder), "--", "false"]
        started = time.monotonic()
        logs = [tmp_path / host.address for host in machines]
        head, other = [host.start(launch, log, **_environment()) for host, log in zip(machines, logs, strict=True)]
        assert head.wait(60) == 1
        assert time.monotonic() - started < 45  # of these most go into starting Ray
        said = logs[0].read_text()
        assert f"node {machines[1].address} (host2) cannot read the model: " in said
        assert other.wait(60) == 0
        assert "the model cannot be read: " in logs[1].read_text()
        assert not any("ray" in command for host in machines for command in host.processes().values())


@contextlib.contextmanager
def engine(cluster: Cluster, reference: Reference, tp: int, dp: int, **settings: Any) -> Iterator[None]:
    layout = {"tensor_parallel_size": tp, "data_parallel_size": dp, "model": str(reference.folder)}
    started = cluster.ask("start", **SETTINGS | layout | settings)
    assert "error" not in started, started["error"] + cluster.shown_logs()
    try:
        yield
    finally:
        assert cluster.ask("stop").keys() == {"seconds"}
        cluster.wait_for(lambda: not any(cluster.actors(host) for host in cluster.hosts), 10)
        assert cluster.ask("groups")["groups"] == 0


def expected(reference: Reference, prompts: list[list[int]]) -> list[list[int]]:
    return [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(("tp", "threads", "is_compiled"), [(1, 2, True), (2, 1, False)])
def test_two_replicas_on_two_hosts_give_the_tokens_of_one_rank(
    cluster: Cluster, reference: Reference, tp: int, threads: int, is_compiled: bool
) -> None:
    prompts = reference.prompts(3, 40, 17, 24, 9, 31)
    with engine(cluster, reference, tp, 2, num_threads=threads, ray_compiled_graph=is_compiled):
        assert sorted(len(cluster.ranks(host)) for host in cluster.hosts) == [0, tp, tp]
        given = cluster.ask("generate", prompts=prompts, max_tokens=NUM_TOKENS)
        assert given["tokens"] == expected(reference, prompts)


@pytest.fixture(scope="module")
def three_replicas(cluster: Cluster, reference: Reference) -> Iterator[None]:
    with engine(cluster, reference, 1, 3, num_threads=2):
        yield


@pytest.mark.usefixtures("three_replicas")
def test_three_replicas_on_three_hosts_give_the_tokens_of_one_rank(cluster: Cluster, reference: Reference) -> None:
    prompts = reference.prompts(3, 40, 17, 24, 9, 31)
    assert [len(cluster.ranks(host)) for host in cluster.hosts] == [1, 1, 1]
    assert cluster.ask("generate", prompts=prompts, max_tokens=NUM_TOKENS)["tokens"] == expected(reference, prompts)


@pytest.mark.usefixtures("three_replicas")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))])
def test_a_slow_and_lossy_link_changes_no_token(cluster: Cluster, reference: Reference, seed: int) -> None:
    prompts = reference.prompts(3, 20, seed=seed)
    with cluster.hosts[1].bad_cable(delay_ms=2, loss=0.005, seed=seed):
        given = cluster.ask("generate", prompts=prompts, max_tokens=NUM_TOKENS)
    assert given.get("tokens") == expected(reference, prompts), given


def kill_rank(cluster: Cluster) -> None:
    assert cluster.hosts[-1].kill(RANK) == 1


def kill_engine(cluster: Cluster) -> None:
    assert cluster.hosts[-1].kill(ENGINE) == 1


def kill_raylet(cluster: Cluster) -> None:
    assert cluster.hosts[-1].kill("raylet/raylet") == 1


def cut_link(cluster: Cluster) -> None:
    cluster.hosts[-1].link("down")


@pytest.mark.usefixtures("three_replicas")
@pytest.mark.parametrize(
    ("fault", "is_node_lost"),
    [
        (kill_rank, False),
        pytest.param(kill_engine, False, marks=pytest.mark.soak),
        pytest.param(kill_raylet, True, marks=pytest.mark.soak),
        (cut_link, True),
    ],
)
def test_a_death_is_named_and_the_next_request_is_served(
    cluster: Cluster, reference: Reference, fault: Callable[[Cluster], None], is_node_lost: bool
) -> None:
    victim = cluster.hosts[-1]
    prompts = reference.prompts(5, 9, 12)
    cluster.tell("generate", prompts=prompts, max_tokens=LONG)
    time.sleep(0.5)
    started = time.monotonic()
    fault(cluster)
    failed = cluster.answer(30)
    noticed = time.monotonic() - started
    assert "EngineError" in failed["error"]
    assert victim.address in failed["error"]
    assert noticed < 10, failed["error"]
    if is_node_lost:
        victim.link("up")
    given = cluster.ask("generate", prompts=prompts, max_tokens=NUM_TOKENS)
    assert given.get("tokens") == expected(reference, prompts), given
    assert time.monotonic() - started < 120


@pytest.mark.soak
@pytest.mark.usefixtures("three_replicas")
def test_a_placement_group_that_is_taken_away_is_made_anew(cluster: Cluster, reference: Reference) -> None:
    prompts = reference.prompts(5, 9, 12)
    assert cluster.ask("remove groups")["groups"] == 3
    cluster.wait_for(lambda: not any(cluster.ranks(host) for host in cluster.hosts), 30)
    assert cluster.ask("generate", prompts=prompts, max_tokens=NUM_TOKENS)["tokens"] == expected(reference, prompts)
