"""Attention on a GPU by another library, for the layer shapes and kinds of step that it supports.

`attention_backend` names the library; FlashInfer is the only one so far. Our kernels always write to the caches. A
library only replaces the functions that attend to them, and ours run wherever it cannot. The latent
attention of libraries is an operation of its own.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from moeserve.errors import SettingsError
from moeserve.ops.attention.interface import AttentionBackend, AttentionShape, KeyValueCache
from moeserve.ops.backend import Backend
from moeserve.ops.latent_attention.library import LatentChoice, LatentLibrary
from moeserve.ops.libraries import LibraryUnusable
from moeserve.ops.measured import attention_key, is_ever_fastest, measured_on
from moeserve.step_inputs import StepInputs

if TYPE_CHECKING:
    from moeserve.config.settings import AttentionChoice

# T tokens, N query heads, G key-value heads, H head size

logger = logging.getLogger(__name__)

LIBRARY_NAMES = ("flashinfer",)
Table = Mapping[str, Mapping[int, str]]  # the fastest library by class and number of rows, see `measured.py`


class LibraryAttention:
    """An attention backend that writes to the cache with our kernels, and attends with a library's functions.

    There is one function for decode steps and one for other steps.
    """

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
    """The choice between our own kernels and one library's for the attention of a model's layers."""

    name = "library"  # of the implementation

    def __init__(self, library: AttentionLibrary, block_size: int, measured: Table | None = None) -> None:
        """
        Args:
            block_size: number of positions in a block of the caches.
            measured: measurements; the library serves only classes of steps for which it was mostly the fastest. None:
                it serves all steps that it supports.
        """
        self._measured = measured
        self._library = library
        self._block_size = block_size
        self._chosen: dict[AttentionProblem, tuple[Attend | None, Attend | None]] = {}  # shared by layers of a shape

    def attention(self, own: AttentionBackend, shape: AttentionShape) -> AttentionBackend:
        """Return the attention of a layer that `own` serves where the library cannot."""
        problem = AttentionProblem(shape, self._block_size)
        if problem not in self._chosen:
            self._chosen[problem] = (self._choose(problem, "decode"), self._choose(problem, "chunks"))
        decode, chunks = self._chosen[problem]
        if decode is None and chunks is None:
            return own
        return LibraryAttention(own, decode or own.attend, chunks or own.attend)

    def _choose(self, problem: AttentionProblem, kind: StepKind) -> Attend | None:
        """Return the library's function for steps of this kind, or None if our own kernels must serve them."""
        if self._measured is not None:
            fastest = list(self._measured.get(attention_key(problem.shape, kind), {}).values())
            if 2 * sum(name in LIBRARY_NAMES for name in fastest) <= len(fastest):
                return None
        if reason := self._library.why_unavailable(problem, kind):
            label = self._library.label
            logger.info("attention (%s, %s) runs on our kernels, not %s: %s", problem, kind, label, reason)
            return None
        return self._library.make_attend(problem, kind)


def with_attention_library(own: Backend, name: AttentionChoice, device: torch.device, block_size: int) -> Backend:
    """Return the backend with attention by the named library.

    Args:
        name: name of the library. "measured": use the library that was measured to be the fastest for grouped-query
            attention, if it can be used.

    Raises:
        SettingsError: the library cannot be used here.
    """
    if name == "measured":
        if "triton" not in own.names or not is_ever_fastest(LIBRARY_NAMES[0], device):
            return own
        try:
            choice = LibraryChoice(open_library(LIBRARY_NAMES[0], device), block_size, measured_on(device))
        except LibraryUnusable as error:
            logger.info("attention runs on our kernels, although a library was measured to be faster: %s", error)
            return own
        return with_libraries(own, choice)
    try:
        if "triton" not in own.names:
            raise LibraryUnusable("keys and values are written by Triton kernels, and triton is not installed")
        library = open_library(name, device)
    except LibraryUnusable as error:
        raise SettingsError(f"attention_backend={name!r} cannot be used: {error}. Use 'triton'") from None
    return with_libraries(own, LibraryChoice(library, block_size), LatentChoice(open_latent_library(name, device)))


def with_libraries(own: Backend, *choices: LibraryChoice | LatentChoice) -> Backend:
    """Return the backend with attention by the libraries of some choices."""
    names = (choice.name for choice in choices)
    return dataclasses.replace(own, names=(*names, *own.names), libraries=(*own.libraries, *choices))


def open_library(name: str, device: torch.device) -> AttentionLibrary:
    """Open one of `LIBRARY_NAMES`.

    Raises:
        LibraryUnusable: the library is not installed, has the wrong version, or does not support this GPU.
    """
    match name:
        case "flashinfer":
            from moeserve.ops.attention.flashinfer import open_flashinfer

            return open_flashinfer(device)
        case _:
            raise LibraryUnusable(f"there is no {name!r}; there are {', '.join(LIBRARY_NAMES)}")


def open_latent_library(name: str, device: torch.device) -> LatentLibrary:
    """Open the latent attention of one of `LIBRARY_NAMES`, which has been opened by `open_library`."""
    from moeserve.ops.attention.flashinfer import import_flashinfer
    from moeserve.ops.latent_attention.flashinfer import FlashInferLatent

    assert name == "flashinfer"
    return FlashInferLatent(import_flashinfer(), device)


StepKind = Literal["decode", "chunks"]  # "decode": one row in each chunk; "chunks": all other steps


@dataclass(frozen=True)
class AttentionProblem:
    """The facts that decide if a library supports a layer's grouped-query attention."""

    shape: AttentionShape
    block_size: int  # of the KV cache


class Attend(Protocol):
    """A function like `AttentionBackend.attend`, called only if there is at least one row."""

    def __call__(
        self, query_TNH: Tensor, cache: KeyValueCache, step: StepInputs, sinks_N: Tensor | None = None
    ) -> Tensor: ...


class AttentionLibrary(Protocol):
    """Another library's attention, opened once per model.

    Its functions may share memory, so only one may run at a time.
    """

    @property
    def label(self) -> str:
        """Name and version of the library."""
        ...

    def why_unavailable(self, problem: AttentionProblem, kind: StepKind) -> str | None:
        """Return why the library cannot run steps of this kind, as a clause; None if it can."""
        ...

    def make_attend(self, problem: AttentionProblem, kind: StepKind) -> Attend:
        """Return the function for steps of a supported kind. The function for "decode" can be captured in a CUDA graph.

        Results of rows without a position, which are padding, are undefined; a backend returns zeros for them.
        """
        ...
