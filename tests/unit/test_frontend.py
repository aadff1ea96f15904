"""Prompts to requests, and updates to outputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logprob_rows import packed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moeserve.api.frontend import Frontend
from moeserve.api.prompts import pair_prompts
from moeserve.api.tokenizer import TextCodec
from moeserve.config.limits import LIMITS
from moeserve.errors import RequestError
from moeserve.models.checkpoint.tokenizer_files import LoadedTokenizer
from moeserve.outputs import Logprob, RequestOutput
from moeserve.protocol import AddRequest, PeerBlocks, Request, RequestUpdate, TokenLogprobs
from moeserve.sampling_params import SamplingParams

EOS = 256
VOCAB_SIZE = 258  # one more than the tokenizer knows


def byte_codec() -> TextCodec:
    """A tokenizer whose tokens are single bytes, in the order of the alphabet, and an end-of-sequence token."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    return TextCodec(LoadedTokenizer.from_transformers(make(tokenizer_object=tokenizer, eos_token="</s>")))


CODEC = byte_codec()


def new_frontend(codec: TextCodec | None = CODEC, *, max_model_len: int = 100, engine_seed: int = 0) -> Frontend:
    return Frontend(
        codec, vocab_size=VOCAB_SIZE, max_model_len=max_model_len, eos_token_ids=[EOS], engine_seed=engine_seed
    )


def requests_of(frontend: Frontend, prompts: Any, params: Any = None) -> list[Request]:
    submissions = frontend.register(frontend.encode(prompts, params or SamplingParams()))
    return [request for each in submissions for request in AddRequest(each.request, each.samples).requests]


def send(frontend: Frontend, request_id: str, text: str = "", **fields: Any) -> bool | None:
    """Apply an update. Return True if the engine must end the request, None if it has ended here before."""
    if frontend.prompt_of(request_id) is None:
        return None
    token_ids = fields.pop("token_ids", None) or (CODEC.encode(text) if text else [])
    return frontend.update(RequestUpdate(request_id=request_id, token_ids=token_ids, **fields))


def text_and_reasons(frontend: Frontend, prompt_id: str) -> tuple[str, str | None, int | str | None]:
    output = frontend.output(prompt_id).outputs[0]
    return output.text, output.finish_reason, output.stop_reason


# --- prompts to requests


def test_a_text_and_its_token_ids_make_the_same_request() -> None:
    token_ids = CODEC.encode("Hello")
    numpy_ids = [np.int64(token_id) for token_id in token_ids]
    forms = ["Hello", token_ids, tuple(numpy_ids), {"prompt": "Hello"}, {"prompt_token_ids": token_ids}]
    frontend = new_frontend()
    requests = requests_of(frontend, forms)
    assert [request.prompt_token_ids for request in requests] == [token_ids] * 5
    assert {type(token_id) for request in requests for token_id in request.prompt_token_ids} == {int}
    assert [request.request_id for request in requests] == ["0", "1", "2", "3", "4"]
    assert {request.cache_salt for request in requests} == {""}
    assert requests_of(frontend, {"prompt": "a", "cache_salt": "tenant"})[0].cache_salt == "tenant"
    assert [frontend.output(str(k)).prompt for k in range(5)] == ["Hello", None, None, "Hello", None]
    assert frontend.output("1").prompt_token_ids == token_ids


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("ab", 1),
        ({"prompt": "ab"}, 1),
        ([1, 2], 1),
        ([np.int64(1), 2], 1),
        ([[1, 2]], 1),
        (["a", [1], {"prompt": "b"}], 3),
        ([], 0),
    ],
)
def test_one_and_many_prompts_are_distinguished(prompts: Any, count: int) -> None:
    assert len(pair_prompts(prompts, SamplingParams())) == count
    assert len(requests_of(new_frontend(), prompts)) == count


def test_each_prompt_gets_its_own_sampling_parameters() -> None:
    both = [SamplingParams(max_tokens=3), SamplingParams(ignore_eos=True)]
    requests = requests_of(new_frontend(), ["a" * 99, "b"], both)  # the longest prompt leaves room for one token
    assert [request.params for request in requests] == [params.for_engine() for params in both]
    assert [request.eos_token_ids for request in requests] == [[EOS], []]
    with pytest.raises(RequestError, match="3 prompts came with 2 sampling_params"):
        pair_prompts(["a", "b", "c"], both)
    with pytest.raises(RequestError, match=r"is a float; pass SamplingParams"):
        pair_prompts("a", 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([[]], "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        (["a", ""], "prompt 1 is empty"),
        ([1, 2, 258, 999], "token 2 is 258, outside the vocabulary of 258; ids are 0 to 257"),
        ([1, -1], "token 1 is -1, outside"),
        ([1, True], "token 1 is True; token ids are integers"),
        ([1, 2.0], r"token 1 is 2\.0; token ids are integers"),
        ([[1, "a"]], "token 1 is 'a'"),
        ([1] * 100, "has 100 tokens, and max_model_len=100 leaves room for 99 .* raise max_model_len"),
        ("a" * 100, "has 100 tokens"),
        ({"promt": "a"}, "unknown key 'promt': did you mean 'prompt'"),
        ({"prompt": 5, "prompt_token_ids": [1]}, "prompt=5 must be a text"),
        ({"cache_salt": "a"}, "neither key"),
        ({"prompt": [1]}, r"prompt=\[1\] must be a text"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids='abc' must be a list"),
        ({"prompt_token_ids": 7}, "prompt_token_ids=7 must be a list"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt=7 must be a text"),
        (["a", 3.5], r"prompt 1=3\.5 \(float\) must be"),
        (None, r"prompts=None \(NoneType\) must be"),
        (b"abc", r"\(bytes\) must be"),
        ([b"abc", "a"], r"prompt 0=b'abc' \(bytes\) must be"),
        ("half \ud800", "surrogate"),
    ],
)
def test_a_bad_prompt_is_refused_by_name(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        new_frontend().encode(prompt, SamplingParams())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [3, 4]}, "stop_token_ids names token 4, outside the vocabulary of 4"),
        ({"logit_bias": {300: 1.0}}, "logit_bias names token 300"),
        ({"logprobs": 5}, "logprobs=5, but the vocabulary has only 4 tokens"),
        ({"prompt_logprobs": 5}, "prompt_logprobs=5, but the vocabulary has only 4 tokens"),
    ],
)
def test_sampling_parameters_outside_the_vocabulary_are_refused(params: dict[str, Any], message: str) -> None:
    frontend = Frontend(None, vocab_size=4, max_model_len=10, eos_token_ids=[], engine_seed=0)
    frontend.encode([1], SamplingParams(stop_token_ids=[3], logprobs=4, prompt_logprobs=4))
    with pytest.raises(RequestError, match=message):
        frontend.encode([1], SamplingParams(**params))


def test_without_a_tokenizer_only_token_ids_are_served() -> None:
    frontend = new_frontend(None)
    with pytest.raises(RequestError, match="prompt='Hello' is a text, but there is no tokenizer"):
        frontend.encode("Hello", SamplingParams())
    with pytest.raises(RequestError, match=r"stop=.*needs a text.*use stop_token_ids"):
        frontend.encode([1], SamplingParams(stop="a"))
    requests_of(frontend, [1], SamplingParams(logprobs=0))
    send(frontend, "0", token_ids=[7], logprobs=[TokenLogprobs([7], [-1.0], [1])], finish_reason="length")
    (output,) = frontend.output("0").outputs
    assert (output.text, output.token_ids) == ("", [7])
    assert output.logprobs == [{7: Logprob(-1.0, 1, None)}]


def test_a_bad_prompt_in_a_list_leaves_no_request_behind() -> None:
    frontend = new_frontend()
    with pytest.raises(RequestError):
        frontend.encode(["a", "b", ""], SamplingParams())
    with pytest.raises(RequestError):
        frontend.encode(["a", "b"], [SamplingParams(), SamplingParams(stop_token_ids=[999])])
    assert [submission.prompt_id for submission in frontend.register(frontend.encode("a", SamplingParams()))] == ["0"]
    assert send(frontend, "1", "x") is None


# --- seeds


def test_a_given_seed_is_used_for_the_first_output_and_derived_for_the_others() -> None:
    first, second, third = requests_of(new_frontend(), "a", SamplingParams(n=3, seed=7))
    assert first.seed == 7
    assert len({first.seed, second.seed, third.seed}) == 3
    again = requests_of(new_frontend(engine_seed=5), ["other", "a"], SamplingParams(n=3, seed=7))
    assert [request.seed for request in again] == [first.seed, second.seed, third.seed] * 2
    (negative,) = requests_of(new_frontend(), "a", SamplingParams(seed=-2))
    assert negative.seed == 2**64 - 2


def test_a_seed_of_minus_one_is_random_for_each_output_of_each_engine() -> None:
    prompts = [requests_of(new_frontend(), ["a", "a"], SamplingParams(n=2, seed=-1)) for _ in range(2)]
    seeds = [request.seed for requests in prompts for request in requests]
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("prompt", ["Hello", {"prompt_token_ids": CODEC.encode("Hello")}])
def test_truncated_prompts_keep_their_last_tokens(prompt: Any) -> None:
    def kept(number: int | None, max_model_len: int = 100) -> list[int]:
        frontend = new_frontend(max_model_len=max_model_len)
        (request,) = requests_of(frontend, prompt, SamplingParams(truncate_prompt_tokens=number))
        assert frontend.output("0").prompt_token_ids == request.prompt_token_ids
        return request.prompt_token_ids

    assert [kept(2), kept(5), kept(99), kept(None)] == [CODEC.encode("lo")] + [CODEC.encode("Hello")] * 3
    assert kept(-1, max_model_len=4) == CODEC.encode("llo")  # one token is left for the output
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        requests_of(new_frontend(), "x" * (LIMITS.max_text_length + 1), SamplingParams(truncate_prompt_tokens=1))


def test_outputs_that_are_not_detokenized_have_no_text() -> None:
    frontend = new_frontend()
    (request,) = requests_of(frontend, "a", SamplingParams(detokenize=False, logprobs=0))
    row = TokenLogprobs([65], [-0.5], [1])
    assert send(frontend, request.request_id, token_ids=[65], logprobs=[row], finish_reason="length") is False
    (output,) = frontend.output("0").outputs
    assert (output.text, output.token_ids, output.logprobs) == ("", [65], [{65: Logprob(-0.5, 1, None)}])


def test_numbers_of_log_probabilities_of_all_tokens_are_limited() -> None:
    (request,) = requests_of(new_frontend(), "a", SamplingParams(logprobs=-1, prompt_logprobs=-1))
    assert (request.params.logprobs, request.params.prompt_logprobs) == (VOCAB_SIZE, VOCAB_SIZE)
    most = LIMITS.max_logprobs_entries // (1 + VOCAB_SIZE)
    requests_of(new_frontend(), "a", SamplingParams(logprobs=-1, max_tokens=most // 2, n=2))
    with pytest.raises(RequestError, match="logprobs=-1"):
        requests_of(new_frontend(), "a", SamplingParams(logprobs=-1, max_tokens=most // 2 + 1, n=2))


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "trace_decode_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused_by_name(name: str) -> None:
    requests_of(new_frontend(), "a", SamplingParams(**{name: [VOCAB_SIZE - 1]}))
    with pytest.raises(RequestError, match=f"{name} names token {VOCAB_SIZE}"):
        requests_of(new_frontend(), "a", SamplingParams(**{name: [3, VOCAB_SIZE]}))


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="bad_words"):
        requests_of(new_frontend(None), [1], SamplingParams(bad_words=["a"]))
    (request,) = requests_of(new_frontend(), "a", SamplingParams(bad_words=["it", " it"]))
    assert request.params.bad_token_ids == (tuple(CODEC.encode("it")), tuple(CODEC.encode(" it")))


def test_without_a_seed_every_output_differs_and_the_engine_seed_decides() -> None:
    def seeds(engine_seed: int) -> list[int]:
        frontend = new_frontend(engine_seed=engine_seed)
        return [request.seed for request in requests_of(frontend, ["a", "a"], SamplingParams(n=2))]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 8
    assert all(0 <= seed < 2**64 for seed in seeds(1))


# --- updates to outputs


def test_an_output_grows_until_it_finishes() -> None:
    frontend = new_frontend()
    requests_of(frontend, "Hi")
    assert send(frontend, "0", "ab", num_cached_tokens=1) is False
    before = frontend.output("0")
    assert send(frontend, "0", "c", finish_reason="length") is False
    after = frontend.output("0")

    assert isinstance(after, RequestOutput)
    assert (before.outputs[0].text, before.outputs[0].finish_reason, before.finished) == ("ab", None, False)
    assert before.outputs[0].token_ids == CODEC.encode("ab")
    assert (after.outputs[0].text, after.outputs[0].finish_reason, after.finished) == ("abc", "length", True)
    assert after.outputs[0].token_ids == CODEC.encode("abc")
    assert (after.request_id, after.prompt, after.num_cached_tokens) == ("0", "Hi", 1)
    assert after.outputs[0].logprobs is None
    assert after.outputs[0].cumulative_logprob is None


def test_an_incomplete_character_is_released_at_the_end() -> None:
    frontend = new_frontend()
    requests_of(frontend, "Hi")
    smile = CODEC.encode("😀")
    send(frontend, "0", token_ids=smile[:3])
    assert frontend.output("0").outputs[0].text == ""
    send(frontend, "0", token_ids=[*smile[3:], smile[0]], finish_reason="length")
    assert frontend.output("0").outputs[0].text == "😀\ufffd"


@pytest.mark.parametrize(("token", "keep", "ending"), [(EOS, True, "</s>"), (EOS, False, ""), (0, True, "!")])
def test_the_token_that_ends_an_output_is_an_id_and_on_request_text(token: int, keep: bool, ending: str) -> None:
    frontend = new_frontend()
    params = SamplingParams(include_stop_str_in_output=keep, skip_special_tokens=False)
    requests_of(frontend, "Hi", params)
    reason = None if token == EOS else token
    news = send(frontend, "0", token_ids=[*CODEC.encode("ab"), token], finish_reason="stop", stop_reason=reason)
    assert news is False
    assert text_and_reasons(frontend, "0") == ("ab" + ending, "stop", reason)
    assert frontend.output("0").outputs[0].token_ids[-1] == token


def test_a_stop_string_ends_the_output_and_the_request() -> None:
    frontend = new_frontend()
    requests_of(frontend, "Hi", SamplingParams(stop=["END", "\n"], logprobs=0))
    logprobs = [TokenLogprobs([1], [-0.5], [1])] * 3
    send(frontend, "0", "abE", logprobs=logprobs)
    assert frontend.output("0").outputs[0].text == "ab"
    # Two more tokens came in the same step: they are dropped.
    assert send(frontend, "0", "NDxy", logprobs=[*logprobs, logprobs[0]]) is True
    assert text_and_reasons(frontend, "0") == ("ab", "stop", "END")
    (output,) = frontend.output("0").outputs
    assert output.token_ids == CODEC.encode("abEND")
    assert output.logprobs is not None
    assert len(output.logprobs) == 5
    assert output.cumulative_logprob == pytest.approx(-2.5)
    # The engine's answer to the abort, and a token that it had under way, change nothing.
    assert send(frontend, "0", "zz") is None
    assert send(frontend, "0", finish_reason="abort") is None
    assert text_and_reasons(frontend, "0") == ("ab", "stop", "END")


def test_the_beginning_of_a_stop_string_is_text_when_the_output_ends_otherwise() -> None:
    frontend = new_frontend()
    requests_of(frontend, "Hi", SamplingParams(stop="END"))
    send(frontend, "0", "abEN")
    assert frontend.output("0").outputs[0].text == "ab"
    send(frontend, "0", finish_reason="abort")
    assert text_and_reasons(frontend, "0") == ("abEN", "abort", None)


def test_the_outputs_of_one_prompt_gather_in_order() -> None:
    frontend = new_frontend()
    (submission,) = frontend.register(frontend.encode("Hi", SamplingParams(n=3, prompt_logprobs=1, stop="!")))
    assert submission.prompt_id == "0"
    requests = AddRequest(submission.request, submission.samples).requests
    assert [request.request_id for request in requests] == ["0-0", "0-1", "0-2"]
    assert [request.params.prompt_logprobs for request in requests] == [1, None, None]
    assert len({request.seed for request in requests}) == 3
    assert len({id(request.prompt_token_ids) for request in requests}) == 1  # one prompt in memory
    assert send(frontend, "0-2", "c", finish_reason="length", num_cached_tokens=1) is False
    assert send(frontend, "0-0", "a!", num_cached_tokens=0) is True
    assert send(frontend, "0-1", "b", finish_reason="stop", token_ids=[*CODEC.encode("b"), EOS]) is False
    result = frontend.output("0")
    assert [(output.index, output.text) for output in result.outputs] == [(0, "a"), (1, "b"), (2, "c")]
    assert result.finished
    assert result.num_cached_tokens == 0  # the first output's


def test_logprobs_name_the_chosen_token_first() -> None:
    frontend = new_frontend()
    requests_of(frontend, "Hi", SamplingParams(logprobs=2))
    a, b, space = CODEC.encode("ab ")
    logprobs = [
        TokenLogprobs([a, b, a], [-1.5, -0.5, -1.5], [2, 1, 3]),  # a tie: the rank of the chosen token counts
        TokenLogprobs([b, space], [-3.0, -0.25], [9, 1]),
    ]
    send(frontend, "0", "ab", logprobs=logprobs)
    (output,) = frontend.output("0").outputs
    assert output.logprobs == [
        {a: Logprob(-1.5, 2, "a"), b: Logprob(-0.5, 1, "b")},
        {b: Logprob(-3.0, 9, "b"), space: Logprob(-0.25, 1, " ")},
    ]
    assert [next(iter(position)) for position in output.logprobs] == [a, b]
    assert output.cumulative_logprob is not None
    assert math.isclose(output.cumulative_logprob, -4.5)


def test_prompt_logprobs_begin_with_none() -> None:
    frontend = new_frontend()
    requests_of(frontend, ["Hi", "H", "Hi"], [SamplingParams(prompt_logprobs=0)] * 2 + [SamplingParams()])
    i = CODEC.encode("i")[0]
    assert frontend.output("0").prompt_logprobs is None  # not known yet
    send(frontend, "0", "a", prompt_logprobs=packed([TokenLogprobs([i], [-2.0], [3])]))
    send(frontend, "0", "b")
    send(frontend, "1", "a")
    send(frontend, "2", "a")
    assert frontend.output("0").prompt_logprobs == [None, {i: Logprob(-2.0, 3, "i")}]
    assert frontend.output("1").prompt_logprobs == [None]
    assert frontend.output("2").prompt_logprobs is None


def test_a_discarded_prompt_takes_no_updates() -> None:
    frontend = new_frontend()
    frontend.register(frontend.encode(["a", "b"], SamplingParams(n=2)))
    send(frontend, "0-1", "x", finish_reason="length")
    assert frontend.unfinished("0") == ["0-0"]
    frontend.discard("0")
    assert frontend.unfinished("0") == []
    assert send(frontend, "0-0", "y") is None
    assert send(frontend, "1-0", "y") is False
    with pytest.raises(KeyError):
        frontend.output("0")


@given(
    text=st.text("abé😀\n", max_size=30),
    stop=st.lists(st.text("abé😀\n", min_size=1, max_size=3), max_size=2),
    sizes=st.lists(st.integers(1, 4), max_size=60),
)
@settings(max_examples=200)
def test_outputs_do_not_depend_on_how_tokens_are_divided_into_updates(
    text: str, stop: list[str], sizes: list[int]
) -> None:
    token_ids = CODEC.encode(text) if text else []
    results = []
    for divided in (sizes, [len(token_ids)]):
        frontend = new_frontend()
        requests_of(frontend, "Hi", SamplingParams(stop=stop, max_tokens=None))
        rest, so_far = token_ids, ""
        for size in divided:
            if frontend.prompt_of("0") is not None:
                frontend.update(RequestUpdate(request_id="0", token_ids=rest[:size]))
                rest = rest[size:]
                now = frontend.output("0").outputs[0].text
                assert now.startswith(so_far)
                so_far = now
        if frontend.prompt_of("0") is not None:
            frontend.update(RequestUpdate(request_id="0", token_ids=rest, finish_reason="length"))
        results.append(frontend.output("0"))
    assert results[0] == results[1]
    assert results[0].finished
    cut = min((text.index(part) for part in stop if part in text), default=len(text))
    assert results[0].outputs[0].text.startswith(text[:cut])


BLOCKS = {"do_remote_prefill": True, "remote_handle": "ab12", "remote_addresses": ["[::1]:5", "h:6"]}
KEPT = PeerBlocks(handle="ab12", addresses=["[::1]:5", "h:6"], num_blocks=2)


def exchanging_frontend(**settings: Any) -> Frontend:
    return Frontend(CODEC, vocab_size=300, max_model_len=100, eos_token_ids=[7], engine_seed=0, **settings)


def test_a_prompt_for_another_engine_ends_after_one_token_and_names_its_blocks() -> None:
    frontend = exchanging_frontend(kv_block_size=4)
    params = SamplingParams(
        n=3, max_tokens=50, min_tokens=9, stop="x", logprobs=2, kv_transfer_params={"do_remote_decode": True}
    )
    first, second = (requests_of(frontend, [1] * 9, params)[0] for _ in range(2))
    assert (first.params.max_tokens, first.params.min_tokens, first.params.logprobs) == (1, 0, None)
    assert first.kv_source is None
    assert len({first.kv_handle, second.kv_handle, ""}) == 3
    assert frontend.num_requests == 2  # `n` is that of the other engine
    send(frontend, first.request_id, "x", finish_reason="length", kv_blocks=KEPT)
    assert frontend.output("0").kv_transfer_params == {**BLOCKS, "remote_num_blocks": 2}
    assert frontend.output("1").kv_transfer_params is None


def test_the_output_of_one_engine_names_the_blocks_that_another_loads() -> None:
    frontend = exchanging_frontend(kv_block_size=4)
    params = SamplingParams(n=2, max_tokens=50, kv_transfer_params={**BLOCKS, "remote_num_blocks": 2})
    [submission] = frontend.register(frontend.encode([1] * 9, params))
    assert submission.request.kv_source == KEPT
    assert submission.request.kv_handle == ""
    assert (len(submission.samples), submission.request.params.max_tokens) == (1, 50)
    params.prompt_logprobs = 1  # which need the whole prompt
    assert requests_of(frontend, [1] * 9, params)[0].kv_source == KEPT  # of which the engine sets the blocks free


@pytest.mark.parametrize("block_size", [None, 5])
def test_blocks_that_cannot_be_of_the_prompt_are_refused(block_size: int | None) -> None:
    frontend = exchanging_frontend(kv_block_size=block_size)
    params = SamplingParams(kv_transfer_params={**BLOCKS, "remote_num_blocks": 2})
    with pytest.raises(
        RequestError, match="kv_transfer_address" if block_size is None else "remote_num_blocks=2"
    ) as error:
        frontend.encode([1] * 9, params)
    assert error.value.parameter == "kv_transfer_params"
    assert not frontend.unfinished_prompts
