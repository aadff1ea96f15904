"""Records kernel launches instead of running them, as for an H100, which need not exist.

Tensors may be on a CPU, in memory that is never touched, or on torch's "meta" device. Launches have the same grids and
compile-time arguments as on the assumed GPU.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from moeserve.bench.gpu import fake_device

H100_NAME, H100_MULTIPROCESSORS = "NVIDIA H100 80GB HBM3", 132


class TensorFacts:
    """A tensor without its memory: its size, and the properties that Triton specialises a kernel on."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        self.nbytes = math.prod(size for size, stride in sizes if stride) * tensor.element_size()  # unique elements
        is_meta = tensor.is_meta
        self._address: int = int(tensor.storage_offset()) * tensor.element_size() if is_meta else tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._address


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel, or an operation of torch that launches one."""

    name: str
    arguments: dict[str, Any]  # a kernel's arguments by name, or torch's results and arguments
    grid: tuple[int, ...] | None = None  # None: chosen by torch
    kernel: Any = None  # Triton's kernel
    options: dict[str, Any] = field(default_factory=dict)  # compiler options

    def compile(self) -> Any:
        """Compile the kernel of this launch for the GPU of Triton's driver, or find it in Triton's cache."""
        return self.kernel.run(**self.arguments, grid=self.grid, warmup=True, **self.options)

    @property
    def num_programs(self) -> int | None:
        return None if self.grid is None else math.prod(self.grid)


def facts(value: Any) -> Any:
    """Replace tensors with `TensorFacts`, also in lists and tuples."""
    if isinstance(value, Tensor):
        return TensorFacts(value)
    return [facts(each) for each in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record the launches of Triton kernels within the context, without running them."""
    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(launch_of(kernel, args, grid, options))

    run = JITFunction.run
    with fake_device.installed(name=H100_NAME, num_multiprocessors=H100_MULTIPROCESSORS):
        JITFunction.run = InterpretedFunction.run = record  # the device restores that of the interpreter
        try:
            yield launches
        finally:
            JITFunction.run = run


def launch_of(kernel: Any, args: Sequence[Any], grid: Any, options: dict[str, Any]) -> Launch:
    parameters = inspect.signature(kernel.fn).parameters  # a kernel of the interpreter has no `params`
    values = {name: parameter.default for name, parameter in parameters.items()}
    values |= dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
    grid = grid(values) if callable(grid) else grid
    return Launch(kernel.fn.__name__, {name: facts(value) for name, value in values.items()}, grid, kernel, options)
