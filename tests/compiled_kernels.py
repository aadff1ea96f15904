"""Compilation of single Triton kernels for an absent NVIDIA GPU, and properties of their machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SHARED_BYTES = 227 * 1024  # shared memory of one thread block on sm_90


@dataclass(frozen=True)
class MachineCode:
    """Machine code of one kernel, and the resources it uses."""

    ptx: str
    registers: int  # per thread
    spilled_bytes: int  # stack and local memory per thread
    shared_bytes: int  # per thread block

    @property
    def num_wgmma(self) -> int:
        """Number of asynchronous warp group matrix instructions, which full speed on Hopper requires."""
        return len(re.findall(r"\bwgmma\.mma_async", self.ptx))

    @property
    def num_cp_async(self) -> int:
        """Number of asynchronous copies to shared memory."""
        return len(re.findall(r"\bcp\.async\.(?!wait|commit)", self.ptx))


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    not_divisible: Iterable[str] = (),
    capability: int = 90,
) -> MachineCode:
    """Compile a `triton.jit` function as a launch on a GPU would.

    Args:
        signature: type of each run-time argument: "*bf16", "*fp8e4nv", "i32", "fp32" and so on.
        constexprs: values of the other arguments, including those that are None.
        options: num_warps, num_stages and other options of the compiler.
        capability: 90 for Hopper, 100 for Blackwell.
        not_divisible: arguments that are not known to be multiples of 16, unlike torch's pointers and most sizes.
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
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    usage = _resource_usage(compiled.asm["cubin"])
    spilled = usage["STACK"] + usage["LOCAL"]
    return MachineCode(compiled.asm["ptx"], usage["REG"], spilled, compiled.metadata.shared)


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
