"""C++ kernels of layers with states: against torch, and with the same bytes in any chunks, batch and threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from linear_attention_layers import CONVOLUTIONS, LIGHTNING, SCANS, SHAPES, Chunk, Layer
from paged_steps import INSTRUCTION_SETS, kernels, needs_kernels, same_bytes, settings_restored
from torch import Tensor

from moeserve.ops.convolution.cpu import CpuShortConvolution
from moeserve.ops.convolution.reference import TorchShortConvolution
from moeserve.ops.lightning_attention.cpu import CpuLightningAttention
from moeserve.ops.lightning_attention.reference import TorchLightningAttention
from moeserve.ops.linear_attention.cpu import CpuLinearAttention
from moeserve.ops.linear_attention.interface import LinearAttentionShape
from moeserve.ops.linear_attention.reference import TorchLinearAttention
from moeserve.ops.native import set_num_threads
from moeserve.ops.selective_scan.cpu import CpuSelectiveScan
from moeserve.ops.selective_scan.reference import torch_selective_scan

pytestmark = needs_kernels
CASES = [("linear_attention", name) for name in SHAPES] + [("convolution", name) for name in CONVOLUTIONS]
CASES += [("selective_scan", name) for name in SCANS] + [("lightning_attention", name) for name in LIGHTNING]


def native(shape: Any) -> Callable[..., Tensor]:
    if shape is None:
        return CpuSelectiveScan(kernels)
    if isinstance(shape, torch.dtype):
        return CpuLightningAttention(kernels, shape)
    kind = CpuLinearAttention if isinstance(shape, LinearAttentionShape) else CpuShortConvolution
    return kind(kernels, shape)


def reference(shape: Any) -> Callable[..., Tensor]:
    if shape is None:
        return torch_selective_scan
    if isinstance(shape, torch.dtype):
        return TorchLightningAttention(shape)
    return TorchLinearAttention(shape) if isinstance(shape, LinearAttentionShape) else TorchShortConvolution(shape)


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    with settings_restored():
        yield


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_results_and_states_equal_the_reference(kind: str, name: str, dtype: torch.dtype, isa: str) -> None:
    """Two requests in two steps; the first saves its state on the way, and a third continues from there."""
    kernels.set_isa(isa)
    layer = getattr(Layer, kind)(name, 100, dtype)
    first = [(slice(0, 40), (-1, 0, 4, 34)), (slice(40, 45), (-1, 1, -1, 1))]
    second = [(slice(45, 46), (0, 0, -1, 1)), (slice(46, 90), (4, 2, -1, 1)), (slice(90, 100), (1, 1, 5, 10))]
    found, wanted = layer.states(), layer.states()
    for chunks in (first, second):
        actual = layer.run(native(layer.shape), chunks, found)
        expected = layer.run(reference(layer.shape), chunks, wanted)
        # Outputs are about 1. Results in bfloat16 are rounded once, perhaps to neighbouring numbers.
        tolerance = 2e-4 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=2e-4)
    written = [0, 1, 2, 4, 5]
    torch.testing.assert_close(found[written], wanted[written], rtol=1e-4, atol=1e-4)
    assert found[3].isnan().all()


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bytes_do_not_depend_on_chunks_batch_or_threads(kind: str, name: str, dtype: torch.dtype) -> None:
    layer = getattr(Layer, kind)(name, 100, dtype)
    parts = [slice(0, 57), slice(57, 100)]
    states = layer.states()
    whole = layer.run(native(layer.shape), [(part, (-1, row, -1, 1)) for row, part in enumerate(parts)], states)
    draw = random.Random(0)
    for num_threads in (1, 2):
        set_num_threads(num_threads)
        again, pieces = layer.states(), torch.empty_like(whole)
        done = [part.start for part in parts]
        while any(start < part.stop for start, part in zip(done, parts, strict=True)):
            chunks: list[Chunk] = []
            for row, part in enumerate(parts):
                stop = min(part.stop, done[row] + draw.choice([0, 1, 2, 7, 40]))
                load = row if done[row] > part.start else -1
                if stop > done[row]:
                    chunks.append((slice(done[row], stop), (load, row, -1, 1)))
                done[row] = stop
            if chunks:
                rows = torch.cat([torch.arange(part.start, part.stop) for part, _ in chunks])
                pieces[rows] = layer.run(native(layer.shape), chunks, again)
        assert same_bytes(pieces, whole)
        assert same_bytes(again[:2], states[:2])


@pytest.mark.parametrize("name", SCANS)
def test_selective_scans_equal_the_closed_form_in_float64(name: str) -> None:
    """A state is the sum of what all tokens so far have added, each decayed by the steps of the tokens after it."""
    layer = Layer.selective_scan(name, 50, torch.float32)
    found = layer.run(native(None), [(slice(0, 50), (-1, 0, -1, 1))], layer.states())
    values_TC, steps_TC, inputs_TN, outputs_TN, gates_TC = (each.double() for each in layer.inputs if each is not None)
    steps_TC = steps_TC.exp().log1p()
    ends_TC = steps_TC.cumsum(0)
    rates_CN = -layer.weights.log_decay_CN.double().exp()
    expected_TC = layer.weights.skip_C * values_TC
    for t in range(50):
        passed_tC = ends_TC[t] - ends_TC[: t + 1]
        decays_tCN = (passed_tC[:, :, None] * rates_CN).exp()
        added_tC = steps_TC[: t + 1] * values_TC[: t + 1]
        expected_TC[t] += torch.einsum("tCN, tC, tN, N -> C", decays_tCN, added_tC, inputs_TN[: t + 1], outputs_TN[t])
    expected_TC *= gates_TC / (1 + (-gates_TC).exp())
    torch.testing.assert_close(found.double(), expected_TC, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LIGHTNING)
def test_lightning_attention_equals_its_closed_form_in_float64(name: str) -> None:
    """A value's weight is the product of query and key, decayed by the number of tokens between them."""
    layer = Layer.lightning_attention(name, 50, torch.float32)
    found = layer.run(native(torch.float32), [(slice(0, 50), (-1, 0, -1, 1))], layer.states())
    (mixed_TC,), num_heads = layer.inputs, layer.state_shape[0]
    assert mixed_TC is not None
    query_TNV, key_TNV, value_TNV = mixed_TC.double().unflatten(1, (3, num_heads, -1)).unbind(1)
    passed_TT = torch.arange(50.0)[:, None] - torch.arange(50.0)
    decays_NTT = (-layer.weights.double().exp()[:, None, None] * passed_TT).exp() * (passed_TT >= 0)
    scores_NTT = torch.einsum("TNV, tNV -> NTt", query_TNV, key_TNV) * decays_NTT
    expected_TX = torch.einsum("NTt, tNV -> TNV", scores_NTT, value_TNV).flatten(1)
    torch.testing.assert_close(found.double(), expected_TX, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gates_for_each_element(dtype: torch.dtype) -> None:
    """Rounded as torch does: the sigmoid, then the product."""
    wide = torch.randn(7, 2 * 53, generator=torch.Generator().manual_seed(0)).to(dtype)
    gates, rows = wide[:, :53], wide[:, 53:].contiguous()
    out = torch.empty_like(rows)
    kernels.gate_rows(gates, rows, out)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7  # of a sigmoid that is rounded the other way
    torch.testing.assert_close(out, gates.sigmoid() * rows, rtol=tolerance, atol=1e-7)
