"""Machine code of Triton kernels for NVIDIA's Hopper GPUs (sm_90), made and read without one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SHARED_BYTES = 227 * 1024  # of one block of threads on sm_90
MAX_REGISTERS = 255  # of one thread


@dataclass(frozen=True)
class MachineCode:
    """What the compiler made of a kernel."""

    ptx: str
    registers: int  # of each thread
    spilled_bytes: int  # of each thread's memory: what did not fit its registers, and arrays
    shared_bytes: int  # of each block of threads

    @property
    def num_wgmma(self) -> int:
        """Places where a warp group multiplies matrices asynchronously: Hopper's only way to full speed."""
        return len(re.findall(r"\bwgmma\.mma_async", self.ptx))

    @property
    def num_cp_async(self) -> int:
        """Places where memory is copied to shared memory while the threads go on."""
        return len(re.findall(r"\bcp\.async\.(?!wait|commit)", self.ptx))


def compile_for_sm90(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    not_divisible: Iterable[str] = (),
) -> MachineCode:
    """Compiles a `triton.jit` function as a launch on a GPU would.

    Args:
        signature: type of each argument that is not a constexpr: "*bf16", "*fp8e4nv", "i32", "fp32" and so on.
        constexprs: the others' values. An argument of value None is one of these.
        options: num_warps, num_stages, and what else a launch says to the compiler.
        not_divisible: arguments that are not multiples of 16. Pointers of torch and most sizes are.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    assert set(names) == set(signature) | set(constexprs), set(names) ^ (set(signature) | set(constexprs))
    attrs = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name in signature and (signature[name].startswith("*") or signature[name] in ("i32", "i64"))
        if name not in set(not_divisible)
    }
    source = ASTSource(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs=dict(constexprs),
        attrs=attrs,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options))
    usage = _resource_usage(compiled.asm["cubin"])
    return MachineCode(
        ptx=compiled.asm["ptx"],
        registers=usage["REG"],
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=compiled.metadata.shared,
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers per thread and bytes of each kind of memory, as the tool that comes with triton reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return {name: int(amount) for name, amount in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", report)}
