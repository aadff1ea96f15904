"""The installed libraries that can replace our attention kernels."""

from __future__ import annotations

import functools

import torch

from moeserve.ops.libraries.attention import LIBRARY_NAMES, open_library
from moeserve.ops.libraries.interface import AttentionLibrary, LibraryUnusable


@functools.cache
def installed_libraries(device: torch.device) -> tuple[AttentionLibrary, ...]:
    """Return those that can be used on a GPU, and print why the others cannot."""
    found = []
    for name in LIBRARY_NAMES if device.type == "cuda" else ():
        try:
            found.append(open_library(name, device))
        except LibraryUnusable as error:
            print(f"{name} is left out: {error}", flush=True)
    return tuple(found)
