"""`Profiler`: traces of torch's operations, from `LLM.start_profile` to `LLM.stop_profile`."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig

from moeserve.config.engine_config import EngineConfig
from moeserve.config.settings import ProfilerConfig
from moeserve.errors import SettingsError, shown

logger = logging.getLogger(__name__)


class Profiler:
    """Records the operations of all threads of this process, including the rank's thread.

    Steps that are replayed as a CPU graph appear as a whole; `enforce_eager=True` records their parts.
    """

    def __init__(self, settings: ProfilerConfig | None) -> None:
        self._settings = settings
        self._running: torch.profiler.profile | None = None
        self._num_traces = 0

    def start(self, config: EngineConfig) -> None:
        """Start to record.

        Raises:
            SettingsError: there is no folder for traces, ranks run in other processes, or a trace is being recorded.
        """
        if self._settings is None:
            raise SettingsError(
                "start_profile needs a folder for traces: "
                'LLM(profiler_config={"profiler": "torch", "torch_profiler_dir": FOLDER})'
            )
        if config.parallel.executor != "uniproc":
            raise SettingsError(
                f"start_profile records the ranks of this process alone, and executor={config.parallel.executor!r}"
            )
        if self._running is not None:
            raise SettingsError("start_profile: a trace is being recorded; call stop_profile first")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if config.compute.device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        all_threads = _ExperimentalConfig(profile_all_threads=True)
        self._running = torch.profiler.profile(activities=activities, experimental_config=all_threads)
        self._running.start()

    def stop(self) -> None:
        """Write the trace in Chrome's format. Does nothing if no trace is being recorded.

        Raises:
            SettingsError: the trace cannot be written.
        """
        if self._running is None or self._settings is None:
            return
        running, self._running = self._running, None
        running.stop()
        folder = Path(self._settings.torch_profiler_dir)
        path = folder / f"moeserve-{os.getpid()}-{self._num_traces}.pt.trace.json"
        self._num_traces += 1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(path))
        except OSError as error:
            raise SettingsError(f"torch_profiler_dir={shown(str(folder))}: cannot write a trace: {error}") from None
        logger.warning("wrote a trace of operations to %s", path)
