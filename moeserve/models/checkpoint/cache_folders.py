"""Folders of moeserve's cache that several processes may write at the same time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from moeserve.errors import CheckpointError


def written_once(folder: Path, is_complete: Callable[[], bool], write: Callable[[Path], None]) -> Path:
    """Return a folder of the cache. Write it on first use; it gets its name only when it is complete.

    Args:
        is_complete: returns True if the folder can be used; otherwise the folder is written again.
        write: writes the contents into an empty folder, given its path.

    Raises:
        CheckpointError: the folder cannot be written. Errors of `write` other than OSError are passed on.
    """
    is_old = folder.exists()
    if is_complete():
        return folder
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        if is_old:
            shutil.rmtree(folder, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            write(partial)
            partial.rename(folder)
        except OSError:
            if not is_complete():  # another process may have written the folder in the meantime
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder} ({error}); set MOESERVE_CACHE to a writable folder") from error
    return folder
