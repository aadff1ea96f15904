"""Latent attention in torch and in C++: values, batch invariance and the cache."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from paged_steps import (
    KERNELS,
    NUM_SPARE_BLOCKS,
    drawn_chunks,
    make_step,
    needs_kernels,
    rounds_weights,
    same_bytes,
    scatter_blocks,
    within_bfloat16_rounding,
)
from torch import Tensor

from moeserve.ops.interfaces import LatentAttentionBackend
from moeserve.ops.threads import set_num_threads
from moeserve.ops.torch import dense_attention
from moeserve.ops.torch.table import TORCH_KERNELS
from moeserve.step_inputs import StepInputs

# T tokens, N query heads, L latent size, P size of a cached vector; C positions of one chunk's context

ChooseBackend = Callable[..., LatentAttentionBackend]


@dataclass(frozen=True)
class Case:
    """One step over a cache that holds NaN at all positions that no row attends to."""

    step: StepInputs
    query_TNP: Tensor
    cache: Tensor
    vectors_CP: list[Tensor]  # per chunk, the same vectors without blocks
    latent_size: int
    scale: float


@pytest.fixture
def choose(implementation: str) -> ChooseBackend:
    return make_torch if implementation == "torch" else make_native


@pytest.fixture
def choose_native(isa: str) -> ChooseBackend:
    return make_native


def make_native(*, scale: float, latent_size: int) -> LatentAttentionBackend:
    return KERNELS.make_latent_attention(scale, latent_size)


def make_torch(*, scale: float, latent_size: int) -> LatentAttentionBackend:
    return TORCH_KERNELS.make_latent_attention(scale, latent_size)


def make_case(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int,
    latent_size: int,
    rotary_size: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)  # the numbers do not depend on the block size
    size = latent_size + rotary_size
    block_ids = scatter_blocks(lengths, block_size, seed)
    cache = torch.full((sum(map(len, block_ids)) + NUM_SPARE_BLOCKS, block_size, size), float("nan"), dtype=dtype)
    vectors = []
    for ids, (_, context_len) in zip(block_ids, lengths, strict=True):
        vectors.append(torch.randn(context_len, size, generator=generator).to(dtype))
        for p in range(context_len):
            cache[ids[p // block_size], p % block_size] = vectors[-1][p]
    step = make_step(lengths, block_ids, block_size)
    query_TNP = torch.randn(len(step.token_ids), num_heads, size, generator=generator).to(dtype)
    return Case(step, query_TNP, cache, vectors, latent_size, scale or size**-0.5)


@functools.cache
def random_case(seed: int, dtype: torch.dtype) -> tuple[Case, Tensor]:
    """Return a case and its expected result. Both are shared and must not be modified."""
    draw = random.Random(seed)
    lengths = []
    for _ in range(draw.randint(1, 5)):
        num_rows = draw.choice([1, 1, 1, 2, 3, 8, 20])
        lengths.append((num_rows, num_rows + draw.choice([0, 1, 15, 16, 40, 255, 256, 600, 1100])))
    case = make_case(
        lengths,
        num_heads=draw.choice([1, 2, 3, 5, 8, 16, 22, 37, 128]),
        latent_size=draw.choice([1, 12, 32, 64, 100]),
        rotary_size=draw.choice([0, 1, 8, 20, 64]),
        block_size=draw.choice([1, 3, 7, 16, 32]),
        dtype=dtype,
        scale=draw.choice([None, 0.3]),
        seed=seed,
    )
    return case, expected_attention(case)


def expected_attention(case: Case) -> Tensor:
    """Return dense softmax attention in float64."""
    return expected_with_spread(case)[0]


def expected_with_spread(case: Case) -> tuple[Tensor, Tensor]:
    """Return the expected result and the weighted sum of the distances of the values from it."""
    rows, spreads = [], []
    for span, vectors_CP in zip(case.step.spans, case.vectors_CP, strict=True):
        for i in range(span.num_rows):
            visible_CP = vectors_CP[: span.context_len - span.num_rows + i + 1].double()
            scores_NC = case.query_TNP[span.first_row + i].double() @ visible_CP.T * case.scale
            weights_NC = (scores_NC - scores_NC.amax(-1, keepdim=True)).exp()
            weights_NC = weights_NC / weights_NC.sum(-1, keepdim=True)
            value_CL = visible_CP[:, : case.latent_size]
            rows.append(weights_NC @ value_CL)
            distance_CNL = (value_CL[:, None] - rows[-1]).abs()
            spreads.append(torch.einsum("nc,cnl->nl", weights_NC, distance_CNL))
    return torch.stack(rows), torch.stack(spreads)


def attend(choose: ChooseBackend, case: Case, max_rows: int | None = None) -> Tensor:
    backend = choose(scale=case.scale, latent_size=case.latent_size)
    return backend.attend(case.query_TNP, case.cache, case.step, max_rows)


@pytest.mark.parametrize("seed", range(20))
def test_float32_matches_dense_float64(choose: ChooseBackend, seed: int) -> None:
    case, expected = random_case(seed, torch.float32)
    actual = attend(choose, case)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(20, 28))
def test_bfloat16_rounds_only_the_result_and_weights(choose: ChooseBackend, seed: int) -> None:
    case, _ = random_case(seed, torch.bfloat16)
    expected, spread = expected_with_spread(case)
    actual = attend(choose, case)
    assert actual.dtype == torch.bfloat16
    has_rounded_weights = choose is not make_torch and rounds_weights()
    assert within_bfloat16_rounding(actual, expected, spread if has_rounded_weights else None)


def test_float16_matches_dense_float64(choose: ChooseBackend) -> None:
    case, expected = random_case(28, torch.float16)
    torch.testing.assert_close(attend(choose, case).double(), expected, atol=2e-3, rtol=2e-3)


def test_sizes_of_deepseek_v3(choose: ChooseBackend) -> None:
    case = make_case([(1, 300), (2, 40)], num_heads=128, latent_size=512, rotary_size=64)
    torch.testing.assert_close(attend(choose, case).double(), expected_attention(case), atol=2e-5, rtol=1e-5)


def test_growing_scores_stay_finite(choose: ChooseBackend) -> None:
    case = make_case([(1, 1500), (3, 700)], num_heads=64, latent_size=16, rotary_size=8, scale=1.0)
    for vectors_CP, block_ids in zip(case.vectors_CP, case.step.block_table, strict=True):
        for p in range(len(vectors_CP)):
            vectors_CP[p] *= 1 + p / 20  # scores grow along the context
            case.cache[block_ids[p // 16], p % 16] = vectors_CP[p]
    torch.testing.assert_close(attend(choose, case).double(), expected_attention(case), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("max_rows", [0, 1, 8, 9])
def test_the_reference_leaves_chunks_of_more_rows_zero(max_rows: int) -> None:
    case = make_case([(9, 40), (1, 300), (10, 10), (8, 50)], num_heads=5, latent_size=32, rotary_size=8)
    expected = expected_attention(case)
    for span in case.step.spans:
        if span.num_rows > max_rows:
            expected[span.first_row : span.first_row + span.num_rows] = 0
    actual = attend(make_torch, case, max_rows).double()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(actual == 0, expected == 0)


def test_division_of_queries_to_limit_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(20, 90), (11, 11)], num_heads=6, latent_size=32, rotary_size=8)
    for max_mask_size in (1000, 1):
        monkeypatch.setattr(dense_attention, "MAX_MASK_SIZE", max_mask_size)
        actual = attend(make_torch, case)
        torch.testing.assert_close(actual.double(), expected_attention(case), atol=1e-5, rtol=1e-5)


def test_query_may_be_strided(choose: ChooseBackend) -> None:
    case = make_case([(1, 20), (10, 12)], num_heads=4, latent_size=24, rotary_size=8)
    wide = torch.randn(11, 4, 50)
    wide[..., 7:39] = case.query_TNP
    strided = dataclasses.replace(case, query_TNP=wide[..., 7:39])
    assert same_bytes(attend(choose, strided), attend(choose, case))


def test_no_tokens(choose: ChooseBackend) -> None:
    case = make_case([], num_heads=4, latent_size=24, rotary_size=8)
    assert attend(choose, case).shape == (0, 4, 24)
    choose(scale=1.0, latent_size=24).write(torch.empty(0, 32), case.cache, case.step)
    assert case.cache.isnan().all()


def test_chunks_without_rows_and_rows_without_chunk(choose: ChooseBackend) -> None:
    case = make_case([(1, 20), (0, 30), (10, 40)], num_heads=4, latent_size=24, rotary_size=8)
    padded = dataclasses.replace(case, query_TNP=torch.cat([case.query_TNP, torch.randn(3, 4, 32)]))
    actual = attend(choose, padded)
    torch.testing.assert_close(actual[:11].double(), expected_attention(case), atol=1e-5, rtol=1e-5)
    assert not actual[11:].any()


def test_rows_before_position_0_get_zeros(choose: ChooseBackend) -> None:
    case = make_case([(2, 20), (12, 30)], num_heads=4, latent_size=24, rotary_size=8)
    # The same rows with shorter context lengths, so that some get negative positions.
    contexts = [1, 0]
    spans = tuple(dataclasses.replace(s, context_len=c) for s, c in zip(case.step.spans, contexts, strict=True))
    step = dataclasses.replace(case.step, context_lens=torch.tensor(contexts, dtype=torch.int32), spans=spans)
    actual = attend(choose, dataclasses.replace(case, step=step))
    assert not actual[0].any()
    assert not actual[2:].any()
    torch.testing.assert_close(actual[1], case.vectors_CP[0][0, :24].expand(4, 24))


# Order of additions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [6, 16, 78])
def test_a_chunk_gives_the_same_bytes_alone_and_in_a_batch(
    choose: ChooseBackend, dtype: torch.dtype, num_heads: int
) -> None:
    lengths = [(1, 1), (1, 63), (3, 500), (1, 2100), (20, 90), (1, 256), (8, 1030), (1, 257)]
    case = make_case(lengths, num_heads=num_heads, latent_size=24, rotary_size=16, dtype=dtype)
    together = attend(choose, case)
    for chunk, span in enumerate(case.step.spans):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        ids = case.step.block_table[chunk, : -(-span.context_len // 16)].tolist()
        step = make_step([(span.num_rows, span.context_len)], [ids], 16)
        alone = dataclasses.replace(case, step=step, query_TNP=case.query_TNP[rows])
        assert same_bytes(attend(choose, alone), together[rows]), f"chunk {chunk}: {span}"


@pytest.mark.parametrize("lengths", [[(1, 2000)], [(1, 300)], [(1, 40)] * 20 + [(1, 1500)], [(8, 900), (1, 400)]])
@pytest.mark.parametrize("num_heads", [16, 61])
def test_threads_do_not_change_a_byte(
    choose_native: ChooseBackend, lengths: list[tuple[int, int]], num_heads: int
) -> None:
    case = make_case(lengths, num_heads=num_heads, latent_size=40, rotary_size=8)
    set_num_threads(1)
    expected = attend(choose_native, case)
    for num_threads in (2, 3, 8):
        set_num_threads(num_threads)
        for _ in range(3):
            assert same_bytes(attend(choose_native, case), expected), f"{num_threads} threads"


@pytest.mark.parametrize("num_heads", [6, 40])
def test_neither_block_size_nor_other_rows_change_a_byte(choose_native: ChooseBackend, num_heads: int) -> None:
    num_rows, context_len = 8, 900
    outputs = []
    for block_size in (1, 7, 16, 32):
        case = make_case(
            [(num_rows, context_len)], num_heads=num_heads, latent_size=40, rotary_size=8, block_size=block_size
        )
        outputs.append(attend(choose_native, case))
        for row in range(num_rows):
            length = context_len - num_rows + row + 1
            step = make_step([(1, length)], [case.step.block_table[0].tolist()], block_size)
            alone = dataclasses.replace(case, step=step, query_TNP=case.query_TNP[row : row + 1])
            assert same_bytes(attend(choose_native, alone)[0], outputs[-1][row]), f"row {row}"
    assert all(same_bytes(output, outputs[0]) for output in outputs)


def attend_chunk_by_chunk(choose: ChooseBackend, case: Case, draw: random.Random) -> Tensor:
    """Run the requests of a case in steps of random chunks with random numbers of threads.

    The cache holds NaN at later positions.
    """
    backend = choose(scale=case.scale, latent_size=case.latent_size)
    cache = torch.full_like(case.cache, math.nan)
    out_TNL = case.query_TNP.new_full((*case.query_TNP.shape[:2], case.latent_size), math.nan)
    for lengths, rows in drawn_chunks(case.step.spans, draw):
        step = make_step(lengths, case.step.block_table.tolist(), case.cache.shape[1])
        set_num_threads(draw.choice([1, 2, 3]))
        backend.write(torch.cat(case.vectors_CP)[rows], cache, step)
        out_TNL[rows] = backend.attend(case.query_TNP[rows], cache, step)
    return out_TNL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "sizes"), [(16, (512, 64)), (5, (40, 8)), (35, (33, 6)), (128, (24, 8))])
def test_chunking_changes_no_byte(
    choose_native: ChooseBackend, num_heads: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    lengths = [(length, length) for length in (270, 100, 20)]
    make = functools.partial(
        make_case, lengths, num_heads=num_heads, latent_size=sizes[0], rotary_size=sizes[1], dtype=dtype
    )
    set_num_threads(1)
    case = make()
    expected = attend(choose_native, case)
    torch.testing.assert_close(expected.double(), expected_attention(case), atol=2e-2, rtol=2e-2)
    for seed, block_size in enumerate((1, 16)):
        actual = attend_chunk_by_chunk(choose_native, make(block_size=block_size), random.Random(seed))
        assert same_bytes(actual, expected), f"blocks of {block_size}"


# The cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_write_stores_each_vector_at_its_slot(choose: ChooseBackend, dtype: torch.dtype, block_size: int) -> None:
    num_tokens, num_blocks = 40, 90 // block_size
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[::5] = -1
    latent_TP = torch.randn(num_tokens, 50).to(dtype)[:, 7:27]
    cache = torch.randn(num_blocks, block_size, 20).to(dtype)
    expected = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, slot % block_size] = latent_TP[token]

    step = dataclasses.replace(make_step([], [], block_size), cache_slots=slots)
    choose(scale=1.0, latent_size=16).write(latent_TP, cache, step)
    assert same_bytes(cache, expected)


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_gather_returns_the_vectors_of_a_chunk_in_order(choose: ChooseBackend, block_size: int) -> None:
    lengths = [(1, 33), (5, 5), (1, 48)]
    case = make_case(lengths, num_heads=1, latent_size=12, rotary_size=4, block_size=block_size)
    backend = choose(scale=1.0, latent_size=12)
    for block_ids, vectors_CP in zip(case.step.block_table, case.vectors_CP, strict=True):
        assert torch.equal(backend.gather(case.cache, block_ids, len(vectors_CP)), vectors_CP)
    assert backend.gather(case.cache, case.step.block_table[0], 0).shape == (0, 16)


@needs_kernels
def test_a_slot_outside_the_cache_is_refused() -> None:
    cache = torch.zeros(10, 16, 20)
    step = dataclasses.replace(make_step([], [], 16), cache_slots=torch.tensor([3, 160]))
    with pytest.raises(ValueError, match="has slot 160"):
        make_native(scale=1.0, latent_size=16).write(torch.ones(2, 20), cache, step)
    assert not cache.any()


@needs_kernels
def test_a_latent_larger_than_the_vectors_is_refused() -> None:
    case = make_case([(1, 20)], num_heads=4, latent_size=24, rotary_size=8)
    with pytest.raises(ValueError, match="value_size=33, but a row of the cache has 32"):
        attend(make_native, dataclasses.replace(case, latent_size=33))
