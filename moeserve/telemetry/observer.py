"""Writes load windows to a file and to Prometheus metrics, as configured."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from moeserve.errors import SettingsError
from moeserve.telemetry.expert_load import LoadWindow, write_window
from moeserve.telemetry.metrics import MetricsServer

logger = logging.getLogger(__name__)


class LoadObserver:
    """The destinations of an engine's load windows. One process must pass every window, in order, to `observe`."""

    def __init__(self, path: Path | None, port: int | None) -> None:
        """
        Args:
            path: file to which each window is appended as a line; None: no file.
            port: port on the loopback interface that serves metrics; None: no metrics.

        Raises:
            SettingsError: the file cannot be written, the port is in use, or prometheus_client is missing.
        """
        self._file: BinaryIO | None = None
        self._metrics: MetricsServer | None = None
        self.listeners: list[Callable[[LoadWindow], None]] = []  # called with each window
        try:
            if path is not None:
                self._file = path.open("ab")
            if port is not None:
                self._metrics = MetricsServer(port)
        except OSError as error:
            raise SettingsError(f"expert_load_file={str(path)!r} cannot be written: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    @property
    def is_enabled(self) -> bool:
        """True if windows are written to a file, to metrics or to listeners."""
        return self._file is not None or self._metrics is not None or bool(self.listeners)

    def observe(self, window: LoadWindow) -> None:
        """Write a window, unless it has no steps. After a failed write, the file receives no more windows."""
        if not window.num_steps:
            return
        if self._file is not None:
            try:
                write_window(self._file, window)
            except OSError as error:
                logger.warning("expert_load_file=%r gets no more expert loads: %s", self._file.name, error.strerror)
                self._close_file()
        if self._metrics is not None:
            self._metrics.observe(window)
        for listener in self.listeners:
            listener(window)

    def close(self) -> None:
        """Close the file and the metrics server. May be called twice."""
        self._close_file()
        if self._metrics is not None:
            self._metrics.stop()
            self._metrics = None

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # buffered data cannot be written
                file.close()
