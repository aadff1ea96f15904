"""The instruction set of each host's kernels, on which the last bits of results depend."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)


def own_kernels() -> str:
    """Return the instruction set of this host's C++ kernels; "" if there are none. Imports no torch."""
    if importlib.util.find_spec("moeserve._cpu") is None:
        return ""
    try:
        usable = importlib.import_module("moeserve._cpu").usable_isas()
    except ValueError:  # of MOESERVE_ISA, which ranks refuse
        return ""
    return str(usable[0]) if usable else ""


def warn_of_other_kernels(kernels: Mapping[str, str]) -> None:
    """Log a warning if hosts have different instruction sets.

    Args:
        kernels: the instruction set of each host, by its name; "" if it has no kernels.
    """
    if len(set(kernels.values())) > 1:
        logger.warning(
            "the kernels of the hosts differ (%s), so the last bits of results may depend on the host",
            ", ".join(f"{host}: {each or 'no C++ kernels'}" for host, each in kernels.items()),
        )
