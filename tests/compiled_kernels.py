"""Compilation of single Triton kernels for an absent NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moeserve.bench.gpu.machine_code import MachineCode, machine_code_of


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
    return machine_code_of(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options)))
