"""`RequestsInFlight`: the requests that have not ended, and the replicas that serve them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from moeserve.engine.base import require_encodable
from moeserve.engine.generation import Generation
from moeserve.engine.launcher import ReplicaHandle
from moeserve.protocol import AbortRequest, AddRequest, CollectLoad, Request, RequestUpdate, Sample, Wake

# Restarts without a new token of a request, after which the next failure ends the request: it may be the cause.
MAX_FRUITLESS_RESTARTS = 3


@dataclass(eq=False)
class InFlight:
    """A request that has not ended."""

    request: Request
    replica: ReplicaHandle
    token_ids: list[int] = field(default_factory=list)  # tokens received
    is_aborted: bool = False  # abort sent, end not received yet
    num_failures: int = 0  # failures of the engine since the last token

    def resumed(self) -> Request:
        """Return a request that continues after the tokens that were received."""
        return msgspec.structs.replace(self.request, output_token_ids=self.request.output_token_ids + self.token_ids)


class RequestsInFlight:
    """Sends requests to the replicas of a generation, and resends them, with their tokens, to the next generation.

    Replicas sleep while no replica has a request. A step needs all replicas, so all are woken when a replica gets a
    request.
    """

    def __init__(self) -> None:
        self.generation: Generation  # the generation that serves
        self._known: dict[str, InFlight] = {}
        self._must_wake = False  # a replica has work while others may be asleep
        self._has_sleepers = False  # requests were sent without a wake-up, because other requests were running

    def __len__(self) -> int:
        return len(self._known)

    @property
    def ids(self) -> Container[str]:
        return self._known.keys()

    def send(self, request: Request, samples: Sequence[Sample] = ()) -> None:
        """Send a request and further samples of it, in one message to each replica that serves some of them.

        Raises:
            RequestError: the request cannot be encoded. Nothing has changed.
        """
        require_encodable(request)
        self._must_wake |= not self._known
        requests = AddRequest(request, list(samples)).requests
        replicas = self.generation.group.replicas
        indices = self.generation.router.choose_each(request, [each.request_id for each in requests])
        by_replica: dict[int, list[Request]] = {}
        for index, each in zip(indices, requests, strict=True):
            by_replica.setdefault(index, []).append(each)
            self._known[each.request_id] = InFlight(each, replicas[index])
        for index, (first, *others) in by_replica.items():
            message = AddRequest(first, [Sample(each.request_id, each.seed) for each in others])
            replicas[index].send(message)
        self._has_sleepers |= not self._must_wake  # a replica that runs requests keeps all others awake

    def collect_load(self) -> None:
        """Request a window of expert loads."""
        self.generation.group.replicas[0].send(CollectLoad())
        self._must_wake = True

    def abort(self, request_id: str) -> None:
        if (known := self._known.get(request_id)) is not None:
            known.is_aborted = True
            known.replica.send(AbortRequest(request_id))

    def wake_sleepers(self) -> None:
        """Wake all replicas if one may be asleep, because a step needs all of them."""
        if self._must_wake:
            self._must_wake = self._has_sleepers = False
            replicas = self.generation.group.replicas
            for replica in replicas if len(replicas) > 1 else ():  # a single replica wakes up for its own messages
                replica.send(Wake())

    def live_updates(self, updates: Iterable[RequestUpdate]) -> Iterable[RequestUpdate]:
        """Yield the updates of requests that have not ended, and remove requests that end."""
        for update in updates:
            known = self._known.get(update.request_id)
            if known is None:
                continue
            if update.token_ids:
                known.token_ids += update.token_ids
                known.num_failures = 0
            has_ended = update.finish_reason is not None
            self.generation.router.note_update(update.request_id, has_ended=has_ended)
            if has_ended:
                del self._known[update.request_id]
                self._must_wake |= self._has_sleepers  # this may have been the request that kept replicas awake
            yield update

    def continue_all(self) -> list[RequestUpdate]:
        """Resend all requests with the tokens that were received. Return final updates of aborted requests."""
        before, self._known = self._known, {}
        for name, known in before.items():
            if not known.is_aborted:
                self.send(known.resumed())
                self._known[name].num_failures = known.num_failures
        aborted = [name for name, known in before.items() if known.is_aborted]
        return [RequestUpdate(request_id=name, finish_reason="abort") for name in aborted]

    def end_after_failure(self, error: str, *, may_resume: bool) -> list[RequestUpdate]:
        """Count a failure for each request. End all requests, or with `may_resume` those with too many failures."""
        for known in self._known.values():
            known.num_failures += 1
        return self._end(
            [
                name
                for name, known in self._known.items()
                if not may_resume or known.num_failures > MAX_FRUITLESS_RESTARTS
            ],
            error=error,
        )

    def abandon_all(self, *, error: str) -> list[RequestUpdate]:
        """Abort all requests at their replicas, and return the final update of each."""
        for name, known in self._known.items():
            known.replica.send(AbortRequest(name))
        return self.end_all(error=error)

    def end_all(self, *, error: str | None) -> list[RequestUpdate]:
        """Remove all requests. Return the final update of each.

        Args:
            error: the reason; None: the engine was shut down.
        """
        return self._end(list(self._known), error=error)

    def _end(self, request_ids: Sequence[str], *, error: str | None) -> list[RequestUpdate]:
        for name in request_ids:
            del self._known[name]
        return [RequestUpdate(request_id=name, finish_reason="abort", error=error) for name in request_ids]
