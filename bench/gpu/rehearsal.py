"""The benchmark at small sizes on a CPU, in Triton's interpreter, before a GPU is available.

A rehearsal shows that the installation is complete and that each part works. Its times mean nothing. Products of
bfloat16 are wrong in the interpreter, so all results that are compared are in float32, and 8-bit blocks are converted
by torch. There are no CUDA graphs: calls are repeated instead of replayed.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from moeserve.bench.gpu.check import tensors_of
from moeserve.ops import select
from moeserve.ops.backend import Backend

# Sizes of a published model's config.json.
SMALL_MODEL: dict[str, Any] = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=4, n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
)  # fmt: skip
TORCH_TYPES = {
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8),
    "bf16": (torch.bfloat16, torch.int16),
    "fp16": (torch.float16, torch.int16),
    "fp32": (torch.float32, torch.int32),
}


@contextlib.contextmanager
def rehearsing() -> Iterator[Backend]:
    """Let the CPU use the Triton kernels in the interpreter, and yield their table."""
    from triton.runtime import interpreter

    from moeserve.ops.backend import TRITON

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Triton before 3.7 converts an array of one element, which numpy refuses from 2.4 on.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    torch.set_num_threads(1)
    with (
        mock.patch.object(interpreter, "_convert_float", convert_by_torch),
        mock.patch.object(interpreter, "_patch_lang_tensor", patch),
        products_by_row(),
        mock.patch.dict(select.BACKENDS, cpu=lambda dtype: TRITON),
    ):
        yield TRITON


@contextlib.contextmanager
def products_by_row() -> Iterator[None]:
    """Let the interpreter compute each number of a product from its row and column alone.

    Its own products are those of numpy's BLAS, where on some processors a row's last bits depend on its position.
    """
    from triton.runtime import interpreter

    def matmul(left: np.ndarray, right: np.ndarray, dtype: Any) -> np.ndarray:
        product: np.ndarray = np.einsum("mk,kn->mn", left, right, dtype=np.float64, casting="safe").astype(dtype)
        return product

    numpy = types.SimpleNamespace(**vars(np) | {"matmul": matmul})
    with mock.patch.object(interpreter, "np", numpy):
        yield


def convert_by_torch(numbers: np.ndarray, from_type: Any, to_type: Any, rounding: Any) -> np.ndarray:
    """Convert the bits of floats to another type. The interpreter's conversions to few bits lose carries and NaN."""
    from_dtype, from_bits = TORCH_TYPES[str(from_type)]
    dtype, to_bits = TORCH_TYPES[str(to_type)]
    bits = torch.from_numpy(np.ascontiguousarray(numbers).copy()).view(from_bits)
    converted: np.ndarray = bits.view(from_dtype).to(dtype).view(to_bits).numpy()
    return converted.view(f"uint{8 * converted.itemsize}")


class RepeatedCapture:
    """A `Capture` that repeats a function, and copies its results into those of the first run."""

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        first = run()

        def replay() -> None:
            for kept, new in zip(tensors_of(first), tensors_of(run()), strict=True):
                kept.copy_(new)

        return replay, first
