"""Which rank goes where: replicas on one node where possible, and a warning of those that are not."""

from __future__ import annotations

import logging
import time

import pytest
from ray_clusters import ray_with_cpus
from test_config import FACTS

pytest.importorskip("ray", reason="install it with: pip install -e '.[ray]'")
import ray
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moeserve.config.engine_config import EngineConfig
from moeserve.config.facts import MachineFacts
from moeserve.config.resolve import resolve
from moeserve.config.validation import parse_settings
from moeserve.distributed.mesh import Mesh
from moeserve.errors import EngineError, SettingsError
from moeserve.executor.ray import placement
from moeserve.executor.ray.cluster import Cluster
from moeserve.executor.ray.nodes import Node
from moeserve.executor.ray.placement import Place, reserve, warn_of_split_groups, whole_groups_first


def places(nodes: str) -> list[Place]:
    """A bundle on each of these nodes."""
    return [Place(group=None, bundle=index, node=Node(name, name, cores=2, gpus=0)) for index, name in enumerate(nodes)]


def nodes_of(found: list[Place]) -> str:
    return "".join(place.node.node_id for place in found)


@pytest.mark.parametrize(
    ("given", "tp", "expected"),
    [
        ("AAABBB", 1, "AAABBB"),
        ("AAABBB", 2, "AABBAB"),
        ("AAABBBB", 2, "AABBBBA"),
        ("AABBB", 3, "BBBAA"),
        ("ABCDAB", 4, "AABBCD"),
    ],
)
def test_as_many_replicas_as_possible_are_on_one_node(given: str, tp: int, expected: str) -> None:
    found = whole_groups_first(places(given), tp)
    assert nodes_of(found) == expected
    assert sorted(place.bundle for place in found) == list(range(len(given)))


@pytest.mark.parametrize(
    ("given", "sizes", "expected"),
    [("AAABBBBBCC", (4, 2), "BBBBAACCAB"), ("AAABBB", (6, 3), "AAABBB"), ("AAABBBC", (3, 1), "AAABBBC")],
)
def test_stages_of_other_replicas_are_on_one_node(given: str, sizes: tuple[int, int], expected: str) -> None:
    assert nodes_of(whole_groups_first(places(given), *sizes)) == expected


def test_bundles_of_a_node_stay_in_order() -> None:
    assert [place.bundle for place in whole_groups_first(places("BABAAB"), 2)] == [0, 2, 1, 3, 5, 4]


def test_a_split_replica_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_split_groups(places("AABB"), Mesh(tp=2, dp=2))
        warn_of_split_groups(places("ABAB"), Mesh(tp=1, dp=4))
        warn_of_split_groups(places("AABB"), Mesh(tp=2, dp=1, pp=2))  # stages may be on different nodes
        assert not caplog.messages
        warn_of_split_groups(places("AABBBCCC"), Mesh(tp=2, dp=2, pp=2))
    (message,) = caplog.messages
    assert "replica 1 " in message


def config_of(num_replicas: int) -> EngineConfig:
    settings = {"data_parallel_size": num_replicas, "executor": "ray", "num_threads": 1}
    return resolve(parse_settings(settings), FACTS, MachineFacts(num_cores=8, cores_of_nodes=[8]))


IN_USE = [True, False, True, True]  # whether each bundle is free: Ray does not list what is used up


@pytest.mark.slow
def test_bundles_in_use_are_not_given_to_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another actor has one of the 4 bundles of an adopted group, until it ends."""

    class Busy:
        pass

    with ray_with_cpus(5):
        list_nodes = Cluster().nodes
        group = placement_group([{"CPU": 1}] * 4)
        placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=1)
        actor = ray.remote(num_cpus=1)(Busy).options(scheduling_strategy=placed).remote()
        # Ray lists the bundles of a group, and the use of one, a moment after they are there. The test's time limit
        # bounds this wait.
        while [f"CPU_group_{index}_{group.id.hex()}" in ray.available_resources() for index in range(4)] != IN_USE:
            time.sleep(0.05)
        assert [place.bundle for place in reserve(config_of(2), list_nodes, group, [])] == [0, 2]
        assert [place.bundle for place in reserve(config_of(3), list_nodes, group, [])] == [0, 2, 3]
        with pytest.raises(SettingsError, match="but 5 ranks"):
            reserve(config_of(5), list_nodes, group, [])
        monkeypatch.setattr(placement, "SECONDS_TO_RESERVE", 0.0)
        with pytest.raises(EngineError, match="of which 3 are free, but 4 ranks"):
            reserve(config_of(4), list_nodes, group, [])
        ray.kill(actor)
        monkeypatch.setattr(placement, "SECONDS_TO_RESERVE", 60.0)
        assert [place.bundle for place in reserve(config_of(4), list_nodes, group, [])] == [0, 1, 2, 3]
