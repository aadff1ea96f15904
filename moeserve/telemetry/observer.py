"""Where windows of expert load go: a file, and metrics on a port, as far as they are wanted. Knows not who counted."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from moeserve.errors import SettingsError
from moeserve.telemetry.expert_load import LoadWindow, write_window
from moeserve.telemetry.metrics import Metrics, MetricsServer


class LoadObserver:
    """Told every window of an engine, in their order, by one process."""

    def __init__(self, path: Path | None, port: int | None) -> None:
        """
        Args:
            path: a file to which each window is added as a line.
            port: on the loopback interface, where Prometheus finds the metrics.

        Raises:
            SettingsError: the file cannot be written, the port is in use, or prometheus_client is missing.
        """
        self._file: BinaryIO | None = None
        self._metrics: Metrics | None = None
        self._server: MetricsServer | None = None
        try:
            if path is not None:
                self._file = _opened(path)
            if port is not None:
                self._metrics = Metrics()
                self._server = self._metrics.serve(port)
        except BaseException:
            self.close()
            raise

    @property
    def is_wanted(self) -> bool:
        """Whether windows go anywhere."""
        return self._file is not None or self._server is not None

    def observe(self, window: LoadWindow) -> None:
        """A window without steps says nothing, and is left out."""
        if not window.num_steps:
            return
        if self._file is not None:
            write_window(self._file, window)
        if self._metrics is not None:
            self._metrics.observe(window)

    def close(self) -> None:
        """May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._server is not None:
            self._server.stop()
            self._server = None


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("ab")
    except OSError as error:
        raise SettingsError(f"expert_load_file={str(path)!r} cannot be written: {error.strerror}") from None
