"""Latent attention in Triton's interpreter: results equal torch's and do not depend on other requests."""

from __future__ import annotations

import dataclasses
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeserve.ops.torch.attention import TorchLatentAttention
from moeserve.step_inputs import StepInputs
from moeserve.triton_kernels import latent_attention as gpu
from moeserve.triton_kernels.latent_attention import latent_attention, write_latents
from moeserve.triton_kernels.paged_kernels import Splits

sys.path.append(str(Path(__file__).parent.parent / "kernels"))
from paged_steps import NUM_SPARE_BLOCKS, make_step, same_bytes, scatter_blocks

# T tokens, N query heads, L latent size, P latent size and rotary size; C positions of one chunk's context

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (4e-3, 4e-3)}


@dataclass(frozen=True)
class Case:
    """One step over a cache that holds NaN wherever no row may read."""

    step: StepInputs
    query_TNP: Tensor
    cache: Tensor
    latent_size: int
    scale: float


def make_case(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 5,
    latent_size: int = 24,
    rotary_size: int = 8,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    size = latent_size + rotary_size
    block_ids = scatter_blocks(lengths, block_size, seed)
    step = make_step(lengths, block_ids, block_size)
    cache = torch.full((sum(map(len, block_ids)) + NUM_SPARE_BLOCKS, block_size, size), float("nan"), dtype=dtype)
    for ids, (_, context_len) in zip(block_ids, lengths, strict=True):
        places = torch.arange(context_len)
        blocks = torch.tensor(ids, dtype=torch.int64)[places // block_size]
        cache[blocks, places % block_size] = torch.randn(context_len, size, generator=generator).to(dtype)
    query_TNP = torch.randn(len(step.token_ids), num_heads, size, generator=generator).to(dtype)
    return Case(step, query_TNP, cache, latent_size, size**-0.5)


def attend(case: Case, max_rows: int | None = None, max_rows_per_chunk: int | None = None) -> Tensor:
    step = case.step
    if max_rows_per_chunk is None:
        max_rows_per_chunk = max((span.num_rows for span in step.spans), default=0)
    return latent_attention(
        case.query_TNP,
        case.cache,
        step.block_table,
        step.row_starts,
        step.context_lens,
        scale=case.scale,
        latent_size=case.latent_size,
        max_rows_per_chunk=max_rows_per_chunk,
        max_context=step.block_table.shape[1] * case.cache.shape[1],
        max_rows=max_rows,
    )


def check(case: Case, actual: Tensor, max_rows: int | None = None) -> None:
    assert actual.dtype == case.query_TNP.dtype
    assert actual.is_contiguous()
    reference = TorchLatentAttention(case.scale, case.latent_size)
    expected = reference.attend(case.query_TNP.float(), case.cache.float(), case.step, max_rows)
    atol, rtol = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("seed", range(8))
def test_random_steps(seed: int) -> None:
    draw, dtype = random.Random(seed), [torch.float32, torch.float16][seed % 2]
    lengths = []
    for _ in range(draw.randint(1, 4)):
        num_rows = draw.choice([0, 1, 1, 1, 2, 7])
        lengths.append((num_rows, num_rows + draw.choice([0, 1, 15, 16, 100, 127, 128, 200])))
    case = make_case(
        lengths,
        num_heads=draw.choice([1, 3, 16, 37] if dtype == torch.float16 else [1, 3, 18]),
        latent_size=draw.choice([1, 12, 32, 100]),
        rotary_size=draw.choice([0, 1, 8, 20]),
        block_size=draw.choice([1, 3, 16, 64]),
        dtype=dtype,
        seed=seed,
    )
    check(case, attend(case))


def test_shape_of_deepseek_v3() -> None:
    case = make_case(
        [(1, 130), (2, 40)], num_heads=128, latent_size=512, rotary_size=64, block_size=64, dtype=torch.float16
    )
    check(case, attend(case))


def test_more_pieces_than_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "choose_splits", lambda num_heads: Splits(piece_size=32, max_splits=2))
    case = make_case([(1, 200), (1, 128), (0, 0), (1, 1), (1, 129)])
    check(case, attend(case))


@pytest.mark.parametrize("max_rows", [0, 1, 8])
def test_chunks_of_more_rows_are_zeros(max_rows: int) -> None:
    case = make_case([(9, 40), (1, 100), (10, 10), (8, 50)])
    actual = attend(case, max_rows)
    check(case, actual, max_rows)
    only_short = make_case([(1, 20), (0, 0), (1, 30)])
    check(only_short, attend(only_short, max_rows), max_rows)


def test_queries_and_caches_may_be_strided() -> None:
    case = make_case([(1, 20), (4, 12)])
    expected_bytes = attend(case)
    wide = torch.randn(5, 5, 50)
    wide[..., 7:39] = case.query_TNP
    assert same_bytes(attend(dataclasses.replace(case, query_TNP=wide[..., 7:39])), expected_bytes)
    wide_cache = torch.cat([case.cache, case.cache], dim=2)[:, :, :32]
    assert same_bytes(attend(dataclasses.replace(case, cache=wide_cache)), expected_bytes)


def test_rows_without_a_chunk_are_zeros() -> None:
    assert attend(make_case([])).shape == (0, 5, 24)
    for lengths in ([(1, 20), (0, 30), (1, 40)], [(1, 20), (0, 30), (4, 40)]):
        case = make_case(lengths)
        num_rows = len(case.query_TNP)
        actual = attend(dataclasses.replace(case, query_TNP=torch.cat([case.query_TNP, torch.randn(3, 5, 32)])))
        assert same_bytes(actual[:num_rows], attend(case))
        assert not actual[num_rows:].any()


def test_rows_before_position_0_are_zeros() -> None:
    case = make_case([(2, 20), (6, 30), (1, 9)])
    # The same rows at the end of shorter contexts.
    contexts = [1, 0, 0]
    spans = tuple(dataclasses.replace(s, context_len=c) for s, c in zip(case.step.spans, contexts, strict=True))
    step = dataclasses.replace(case.step, context_lens=torch.tensor(contexts, dtype=torch.int32), spans=spans)
    case = dataclasses.replace(case, step=step)
    for max_rows in (None, 1):  # the first chunk has one row with a position
        actual = attend(case, max_rows)
        check(case, actual, max_rows)
        assert actual[1].all()
        assert not torch.cat([actual[:1], actual[2:]]).any()


def test_result_of_a_chunk_does_not_depend_on_other_chunks() -> None:
    lengths = [(1, 1), (3, 60), (1, 300), (0, 7), (8, 30), (1, 129)]
    case = make_case(lengths, num_heads=3, dtype=torch.float16)
    together = attend(case)
    for chunk, span in enumerate(case.step.spans):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        ids = case.step.block_table[chunk, : -(-span.context_len // 16)].tolist()
        step = make_step([(span.num_rows, span.context_len)], [ids], 16)
        alone = dataclasses.replace(case, step=step, query_TNP=case.query_TNP[rows])
        assert same_bytes(attend(alone), together[rows]), f"chunk {chunk}: {span}"
        assert same_bytes(attend(alone, max_rows_per_chunk=50), together[rows]), f"chunk {chunk}: {span}"


def test_nan_in_one_request_stays_there() -> None:
    case = make_case([(1, 200), (1, 190), (4, 30)])
    clean = attend(case)
    case.cache[int(case.step.block_table[1, 4]), 3, 5] = float("nan")
    actual = attend(case)
    assert actual[1].isnan().any()
    others = [0, *range(2, 6)]
    assert same_bytes(actual[others], clean[others])


@pytest.mark.parametrize(("dtype", "block_size"), [(torch.float32, 1), (torch.float16, 7), (torch.bfloat16, 16)])
def test_write_stores_each_vector_at_its_slot(dtype: torch.dtype, block_size: int) -> None:
    num_tokens, num_blocks = 40, 90 // block_size
    generator = torch.Generator().manual_seed(0)
    slots_T = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots_T[::5] = -1
    latent_TP = torch.randn(num_tokens, 50, generator=generator).to(dtype)[:, 7:27]
    cache = torch.randn(num_blocks, block_size, 20, generator=generator).to(dtype)
    expected = cache.clone()
    for token, slot in enumerate(slots_T.tolist()):
        if slot >= 0:
            expected[slot // block_size, slot % block_size] = latent_TP[token]
    write_latents(latent_TP, cache, slots_T)
    assert same_bytes(cache, expected)
    write_latents(latent_TP[:0], cache, slots_T[:0])
    assert same_bytes(cache, expected)
