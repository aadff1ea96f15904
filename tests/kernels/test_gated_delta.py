"""The gated delta rule by C++ kernels: against torch, and with the same bytes in any chunks, batch and threads."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from gated_delta_layers import SHAPES, Layer
from paged_steps import INSTRUCTION_SETS, kernels, needs_kernels, same_bytes, settings_restored

from moeserve.ops.cpu.gated_delta import CpuGatedDelta
from moeserve.ops.threads import set_num_threads
from moeserve.ops.torch.gated_delta import TorchGatedDelta

# T tokens, N value heads, C channels, X = N * values of a head

pytestmark = needs_kernels


def native(layer: Layer) -> CpuGatedDelta:
    return CpuGatedDelta(kernels, layer.shape)


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    with settings_restored():
        yield


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_results_and_states_equal_the_reference(name: str, dtype: torch.dtype, isa: str) -> None:
    """Two requests in two steps; the first saves its state on the way, and a third continues from there."""
    kernels.set_isa(isa)
    layer = Layer.random(name, 130, dtype)
    first = [(slice(0, 70), (-1, 0, 4, 64)), (slice(70, 75), (-1, 1, -1, 1))]
    second = [(slice(75, 76), (0, 0, -1, 1)), (slice(76, 120), (4, 2, -1, 1)), (slice(120, 130), (1, 1, 5, 10))]
    found, wanted, reference = layer.cache(), layer.cache(), TorchGatedDelta(layer.shape)
    for chunks in (first, second):
        actual, expected = layer.run(native(layer), chunks, found), layer.run(reference, chunks, wanted)
        # Outputs are about 1. Results in bfloat16 are rounded once, perhaps to neighbouring numbers.
        tolerance = 2e-4 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=2e-4)
    written = [0, 1, 2, 4, 5]
    torch.testing.assert_close(found.states[written], wanted.states[written], rtol=1e-4, atol=1e-4)
    assert same_bytes(found.inputs[written], wanted.inputs[written])
    assert found.states[3].isnan().all()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bytes_do_not_depend_on_chunks_batch_or_threads(name: str, dtype: torch.dtype) -> None:
    layer = Layer.random(name, 100, dtype)
    parts = [slice(0, 57), slice(57, 100)]
    cache = layer.cache()
    whole = layer.run(native(layer), [(part, (-1, row, -1, 1)) for row, part in enumerate(parts)], cache)
    draw = random.Random(0)
    for num_threads in (1, 2):
        set_num_threads(num_threads)
        again, pieces = layer.cache(), torch.empty_like(whole)
        done = [part.start for part in parts]
        while any(start < part.stop for start, part in zip(done, parts, strict=True)):
            chunks = []
            for row, part in enumerate(parts):
                stop = min(part.stop, done[row] + draw.choice([0, 1, 2, 7, 40]))
                load = row if done[row] > part.start else -1
                if stop > done[row]:
                    chunks.append((slice(done[row], stop), (load, row, -1, 1)))
                done[row] = stop
            if chunks:
                rows = torch.cat([torch.arange(part.start, part.stop) for part, _ in chunks])
                pieces[rows] = layer.run(native(layer), chunks, again)
        assert same_bytes(pieces, whole)
        assert same_bytes(again.states[:2], cache.states[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gates_for_each_element(dtype: torch.dtype) -> None:
    """Rounded as torch does: the sigmoid, then the product."""
    wide = torch.randn(7, 2 * 53, generator=torch.Generator().manual_seed(0)).to(dtype)
    gates, rows = wide[:, :53], wide[:, 53:].contiguous()
    out = torch.empty_like(rows)
    kernels.gate_rows(gates, rows, out)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7  # of a sigmoid that is rounded the other way
    torch.testing.assert_close(out, gates.sigmoid() * rows, rtol=tolerance, atol=1e-7)
