"""A change of the number of replicas in every order of events.

A state of a `Story` is reached by playing its events again from the start. What replicas do that no poll watches any
more is left out, because it cannot be observed. In each state the search checks that

- something can happen until all requests have ended and the change is over: no wake-up is lost,
- the client never goes on for ever while nothing else happens: no poll spins,
- a sleep that ended by its time limit would find nothing to do, when nothing is ready.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from typing import Any

from scaling_story import OPTIONAL, Plot, Story

from moeserve.engine.engine import Engine


class Paused(BaseException):
    """The search follows this story no further."""


class Search:
    """Visits every state of a plot."""

    def __init__(self, plot: Plot, engine_class: type[Engine] = Engine) -> None:
        self._plot, self._engine_class = plot, engine_class
        self._seen: set[Any] = set()
        self._stack: list[tuple[str, ...]] = [()]
        self._history: list[str] = []  # of the story that is played
        self._script: deque[str] = deque()  # events to be played before the search goes on
        self._since_event: set[Any] = set()  # states in which the client went on
        self._before_look: Any = None
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Visit every state. Return what was counted.

        Raises:
            AssertionError: a state violates what must hold. It names the events that lead there.
        """
        gc.collect()
        gc.freeze()  # so that a collection looks at what belongs to stories alone
        try:
            while self._stack:
                self._play(self._stack.pop())
        finally:
            gc.unfreeze()
        return self.counts

    def _play(self, history: tuple[str, ...]) -> None:
        self._history, self._script = list(history), deque(history)
        self._since_event, self._before_look = set(), None
        story = Story(self._plot, self._engine_class)
        try:
            story.serve(self._choose)
            assert self._before_look is None, "only the time limit of a sleep ends it, and then all is done"
            self.counts["ends"] += 1
            story.check_end()
            self.counts["scaled" if story.change.exception() is None else "refused"] += 1
        except Paused:
            pass
        except AssertionError as violation:
            raise AssertionError(f"after {', '.join(self._history)}: {violation}") from violation
        finally:
            story.discard()
            self.counts["stories"] += 1
            if self.counts["stories"] % 200 == 0:
                gc.collect()  # closes the pipes of engines

    def _choose(self, story: Story) -> str:
        if self._script:
            event = self._script.popleft()
            if event == "look":
                self._before_look = story.state()
            return event
        state = story.state()
        if self._before_look is not None:
            assert state == self._before_look, "only the time limit of a sleep ends it, with something to do"
            raise Paused
        assert state not in self._since_event, "the client goes on for ever, and nothing happens"
        if state in self._seen:
            raise Paused
        self._seen.add(state)
        self.counts["states"] += 1
        events = story.events()
        assert any(event.split()[0] not in OPTIONAL for event in events), "nothing can happen, and work is left"
        history = tuple(self._history)
        self._stack += [(*history, event) for event in events[1:]]
        if "client" in events:
            self._since_event.add(state)
        else:
            self._stack.append((*history, "look"))
        if events[0] != "client":
            self._since_event.clear()
        self._history.append(events[0])
        return events[0]


def explore(plot: Plot, engine_class: type[Engine] = Engine) -> Counter[str]:
    """Visit every state of a plot. Return what was counted."""
    return Search(plot, engine_class).run()
