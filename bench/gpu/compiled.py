"""A table of the machine code of every Triton kernel at the shapes of published models, without a GPU.

    python -m moeserve.bench.gpu.compiled [--capability 90|100] [--only TEXT]

The operations are those that `kernels.py` times. Their launches are recorded instead of run, on tensors whose memory is
never touched, and each is compiled as it would be on a GPU. Bytes and operations are the least of the whole operation,
which may have several launches; blocks are those that fit on a multiprocessor at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.bench.gpu import kernels
from moeserve.bench.gpu.inputs import Source
from moeserve.bench.gpu.machine_code import MachineCode, compiling_for, machine_code_of
from moeserve.bench.gpu.recording import Launch, recorded_launches
from moeserve.bench.harness import make_parser, show
from moeserve.ops.weight_blocks import CODES


class UntouchedSource(Source):
    """Tensors of large shapes without values: their memory is reserved only."""

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype)

    def codes(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=CODES)


def untouched_source() -> UntouchedSource:
    return UntouchedSource(torch.device("cpu"), torch.Generator().manual_seed(0), torch.bfloat16)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("gpu.compiled", "Print the machine code's figures of all kernels.", rounds=None, threads=False)
    parser.add_argument("--capability", type=int, choices=(90, 100), default=90, help="of the GPU (default: 90)")
    parser.add_argument("--only", default="", metavar="TEXT", help="operations whose name contains it (default: all)")
    options = parser.parse_args(arguments)
    matrix = "wgmma" if options.capability == 90 else "tcgen05"
    show(f"| operation | MB | GFLOP | kernel | registers | shared | spilled | {matrix} | warps | blocks |")
    show("| :-- | --: | --: | :-- | --: | --: | --: | --: | --: | --: |")
    num_spilling = 0
    for name, make in kernels.items(untouched_source(), kernels.Sizes()):
        if options.only not in name:
            continue
        timed = make()
        with recorded_launches() as launches, torch.inference_mode():
            timed.call()
        first = f"| {name} | {timed.work.num_bytes / 1e6:,.2f} | {timed.work.operations / 1e9:,.2f} |"
        with compiling_for(options.capability):
            for launch, code in machine_codes(launches):
                num_spilling += code.spilled_bytes > 0
                show(f"{first} {launch.name} {figures(code)}")
                first = "| | | |"
    return 1 if num_spilling else 0


def machine_codes(launches: Sequence[Launch]) -> list[tuple[Launch, MachineCode]]:
    """Compile launches, and return each distinct machine code once."""
    found: dict[str, tuple[Launch, MachineCode]] = {}
    for launch in launches:
        compiled = launch.compile()
        found.setdefault(compiled.hash, (launch, machine_code_of(compiled)))
    return list(found.values())


def figures(code: MachineCode) -> str:
    num_matrix = code.num_wgmma or code.num_tcgen05
    numbers = (code.registers, code.shared_bytes, code.spilled_bytes, num_matrix, code.num_warps, code.blocks_per_sm)
    return "| " + " | ".join(map(str, numbers)) + " |"


if __name__ == "__main__":
    sys.exit(main())
