"""Programs that share a result: each stores a part, and the last one to arrive adds the parts in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last_to_arrive(arrivals_ptr, num_programs):
    """Return True in the last of `num_programs` programs that call this function.

    This program can then read the parts that the others stored before. It must bypass the first-level cache (".cg").

    Args:
        arrivals_ptr: one int32, 0 before the first program arrives, and 0 again after the last.
    """
    tl.debug_barrier()  # wait until all threads of the program have stored their parts
    is_last = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    tl.store(arrivals_ptr, 0, mask=is_last)
    return is_last
