"""Performs the effects of a `Replica` with an executor. Engines differ in where they wait and in who gets updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from moeserve.executor.base import Executor
from moeserve.scheduling.lockstep import Outcome
from moeserve.scheduling.replica import Deliver, Effect, Events, Submit, Wait


def perform(
    loop: Generator[Effect, Any, None],
    events: Events | None,
    executor: Executor,
    futures: deque[Future[Outcome]],
    deliver: Callable[[Deliver], None],
) -> Wait | None:
    """Hand events to a replica's loop, and perform its effects until it waits again.

    Args:
        events: None at the start.
        futures: of the rounds in flight; new ones are appended.

    Returns:
        None if the loop has ended.
    """
    answer: Events | None = events
    while True:
        try:
            effect = loop.send(answer)
        except StopIteration:
            return None
        answer = None
        match effect:
            case Submit(work=work):
                futures.append(executor.submit(work))
            case Deliver():
                deliver(effect)
            case Wait():
                return effect


def completed(futures: deque[Future[Outcome]]) -> list[Outcome]:
    """Remove and return the outcomes of the oldest rounds that have ended.

    Raises the error of a round that has failed, once the outcomes before it were returned.
    """
    outcomes: list[Outcome] = []
    while futures and futures[0].done() and not (outcomes and futures[0].exception()):
        outcomes.append(futures.popleft().result())
    return outcomes
