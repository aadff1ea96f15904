"""A table of the machine code of every Triton kernel at the shapes of published models, without a GPU.

    python -m moeserve.bench.gpu.compiled [--capability 90|100] [--only TEXT]

The operations are those that `kernels.py` times. Their launches are recorded instead of run, on tensors whose memory is
never touched, and each is compiled as it would be on a GPU. Bytes and operations are the least of the whole operation,
which may have several launches; blocks are those that fit on a multiprocessor at a time.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.bench.gpu import kernels
from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.machine_code import MachineCode, compile_kernel
from moeserve.bench.harness import make_parser, show
from moeserve.ops.weight_blocks import CODES

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}


class UntouchedSource(Source):
    """Tensors of large shapes without values: their memory is reserved only."""

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype)

    def codes(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=CODES)


@dataclass(frozen=True)
class Launch:
    """The facts that a kernel is compiled for. Launches that are equal share their machine code."""

    name: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    not_divisible: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("gpu.compiled", "Print the machine code's figures of all kernels.", rounds=None, threads=False)
    parser.add_argument("--capability", type=int, choices=(90, 100), default=90, help="of the GPU (default: 90)")
    parser.add_argument("--only", default="", metavar="TEXT", help="operations whose name contains it (default: all)")
    options = parser.parse_args(arguments)
    matrix = "wgmma" if options.capability == 90 else "tcgen05"
    show(f"| operation | MB | GFLOP | kernel | registers | shared | spilled | {matrix} | warps | blocks |")
    show("| :-- | --: | --: | :-- | --: | --: | --: | --: | --: | --: |")
    compile_once = functools.cache(functools.partial(compile_launch, capability=options.capability))
    source = UntouchedSource(torch.device("cpu"), torch.Generator().manual_seed(0), torch.bfloat16)
    num_spilling = 0
    for name, make in kernels.items(source, kernels.Sizes()):
        if options.only not in name:
            continue
        timed = make()
        with recorded_launches() as launches, torch.inference_mode():
            timed.call()
        first = f"| {name} | {timed.work.num_bytes / 1e6:,.2f} | {timed.work.operations / 1e9:,.2f} |"
        for launch, kernel in dict(launches).items():
            code = compile_once(launch, kernel)
            num_spilling += code.spilled_bytes > 0
            show(f"{first} {launch.name} {figures(code)}")
            first = "| | | |"
    return 1 if num_spilling else 0


def figures(code: MachineCode) -> str:
    num_matrix = code.num_wgmma or code.num_tcgen05
    numbers = (code.registers, code.shared_bytes, code.spilled_bytes, num_matrix, code.num_warps, code.blocks_per_sm)
    return "| " + " | ".join(map(str, numbers)) + " |"


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[tuple[Launch, Any]]]:
    """Record the launches of Triton kernels, and run none."""
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Launch, Any]] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((launch_of(kernel, args, options), kernel))

    run = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def launch_of(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> Launch:
    """Return the facts that Triton compiles a launch for. By its rules, integers of 1 are constants."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
    signature, constants, not_divisible = [], [], []
    for parameter in kernel.params:
        name = parameter.name
        value = values.get(name, parameter.default)
        is_specialized = not parameter.do_not_specialize
        match value:
            case _ if parameter.is_constexpr:
                constants.append((name, value))
            case None:
                constants.append((name, None))
            case Tensor():
                signature.append((name, f"*{TYPES[value.dtype]}"))
                if value.data_ptr() % 16:
                    not_divisible.append(name)
            case bool():
                signature.append((name, "i1"))
            case 1 if is_specialized and isinstance(value, int):
                constants.append((name, 1))
            case int():
                signature.append((name, "i32" if -(2**31) <= value < 2**31 else "i64"))
                if value % 16 or not is_specialized:
                    not_divisible.append(name)
            case _:
                signature.append((name, "fp32"))
    return Launch(
        kernel.fn.__name__, tuple(signature), tuple(constants), tuple(sorted(options.items())), tuple(not_divisible)
    )


def compile_launch(launch: Launch, kernel: Any, capability: int) -> MachineCode:
    return compile_kernel(
        kernel,
        dict(launch.signature),
        dict(launch.constants),
        dict(launch.options),
        not_divisible=launch.not_divisible,
        capability=capability,
    )


if __name__ == "__main__":
    sys.exit(main())
