"""Which rank goes where: replicas whole, and a word about those that are not."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("ray", reason="install it with: pip install -e '.[ray]'")
from moeserve.executor.ray import Node, Place, _warn_of_split, _whole_first


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
def test_as_many_replicas_as_possible_are_whole(given: str, tp: int, expected: str) -> None:
    found = _whole_first(places(given), tp)
    assert nodes_of(found) == expected
    assert sorted(place.bundle for place in found) == list(range(len(given)))


def test_bundles_of_a_node_stay_in_order() -> None:
    assert [place.bundle for place in _whole_first(places("BABAAB"), 2)] == [0, 2, 1, 3, 5, 4]


def test_a_split_replica_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _warn_of_split(places("AABB"), 2)
        _warn_of_split(places("ABAB"), 1)
        assert not caplog.messages
        _warn_of_split(places("AAABBBCC"), 2)
    assert caplog.messages == [
        "the ranks of replica 1 are on several nodes: in each layer rows cross the network twice more"
    ]
