"""Settings of ranks on a Ray cluster: when Ray is used, the room of its nodes, and its environment."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_config import FACTS

from moeserve.config.engine_config import EngineConfig
from moeserve.config.environment import environment_of_cluster, ray_token
from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.resolve_parallel import fit_whole, wants_ray
from moeserve.config.settings import ParallelSettings
from moeserve.config.validation import parse_settings
from moeserve.errors import SettingsError

NUM_CORES = 3
MOST_RANKS = 12  # on one host with so many cores


@pytest.fixture(autouse=True)
def outside_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def is_wanted(executor: str = "auto", tp: int = 1, dp: int = 1, num_cores: int = NUM_CORES) -> bool:
    parallel = ParallelSettings(executor=executor, tensor_parallel_size=tp, data_parallel_size=dp)  # type: ignore[arg-type]
    return wants_ray(parallel, num_cores)


def decide(cores_of_nodes: Sequence[int] | None, **options: Any) -> EngineConfig:
    settings = parse_settings(options)
    return resolve(settings, FACTS, MachineFacts(num_cores=NUM_CORES, cores_of_nodes=cores_of_nodes))


def test_executor_decides_over_ray_if_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_wanted("ray")
    assert is_wanted("ray", tp=2)
    monkeypatch.setenv("RAY_ADDRESS", "10.1.2.3:6379")
    assert not is_wanted("mp", dp=2)
    assert not is_wanted("mp", dp=MOST_RANKS + 1)
    assert not is_wanted("uniproc")


def test_auto_uses_ray_for_several_ranks_inside_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_wanted(tp=2)
    assert not is_wanted(dp=2)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))  # only imported
    assert not is_wanted(dp=2)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert is_wanted(dp=2)
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.setenv("RAY_ADDRESS", "10.1.2.3:6379")
    assert is_wanted(tp=2)
    assert not is_wanted()


@pytest.mark.parametrize(("num_cores", "most"), [(1, 8), (2, 8), (3, 12), (8, 32)])
def test_auto_uses_ray_for_more_ranks_than_this_host_can_run(num_cores: int, most: int) -> None:
    assert not is_wanted(dp=most, num_cores=num_cores)
    assert is_wanted(dp=most + 1, num_cores=num_cores)


def test_auto_becomes_ray_where_there_are_nodes() -> None:
    assert decide([4, 4], data_parallel_size=2).parallel.executor == "ray"
    assert decide(None, data_parallel_size=2).parallel.executor == "mp"
    assert decide(None).parallel.executor == "uniproc"


@pytest.mark.parametrize("executor", ["mp", "ray"])
def test_an_executor_that_is_given_is_kept(executor: str) -> None:
    assert decide(None, data_parallel_size=2, executor=executor).parallel.executor == executor
    assert decide([4, 4], data_parallel_size=2, executor=executor).parallel.executor == executor


def test_more_ranks_than_this_host_takes_are_refused_without_nodes_alone() -> None:
    assert decide([8, 8], data_parallel_size=MOST_RANKS + 1).parallel.num_ranks == MOST_RANKS + 1
    with pytest.raises(SettingsError, match=r"at most 12 ranks.* executor='ray'"):
        decide(None, data_parallel_size=MOST_RANKS + 1)


def has_room(cores_of_nodes: Sequence[int], num_ranks: int, num_threads: int) -> bool:
    """Place rank after rank on the emptiest node."""
    free = list(cores_of_nodes)
    for _ in range(num_ranks):
        node = max(range(len(free)), key=free.__getitem__)
        free[node] -= num_threads
    return min(free) >= 0


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_ranks_get_the_most_threads_that_all_of_them_can_have_on_one_node_each(num_nodes: int) -> None:
    for cores_of_nodes in itertools.product((1, 2, 3, 5, 8), repeat=num_nodes):
        for num_ranks in range(1, min(sum(cores_of_nodes), 9) + 1):
            most = max(n for n in range(1, 9) if has_room(cores_of_nodes, num_ranks, n))
            found = decide(cores_of_nodes, data_parallel_size=num_ranks).compute.num_threads
            assert found == most, (cores_of_nodes, num_ranks)


@pytest.mark.parametrize(
    ("cores", "tp", "dp", "threads"), [([8, 8], 2, 1, 4), ([8, 8], 2, 2, 4), ([3, 3], 2, 2, 1), ([3, 3], 2, 3, 1)]
)
def test_replicas_stay_whole_where_that_is_possible(cores: list[int], tp: int, dp: int, threads: int) -> None:
    """The last ones fit only if one is spread over both nodes."""
    found = decide(cores, tensor_parallel_size=tp, data_parallel_size=dp).compute.num_threads
    assert found == threads
    assert fit_whole(cores, found, tp, dp) == (dp < 3)


def test_threads_that_are_given_are_kept() -> None:
    assert decide([8, 8], data_parallel_size=2, num_threads=3).compute.num_threads == 3


def test_ranks_for_which_the_nodes_have_no_room_are_refused_with_the_figures() -> None:
    assert decide([5, 3], data_parallel_size=3, num_threads=2).compute.num_threads == 2
    with pytest.raises(SettingsError, match=r"data_parallel_size=4.* num_threads=2.* 5, 3 CPUs, room for 3"):
        decide([5, 3], data_parallel_size=4, num_threads=2)


def test_every_rank_needs_a_core_where_threads_are_not_given() -> None:
    assert decide([2, 1], data_parallel_size=3).compute.num_threads == 1
    with pytest.raises(SettingsError, match=r"4 ranks with num_threads=1.* 2, 1 CPUs, room for 3"):
        decide([2, 1], data_parallel_size=4)


def test_the_token_is_read_from_where_ray_reads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert ray_token() == ""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("from home\n")
    assert ray_token() == "from home"
    (tmp_path / "elsewhere").write_text("from a path\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "elsewhere"))
    assert ray_token() == "from a path"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert ray_token() == "given"


def test_there_is_no_token_if_authentication_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert ray_token() == "given"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert ray_token() == ""


def test_health_checks_are_quick_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    default = environment_of_cluster("10.1.2.3:6379", "secret")
    assert default["RAY_health_check_period_ms"] == "1000"
    monkeypatch.setenv("RAY_health_check_period_ms", "77")
    kept = environment_of_cluster("10.1.2.3:6379", "secret")
    assert kept == default | {"RAY_health_check_period_ms": "77"}


def test_a_cluster_gets_its_address_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.9.9.9:1")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    environment = environment_of_cluster("10.1.2.3:6379", "secret")
    assert environment["RAY_ADDRESS"] == "10.1.2.3:6379"
    assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN"]) == ("token", "secret")
    assert environment_of_cluster("10.1.2.3:6379", "")["RAY_AUTH_MODE"] == "disabled"
    assert os.environ["RAY_ADDRESS"] == "10.9.9.9:1"


def test_a_cluster_has_the_environment_of_this_process_beside_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    assert environment_of_cluster("10.1.2.3:6379", "")["SOMETHING_ELSE"] == "kept"
