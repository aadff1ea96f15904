"""Recoveries with one bug each, which searches over killed ranks must find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from moeserve.engine import engine, recovery
from moeserve.engine.growing_back import GrowingBack
from moeserve.engine.hang_watch import Finding
from moeserve.engine.in_flight import RequestsInFlight
from moeserve.engine.recovery import Recovery
from moeserve.layers.moe.placement import handover
from moeserve.layers.moe.placement.placement import Placement
from moeserve.processes.failures import FailureReport
from moeserve.processes.supervision import wait_for_messages
from moeserve.protocol import RequestUpdate
from moeserve.scheduling.scheduler import Scheduler


class OverlooksFurtherFailures(Recovery):
    """It waits for ranks that have failed during the recovery."""

    def _wait(self, is_cancelled: Callable[[], bool]) -> tuple[Finding | None, FailureReport | None]:
        while not self._generation.take_ready():
            wait_for_messages(self._generation.group.members, 1.0)
        return None, None


class KeepsTheEpoch(Recovery):
    """Messages of the round that was aborted count in the next epoch."""

    def _begin(self, guilty: Sequence[int], *, leaves_out: bool) -> None:
        self._generation.epoch -= 1
        super()._begin(guilty, leaves_out=leaves_out)


def run_requests_twice(patch: pytest.MonkeyPatch) -> None:
    """Schedulers of survivors keep the requests that are sent again."""
    patch.setattr(Scheduler, "start_again", lambda self: None)


def give_up_after_one_attempt(patch: pytest.MonkeyPatch) -> None:
    """A further failure during a recovery starts all ranks again."""
    patch.setattr(recovery, "MAX_ATTEMPTS", 1)


def overlook_further_failures(patch: pytest.MonkeyPatch) -> None:
    """See `OverlooksFurtherFailures`."""
    patch.setattr(engine, "Recovery", OverlooksFurtherFailures)


def place_experts_anew(patch: pytest.MonkeyPatch) -> None:
    """Survivors get other experts than those that they have."""
    hand_over = handover.hand_over

    def reversed_slots(before: Placement, survivors: Sequence[int]) -> Placement:
        after = hand_over(before, survivors)
        return Placement(after.logical_of_slot[::-1], after.num_logical)

    patch.setattr(handover, "hand_over", reversed_slots)


def forget_those_left_out(patch: pytest.MonkeyPatch) -> None:
    """Replicas that were left out never start again."""
    patch.setattr(GrowingBack, "_is_due", lambda self, num_replicas: False)


def count_failures_of_all_time(patch: pytest.MonkeyPatch) -> None:
    """A request ends after some failures, although it got tokens between them."""
    live_updates = RequestsInFlight.live_updates

    def counting(self: RequestsInFlight, updates: Iterable[RequestUpdate]) -> Iterator[RequestUpdate]:
        counts = {name: known.num_failures for name, known in self._known.items()}
        for update in live_updates(self, updates):
            if update.request_id in self._known:
                self._known[update.request_id].num_failures = counts[update.request_id]
            yield update

    patch.setattr(RequestsInFlight, "live_updates", counting)


def keep_the_epoch(patch: pytest.MonkeyPatch) -> None:
    """See `KeepsTheEpoch`."""
    patch.setattr(engine, "Recovery", KeepsTheEpoch)


PLANTED_IN_RECOVERY: list[Any] = [
    run_requests_twice,
    give_up_after_one_attempt,
    overlook_further_failures,
    keep_the_epoch,
]

# These need replicas that are left out.
PLANTED_IN_HISTORIES: list[Any] = [*PLANTED_IN_RECOVERY, place_experts_anew, forget_those_left_out]
