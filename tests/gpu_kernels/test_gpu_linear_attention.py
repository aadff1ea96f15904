"""Linear attention and short convolutions in Triton's interpreter, compared with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_attention_layers import CONVOLUTIONS, SHAPES, Layer

from moeserve.ops import linear_attention as linear_attention_ops
from moeserve.ops.backend import TRITON, in_order
from moeserve.ops.convolution.reference import TorchShortConvolution
from moeserve.ops.convolution.triton import TritonShortConvolution
from moeserve.ops.linear_attention.reference import TorchLinearAttention
from moeserve.ops.linear_attention.triton import TritonLinearAttention

OPERATIONS: dict[str, tuple[Any, Any]] = {
    "linear_attention": (TritonLinearAttention, TorchLinearAttention),
    "convolution": (TritonShortConvolution, TorchShortConvolution),
}
# The interpreter is slow: not the shapes with many or wide heads.
CASES = [("linear_attention", name) for name in SHAPES if name.endswith("odd") or name == "channels"]
# Linear convolutions run in torch on GPUs.
CASES += [("convolution", name) for name, sizes in CONVOLUTIONS.items() if not sizes.get("is_linear")]


@pytest.mark.slow_but(
    "float32-linear_attention-channels]", "bfloat16-linear_attention-delta", "float32-convolution-odd"
)
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


TILED = ["delta-tiles", "channels-tiles", "state-space-odd"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("linear_attention", name) for name in TILED), ("convolution", "odd"), ("convolution", "gated")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_long_chunks_equal_the_reference(kind: str, name: str, dtype: torch.dtype) -> None:
    """Two steps of chunks that several programs or tiles of 16 or 64 tokens divide, beside chunks of few tokens.

    The second chunk begins and ends within tiles; states are saved within a tile, and at the end of a chunk.
    """
    layer = getattr(Layer, kind)(name, 110, dtype)
    kernel, reference = (operation(layer.shape) for operation in OPERATIONS[kind])
    first = [(slice(0, 67), (-1, 0, 4, 20)), (slice(67, 70), (-1, 1, -1, 1))]
    second = [(slice(70, 71), (4, 3, -1, 1)), (slice(71, 93), (0, 2, 5, 22)), (slice(93, 110), (1, -1, -1, 1))]
    found, wanted = layer.states(), layer.states()
    for chunks, starts in ((first, [0, 0]), (second, [20, 67, 3])):
        actual, expected = layer.run(kernel, chunks, found, starts), layer.run(reference, chunks, wanted)
        tolerance = 1e-4 if dtype == torch.float32 else 2**-9
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-4)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", TILED[:2])
def test_chunks_that_end_with_tiles_change_no_byte(name: str) -> None:
    """A prompt from position 20 on, whole and cut at position 64."""
    layer = Layer.linear_attention(name, 80, torch.float16)
    kernel, whole, cut = TritonLinearAttention(layer.shape), layer.states(), layer.states()
    expected = layer.run(kernel, [(slice(0, 80), (-1, 0, 1, 44))], whole, [20])
    before = layer.run(kernel, [(slice(70, 71), (-1, 2, -1, 1)), (slice(0, 44), (-1, 1, -1, 1))], cut, [0, 20])
    after = layer.run(kernel, [(slice(44, 80), (1, 0, -1, 1))], cut, [64])
    assert torch.equal(torch.cat([before[1:], after]), expected)
    assert torch.equal(cut[:2], whole[:2])


def test_batch_invariant_kernels_have_one_order_for_any_chunks() -> None:
    layer = Layer.linear_attention("delta-tiles", 24, torch.float16)
    kernel = linear_attention_ops.make(in_order(TRITON), layer.shape)
    whole, cut = layer.states(), layer.states()
    expected = layer.run(kernel, [(slice(0, 24), (-1, 0, -1, 1))], whole)
    before = layer.run(kernel, [(slice(0, 17), (-1, 0, -1, 1))], cut)
    after = layer.run(kernel, [(slice(17, 24), (0, 0, -1, 1))], cut, [17])
    assert torch.equal(torch.cat([before, after]), expected)
    assert torch.equal(cut[0], whole[0])


@pytest.mark.parametrize(("kind", "name"), [("linear_attention", "delta-odd"), ("convolution", "odd")])
def test_no_tokens(kind: str, name: str) -> None:
    layer = getattr(Layer, kind)(name, 1, torch.float32)
    none = [(slice(0, 0), (-1, -1, -1, 1))]
    kernel, reference = (operation(layer.shape) for operation in OPERATIONS[kind])
    assert layer.run(kernel, none, layer.states()).shape == layer.run(reference, none, layer.states()).shape
