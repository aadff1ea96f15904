"""Statistics: current rates and mean latencies, their history over ten minutes, and lines in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass

from moeserve.server.service import Service
from moeserve.server.totals import Totals

logger = logging.getLogger(__name__)

SECONDS_OF_RATES = 10  # length of the window over which rates are measured
SECONDS_BETWEEN_POINTS = 5
NUM_POINTS = 120  # number of points in the history: ten minutes


@dataclass(frozen=True)
class Rates:
    """Tokens per second, and mean latencies in seconds. A latency is None if no token arrived."""

    generated_tokens: float
    prompt_tokens: float
    cached_tokens: float
    first_token_s: float | None
    between_tokens_s: float | None


@dataclass(frozen=True)
class Point:
    """The state of the server at one time, with the rates of the preceding ten seconds."""

    rates: Rates
    num_admitted: int
    num_queued: int


@dataclass(frozen=True)
class _Counts:
    """Counts from the start of the server to one time."""

    at_s: float
    num_generated: int
    num_prompt: int
    num_cached: int
    first_tokens_s: float  # sum of `num_first` latencies
    num_first: int
    between_tokens_s: float  # sum of `num_between` latencies
    num_between: int

    @classmethod
    def of(cls, totals: Totals, at_s: float) -> _Counts:
        requests = totals.requests
        return cls(
            at_s,
            sum(each.num_generated_tokens for each in requests),
            sum(each.num_prompt_tokens for each in requests),
            sum(each.num_cached_tokens for each in requests),
            sum(each.first_token.total for each in requests),
            sum(sum(each.first_token.counts) for each in requests),
            sum(each.between_tokens.total for each in requests),
            sum(sum(each.between_tokens.counts) for each in requests),
        )

    def rates_since(self, before: _Counts) -> Rates:
        """Return the rates between two times. If counts fell because a process has ended, the rates are 0."""
        seconds = max(self.at_s - before.at_s, 1e-3)
        num_first, num_between = self.num_first - before.num_first, self.num_between - before.num_between
        return Rates(
            max(0.0, (self.num_generated - before.num_generated) / seconds),
            max(0.0, (self.num_prompt - before.num_prompt) / seconds),
            max(0.0, (self.num_cached - before.num_cached) / seconds),
            (self.first_tokens_s - before.first_tokens_s) / num_first if num_first > 0 else None,
            (self.between_tokens_s - before.between_tokens_s) / num_between if num_between > 0 else None,
        )


class Statistics:
    """Statistics of one server over all its processes. `sample` is called once a second."""

    def __init__(self, service: Service, log_interval_s: float) -> None:
        """
        Args:
            log_interval_s: seconds between lines in the log; 0: no lines.
        """
        self._service, self._log_interval_s = service, log_interval_s
        now = _Counts.of(service.totals, time.monotonic())
        self._last_seconds: deque[_Counts] = deque([now], maxlen=SECONDS_OF_RATES)
        self._logged = now
        self._num_samples = 0
        self.points: deque[Point] = deque(maxlen=NUM_POINTS)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.sample(time.monotonic())

    def rates(self, now_s: float) -> Rates:
        """Return the rates of the last ten seconds."""
        return _Counts.of(self._service.totals, now_s).rates_since(self._last_seconds[0])

    def sample(self, now_s: float) -> None:
        """Record the counts of this second. At their intervals, add a point to the history, and log a line."""
        totals = self._service.totals
        counts = _Counts.of(totals, now_s)
        if self._num_samples % SECONDS_BETWEEN_POINTS == 0:
            rates = counts.rates_since(self._last_seconds[0])
            self.points.append(Point(rates, totals.num_admitted, totals.num_queued))
        self._num_samples += 1
        self._last_seconds.append(counts)
        if self._log_interval_s and now_s - self._logged.at_s >= self._log_interval_s:
            rates = counts.rates_since(self._logged)
            self._logged = counts
            if rates.generated_tokens or rates.prompt_tokens or totals.num_admitted or totals.num_queued:
                self._log(rates, totals)

    def _log(self, rates: Rates, totals: Totals) -> None:
        engine = self._service.llm.session.engine
        usage = max((1 - each.num_free_blocks / engine.num_blocks for each in engine.replica_stats), default=0.0)
        fields = {
            "generated_tokens_per_s": round(rates.generated_tokens, 1),
            "prompt_tokens_per_s": round(rates.prompt_tokens, 1),
            "cached_tokens_per_s": round(rates.cached_tokens, 1),
            "outputs_in_engine": totals.num_admitted,
            "outputs_in_queue": totals.num_queued,
            "kv_cache_usage": round(usage, 4),
        }
        logger.info(
            "%.1f tokens/s generated, %.1f prompt tokens/s (%.1f from the prefix cache); outputs: %d in the engine, "
            "%d in the queue; KV cache: %.1f %% used",
            *(rates.generated_tokens, rates.prompt_tokens, rates.cached_tokens),
            *(totals.num_admitted, totals.num_queued, 100 * usage),
            extra={"fields": fields},
        )
