"""Which differences between nodes of a Ray cluster are refused, and which are only warned of."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from moeserve.errors import SettingsError

pytest.importorskip("ray", reason="install it with: pip install -e '.[ray]'")
from moeserve.executor.ray.nodes import SECONDS_OF_SKEW, NodeFacts, check_alike

VERSIONS = {"moeserve": "0.1", "torch": "2.9.0", "ray": "2.52.0"}
OWN = NodeFacts(
    node_id="a",
    address="10.1.0.1",
    hostname="first",
    python="3.11.2",
    versions=VERSIONS,
    kernels="avx2",
    time=1e9,
    unreadable="",
)
OTHER = msgspec.structs.replace(OWN, node_id="b", address="10.1.0.2", hostname="second")
THIRD = msgspec.structs.replace(OWN, node_id="c", address="10.1.0.3", hostname="third")


def faults(*nodes: NodeFacts) -> list[str]:
    """Found in nodes, beside one that is as it must be."""
    with pytest.raises(SettingsError) as refusal:
        check_alike([OWN, *nodes], OWN, OWN.time)
    return str(refusal.value).partition(": ")[2].split("; ")


def unlike(node: NodeFacts = OTHER, **facts: Any) -> NodeFacts:
    return msgspec.structs.replace(node, **facts)


def test_nodes_that_are_alike_are_not_refused() -> None:
    check_alike([OWN, OTHER, THIRD], OWN, OWN.time)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"python": "3.12.1"}, ("Python 3.12.1", "3.11.2")),
        *(({"versions": VERSIONS | {each: "9.9"}}, (f"{each} 9.9", VERSIONS[each])) for each in VERSIONS),
        ({"versions": VERSIONS | {"torch": ""}}, ("torch (missing)", VERSIONS["torch"])),
        ({"unreadable": "No such file: '/model/config.json'"}, ("No such file: '/model/config.json'",)),
        ({"time": OWN.time + SECONDS_OF_SKEW + 2}, ("the clock", "+12 s")),
        ({"time": OWN.time - SECONDS_OF_SKEW - 2}, ("the clock", "-12 s")),
    ],
)
def test_a_difference_is_named_with_its_node(facts: dict[str, Any], named: tuple[str, ...]) -> None:
    (fault,) = faults(unlike(**facts))
    assert all(part in fault for part in (OTHER.name, *named))


def test_a_model_that_this_node_cannot_read_is_named() -> None:
    assert OWN.name in faults(unlike(OWN, unreadable="Permission denied"))[0]


def test_nodes_with_other_kernels_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_alike([OWN, OTHER, THIRD], OWN, OWN.time)
        assert not caplog.messages
        check_alike([OWN, unlike(kernels="avx512"), unlike(THIRD, kernels="")], OWN, OWN.time)
    (message,) = caplog.messages
    assert all(part in message for part in ("avx2", "avx512", "no C++ kernels", OTHER.name, THIRD.name))


def test_clocks_may_differ_a_little() -> None:
    for seconds in (SECONDS_OF_SKEW - 1, 1 - SECONDS_OF_SKEW):
        check_alike([unlike(time=OWN.time + seconds)], OWN, OWN.time)


def test_a_node_that_was_slow_to_answer_has_no_wrong_clock() -> None:
    asked = OWN.time - 10 * SECONDS_OF_SKEW
    for answered in (asked, asked + SECONDS_OF_SKEW, OWN.time):
        check_alike([unlike(time=answered)], OWN, asked)


def test_every_node_that_differs_is_named_with_all_in_which_it_does() -> None:
    found = faults(
        unlike(OTHER, python="3.12.1", unreadable="Permission denied"),
        unlike(THIRD, versions=VERSIONS | {"moeserve": "0.2", "ray": ""}, time=OWN.time + 60),
    )
    assert [fault[: fault.index(")") + 1].removeprefix("the clock of ") for fault in found] == [
        *["node 10.1.0.2 (second)"] * 2,
        *["node 10.1.0.3 (third)"] * 3,
    ]
    for fault, what in zip(found, ["Python", "the model", "moeserve 0.2", "ray (missing)", "+60 s"], strict=True):
        assert what in fault
