"""The team of threads that runs kernels."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys

import pytest
from paged_steps import needs_kernels

PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17
WAIT_FOR_ANY_THREAD = 0x40000000  # __WALL

PROGRAM = """
import torch
from paged_steps import kernels
from moeserve.ops.native import set_num_threads

set_num_threads(4)
weight, rows = torch.randn(4096, 512), torch.randn(3, 512)
panels = torch.empty(1, kernels.packed_bytes("float32", 4096, 512), dtype=torch.uint8)
kernels.pack_weight("float32", weight, panels[0])
packed = kernels.PackedWeights("float32", panels, 4096, 512)

def product():
    output = torch.empty(3, 4096)
    packed.multiply(rows, output)
    return output

expected = product()
print("ready", flush=True)
input()
assert all(torch.equal(product(), expected) for _ in range(100))
print("done", flush=True)
"""


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="stops single threads of a process, as only Linux can")
def test_threads_that_get_no_core_delay_no_kernel() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        others = [int(thread) for thread in os.listdir(f"/proc/{child.pid}/task") if int(thread) != child.pid]
        assert len(others) >= 3
        stopped = []
        try:
            for thread in others:
                if ptrace(PTRACE_SEIZE, thread, None, None) != 0:
                    pytest.skip(f"cannot stop threads: {os.strerror(ctypes.get_errno())}")
                assert ptrace(PTRACE_INTERRUPT, thread, None, None) == 0
                os.waitpid(thread, WAIT_FOR_ANY_THREAD)
                stopped.append(thread)
            child.stdin.write("go\n")
            child.stdin.flush()
            assert select.select([child.stdout], [], [], 60)[0]
            assert child.stdout.readline() == "done\n"
        finally:
            for thread in stopped:
                ptrace(PTRACE_DETACH, thread, None, None)
            child.kill()
