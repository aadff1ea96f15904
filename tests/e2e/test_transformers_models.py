"""Models that moeserve does not know give the tokens of transformers through transformers' own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import (
    SMALLEST_GAP,
    Reference,
    Shape,
    experts,
    heads,
    make_reference,
    rope,
    shape,
    sizes,
)

from moeserve import LLM, CheckpointError, SamplingParams, SettingsError
from moeserve.models import registry

NUM_TOKENS = 16
SHAPES: dict[str, Shape] = {
    # windows, layers without rotary embedding, gated outputs, a norm after each network, dense layers
    "afmoe": shape(
        "Afmoe",
        sizes(hidden=40, layers=4),
        heads(4, 2, 12),
        experts(6, 2, 20),
        rope(),
        num_shared_experts=1,
        sliding_window=8,
        seed=2,
    ),
}


@pytest.fixture(scope="module", params=SHAPES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp(request.param), SHAPES[request.param])


def clear_prompts(reference: Reference) -> list[list[int]]:
    """Return prompts whose continuations do not depend on the last bits of float32."""
    prompts = reference.prompts(17, 40, 25, 9)
    gaps = [reference.smallest_gap(prompt, reference.greedy(prompt, NUM_TOKENS)) for prompt in prompts]
    clear = [prompt for prompt, gap in zip(prompts, gaps, strict=True) if gap > SMALLEST_GAP]
    assert len(clear) >= 2
    return clear


def started(reference: Reference, **settings: Any) -> LLM:
    return LLM(str(reference.folder), dtype="float32", model_impl="transformers", kv_cache_memory="2MiB", **settings)


@pytest.mark.parametrize("num_batched_tokens", [7, 64])
def test_tokens_and_logprobs_are_those_of_transformers(reference: Reference, num_batched_tokens: int) -> None:
    """In chunks, in one batch, and once more with cached prefixes."""
    prompts = clear_prompts(reference)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1)
    with started(reference, max_num_batched_tokens=num_batched_tokens, block_size=16) as llm:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(given, params, use_tqdm=False), strict=True):
                exact = reference.greedy(prompt, NUM_TOKENS)
                assert output.outputs[0].token_ids == exact
                found = [
                    logprobs[token].logprob for logprobs, token in zip(output.outputs[0].logprobs, exact, strict=True)
                ]
                logits_TV = reference.logits(prompt + exact[:-1])[len(prompt) - 1 :]
                expected = logits_TV.log_softmax(-1).gather(1, torch.tensor(exact)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.ranks
def test_experts_are_spread_over_replicas(tmp_path: Path) -> None:
    """One replica has nothing to do for a while; then both have, and their experts compute the tokens of both."""
    reference = make_reference(tmp_path / "afmoe", SHAPES["afmoe"])
    prompts = clear_prompts(reference)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with started(reference, data_parallel_size=2) as llm:
        for group in (prompts[:1], prompts):
            given = [{"prompt_token_ids": prompt} for prompt in group]
            for prompt, output in zip(group, llm.generate(given, params, use_tqdm=False), strict=True):
                assert output.outputs[0].token_ids == reference.greedy(prompt, NUM_TOKENS)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("Jamba", "attention interface"),
        ("LongcatFlash", "cannot be traced"),
        ("Llama", "none of its layers has experts"),
    ],
)
def test_models_that_need_more_are_refused(tmp_path: Path, family: str, says: str) -> None:
    shape(family, sizes()).config().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=rf"config\.json: model_impl='transformers' does not support.*{says}"):
        registry.read_facts(tmp_path, "transformers")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quantization": "int8"}, "quantization='int8'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"load_format": "dummy"}, "load_format='dummy'"),
    ],
)
def test_settings_that_need_our_own_code_are_refused(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    SHAPES["afmoe"].config().save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match=says):
        LLM(str(tmp_path), model_impl="transformers", **settings)


def test_an_unknown_architecture_names_the_setting(tmp_path: Path) -> None:
    config = SHAPES["afmoe"].config()
    config.architectures = ["TomorrowForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"TomorrowForCausalLM.*model_impl='transformers'"):
        LLM(str(tmp_path))
