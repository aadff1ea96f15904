"""Linear attention and short convolutions in Triton's interpreter, compared with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_attention_layers import CONVOLUTIONS, SHAPES, Layer

from moeserve.ops.torch.linear_attention import TorchLinearAttention
from moeserve.ops.torch.short_convolution import TorchShortConvolution
from moeserve.ops.triton.linear_attention import TritonLinearAttention
from moeserve.ops.triton.short_convolution import TritonShortConvolution

OPERATIONS: dict[str, tuple[Any, Any]] = {
    "linear_attention": (TritonLinearAttention, TorchLinearAttention),
    "convolution": (TritonShortConvolution, TorchShortConvolution),
}
# The interpreter is slow: not the shapes with many or wide heads.
CASES = [("linear_attention", name) for name in SHAPES if name.endswith("odd") or name == "channels"]
CASES += [("convolution", name) for name in CONVOLUTIONS]


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_results_and_states_equal_the_reference(kind: str, name: str, dtype: torch.dtype) -> None:
    """Two steps: states are saved within a chunk and at its end, and loaded from other rows; some chunks are short."""
    layer = getattr(Layer, kind)(name, 28, dtype)
    kernel, reference = (operation(layer.shape) for operation in OPERATIONS[kind])
    first = [(slice(0, 13), (-1, 0, 4, 9)), (slice(13, 14), (-1, 1, -1, 1)), (slice(14, 15), (-1, -1, -1, 1))]
    second = [(slice(15, 16), (0, 0, 5, 1)), (slice(16, 26), (4, 2, -1, 1)), (slice(26, 28), (1, 1, -1, 1))]
    found, wanted = layer.states(), layer.states()
    for chunks in (first, second):
        actual, expected = layer.run(kernel, chunks, found), layer.run(reference, chunks, wanted)
        tolerance = 1e-4 if dtype == torch.float32 else 2**-9
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-4)
    written = [0, 1, 2, 4, 5]
    torch.testing.assert_close(found[written], wanted[written], rtol=1e-4, atol=1e-5)
    assert found[3].isnan().all()


@pytest.mark.parametrize(("kind", "name"), [("linear_attention", "delta-odd"), ("convolution", "odd")])
def test_no_tokens(kind: str, name: str) -> None:
    layer = getattr(Layer, kind)(name, 1, torch.float32)
    none = [(slice(0, 0), (-1, -1, -1, 1))]
    kernel, reference = (operation(layer.shape) for operation in OPERATIONS[kind])
    assert layer.run(kernel, none, layer.states()).shape == layer.run(reference, none, layer.states()).shape
