"""The folders where this Python finds modules, for other Pythons that it starts."""

from __future__ import annotations

import os
import sys


def working_folder() -> str:
    """Return the working folder of this process, or the root folder if the working folder was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.sep


def import_path() -> list[str]:
    """Return the folders where this process finds modules."""
    return [os.path.normpath(os.path.join(working_folder(), folder)) for folder in sys.path]


def same_modules() -> dict[str, str]:
    """Return environment variables with which a new Python finds the modules that this process finds."""
    return {
        "PYTHONPATH": os.pathsep.join(import_path()),
        "PYTHONSAFEPATH": "1",
    }  # safe: `-m` alone would look in the working folder first
