"""Paged and latent attention in Triton's interpreter: results equal float64's and do not depend on other requests."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.ops.attention.float8_rows import decode_rows, encode_rows
from moeserve.triton_kernels import latent_attention as latent
from moeserve.triton_kernels import paged_attention as paged
from moeserve.triton_kernels import paged_launch
from moeserve.triton_kernels.latent_attention import write_latents
from moeserve.triton_kernels.paged_launch import Splits

sys.path.append(str(Path(__file__).parent.parent / "kernels"))
from attention_cases import Case, Shape, expected_attention, heads_of_rank, make_case, only_chunk, with_step
from paged_steps import same_bytes

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
PAGED = Shape(4, 2, 16, with_sinks=True)
LATENT = Shape(5, 1, 32, latent_size=24)
WINDOW = Shape(3, 1, 24, window=100, with_sinks=True, value_size=17)
SHAPES = pytest.mark.parametrize("shape", [PAGED, LATENT], ids=["paged", "latent"])


def attend(
    case: Case,
    max_rows: int | None = None,
    max_rows_per_chunk: int | None = None,
    max_context: int | None = None,
    splits_contexts: bool = True,
    scales: tuple[Tensor, ...] = (),
    min_rows_per_chunk: int = 0,
    rows_have_positions: bool = False,
) -> Tensor:
    step, shape = case.step, case.shape
    if max_rows_per_chunk is None:
        max_rows_per_chunk = max((span.num_rows for span in step.spans), default=0)
    tables = (step.block_table, step.row_starts, step.context_lens)
    options = dict(
        splits_contexts=splits_contexts,
        scale=case.scale,
        max_rows_per_chunk=max_rows_per_chunk,
        min_rows_per_chunk=min_rows_per_chunk,
        rows_have_positions=rows_have_positions,
        max_context=max_context or step.block_table.shape[1] * case.key_cache.shape[2],
    )
    if shape.latent_size is not None:
        return latent.latent_attention(
            case.query_TNH, case.key_cache[:, 0], *tables, latent_size=shape.latent_size, max_rows=max_rows, **options
        )
    return paged.paged_attention(
        case.query_TNH,
        case.key_cache,
        case.value_cache,
        *tables,
        *scales,
        window=shape.window,
        sinks_N=case.sinks_N,
        **options,
    )


def check(case: Case, actual: Tensor | None = None, expected: Tensor | None = None) -> None:
    actual = attend(case) if actual is None else actual
    assert actual.dtype == case.query_TNH.dtype
    assert actual.is_contiguous()
    expected = expected_attention(case)[0] if expected is None else expected
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed: int, is_latent: bool) -> None:
    draw, dtype = random.Random(seed), [torch.float32, torch.float16][seed % 2]
    lengths = []
    for _ in range(draw.randint(1, 4)):
        num_rows = draw.choice([0, 1, 1, 1, 2, 7])
        lengths.append((num_rows, num_rows + draw.choice([0, 1, 15, 16, 100, 127, 200])))
    if is_latent:
        latent_size = draw.choice([1, 12, 32, 100])
        num_heads = draw.choice([1, 3, 16, 37] if dtype == torch.float16 else [1, 3, 18])
        shape = Shape(num_heads, 1, latent_size + draw.choice([0, 1, 8, 20]), latent_size=latent_size)
    else:
        num_kv_heads = draw.choice([1, 2, 3])
        num_heads = num_kv_heads * draw.choice([1, 2, 3, 7, 18])
        window = draw.choice([None, None, 1, 5, 100, -7, -33])
        head_size, has_sinks = draw.choice([16, 20, 64, 80]), draw.choice([False, True])
        value_size = draw.choice([None, 16, head_size - 4])
        shape = Shape(num_heads, num_kv_heads, head_size, window, has_sinks, value_size=value_size)
    check(make_case([(1, 30), *lengths], shape, block_size=draw.choice([1, 3, 16, 64]), dtype=dtype, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        (Shape(3, 1, 16), [(45, 120), (45, 45), (1, 70)]),  # several tiles of rows
        (Shape(3, 1, 24, window=-16), [(35, 60), (1, 70), (1, 65)]),
        (Shape(3, 1, 136, window=40, with_sinks=True), [(35, 60), (1, 70)]),  # large heads have a loop less
        (Shape(70, 1, 16), [(1, 100), (3, 20)]),  # a group larger than the pairs of a program
        (Shape(128, 1, 576, latent_size=512), [(1, 130), (2, 40)]),  # DeepSeek-V3
    ],
    ids=["tiles", "chunks", "large heads", "large group", "DeepSeek-V3"],
)
def test_large_steps(shape: Shape, lengths: list[tuple[int, int]]) -> None:
    check(make_case(lengths, shape, dtype=torch.float16, block_size=64))


@pytest.mark.parametrize("shape", [PAGED, WINDOW, LATENT], ids=["paged", "window", "latent"])
def test_more_pieces_than_splits(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paged, latent):
        monkeypatch.setattr(module, "choose_splits", lambda num_heads: Splits(piece_size=32, max_splits=2))
    check(make_case([(1, 180), (1, 128), (0, 0), (1, 1), (1, 129)], shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        *((shape, [(3, None), (3, 12), (3, 1)]) for shape in (PAGED, WINDOW, LATENT)),
        (Shape(33, 1, 20, latent_size=17), [(3, 12), (1000, None)]),
    ],
    ids=["paged", "window", "latent", "33 heads"],
)
def test_fewer_splits_and_other_tiles(
    shape: Shape, settings: list[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with many chunks have fewer splits; with more than 32 heads, few chunks get other tiles on a large device.

    The number of launches changes no byte, unless splits are balanced over the chunks of a launch.
    """
    lengths = [(1, 150), (0, 0), (1, 1), (1, 33), (1, 129), (1, 40)]
    case = make_case(lengths[:1] if shape.num_heads > 32 else lengths, shape, dtype=torch.float16)
    padded = dataclasses.replace(case, query_TNH=torch.cat([case.query_TNH, case.query_TNH[:1]]))
    for num_device_programs, max_programs in settings:
        with monkeypatch.context() as patch:
            patch.setattr(paged_launch, "num_programs", lambda device, per_sm, number=num_device_programs: number)
            splits = Splits(piece_size=64, max_splits=4, max_programs=max_programs)
            for module in (paged, latent):
                patch.setattr(module, "choose_splits", lambda num_heads, splits=splits: splits)
            expected = attend(case)
            check(case, expected)
            patch.setattr(paged_launch, "MAX_PARTIAL_BYTES", 1)  # four chunks at a time
            actual = attend(padded)
        check(case, actual[:-1])
        assert max_programs is not None or same_bytes(actual[:-1], expected)
        assert not actual[-1:].any()


@pytest.mark.parametrize(
    ("num_heads", "num_chunks", "num_programs"),
    [
        *((num_heads, 1, 128) for num_heads in (16, 32, 40, 64, 128)),
        *((num_heads, num_chunks, 512 + num_chunks) for num_heads in (16, 64) for num_chunks in (64, 512)),
        *((128, num_chunks, 512 + 2 * num_chunks) for num_chunks in (64, 512)),
    ],
)
def test_programs_of_latent_attention_on_132_multiprocessors(
    num_heads: int, num_chunks: int, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: grids.append(grid)

    monkeypatch.setattr(paged_launch, "num_programs", lambda device, programs_per_sm: 132 * programs_per_sm)
    for name in ("attend_split_kernel", "merge_splits_kernel"):
        monkeypatch.setattr(paged_launch, name, Recorded())
    shape = Shape(num_heads, 1, 576, latent_size=512)
    attend(make_case([(1, 1)] * num_chunks, shape, dtype=torch.float16), max_context=32768)
    assert math.prod(grids[0]) == num_programs


def test_more_chunks_than_a_program_reads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_launch, "CHUNKS_AT_ONCE", 8)
    for shape in (Shape(2, 1, 16), Shape(2, 1, 20, latent_size=16)):
        check(make_case([(1, 3), (0, 9)] * 7 + [(2, 9), (1, 5), (3, 3)], shape))


@pytest.mark.slow_but("paged-dtype0")
@pytest.mark.parametrize("splits_contexts", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [PAGED, WINDOW, Shape(7, 1, 80)], ids=["paged", "window", "odd size"])
def test_8_bit_floats_have_the_bytes_of_a_cache_of_their_numbers(
    shape: Shape, dtype: torch.dtype, splits_contexts: bool
) -> None:
    case = make_case([(1, 300), (9, 140), (1, 20)], shape, dtype=dtype)
    tensors = [encode_rows(cache) for cache in (case.key_cache, case.value_cache)]
    (keys, key_scales), (values, value_scales) = tensors  # NaN where no row may read
    plain = [decode_rows(*tensor, dtype) for tensor in tensors]
    expected = attend(
        dataclasses.replace(case, key_cache=plain[0], value_cache=plain[1]), splits_contexts=splits_contexts
    )
    actual = attend(
        dataclasses.replace(case, key_cache=keys, value_cache=values),
        splits_contexts=splits_contexts,
        scales=(key_scales, value_scales),
    )
    assert actual.isfinite().all()
    assert same_bytes(actual, expected)


def test_large_scores_stay_finite() -> None:
    case = make_case([(1, 150), (3, 40)], Shape(4, 2, 16, scale=50.0))
    torch.testing.assert_close(attend(case).double(), expected_attention(case)[0], atol=1e-4, rtol=1e-4)


def test_extreme_sinks() -> None:
    """A sink above all scores takes all weight, one below all takes none, and one of 0 is not none."""
    case = make_case([(1, 150), (12, 40)], PAGED)
    case = dataclasses.replace(case, sinks_N=torch.tensor([1e4, -1e4, 0.0, float("-inf")]))
    check(case)
    assert not attend(case)[:, 0].any()


@pytest.mark.parametrize("max_rows", [0, 1, 8])
def test_chunks_of_more_rows_are_zeros(max_rows: int) -> None:
    for lengths in ([(9, 40), (1, 100), (8, 50)], [(1, 20), (0, 0), (1, 30)]):
        case = make_case(lengths, LATENT)
        expected = expected_attention(case)[0]
        for span in case.step.spans:
            if span.num_rows > max_rows:
                expected[span.first_row : span.first_row + span.num_rows] = 0
        check(case, attend(case, max_rows), expected)


@SHAPES
def test_queries_and_caches_may_be_strided(shape: Shape) -> None:
    case = make_case([(1, 20), (5, 12)], shape)
    expected = attend(dataclasses.replace(case, query_TNH=case.query_TNH.contiguous()))
    assert same_bytes(attend(case), expected)
    transposed = case.query_TNH.transpose(1, 2).contiguous().transpose(1, 2)
    assert same_bytes(attend(dataclasses.replace(case, query_TNH=transposed)), expected)
    both = torch.stack([case.key_cache, case.value_cache], dim=3)  # interleaved positions
    case = dataclasses.replace(case, key_cache=both[:, :, :, 0], value_cache=both[:, :, :, 1])
    assert same_bytes(attend(case), expected)


@SHAPES
def test_rows_without_a_chunk_are_zeros(shape: Shape) -> None:
    nothing = make_case([], shape)
    assert attend(nothing).shape == (0, shape.num_heads, shape.latent_size or 16)
    padding = torch.randn(3, shape.num_heads, shape.head_size)
    nothing = dataclasses.replace(nothing, query_TNH=padding)
    assert not attend(nothing, max_rows_per_chunk=1, max_context=16).any()
    for lengths in ([(1, 20), (0, 30), (1, 40)], [(1, 20), (0, 30), (4, 40)]):
        case = make_case(lengths, shape)
        num_rows = len(case.query_TNH)
        actual = attend(dataclasses.replace(case, query_TNH=torch.cat([case.query_TNH, padding])))
        assert same_bytes(actual[:num_rows], attend(case))
        assert not actual[num_rows:].any()


@SHAPES
@pytest.mark.parametrize("lengths", [[(2, 20), (6, 30), (1, 9)], [(1, 20), (1, 30)]], ids=str)
def test_rows_before_position_0_are_zeros(lengths: list[tuple[int, int]], shape: Shape) -> None:
    case = make_case(lengths, shape)
    # The same rows at the end of shorter contexts.
    contexts = [1, 0, 0][: len(lengths)]
    spans = tuple(s._replace(context_len=c) for s, c in zip(case.step.spans, contexts, strict=True))
    step = dataclasses.replace(case.step, context_lens=torch.tensor(contexts, dtype=torch.int32), spans=spans)
    last = lengths[0][0] - 1
    for max_rows in (None, 1):  # the first chunk has one row with a position
        actual = attend(dataclasses.replace(case, step=step), max_rows)
        assert actual[last].all()
        assert not torch.cat([actual[:last], actual[last + 1 :]]).any()


@pytest.mark.slow_but("single-window", "mixed-latent")
@pytest.mark.parametrize("splits_contexts", [True, False])
@pytest.mark.parametrize("shape", [PAGED, WINDOW, LATENT], ids=["paged", "window", "latent"])
@pytest.mark.parametrize(
    "lengths", [[(1, 20), (1, 300)], [(2, 20), (6, 30)], [(6, 30), (1, 9), (0, 7)]], ids=["single", "several", "mixed"]
)
def test_what_the_host_knows_of_rows_changes_no_byte(
    lengths: list[tuple[int, int]], shape: Shape, splits_contexts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels without chunks are not launched, and memory that kernels write is not cleared before."""
    case = make_case(lengths, shape)
    expected = attend(case, splits_contexts=splits_contexts)
    facts = {name: getattr(case.step, name) for name in ("min_rows_per_chunk", "rows_have_positions")}
    assert facts["rows_have_positions"]

    def new_filled(self: Tensor, *size: int, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        dtype = dtype or self.dtype
        return self.new_full(size, torch.nan if dtype.is_floating_point else -1, dtype=dtype, **options)

    monkeypatch.setattr(Tensor, "new_empty", new_filled)
    assert same_bytes(attend(case, splits_contexts=splits_contexts, **facts), expected)


@pytest.mark.slow_but("window", "latent")
@pytest.mark.parametrize("shape", [Shape(3, 1, 24), WINDOW, LATENT], ids=["paged", "window", "latent"])
def test_result_of_a_chunk_does_not_depend_on_other_chunks(shape: Shape) -> None:
    case = make_case([(1, 1), (3, 60), (1, 300), (8, 30), (0, 7), (1, 129)], shape, dtype=torch.float16)
    together = attend(case)
    for chunk, span in enumerate(case.step.spans):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        alone = only_chunk(case, chunk)
        assert same_bytes(attend(alone), together[rows]), f"chunk {chunk}: {span}"
        assert same_bytes(attend(alone, max_rows_per_chunk=50, max_context=900), together[rows]), f"{span}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape", [Shape(4, 2, 16), WINDOW, Shape(8, 1, 32, latent_size=24)], ids=["paged", "window", "latent"]
)
def test_without_splits_neither_chunks_nor_ranks_change_a_byte(shape: Shape, dtype: torch.dtype) -> None:
    case = make_case([(1, 150), (12, 140), (3, 3)], shape, dtype=dtype)
    together = attend(case, splits_contexts=False)
    check(case, together)
    spans = case.step.spans
    for num_rows in (1, 5):
        parts = []
        for chunk, span in enumerate(spans):
            for first in range(0, span.num_rows, num_rows):
                rows = range(span.first_row + first, span.first_row + min(first + num_rows, span.num_rows))
                context_len = span.context_len - span.num_rows + first + len(rows)
                alone = with_step(only_chunk(case, chunk), [(len(rows), context_len)], slice(0, None))
                alone = dataclasses.replace(alone, query_TNH=case.query_TNH[rows.start : rows.stop])
                parts.append(attend(alone, splits_contexts=False))
        assert same_bytes(torch.cat(parts), together), num_rows
    for num_ranks in (4,) if shape.num_heads % 4 == 0 else ():
        of_ranks = [attend(heads_of_rank(case, rank, num_ranks), splits_contexts=False) for rank in range(num_ranks)]
        assert same_bytes(torch.cat(of_ranks, dim=1), together), num_ranks


def test_block_size_does_not_change_results() -> None:
    cases = [make_case([(1, 150), (5, 40)], Shape(2, 1, 16), block_size=size) for size in (1, 7, 64)]
    first = attend(cases[0])
    assert all(same_bytes(attend(case), first) for case in cases)


@SHAPES
def test_nan_in_one_request_stays_there(shape: Shape) -> None:
    case = make_case([(1, 150), (1, 140), (4, 30)], shape)
    clean = attend(case)
    case.key_cache[int(case.step.block_table[1, 4]), 0, 3, 5] = float("nan")
    actual = attend(case)
    assert actual[1, :2].isnan().any()
    others = [0, *range(2, 6)]
    assert same_bytes(actual[others], clean[others])
    assert shape is LATENT or same_bytes(actual[1, 2:], clean[1, 2:])


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
