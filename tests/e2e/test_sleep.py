"""An engine that sleeps returns its memory, and serves as before once it is awake."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reference_models import Reference
from test_weight_updates import GREEDY, PROMPTS

from moeserve import LLM, AsyncLLM, RequestError, SamplingParams, StaleWeightsError, WeightUpdateError

SETTINGS: dict[str, Any] = dict(max_model_len=64, kv_cache_memory="8MiB", num_threads=1, show_progress=False)
# 38 MB of weights in bfloat16
LARGE = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    hidden_size=512,
    intermediate_size=512,
    moe_intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=8,
    num_experts_per_tok=2,
    vocab_size=2000,
    max_position_embeddings=1024,
    norm_topk_prob=True,
    tie_word_embeddings=True,
)
WEIGHT_BYTES = 2 * (2000 * 512 + 4 * (512 * 64 * (2 * 8 + 2 * 4) + 8 * 3 * 512 * 256))
KV_MIB = 16


@pytest.fixture
def llm(plain: Reference) -> Iterator[LLM]:
    with LLM(str(plain.folder), rl=True, **SETTINGS) as llm:
        yield llm


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def proportional_bytes() -> int:
    """Return the memory of this process; pages that several processes share count in part."""
    pages = Path("/proc/self/smaps_rollup").read_text()
    return int(re.findall(r"^Pss:\s+(\d+) kB$", pages, re.MULTILINE)[0]) * 1024


def test_memory_is_returned(tmp_path: Path) -> None:
    """Level 1: at least 95% of the cache; level 2: of the weights too."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    prompts = [[number, *range(1, 900)] for number in range(1, 40)]  # together more than the cache holds
    settings = SETTINGS | dict(max_model_len=1024, kv_cache_memory=f"{KV_MIB}MiB")
    with LLM(str(tmp_path), load_format="dummy", rl=True, dtype="bfloat16", **settings) as llm:
        llm.generate([{"prompt_token_ids": each} for each in prompts], SamplingParams(max_tokens=1), use_tqdm=False)
        before = proportional_bytes()
        llm.sleep(1)
        in_first = proportional_bytes()
        assert before - in_first >= 0.95 * KV_MIB * 2**20
        llm.wake_up()
        llm.sleep(2)
        assert in_first - proportional_bytes() >= 0.95 * WEIGHT_BYTES


def test_an_engine_serves_again(llm: LLM) -> None:
    expected, checksums = tokens(llm), llm.weight_checksums()
    for _ in range(2):
        llm.sleep()
        assert llm.is_sleeping()
        assert llm.is_paused()
        llm.wake_up(["kv_cache"])
        assert not llm.is_sleeping()
        assert tokens(llm) == expected
        llm.sleep(2)
        assert llm.weight_checksums() != checksums
        with pytest.raises(WeightUpdateError, match="wake_up"):
            llm.reload_weights()
        with pytest.raises(RequestError, match="wake_up"):
            llm.resume()
        llm.wake_up(["weights"])
        assert llm.is_sleeping()
        with pytest.raises(StaleWeightsError):
            tokens(llm)
        llm.reload_weights()
        llm.wake_up(["kv_cache"])
        assert not llm.is_sleeping()
        assert (tokens(llm), llm.weight_checksums()) == (expected, checksums)


def test_no_prefix_outlives_a_sleep(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [*range(1, 50)]}
    (first,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    llm.sleep()
    llm.wake_up()
    (again,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 0
    assert again.outputs == first.outputs


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [dict(tensor_parallel_size=2), dict(data_parallel_size=2)])
def test_several_ranks_sleep(layout: dict[str, int], reference_named: Callable[[str], Reference]) -> None:
    with LLM(str(reference_named("deepseek-v3-four-heads").folder), rl=True, **SETTINGS, **layout) as llm:
        expected, checksums = tokens(llm), llm.weight_checksums()
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.reload_weights()
        llm.wake_up()
        assert (tokens(llm), llm.weight_checksums()) == (expected, checksums)


def test_requests_in_flight_continue_after_a_sleep(plain: Reference) -> None:
    """With `retract` their keys and values are computed again."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompt = [*range(2, 30)]

    async def run(sleeps: bool) -> list[int]:
        llm = AsyncLLM(str(plain.folder), rl=True, **SETTINGS)
        found: list[int] = []
        try:
            async for output in llm.generate({"prompt_token_ids": prompt}, params):
                if sleeps and not found:
                    await llm.sleep(1, "retract")
                    assert await llm.is_sleeping()
                    await llm.wake_up()
                found = output.outputs[0].token_ids
        finally:
            llm.shutdown()
        return found

    assert asyncio.run(run(True)) == asyncio.run(run(False))


def test_what_is_refused(llm: LLM, plain: Reference) -> None:
    for level in (0, 3, True):
        with pytest.raises(RequestError, match="level"):
            llm.sleep(level)
    with pytest.raises(RequestError, match="keep"):
        llm.sleep(1, "keep")
    with pytest.raises(RequestError, match="weihgts"):
        llm.wake_up(["weihgts"])  # type: ignore[list-item]
    with LLM(str(plain.folder), **SETTINGS) as other, pytest.raises(RequestError, match="rl"):
        other.sleep()
    with LLM(str(plain.folder), rl=True, kv_host_memory="1MiB", **SETTINGS) as other:
        with pytest.raises(RequestError, match="kv_host_memory"):
            other.sleep()
        assert tokens(other)
