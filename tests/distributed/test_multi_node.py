"""Ranks on several hosts, in a Ray cluster that `moeserve launch` starts: the tokens of one rank, and failures."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, hosts, why_impossible
from node_commands import PROGRAM, Commands
from ray_clusters import PRIORITY
from reference_models import Reference

pytestmark = pytest.mark.timeout(600)

SETTINGS: dict[str, Any] = dict(
    executor="ray",
    kv_cache_memory="16MiB",
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    dtype="float32",
)
CORES = 2  # of each host, for Ray
SHARED_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
NUM_TOKENS = 8
ENVIRONMENT = {"OMP_NUM_THREADS": "1"} | PRIORITY
LONG = 240  # tokens: for steps to be under way when something dies
SECONDS_TO_LAUNCH = 120
RANK, ENGINE = "ray::RankActor", "ray::EngineActor"


class Cluster:
    """Hosts with `moeserve launch` on each. The program runs on the first."""

    def __init__(self, machines: list[Host], folder: Path) -> None:
        self.hosts = machines
        self._folder = folder
        self._commands = Commands(folder, self._require_running)
        launch = [sys.executable, "-m", "moeserve", "launch", "--num-cpus", str(CORES)]
        launch += ["--head", machines[0].address, "--nodes", str(len(machines)), "--", *self._commands.program]
        self.launches = [host.start(launch, self.log(host), **ENVIRONMENT, **SHARED_TOKEN) for host in machines]
        self._settings: dict[str, Any] | None = None  # of the running engine

    def log(self, host: Host) -> Path:
        return self._folder / f"{host.address}.log"

    def restarts(self) -> list[str]:
        """Return what the engine has logged of failures after which it was restarted."""
        return [line for line in self.log(self.hosts[0]).read_text().splitlines() if "the engine is restarted" in line]

    def send(self, do: str, **arguments: Any) -> None:
        self._commands.send(do, **arguments)

    def answer(self, seconds: float = SECONDS_TO_LAUNCH) -> dict[str, Any]:
        """Return the answer to the next command."""
        return self._commands.answer(seconds)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.send(do, **arguments)
        return self.answer()

    def run_engine(self, settings: dict[str, Any] | None) -> None:
        """Let this engine run and no other: any takes cores that another needs. None: no engine."""
        if settings == self._settings:
            return
        if self._settings is not None:
            assert self.ask("stop").keys() == {"seconds"}
            self._settings = None
            self.wait_for(lambda: not any(self.ranks(host, RANK, ENGINE) for host in self.hosts), 60)
            left = {"groups": [], "object_bytes": 0}
            self.wait_for(lambda: {name: self.ask("left")[name] for name in left} == left, 60)
        if settings is not None:
            started = self.ask("start", **settings)
            assert "error" not in started, started["error"] + self.shown_logs()
            self._settings = settings

    def shown_logs(self) -> str:
        logs = [log for host in self.hosts if (log := self.log(host)).exists()]
        return "\n".join(f"--- {log.stem}\n{log.read_text()[-3000:]}" for log in logs)

    def ranks(self, host: Host, *kinds: str) -> list[str]:
        return [command for command in host.processes().values() if command.startswith(kinds or RANK)]

    def wait_for(self, holds: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.shown_logs()
            time.sleep(0.1)

    def end(self) -> None:
        self._commands.close()
        self.hosts[0].kill(str(PROGRAM))

    def _require_running(self, message: str) -> None:
        assert self.launches[0].poll() is None, self.shown_logs()
        assert not message, f"{message}\n{self.shown_logs()}"


@pytest.fixture(scope="module")
def reference(reference_named: Callable[[str], Reference]) -> Reference:
    return reference_named("deepseek-v3-four-heads")


@pytest.fixture(scope="module")
def namespaces() -> None:
    if reason := why_impossible():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, namespaces: None) -> Iterator[Cluster]:
    with hosts(2) as machines:
        cluster = Cluster(machines, tmp_path_factory.mktemp("cluster"))
        try:
            yield cluster
            cluster.run_engine(None)
        finally:
            cluster.end()


def settings_of(reference: Reference, tp: int, dp: int, **settings: Any) -> dict[str, Any]:
    layout = {"tensor_parallel_size": tp, "data_parallel_size": dp, "model": str(reference.folder)}
    return SETTINGS | layout | settings


@pytest.fixture
def stages(cluster: Cluster, reference: Reference) -> None:
    """Two pipeline stages, each with all cores of a host."""
    cluster.run_engine(settings_of(reference, 1, 1, pipeline_parallel_size=2, num_threads=CORES))


@pytest.fixture
def replicas(cluster: Cluster, reference: Reference) -> None:
    """Two replicas of two ranks, each on one host."""
    cluster.run_engine(settings_of(reference, 2, 2, num_threads=1, num_redundant_experts=4, debug_rank_state=True))


def expected(reference: Reference, prompts: list[list[int]]) -> list[list[int]]:
    return reference.continuations(prompts, NUM_TOKENS)


@pytest.mark.soak
def test_an_engine_adopts_the_placement_group_that_it_is_in(cluster: Cluster, reference: Reference) -> None:
    cluster.run_engine(None)
    prompts = reference.prompts(3, 17)
    settings = SETTINGS | {"executor": "auto", "data_parallel_size": 2, "model": str(reference.folder)}
    bundles = [{"CPU": CORES}] * 2
    given = cluster.ask("generate in group", prompts=prompts, max_tokens=NUM_TOKENS, settings=settings, bundles=bundles)
    assert given.get("tokens") == expected(reference, prompts), given
    assert given["groups"] == ["adopted"]
    assert given["executor"] == "ray"


@pytest.mark.slow
@pytest.mark.usefixtures("stages")
def test_pipeline_stages_on_two_hosts(cluster: Cluster, reference: Reference) -> None:
    """Between stages, tensors travel over the network."""
    prompts = reference.prompts(3, 40, 17, 24, 9, 31)
    assert [len(cluster.ranks(host)) for host in cluster.hosts] == [1, 1]
    assert cluster.ask("generate", prompts=prompts, max_tokens=NUM_TOKENS)["tokens"] == expected(reference, prompts)


# Faults are not in `make test`: in about one of three runs, Ray's node does not notice that the process of an actor was
# killed. Its calls then fail as "unavailable" instead of "died", and its cores are not free for the restart.
@pytest.mark.soak
@pytest.mark.usefixtures("stages")
def test_a_killed_stage_is_named(cluster: Cluster, reference: Reference) -> None:
    check_failure(cluster, reference, lambda host: host.kill(RANK))
    assert "stage 1" in cluster.restarts()[-1]


@pytest.mark.soak
def test_replicas_are_added_and_removed_on_two_hosts(cluster: Cluster, reference: Reference) -> None:
    cluster.run_engine(settings_of(reference, 1, 1, num_threads=1))
    prompts = reference.prompts(5, 9, 12)
    undisturbed = cluster.ask("generate", prompts=prompts, max_tokens=LONG)["tokens"]
    for size in (2, 1):
        assert cluster.ask("scale", size=size, prompts=prompts, max_tokens=LONG).get("tokens") == undisturbed
        cluster.wait_for(lambda size=size: sum(len(cluster.ranks(host)) for host in cluster.hosts) == size, 10)
    assert "ScaleError" in cluster.ask("scale", size=4, prompts=prompts, max_tokens=LONG)["error"]
    assert cluster.ask("generate", prompts=prompts, max_tokens=LONG)["tokens"] == undisturbed


def check_failure(cluster: Cluster, reference: Reference, fault: Callable[[Host], object]) -> None:
    """Check that a failure of the second host is named soon, and that requests continue as if there had been none."""
    victim = cluster.hosts[1]
    prompts = reference.prompts(5, 9, 12)
    undisturbed = cluster.ask("generate", prompts=prompts, max_tokens=LONG)
    num_before = len(cluster.restarts())
    cluster.send("generate", prompts=prompts, max_tokens=LONG)
    time.sleep(undisturbed["seconds"] / 2)
    assert fault(victim) != 0  # the number of killed processes, if it kills
    cluster.wait_for(lambda: len(cluster.restarts()) > num_before, 12)
    assert victim.address in cluster.restarts()[num_before]
    victim.link("up")
    assert cluster.answer().get("tokens") == undisturbed["tokens"]


@pytest.mark.slow
@pytest.mark.usefixtures("replicas")
def test_replicas_on_two_hosts_give_the_tokens_of_one_rank(cluster: Cluster, reference: Reference) -> None:
    prompts = reference.prompts(3, 40, 17, 24, 9, 31)
    assert [len(cluster.ranks(host)) for host in cluster.hosts] == [2, 2]
    assert cluster.ask("generate", prompts=prompts, max_tokens=NUM_TOKENS)["tokens"] == expected(reference, prompts)


@pytest.mark.slow
@pytest.mark.usefixtures("replicas")
def test_a_host_holds_all_copies_of_the_experts_of_its_groups(cluster: Cluster) -> None:
    """The router chooses 2 of 4 groups of 3 experts."""
    layers = cluster.ask("placement")["layers"]
    assert [[len(slots) for slots in ranks] for ranks in layers] == [[4] * 4] * 2
    for ranks in layers:
        first, second = ({expert // 3 for slots in of_host for expert in slots} for of_host in (ranks[:2], ranks[2:]))
        assert len(first) == len(second) == 2, ranks
        assert not first & second, ranks


@pytest.mark.soak
@pytest.mark.usefixtures("replicas")
@pytest.mark.parametrize(
    "fault",
    [
        lambda host: host.kill(RANK),
        lambda host: host.kill(ENGINE),
        lambda host: host.kill("raylet/raylet"),
        lambda host: host.link("down"),
    ],
    ids=["rank", "engine", "raylet", "link"],
)
def test_failures_are_named(cluster: Cluster, reference: Reference, fault: Callable[[Host], object]) -> None:
    check_failure(cluster, reference, fault)


@pytest.mark.soak
@pytest.mark.usefixtures("replicas")
def test_a_removed_placement_group_is_reserved_again(cluster: Cluster, reference: Reference) -> None:
    prompts = reference.prompts(5, 9, 12)
    assert cluster.ask("remove groups")["groups"] == 2
    cluster.wait_for(lambda: not any(cluster.ranks(host) for host in cluster.hosts), 30)
    assert cluster.ask("generate", prompts=prompts, max_tokens=NUM_TOKENS)["tokens"] == expected(reference, prompts)


@pytest.mark.soak
@pytest.mark.usefixtures("namespaces", "default_cache")
def test_the_demo_of_two_hosts() -> None:
    demo = Path(__file__).parents[2] / "examples" / "multi_node" / "two_hosts.py"
    run = subprocess.run([sys.executable, str(demo)], capture_output=True, text=True, check=True, timeout=400)
    assert "   1        1      0   0  10.78.0.2  1 thread" in run.stderr
    assert "The capital of England is London" in run.stdout
