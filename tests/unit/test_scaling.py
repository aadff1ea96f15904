"""A change of the number of replicas: what it refuses, and how it ends. `test_scaling_orders.py` has all its orders."""

from __future__ import annotations

import dataclasses

import pytest
from played_replicas import Group, PlayedLauncher
from scaling_story import Plot, Story, go_on, patch_waits
from test_engine_restart import config_of

from moeserve.config.engine_config import EngineConfig
from moeserve.engine import restart
from moeserve.engine.engine import Engine
from moeserve.engine.launcher import WorkerGroup
from moeserve.errors import EngineError, ScaleError, ScalingInProgressError, SettingsError

UP = Plot((("a", 2),))


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    patch_waits(monkeypatch)


@pytest.mark.parametrize("killed", ["1.0", "1.1"])
def test_a_new_replica_that_dies_after_it_was_ready(killed: str) -> None:
    story = Story(dataclasses.replace(UP, on_failure="end"))
    story.finish("job", "load 1.0", "load 1.1", f"kill {killed}", "client")
    assert isinstance(story.change.exception(), ScaleError)


class ListensOnAPort(Story):
    def config_of(self, num_replicas: int) -> EngineConfig:
        return super().config_of(num_replicas).changed(store={"kv_transfer_address": "127.0.0.1:7000"})


def test_two_generations_cannot_listen_on_one_port() -> None:
    with pytest.raises(SettingsError, match="without a port"):
        ListensOnAPort(UP)


@pytest.fixture
def story() -> Story:
    return Story(UP)


def test_a_second_change_is_refused_until_the_first_is_over(story: Story) -> None:
    with pytest.raises(ScalingInProgressError, match="4"):
        story.engine.scale(4)
    story.finish()


def test_the_present_size_changes_nothing(story: Story) -> None:
    story.serve(go_on)
    num_groups = len(story.groups)
    again = story.engine.scale(2)
    assert again.done()
    assert again.exception() is None
    assert len(story.groups) == num_groups


@pytest.mark.parametrize("size", [0, 10**6])
def test_a_size_that_cannot_be_is_refused_and_changes_nothing(size: int) -> None:
    story = Story(UP)
    story.serve(go_on)
    with pytest.raises(SettingsError, match=str(size)):
        story.engine.scale(size)
    story.check_end()


def test_a_shutdown_ends_both_generations(story: Story) -> None:
    for event in ("job", "load 1.0"):
        story.play(event)
    story.engine.shutdown()
    assert not story.alive
    assert isinstance(story.change.exception(), ScaleError)
    with pytest.raises(EngineError):
        story.engine.scale(3)


class GpuStory(Story):
    """An engine whose devices hold one generation."""

    def config_of(self, num_replicas: int) -> EngineConfig:
        return super().config_of(num_replicas).changed(compute={"device": "cuda"})


def test_on_gpus_the_old_processes_end_first() -> None:
    story = GpuStory(UP)
    assert story.change.exception() is None
    assert [process.name for process in story.alive] == ["1.0", "1.1"]
    story.finish()


def test_on_gpus_the_old_size_is_started_again_if_the_new_one_cannot_be() -> None:
    story = GpuStory(UP, refused_sizes=(2,))
    assert isinstance(story.change.exception(), ScaleError)
    assert [process.name for process in story.alive] == ["1.0"]
    story.has_fault = True
    story.finish()


@pytest.mark.parametrize(
    ("num_refused", "seconds", "expected"),
    [(0, 10.0, [3, 2, 1, 1]), (1, 10.0, [3, 2, 2, 1, 1]), (1, 0.0, [3, 2, 1, 1, 1])],
)
def test_shrink_drops_a_replica_at_each_failure_and_when_starts_fail_for_long(
    num_refused: int, seconds: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "SECONDS_TO_SHRINK", seconds)
    sizes: list[int] = []
    groups: list[Group] = []

    def shrinking(num_replicas: int) -> EngineConfig:
        return config_of(num_replicas, "shrink")

    def start(config: EngineConfig) -> WorkerGroup:
        sizes.append(config.parallel.data_parallel_size)
        if 1 < len(sizes) <= 1 + num_refused:
            raise EngineError("a node has died")
        groups.append(Group(config.parallel.data_parallel_size, str(len(groups)), {}))
        for process in groups[-1].processes:
            process.load()
        return groups[-1].workers()

    engine = Engine(shrinking(3), PlayedLauncher(start), config_of=shrinking)
    for _ in range(3):
        groups[-1].processes[-1].kill()
        engine.step()
    assert sizes == expected
    assert engine.config.parallel.data_parallel_size == len(engine.replica_stats) == 1
    engine.shutdown()


def test_a_shutdown_frees_what_a_start_uses_when_that_has_ended() -> None:
    story = Story(UP)
    story.shut_down()
    assert story.jobs
    assert not story.is_closed
    story.play("job")
    assert story.is_closed
    assert not story.alive
