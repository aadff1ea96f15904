"""A CUDA device simulated on a CPU, with the semantics of streams, events and graphs, but without their speed.

`installed` replaces the functions of `torch.cuda` that this package calls. Tensors stay on the CPU, and operations
run when they are called. During a capture, every torch operation and every launch of Triton's interpreter is
recorded with its stream:

- A replay repeats the recorded operations on the same memory, and writes results to that of the captured ones.
- It is an error to access memory that another stream writes without an event in between, or to end the capture with a
  side stream that the capturing stream has not waited for.
- Reading a tensor on the host, or waiting for the device, raises CUDA's error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

COMPARED_BYTES = 2**22  # larger arguments of a launch count as read only
SYNC_ERROR = "CUDA error: operation not permitted when stream is capturing"
aten = torch.ops.aten
HOST_READS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.is_nonzero, aten.equal, aten._unique2}
HOST_METHODS = ("tolist", "numpy", "cpu", "item")

Clock = dict[int, int]  # by number of the stream: number of its operations that have happened before


class FakeStream:
    """A stream, with the clock of the operations that have happened before its next one."""

    _count = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = FakeStream._count
        FakeStream._count += 1
        self.clock: Clock = {}

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_clock(other.clock)

    def wait_clock(self, clock: Clock) -> None:
        for number, count in clock.items():
            self.clock[number] = max(count, self.clock.get(number, 0))

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event


class FakeEvent:
    """An event, with the clock of its stream when it was recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        self.clock = dict((stream or DEVICE.current).clock)

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or DEVICE.current).wait_clock(self.clock)


class FakeGraph:
    """A graph: the recorded operations in their order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.operations: list[Callable[[], object]] = []

    @torch.inference_mode()
    def replay(self) -> None:
        for operation in self.operations:
            operation()

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@dataclass
class Memory:
    """The last accesses to a tensor's storage during a capture."""

    write: tuple[int, int] | None = None  # number of the stream, and its clock
    reads: Clock = field(default_factory=dict)


class Capture(TorchDispatchMode):
    """Records the operations that run while it is active."""

    def __init__(self, graph: FakeGraph, origin: FakeStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph
        self._origin = origin
        self._memories: dict[int, Memory] = {}
        self._used: dict[int, FakeStream] = {origin.number: origin}
        self._kept: list[Any] = []  # else a freed storage's address could be reused
        origin.clock[origin.number] = origin.clock.get(origin.number, 0) + 1
        self._start = dict(origin.clock)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in HOST_READS or _has_mask_index(func, args):
            raise RuntimeError(f"{SYNC_ERROR} ({func} reads a tensor on the host)")
        result = func(*args, **kwargs)
        written = _written(func, args, kwargs)
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        known = {_storage(each) for each in inputs}
        fresh = [each for each in outputs if _storage(each) not in known]
        if inputs and not fresh and not written:  # a view
            return result
        self._record(func.__name__, [each for each in inputs if not _is_in(each, written)], written, fresh)
        self._kept.append(result)

        def replay() -> None:
            again = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
            for captured, new in zip(outputs, again, strict=True):
                if _is_in(captured, fresh):
                    captured.copy_(new)

        self._graph.operations.append(replay)
        return result

    def launch(self, name: str, run: Callable[[], object], tensors: list[Tensor]) -> None:
        """Run a kernel, and record it with the arguments that it changes."""
        with _disable_current_modes():
            compared = [each for each in tensors if each.untyped_storage().nbytes() <= COMPARED_BYTES]
            before = [_bytes(each).clone() for each in compared]
            run()
            changed = [each for each, old in zip(compared, before, strict=True) if not _bytes(each).equal(old)]
            self._record(name, [each for each in tensors if not _is_in(each, changed)], changed, [])
        self._kept.append(tensors)
        self._graph.operations.append(run)

    def finish(self) -> None:
        """Check that the capturing stream has waited for all other streams."""
        for number, stream in self._used.items():
            if self._origin.clock.get(number, 0) < stream.clock[number]:
                raise RuntimeError("CUDA error: capturing stream has unjoined work")

    def _record(self, name: str, read: list[Tensor], written: list[Tensor], fresh: list[Tensor]) -> None:
        stream = DEVICE.current
        if any(stream.clock.get(number, 0) < count for number, count in self._start.items()):
            raise RuntimeError(f"{SYNC_ERROR} ({name} runs in a stream that is not part of the capture)")
        self._used[stream.number] = stream
        stream.clock[stream.number] = now = stream.clock.get(stream.number, 0) + 1
        for tensor in fresh:
            self._memories[_storage(tensor)] = Memory()
        for tensor in (*read, *written):
            memory = self._memories.setdefault(_storage(tensor), Memory())
            before = [memory.write] if memory.write else []
            if _is_in(tensor, written):
                before += list(memory.reads.items())
            for number, count in before:
                if stream.clock.get(number, 0) < count:
                    raise RuntimeError(f"{name} uses memory of another stream without waiting for it")
            memory.reads[stream.number] = now
        for tensor in (*written, *fresh):
            self._memories[_storage(tensor)].write = (stream.number, now)


class FakeDevice:
    """The current stream of the simulated device, and the capture in progress."""

    def __init__(self) -> None:
        self.current = FakeStream()
        self.capture: Capture | None = None

    def synchronize(self, *_: Any) -> None:
        if self.capture is not None:
            raise RuntimeError(f"{SYNC_ERROR} (the host waits for the device)")

    @contextlib.contextmanager
    def in_stream(self, stream: FakeStream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def record(self, graph: FakeGraph, pool: Any = None, stream: FakeStream | None = None, **_: Any) -> Iterator[None]:
        self.synchronize()
        stream = stream or FakeStream()
        stream.wait_stream(self.current)
        self.capture = Capture(graph, stream)
        try:
            with self.in_stream(stream), _no_host_methods(), self.capture:
                yield
            self.capture.finish()
        finally:
            self.capture = None

    def launch(self, name: str, run: Callable[[], object], arguments: Any) -> None:
        if self.capture is None:
            run()
        else:
            self.capture.launch(name, run, [each for each in tree_leaves(arguments) if isinstance(each, Tensor)])


DEVICE = FakeDevice()


@contextlib.contextmanager
def installed() -> Iterator[FakeDevice]:
    """Replace functions of `torch.cuda`, and launches of Triton's interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    interpret = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        interpreted = functools.partial(interpret, self, *args, grid=grid, warmup=warmup, **kwargs)
        DEVICE.launch(self.fn.__name__, interpreted, (args, list(kwargs.values())))

    replaced: dict[str, Any] = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "CUDAGraph": FakeGraph,
        "graph": DEVICE.record,
        "stream": DEVICE.in_stream,
        "current_stream": lambda *_: DEVICE.current,
        "synchronize": DEVICE.synchronize,
        "is_current_stream_capturing": lambda: DEVICE.capture is not None,
    }
    originals = {name: getattr(torch.cuda, name) for name in replaced}
    _set_all(torch.cuda, replaced)
    InterpretedFunction.run = run
    try:
        yield DEVICE
    finally:
        InterpretedFunction.run = interpret
        _set_all(torch.cuda, originals)


@contextlib.contextmanager
def _no_host_methods() -> Iterator[None]:
    """Make methods raise an error that read a tensor's memory on the host without an operation."""

    def refuse(name: str, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"{SYNC_ERROR} (Tensor.{name} reads a tensor on the host)")

    originals = {name: getattr(Tensor, name) for name in HOST_METHODS}
    _set_all(Tensor, {name: functools.partial(refuse, name) for name in originals})
    try:
        yield
    finally:
        _set_all(Tensor, originals)


def _set_all(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _has_mask_index(func: Any, args: Any) -> bool:
    """True if a tensor is indexed by a mask, so that the host must read the size of the result."""
    if func.overloadpacket != aten.index:
        return False
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation writes to, according to its schema."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [each for each in tree_leaves(value) if isinstance(each, Tensor)]
    return written


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_in(tensor: Tensor, tensors: list[Tensor]) -> bool:
    return any(_storage(tensor) == _storage(each) for each in tensors)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
