"""Compilation of Triton kernels for NVIDIA GPUs without a GPU, and properties of the machine code."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SHARED_BYTES = 227 * 1024  # shared memory of one thread block on sm_90
# Limits of a multiprocessor of sm_90 and sm_100, from the CUDA C++ Programming Guide, "Technical specifications".
SHARED_BYTES, RESERVED_SHARED_BYTES = 228 * 1024, 1024  # reserved for each block
REGISTERS, REGISTER_UNIT = 65536, 256  # allocated to each warp in units
MAX_WARPS, MAX_BLOCKS = 64, 32


@dataclass(frozen=True)
class MachineCode:
    """Machine code of one kernel, and the resources it uses."""

    ptx: str
    registers: int  # per thread
    spilled_bytes: int  # stack and local memory per thread
    shared_bytes: int  # per thread block
    num_warps: int = 4

    @property
    def num_wgmma(self) -> int:
        """Number of asynchronous warp group matrix instructions, which full speed on Hopper requires."""
        return len(re.findall(r"\bwgmma\.mma_async", self.ptx))

    @property
    def num_tcgen05(self) -> int:
        """Number of tensor memory matrix instructions, which full speed on Blackwell requires."""
        return len(re.findall(r"\btcgen05\.mma", self.ptx))

    @property
    def blocks_per_sm(self) -> int:
        """Number of thread blocks that fit on a multiprocessor at a time, by registers, shared memory and threads."""
        registers_of_warp = -(-self.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
        return min(
            MAX_BLOCKS,
            MAX_WARPS // self.num_warps,
            REGISTERS // registers_of_warp // self.num_warps,
            SHARED_BYTES // (self.shared_bytes + RESERVED_SHARED_BYTES),
        )

    @property
    def num_cp_async(self) -> int:
        """Number of asynchronous copies to shared memory."""
        return len(re.findall(r"\bcp\.async\.(?!wait|commit)", self.ptx))


class AbsentGpu:
    """A Triton driver that compiles for an absent GPU, with the same cache keys as on that GPU."""

    def __init__(self, capability: int = 90) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # compiled kernels are kept for each device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Compile the kernels of launches with `warmup` for an absent GPU."""
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(AbsentGpu(capability))
    try:
        yield
    finally:
        driver._active = before


def machine_code_of(compiled: Any) -> MachineCode:
    """Return the properties of a kernel that Triton has compiled."""
    usage = _resource_usage(compiled.asm["cubin"])
    return MachineCode(
        ptx=compiled.asm["ptx"],
        registers=usage["REG"],
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Return registers per thread and bytes of each kind of memory, read by the cuobjdump of triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return {name: int(amount) for name, amount in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", report)}
