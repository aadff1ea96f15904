"""The choice of a library for grouped-query attention on a GPU, by layer shape and kind of step.

The libraries are FlashInfer and torch's varlen attention. Our kernels write keys and values to the caches; a library
only replaces the function that attends to them. Ours serve wherever no library is known to be faster.

The choice follows a file of measured times (see `attention_times`), not a measurement at each start. Libraries differ
in the last bits of their results, so noise in a measurement could change a request's result between starts, ranks or
replicas. A file also costs nothing: no library is imported or compiled that is not used.

The choice lasts for a layer's life and affects no collective, so ranks that chose differently would still finish steps.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeserve.errors import SettingsError
from moeserve.ops.interfaces import AttentionBackend, AttentionShape, Kernels, KeyValueCache
from moeserve.ops.libraries.attention_times import (
    OWN,
    AttentionProblem,
    StepKind,
    Times,
    fastest,
    load_times,
    times_path,
)
from moeserve.ops.libraries.interface import Attend, AttentionLibrary, LibraryUnusable
from moeserve.step_inputs import StepInputs

if TYPE_CHECKING:
    from moeserve.config.settings import AttentionName

# T tokens, N query heads, G key-value heads, H head size

logger = logging.getLogger(__name__)

LIBRARY_NAMES = ("flashinfer", "varlen")


class LibraryAttention:
    """An attention backend with our own writes to the cache, and one function for decode steps and one for others."""

    def __init__(self, own: AttentionBackend, decode: Attend, chunks: Attend) -> None:
        self.own = own
        self.decode = decode
        self.chunks = chunks
        self.rotate_and_write = own.rotate_and_write

    def attend(
        self, query_TNH: Tensor, cache: KeyValueCache, step: StepInputs, sinks_N: Tensor | None = None
    ) -> Tensor:
        num_rows = len(query_TNH)
        attend = self.own.attend
        if num_rows:
            is_decode = num_rows == len(step.spans) and step.max_rows_per_chunk == 1
            attend = self.decode if is_decode else self.chunks
        return attend(query_TNH, cache, step, sinks_N)


class LibraryChoice:
    """Makes the attention backends of a model's layers from our own kernels and other libraries."""

    def __init__(
        self, own: Kernels, libraries: Sequence[AttentionLibrary], times: Times | None, block_size: int
    ) -> None:
        """
        Args:
            times: measured on this GPU; None: use the first library wherever it can serve.
            block_size: positions of a block of the caches.
        """
        self._own = own
        self._libraries = {library.label: library for library in libraries}
        self._times = times
        self._block_size = block_size
        self._chosen: dict[AttentionProblem, tuple[Attend | None, Attend | None]] = {}  # shared by layers of one shape

    def make_attention(self, shape: AttentionShape) -> AttentionBackend:
        own = self._own.make_attention(shape)
        problem = AttentionProblem(shape, self._block_size)
        if problem not in self._chosen:
            self._chosen[problem] = (self._choose(problem, "decode"), self._choose(problem, "chunks"))
        decode, chunks = self._chosen[problem]
        if decode is None and chunks is None:
            return own
        return LibraryAttention(own, decode or own.attend, chunks or own.attend)

    def _choose(self, problem: AttentionProblem, kind: StepKind) -> Attend | None:
        """Return a library's function, or None for our own."""
        available = {}
        for label, library in self._libraries.items():
            if reason := library.why_unavailable(problem, kind):
                logger.info("attention (%s, %s) runs on our kernels, not %s: %s", problem.key, kind, label, reason)
            else:
                available[label] = library
        if self._times is None:
            label = next(iter(available), OWN)
        else:
            label = fastest(self._times.get(problem.key, {}).get(kind, {}), available)
        if label == OWN:
            return None
        logger.info("attention (%s, %s) runs on %s", problem.key, kind, label)
        return available[label].make_attend(problem, kind)


def with_attention_library(own: Kernels, wanted: AttentionName, device: torch.device, block_size: int) -> Kernels:
    """Return the table with grouped-query attention by the given library, or by the one measured to be fastest.

    Raises:
        SettingsError: the library was named, and cannot be used here.
    """
    if wanted == "measured":
        times: Times | None = load_times(times_path(device))
        libraries = _open_measured(times or {}, device)
        if not libraries:
            return own
    else:
        times, libraries = None, [_open_named(own, wanted, device)]
    choice = LibraryChoice(own, libraries, times, block_size)
    return dataclasses.replace(own, make_attention=choice.make_attention)


def open_library(name: str, device: torch.device) -> AttentionLibrary:
    """Open one of `LIBRARY_NAMES`.

    Raises:
        LibraryUnusable: it is not installed, has the wrong version, or does not support this GPU.
    """
    match name:
        case "flashinfer":
            from moeserve.ops.libraries.flashinfer import open_flashinfer

            return open_flashinfer(device)
        case "varlen":
            from moeserve.ops.libraries.varlen import open_varlen

            return open_varlen(device)
        case _:
            raise LibraryUnusable(f"there is no {name!r}; there are {', '.join(LIBRARY_NAMES)}")


def _open_named(own: Kernels, name: AttentionName, device: torch.device) -> AttentionLibrary:
    try:
        if own.name != "triton":
            raise LibraryUnusable("keys and values are written by Triton kernels, and triton is not installed")
        return open_library(name, device)
    except LibraryUnusable as error:
        raise SettingsError(f"attention_backend={name!r} cannot be used: {error}. Use 'triton' or 'auto'") from None


def _open_measured(times: Times, device: torch.device) -> list[AttentionLibrary]:
    """Open the libraries that are ahead of ours in any measurement, as far as they can be used."""
    measured = [seconds for kinds in times.values() for seconds in kinds.values()]
    ahead = {label.split()[0] for seconds in measured for label in seconds if fastest(seconds, [label]) != OWN}
    libraries = []
    for name in sorted(ahead):
        try:
            libraries.append(open_library(name, device))
        except LibraryUnusable as error:
            logger.info("attention runs on our kernels, though %s was measured to be faster here: %s", name, error)
    return libraries
