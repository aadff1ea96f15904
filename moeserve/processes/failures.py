"""Reports of failed processes, and the choice of the root cause among several failures."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Sequence

import msgspec

from moeserve import errors
from moeserve.errors import DistributedError, EngineError, MoeserveError
from moeserve.processes.memory_kills import MEMORY_KILLS

# Frames of torch that only forward a call from one layer of a model to the next are left out of tracebacks.
FORWARDING_FILES = (
    os.path.join("torch", "nn", "modules", "module.py"),
    os.path.join("torch", "utils", "_contextlib.py"),
)

# Meanings of signals that the system sends for something that a user can change.
MEANINGS = {
    "SIGBUS": "a file that the process had mapped was cut short or cannot be read, such as the model's, or the disk or "
    "/dev/shm is full"
}


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a failed process."""

    name: str  # the process's name in messages: "rank 3"
    cause: str  # one line: "killed by SIGKILL", "ValueError: ..."
    is_consequence: bool = False  # another rank failed first: a DistributedError
    error: str | None = None  # name of the error's class, if the class is in moeserve/errors.py
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.cause}" + (f"\n\n{self.traceback.rstrip()}" if self.traceback else "")


def report_of(error: BaseException, name: str) -> FailureReport:
    """Return the report of a process that failed with an exception."""
    kind = type(error)
    is_named = isinstance(error, MoeserveError) and getattr(errors, kind.__name__, None) is kind
    return FailureReport(
        name=name,
        cause=str(error) if is_named else f"{kind.__name__}: {error}".removesuffix(": "),
        is_consequence=isinstance(error, DistributedError),
        error=kind.__name__ if is_named else None,
        traceback=_short_traceback(error),
    )


def root_cause(reports: Sequence[FailureReport]) -> FailureReport:
    """Return the first failure that is not a consequence of another failure."""
    return next((report for report in reports if not report.is_consequence), reports[0])


def as_error(report: FailureReport, context: str) -> MoeserveError:
    """Return the exception to raise for a failed process. It has the original class if the user's input caused the
    failure.

    Args:
        context: the activity that failed, for the message, such as "loading the model".
    """
    kind = getattr(errors, report.error or "", EngineError)
    if issubclass(kind, ValueError):
        return kind(f"{report.cause} ({report.name}, {context})")
    return EngineError(f"{context}: {report}")


def shown_status(status: int, num_memory_kills: int) -> str:
    """Return a description of an exit status for messages. Call this once for each process that has ended.

    Args:
        status: a negative one is the number of a signal.
        num_memory_kills: `MEMORY_KILLS.count` when the process was started.
    """
    if status == -signal.SIGKILL and (cause := MEMORY_KILLS.take_cause(num_memory_kills)):
        return cause
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        return f"killed by signal {-status}"
    return f"killed by {name}" + (f" ({MEANINGS[name]})" if name in MEANINGS else "")


def _short_traceback(error: BaseException) -> str:
    """Return a traceback of two lines for each frame, so that its end is on the first screen."""
    shown = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = shown
    while link is not None:
        outer, innermost = link.stack[:-1], link.stack[-1:]
        frames = [frame for frame in outer if not frame.filename.endswith(FORWARDING_FILES)] + innermost
        link.stack = traceback.StackSummary.from_list(
            [(frame.filename, frame.lineno or 0, frame.name, frame.line) for frame in frames]
        )
        link = link.__cause__ or link.__context__
    return "".join(shown.format())
