"""Latent attention by external libraries, with stand-ins: results, limits, and where our own kernels serve."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

import latent_stand_ins
import pytest
import torch
from torch import Tensor

from moeserve.ops.latent_attention import flashinfer as flashinfer_latent
from moeserve.ops.latent_attention.flashinfer import FlashInferLatent, LatentProblem
from moeserve.ops.latent_attention.interface import LatentShape
from moeserve.ops.latent_attention.reference import TorchLatentAttention

sys.path.append(str(Path(__file__).parent.parent / "kernels"))
from attention_cases import Case, Shape, expected_attention, make_case

# T tokens, N query heads, K unrotated values of a head's key, E rotated ones, V values of a head, L latent size,
# C positions

CPU = torch.device("cpu")
L, K, E, V = 128, 128, 64, 128
SCALE = 0.07
SHAPE = LatentShape(SCALE, L, 4)
ABSORBED = LatentProblem(True, 4, L, E, L, torch.bfloat16, SCALE)
EXPANDED = LatentProblem(False, 4, K, E, V, torch.bfloat16, SCALE)
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2.5e-2}
MIXED = [(3, 40), (20, 20), (1, 300), (9, 120), (16, 16), (12, 200)]  # rows, and length of the context with them


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(flashinfer_latent, "WORKSPACE", 8192)
    return latent_stand_ins.make_package()


def case_of(lengths: list[tuple[int, int]], dtype: torch.dtype, *, num_heads: int = 4, block_size: int = 16) -> Case:
    """Return a step over vectors of E + L values. Numbers where no row may read are large."""
    shape = Shape(num_heads, 1, L + E, latent_size=L, scale=SCALE)
    return make_case(lengths, shape, block_size=block_size, dtype=dtype, unread=100.0)


def layer(package: Any) -> Any:
    return FlashInferLatent(package, CPU).attention(TorchLatentAttention(*SHAPE), SHAPE)


def absorbed_by(backend: Any, case: Case, max_rows: int | None) -> Tensor:
    return backend.attend(case.query_TNH, case.key_cache[:, 0], case.step, max_rows)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lengths", [[(1, 20), (1, 300), (1, 1)], MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(("num_heads", "block_size"), [(4, 16), (128, 64), (1, 7)])
def test_absorbed(
    num_heads: int, block_size: int, lengths: list[tuple[int, int]], dtype: torch.dtype, package: Any
) -> None:
    case = case_of(lengths, dtype, num_heads=num_heads, block_size=block_size)
    backend = layer(package)
    expected = expected_attention(case)[0]
    for span in case.step.spans:
        if span.num_rows > 8:
            expected[span.first_row : span.last_row + 1] = 0
    for _ in range(2):
        actual = absorbed_by(backend, case, 8)
        torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    wrapper = package.mla.BatchMLAPagedAttentionWrapper
    assert (wrapper.num_plans, wrapper.num_runs) == (1, 2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("piece_size", [10**6, 100, 37])
def test_expanded(piece_size: int, dtype: torch.dtype, package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case, generator = case_of(MIXED, dtype), torch.Generator().manual_seed(1)
    bytes_per_position = 4 * (2 * K + E + V) * dtype.itemsize
    monkeypatch.setattr(flashinfer_latent, "MAX_EXPANDED_BYTES", piece_size * bytes_per_position)
    key_NLK, value_NLV = (torch.randn(4, L, size, generator=generator).to(dtype) / 16 for size in (K, V))
    query_TNK = torch.randn(len(case.query_TNH), 4, K, generator=generator).to(dtype)
    query_TNE = case.query_TNH[..., L:]
    out_TNV = torch.full((len(query_TNK), 4, V), 7.0, dtype=dtype)
    expected = out_TNV.double()
    for span, vectors in zip(case.step.spans, case.keys_CGH, strict=True):
        if span.num_rows > 8:
            rows = slice(span.first_row, span.last_row + 1)
            latent_CL, rotated_CE = vectors[:, 0].double().split([L, E], dim=1)
            scores = torch.einsum("tnk,nlk,cl->ntc", query_TNK[rows].double(), key_NLK.double(), latent_CL)
            scores = (scores + torch.einsum("tne,ce->ntc", query_TNE[rows].double(), rotated_CE)) * SCALE
            hidden = torch.ones_like(scores[0]).triu(span.context_len - span.num_rows + 1).bool()
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            expected[rows] = torch.einsum("ntc,cl,nlv->tnv", weights, latent_CL, value_NLV.double())
    backend = layer(package)
    for _ in range(2):
        backend.attend_expanded(
            query_TNK,
            query_TNE,
            case.key_cache[:, 0],
            case.step,
            8,
            lambda latent_CL, heads=slice(None): (latent_CL @ key_NLK[heads], latent_CL @ value_NLV[heads]),
            out_TNV,
        )
        torch.testing.assert_close(out_TNV.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    prefixes = sum(length - rows for rows, length in MIXED if rows > 8)
    wrapper, num_pieces = package.BatchPrefillWithRaggedKVCacheWrapper, 1 + -(-prefixes // piece_size)
    assert (wrapper.num_plans, wrapper.num_runs) == (num_pieces, 2 * num_pieces)


@pytest.mark.parametrize("what", ["a graph's step", "a row without a position"])
def test_our_kernels_serve_other_steps(what: str, package: Any) -> None:
    case = case_of([(1, 20), (1, 30)], torch.bfloat16)
    step = dataclasses.replace(case.step, padding=torch.zeros(2, dtype=torch.bool))
    if what != "a graph's step":
        spans = (case.step.spans[0], case.step.spans[1]._replace(context_len=0))
        step = dataclasses.replace(case.step, spans=spans, context_lens=torch.tensor([20, 0], dtype=torch.int32))
    absorbed_by(layer(package), dataclasses.replace(case, step=step), None)
    assert not package.mla.BatchMLAPagedAttentionWrapper.num_runs


@pytest.mark.parametrize(
    ("problem", "facts", "value"),
    [
        (ABSORBED, dict(dtype=torch.float32), "torch.float32"),
        (ABSORBED, dict(value_size=500), "not 500"),
        (ABSORBED, dict(rotary_size=32), "not 32"),
        (ABSORBED, dict(num_heads=48), "not of 48"),
        (EXPANDED, dict(value_size=192), "192)"),
        (EXPANDED, dict(dtype=torch.float32), "torch.float32"),
    ],
)
def test_limits(problem: LatentProblem, facts: dict[str, Any], value: str, package: Any) -> None:
    library = FlashInferLatent(package, CPU)
    assert library.why_not(problem) is None
    assert value in str(library.why_not(dataclasses.replace(problem, **facts)))


def test_a_version_without_a_class_or_an_argument_leaves_latent_attention_to_our_kernels(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            package.mla.BatchMLAPagedAttentionWrapper, "plan", lambda self, qo_indptr: None
        )  # of an older one
        assert "Wrapper.plan(causal=)" in str(FlashInferLatent(package, CPU).why_not(ABSORBED))
    monkeypatch.delattr(package, "mla")
    assert "BatchMLAPagedAttentionWrapper" in str(FlashInferLatent(package, CPU).why_not(ABSORBED))


@pytest.mark.parametrize("name", ["BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper"])
def test_the_stand_ins_take_no_argument_that_the_package_lacks(name: str) -> None:
    flashinfer = pytest.importorskip("flashinfer", exc_type=ImportError)
    stand_in, real = getattr(latent_stand_ins, name), getattr(flashinfer.mla, name, None)
    real = real or getattr(flashinfer, name)
    for method in ("__init__", "plan", "run"):
        needed, known = (inspect.signature(getattr(each, method)).parameters for each in (stand_in, real))
        assert not set(needed) - set(known), method
    assert not FlashInferLatent(flashinfer, CPU).why_not(ABSORBED)
