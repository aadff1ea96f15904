"""The thread that runs the engine of an `AsyncLLM`, and wakes the tasks that wait for outputs."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading

from moeserve.api.session import Session
from moeserve.errors import EngineError

# Maximum seconds between checks of an idle engine for failed processes.
SECONDS_BETWEEN_CHECKS = 1.0


class Mailbox:
    """An event on which a task waits for new output of its request."""

    def __init__(self) -> None:
        """Create the mailbox. Must be called in the event loop of the task."""
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.changed.set()  # there may be output already


class EngineThread:
    """Runs a session in a thread.

    Neither object refers to the `AsyncLLM`, so the thread does not keep an unused `AsyncLLM` alive.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.failure: BaseException | None = None
        self.is_closing = False
        self.has_ended = False  # no further outputs will be delivered
        self.mailboxes: dict[str, Mailbox] = {}  # by id of the prompt
        self._has_work = threading.Event()
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._run, name="moeserve session", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self.is_closing

    @property
    def errored(self) -> bool:
        """True if the engine has failed for good. With on_failure="restart", a failure is not final."""
        return self.failure is not None or (bool(self.session.engine.refusal) and not self.is_closing)

    @property
    def dead_error(self) -> BaseException:
        """The error that requests get after the engine has failed or was shut down."""
        return self.failure or EngineError(self.session.engine.refusal or "the engine is being shut down")

    def open_mailbox(self, prompt_id: str) -> Mailbox:
        """Return the mailbox of a prompt, and run the engine."""
        mailbox = self.mailboxes[prompt_id] = Mailbox()
        self.run()
        return mailbox

    def discard(self, prompt_id: str) -> None:
        """End and remove a prompt, and close its mailbox if it has one."""
        self.mailboxes.pop(prompt_id, None)
        self.session.discard([prompt_id])
        self.run()

    def run(self) -> None:
        """Make the thread run the engine soon, because there is new work."""
        self._has_work.set()

    def stop(self) -> None:
        """End all requests, shut down the engine, and wait until that is done. May be called twice.

        This method is also a finaliser, so it may be called in any thread, and in a fork of the process, where nothing
        runs.
        """
        if os.getpid() != self._owner:
            return
        self.is_closing = True
        self.session.engine.cancel_restart()
        self.session.wake()
        self.run()
        if self._thread is threading.current_thread():  # the garbage collector runs in it
            atexit.register(self._thread.join)
        else:
            self._thread.join()

    def _run(self) -> None:
        """Run the engine while there are requests, and wake the tasks whose outputs have changed."""
        try:
            while not self.is_closing:
                self._notify(self.session.poll())  # also polls an idle engine, to detect dead processes
                if not self.session.has_work:
                    self._has_work.wait(SECONDS_BETWEEN_CHECKS)
                    self._has_work.clear()
        except BaseException as error:
            self.failure = error
        try:
            self.session.shutdown()
            self.session.poll()  # returns the ends of all requests
        except BaseException as error:
            self.failure = self.failure or error
        self.has_ended = True
        self._notify(list(self.mailboxes))

    def _notify(self, prompt_ids: list[str]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
        for prompt_id in prompt_ids:
            if (mailbox := self.mailboxes.get(prompt_id)) is not None:
                by_loop.setdefault(mailbox.loop, []).append(mailbox)
        for loop, mailboxes in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_set_all, mailboxes)


def _set_all(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.changed.set()
