"""Experts that move between ranks while they serve: same tokens, exact counts, and saved placements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference_models import Reference

from moeserve import LLM, SamplingParams
from moeserve.errors import SettingsError
from moeserve.telemetry.expert_load import read_windows, summed

pytestmark = pytest.mark.ranks

SETTINGS: dict[str, Any] = dict(
    dtype="float32",
    kv_cache_memory="8MiB",
    max_model_len=256,
    max_num_batched_tokens=32,
    enable_prefix_caching=False,
    show_progress=False,
)
# A horizon that makes any gain worth its cost, so that small models on busy machines move experts at all.
MOVING: dict[str, Any] = dict(rebalance="auto", rebalance_horizon=10**9, expert_load_window=3)
NUM_TOKENS = 14


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.slow_but("deepseek-v3-four-heads", "gpt-oss-layout1")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt-oss", dict(data_parallel_size=2, num_redundant_experts=2, debug_collectives=True)),  # with biases
        ("gpt-oss", dict(pipeline_parallel_size=2, data_parallel_size=2, num_redundant_experts=2)),
        (
            "deepseek-v3-four-heads",
            dict(tensor_parallel_size=2, data_parallel_size=2, num_redundant_experts=4, dispatcher="allgather"),
        ),
    ],
)
def test_tokens_and_counts_do_not_change(
    name: str, layout: dict[str, Any], reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    reference = reference_named(name)
    path = tmp_path / "loads.jsonl"
    rounds = [reference.prompts(3, 40, 17, 9, seed=seed) for seed in range(2)]
    with LLM(reference.folder, expert_load_file=str(path), **SETTINGS, **MOVING, **layout) as llm:
        for prompts in rounds:
            assert generate(llm, prompts) == reference.continuations(prompts, NUM_TOKENS)
    windows = read_windows(path)
    assert windows[-1].placement_epoch > 0
    assert windows[0].logical_of_slot != windows[-1].logical_of_slot
    epochs = [window.placement_epoch for window in windows]
    assert epochs == sorted(epochs)
    total = summed(windows)
    computed = [
        prompt + tokens[:-1]
        for prompts in rounds
        for prompt, tokens in zip(prompts, reference.continuations(prompts, NUM_TOKENS), strict=True)
    ]  # all tokens of a request but the last one go through the model
    expected = reference.expert_counts(computed)
    assert [list(counts) for counts in total.tokens_of_expert] == expected


def test_saved_placement_is_used_again(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    reference = reference_named("gpt-oss")
    prompts = reference.prompts(3, 40, 17, 24)
    expected = reference.continuations(prompts, NUM_TOKENS)
    layout = dict(data_parallel_size=2, num_redundant_experts=3)
    path = tmp_path / "placements.json"
    with LLM(reference.folder, **SETTINGS, **MOVING, **layout) as llm:
        initial = llm.expert_load().logical_of_slot
        for _ in range(3):
            assert generate(llm, prompts) == expected
        llm.save_placement(path)
        kept = llm.expert_load().logical_of_slot
    assert kept != initial
    with LLM(reference.folder, **SETTINGS, **layout, pipeline_parallel_size=2, rebalance=str(path)) as llm:
        assert generate(llm, prompts) == expected
        window = llm.expert_load()
        assert window.logical_of_slot == kept
        assert window.placement_epoch == 0
    with pytest.raises(SettingsError, match="num_redundant_experts=3"):
        LLM(reference.folder, **SETTINGS, data_parallel_size=2, rebalance=str(path))
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({"placements": saved["placements"][1:]}))
    with pytest.raises(SettingsError, match="layers"):
        LLM(reference.folder, **SETTINGS, **layout, rebalance=str(path))


def test_one_rank_cannot_move_experts(reference_named: Callable[[str], Reference]) -> None:
    with pytest.raises(SettingsError, match="rebalance"):
        LLM(reference_named("mixtral").folder, **SETTINGS, rebalance="auto")
