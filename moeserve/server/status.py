"""The status page at `/`, and the data that it reads."""

from __future__ import annotations

import importlib.resources
import time

from pydantic import BaseModel

from moeserve import __version__
from moeserve.config.resolve_parallel import shown_layout
from moeserve.server.service import Service
from moeserve.server.statistics import SECONDS_BETWEEN_POINTS, Rates, Statistics
from moeserve.telemetry.expert_load import LoadWindow


class ReplicaStatus(BaseModel):
    running: int  # running requests
    waiting: int
    kv_cache_usage: float  # 0 to 1
    preemptions: int
    rounds: int


class ExpertLoad(BaseModel):
    """Tokens that experts and ranks computed in the last load window."""

    layers: tuple[int, ...]
    tokens_of_expert: tuple[tuple[int, ...], ...]  # by layer and expert
    tokens_of_rank: tuple[tuple[int, ...], ...]  # by layer and rank


class History(BaseModel):
    """The last ten minutes: a value per interval, newest last. Latencies are means; null if no token arrived."""

    interval: int  # seconds
    generated_tokens: list[float]  # per second
    prompt_tokens: list[float]  # per second
    queued: list[int]
    admitted: list[int]
    first_token: list[float | None]  # seconds
    between_tokens: list[float | None]  # seconds


class Status(BaseModel):
    version: str
    model: str
    layout: str
    ready: bool
    queued: int  # outputs that wait for room in the engine
    admitted: int  # outputs that are in the engine
    prompt_tokens: int  # since the start
    generated_tokens: int
    cached_tokens: int
    rates: Rates  # of the last ten seconds
    history: History
    replicas: list[ReplicaStatus]
    expert_load: ExpertLoad | None


class StatusReader:
    """Collects the data of the status page."""

    def __init__(self, service: Service, statistics: Statistics) -> None:
        self._service, self._statistics = service, statistics
        self._load: LoadWindow | None = None
        service.llm.session.observer.listeners.append(self._note_load)
        self.page = importlib.resources.files(__package__).joinpath("status.html").read_text(encoding="utf-8")

    def read(self) -> Status:
        service, load = self._service, self._load
        engine, totals = service.llm.session.engine, service.totals
        return Status(
            version=__version__,
            model=service.model_names[0],
            layout=shown_layout(service.llm.config.parallel),
            ready=service.is_ready,
            queued=totals.num_queued,
            admitted=totals.num_admitted,
            prompt_tokens=sum(each.num_prompt_tokens for each in totals.requests),
            generated_tokens=sum(each.num_generated_tokens for each in totals.requests),
            cached_tokens=sum(each.num_cached_tokens for each in totals.requests),
            rates=self._statistics.rates(time.monotonic()),
            history=self._history(),
            replicas=[
                ReplicaStatus(
                    running=replica.num_running,
                    waiting=replica.num_waiting,
                    kv_cache_usage=1 - replica.num_free_blocks / engine.num_blocks,
                    preemptions=replica.num_preemptions,
                    rounds=replica.num_rounds,
                )
                for replica in engine.replica_stats
            ],
            expert_load=None
            if load is None
            else ExpertLoad(
                layers=load.layers, tokens_of_expert=load.tokens_of_expert, tokens_of_rank=load.tokens_of_rank
            ),
        )

    def _history(self) -> History:
        points = self._statistics.points
        return History(
            interval=SECONDS_BETWEEN_POINTS,
            generated_tokens=[round(each.rates.generated_tokens, 1) for each in points],
            prompt_tokens=[round(each.rates.prompt_tokens, 1) for each in points],
            queued=[each.num_queued for each in points],
            admitted=[each.num_admitted for each in points],
            first_token=[each.rates.first_token_s for each in points],
            between_tokens=[each.rates.between_tokens_s for each in points],
        )

    def _note_load(self, window: LoadWindow) -> None:
        self._load = window
