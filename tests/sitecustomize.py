"""Imported by every Python that a test starts with this folder on its path: lets a test change ranks before they run.

With MOESERVE_TEST_OTHER_SYSTEM, each process of moeserve behaves as on another system than Linux; see other_system.py.

A test sets MOESERVE_TEST_PLANT to "module:argument". Each rank that is started then imports the module and calls its
`plant(name of the rank, argument)`, once all modules of the rank are loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

if "moeserve.processes" in sys.orig_argv:  # a rank, or the fork server from which ranks are forked
    if "MOESERVE_TEST_OTHER_SYSTEM" in os.environ:
        import other_system
        import pytest

        only_processes = os.environ["MOESERVE_TEST_OTHER_SYSTEM"] == "processes"
        other_system.pretend(pytest.MonkeyPatch(), only_processes=only_processes)

    from moeserve.processes.child import Parent

    channel = Parent.channel

    def channel_after_planting(self: Parent, incoming: Any) -> Any:
        """Plant when the process opens its only channel. Processes that it starts inherit the variable."""
        if planted := os.environ.get("MOESERVE_TEST_PLANT"):
            module, _, argument = planted.partition(":")
            importlib.import_module(module).plant(self.name, argument)
        return channel(self, incoming)

    Parent.channel = channel_after_planting  # type: ignore[method-assign]
