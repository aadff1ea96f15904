"""Which rank goes where: replicas on one node where possible, and a warning of those that are not."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("ray", reason="install it with: pip install -e '.[ray]'")
from moeserve.distributed.mesh import Mesh
from moeserve.executor.ray.nodes import Node
from moeserve.executor.ray.placement import Place, warn_of_split_groups, whole_groups_first


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
