"""The gated delta rule in Triton's interpreter, compared with torch."""

from __future__ import annotations

import pytest
import torch
from gated_delta_layers import SHAPES, Layer

from moeserve.ops.torch.gated_delta import TorchGatedDelta
from moeserve.ops.triton.gated_delta import TritonGatedDelta


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_results_and_states_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    """Two steps: states are saved within a chunk and at its end, and loaded from other rows; some chunks are short."""
    layer = Layer.random(name, 40, dtype)
    first = [(slice(0, 20), (-1, 0, 4, 16)), (slice(20, 21), (-1, 1, -1, 1)), (slice(21, 22), (-1, -1, -1, 1))]
    second = [(slice(22, 23), (0, 0, 5, 1)), (slice(23, 33), (4, 2, -1, 1)), (slice(33, 35), (1, 1, -1, 1))]
    found, wanted = layer.cache(), layer.cache()
    for chunks in (first, second):
        actual = layer.run(TritonGatedDelta(layer.shape), chunks, found)
        expected = layer.run(TorchGatedDelta(layer.shape), chunks, wanted)
        tolerance = 1e-4 if dtype == torch.float32 else 2**-9
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-4)
    written = [0, 1, 2, 4, 5]
    torch.testing.assert_close(found.states[written], wanted.states[written], rtol=1e-4, atol=1e-5)
    assert torch.equal(found.inputs[written], wanted.inputs[written])
    assert found.states[3].isnan().all()


def test_no_tokens() -> None:
    layer = Layer.random("odd", 1, torch.float32)
    assert layer.run(TritonGatedDelta(layer.shape), [(slice(0, 0), (-1, -1, -1, 1))], layer.cache()).shape == (0, 222)
