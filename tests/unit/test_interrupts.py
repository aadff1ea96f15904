"""Deferred interrupts: when Ctrl-C is raised."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from moeserve.interrupts import interrupts_allowed, interrupts_deferred

Note = Callable[[int], None]


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def deferred(note: Note) -> None:
    with interrupts_deferred():
        press()
        with interrupts_deferred():  # the outermost counts
            press()
        note(1)


def allowed(note: Note) -> None:
    with interrupts_deferred():
        with interrupts_allowed():
            press()
            note(1)
        note(2)


def arrived_before(note: Note) -> None:
    with interrupts_deferred():
        press()
        with interrupts_allowed():
            note(1)


def deferred_again(note: Note) -> None:
    with interrupts_deferred():
        with interrupts_allowed():
            note(1)
        press()
        note(2)


@pytest.mark.parametrize(
    ("work", "reached"), [(deferred, [1]), (allowed, []), (arrived_before, []), (deferred_again, [1, 2])]
)
def test_the_moment_of_an_interrupt(work: Callable[[Note], None], reached: list[int]) -> None:
    noted: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        work(noted.append)
    assert noted == reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def fail(note: Note) -> None:
    with interrupts_deferred():
        press()
        raise ZeroDivisionError


def test_an_error_is_not_hidden_by_a_deferred_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        fail(print)
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_other_threads_keep_their_handler() -> None:
    handlers = []

    def work() -> None:
        with interrupts_deferred(), interrupts_allowed():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_program_that_ignores_interrupts_may_go_on() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_deferred(), interrupts_allowed():
            press()
    finally:
        signal.signal(signal.SIGINT, before)
