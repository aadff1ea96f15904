"""Progress bars on a terminal, and lines of the log elsewhere."""

from __future__ import annotations

import io
import logging
import sys
import threading
from typing import Any

from tqdm import tqdm

LOGGED_PROGRESS = "{desc}: {n_fmt}B of {total_fmt}B in {elapsed}, {rate_fmt}"

logger = logging.getLogger(__name__)


class ProgressBar(tqdm):
    """A tqdm bar with a lock for threads: tqdm's own lock would set the program's start method of multiprocessing."""


ProgressBar.set_lock(threading.RLock())


def progress_bar(title: str, *, total: int | None, is_shown: bool, log_interval_s: float = 10.0) -> ProgressBar:
    """Return a progress bar of bytes, which is shown on a terminal, and otherwise logged at intervals.

    Args:
        log_interval_s: seconds until the first line of the log, and between lines.
    """
    options: dict[str, Any] = dict(desc=title, total=total, unit="B", unit_scale=True, unit_divisor=1024)
    if not is_shown or sys.stderr.isatty():
        return ProgressBar(disable=not is_shown, **options)
    options |= dict(delay=log_interval_s, mininterval=log_interval_s, bar_format=LOGGED_PROGRESS)
    return _LoggedProgress(file=io.StringIO(), **options)  # tqdm writes the end of a line to the file


class _LoggedProgress(ProgressBar):
    """Progress that is written to the log."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        logger.info("%s", str(self))  # now: the progress changes until a handler formats it
