"""The gated delta rule by C++ kernels: against torch, and with the same bytes in any chunks, batch and threads."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from paged_steps import INSTRUCTION_SETS, kernels, make_step, needs_kernels, same_bytes, settings_restored
from torch import Tensor

from moeserve.ops.cpu.gated_delta import CpuGatedDelta
from moeserve.ops.gated_delta import GatedDelta, GatedDeltaCache, GatedDeltaShape, GatedDeltaWeights
from moeserve.ops.threads import set_num_threads
from moeserve.ops.torch.gated_delta import TorchGatedDelta
from moeserve.step_inputs import StateRows

# T tokens, N value heads, C channels, X = N * values of a head

pytestmark = needs_kernels

SHAPES = {
    "published": dict(num_heads=4, num_key_heads=2, key_dim=128, value_dim=128, num_taps=4),
    "odd": dict(num_heads=6, num_key_heads=3, key_dim=10, value_dim=37, num_taps=3),
    "wide": dict(num_heads=2, num_key_heads=2, key_dim=256, value_dim=256, num_taps=2),
}
NUM_ROWS = 6  # of states


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    with settings_restored():
        yield


@dataclasses.dataclass(frozen=True)
class Layer:
    """The weights of a layer, and the inputs of some tokens."""

    shape: GatedDeltaShape
    weights: GatedDeltaWeights
    input_TC: Tensor
    gates_TX: Tensor
    rates_T2N: Tensor

    @classmethod
    def random(cls, name: str, num_tokens: int, dtype: torch.dtype) -> Layer:
        shape = GatedDeltaShape(**SHAPES[name], norm_epsilon=1e-6)
        generator = torch.Generator().manual_seed(len(name))

        def normal(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator)

        value_size = shape.num_heads * shape.value_dim
        weights = GatedDeltaWeights(
            normal(shape.num_taps, shape.num_channels),
            normal(shape.num_heads),
            normal(shape.num_heads),
            normal(shape.value_dim),
        )
        both = normal(num_tokens, shape.num_channels + value_size).to(dtype)  # views of one projection
        return cls(
            shape,
            weights,
            both[:, : shape.num_channels],
            both[:, shape.num_channels :],
            normal(num_tokens, 2 * shape.num_heads).to(dtype),
        )

    @property
    def native(self) -> CpuGatedDelta:
        return CpuGatedDelta(kernels, self.shape)

    def cache(self) -> GatedDeltaCache:
        """Return states of all rows, which a chunk must not use unless it loads them."""
        inputs_shape = (NUM_ROWS, self.shape.num_taps - 1, self.shape.num_channels)
        states_shape = (NUM_ROWS, self.shape.num_heads, self.shape.key_dim, self.shape.value_dim)
        return GatedDeltaCache(
            torch.full(inputs_shape, torch.nan, dtype=self.input_TC.dtype), torch.full(states_shape, torch.nan)
        )

    def run(self, mix: GatedDelta, chunks: Sequence[tuple[slice, tuple[int, int, int, int]]], cache: Any) -> Tensor:
        """Return the outputs of a step of chunks, each with its load, store, save and number before the save."""
        lengths = [(part.stop - part.start, part.stop - part.start) for part, _ in chunks]
        step = make_step(lengths, [[0] * length for length, _ in lengths], 1)
        states = StateRows(*torch.tensor([rows for _, rows in chunks]).T.contiguous())
        step = dataclasses.replace(step, states=states)
        rows = torch.cat([torch.arange(part.start, part.stop) for part, _ in chunks])
        # As in the model, inputs and gates are views of one projection.
        both = torch.cat([self.input_TC, self.gates_TX], dim=1)[rows]
        num_channels = self.shape.num_channels
        return mix(both[:, :num_channels], both[:, num_channels:], self.rates_T2N[rows], self.weights, cache, step)


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
        actual, expected = layer.run(layer.native, chunks, found), layer.run(reference, chunks, wanted)
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
    whole = layer.run(layer.native, [(part, (-1, row, -1, 1)) for row, part in enumerate(parts)], cache)
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
                pieces[rows] = layer.run(layer.native, chunks, again)
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
