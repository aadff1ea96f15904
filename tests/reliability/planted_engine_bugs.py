"""Engines, routers and channels with one bug each, which the simulator of the engine must find."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moeserve.config.engine_config import EngineConfig
from moeserve.controls import WeightState
from moeserve.engine.engine import Engine
from moeserve.engine.generation import Generation
from moeserve.engine.in_flight import InFlight, RequestsInFlight
from moeserve.engine.recovery import Recovery
from moeserve.errors import RequestError
from moeserve.processes.channel import Channel
from moeserve.protocol import Request, RequestUpdate, Sample


class FailsQuietly(RequestsInFlight):
    """After a failure only one request gets its cause; the others end as if they were aborted."""

    def _end(self, request_ids: Sequence[str], *, error: str | None) -> list[RequestUpdate]:
        ends = super()._end(request_ids, error=error)
        return [*ends[:1], *(msgspec.structs.replace(end, error=None) for end in ends[1:])]


class BooksBeforeEncoding(RequestsInFlight):
    """A request that cannot be encoded stays among the live ones, and in the router."""

    def send(self, request: Request, samples: Sequence[Sample] = ()) -> None:
        try:
            super().send(request, samples)
        except RequestError:
            encodable = msgspec.structs.replace(request, cache_salt="")
            index = self.generation.router.choose(encodable)
            self._known[request.request_id] = InFlight(encodable, self.generation.group.replicas[index])
            raise


class ResumesFromTheStart(RequestsInFlight):
    """After a restart or a change of size requests are computed again, and their tokens are sent twice."""

    def continue_all(self) -> list[RequestUpdate]:
        for known in self._known.values():
            known.token_ids = []
        return super().continue_all()


class ForgetsAborts(RequestsInFlight):
    """A request that was aborted before a restart never ends."""

    def continue_all(self) -> list[RequestUpdate]:
        return [update for update in super().continue_all() if update.finish_reason != "abort"]


class ServesOldWeights(Engine):
    """After a restart it serves the weights of the checkpoint, whatever the version was."""

    def _let_serve(self, generation: Generation) -> None:
        self._controls.weights = WeightState()
        super()._let_serve(generation)


class NeverNoticesSilence(Engine):
    """It waits for ever for a replica that hangs."""

    def _receive(self, timeout_s: float = 0.0, *, only_failures: bool = False) -> None:
        self._last_message_s = time.monotonic()
        super()._receive(timeout_s, only_failures=only_failures)


class ExpectsAQuickStart(Engine):
    """It declares a process dead that takes long to load."""

    def _start(self, config: EngineConfig) -> None:
        super()._start(config.changed(failure={"load_timeout": 7}))


class WaitsForLoadingForEver(Engine):
    """It has no timeout for loading."""

    def _start(self, config: EngineConfig) -> None:
        super()._start(config.changed(failure={"load_timeout": 10**9}))


class KeepsOldProcesses(Engine):
    """Processes of a failed worker group are not ended."""

    def _let_serve(self, generation: Generation) -> None:
        super()._let_serve(generation)
        generation.end.detach()


class RouterKeepsLoad(Engine):
    """The router does not learn that requests end."""

    def _let_serve(self, generation: Generation) -> None:
        super()._let_serve(generation)
        note_update = generation.router.note_update
        generation.router.note_update = lambda request_id, has_ended: note_update(  # type: ignore[method-assign]
            request_id, has_ended=False
        )


class RouterIgnoresLoad(Engine):
    """The router sends all requests to one replica."""

    def _let_serve(self, generation: Generation) -> None:
        super()._let_serve(generation)
        router = generation.router
        router.note_free_blocks = lambda index, num_free_blocks: None  # type: ignore[method-assign]
        router.choose_each = lambda request, request_ids: [0] * len(request_ids)  # type: ignore[method-assign]
        router.note_update = lambda request_id, has_ended: None  # type: ignore[method-assign]


class ForgetsRequests(Engine):
    """After a recovery requests are not sent again."""

    def _continue_all(self) -> list[RequestUpdate]:
        return [] if self._generation.epoch else super()._continue_all()


class ReplacesEveryReplica(Recovery):
    """No replica keeps its weights."""

    def _begin(self, guilty: Sequence[int], *, leaves_out: bool) -> None:
        num_ranks = self._generation.config.parallel.num_ranks
        guilty = range(num_ranks, num_ranks + len(self._generation.group.replicas))
        super()._begin(guilty, leaves_out=leaves_out)


class LosesPieces(Channel[Any]):
    """It drops the beginning of a message whose end has not arrived."""

    def _take_messages(self) -> list[Any]:
        messages = super()._take_messages()
        self._inbox.clear()
        return messages


class DropsWhatDoesNotFit(Channel[Any]):
    """It drops what the socket does not take at once."""

    def _write(self) -> None:
        super()._write()
        self._outbox.clear()


class OverlooksTheEnd(Channel[Any]):
    """It does not notice that the other end is closed."""

    def _read(self) -> None:
        super()._read()
        self.is_closed = False


@dataclass(frozen=True)
class PlantedInEngine:
    part: Any  # a class of engines, of their requests, of their recoveries, or of channels
    names: set[str]  # invariants that the simulator may find violated first

    @property
    def name(self) -> str:
        return str(self.part.__name__)

    @property
    def engine_class(self) -> type[Engine]:
        return self.part if issubclass(self.part, Engine) else Engine

    @property
    def requests_class(self) -> type[RequestsInFlight]:
        return self.part if issubclass(self.part, RequestsInFlight) else RequestsInFlight

    @property
    def recovery_class(self) -> type[Recovery]:
        return self.part if issubclass(self.part, Recovery) else Recovery

    @property
    def channel_class(self) -> type[Channel[Any]]:
        return self.part if issubclass(self.part, Channel) else Channel


PLANTED_IN_ENGINE = [
    PlantedInEngine(FailsQuietly, {"I3"}),
    PlantedInEngine(BooksBeforeEncoding, {"I3", "I4"}),
    PlantedInEngine(ResumesFromTheStart, {"I3", "I10"}),
    PlantedInEngine(ForgetsAborts, {"I3"}),
    PlantedInEngine(ServesOldWeights, {"I12"}),
    PlantedInEngine(NeverNoticesSilence, {"deadlock"}),
    PlantedInEngine(ExpectsAQuickStart, {"false death"}),
    PlantedInEngine(WaitsForLoadingForEver, {"deadlock"}),
    PlantedInEngine(KeepsOldProcesses, {"orphans"}),
    PlantedInEngine(RouterKeepsLoad, {"I4"}),
    PlantedInEngine(RouterIgnoresLoad, {"I4"}),
    PlantedInEngine(ForgetsRequests, {"deadlock", "survivors"}),
    PlantedInEngine(ReplacesEveryReplica, {"survivors"}),
    PlantedInEngine(LosesPieces, {"I3", "I10", "false death", "deadlock"}),
    PlantedInEngine(DropsWhatDoesNotFit, {"I3", "false death", "deadlock"}),
    PlantedInEngine(OverlooksTheEnd, {"livelock", "slow"}),
]
