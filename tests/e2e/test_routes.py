"""Outputs have the experts of all their tokens, and scores may be given the experts to use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_models import Reference
from test_draft_layers import MTP, with_right_modules

from moeserve import LLM, AsyncLLM, RequestError, SamplingParams, SettingsError
from moeserve.outputs import RequestOutput

NAMES = ["qwen3-moe", "deepseek-v3-four-heads", "qwen3-next"]
LENGTHS, NUM_TOKENS = (41, 5, 20, 70), 11
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
SETTINGS: dict[str, Any] = dict(
    max_model_len=96,
    kv_cache_memory="8MiB",
    block_size=4,
    num_threads=1,
    dtype="float32",
    enable_return_routed_experts=True,
    show_progress=False,
)
LAYOUTS = {
    "one": {},
    "eager": dict(enforce_eager=True),
    "chunks": dict(max_num_batched_tokens=7, max_num_seqs=3),
    "ngram": dict(speculative_config=NGRAM),
    "tp": dict(tensor_parallel_size=2),
    "dp": dict(data_parallel_size=2),
    "pp": dict(pipeline_parallel_size=2),
    "tp-dp-pp": dict(tensor_parallel_size=2, data_parallel_size=2, pipeline_parallel_size=2, debug_rank_state=True),
}


@pytest.fixture(scope="module")
def cases(reference_named: Callable[[str], Reference]) -> Callable[[str], tuple[Reference, list[list[int]]]]:
    """Return a reference with prompts of which two begin alike, and whose experts do not depend on rounding."""
    made: dict[str, list[list[int]]] = {}

    def named(name: str) -> tuple[Reference, list[list[int]]]:
        reference = reference_named(name)
        if name not in made:
            made[name] = reference.clear_prompts(LENGTHS, NUM_TOKENS, beginning=reference.prompts(17, seed=9)[0])
        return reference, made[name]

    return named


def run(llm: LLM, prompts: list[list[int]], **params: Any) -> list[RequestOutput]:
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **params)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)


def require_routes(output: RequestOutput, reference: Reference) -> None:
    """Compare the experts of all outputs with those of transformers' routers."""
    config = reference.model.config
    for made in output.outputs:
        sequence = [*output.prompt_token_ids, *made.token_ids]
        routes_TLK = made.routed_experts
        assert routes_TLK is not None
        assert routes_TLK.dtype == np.uint8
        expected_TLK = reference.routes(sequence[:-1])
        assert routes_TLK.shape == (len(sequence) - 1, config.num_hidden_layers, expected_TLK.shape[-1])
        is_sparse = routes_TLK.any(axis=(0, 2))
        assert is_sparse.sum() == expected_TLK.shape[1]
        own_TLK = torch.from_numpy(routes_TLK[:, is_sparse].astype(np.int64))
        assert torch.equal(own_TLK.sort(-1).values, expected_TLK.sort(-1).values)


@pytest.mark.ranks
@pytest.mark.slow_but("qwen3-moe-tp-dp-pp", "deepseek-v3-four-heads-ngram", "qwen3-next-chunks", "qwen3-moe-one")
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", NAMES)
def test_routes_are_those_of_transformers(
    name: str, layout: str, cases: Callable[[str], tuple[Reference, list[list[int]]]]
) -> None:
    """Also of prompts that were cached, and of several outputs of a prompt."""
    reference, prompts = cases(name)
    with LLM(str(reference.folder), **SETTINGS, **LAYOUTS[layout]) as llm:
        for _ in range(3):
            outputs = run(llm, prompts, n=2)
            for output in outputs:
                require_routes(output, reference)
        assert sum(output.num_cached_tokens for output in outputs) > 0
        if "speculative_config" in LAYOUTS[layout]:
            assert llm.session.engine.replica_stats[0].speculation.num_drafts > 0


@pytest.mark.parametrize("name", NAMES)
def test_preempted_requests_have_all_routes(
    name: str, cases: Callable[[str], tuple[Reference, list[list[int]]]]
) -> None:
    reference, prompts = cases(name)
    with LLM(str(reference.folder), **SETTINGS | dict(kv_cache_memory="48KiB")) as llm:
        for output in run(llm, prompts, n=4):
            require_routes(output, reference)
        assert llm.session.engine.replica_stats[0].num_preemptions > 0


def test_accepted_drafts_have_routes(reference_named: Callable[[str], Reference], tmp_path: Path) -> None:
    """The modules that draft have experts too, which are not returned."""
    reference = reference_named("deepseek-v3")
    with_right_modules(reference, tmp_path, others=0.3)
    prompts = reference.prompts(20, 9)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected = run(llm, prompts)
    with LLM(str(tmp_path), **SETTINGS, speculative_config=MTP) as llm:
        for output, other in zip(run(llm, prompts), expected, strict=True):
            assert output.outputs == other.outputs
            found = output.outputs[0].routed_experts
            assert found is not None
            assert np.array_equal(found, other.outputs[0].routed_experts)  # type: ignore[arg-type]
        assert llm.session.engine.replica_stats[0].speculation.num_accepted_tokens > 0


def test_streams_stops_and_late_starts(cases: Callable[[str], tuple[Reference, list[list[int]]]]) -> None:
    """The last part of an output has its routes, without the first tokens of the prompt if the request says so."""
    reference, prompts = cases("qwen3-moe")
    prompt = prompts[0]
    whole = reference.routes([*prompt, *reference.greedy(prompt, NUM_TOKENS)])

    async def stream() -> list[RequestOutput]:
        llm = AsyncLLM(str(reference.folder), **SETTINGS)
        try:
            params = SamplingParams(
                temperature=0,
                max_tokens=NUM_TOKENS,
                routed_experts_prompt_start=len(prompt) - 1,
                stop_token_ids=reference.greedy(prompt, NUM_TOKENS)[5:6],
            )
            return [output async for output in llm.generate({"prompt_token_ids": prompt}, params)]
        finally:
            llm.shutdown()

    *others, last = asyncio.run(stream())
    assert all(output.outputs[0].routed_experts is None for output in others)
    found = last.outputs[0].routed_experts
    assert found is not None
    num_tokens = len(last.outputs[0].token_ids)
    assert num_tokens < NUM_TOKENS
    expected = whole[len(prompt) - 1 : len(prompt) + num_tokens - 1]
    assert np.array_equal(np.sort(found[:, [0, 2]], -1), expected.sort(-1).values.numpy())


@pytest.mark.ranks
@pytest.mark.slow_but("qwen3-moe-one", "deepseek-v3-four-heads-pp", "qwen3-next-chunks")
@pytest.mark.parametrize("layout", ["one", "chunks", "tp", "pp"])
@pytest.mark.parametrize("name", NAMES)
def test_replayed_routes(name: str, layout: str, cases: Callable[[str], tuple[Reference, list[list[int]]]]) -> None:
    """Those of the engine change no byte of a score. Others give the scores of transformers with these experts."""
    reference, prompts = cases(name)
    with LLM(str(reference.folder), **SETTINGS | LAYOUTS[layout]) as llm:
        outputs = run(llm, prompts)
        sequences = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        lengths = [*map(len, prompts)]
        own = [output.outputs[0].routed_experts for output in outputs]
        free = llm.score(sequences, lengths, use_tqdm=False)
        assert llm.score(sequences, lengths, routed_experts=own, use_tqdm=False) == free

        generator = np.random.default_rng(3)
        foreign = [
            generator.permuted(np.tile(np.arange(9), (*routes.shape[:2], 1)), axis=-1)[..., : routes.shape[2]]
            for routes in own
            if routes is not None
        ]
        is_sparse = np.any(own[0], axis=(0, 2))  # type: ignore[arg-type]
        mixed = [foreign[0], None, foreign[2], own[3]]
        scores = llm.score(sequences, lengths, routed_experts=mixed, use_tqdm=False)
        assert [scores[1], scores[3]] == [free[1], free[3]]
        for place in (0, 2):
            score, sequence, length = scores[place], sequences[place], lengths[place]
            given = foreign[place] * is_sparse[:, None]
            assert np.array_equal(score.routed_experts, given)  # type: ignore[arg-type]
            logits = reference.logits_of_routes(sequence[:-1], torch.from_numpy(given[:, is_sparse]))
            logprobs_TV = logits.double().log_softmax(-1)[length - 1 :]
            expected = logprobs_TV.gather(1, torch.tensor(score.token_ids)[:, None])[:, 0]
            assert score.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
            assert free[place].logprobs != pytest.approx(score.logprobs, abs=1e-2)
        again = run(llm, prompts)  # finds no keys and values of forced experts
        assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in outputs]


def test_what_is_refused(cases: Callable[[str], tuple[Reference, list[list[int]]]]) -> None:
    reference, prompts = cases("qwen3-moe")
    sequence = prompts[1]
    shape = len(sequence) - 1, 3, 4
    right = np.tile(np.arange(4), (*shape[:2], 1))
    wrong: list[tuple[object, str]] = [
        (right[1:], r"\[4, 3, 4\]"),
        (right.astype(np.float32), "float32"),
        (right - 1, "expert -1"),
        (right + 6, "expert 9"),
        (right * 0, "twice"),
        ([[1], [2, 3]], "shape"),
        ("text", "shape"),
    ]
    with LLM(str(reference.folder), **SETTINGS) as llm:
        llm.score([sequence], 1, routed_experts=[right], use_tqdm=False)
        for routes, words in wrong:
            with pytest.raises(RequestError, match=words) as error:
                llm.score([sequence], 1, routed_experts=[routes], use_tqdm=False)
            assert error.value.parameter == "routed_experts"
        with pytest.raises(RequestError, match="routed_experts_prompt_start=5"):
            run(llm, [sequence], routed_experts_prompt_start=5)
        with pytest.raises(RequestError, match="2 routed_experts"):
            llm.score([sequence], 1, routed_experts=[right, right], use_tqdm=False)
    with LLM(str(reference.folder), **SETTINGS | dict(enable_return_routed_experts=False)) as llm:
        assert run(llm, [sequence])[0].outputs[0].routed_experts is None
        with pytest.raises(RequestError, match="enable_return_routed_experts"):
            llm.score([sequence], 1, routed_experts=[right], use_tqdm=False)
    overlap: dict[str, Any] = dict(data_parallel_size=2, overlap_decode_tokens=8)
    with pytest.raises(SettingsError, match="overlap_decode_tokens"):
        LLM(str(reference.folder), **SETTINGS, **overlap)


def test_forced_routes_stay_in_their_request(cases: Callable[[str], tuple[Reference, list[list[int]]]]) -> None:
    """Later requests find no keys and values of other experts, and captured steps do not lose forced ones."""
    reference, prompts = cases("qwen3-moe")
    prompt = prompts[0]
    with LLM(str(reference.folder), **SETTINGS) as llm:
        (expected,) = run(llm, [prompt])
        short = expected.prompt_token_ids[:2]
        (free,) = llm.score([short], 1, use_tqdm=False)
    with LLM(str(reference.folder), **SETTINGS) as llm:
        foreign = np.tile([8, 2, 5, 1], (len(prompt) - 1, 3, 1))
        llm.score([prompt], 1, routed_experts=[foreign], use_tqdm=False)
        (output,) = run(llm, [prompt])
        assert output.num_cached_tokens == 0
        assert output.outputs == expected.outputs
        for _ in range(3):
            (score,) = llm.score([short], 1, routed_experts=[foreign[:1]], use_tqdm=False)
            assert score.routed_experts is not None
            assert score.routed_experts[0, 0].tolist() == [8, 2, 5, 1]
            assert score.logprobs != free.logprobs
