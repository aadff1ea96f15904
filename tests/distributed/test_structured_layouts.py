"""Structured outputs in every layout, and after a rank has died: the results of one rank."""

from __future__ import annotations

import os
import signal
from itertools import islice
from typing import Any

import pytest
from rank_processes import living_ranks
from structured_cases import check, requests, result, small_llm, write_model

from moeserve import RequestError, SamplingParams

pytestmark = pytest.mark.ranks

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": dict(tensor_parallel_size=2),
    "dp2": dict(data_parallel_size=2),
    "pp2": dict(pipeline_parallel_size=2),
    "tp2dp2": dict(tensor_parallel_size=2, data_parallel_size=2, debug_rank_state=True),
    "tp2dp2 with drafts": dict(
        tensor_parallel_size=2, data_parallel_size=2, debug_rank_state=True, speculative_config=NGRAM
    ),
    "pp2 with drafts": dict(pipeline_parallel_size=2, debug_rank_state=True, speculative_config=NGRAM),
}
SETTINGS: dict[str, Any] = dict(max_num_seqs=8, kv_cache_memory="2MiB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def expected(folder: str) -> list[tuple[Any, ...]]:
    with small_llm(folder, **SETTINGS) as llm:
        return [result(output.outputs[0]) for output in llm.generate(*requests())]


@pytest.mark.slow_but("tp2dp2 with drafts", "pp2]")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_those_of_one_rank(layout: str, folder: str, expected: list[tuple[Any, ...]]) -> None:
    with small_llm(folder, **LAYOUTS[layout], **SETTINGS) as llm:
        prompts, params = requests()
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
        for output, each in zip(outputs, params, strict=True):
            check(output, each.structured_outputs)
        assert [result(output) for output in outputs] == expected
        with pytest.raises(RequestError, match="structured_outputs: regex cannot be served"):
            llm.generate(prompts[0], SamplingParams(structured_outputs={"regex": "(a"}))


def test_outputs_continue_in_their_grammar_after_a_rank_has_died(folder: str, expected: list[tuple[Any, ...]]) -> None:
    with small_llm(folder, data_parallel_size=2, on_failure="restart", **SETTINGS) as llm:
        prompts, params = requests()
        streams = [llm.stream(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        outputs = [list(islice(stream, 2)) for stream in streams]  # short requests may end here
        for rank in living_ranks()[:1]:
            os.kill(rank.pid, signal.SIGKILL)
        for each, stream in zip(outputs, streams, strict=True):
            each.extend(stream)
        assert [result(each[-1].outputs[0]) for each in outputs] == expected
