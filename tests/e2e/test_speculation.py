"""Speculation changes no byte of any result."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference_models import SHAPES, Reference, Shape, heads, make_reference
from structured_cases import PROMPTS, STRUCTURED, VOCABULARY, result, small_llm, write_model
from test_draft_layers import MTP, with_right_modules
from test_steps_in_flight import NGRAM, scheduler_of

from moeserve import LLM, SamplingParams, SettingsError

LENGTH = 180
# Cache for one request, so that some are preempted, and chunks that are shorter than most prompts.
TIGHT = {"kv_cache_memory": LENGTH * 600, "max_num_batched_tokens": 19, "block_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def folders(folder: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Models with the same tokenizer: one without MTP modules, and some with 1 and 2 whose drafts are often right."""
    shape = SHAPES["deepseek-v3"].settings | heads(4, 4)
    shape |= dict(num_hidden_layers=2, first_k_dense_replace=1, vocab_size=VOCABULARY)
    reference = make_reference(tmp_path_factory.mktemp("plain"), Shape("DeepseekV3", shape))
    found = [folder]
    for num_modules in (1, 2):
        own = tmp_path_factory.mktemp("mtp")
        with_right_modules(reference, own, num_modules, others=0.3)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(folder) / name, own)
        found.append(str(own))
    return found


def mixed_requests(num_requests: int) -> tuple[list[str], list[SamplingParams]]:
    """Return requests with every parameter that may change a token, some with a common prefix."""
    source = random.Random(num_requests)
    prompts, params = [], []
    for index in range(num_requests):
        grammar = source.choice([None, None, *STRUCTURED.values()])
        prompts.append(source.choice(PROMPTS) + " the words" * source.randrange(12))
        params.append(
            SamplingParams(
                temperature=source.choice([0.0, 0.0, 0.05, 0.8]),
                top_p=source.choice([1.0, 0.9]),
                seed=index,
                max_tokens=source.choice([1, 30, 60, 80]),
                min_tokens=0 if grammar else source.choice([0, 0, 1]),
                n=source.choice([1, 1, 2]),
                repetition_penalty=source.choice([1.0, 1.0, 1.2]),
                presence_penalty=source.choice([0.0, 0.0, 0.7]),
                logit_bias=source.choice([None, None, {7: 3.0}]),
                logprobs=source.choice([None, None, 2]),
                prompt_logprobs=source.choice([None, None, None, 1]),
                stop=source.choice([None, None, None, "e", ["th", "se h"]]),
                stop_token_ids=source.choice([None, None, list(range(20, 30))]),
                structured_outputs=grammar,
                ignore_eos=grammar is None and source.random() < 0.5,
            )
        )
    return prompts, params


def results_of(llm: LLM, requests: tuple[list[str], list[SamplingParams]]) -> list[Any]:
    outputs = llm.generate(*requests)
    return [([result(each) for each in output.outputs], output.prompt_logprobs) for output in outputs]


@pytest.mark.slow_but("40-ngram", "40-mtp-2")
@pytest.mark.parametrize(("config", "num_modules"), [(NGRAM, 0), (MTP, 1), (MTP, 2)], ids=["ngram", "mtp", "mtp-2"])
@pytest.mark.parametrize("num_requests", [40, pytest.param(500, marks=pytest.mark.soak)])
def test_mixed_requests_have_the_same_bytes(
    num_requests: int, config: dict[str, Any], num_modules: int, folders: list[str]
) -> None:
    requests, folder = mixed_requests(num_requests), folders[num_modules]
    with small_llm(folder, max_model_len=LENGTH, enable_prefix_caching=False) as llm:
        expected = results_of(llm, requests)
    with small_llm(folder, max_model_len=LENGTH, speculative_config=config, **TIGHT) as llm:
        assert results_of(llm, requests) == expected
        scheduler = scheduler_of(llm)
        scheduler.check_invariants()
        assert scheduler.num_preemptions
        tokens = [len(each[1]) for outputs, _ in expected for each in outputs]
        assert sum(tokens) > 10 * len(tokens), "most requests end at once"
        accepted = scheduler.speculation.num_accepted_per_position
        assert len(accepted) == 3
        assert 0 < accepted[2] < accepted[1] < accepted[0] < scheduler.speculation.num_drafts
        assert sum(accepted) == scheduler.speculation.num_accepted_tokens < scheduler.speculation.num_draft_tokens


@pytest.mark.slow_but("deepseek-v3", "qwen3-next")
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3-next", "lfm2-moe", "kimi-linear", "granite-hybrid", "jamba", "minimax", "zaya"),
        *("deepseek-v3", "deepseek-v4", "gpt-oss"),
        "glm5-next",
        "inkling",
        "inkling2",
        "qwen4-exp",
    ],
)
def test_other_layers_verify_drafts(name: str, reference_named: Callable[[str], Reference]) -> None:
    """Recurrent states and unfinished entries forget rejected drafts; latents and windows are overwritten."""
    reference = reference_named(name)
    prompts = reference.prompts(1, 20, 33, 64, 90)
    params = [
        SamplingParams(temperature=0 if index % 2 else 0.7, seed=index, max_tokens=40, ignore_eos=True, logprobs=1)
        for index in range(len(prompts))
    ]
    settings: dict[str, Any] = {"max_model_len": 160, "num_threads": 1, "kv_cache_memory": "8MiB"}
    with LLM(reference.folder, **settings) as llm:
        expected = [result(output.outputs[0]) for output in llm.generate(prompts, params)]
    with LLM(reference.folder, speculative_config=NGRAM, max_num_batched_tokens=19, **settings) as llm:
        for _ in range(2):  # the second time, prompts are in the prefix cache
            assert [result(output.outputs[0]) for output in llm.generate(prompts, params)] == expected
        speculation = scheduler_of(llm).speculation
        assert 0 < speculation.num_accepted_tokens < speculation.num_draft_tokens


def test_a_repetition_takes_few_steps(folder: str) -> None:
    """Where every draft is right, a step of n drafts gives n + 1 tokens."""
    params = SamplingParams(temperature=0, max_tokens=61, ignore_eos=True, logit_bias={30: 100.0})
    config = {"method": "ngram", "num_speculative_tokens": 4}
    with small_llm(folder, speculative_config=config) as llm:
        (output,) = llm.generate("the", params)
        assert output.outputs[0].token_ids == [30] * 61
        stats = llm.session.engine.replica_stats[0]
        # Three steps until a run of two tokens has occurred before, then steps of five tokens, and the rest.
        assert sum(stats.steps.num_steps_of_size) == 3 + 12
        assert (stats.speculation.num_drafts, stats.speculation.num_accepted_tokens) == (12, 46)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "oracle", "num_speculative_tokens": 2},
        {"method": "ngram", "num_speculative_tokens": 0},
        {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 5},
        {"method": "ngram", "num_speculative_tokens": 2, "draft_model": "x"},
        {"method": "ngram"},
    ],
)
def test_other_settings_are_refused(config: dict[str, Any], folder: str) -> None:
    with pytest.raises(SettingsError, match="speculative_config"):
        small_llm(folder, speculative_config=config)
