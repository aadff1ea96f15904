"""Totals of a server over all its processes."""

from __future__ import annotations

from itertools import zip_longest

import msgspec

from moeserve.telemetry.request_stats import Histogram, RequestStats


class Totals(msgspec.Struct):
    """The requests of one process, or of several together."""

    requests: list[RequestStats]  # of each replica
    waits: Histogram  # of seconds until there was room in the engine
    num_queued: int  # outputs that wait for room in the engine now
    num_admitted: int  # outputs that the engine has now

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            # A process may not know of all replicas yet, when there are more than before.
            [mine + theirs for mine, theirs in zip_longest(self.requests, other.requests, fillvalue=RequestStats())],
            self.waits + other.waits,
            self.num_queued + other.num_queued,
            self.num_admitted + other.num_admitted,
        )
