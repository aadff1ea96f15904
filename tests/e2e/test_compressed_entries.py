"""Models with compressed entries: prompts that begin alike share them in any layout, and give transformers' tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from reference_models import Reference
from transformers import DeepseekV4Config

from moeserve import LLM, SamplingParams
from moeserve.errors import SettingsError
from moeserve.models.registry import describe

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS = {"dtype": "float32", "kv_cache_memory": "8MiB", "max_model_len": 300}


@pytest.fixture(scope="module")
def prompts(reference_named: Callable[[str], Reference]) -> list[list[int]]:
    """Prompts with common beginnings, longer than many windows and blocks."""
    reference = reference_named("deepseek-v4")
    whole = reference.prompts(200, seed=5)[0]
    first = reference.clear_prompts([200, 131], NUM_TOKENS, beginning=whole[:90])
    return [*first, *reference.clear_prompts([77, 45], NUM_TOKENS)]


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"max_num_batched_tokens": 64},
        {"max_num_seqs": 2, "max_num_batched_tokens": 7, "block_size": 4},
        {"max_num_batched_tokens": 33, "block_size": 128, "kv_host_memory": "1MiB"},
        {"max_num_batched_tokens": 70, "kv_cache_memory": "700KiB", "max_model_len": 210},
    ],
    ids=lambda layout: "-".join(layout),
)
def test_layouts(layout: dict[str, int], prompts: list[list[int]], reference_named: Callable[[str], Reference]) -> None:
    """Two rounds of prompts, of which the second finds blocks of the first."""
    reference = reference_named("deepseek-v4")
    expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    with LLM(reference.folder, num_threads=1, **SETTINGS | layout) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        if len(layout) == 1:  # otherwise other requests have taken the blocks of windows
            cached = [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
            assert [output.num_cached_tokens for output in outputs] == cached


def test_blocks_with_parts_of_entries_are_refused(reference_named: Callable[[str], Reference]) -> None:
    with pytest.raises(SettingsError, match="multiple of 4"):
        LLM(reference_named("deepseek-v4").folder, block_size=6)


def test_published_configs_read_like_those_of_transformers(tmp_path: Path) -> None:
    """Published configs list the tokens of an entry; transformers names types of layers, and nests frequencies."""
    published = json.loads((Path(__file__).parents[1] / "unit" / "published_configs.json").read_text())
    for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro"):
        config = published[name]
        own = DeepseekV4Config(**copy.deepcopy(config)).to_dict() | dict(architectures=config["architectures"])
        for folder, values in ((tmp_path / "hub", config), (tmp_path / "own", own)):
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(values))
        assert describe(tmp_path / "hub").model == describe(tmp_path / "own").model
