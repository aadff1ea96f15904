"""The import of optional libraries, and the reasons why a library cannot be used."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch


class LibraryUnusable(Exception):
    """A library cannot be used on this machine. The message is the reason, as a clause."""


def import_library(name: str, package: str) -> ModuleType:
    """Import a module of a library that `pip install package` installs.

    Raises:
        LibraryUnusable: the module cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise LibraryUnusable(f"{name} cannot be imported ({reason}); pip install {package}") from None


def missing_part(library: ModuleType, needs: Mapping[str, set[str]]) -> str | None:
    """Return the first needed function that a library lacks, or the first needed argument as `function(argument=)`.

    None: nothing is missing.

    Args:
        needs: the needed arguments of each needed function or class, by its path in the library.
    """
    for path, arguments in needs.items():
        part: Any = library
        for name in path.split("."):
            part = getattr(part, name, None)
        if part is None:
            return path
        known = inspect.signature(part).parameters.values() if arguments else ()
        lacking = sorted(arguments - {each.name for each in known})
        if lacking and not any(each.kind is each.VAR_KEYWORD for each in known):
            return f"{path}({lacking[0]}=)"
    return None


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for other devices, on which tests run."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
