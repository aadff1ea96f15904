"""Killed ranks of an engine that restarts: every request completes with the tokens it would have had."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import pytest
from rank_processes import living_ranks
from reference_models import Reference

from moeserve import LLM, SamplingParams

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    "layout",
    [dict(tensor_parallel_size=2, data_parallel_size=2), dict(pipeline_parallel_size=2, data_parallel_size=2)],
    ids=["tp2dp2", "pp2dp2"],
)
@pytest.mark.parametrize("num_kills", [2, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_requests_survive_killed_ranks(
    reference_named: Callable[[str], Reference],
    layout: dict[str, int],
    num_kills: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reference = reference_named("mixtral")
    dice = random.Random(1)
    prompts = reference.prompts(3, 17, 9, 30, seed=2)
    params = [
        SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=100, ignore_eos=True)
        for index in range(len(prompts))
    ]
    before = {*living_ranks()}
    settings = dict(dtype="float32", max_model_len=256, kv_cache_memory="8MiB", max_num_seqs=8)
    with LLM(reference.folder, on_failure="restart", **settings, **layout) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        num_left = num_kills
        while num_left:
            streams = [llm.stream(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
            last = [next(stream) for stream in streams]
            for _ in range(dice.randrange(60)):
                last[0] = next(streams[0])
            victim = dice.choice([process for process in living_ranks() if process not in before])
            name = victim.name()
            os.kill(victim.pid, signal.SIGKILL)
            num_left -= 1
            for index, stream in enumerate(streams):
                for last[index] in stream:
                    pass
            assert [output.outputs[0].token_ids for output in last] == expected
            assert all(output.outputs[0].finish_reason == "length" for output in last)
            assert f"{name} (replica" in caplog.messages[-1], caplog.messages
            assert ("stage" in caplog.messages[-1]) == ("pipeline_parallel_size" in layout)
