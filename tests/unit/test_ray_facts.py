"""When nodes of a Ray cluster are refused: what of which differs."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from moeserve.errors import SettingsError

pytest.importorskip("ray", reason="install it with: pip install -e '.[ray]'")
from moeserve.executor.ray import SECONDS_OF_SKEW, NodeFacts, _refuse_unlike, _warn_of_kernels

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
        _refuse_unlike([OWN, *nodes], OWN, OWN.time)
    beginning, _, found = str(refusal.value).partition(": ")
    assert beginning == "the nodes of the Ray cluster cannot run one engine"
    return found.split("; ")


def unlike(node: NodeFacts = OTHER, **facts: Any) -> NodeFacts:
    return msgspec.structs.replace(node, **facts)


def test_nodes_that_are_alike_are_not_refused() -> None:
    _refuse_unlike([OWN, OTHER, THIRD], OWN, OWN.time)


def test_another_python_is_named() -> None:
    assert faults(unlike(python="3.12.1")) == [
        "node 10.1.0.2 (second) has Python 3.12.1, but node 10.1.0.1 (first) has 3.11.2"
    ]


@pytest.mark.parametrize("package", list(VERSIONS))
def test_another_version_of_a_package_is_named(package: str) -> None:
    assert faults(unlike(versions=VERSIONS | {package: "9.9"})) == [
        f"node 10.1.0.2 (second) has {package} 9.9, but node 10.1.0.1 (first) has {VERSIONS[package]}"
    ]


def test_a_missing_package_is_named() -> None:
    assert faults(unlike(versions=VERSIONS | {"torch": ""})) == [
        "node 10.1.0.2 (second) has torch not at all, but node 10.1.0.1 (first) has 2.9.0"
    ]


def test_a_model_that_cannot_be_read_is_named_also_on_this_node() -> None:
    assert faults(unlike(unreadable="No such file: '/model/config.json'")) == [
        "node 10.1.0.2 (second) cannot read the model: No such file: '/model/config.json'"
    ]
    assert faults(unlike(OWN, unreadable="Permission denied"))[0].startswith("node 10.1.0.1 (first) cannot read")


def test_nodes_that_compute_with_other_kernels_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _warn_of_kernels([OWN, OTHER, THIRD])
        assert not caplog.messages
        _refuse_unlike([OWN, unlike(kernels="avx512")], OWN, OWN.time)
        _warn_of_kernels([OWN, unlike(kernels="avx512"), unlike(THIRD, kernels="")])
    (said,) = caplog.messages
    assert "node 10.1.0.1 (first): avx2, node 10.1.0.2 (second): avx512, node 10.1.0.3 (third): no C++ kernels" in said


@pytest.mark.parametrize(("seconds", "shown"), [(SECONDS_OF_SKEW + 2, "+12 s"), (-SECONDS_OF_SKEW - 2, "-12 s")])
def test_a_clock_that_differs_is_named(seconds: float, shown: str) -> None:
    assert faults(unlike(time=OWN.time + seconds)) == [
        f"the clock of node 10.1.0.2 (second) differs from that of node 10.1.0.1 (first) by {shown} or more"
    ]


def test_clocks_may_differ_a_little() -> None:
    for seconds in (SECONDS_OF_SKEW - 1, 1 - SECONDS_OF_SKEW):
        _refuse_unlike([unlike(time=OWN.time + seconds)], OWN, OWN.time)


def test_a_node_that_was_slow_to_answer_has_no_wrong_clock() -> None:
    asked = OWN.time - 10 * SECONDS_OF_SKEW
    for answered in (asked, asked + SECONDS_OF_SKEW, OWN.time):
        _refuse_unlike([unlike(time=answered)], OWN, asked)


def test_every_node_that_differs_is_named_with_all_in_which_it_does() -> None:
    found = faults(
        unlike(OTHER, python="3.12.1", unreadable="Permission denied"),
        unlike(THIRD, versions=VERSIONS | {"moeserve": "0.2", "ray": ""}, time=OWN.time + 60),
    )
    assert [fault[: fault.index(")") + 1].removeprefix("the clock of ") for fault in found] == [
        *["node 10.1.0.2 (second)"] * 2,
        *["node 10.1.0.3 (third)"] * 3,
    ]
    for fault, what in zip(found, ["Python", "the model", "moeserve 0.2", "ray not at all", "+60 s"], strict=True):
        assert what in fault
