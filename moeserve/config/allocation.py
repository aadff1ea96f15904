"""Errors for settings that together need more memory than there is, and for limits that are too low for torch."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from moeserve.config.engine_config import EngineConfig
from moeserve.errors import SettingsError
from moeserve.machine import free_memory, resource_limits, shown_bytes

# parts of the messages of RuntimeErrors, on CPUs and on GPUs
MESSAGES_OF_TORCH = ("can't allocate memory", "out of memory")
TORCH_BYTES = 512 * 2**20  # address space that torch for CPUs takes while it is imported


def require_room_for_torch() -> None:
    """Refuse a limit within which torch cannot be imported: its libraries would abort, or raise an ImportError.

    Raises:
        SettingsError: the limit on the address space is too low.
    """
    for limit in resource_limits():
        if "RLIMIT_AS" in limit.name and "torch" not in sys.modules and limit.left < TORCH_BYTES:
            raise SettingsError(
                f"torch cannot be imported: it takes {shown_bytes(TORCH_BYTES)} of address space, but {limit}; raise "
                "the limit to several GiB, or remove it with `ulimit -v unlimited`"
            )


@contextmanager
def refusing_what_cannot_be_allocated(config: EngineConfig) -> Iterator[None]:
    """Convert a failed allocation while a rank starts into an error with the settings that take memory.

    Before weights are loaded, ranks refuse each setting that is too large by itself. This context is for settings that
    are too large together.

    Raises:
        SettingsError: instead of the error of the allocation.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not _is_failed_allocation(error):
            raise
        names = ["max_num_seqs", "max_num_batched_tokens", "kv_cache_memory", "kv_host_memory", "max_model_len"]
        given = ", ".join(f"{name}={value}" for name, value in config.settings().items() if name in names and value)
        limits = "".join(f" ({limit})" for limit in resource_limits())
        raise SettingsError(
            f"{given} do not fit in memory together: an allocation failed when {shown_bytes(free_memory())} were "
            f"free{limits}; lower one of them"
        ) from error


def _is_failed_allocation(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or any(text in str(error) for text in MESSAGES_OF_TORCH)
