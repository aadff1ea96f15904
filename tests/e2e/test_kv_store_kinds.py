"""Stores behind caches of every kind: blocks, those of windows and recurrent states come back, with the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from reference_models import Reference

from moeserve import LLM, SamplingParams
from moeserve.kv.load_rates import LoadRates
from moeserve.models.inspection import inspect
from moeserve.protocol import ReplicaStats

BLOCK = 16
PARAMS = SamplingParams(max_tokens=4, temperature=1.0, seed=3, ignore_eos=True)
SETTINGS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 2, "block_size": BLOCK, "num_threads": 1}
DICE = random.Random(0)
BEGINNING, *TAILS = ([DICE.randrange(90) for _ in range(length)] for length in (210, 9, 40, 7, 30))
# The second prompt diverges from the first one, and keeps its state and window there. The last one was not seen before.
*PROMPTS, OTHER = [BEGINNING + TAILS[0], *(BEGINNING[:140] + tail for tail in TAILS[1:])]
NUM_BLOCKS = 13 + 3 + 1  # of the first prompt, and of the next ones behind the eight that they share with it
NUM_STORED = {  # tokens of each prompt and of the other one that a store has
    "qwen3-next": [192, 128, 128, 128],  # states are saved after multiples of 64 tokens
    "lfm2-moe": [192, 128, 128, 128],
    "gpt-oss": [208, 176, 144, 128],
    "deepseek-v4": [208, 176, 144, 128],
}
# Blocks of layers with windows at the four ends of these prefixes, and states.
NUM_FURTHER = {"qwen3-next": (0, 2), "lfm2-moe": (0, 2), "gpt-oss": (4, 0), "deepseek-v4": (4, 0)}


HAS_STATES = ("qwen3-next", "lfm2-moe")


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load blocks though it may take longer than computing a tiny model."""
    monkeypatch.setattr(LoadRates, "pays", lambda _: True)


def run(
    model: Path,
    prompts: Sequence[list[int]] = PROMPTS,
    wait_for: Callable[[ReplicaStats], bool] = lambda _: True,
    **settings: Any,
) -> tuple[list[tuple[list[int], int]], ReplicaStats]:
    """Serve prompts one after the other in a new engine. Return the tokens of each and how many of it were cached.

    Args:
        wait_for: the engine ends when this is true of its counts. It saves items while it has something to do.
    """
    with LLM(model, show_progress=False, **{"kv_cache_memory": "2MiB"} | SETTINGS | settings) as llm:
        found = []
        for prompt in prompts:
            (output,) = llm.generate([{"prompt_token_ids": prompt}], PARAMS)
            found.append((list(output.outputs[0].token_ids), output.num_cached_tokens or 0))
        while not wait_for(stats := llm.core.replica_stats[0]):
            llm.generate([{"prompt_token_ids": [1]}], PARAMS)
        return found, stats


def names(folder: Path, kind: str) -> list[str]:
    return [path.name for path in folder.glob(f"*/*.{kind}.safetensors")]


def num_files(folder: Path) -> tuple[int, ...]:
    """Return the blocks, the blocks of windows and the states in a folder."""
    return tuple(len(list(folder.glob(f"*/*.{kind}.safetensors"))) for kind in ("block", "window_block", "state"))


def has_files(folder: Path, *expected: int) -> Callable[[ReplicaStats], bool]:
    """Return a condition: the folder has at least the expected number of items of each kind."""
    return lambda _: all(found >= wanted for found, wanted in zip(num_files(folder), expected, strict=True))


@pytest.mark.parametrize("name", NUM_STORED)
def test_a_new_engine_begins_behind_what_a_folder_has(
    name: str, reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    model, expected_files = reference_named(name).folder, (NUM_BLOCKS, *NUM_FURTHER[name])
    expected, _ = run(model, [*PROMPTS, OTHER])
    num_blocks, num_states = sum(expected_files[:2]), expected_files[2]

    def are_saved(stats: ReplicaStats) -> bool:
        """The engine counts an item a moment after its file appears."""
        return stats.num_saved_blocks >= num_blocks and stats.num_saved_states >= num_states

    first, stats = run(model, PROMPTS, wait_for=are_saved, kv_folder=str(tmp_path))
    assert first == expected[:-1]  # whose cache is large enough
    assert num_files(tmp_path) == expected_files
    assert (stats.num_saved_blocks, stats.num_saved_states) == (num_blocks, num_states)
    for prompt, (tokens, _), num_stored in zip([*PROMPTS, OTHER], expected, NUM_STORED[name], strict=True):
        found, stats = run(model, [prompt], kv_folder=str(tmp_path))
        assert found == [(tokens, num_stored)]
        assert (stats.num_loaded_tokens, stats.num_loaded_states) == (num_stored, int(name in HAS_STATES))


def test_a_damaged_state_is_computed(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    model, prompts = reference_named("qwen3-next").folder, PROMPTS[:1]
    expected, _ = run(model, prompts, wait_for=has_files(tmp_path, 13, 0, 1), kv_folder=str(tmp_path))
    (path,) = tmp_path.glob("*/*.state.safetensors")
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)

    def is_replaced(_: ReplicaStats) -> bool:
        return path.exists() and path.read_bytes() != data

    found, stats = run(model, prompts, wait_for=is_replaced, kv_folder=str(tmp_path))
    assert found == expected  # nothing of it was cached
    assert (stats.num_loaded_states, stats.num_failed_blocks) == (0, 1)
    assert run(model, prompts, kv_folder=str(tmp_path))[0] == [(expected[0][0], 192)]  # it was saved again


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("qwen3-next", {"tensor_parallel_size": 2}, marks=pytest.mark.ranks),
        pytest.param("lfm2-moe", {"pipeline_parallel_size": 2}, marks=pytest.mark.ranks),
        pytest.param("gpt-oss", {"pipeline_parallel_size": 2}, marks=pytest.mark.ranks),
        ("qwen3-next", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_layouts_and_drafts(
    name: str, settings: dict[str, Any], reference_named: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Prompts repeat a few tokens, so that there are drafts."""
    model, num_folders = (
        reference_named(name).folder,
        settings.get("pipeline_parallel_size", 1) * settings.get("tensor_parallel_size", 1),
    )
    prompts = [PROMPTS[0][:130] * 2, PROMPTS[1][:150]]
    prompts = [prompt[:200] for prompt in prompts]
    expected, _ = run(model, prompts)
    files = tuple(num_folders * number for number in (12 + 1, 2 * (name == "gpt-oss"), name in HAS_STATES))
    first, _ = run(model, prompts, wait_for=has_files(tmp_path, *files), kv_folder=str(tmp_path), **settings)
    second, stats = run(model, prompts, kv_folder=str(tmp_path), **settings)
    for found in (first, second):
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert second[0][1] == 192
    assert stats.num_loaded_tokens >= 192


@pytest.mark.parametrize("name", ["qwen3-next", "gpt-oss"])
def test_preempted_requests_go_on_from_the_store(name: str, reference_named: Callable[[str], Reference]) -> None:
    """The cache holds one and a half of two requests, and one state."""
    model = reference_named(name).folder
    needs, settings = inspect(model, "float32").cache, SETTINGS | {"max_model_len": 181}
    settings["kv_cache_memory"] = BLOCK * 15 * needs.bytes_per_token
    if name in HAS_STATES:
        settings["num_saved_states"] = 1
    prompts = [{"prompt_token_ids": prompt[:100]} for prompt in (BEGINNING, BEGINNING[::-1])]
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    tokens = []
    for further in ({"kv_cache_memory": "4MiB"}, {"kv_host_memory": "4MiB"}):
        with LLM(model, show_progress=False, **settings | further) as llm:
            for _ in range(2):
                tokens.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
            (stats,) = llm.core.replica_stats
    assert tokens == tokens[:1] * 4
    assert stats.num_preemptions
    assert stats.num_loaded_states if name in HAS_STATES else stats.num_loaded_tokens
