"""Paged attention in torch and in C++: values, batch invariance, cache writes and threads."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from paged_steps import (
    KERNELS,
    NUM_SPARE_BLOCKS,
    drawn_chunks,
    kernels,
    make_step,
    needs_kernels,
    rounds_weights,
    same_bytes,
    scatter_blocks,
    settings_restored,
    within_bfloat16_rounding,
)
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function

from moeserve.ops.interfaces import AttentionBackend, AttentionShape, KeyValueCache
from moeserve.ops.threads import set_num_threads
from moeserve.ops.torch import dense_attention
from moeserve.ops.torch.dense_attention import visible_positions
from moeserve.ops.torch.table import TORCH_KERNELS
from moeserve.step_inputs import StepInputs

# T tokens, N query heads, G key-value heads, H head size; R rows of one chunk, C positions of its context

ChooseBackend = Callable[..., AttentionBackend]


@dataclass(frozen=True)
class Case:
    """One step over caches that hold NaN at all positions that no row attends to."""

    step: StepInputs
    query_TNH: Tensor
    key_cache: Tensor
    value_cache: Tensor
    keys_CGH: list[Tensor]  # per chunk, the same keys and values without blocks
    values_CGH: list[Tensor]
    scale: float
    window: int | None
    sinks_N: Tensor | None

    @property
    def cache(self) -> KeyValueCache:
        return KeyValueCache(self.key_cache, self.value_cache)


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    with settings_restored():
        yield


@pytest.fixture
def choose(implementation: str) -> ChooseBackend:
    return make_torch if implementation == "torch" else make_native


@pytest.fixture
def choose_native(isa: str) -> ChooseBackend:
    return make_native


def make_native(*, scale: float, window: int | None) -> AttentionBackend:
    return KERNELS.make_attention(shape_of(scale, window))


def make_torch(*, scale: float, window: int | None) -> AttentionBackend:
    return TORCH_KERNELS.make_attention(shape_of(scale, window))


def shape_of(scale: float, window: int | None) -> AttentionShape:
    """Return a shape of which a backend on the CPU reads the scale and the window alone."""
    return AttentionShape(num_heads=0, num_kv_heads=0, head_size=0, dtype=torch.float32, scale=scale, window=window)


def make_case(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    with_sinks: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)  # the numbers do not depend on the block size

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    block_ids = scatter_blocks(lengths, block_size, seed)
    step = make_step(lengths, block_ids, block_size)
    cache_shape = (sum(map(len, block_ids)) + NUM_SPARE_BLOCKS, num_kv_heads, block_size, head_size)
    key_cache, value_cache = (torch.full(cache_shape, float("nan"), dtype=dtype) for _ in range(2))
    keys, values = [], []
    for ids, (num_rows, context_len) in zip(block_ids, lengths, strict=True):
        keys.append(draw(context_len, num_kv_heads, head_size))
        values.append(draw(context_len, num_kv_heads, head_size))
        first = 0 if window is None else max(0, context_len - num_rows - window + 1)
        for p in range(first, context_len):
            key_cache[ids[p // block_size], :, p % block_size] = keys[-1][p]
            value_cache[ids[p // block_size], :, p % block_size] = values[-1][p]
    query_TNH = draw(len(step.token_ids), num_heads, head_size)
    # Large enough for a share of the weights of short and of long contexts.
    sinks_N = torch.randn(num_heads, generator=generator) * 3 + 4 if with_sinks else None
    return Case(step, query_TNH, key_cache, value_cache, keys, values, scale or head_size**-0.5, window, sinks_N)


@functools.cache
def random_case(seed: int, dtype: torch.dtype) -> tuple[Case, Tensor]:
    """Return a case and its expected result. Both are shared and must not be modified."""
    draw = random.Random(seed)
    num_kv_heads = draw.choice([1, 2, 3, 5])
    lengths = []
    for _ in range(draw.randint(1, 6)):
        num_rows = draw.choice([1, 1, 1, 2, 3, 8, 9, 20])
        lengths.append((num_rows, num_rows + draw.choice([0, 1, 15, 16, 40, 255, 256, 600])))
    case = make_case(
        lengths,
        num_heads=num_kv_heads * draw.choice([1, 2, 3, 4, 5, 7, 8]),
        num_kv_heads=num_kv_heads,
        head_size=draw.choice([1, 8, 20, 64, 80, 96, 128, 256]),
        block_size=draw.choice([1, 3, 7, 16, 32]),
        window=draw.choice([None, None, 1, 5, 100, 300, 10_000]),
        dtype=dtype,
        scale=draw.choice([None, 0.3]),
        with_sinks=draw.choice([False, True]),
        seed=seed,
    )
    return case, expected_attention(case)


def expected_attention(case: Case) -> Tensor:
    """Return dense softmax attention in float64. A sink is an additional position with a value of zeros."""
    return expected_with_spread(case)[0]


def expected_with_spread(case: Case) -> tuple[Tensor, Tensor]:
    """Return the expected result and the weighted sum of the distances of the values from it."""
    rows, spreads = [], []
    for span, keys_CGH, values_CGH in zip(case.step.spans, case.keys_CGH, case.values_CGH, strict=True):
        group = case.query_TNH.shape[1] // keys_CGH.shape[1]
        keys_CNH = keys_CGH.double().repeat_interleave(group, dim=1)
        values_CNH = values_CGH.double().repeat_interleave(group, dim=1)
        for i in range(span.num_rows):
            last = span.context_len - span.num_rows + i
            first = 0 if case.window is None else max(0, last + 1 - case.window)
            query_NH = case.query_TNH[span.first_row + i].double()
            scores_NC = torch.einsum("nh,cnh->nc", query_NH, keys_CNH[first : last + 1]) * case.scale
            if case.sinks_N is not None:
                scores_NC = torch.cat([scores_NC, case.sinks_N.double()[:, None]], dim=1)
            weights_NC = (scores_NC - scores_NC.amax(-1, keepdim=True)).exp()
            weights_NC = weights_NC / weights_NC.sum(-1, keepdim=True)
            weights_NC = weights_NC[:, : last + 1 - first]
            visible_CNH = values_CNH[first : last + 1]
            rows.append(torch.einsum("nc,cnh->nh", weights_NC, visible_CNH))
            spreads.append(torch.einsum("nc,cnh->nh", weights_NC, (visible_CNH - rows[-1]).abs()))
    return torch.stack(rows), torch.stack(spreads)


def attend(choose: ChooseBackend, case: Case) -> Tensor:
    backend = choose(scale=case.scale, window=case.window)
    return backend.attend(case.query_TNH, case.cache, case.step, case.sinks_N)


@pytest.mark.parametrize("seed", range(24))
def test_float32_matches_dense_float64(choose: ChooseBackend, seed: int) -> None:
    case, expected = random_case(seed, torch.float32)
    actual = attend(choose, case)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(30, 42))
def test_bfloat16_matches_dense_float64(choose: ChooseBackend, seed: int) -> None:
    case, expected = random_case(seed, torch.bfloat16)
    actual = attend(choose, case)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, atol=2e-2, rtol=2e-2)


def test_native_bfloat16_rounds_only_the_result_and_weights(choose_native: ChooseBackend) -> None:
    case = make_case([(1, 700), (8, 300), (90, 200)], num_heads=12, num_kv_heads=3, head_size=80, dtype=torch.bfloat16)
    expected, spread = expected_with_spread(case)
    assert within_bfloat16_rounding(attend(choose_native, case), expected, spread if rounds_weights() else None)


@pytest.mark.parametrize("seed", range(3))
def test_float16_matches_dense_float64(choose: ChooseBackend, seed: int) -> None:
    case, expected = random_case(seed, torch.float16)
    torch.testing.assert_close(attend(choose, case).double(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("window", [1, 2, 7, 40])
def test_window_matches_transformers(window: int) -> None:
    start, context_len = 11, 31
    visible = visible_positions(torch.arange(start, context_len), context_len, window)
    theirs = sliding_window_causal_mask_function(window)
    expected = theirs(0, 0, torch.arange(start, context_len)[:, None], torch.arange(context_len))
    assert torch.equal(visible, expected)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 30])
def test_division_of_rows_to_limit_the_mask(
    monkeypatch: pytest.MonkeyPatch, window: int | None, with_sinks: bool
) -> None:
    case = make_case(
        [(20, 90), (11, 11)], num_heads=4, num_kv_heads=2, head_size=64, window=window, with_sinks=with_sinks
    )
    expected = expected_attention(case)
    for max_mask_size in (300, 1):
        monkeypatch.setattr(dense_attention, "MAX_MASK_SIZE", max_mask_size)
        torch.testing.assert_close(attend(make_torch, case).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 600])
def test_many_heads_with_one_key_value_head(choose: ChooseBackend, window: int | None) -> None:
    case = make_case(
        [(1, 1300), (2, 515), (9, 40)], num_heads=78, num_kv_heads=2, head_size=40, window=window, with_sinks=True
    )
    torch.testing.assert_close(attend(choose, case).double(), expected_attention(case), atol=1e-5, rtol=1e-5)


def test_a_sink_above_all_scores_takes_all(choose: ChooseBackend) -> None:
    case = make_case([(1, 300), (12, 40)], num_heads=4, num_kv_heads=2, head_size=64)
    sinks_N = torch.tensor([1e4, -1e4, 1e4, float("-inf")])
    actual = attend(choose, dataclasses.replace(case, sinks_N=sinks_N))
    assert not actual[:, [0, 2]].any()
    torch.testing.assert_close(actual[:, [1, 3]], attend(choose, case)[:, [1, 3]], atol=1e-5, rtol=1e-5)


def test_sinks_of_zero_are_not_none(choose: ChooseBackend) -> None:
    case = make_case([(1, 1), (9, 9)], num_heads=2, num_kv_heads=1, head_size=64)
    case.query_TNH.zero_()  # all scores are 0: the sink has the weight of each position
    without = attend(choose, case)
    positions_T11 = torch.tensor([1, *range(1, 10)])[:, None, None]
    expected = without * positions_T11 / (positions_T11 + 1)
    torch.testing.assert_close(attend(choose, dataclasses.replace(case, sinks_N=torch.zeros(2))), expected)


def test_large_scores_stay_finite(choose: ChooseBackend) -> None:
    case = make_case([(1, 300), (3, 40)], num_heads=4, num_kv_heads=2, head_size=64, scale=50.0)
    torch.testing.assert_close(attend(choose, case).double(), expected_attention(case), atol=1e-4, rtol=1e-4)


def test_nan_in_one_request_stays_there(choose: ChooseBackend) -> None:
    case = make_case([(1, 300), (1, 290), (12, 30)], num_heads=4, num_kv_heads=2, head_size=64)
    clean = attend(choose, case)
    block = int(case.step.block_table[1, 4])
    case.key_cache[block, 0, 3, 5] = float("nan")
    actual = attend(choose, case)
    assert actual[1, :2].isnan().all()
    others = [0, *range(2, 14)]
    assert same_bytes(actual[others], clean[others])
    assert same_bytes(actual[1, 2:], clean[1, 2:])


def test_query_may_be_strided(choose: ChooseBackend) -> None:
    case = make_case([(1, 20), (10, 12)], num_heads=4, num_kv_heads=2, head_size=64)
    wide = torch.randn(11, 4, 100)
    wide[..., 7:71] = case.query_TNH
    strided = dataclasses.replace(case, query_TNH=wide[..., 7:71])
    assert same_bytes(attend(choose, strided), attend(choose, case))


def test_no_tokens(choose: ChooseBackend) -> None:
    case = make_case([], num_heads=4, num_kv_heads=2, head_size=64)
    backend = choose(scale=1.0, window=None)
    assert backend.attend(case.query_TNH, case.cache, case.step).shape == (0, 4, 64)
    nothing = torch.empty(0, 2, 64)
    backend.write(nothing, nothing, case.cache, case.step)
    assert case.key_cache.isnan().all()


def test_chunks_without_rows_and_rows_without_chunk(choose: ChooseBackend) -> None:
    case = make_case([(1, 20), (0, 30), (10, 40)], num_heads=4, num_kv_heads=2, head_size=64)
    padded = dataclasses.replace(case, query_TNH=torch.cat([case.query_TNH, torch.randn(3, 4, 64)]))
    actual = attend(choose, padded)
    torch.testing.assert_close(actual[:11].double(), expected_attention(case), atol=1e-5, rtol=1e-5)
    assert not actual[11:].any()


def test_rows_before_position_0_get_zeros(choose: ChooseBackend) -> None:
    case = make_case([(2, 20), (12, 30)], num_heads=4, num_kv_heads=2, head_size=64)
    expected = attend(choose, case)
    # The same rows with shorter context lengths, so that some get negative positions.
    contexts = [1, 0]
    spans = tuple(dataclasses.replace(s, context_len=c) for s, c in zip(case.step.spans, contexts, strict=True))
    step = dataclasses.replace(case.step, context_lens=torch.tensor(contexts, dtype=torch.int32), spans=spans)
    actual = attend(choose, dataclasses.replace(case, step=step))
    assert not actual[0].any()
    assert not actual[2:].any()
    first_value_GH = case.values_CGH[0][0]
    torch.testing.assert_close(actual[1], first_value_GH.repeat_interleave(2, dim=0))
    assert expected.all()


# Order of additions


def only_chunk(case: Case, chunk: int) -> Case:
    """Return a step with one chunk of a case, over the same caches."""
    span = case.step.spans[chunk]
    rows = slice(span.first_row, span.first_row + span.num_rows)
    num_blocks = -(-span.context_len // case.key_cache.shape[2])
    block_ids = case.step.block_table[chunk, :num_blocks].tolist()
    step = make_step([(span.num_rows, span.context_len)], [block_ids], case.key_cache.shape[2])
    return dataclasses.replace(case, step=step, query_TNH=case.query_TNH[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 700])
def test_a_chunk_gives_the_same_bytes_alone_and_in_a_batch(
    choose: ChooseBackend, dtype: torch.dtype, window: int | None
) -> None:
    lengths = [(1, 1), (1, 63), (3, 500), (1, 2100), (20, 90), (1, 256), (8, 1030), (1, 257)]
    case = make_case(
        lengths, num_heads=10, num_kv_heads=2, head_size=80, window=window, dtype=dtype, with_sinks=window is not None
    )
    together = attend(choose, case)
    for chunk, span in enumerate(case.step.spans):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        assert same_bytes(attend(choose, only_chunk(case, chunk)), together[rows]), f"chunk {chunk}: {span}"


@pytest.mark.parametrize("lengths", [[(1, 3000)], [(1, 40)] * 30 + [(1, 2500)], [(8, 2000), (1, 700)]])
@pytest.mark.parametrize("num_heads", [6, 84])
def test_threads_do_not_change_a_byte(
    choose_native: ChooseBackend, lengths: list[tuple[int, int]], num_heads: int
) -> None:
    case = make_case(lengths, num_heads=num_heads, num_kv_heads=2, head_size=24, with_sinks=True)
    set_num_threads(1)
    expected = attend(choose_native, case)
    for num_threads in (2, 3, 8):
        set_num_threads(num_threads)
        for _ in range(4):
            assert same_bytes(attend(choose_native, case), expected), f"{num_threads} threads"


@pytest.mark.parametrize("window", [None, 300])
def test_neither_block_size_nor_other_rows_change_a_byte(choose_native: ChooseBackend, window: int | None) -> None:
    num_rows, context_len = 8, 900
    outputs = []
    for block_size in (1, 7, 16, 32):
        case = make_case(
            [(num_rows, context_len)],
            num_heads=6,
            num_kv_heads=2,
            head_size=64,
            block_size=block_size,
            window=window,
            with_sinks=True,
        )
        outputs.append(attend(choose_native, case))
        for row in range(num_rows):
            length = context_len - num_rows + row + 1
            step = make_step([(1, length)], [case.step.block_table[0].tolist()], block_size)
            alone = dataclasses.replace(case, step=step, query_TNH=case.query_TNH[row : row + 1])
            assert same_bytes(attend(choose_native, alone)[0], outputs[-1][row]), f"row {row}"
    assert all(same_bytes(output, outputs[0]) for output in outputs)


@dataclass(frozen=True)
class Shape:
    """Sizes that the order of additions may depend on."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None = None
    with_sinks: bool = False


SHAPES = {
    "groups of 3": Shape(6, 2, 64),
    "window and sinks": Shape(8, 2, 64, window=150, with_sinks=True),
    "one head, odd size": Shape(1, 1, 33),
    "window, one head each, small heads": Shape(3, 3, 20, window=70),
    "groups of 10": Shape(10, 1, 80),
    "large heads": Shape(4, 2, 128),
    "groups of 40: longer partitions": Shape(40, 1, 24, with_sinks=True),
    "a group in several items": Shape(110, 1, 16),
}


def attend_chunk_by_chunk(choose: ChooseBackend, case: Case, draw: random.Random) -> Tensor:
    """Run the requests of a case in steps of random chunks with random numbers of threads.

    The cache holds NaN at later positions.
    """
    backend = choose(scale=case.scale, window=case.window)
    cache = KeyValueCache(torch.full_like(case.key_cache, math.nan), torch.full_like(case.value_cache, math.nan))
    out_TNH = torch.full_like(case.query_TNH, math.nan)
    for lengths, rows in drawn_chunks(case.step.spans, draw):
        step = make_step(lengths, case.step.block_table.tolist(), case.key_cache.shape[2])
        set_num_threads(draw.choice([1, 2, 3]))
        keys_TGH, values_TGH = torch.cat(case.keys_CGH)[rows], torch.cat(case.values_CGH)[rows]
        backend.write(keys_TGH, values_TGH, cache, step)
        out_TNH[rows] = backend.attend(case.query_TNH[rows], cache, step, case.sinks_N)
    return out_TNH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunking_changes_no_byte(choose_native: ChooseBackend, shape: str, dtype: torch.dtype) -> None:
    lengths = [(length, length) for length in (290, 150, 45)]
    make = functools.partial(make_case, lengths, **dataclasses.asdict(SHAPES[shape]), dtype=dtype)
    set_num_threads(1)
    case = make()
    expected = attend(choose_native, case)
    torch.testing.assert_close(expected.double(), expected_attention(case), atol=2e-2, rtol=2e-2)
    for seed, block_size in enumerate((1, 7, 16)):
        actual = attend_chunk_by_chunk(choose_native, make(block_size=block_size), random.Random(seed))
        assert same_bytes(actual, expected), f"blocks of {block_size}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["groups of 3", "window and sinks", "groups of 40: longer partitions"])
def test_rows_one_at_a_time_have_the_bytes_of_the_whole_chunk(
    choose_native: ChooseBackend, shape: str, dtype: torch.dtype
) -> None:
    num_rows = 530
    case = make_case([(num_rows, num_rows)], **dataclasses.asdict(SHAPES[shape]), dtype=dtype)
    expected = attend(choose_native, case)
    blocks = case.step.block_table.tolist()
    for row in range(num_rows):
        alone = dataclasses.replace(
            case, step=make_step([(1, row + 1)], blocks, 16), query_TNH=case.query_TNH[row : row + 1]
        )
        assert same_bytes(attend(choose_native, alone)[0], expected[row]), f"row {row}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cache", "wrong"), [("keys", math.nan), ("values", math.nan), ("values", math.inf)])
def test_nan_and_infinity_reach_only_rows_that_attend_to_them(
    choose_native: ChooseBackend, cache: str, wrong: float, dtype: torch.dtype
) -> None:
    case = make_case([(300, 300)], num_heads=6, num_kv_heads=2, head_size=64, window=120, dtype=dtype)
    expected = attend(choose_native, case)
    position = 141  # shares a tile with the row before it
    block = int(case.step.block_table[0, position // 16])
    (case.key_cache if cache == "keys" else case.value_cache)[block, 1, position % 16, 7] = wrong
    actual = attend(choose_native, case)
    sees_it = slice(position, position + 120)
    assert not actual[sees_it, 3:].isfinite().all(dim=-1).any()
    assert same_bytes(actual[:, :3], expected[:, :3])
    assert same_bytes(actual[:position], expected[:position])
    assert same_bytes(actual[position + 120 :], expected[position + 120 :])


# Writing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_write_stores_each_token_at_its_slot(choose: ChooseBackend, dtype: torch.dtype, block_size: int) -> None:
    num_tokens, num_kv_heads, head_size, num_blocks = 40, 3, 20, 90 // block_size
    case = make_case([], num_heads=3, num_kv_heads=num_kv_heads, head_size=head_size)
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[::5] = -1
    # Slices of a projection: neither tokens nor heads are contiguous.
    projected = torch.randn(num_tokens, 4 * num_kv_heads, head_size + 3).to(dtype)
    key_TGH, value_TGH = projected[:, :num_kv_heads, 3:], projected[:, 5 : 5 + 2 * num_kv_heads : 2, :head_size]
    caches = [torch.randn(num_blocks, num_kv_heads, block_size, head_size).to(dtype) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for cache, source in zip(expected, (key_TGH, value_TGH), strict=True):
                cache[slot // block_size, :, slot % block_size] = source[token]

    step = dataclasses.replace(case.step, cache_slots=slots)
    choose(scale=1.0, window=None).write(key_TGH, value_TGH, KeyValueCache(*caches), step)
    assert same_bytes(caches[0], expected[0])
    assert same_bytes(caches[1], expected[1])


@needs_kernels
def test_write_of_keys_alone() -> None:
    key_TGH, cache, slots = torch.randn(2, 3, 20), torch.zeros(10, 3, 16, 20), torch.tensor([40, 5])
    tensors = (key_TGH, None, cache, None, slots)
    kernels.write_cache(*tensors)
    assert torch.equal(cache[2, :, 8], key_TGH[0])
    assert torch.equal(cache[0, :, 5], key_TGH[1])
    assert cache.count_nonzero() == key_TGH.count_nonzero()


@needs_kernels
@pytest.mark.parametrize("slot", [-2, 160])
def test_wrong_slots_are_refused(slot: int) -> None:
    cache = torch.zeros(10, 2, 16, 64)
    step = dataclasses.replace(make_step([], [], 16), cache_slots=torch.tensor([3, slot]))
    backend = make_native(scale=1.0, window=None)
    with pytest.raises(ValueError, match=f"has slot {slot}"):
        backend.write(torch.ones(2, 2, 64), torch.ones(2, 2, 64), KeyValueCache(cache, cache), step)
    assert not cache.any()


@needs_kernels
def test_values_without_a_cache_for_them_are_refused() -> None:
    cache, row, slots = torch.zeros(10, 2, 16, 64), torch.ones(1, 2, 64), torch.tensor([3])
    for value, value_cache in ((row, None), (None, cache)):
        tensors = (row, value, cache, value_cache, slots)
        with pytest.raises(ValueError, match="value and value_cache go together"):
            kernels.write_cache(*tensors)
    assert not cache.any()


@needs_kernels
def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mmx'.*baseline"):
        kernels.set_isa("mmx")


@pytest.mark.parametrize("num_threads", [0, -1])
def test_fewer_threads_than_one_are_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads={num_threads}"):
        set_num_threads(num_threads)


# Threads


@needs_kernels
def test_thread_count_reaches_both_pools() -> None:
    set_num_threads(3)
    assert (torch.get_num_threads(), kernels.num_threads()) == (3, 3)


@needs_kernels
def test_calls_from_several_python_threads_at_once() -> None:
    case = make_case([(1, 1500), (1, 30)], num_heads=8, num_kv_heads=2, head_size=64)
    expected = attend(make_native, case)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: attend(make_native, case), range(30)))
    assert all(same_bytes(output, expected) for output in outputs)


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="torch's OpenMP runtime is another one here")
def test_kernels_run_on_the_threads_of_torch() -> None:
    assert kernels.uses_openmp()


ATTEND_WITHOUT_TORCH = """
import os, sys
import numpy as np
from moeserve import _cpu

draw = np.random.default_rng(0)
query = draw.standard_normal((2, 4, 64), np.float32)
keys, values = (draw.standard_normal((250, 2, 16, 64), np.float32) for _ in range(2))
blocks = np.stack([draw.permutation(250)[:200] for _ in range(2)]).astype(np.int32)
starts, lengths = np.array([0, 1, 2], np.int32), np.array([3200, 100], np.int32)

def attend(num_threads):
    _cpu.set_num_threads(num_threads)
    out = np.zeros_like(query)
    _cpu.paged_attention(query, keys, values, blocks, starts, lengths, out, scale=0.1, window=None)
    return out.tobytes()

expected = attend(1)

def check():
    for num_threads in (4, 2, 3, 8):
        for _ in range(50):
            assert attend(num_threads) == expected
"""

FORK = """
check()
child = os.fork()
assert child or not _cpu.uses_openmp()
check()
if child:
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
"""

# The child of a fork does not have the OpenMP threads of torch.
FORK_WITH_TORCH = (
    """
import torch

assert _cpu.uses_openmp() == (sys.platform == "linux")
"""
    + FORK
)


@needs_kernels
@pytest.mark.parametrize(
    "script", ["assert not _cpu.uses_openmp()\ncheck()", FORK, FORK_WITH_TORCH], ids=["end", "fork", "fork with torch"]
)
def test_processes_without_openmp_threads_use_the_own_pool_and_exit(script: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", ATTEND_WITHOUT_TORCH + script], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
