"""Totals of a server over all its processes."""

from __future__ import annotations

from itertools import zip_longest

import msgspec

from moeserve.telemetry.request_stats import Histogram, RequestStats


class Totals(msgspec.Struct):
    """Totals over the requests to one process, or to several processes."""

    requests: list[RequestStats]  # statistics of each replica
    waits: Histogram  # seconds that outputs waited for room in the engine
    num_queued: int  # outputs that wait for room in the engine now
    num_admitted: int  # outputs in the engine now
    cache_epoch: int = 0  # time of the last reset of the prefix cache, in ns since the epoch; 0: never

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            # After an increase, some processes may not know all replicas yet.
            [mine + theirs for mine, theirs in zip_longest(self.requests, other.requests, fillvalue=RequestStats())],
            self.waits + other.waits,
            self.num_queued + other.num_queued,
            self.num_admitted + other.num_admitted,
            max(self.cache_epoch, other.cache_epoch),
        )
