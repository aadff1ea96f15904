"""Paged and latent attention in torch and in C++: values, batch invariance, cache writes and threads."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attention_cases import (
    Case,
    Shape,
    attend,
    expected_attention,
    heads_of_rank,
    make_case,
    only_chunk,
    random_case,
    with_step,
    write,
)
from paged_steps import (
    NATIVE,
    drawn_chunks,
    needs_kernels,
    rounds_weights,
    same_bytes,
    settings_restored,
    within_bfloat16_rounding,
)
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function

from moeserve.ops.attention import dense as dense_attention
from moeserve.ops.attention.dense import visible_positions
from moeserve.ops.backend import REFERENCE, Backend
from moeserve.ops.latent_attention.reference import gather_latents
from moeserve.ops.native import set_num_threads

SMALL = {"paged": Shape(4, 2, 64), "latent": Shape(4, 1, 32, latent_size=24)}
SHAPES = {
    "groups of 3": Shape(6, 2, 64),
    "window and sinks": Shape(8, 2, 64, window=150, with_sinks=True),
    "one head, odd size": Shape(1, 1, 33),
    "window, one head each, small heads": Shape(3, 3, 20, window=70),
    "chunks": Shape(6, 2, 64, window=-90),
    "large heads": Shape(4, 2, 128),
    "smaller values": Shape(8, 2, 192, window=150, with_sinks=True, value_size=128),
    "smaller values, odd sizes": Shape(3, 1, 21, value_size=9),
    "groups of 40: longer partitions": Shape(40, 1, 24, with_sinks=True),
    "a group in several items": Shape(110, 1, 16),
    "biases of near positions": Shape(6, 2, 64, num_distances=170),
    "window and biases": Shape(10, 2, 24, window=70, num_distances=70),
    "sinks of tokens and biases": Shape(6, 2, 20, with_token_sinks=True, num_distances=50),
    "latent, 16 heads": Shape(16, 1, 320, latent_size=256),
    "latent, 35 heads, odd sizes": Shape(35, 1, 39, latent_size=33),
    "latent, 128 heads": Shape(128, 1, 32, latent_size=24),
}


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    with settings_restored():
        yield


@pytest.fixture
def backend(implementation: str) -> Backend:
    return REFERENCE if implementation == "torch" else NATIVE


@pytest.fixture
def native(isa: str) -> Backend:
    return NATIVE


def assert_expected(backend: Backend, case: Case, atol: float = 2e-5, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(attend(backend, case).double(), expected_attention(case)[0], atol=atol, rtol=rtol)


@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_float32_matches_dense_float64(backend: Backend, seed: int, is_latent: bool) -> None:
    case, expected, _ = random_case(seed, torch.float32, is_latent)
    actual = attend(backend, case)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("seed", [30, 31, 32, 34])
def test_bfloat16_rounds_only_the_result_and_weights(backend: Backend, seed: int, is_latent: bool) -> None:
    case, expected, spread = random_case(seed, torch.bfloat16, is_latent)
    actual = attend(backend, case)
    assert actual.dtype == torch.bfloat16
    if backend is REFERENCE and not is_latent:  # torch's own attention rounds between its steps as it likes
        torch.testing.assert_close(actual.double(), expected, atol=2e-2, rtol=2e-2)
    else:
        has_rounded_weights = backend is not REFERENCE and rounds_weights()
        assert within_bfloat16_rounding(actual, expected, spread if has_rounded_weights else None)


@pytest.mark.parametrize("is_latent", [False, True])
def test_float16_matches_dense_float64(is_latent: bool) -> None:
    case, expected, _ = random_case(28, torch.float16, is_latent)
    torch.testing.assert_close(attend(REFERENCE, case).double(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("shape", ["a group in several items", "latent, 128 heads"])
def test_large_and_growing_scores_stay_finite(backend: Backend, shape: str) -> None:
    case = make_case([(1, 1300), (3, 270)], dataclasses.replace(SHAPES[shape], scale=1.0))
    for keys_CGH, block_ids in zip(case.keys_CGH, case.step.block_table, strict=True):
        for p in range(len(keys_CGH)):
            keys_CGH[p] *= 1 + p / 100
            case.key_cache[block_ids[p // 16], :, p % 16] = keys_CGH[p]
    assert_expected(backend, case, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 2, 7, 40])
def test_window_matches_transformers(window: int) -> None:
    start, context_len = 11, 31
    visible = visible_positions(torch.arange(start, context_len), context_len, window)
    theirs = sliding_window_causal_mask_function(window)
    expected = theirs(0, 0, torch.arange(start, context_len)[:, None], torch.arange(context_len))
    assert torch.equal(visible, expected)


@pytest.mark.parametrize("shape", ["groups of 3", "window and sinks", "latent, 35 heads, odd sizes"])
def test_division_of_rows_to_limit_the_mask(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    case = make_case([(20, 90), (11, 11)], SHAPES[shape])
    for max_mask_size in (1000, 1):
        monkeypatch.setattr(dense_attention, "MAX_MASK_SIZE", max_mask_size)
        assert_expected(REFERENCE, case)


@pytest.mark.parametrize("max_rows", [0, 1, 8, 9])
def test_the_reference_leaves_chunks_of_more_rows_zero(max_rows: int) -> None:
    case = make_case([(9, 40), (1, 300), (10, 10), (8, 50)], SMALL["latent"])
    expected = expected_attention(case)[0]
    for span in case.step.spans:
        if span.num_rows > max_rows:
            expected[span.first_row : span.first_row + span.num_rows] = 0
    actual = attend(REFERENCE, case, max_rows).double()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(actual == 0, expected == 0)


def test_extreme_sinks(backend: Backend) -> None:
    """A sink above all scores takes all weight, one below all takes none, and one of 0 is not none."""
    case = make_case([(1, 300), (12, 40)], SMALL["paged"])
    case = dataclasses.replace(case, sinks_N=torch.tensor([1e4, -1e4, 0.0, float("-inf")]))
    assert_expected(backend, case)
    assert not attend(backend, case)[:, 0].any()


@pytest.mark.parametrize("kind", SMALL)
def test_no_tokens(backend: Backend, kind: str) -> None:
    case = make_case([], SMALL[kind])
    assert attend(backend, case).shape == (0, 4, SMALL[kind].latent_size or 64)
    nothing = torch.empty(0, SMALL[kind].num_kv_heads, SMALL[kind].head_size)
    write(backend, case, nothing, nothing)
    assert case.key_cache.isnan().all()


@pytest.mark.parametrize("kind", SMALL)
def test_rows_without_a_chunk_or_before_position_0_get_zeros(backend: Backend, kind: str) -> None:
    """The first chunk has a context shorter than its rows, the second one has no rows, the third no context."""
    case = make_case([(2, 20), (0, 30), (3, 30), (10, 40)], SMALL[kind])
    contexts = [1, 30, 0, 40]
    spans = tuple(s._replace(context_len=c) for s, c in zip(case.step.spans, contexts, strict=True))
    step = dataclasses.replace(case.step, context_lens=torch.tensor(contexts, dtype=torch.int32), spans=spans)
    query_TNH = torch.cat([case.query_TNH, torch.randn(3, *case.query_TNH.shape[1:])])
    actual = attend(backend, dataclasses.replace(case, step=step, query_TNH=query_TNH))
    assert not actual[[0, 2, 3, 4, 15, 16, 17]].any()
    first_value_NL = case.values_CGL[0][0].repeat_interleave(4 // SMALL[kind].num_kv_heads, dim=0)
    torch.testing.assert_close(actual[1], first_value_NL)
    torch.testing.assert_close(actual[5:15].double(), expected_attention(case)[0][5:], atol=1e-5, rtol=1e-5)


def test_nan_in_one_request_stays_there(backend: Backend) -> None:
    case = make_case([(1, 300), (1, 290), (12, 30)], SMALL["paged"])
    clean = attend(backend, case)
    case.key_cache[int(case.step.block_table[1, 4]), 0, 3, 5] = float("nan")
    actual = attend(backend, case)
    assert actual[1, :2].isnan().all()
    others = [0, *range(2, 14)]
    assert same_bytes(actual[others], clean[others])
    assert same_bytes(actual[1, 2:], clean[1, 2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cache", "wrong"), [("keys", math.nan), ("values", math.nan), ("values", math.inf)])
def test_nan_and_infinity_reach_only_rows_that_attend_to_them(
    native: Backend, cache: str, wrong: float, dtype: torch.dtype
) -> None:
    case = make_case([(300, 300)], Shape(6, 2, 64, window=120), dtype=dtype)
    expected = attend(native, case)
    position = 141  # shares a tile with the row before it
    block = int(case.step.block_table[0, position // 16])
    (case.key_cache if cache == "keys" else case.value_cache)[block, 1, position % 16, 7] = wrong
    actual = attend(native, case)
    sees_it = slice(position, position + 120)
    assert not actual[sees_it, 3:].isfinite().all(dim=-1).any()
    assert same_bytes(actual[:, :3], expected[:, :3])
    assert same_bytes(actual[:position], expected[:position])
    assert same_bytes(actual[position + 120 :], expected[position + 120 :])


# Order of additions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        *("groups of 3", "window and sinks", "biases of near positions", "latent, 35 heads, odd sizes"),
        "sinks of tokens and biases",
    ],
)
def test_a_chunk_gives_the_same_bytes_alone_and_in_a_batch(backend: Backend, shape: str, dtype: torch.dtype) -> None:
    lengths = [(1, 1), (1, 63), (3, 500), (1, 1300), (20, 90), (1, 256), (8, 1030), (1, 257)]
    case = make_case(lengths, SHAPES[shape], dtype=dtype)
    together = attend(backend, case)
    for chunk, span in enumerate(case.step.spans):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        assert same_bytes(attend(backend, only_chunk(case, chunk)), together[rows]), f"chunk {chunk}: {span}"


@pytest.mark.parametrize("lengths", [[(1, 2500)], [(1, 40)] * 20 + [(8, 1300)]])
@pytest.mark.parametrize(
    "shape", [Shape(6, 2, 24, with_sinks=True), Shape(84, 2, 24), Shape(61, 1, 48, latent_size=40)]
)
def test_threads_do_not_change_a_byte(native: Backend, lengths: list[tuple[int, int]], shape: Shape) -> None:
    case = make_case(lengths, shape)
    set_num_threads(1)
    expected = attend(native, case)
    for num_threads in (2, 3, 8):
        set_num_threads(num_threads)
        for _ in range(3):
            assert same_bytes(attend(native, case), expected), f"{num_threads} threads"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(8, 4, 64), Shape(64, 2, 24, with_sinks=True), Shape(128, 1, 48, latent_size=40)),
        Shape(16, 4, 24, num_distances=600),
    ],
)
def test_ranks_that_divide_the_heads_change_no_byte(native: Backend, shape: Shape, dtype: torch.dtype) -> None:
    """Also if several ranks have the same key-value head, and so fewer heads that read it than one rank has."""
    case = make_case([(1, 1300), (9, 700), (1, 40)], shape, dtype=dtype)
    expected = attend(native, case)
    for num_ranks in (2, 4, 8):
        parts = [attend(native, heads_of_rank(case, rank, num_ranks)) for rank in range(num_ranks)]
        assert same_bytes(torch.cat(parts, dim=1), expected), num_ranks


def attend_chunk_by_chunk(backend: Backend, case: Case, draw: random.Random) -> Tensor:
    """Run the requests of a case in steps of random chunks with random numbers of threads.

    The cache holds NaN at later positions.
    """
    case.key_cache.fill_(math.nan)
    case.value_cache.fill_(math.nan)
    out_TNL = torch.cat(case.values_CGL).new_full((*case.query_TNH.shape[:2], case.values_CGL[0].shape[-1]), math.nan)
    for lengths, rows in drawn_chunks(case.step.spans, draw):
        step = with_step(case, lengths, rows)
        set_num_threads(draw.choice([1, 2, 3]))
        values_TGL = torch.cat(case.values_CGL)[rows]
        write(backend, step, torch.cat(case.keys_CGH)[rows], values_TGL)
        out_TNL[rows] = attend(backend, step)
    return out_TNL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_neither_chunks_nor_blocks_change_a_byte(native: Backend, shape: str, dtype: torch.dtype) -> None:
    """The longest request spans several partitions of positions."""
    lengths = [(length, length) for length in (530, 150, 45)]
    make = functools.partial(make_case, lengths, SHAPES[shape], dtype=dtype)
    set_num_threads(1)
    expected = attend(native, make())
    for seed, block_size in enumerate((1, 7, 16)):
        actual = attend_chunk_by_chunk(native, make(block_size=block_size), random.Random(seed))
        assert same_bytes(actual, expected), f"blocks of {block_size}"


@pytest.mark.parametrize("shape", ["window and sinks", "latent, 35 heads, odd sizes"])
def test_rows_one_at_a_time_have_the_bytes_of_the_whole_chunk(native: Backend, shape: str) -> None:
    case = make_case([(300, 300)], SHAPES[shape], dtype=torch.bfloat16)
    expected = attend(native, case)
    for row in range(300):
        alone = with_step(case, [(1, row + 1)], slice(row, row + 1))
        assert same_bytes(attend(native, alone)[0], expected[row]), f"row {row}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_scores_have_one_order(native: Backend, dtype: torch.dtype) -> None:
    """Two elements of each key nearly cancel, so another order of additions changes many weights."""
    case = make_case([(300, 300)], Shape(2, 1, 160, scale=1.0), dtype=dtype)
    case.query_TNH[..., [5, 150]] = 2.0**14
    case.key_cache[..., 150] = -case.key_cache[..., 5]
    expected = attend(native, case)
    for row in range(300):
        alone = with_step(case, [(1, row + 1)], slice(row, row + 1))
        assert same_bytes(attend(native, alone)[0], expected[row]), f"row {row}"


# The cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("block_size", "kind"), [(1, "paged"), (7, "latent"), (16, "paged"), (16, "latent")])
def test_write_stores_each_token_at_its_slot(backend: Backend, dtype: torch.dtype, block_size: int, kind: str) -> None:
    shape, num_tokens, num_blocks = SMALL[kind], 40, 90 // block_size
    num_kv_heads, head_size = shape.num_kv_heads, shape.head_size
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(0))[:num_tokens]
    slots[::5] = -1
    # Slices of a projection: neither tokens nor heads are contiguous.
    projected = torch.randn(num_tokens, 4 * num_kv_heads, head_size + 3).to(dtype)
    keys_TGH, values_TGH = projected[:, :num_kv_heads, 3:], projected[:, 1 : 1 + 2 * num_kv_heads : 2, :head_size]
    caches = [torch.randn(num_blocks, num_kv_heads, block_size, head_size).to(dtype) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0][slot // block_size, :, slot % block_size] = keys_TGH[token]
            if kind == "paged":
                expected[1][slot // block_size, :, slot % block_size] = values_TGH[token]

    case = make_case([], shape)
    step = dataclasses.replace(case.step, cache_slots=slots)
    case = dataclasses.replace(case, step=step, key_cache=caches[0], value_cache=caches[1])
    write(backend, case, keys_TGH, values_TGH)
    assert same_bytes(caches[0], expected[0])
    assert same_bytes(caches[1], expected[1])


@pytest.mark.parametrize("block_size", [1, 7])
def test_gather_returns_the_vectors_of_a_chunk_in_order(block_size: int) -> None:
    case = make_case([(1, 33), (5, 5), (1, 48)], SMALL["latent"], block_size=block_size)
    for block_ids, keys_CGH in zip(case.step.block_table, case.keys_CGH, strict=True):
        assert torch.equal(gather_latents(case.key_cache[:, 0], block_ids, len(keys_CGH)), keys_CGH[:, 0])
    assert gather_latents(case.key_cache[:, 0], case.step.block_table[0], 0).shape == (0, 32)


# Threads


@needs_kernels
def test_calls_from_several_python_threads_at_once() -> None:
    case = make_case([(1, 1500), (1, 30)], SMALL["paged"])
    expected = attend(NATIVE, case)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: attend(NATIVE, case), range(30)))
    assert all(same_bytes(output, expected) for output in outputs)


FORK = """
import os, sys
import torch
from attention_cases import Shape, attend, make_case
from paged_steps import NATIVE, kernels
from moeserve.ops.native import set_num_threads

case = make_case([(1, 3200), (1, 100)], Shape(4, 2, 64))
set_num_threads(2)
expected = attend(NATIVE, case)
child = os.fork()
for _ in range(20):
    assert torch.equal(attend(NATIVE, case), expected)
if child:
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
"""


@needs_kernels
def test_the_child_of_a_fork_computes_the_same() -> None:
    """The child starts threads of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, env=environment
    )
    assert finished.returncode == 0, finished.stderr
