"""The layout of experts within a replica: the formula behind expert_parallel='auto', and what cannot be sliced."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from moeserve.config.expert_layout import (
    ExpertShape,
    Numbers,
    expected_fullest,
    expected_touched,
    layer_seconds,
    resolve_expert_parallel,
)
from moeserve.config.settings import ParallelSettings
from moeserve.errors import SettingsError

MIXTRAL = ExpertShape(num_experts=8, top_k=2, hidden_size=4096, width=14336, slices_alike=(1, 2, 4, 8))
QWEN3 = ExpertShape(num_experts=128, top_k=8, hidden_size=2048, width=768, slices_alike=(1, 2))
DEEPSEEK_V3 = ExpertShape(num_experts=256, top_k=8, hidden_size=7168, width=2048, slices_alike=(1, 2, 4))
CPU = Numbers(device="cpu", dtype="bfloat16", quantization=None, keeps_bytes=True)
GPU = Numbers(device="cuda", dtype="bfloat16", quantization=None, keeps_bytes=False)
GPU_FLOAT8 = Numbers(device="cuda", dtype="bfloat16", quantization="fp8", keeps_bytes=False)


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_touched"), [(8, 2, 2), (8, 4, 2), (7, 3, 4), (10, 2, 5), (6, 1, 3), (9, 4, 9)]
)
def test_the_fullest_rank_is_the_mean_over_all_sets_of_experts(
    num_experts: int, num_ranks: int, num_touched: int
) -> None:
    held = [num_experts // num_ranks + (rank < num_experts % num_ranks) for rank in range(num_ranks)]
    rank_of_expert = [rank for rank, count in enumerate(held) for _ in range(count)]
    fullest = [
        max(sum(rank_of_expert[expert] == rank for expert in chosen) for rank in range(num_ranks))
        for chosen in itertools.combinations(range(num_experts), num_touched)
    ]
    assert expected_fullest(num_experts, num_ranks, num_touched) == pytest.approx(sum(fullest) / len(fullest))


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_touched_experts_are_those_that_random_tokens_choose(num_tokens: int) -> None:
    dice = random.Random(num_tokens)
    counts = [len({expert for _ in range(num_tokens) for expert in dice.sample(range(64), 6)}) for _ in range(400)]
    assert expected_touched(64, 6, num_tokens) == pytest.approx(sum(counts) / len(counts), abs=1)


def test_one_request_of_mixtral_on_two_ranks_waits_for_the_fuller_one() -> None:
    """Both experts of a token are on one rank with a chance of 3 / 7. Reading weights takes nearly all of the time."""
    for numbers in (CPU, GPU):
        assert layer_seconds(MIXTRAL, 2, 1, numbers).gain == pytest.approx(1 + 3 / 7, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "tp", "numbers", "is_sliced"),
    [
        (MIXTRAL, 2, CPU, True),
        (MIXTRAL, 2, GPU, True),
        (QWEN3, 2, GPU, True),
        (QWEN3, 2, CPU, False),  # outputs of all pairs travel in float32
        (QWEN3, 8, GPU, False),  # slices of 96
        (DEEPSEEK_V3, 8, GPU_FLOAT8, False),  # prompts read and write all rows on all ranks
    ],
)
def test_auto(shape: ExpertShape, tp: int, numbers: Numbers, is_sliced: bool) -> None:
    assert resolve(shape, numbers, tensor_parallel_size=tp) == (not is_sliced)
    assert resolve(shape, numbers, tensor_parallel_size=tp, expert_parallel=True)


@pytest.mark.parametrize(
    ("options", "numbers", "named"),
    [
        (dict(data_parallel_size=2), CPU, "data_parallel_size=2"),
        (dict(num_redundant_experts=3), CPU, "num_redundant_experts=3"),
        (dict(expert_loads="loads.json"), CPU, "expert_loads='loads.json'"),
        (dict(rebalance="auto"), CPU, "rebalance='auto'"),
        (dict(dispatcher="all_to_all"), CPU, "dispatcher='all_to_all'"),
        (dict(deepep_float8=True), GPU, "deepep_float8=True"),
        (dict(deepep_api="legacy"), GPU, "deepep_api='legacy'"),
        (dict(tensor_parallel_size=3), CPU, "1, 2, 4, 8 slices"),
        (dict(tensor_parallel_size=3), GPU, "128"),
        ({}, Numbers(device="cuda", dtype="bfloat16", quantization=None, keeps_bytes=True), "batch_invariant"),
        ({}, Numbers(device="cpu", dtype="bfloat16", quantization="mxfp4", keeps_bytes=True), "mxfp4"),
    ],
)
def test_what_cannot_be_sliced_is_whole_or_refused(options: dict[str, Any], numbers: Numbers, named: str) -> None:
    options = {"tensor_parallel_size": 2, **options}
    assert resolve(MIXTRAL, numbers, **options)
    with pytest.raises(SettingsError) as refusal:
        resolve(MIXTRAL, numbers, **options, expert_parallel=False)
    assert named in str(refusal.value)


def test_experts_whose_outputs_are_normalised_are_whole() -> None:
    shape = dataclasses.replace(MIXTRAL, has_output_norm=True)
    assert resolve(shape, CPU, tensor_parallel_size=2)
    with pytest.raises(SettingsError, match="norms of the outputs of experts"):
        resolve(shape, CPU, tensor_parallel_size=2, expert_parallel=False)


def test_one_rank_and_models_without_experts_have_nothing_to_slice() -> None:
    assert resolve(MIXTRAL, CPU, expert_parallel=False)
    assert resolve(None, CPU, expert_parallel=False, tensor_parallel_size=2)


def resolve(shape: ExpertShape | None, numbers: Numbers, **options: Any) -> bool:
    parallel = ParallelSettings(**options)
    many = dict(max_num_seqs=64, max_num_batched_tokens=2048)
    return resolve_expert_parallel(parallel, shape, numbers, **many)
