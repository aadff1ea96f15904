"""The comparison of the ranks' request tables with the scheduler, in real processes."""

from __future__ import annotations

from typing import Any

import pytest
from reference_models import Reference

from moeserve import LLM, EngineError, SamplingParams

SETTINGS: dict[str, Any] = dict(
    kv_cache_memory="8MiB", max_model_len=128, max_num_seqs=4, dtype="float32", enforce_eager=True
)
PARAMS = SamplingParams(temperature=0, max_tokens=40)


@pytest.mark.parametrize("fault", ["1 token", "2 block"])
def test_a_rank_whose_table_differs_is_named(plain: Reference, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Also a rank that does not sample, whose state no other check reads."""
    monkeypatch.setenv("MOESERVE_TEST_PLANT", f"wrong_table:{fault}")
    layout = dict(tensor_parallel_size=2, data_parallel_size=2)
    prompts = plain.prompts(9, 20, 17, 30, 5, 11)
    message = f"RankStateError: rank {fault[0]}: slot 1 .*after step"
    with (
        LLM(plain.folder, debug_rank_state=True, on_failure="end", **layout, **SETTINGS) as llm,
        pytest.raises(EngineError, match=message),
    ):
        llm.generate(prompts, PARAMS)


def test_the_comparison_changes_nothing(plain: Reference) -> None:
    """On one rank and on two, with more requests than slots and chunks of prompts."""
    prompts = plain.prompts(9, 20, 17, 30, 5, 11)
    expected = plain.continuations(prompts, 12)
    for layout in (dict(), dict(tensor_parallel_size=2)):
        options = SETTINGS | dict(max_num_seqs=2, max_num_batched_tokens=16)
        with LLM(plain.folder, debug_rank_state=True, **layout, **options) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, n=1))
        assert [output.outputs[0].token_ids for output in outputs] == expected
