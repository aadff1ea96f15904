"""Replicas that are started anew: when, how often it is tried, and what becomes of requests."""

from __future__ import annotations

import os
from typing import Any

import pytest

from moeserve.engine import restarting_replicas
from moeserve.engine.restarting_replicas import RestartingReplicas
from moeserve.errors import CheckpointError, EngineError, SettingsError
from moeserve.protocol import Request, RequestUpdate
from moeserve.sampling_params import RequestParams


class WorkerGroup:
    """Instead of `Replicas`: does nothing, and fails when it is told to."""

    def __init__(self) -> None:
        self.config = object()
        self.has_failed = False
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.in_flight: list[str] = []
        self.num_shutdowns = 0

    @property
    def has_work(self) -> bool:
        return bool(self.in_flight)

    def add(self, request: Request) -> None:
        self.added.append(request.request_id)
        self.in_flight.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def step(self) -> list[RequestUpdate]:
        ended, self.in_flight = self.in_flight, []
        error = "rank 1 died" if self.has_failed else None
        return [RequestUpdate(request_id=name, finish_reason="abort", error=error) for name in ended]

    def shutdown(self) -> None:
        self.num_shutdowns += 1


class Cluster:
    """Starts groups, or cannot."""

    def __init__(self) -> None:
        self.groups: list[WorkerGroup] = []
        self.num_trials = 0
        self.num_closed = 0
        self.faults: list[Exception] = []  # of the next trials
        self.lasting_fault: Exception | None = None  # of all trials after these

    def start(self) -> Any:
        self.num_trials += 1
        if self.faults:
            raise self.faults.pop(0)
        if self.lasting_fault:
            raise self.lasting_fault
        self.groups.append(WorkerGroup())
        return self.groups[-1]

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarting_replicas, "SECONDS_TO_REBUILD", 0.05)
    monkeypatch.setattr(restarting_replicas, "SECONDS_BETWEEN_TRIALS", 0.005)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def engine(cluster: Cluster) -> RestartingReplicas:
    return RestartingReplicas(cluster.start, cluster.close)


def request(name: str) -> Request:
    return Request(request_id=name, prompt_token_ids=[1], params=RequestParams(), seed=0)


def test_a_worker_group_that_lives_is_kept(engine: RestartingReplicas, cluster: Cluster) -> None:
    engine.add(request("one"))
    engine.add(request("two"))
    engine.abort("one")
    (group,) = cluster.groups
    assert engine.config is group.config
    assert (group.added, group.aborted) == (["one", "two"], ["one"])
    assert engine.has_work
    assert [update.request_id for update in engine.step()] == ["one", "two"]
    assert not engine.has_work


def test_the_next_request_after_a_failure_starts_a_new_worker_group(
    engine: RestartingReplicas, cluster: Cluster
) -> None:
    cluster.groups[0].has_failed = True
    assert engine.step() == []
    assert cluster.num_trials == 1  # nobody has asked yet
    engine.add(request("one"))
    assert [group.added for group in cluster.groups] == [[], ["one"]]
    engine.add(request("two"))
    assert [group.added for group in cluster.groups] == [[], ["one", "two"]]


def test_what_a_failed_worker_group_had_in_flight_ends_before_anything_new(
    engine: RestartingReplicas, cluster: Cluster
) -> None:
    engine.add(request("one"))
    engine.add(request("two"))
    cluster.groups[0].has_failed = True
    engine.add(request("three"))
    cluster.groups[1].in_flight.clear()
    assert engine.has_work
    assert [(update.request_id, update.error) for update in engine.step()] == [
        ("one", "rank 1 died"),
        ("two", "rank 1 died"),
    ]
    assert not engine.has_work
    assert engine.step() == []


def test_ends_are_not_lost_where_no_new_worker_group_can_be_started(
    engine: RestartingReplicas, cluster: Cluster
) -> None:
    engine.add(request("one"))
    cluster.groups[0].has_failed = True
    cluster.lasting_fault = EngineError("no node")
    with pytest.raises(EngineError):
        engine.add(request("two"))
    assert engine.has_work
    assert [update.request_id for update in engine.step()] == ["one"]


def test_several_failures_in_a_row_lose_no_end(engine: RestartingReplicas, cluster: Cluster) -> None:
    for number in range(3):
        engine.add(request(str(number)))
        cluster.groups[number].has_failed = True
    engine.add(request("last"))
    assert [update.request_id for update in engine.step()] == ["0", "1", "2"]


def test_a_start_that_fails_is_tried_again(engine: RestartingReplicas, cluster: Cluster) -> None:
    cluster.groups[0].has_failed = True
    cluster.faults = [EngineError("no node"), SettingsError("no room"), CheckpointError("half there")]
    engine.add(request("one"))
    assert cluster.num_trials == 5
    assert cluster.groups[1].added == ["one"]


def test_after_the_deadline_the_last_trial_is_told(engine: RestartingReplicas, cluster: Cluster) -> None:
    cluster.groups[0].has_failed = True
    cluster.faults = [EngineError("not this one")]
    cluster.lasting_fault = SettingsError("the nodes have no room")
    with pytest.raises(EngineError, match="could not be started anew: the nodes have no room") as refusal:
        engine.add(request("one"))
    assert refusal.value.__cause__ is cluster.lasting_fault
    assert cluster.num_trials > 3


def test_after_the_deadline_the_next_request_tries_anew(engine: RestartingReplicas, cluster: Cluster) -> None:
    cluster.groups[0].has_failed = True
    cluster.lasting_fault = EngineError("no node")
    with pytest.raises(EngineError):
        engine.add(request("one"))
    cluster.lasting_fault = None
    engine.add(request("two"))
    assert cluster.groups[1].added == ["two"]


def test_an_error_of_ours_is_not_tried_again(engine: RestartingReplicas, cluster: Cluster) -> None:
    cluster.groups[0].has_failed = True
    cluster.lasting_fault = KeyError("slip")
    with pytest.raises(KeyError):
        engine.add(request("one"))
    assert cluster.num_trials == 2


def test_the_first_start_is_tried_once_and_closes_what_it_used(cluster: Cluster) -> None:
    cluster.lasting_fault = CheckpointError("no such model")
    with pytest.raises(CheckpointError, match="no such model"):
        RestartingReplicas(cluster.start, cluster.close)
    assert (cluster.num_trials, cluster.num_closed) == (1, 1)


def test_shutdown_ends_the_last_worker_group_and_closes_once(engine: RestartingReplicas, cluster: Cluster) -> None:
    cluster.groups[0].has_failed = True
    engine.add(request("one"))
    assert cluster.num_closed == 0
    engine.shutdown()
    engine.shutdown()
    assert cluster.num_closed == 1
    assert cluster.groups[1].num_shutdowns > 0


def test_nothing_is_started_anew_after_shutdown(engine: RestartingReplicas, cluster: Cluster) -> None:
    engine.shutdown()
    cluster.groups[0].has_failed = True
    engine.add(request("one"))  # which `Replicas` refuses
    assert cluster.num_trials == 1


def test_a_fork_starts_and_closes_nothing(
    engine: RestartingReplicas, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.groups[0].has_failed = True
    monkeypatch.setattr(os, "getpid", lambda: -1)
    engine.add(request("one"))  # which `Replicas` refuses
    engine.shutdown()
    assert (cluster.num_trials, cluster.num_closed) == (1, 0)
