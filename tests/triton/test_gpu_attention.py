"""Paged attention in Triton's interpreter: results equal torch's and do not depend on other requests."""

from __future__ import annotations

import dataclasses
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeserve.ops.interfaces import AttentionShape, KeyValueCache
from moeserve.ops.torch.attention import TorchAttention
from moeserve.step_inputs import StepInputs
from moeserve.triton_kernels import paged_attention as gpu
from moeserve.triton_kernels import paged_kernels
from moeserve.triton_kernels.paged_attention import paged_attention
from moeserve.triton_kernels.paged_kernels import Splits

sys.path.append(str(Path(__file__).parent.parent / "kernels"))
from paged_steps import NUM_SPARE_BLOCKS, make_step, same_bytes, scatter_blocks

# T tokens, N query heads, G key-value heads, H head size

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (4e-3, 4e-3)}


@dataclass(frozen=True)
class Case:
    """One step over caches that hold NaN wherever no row may read."""

    step: StepInputs
    query_TNH: Tensor
    key_cache: Tensor
    value_cache: Tensor
    scale: float
    window: int | None
    sinks_N: Tensor | None


def make_case(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    block_size: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    has_sinks: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    block_ids = scatter_blocks(lengths, block_size, seed)
    step = make_step(lengths, block_ids, block_size)
    cache_shape = (sum(map(len, block_ids)) + NUM_SPARE_BLOCKS, num_kv_heads, block_size, head_size)
    caches = tuple(torch.full(cache_shape, float("nan"), dtype=dtype) for _ in range(2))
    for ids, (num_rows, context_len) in zip(block_ids, lengths, strict=True):
        first = 0 if window is None else max(0, context_len - num_rows - window + 1)
        places = torch.arange(first, context_len)
        blocks = torch.tensor(ids, dtype=torch.int64)[places // block_size]
        for cache in caches:
            drawn = torch.randn(len(places), num_kv_heads, head_size, generator=generator)
            cache[blocks, :, places % block_size] = drawn.to(dtype)
    query_TNH = torch.randn(len(step.token_ids), num_heads, head_size, generator=generator).to(dtype)
    sinks_N = torch.randn(num_heads, generator=generator) * 3 + 2 if has_sinks else None
    return Case(step, query_TNH, *caches, head_size**-0.5, window, sinks_N)


def attend(case: Case, max_rows_per_chunk: int | None = None, max_context: int | None = None) -> Tensor:
    step = case.step
    if max_rows_per_chunk is None:
        max_rows_per_chunk = max((span.num_rows for span in step.spans), default=0)
    return paged_attention(
        case.query_TNH,
        case.key_cache,
        case.value_cache,
        step.block_table,
        step.row_starts,
        step.context_lens,
        scale=case.scale,
        window=case.window,
        sinks_N=case.sinks_N,
        max_rows_per_chunk=max_rows_per_chunk,
        max_context=max_context or step.block_table.shape[1] * case.key_cache.shape[2],
    )


def expected(case: Case) -> Tensor:
    shape = AttentionShape(
        num_heads=0, num_kv_heads=0, head_size=0, dtype=torch.float32, scale=case.scale, window=case.window
    )
    reference = TorchAttention(shape)
    cache = KeyValueCache(case.key_cache.float(), case.value_cache.float())
    return reference.attend(case.query_TNH.float(), cache, case.step, case.sinks_N)


def check(case: Case, actual: Tensor) -> None:
    assert actual.dtype == case.query_TNH.dtype
    assert actual.is_contiguous()
    atol, rtol = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected(case), atol=atol, rtol=rtol)


@pytest.mark.parametrize("seed", range(10))
def test_random_steps(seed: int) -> None:
    draw, dtype = random.Random(seed), [torch.float32, torch.float16][seed % 2]
    num_kv_heads = draw.choice([1, 2, 3])
    lengths = []
    for _ in range(draw.randint(1, 5)):
        num_rows = draw.choice([0, 1, 1, 1, 2, 5, 40])
        lengths.append((num_rows, num_rows + draw.choice([0, 1, 15, 16, 100, 256, 300])))
    case = make_case(
        lengths,
        num_heads=num_kv_heads * draw.choice([1, 2, 3, 7, 18]),
        num_kv_heads=num_kv_heads,
        head_size=draw.choice([16, 20, 64, 80]),
        block_size=draw.choice([1, 3, 16, 32, 256]),
        window=draw.choice([None, None, 1, 5, 100, 300]),
        dtype=dtype,
        has_sinks=draw.choice([False, True]),
        seed=seed,
    )
    check(case, attend(case))


@pytest.mark.parametrize(("window", "has_sinks"), [(None, True), (150, False)])
def test_more_pieces_than_splits(window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "choose_splits", lambda num_kv_heads: Splits(piece_size=64, max_splits=2))
    lengths = [(1, 350), (1, 256), (0, 0), (1, 1), (1, 257)]
    case = make_case(lengths, num_heads=3, num_kv_heads=1, window=window, has_sinks=has_sinks)
    check(case, attend(case))


@pytest.mark.parametrize(
    ("window", "dtype", "head_size"),
    [(None, torch.float32, 16), (40, torch.float16, 16), (40, torch.float16, 136)],  # large heads have a loop less
)
def test_chunks_of_several_tiles(window: int | None, dtype: torch.dtype, head_size: int) -> None:
    lengths = [(45, 120), (45, 45), (1, 70)]
    case = make_case(
        lengths, num_heads=3, num_kv_heads=1, head_size=head_size, window=window, dtype=dtype, has_sinks=True
    )
    check(case, attend(case))


def test_group_larger_than_the_pairs_of_a_program() -> None:
    case = make_case([(1, 100), (3, 20)], num_heads=70, num_kv_heads=1, dtype=torch.float16)
    check(case, attend(case))


def test_more_chunks_than_a_program_reads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_kernels, "CHUNKS_AT_ONCE", 8)
    case = make_case([(1, 3), (0, 9)] * 7 + [(2, 9), (1, 5), (3, 3)], num_heads=2, num_kv_heads=1)
    check(case, attend(case))


def test_large_scores_stay_finite() -> None:
    case = dataclasses.replace(make_case([(1, 300), (3, 40)]), scale=50.0)
    torch.testing.assert_close(attend(case), expected(case), atol=1e-4, rtol=1e-4)


def test_sink_above_all_scores_takes_all_weight() -> None:
    case = make_case([(1, 300), (12, 40)])
    sinks_N = torch.tensor([1e4, -1e4, 1e4, float("-inf")])
    actual = attend(dataclasses.replace(case, sinks_N=sinks_N))
    assert not actual[:, [0, 2]].any()
    torch.testing.assert_close(actual[:, [1, 3]], attend(case)[:, [1, 3]], atol=1e-6, rtol=1e-6)


def test_queries_and_caches_may_be_strided() -> None:
    case = make_case([(1, 20), (10, 12)])
    expected_bytes = attend(case)
    wide = torch.randn(11, 4, 40)
    wide[..., 7:23] = case.query_TNH
    assert same_bytes(attend(dataclasses.replace(case, query_TNH=wide[..., 7:23])), expected_bytes)
    transposed = case.query_TNH.transpose(1, 2).contiguous().transpose(1, 2)
    assert same_bytes(attend(dataclasses.replace(case, query_TNH=transposed)), expected_bytes)
    both = torch.stack([case.key_cache, case.value_cache], dim=3)  # interleaved positions
    case = dataclasses.replace(case, key_cache=both[:, :, :, 0], value_cache=both[:, :, :, 1])
    assert same_bytes(attend(case), expected_bytes)


def test_no_tokens_and_no_chunks() -> None:
    assert attend(make_case([])).shape == (0, 4, 16)
    assert attend(make_case([(0, 30)])).shape == (0, 4, 16)
    case = dataclasses.replace(make_case([]), query_TNH=torch.randn(3, 4, 16))
    assert not attend(case, max_rows_per_chunk=1, max_context=16).any()


@pytest.mark.parametrize("lengths", [[(1, 20), (0, 30), (1, 40)], [(1, 20), (0, 30), (10, 40)]], ids=str)
def test_rows_without_a_chunk_are_zeros(lengths: list[tuple[int, int]]) -> None:
    case = make_case(lengths, has_sinks=True)
    num_rows = len(case.query_TNH)
    padded = dataclasses.replace(case, query_TNH=torch.cat([case.query_TNH, torch.randn(3, 4, 16)]))
    actual = attend(padded)
    assert same_bytes(actual[:num_rows], attend(case))
    assert not actual[num_rows:].any()


@pytest.mark.parametrize("lengths", [[(2, 20), (12, 30), (1, 9)], [(1, 20), (1, 30)]], ids=str)
def test_rows_before_position_0_are_zeros(lengths: list[tuple[int, int]]) -> None:
    case = make_case(lengths, has_sinks=True)
    # The same rows at the end of shorter contexts.
    contexts = [1, 0, 0][: len(lengths)]
    spans = tuple(dataclasses.replace(s, context_len=c) for s, c in zip(case.step.spans, contexts, strict=True))
    step = dataclasses.replace(case.step, context_lens=torch.tensor(contexts, dtype=torch.int32), spans=spans)
    actual = attend(dataclasses.replace(case, step=step))
    last = lengths[0][0] - 1
    assert actual[last].all()
    assert not torch.cat([actual[:last], actual[last + 1 :]]).any()


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.float16, 300)], ids=str)
def test_result_of_a_chunk_does_not_depend_on_other_chunks(dtype: torch.dtype, window: int | None) -> None:
    lengths = [(1, 1), (3, 100), (1, 350), (20, 50), (0, 7), (1, 257)]
    case = make_case(
        lengths, num_heads=3, num_kv_heads=1, head_size=24, window=window, dtype=dtype, has_sinks=window is not None
    )
    together = attend(case)
    for chunk, span in enumerate(case.step.spans):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        ids = case.step.block_table[chunk, : -(-span.context_len // 16)].tolist()
        step = make_step([(span.num_rows, span.context_len)], [ids], 16)
        alone = dataclasses.replace(case, step=step, query_TNH=case.query_TNH[rows])
        assert same_bytes(attend(alone), together[rows]), f"chunk {chunk}: {span}"


def test_bounds_and_block_size_do_not_change_results() -> None:
    cases = [make_case([(1, 300), (5, 40)], num_heads=2, num_kv_heads=1, block_size=size) for size in (1, 7, 64)]
    first = attend(cases[0])
    assert all(same_bytes(attend(case), first) for case in cases)
    assert same_bytes(attend(cases[1], max_rows_per_chunk=4096, max_context=4000), first)


def test_nan_in_one_request_stays_there() -> None:
    case = make_case([(1, 300), (1, 290), (12, 30)])
    clean = attend(case)
    case.key_cache[int(case.step.block_table[1, 4]), 0, 3, 5] = float("nan")
    actual = attend(case)
    assert actual[1, :2].isnan().all()
    others = [0, *range(2, 14)]
    assert same_bytes(actual[others], clean[others])
    assert same_bytes(actual[1, 2:], clean[1, 2:])
