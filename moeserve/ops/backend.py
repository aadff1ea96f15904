"""The implementations that one rank uses, and the choice among the implementations of an operation."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from moeserve.ops.side_stream import InlineStream, SideStream

logger = logging.getLogger(__name__)

Shape = TypeVar("Shape")
Operation = TypeVar("Operation")
Library = TypeVar("Library")


class StepGraph(Protocol):
    """A CPU graph: the native kernels called between `begin_capture` and `end_capture`, replayed by one call."""

    def begin_capture(self) -> None: ...

    def end_capture(self) -> None: ...

    def replay(self) -> None: ...


def allocate_weights(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The implementations that a rank uses, and the properties of its device on which callers depend.

    `select_backend` makes one backend per rank. Constructors pass the backend to `make` of the operations they need.
    """

    names: tuple[str, ...]  # names of implementations, preferred first; the last name is "reference"
    native: Any = None  # the module of the C++ kernels, if "cpu" is among the names
    libraries: tuple[object, ...] = ()  # opened libraries, which some of the named implementations use
    side_stream: SideStream = field(default_factory=InlineStream)
    make_step_graph: Callable[[int, int], StepGraph] | None = None  # (address, bytes of an Arena); None: no CPU graphs
    packing: Any = None  # the `CpuPacking`, if kernels read packed weights; None: kernels read open weights
    allocate_weights: Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor] = allocate_weights
    # Returns a context in which results may be zeros, to measure memory.
    measure_memory_only: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    products_gather_rows: bool = False  # products accept a `Gather`, and never copy the counts to the host
    compiles_on_first_use: bool = False  # run every range of sizes once before serving
    supports_cuda_graphs: bool = False
    needs_finite_caches: bool = False  # caches must hold finite numbers even where nothing was written
    is_batch_invariant: bool = False  # a row's bytes do not depend on its batch; sums have one order
    instruction_set: str = "none"  # the layout of packed weights depends on it
    _noted: set[str] = field(default_factory=set, repr=False, compare=False)

    def library(self, kind: type[Library]) -> Library:
        """Return the opened library of type `kind`."""
        return next(each for each in self.libraries if isinstance(each, kind))

    def with_library(self, name: str, library: object) -> Backend:
        """Return a backend with an opened library that prefers the implementations called `name`."""
        return replace(self, names=(name, *self.names), libraries=(*self.libraries, library))

    def note(self, message: str) -> None:
        """Log a message once."""
        if message not in self._noted:
            self._noted.add(message)
            logger.info(message)


REFERENCE = Backend(names=("reference",))
TRITON = Backend(names=("triton", "reference"), products_gather_rows=True, needs_finite_caches=True)


def in_order(backend: Backend) -> Backend:
    """Return the backend of Triton kernels with one order of sums, for any batch, chunks and ranks."""
    assert "triton" in backend.names
    return replace(backend, is_batch_invariant=True)


@dataclass(frozen=True)
class Implementation(Generic[Shape, Operation]):
    """One implementation of an operation, for the backends that name it."""

    make: Callable[[Backend, Shape], Operation]
    why_not: Callable[[Shape], str | None] = lambda shape: None  # reason not to serve a shape, as a clause; None: serve


def choose(table: Mapping[str, Implementation[Shape, Operation]], backend: Backend, shape: Shape) -> Operation:
    """Return the operation made by the first of the backend's implementations that is in the table and serves `shape`.

    If an implementation that comes earlier in `Backend.names` cannot serve the shape, the reason is logged once.
    """
    for name in backend.names:
        if name not in table:
            continue
        if (reason := table[name].why_not(shape)) is None:
            return table[name].make(backend, shape)
        backend.note(f"{name} is replaced where it cannot be used: {reason}")
    raise AssertionError(f"no implementation of {backend.names} serves {shape}")
