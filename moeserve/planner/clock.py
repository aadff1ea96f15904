"""Virtual time of overlapping steps. A step takes the host's work first, then one pipeline stage after another."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class Clock:
    """Virtual time of a sequence of rounds. The host and each stage work on one round at a time."""

    def __init__(self, num_stages: int, host_s: float) -> None:
        """
        Args:
            host_s: seconds of the host's work for each round.
        """
        self.now = 0.0  # end of the last round
        self.busy_s = 0.0  # time in which at least one round was in flight
        self.host_s = 0.0  # time that the host worked
        self.host_waited_s = 0.0  # time in which all stages waited only for the host
        self._host_s_of_round = host_s
        self._host_free_at = 0.0
        self._stages_free_at = [0.0] * num_stages
        self._ends = array("d", [0.0])  # by number of rounds: the time when this many rounds had ended

    def run(self, stage_s: Sequence[float], moving_s: float, planned_after: int) -> float:
        """Run a round to its end. Return the seconds between the end of the previous round and the end of this round.

        Args:
            stage_s: seconds of the round in each stage.
            moving_s: seconds for which all stages stop after the round, to move experts.
            planned_after: number of rounds that had ended when this round could first be planned.
        """
        may_begin_at = max(self._ends[planned_after], self._host_free_at)
        self._host_free_at = planned_at = may_begin_at + self._host_s_of_round
        self.host_s += self._host_s_of_round
        self.host_waited_s += max(0.0, planned_at - max(may_begin_at, *self._stages_free_at))
        at = planned_at
        for stage, seconds in enumerate(stage_s):
            at = max(at, self._stages_free_at[stage]) + seconds
            self._stages_free_at[stage] = at
        if moving_s:
            at += moving_s
            self._stages_free_at = [at] * len(stage_s)
        seconds = at - self.now
        self.busy_s += seconds
        self.now = at
        self._ends.append(at)
        return seconds

    def skip(self) -> None:
        """End a round without a step, which takes no time."""
        self._ends.append(self.now)

    def rest_until(self, moment: float) -> None:
        """Advance the time to `moment` without rounds."""
        self.now = moment
        self._ends[-1] = moment
