"""Calls that programs written for vLLM make, with the name of the package changed."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_model import save_tiny_model
from tqdm import tqdm

from moeserve import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    MoeserveError,
    RequestError,
    SamplingParams,
    SettingsError,
    TextPrompt,
    TokensPrompt,
    UnsupportedError,
)

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = "Hello, my name is"
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory": "16MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, **SETTINGS) as llm:
        yield llm


def token_ids_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# --- prompts and parameters


def test_every_form_of_a_prompt_is_the_same_prompt(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    ids = expected.prompt_token_ids
    many: list[Any] = [
        [PROMPT],
        (PROMPT for _ in range(1)),
        map(str, [PROMPT]),
        iter([PROMPT]),
        np.array([PROMPT]),
        ids,
        [ids],
        np.array(ids),
        np.array([ids]),
        torch.tensor(ids),
        [torch.tensor(ids)],
        [np.array(ids, np.uint16)],
        TextPrompt(prompt=PROMPT),
        TokensPrompt(prompt_token_ids=ids),
        [TokensPrompt(prompt_token_ids=ids, prompt=PROMPT)],
        {"prompt_token_ids": torch.tensor(ids), "multi_modal_data": None},
    ]
    for prompts in many:
        (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == ids, prompts
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert llm.generate([TokensPrompt(prompt_token_ids=ids, prompt="named")], GREEDY)[0].prompt == "named"
    for old_form in (ids, [ids]):
        assert token_ids_of(llm.generate(prompt_token_ids=old_form, sampling_params=GREEDY)) == token_ids_of([expected])
    as_dict = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    assert token_ids_of(llm.generate([PROMPT] * 2, [as_dict, GREEDY])) == token_ids_of([expected]) * 2


@pytest.mark.parametrize(
    "prompts",
    [{"a"}, 5, b"ab", torch.tensor([0.5]), np.zeros((1, 0), np.int64),
     {"prompt": "a", "multi_modal_data": {"image": 1}}, [TokensPrompt(prompt_token_ids=[264])]],
    ids=str,
)  # fmt: skip
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts, GREEDY)


@pytest.mark.parametrize(
    "arguments", [{"priority": [1]}, {"lora_request": "one"}, {"tokenization_kwargs": {"truncation": True}}], ids=str
)
def test_unsupported_arguments_are_refused_by_name(llm: LLM, arguments: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(arguments))):
        llm.generate([PROMPT], GREEDY, **arguments)
    harmless = {"priority": [0], "lora_request": None, "tokenization_kwargs": {}}
    assert len(llm.generate([PROMPT], GREEDY, use_tqdm=lambda *given, **named: tqdm(*given, **named), **harmless)) == 1
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.generate([PROMPT], GREEDY, prompt_token_ids=[1])


def test_arguments_of_chat_are_accepted_with_values_that_change_nothing(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Say hi"}]
    harmless = {"chat_template_content_format": "auto", "tokenization_kwargs": None, "mm_processor_kwargs": {}}
    assert token_ids_of(llm.chat(messages, GREEDY, **harmless)) == token_ids_of(llm.chat(messages, GREEDY))
    for name, value in {**{key: {"a": 1} for key in harmless}, "lora_request": "one"}.items():
        with pytest.raises(RequestError, match=name):
            llm.chat(messages, GREEDY, **{name: value})


def test_outputs_have_the_fields_of_vllm(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    fields = (output.metrics, output.lora_request, output.encoder_prompt, output.outputs[0].lora_request)
    assert fields == (None,) * 4
    assert output.outputs[0].finished()
    assert not next(llm.stream(PROMPT, GREEDY)).outputs[0].finished()


def test_refused_methods_say_what_to_do(llm: LLM) -> None:
    names = [
        "collective_rpc",
        "apply_model",
        "encode",
        "embed",
        "classify",
        "set_tokenizer",
    ]
    for name in names:
        with pytest.raises(UnsupportedError, match=rf"LLM\.{name} is not supported: "):
            getattr(llm, name)("x")
        assert not hasattr(llm, name)  # programs that look for it find another way
    with pytest.raises(AttributeError) as unknown:
        llm.genrate  # type: ignore[attr-defined]  # noqa: B018
    assert not isinstance(unknown.value, MoeserveError)
    with pytest.raises(UnsupportedError, match="LLMEngine"):
        llm.llm_engine.collective_rpc("x")  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"model_config .*config\.schedule\.max_model_len"):
        llm.llm_engine.model_config  # type: ignore[attr-defined]  # noqa: B018


# --- methods of LLM


@pytest.mark.parametrize(("width", "num_tokens"), [(1, 8), (3, 8), (5, 4)])
def test_beam_search_finds_what_transformers_finds(llm: LLM, folder: str, width: int, num_tokens: int) -> None:
    """Without lengths in scores, and without an end, so that both have the same rules."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [PROMPT, {"prompt_token_ids": [5, 6, 7]}]
    params = BeamSearchParams(beam_width=width, max_tokens=num_tokens, ignore_eos=True, length_penalty=0.0)
    for prompt, found in zip(prompts, llm.beam_search(prompts, params), strict=True):
        ids = torch.tensor([llm.codec.encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, do_sample=False,
            max_new_tokens=num_tokens, min_new_tokens=num_tokens, length_penalty=0.0, pad_token_id=0,
            output_scores=True, return_dict_in_generate=True, bad_words_ids=None, eos_token_id=None,
        )  # fmt: skip
        assert [sequence.tokens for sequence in found.sequences] == expected.sequences.tolist()
        if width > 1:
            scores = [sequence.cum_logprob for sequence in found.sequences]
            assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        assert found.sequences[0].text == llm.codec.decode(found.sequences[0].tokens)


def test_beam_search_of_all_candidates_finds_the_best_sequence(folder: str) -> None:
    """With as many candidates as there are, beam search is exhaustive: the best of all ended and full sequences."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width, penalty = 32, 0.7
    with LLM(folder, **SETTINGS) as llm, torch.no_grad():
        prompt = llm.codec.encode(PROMPT)
        params = BeamSearchParams(beam_width=width, max_tokens=1, length_penalty=penalty)
        first = reference(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)
        (found,) = llm.beam_search([PROMPT], params)
        end = llm.get_tokenizer().eos_token_id
    scores = {token: float(first[token]) / (len(prompt) + (token != end)) ** penalty for token in range(264)}
    best = sorted(scores, key=scores.__getitem__, reverse=True)
    assert [sequence.tokens[-1] for sequence in found.sequences] == best[:width]
    assert {sequence.finish_reason for sequence in found.sequences if sequence.tokens[-1] == end} <= {"stop"}
    for wrong in (
        {"beam_width": 0, "max_tokens": 1},
        {"beam_width": 2, "max_tokens": 0},
        {"beam_width": 99, "max_tokens": 1},
    ):
        with pytest.raises(RequestError):
            BeamSearchParams(**wrong)


def test_after_a_reset_no_cached_prefix_is_used(llm: LLM) -> None:
    prompt = "A table of thirty rows. " * 4
    numbers = []
    for resets in (False, False, True, False):
        if resets:
            assert llm.reset_prefix_cache()
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        numbers.append(output.num_cached_tokens)
    assert numbers[0] == numbers[2] == 0
    assert numbers[1] == numbers[3] > 0


def test_metrics_count_requests_and_tokens(folder: str) -> None:
    from moeserve.v1.metrics.reader import Counter, Gauge, Histogram, Vector

    drafting = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(folder, speculative_config=drafting, disable_log_stats=False, **SETTINGS) as llm:
        outputs = llm.generate([PROMPT] * 3, GREEDY, use_tqdm=False)
        metrics = {metric.name: metric for metric in llm.get_metrics()}
    kinds = {type(metric) for metric in metrics.values()}
    assert kinds == {Counter, Gauge, Histogram, Vector}
    prompts, generated = metrics["moeserve:prompt_tokens"], metrics["moeserve:generation_tokens"]
    assert isinstance(prompts, Counter)
    assert isinstance(generated, Counter)
    assert prompts.value == sum(len(output.prompt_token_ids) for output in outputs)
    assert generated.value == 18
    lengths = metrics["moeserve:request_prompt_tokens"]
    assert isinstance(lengths, Histogram)
    assert (lengths.count, lengths.sum, lengths.buckets["+Inf"]) == (3, prompts.value, 3)
    drafts, per_position = (
        metrics["moeserve:spec_decode_num_drafts"],
        metrics["moeserve:spec_decode_num_accepted_tokens_per_pos"],
    )
    assert isinstance(drafts, Counter)
    assert isinstance(per_position, Vector)
    assert len(per_position.values) <= 3


def test_a_final_message_is_continued(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Say hi"}, {"role": "assistant", "content": "Hi th"}]
    (output,) = llm.chat(messages, GREEDY, False, continue_final_message=True, add_generation_prompt=False)
    assert llm.codec is not None
    assert llm.codec.decode(output.prompt_token_ids, skip_special_tokens=False).endswith("assistant: Hi th")


def test_a_random_seed_is_logged_and_repeats_the_output(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def sampled(seed: int | None) -> tuple[int, list[list[int]]]:
        with LLM(folder, seed=seed, **SETTINGS) as llm:
            return llm.config.weights.seed, token_ids_of(llm.generate([PROMPT], params, use_tqdm=False))

    (first_seed, first), (second_seed, second) = sampled(None), sampled(None)
    assert first_seed != second_seed
    assert first != second
    assert f"seed={first_seed}" in caplog.text
    assert sampled(first_seed) == (first_seed, first)


def test_default_parameters_may_come_from_the_call(folder: str, tmp_path: Path) -> None:
    (Path(folder) / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 7}))
    try:
        for settings, expected in [
            ({}, (0.5, 7)),
            ({"generation_config": "vllm"}, (1.0, 0)),
            ({"override_generation_config": {"temperature": 0}}, (0, 7)),
        ]:
            with LLM(folder, **SETTINGS, **settings) as llm:
                params = llm.get_default_sampling_params()
            assert (params.temperature, params.top_k) == expected
        with pytest.raises(SettingsError, match="override_generation_config"):
            LLM(folder, **SETTINGS, override_generation_config={"temperature": -1})
    finally:
        (Path(folder) / "generation_config.json").unlink()


def test_a_profile_is_a_trace_of_torchs_operations(folder: str, tmp_path: Path) -> None:
    from moeserve.config import ProfilerConfig

    traces = ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path / "traces"))
    with LLM(folder, **SETTINGS, enforce_eager=True, profiler_config=traces) as llm:
        llm.start_profile()
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
        llm.stop_profile()
        llm.stop_profile()
    (path,) = (tmp_path / "traces").iterdir()
    events = json.loads(path.read_text())["traceEvents"]
    assert any(str(event.get("name")).startswith("aten::") for event in events)
    with LLM(folder, **SETTINGS) as llm, pytest.raises(SettingsError, match="profiler_config"):
        llm.start_profile()


# --- LLMEngine and EngineArgs


def test_an_engine_is_stepped_by_its_caller(folder: str, llm: LLM) -> None:
    """As in the example of vLLM for its LLMEngine, with the flags of a program."""
    from moeserve.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--log-level")  # of the program, not of the engine
    args = parser.parse_args(
        ["--model", folder, "--dtype=float32", "--max_model_len", "256", "--kv-cache-memory", "16MiB"]
    )
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    requests = [
        (PROMPT, SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=6, ignore_eos=True)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    num_started, num_steps, finished = 0, 0, {}
    while requests or engine.has_unfinished_requests():
        if requests:
            engine.add_request(str(num_started), *requests.pop(0))
            num_started += 1
        if num_steps == 2:
            engine.reset_prefix_cache(reset_running_requests=True)
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        num_steps += 1
    assert sorted(finished) == ["0", "1", "2"]
    assert [len(output.outputs) for output in finished.values()].count(2) == 1
    assert token_ids_of([finished["0"]]) == token_ids_of(llm.generate(PROMPT, GREEDY, use_tqdm=False))
    assert engine.step() == []
    with pytest.raises(RequestError, match="priority=3"):
        engine.add_request("3", PROMPT, GREEDY, priority=3)
    with pytest.raises(RequestError):
        engine.add_request("3", [264], GREEDY)
    engine.add_request("kept", PROMPT, GREEDY)
    engine.add_request("aborted", PROMPT, {"max_tokens": 200})
    with pytest.raises(RequestError, match="'kept'"):
        engine.add_request("kept", PROMPT, GREEDY)
    engine.abort_request(["aborted", "unknown"])
    assert engine.get_num_unfinished_requests() == 1
    seen = set()
    while engine.has_unfinished_requests():
        seen.update(output.request_id for output in engine.step())
    assert seen == {"kept"}
    engine.shutdown()


def test_the_engine_of_an_llm_shares_its_steps(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("mine", PROMPT, GREEDY)
    (other,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.request_id for output in outputs][-1] == "mine"
    assert token_ids_of(outputs[-1:]) == token_ids_of([other])


def test_engine_args_are_the_arguments_of_an_llm(folder: str) -> None:
    engine_args = EngineArgs(model=folder, **SETTINGS, enable_lora=False, seed=7)
    assert engine_args.tensor_parallel_size == 1
    assert EngineArgs.from_cli_args(argparse.Namespace(model=folder, seed=7, **SETTINGS, other=5)) == engine_args
    with LLM(**dataclasses.asdict(engine_args)) as llm:
        assert (llm.config.weights.seed, llm.config.weights.dtype, llm.config.schedule.max_model_len) == (
            7,
            "float32",
            256,
        )
    with LLM.from_engine_args(dataclasses.replace(engine_args, seed=8)) as llm:
        assert llm.config.weights.seed == 8
    with pytest.raises(SettingsError, match="tensor_parallel_siz"):
        EngineArgs(model=folder, tensor_parallel_siz=2)


# --- AsyncLLM


def test_an_async_llm_is_used_as_in_vllm(folder: str, llm: LLM) -> None:
    expected = token_ids_of(llm.generate([PROMPT], GREEDY, use_tqdm=False))
    messages = [{"role": "user", "content": "Hi"}]
    answer = token_ids_of(llm.chat(messages, GREEDY, use_tqdm=False))

    async def use() -> AsyncLLM:
        async with AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=folder, **SETTINGS), start_engine_loop=True
        ) as engine:
            assert "AsyncLLM(" in repr(engine)
            assert "running" in repr(engine)
            async for output in engine.generate(request_id="a", prompt=PROMPT, sampling_params=GREEDY, priority=0):
                assert output.request_id == "a"
            assert token_ids_of([output]) == expected
            async for output in engine.chat(messages, {"temperature": 0, "max_tokens": 6, "ignore_eos": True}, "b"):
                assert output.request_id == "b"
            assert token_ids_of([output]) == answer
            assert await engine.reset_prefix_cache()
            await engine.abort(["b", "c"])
            with pytest.raises(UnsupportedError, match=r"AsyncLLM\.encode"):
                await engine.encode()  # type: ignore[attr-defined]
            with pytest.raises(RequestError, match="rl=True"):
                await engine.sleep()
            with pytest.raises(RequestError, match="lora_request"):
                async for _ in engine.generate(PROMPT, GREEDY, lora_request=object()):
                    pass
        return engine

    engine = asyncio.run(use())
    assert not engine.is_running
    assert "shut down" in repr(engine)
    assert AsyncLLMEngine is AsyncLLM


def test_modules_have_the_names_of_vllms(llm: LLM) -> None:
    from moeserve.distributed import cleanup_dist_env_and_memory
    from moeserve.engine.arg_utils import AsyncEngineArgs as SameArgs
    from moeserve.inputs import TokensPrompt as SamePrompt
    from moeserve.platforms import current_platform
    from moeserve.sampling_params import BeamSearchParams as SameBeams
    from moeserve.sampling_params import GuidedDecodingParams, StructuredOutputsParams
    from moeserve.utils import FlexibleArgumentParser, get_open_port
    from moeserve.v1.engine.async_llm import AsyncLLM as SameLLM

    assert (SameArgs, SamePrompt, SameBeams, SameLLM) == (AsyncEngineArgs, TokensPrompt, BeamSearchParams, AsyncLLM)
    assert GuidedDecodingParams is StructuredOutputsParams
    assert issubclass(FlexibleArgumentParser, argparse.ArgumentParser)
    assert 0 < get_open_port() < 2**16
    assert current_platform.device_type == llm.config.compute.device
    assert current_platform.is_cpu()
    assert not any(getattr(current_platform, f"is_{other}")() for other in ("cuda", "cuda_alike", "rocm"))
    cleanup_dist_env_and_memory()
