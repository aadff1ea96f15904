"""A change of the number of replicas in every order of events, with at most one fault."""

from __future__ import annotations

import pytest
from played_replicas import PlayedLauncher
from scaling_search import explore
from scaling_story import Plot, SleepingPoll, patch_waits

from moeserve.engine import engine, scaling
from moeserve.engine.engine import Engine
from moeserve.engine.generation import Generation
from moeserve.engine.in_flight import RequestsInFlight
from moeserve.engine.scaling import Scaling
from moeserve.protocol import RequestUpdate

ONE = (("a", 2),)
UP, DOWN = Plot(ONE), Plot(ONE, sizes=(2, 1))
PAUSES_UP, PAUSES_DOWN = Plot((("a", 1),), pauses=True), Plot((("a", 1),), sizes=(2, 1), pauses=True)
ABORTED = Plot((("b", 1),), aborts=True)
TWO = Plot((("a", 1), ("b", 1)), aborts=True)
LONGER = Plot((("a", 2), ("b", 1)), aborts=True)
ENDS_UP, ENDS_DOWN = Plot(ONE, on_failure="end"), Plot(ONE, sizes=(2, 1), on_failure="end")
SHRINKS_UP, SHRINKS_DOWN = Plot(ONE, on_failure="shrink"), Plot(ONE, sizes=(2, 1), on_failure="shrink")
SHUT_DOWN = Plot((("a", 1),), shuts_down=True)
ENDS_AND_SHUT_DOWN = Plot((("a", 1),), shuts_down=True, on_failure="end")


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    patch_waits(monkeypatch)


@pytest.mark.slow_but("one request")
@pytest.mark.parametrize(
    "plot",
    [
        pytest.param(UP, id="up"),
        pytest.param(DOWN, id="down"),
        pytest.param(PAUSES_UP, id="pauses, up"),
        pytest.param(PAUSES_DOWN, id="pauses, down"),
        pytest.param(ABORTED, id="aborted"),
        pytest.param(TWO, id="two requests"),
        pytest.param(LONGER, id="longer", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
        pytest.param(ENDS_UP, id="ends, up"),
        pytest.param(ENDS_DOWN, id="ends, down"),
        pytest.param(SHRINKS_UP, id="shrinks, up"),
        pytest.param(SHRINKS_DOWN, id="shrinks, down"),
        pytest.param(SHUT_DOWN, id="shut down"),
        pytest.param(ENDS_AND_SHUT_DOWN, id="ends and shut down"),
    ],
)
def test_every_order_of_events_with_at_most_one_fault(plot: Plot) -> None:
    counts = explore(plot)
    print(counts)
    assert min(counts["scaled"], counts["refused"]) > 20, counts


class TakesOldUpdates(Engine):
    """Updates of the processes that have served are taken after the change, beside those of the new ones."""

    def _let_serve(self, generation: Generation) -> None:
        old = self._generation if hasattr(self, "_generation") else None
        super()._let_serve(generation)
        if old is not None and old.end.alive:
            generation.index_of |= dict.fromkeys(old.index_of, 0)
            self._poll = SleepingPoll([*old.index_of, *generation.index_of], self._wake_up.fd)


class SwitchesTooEarly(Engine):
    """Requests go to the new processes before these have loaded."""

    def _advance_scaling(self) -> None:
        loading = self._scaling.loading if self._scaling is not None else None
        if loading is not None:
            loading._loading.clear()
        super()._advance_scaling()


class OverlooksFailures(Engine):
    """A process that fails while it loads is waited for."""

    def _advance_scaling(self) -> None:
        scaling = self._scaling
        if scaling is None or scaling.loading is None or not scaling.loading.group.has_failed:
            super()._advance_scaling()


class OverlooksNewProcesses(Engine):
    """The messages of processes that load do not end a wait."""

    def _watch(self) -> None:
        super()._watch()
        self._poll = SleepingPoll(list(self._serving), self._wake_up.fd)


class WatchesEndedProcesses(Engine):
    """The file descriptors of processes that were ended after a failure end every wait."""

    def _watch_nothing(self) -> None:
        pass


class ClosesTooEarly(Engine):
    """A shutdown frees what worker groups use while one is started."""

    def shutdown(self) -> None:
        if not self._is_shut_down:
            launcher, self._launcher = self._launcher, PlayedLauncher(self._launcher.start)
            super().shutdown()
            launcher.close()


class ForgetsRequests(RequestsInFlight):
    """Requests are not continued by the new processes."""

    def continue_all(self) -> list[RequestUpdate]:
        return []


class ForgetsAborts(RequestsInFlight):
    """A request that was aborted before the change never ends."""

    def continue_all(self) -> list[RequestUpdate]:
        return [update for update in super().continue_all() if update.finish_reason != "abort"]


class ContinuesAsleep(RequestsInFlight):
    """New replicas without a request are not woken when the others get the requests of the old ones."""

    def continue_all(self) -> list[RequestUpdate]:
        ends = super().continue_all()
        self._must_wake = False
        return ends


class ForgetsSleepers(RequestsInFlight):
    """Engine that fell asleep before a request arrived are not woken for it."""

    def wake_sleepers(self) -> None:
        self._has_sleepers = False
        super().wake_sleepers()


class StartsQuietly(Scaling):
    """The engine is not woken when the new processes were started."""

    def _start(self, start: object) -> None:
        wake, self._wake = self._wake, lambda: None
        super()._start(start)  # type: ignore[arg-type]
        self._wake = wake


class WakesTooEarly(Scaling):
    """The engine is woken before it can find the new processes."""

    def _start(self, start: object) -> None:
        self._wake()
        wake, self._wake = self._wake, lambda: None
        super()._start(start)  # type: ignore[arg-type]
        self._wake = wake


class RetiresQuietly(Scaling):
    """The engine is not woken when the old processes have ended."""

    def retire(self, old: Generation) -> None:
        self._wake = lambda: None
        super().retire(old)


class FailsQuietly(Scaling):
    """The engine is not woken when the change has failed."""

    def _finish(self, cause: Exception | None) -> None:
        wake, self._wake = self._wake, lambda: None
        super()._finish(cause)
        self._wake = wake


LOST_WAKE_UP = "nothing can happen|only the time limit"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "plot", "violation"),
    [
        (TakesOldUpdates, UP, "a has|for ever"),
        (SwitchesTooEarly, UP, "Ready"),
        (OverlooksFailures, DOWN, "for ever|nothing can happen"),
        (OverlooksNewProcesses, UP, LOST_WAKE_UP),
        (WatchesEndedProcesses, ENDS_UP, "for ever"),
        (ClosesTooEarly, SHUT_DOWN, "closed"),
        (ForgetsRequests, UP, "never ended|nothing can happen"),
        (ForgetsAborts, ABORTED, "never ended"),
        (ContinuesAsleep, UP, LOST_WAKE_UP),
        (ForgetsSleepers, TWO, LOST_WAKE_UP),
        (StartsQuietly, UP, LOST_WAKE_UP),
        (WakesTooEarly, PAUSES_UP, LOST_WAKE_UP),
        (RetiresQuietly, UP, LOST_WAKE_UP),
        (FailsQuietly, UP, LOST_WAKE_UP),
    ],
)
def test_planted_bug_is_found(
    bug: type[Engine | RequestsInFlight | Scaling], plot: Plot, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part, module in ((RequestsInFlight, engine), (Scaling, scaling)):
        if issubclass(bug, part):
            monkeypatch.setattr(module, part.__name__, bug)
    with pytest.raises(AssertionError, match=violation) as found:
        explore(plot, bug if issubclass(bug, Engine) else Engine)
    print(found.value)
