"""The lightning indexer in torch and by C++ kernels: exact choices with many equal scores, in any batch and chunks."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from indexer_cases import SHAPES, Case, slots_of
from paged_steps import NATIVE, drawn_chunks, kernels, make_step, needs_kernels, same_bytes, scatter_blocks

from moeserve.ops import indexer as indexer_ops
from moeserve.ops import latent_attention as latent_attention_ops
from moeserve.ops import rows as rows_ops
from moeserve.ops.backend import REFERENCE
from moeserve.ops.indexer.interface import IndexerRule
from moeserve.ops.latent_attention.interface import LatentShape
from moeserve.ops.native import set_num_threads

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
LENGTHS = [(1, 150), (23, 23), (9, 40), (1, 1), (0, 5), (2, 64)]  # rows and context


@pytest.mark.parametrize("name", SHAPES)
@DTYPES
def test_choices_are_those_of_the_definition(name: str, dtype: torch.dtype, implementation: str) -> None:
    shape = SHAPES[name]
    block_ids = scatter_blocks(LENGTHS, shape.block_size, seed=3)
    case = Case.random(name, dtype, make_step(LENGTHS, block_ids, shape.block_size))
    backend = REFERENCE if implementation == "torch" else NATIVE
    assert slots_of(case.run(indexer_ops.make(backend, shape.rule))) == case.by_hand()


@needs_kernels
def test_choices_of_a_context_of_64k_positions(isa: str) -> None:
    """Several threads score parts of it. With the scores of few heads and small integers, many are equal."""
    lengths, shape = [(2, 65536), (1, 4000)], SHAPES["odd"]
    block_ids = scatter_blocks(lengths, shape.block_size, seed=5)
    case = Case.random("odd", torch.float32, make_step(lengths, block_ids, shape.block_size))
    assert slots_of(case.run(indexer_ops.make(NATIVE, shape.rule))) == case.by_hand()


@needs_kernels
@DTYPES
def test_choices_do_not_depend_on_chunks_or_threads(dtype: torch.dtype, isa: str) -> None:
    """Scores of random numbers are rounded, and long enough for several threads."""
    shape, lengths = SHAPES["published"], [(1300, 1300), (70, 70)]
    block_ids = scatter_blocks(lengths, shape.block_size, seed=1)
    whole = Case.random("published", dtype, make_step(lengths, block_ids, shape.block_size))
    noise = torch.Generator().manual_seed(0)
    whole.key_cache.copy_(torch.randn(whole.key_cache.shape, generator=noise))
    wanted = slots_of(whole.run(indexer_ops.make(NATIVE, shape.rule)))
    for num_threads in (1, 2):
        set_num_threads(num_threads)
        found: dict[int, list[int]] = {}
        for pieces, rows in drawn_chunks(whole.step.spans, random.Random(num_threads)):
            part = whole.of_rows(torch.tensor(rows, dtype=torch.int64), make_step(pieces, block_ids, shape.block_size))
            found.update(zip(rows, slots_of(part.run(indexer_ops.make(NATIVE, shape.rule))), strict=True))
        assert [found[row] for row in range(len(wanted))] == wanted


@needs_kernels
@DTYPES
def test_attention_to_all_positions_has_the_bytes_of_dense_attention(dtype: torch.dtype, isa: str) -> None:
    """The context is longer than a partition of the sums."""
    lengths, latent_size, size = [(3, 600), (40, 40)], 24, 32
    block_ids = scatter_blocks(lengths, 16, seed=2)
    step = make_step(lengths, block_ids, 16)
    generator = torch.Generator().manual_seed(5)
    cache = torch.randn(1 + int(step.block_table.max()), 16, size, generator=generator).to(dtype)
    query_TNP = torch.randn(len(step.token_ids), 20, size, generator=generator).to(dtype)
    case = Case.random("odd", dtype, step)
    attention = latent_attention_ops.make(NATIVE, LatentShape(size**-0.5, latent_size, 20))
    keys = torch.zeros(len(cache), 16, 36, dtype=dtype)
    everything = indexer_ops.make(NATIVE, IndexerRule(top_k=600))
    chosen = everything(case.query_TNH, case.weights_TN, keys, step)
    assert same_bytes(attention.attend_chosen(query_TNP, cache, chosen), attention.attend(query_TNP, cache, step))


@pytest.mark.parametrize("with_sinks", [False, True])
@DTYPES
def test_attention_to_some_positions(dtype: torch.dtype, implementation: str, *, with_sinks: bool) -> None:
    backend = REFERENCE if implementation == "torch" else NATIVE
    lengths, shape = [(1, 150), (5, 5), (0, 0)], SHAPES["odd"]
    block_ids = scatter_blocks(lengths, shape.block_size, seed=4)
    case = Case.random("odd", dtype, make_step(lengths, block_ids, shape.block_size))
    chosen = case.run(indexer_ops.make(backend, shape.rule))
    generator = torch.Generator().manual_seed(6)
    cache = torch.randn(len(case.key_cache), shape.block_size, 20, generator=generator).to(dtype)
    query_TNP = torch.randn(6, 3, 20, generator=generator).to(dtype)
    sinks_N = torch.randn(3, generator=generator) if with_sinks else None
    operation = latent_attention_ops.make(backend, LatentShape(0.3, 17, 3))
    attended = operation.attend_chosen(query_TNP, cache, chosen, sinks_N)
    for row, slots in enumerate(case.by_hand()):
        latent_CP = cache.flatten(0, 1)[slots].double()
        scores = 0.3 * query_TNP[row].double() @ latent_CP.T
        if sinks_N is not None:
            scores = torch.cat([scores, sinks_N[:, None].double()], dim=1)
        weights = torch.softmax(scores, dim=-1)[:, : len(slots)]
        # Weights and results in bfloat16 are rounded to 8 bits; values are below 4.
        tolerance = 1e-5 if dtype == torch.float32 else 4 * 2**-8
        torch.testing.assert_close(attended[row].double(), weights @ latent_CP[:, :17], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [128, 37, 5, 33])
@DTYPES
def test_layer_norm(width: int, dtype: torch.dtype, implementation: str) -> None:
    backend = REFERENCE if implementation == "torch" else NATIVE
    generator = torch.Generator().manual_seed(width)
    wide = torch.randn(9, width + 3, generator=generator).mul(3).add(50).to(dtype)
    weight, bias = (torch.randn(width, generator=generator).to(dtype) for _ in range(2))
    rows = wide[:, 1 : 1 + width]
    expected = torch.nn.functional.layer_norm(rows.double(), (width,), weight.double(), bias.double(), 1e-6)
    around = wide[:, [0, -1]].clone()
    normed = rows_ops.make(backend).layer_norm(rows, weight, bias, 1e-6)
    rows_ops.make(backend).layer_norm_in_place(rows, weight, bias, 1e-6)
    assert torch.equal(rows, normed)
    # Means of numbers near 50 are rounded to float32, which moves results by their share of the deviation.
    tolerance = 1e-4 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(rows.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(wide[:, [0, -1]], around)


@needs_kernels
def test_arguments_out_of_range_are_refused() -> None:
    shape = SHAPES["odd"]
    block_ids = scatter_blocks([(2, 9)], shape.block_size, seed=0)
    case = Case.random("odd", torch.float32, make_step([(2, 9)], block_ids, shape.block_size))
    choose = indexer_ops.make(NATIVE, shape.rule)
    for change in ({"block_table": case.step.block_table + 99}, {"context_lens": case.step.context_lens + 99}):
        step = dataclasses.replace(case.step, **change)
        with pytest.raises(ValueError, match="choose_entries"):
            choose(case.query_TNH, case.weights_TN, case.key_cache, step)
    assert kernels is not None
    with pytest.raises(ValueError, match="weight"):
        kernels.layer_norm(torch.ones(2, 3), torch.ones(4), torch.ones(3), 1e-6, torch.ones(2, 3))
