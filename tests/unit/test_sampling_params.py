"""Sampling parameters: values that are refused, assignment, and the messages that carry them."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from moeserve.config.limits import LIMITS
from moeserve.errors import RequestError
from moeserve.protocol import CacheChanges, CacheStart, Registration, Request, StepPlan
from moeserve.sampling_params import GuidedDecodingParams, RequestParams, SamplingParams
from moeserve.structured_outputs import OutputGrammar, StructuredOutputsParams

EVERYTHING = SamplingParams(
    n=3,
    temperature=0.25,
    top_p=0.5,
    top_k=7,
    min_p=0.125,
    seed=2**64 - 1,
    max_tokens=100,
    min_tokens=5,
    stop=["end", "ünd"],
    stop_token_ids=[4, 5],
    include_stop_str_in_output=True,
    ignore_eos=True,
    skip_special_tokens=False,
    logprobs=2,
    prompt_logprobs=0,
    logit_bias={1: -100.0, 70_000: 2.5},
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.5,
    structured_outputs=StructuredOutputsParams(regex="a|b"),
)


def test_defaults_of_parameters_are_those_of_requests() -> None:
    assert SamplingParams().for_engine() == RequestParams()
    assert (SamplingParams().max_tokens, SamplingParams().temperature) == (16, 1.0)  # as in vLLM
    assert SamplingParams().stop_token_ids is not SamplingParams().stop_token_ids


# Values that are refused, and values at the bounds that are accepted.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([0, -1, LIMITS.max_n + 1, 1.0, True, None, "1", "x" * 10**5], [1, LIMITS.max_n]),
    "temperature": ([-0.1, 100.5, math.nan, math.inf, 10**400, True, None, "hot", [1.0]], [0, 1e-300, 100.0]),
    "top_p": ([0.0, -0.1, 1.001, math.nan, math.inf, None, "0.9"], [1e-9, 1]),
    "top_k": ([-2, 2**63, 10**30, 1.5, True, None], [-1, 0, 2**63 - 1]),
    "min_p": ([-0.01, 1.01, math.nan, None], [0, 1.0]),
    "seed": ([-(2**63) - 1, 2**64, 0.5, True, "7"], [None, -(2**63), 2**64 - 1]),
    "max_tokens": ([0, -1, 2**63, 5.0, True], [1, None, 2**63 - 1]),
    "min_tokens": ([-1, 2**63, 1.0, None, False], [0, 16]),
    "include_stop_str_in_output": ([1, None, "yes"], [True]),
    "ignore_eos": ([0, None, "x" * 20], [True]),
    "skip_special_tokens": ([1, None], [False]),
    "logprobs": ([-2, LIMITS.max_logprobs + 1, True, 1.0], [None, -1, 0, LIMITS.max_logprobs]),
    "prompt_logprobs": ([-2, LIMITS.max_logprobs + 1, True, 1.0], [None, -1, 0, LIMITS.max_logprobs]),
    "bad_words": ([5, True, b"end", {"end": 1}], [["a", "b c"], []]),
    "allowed_token_ids": ([[], 5, "ab", {1: 2}], [None, [0, 2**63 - 1]]),
    "trace_decode_token_ids": ([[], 5, "ab", {1: 2}], [None, [3, 3]]),
    "truncate_prompt_tokens": ([0, -2, 1.5, True, "1"], [None, -1, 1, 2**63 - 1]),
    "detokenize": ([0, None], [False]),
    "presence_penalty": ([-2.5, 2.5, math.nan, None], [-2.0, 2]),
    "frequency_penalty": ([-2.5, 2.5, math.nan, None], [-2.0, 2]),
    "repetition_penalty": ([0.0, -1.0, 100.5, math.nan, None], [1e-9, 100]),
    "stop": ([5, True, b"end", {"end": 1}], [["a", "b"]]),
    "stop_token_ids": ([5, "ab", b"ab", {1: 2}], [[0, 2**63 - 1]]),
    "logit_bias": ([5, [1], "1"], [{1: 100.0, 2: -100}]),
    "kv_transfer_params": ([5, "do_remote_decode", {}, {"do_remote_decode": 1}], [None, {"do_remote_decode": True}]),
    "structured_outputs": ([5, True, "yes|no", ["yes", "no"]], [None, StructuredOutputsParams(choice=["yes", "no"])]),
}


PEER_BLOCKS = {
    "do_remote_prefill": True,
    "remote_handle": "ab12",
    "remote_addresses": ["10.0.0.1:9000", "[::1]:9001"],
    "remote_num_blocks": 3,
}


@pytest.mark.parametrize("name", list(VALUES))
def test_values_out_of_range_are_refused_by_name_and_value(name: str) -> None:
    params = SamplingParams()
    refused_values, accepted_values = VALUES[name]
    for value in refused_values:
        for refused in (lambda: SamplingParams(**{name: value}), lambda: setattr(params, name, value)):  # noqa: B023
            with pytest.raises(RequestError) as refusal:
                refused()
            assert str(refusal.value).startswith(f"{name}={value!r:.57}"), refusal.value
            assert len(str(refusal.value)) < 200
    assert params == SamplingParams()
    for value in accepted_values:
        setattr(params, name, value)
        assert params == SamplingParams(**{name: value})
        assert getattr(params, name) == value


def test_other_forms_of_a_value_are_converted() -> None:
    assert SamplingParams(stop="end").stop == ["end"]
    assert SamplingParams(stop=("a", "b")).stop == ["a", "b"]
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()
    assert SamplingParams(logit_bias=json.loads('{"7": 1, "50256": -100}')).logit_bias == {7: 1, 50256: -100}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": [5]}, "stop=5"),
        ({"stop": ""}, "stop=''"),
        ({"stop": ["ok", "x" * (LIMITS.max_stop_string_length + 1)]}, "stop='xxx"),
        ({"stop": ["x"] * (LIMITS.max_stop_strings + 1)}, "stop has 65 entries"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids=-1"),
        ({"stop_token_ids": [True]}, "stop_token_ids=True"),
        ({"stop_token_ids": [2**63]}, f"stop_token_ids={2**63}"),
        ({"stop_token_ids": [None]}, "stop_token_ids=None"),
        ({"stop_token_ids": [0] * (LIMITS.max_stop_token_ids + 1)}, "stop_token_ids has 1025 entries"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias key=-1"),
        ({"logit_bias": {1.5: 1.0}}, "logit_bias key=1.5"),
        ({"logit_bias": {True: 1.0}}, "logit_bias key=True"),
        ({"logit_bias": {math.inf: 1.0}}, "logit_bias key=inf"),
        ({"logit_bias": {"the": 1.0}}, "logit_bias key='the'"),
        ({"logit_bias": {2**63: 1.0}}, f"logit_bias key={2**63}"),
        ({"logit_bias": {"9" * 30: 1.0}}, "logit_bias key='999"),
        ({"logit_bias": {5: 100.5}}, "logit_bias[5]=100.5"),
        ({"logit_bias": {5: math.nan}}, "logit_bias[5]=nan"),
        ({"logit_bias": {5: None}}, "logit_bias[5]=None"),
        ({"logit_bias": dict.fromkeys(range(LIMITS.max_logit_bias + 1), 1.0)}, "logit_bias has 4097 entries"),
        ({"min_tokens": 17}, "min_tokens=17"),
        ({"bad_words": ["a", ""]}, "bad_words=''"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids=-1"),
        ({"stop": "end", "detokenize": False}, "stop=['end']"),
        ({"trace_decode_token_ids": [1], "structured_outputs": {"regex": "a"}}, "trace_decode_token_ids"),
        ({"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}}, "structured_outputs is given"),
        ({"structured_outputs": {}}, "structured_outputs has none of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs has regex and choice"),
        ({"structured_outputs": {"json_schema": {}}}, "structured_outputs has an unknown key 'json_schema'"),
        ({"structured_outputs": {"json": '{"type":'}}, "structured_outputs: json='{\"type\":' is no JSON schema"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs: json=[1] is no JSON schema"),
        ({"structured_outputs": {"json": {"const": math.nan}}}, "structured_outputs: json={'const': nan}"),
        ({"structured_outputs": {"json": {"const": {1}}}}, "structured_outputs: json={'const': {1}}"),
        ({"structured_outputs": {"json": "[" * 10**5}}, "structured_outputs: json='[[["),
        ({"structured_outputs": {"json": {"const": "\ud800"}}}, "structured_outputs: json has half a surrogate"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs: regex=5"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs: regex=''"),
        (
            {"structured_outputs": {"regex": "a" * (LIMITS.max_grammar_length + 1)}},
            "structured_outputs: regex has 131073",
        ),
        ({"structured_outputs": {"grammar": ["a"]}}, "structured_outputs: grammar=['a']"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs: choice=[]"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs: choice='ab'"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs: choice=5"),
        ({"structured_outputs": {"choice": ["a"] * (LIMITS.max_choices + 1)}}, "structured_outputs: choice has 2049"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs: json_object='yes'"),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": 1}}, "structured_outputs: disable_any"),
    ],
)
def test_values_inside_lists_and_pairs_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**params)
    assert str(refusal.value).startswith(message), refusal.value
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"do_remote_decode": False}, "either do_remote_decode or do_remote_prefill"),
        (PEER_BLOCKS | {"do_remote_decode": True}, "either do_remote_decode or"),
        ({"do_remote_decode": True, "remote_handle": "a"}, "do_remote_decode takes no blocks"),
        ({"do_remote_prefill": True, "remote_handle": "a"}, "remote_num_blocks"),
        (PEER_BLOCKS | {"remote_engine_id": "x"}, "unknown field `remote_engine_id`"),
        (PEER_BLOCKS | {"remote_handle": "a b"}, "remote_handle"),
        (PEER_BLOCKS | {"remote_handle": "a\n"}, "remote_handle"),
        (PEER_BLOCKS | {"remote_addresses": ["host"]}, "$.remote_addresses[0]"),
        (PEER_BLOCKS | {"remote_addresses": ["h:65535", "h:65536"]}, "$.remote_addresses[1]"),
        (PEER_BLOCKS | {"remote_addresses": ["h\0:1"]}, "$.remote_addresses[0]"),
        (PEER_BLOCKS | {"remote_addresses": ["h" * 255 + ":1"]}, "$.remote_addresses[0]"),
        (PEER_BLOCKS | {"remote_addresses": ["h:1"] * 65}, "remote_addresses"),
        (PEER_BLOCKS | {"remote_num_blocks": -1}, "remote_num_blocks"),
        (PEER_BLOCKS | {"remote_num_blocks": True}, "remote_num_blocks"),
    ],
)
def test_wrong_kv_transfer_params_are_refused(value: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=r"^kv_transfer_params=") as refusal:
        SamplingParams(kv_transfer_params=value)
    assert message in str(refusal.value)
    assert refusal.value.parameter == "kv_transfer_params"


# Parameters of vLLM that have no effect here: values that change nothing, and values that would change the output.
OF_VLLM: dict[str, tuple[list[Any], list[Any]]] = {
    "best_of": ([None, 3], [1, 5]),  # n is 3
    "use_beam_search": ([None, False], [True]),
    "length_penalty": ([None, 1, 1.0], [0.5, 0]),
    "early_stopping": ([None, False], [True, "never"]),
    "logits_processors": ([None, []], [[len]]),
    "guided_decoding": ([None], []),
    "extra_args": ([None, {}], [{"a": 1}]),
    "spaces_between_special_tokens": ([True, False], []),
    "skip_clone": ([True, False], []),
    "flat_logprobs": ([False], [True]),
    "logprob_token_ids": ([None, []], [[5]]),
    "thinking_token_budget": ([None], [5, 0]),
    "repetition_detection": ([None], [{"min_count": 2}]),
    "watermarking": ([None, False], [True]),
}


@pytest.mark.parametrize("name", list(OF_VLLM))
def test_parameters_of_vllm_are_accepted_only_if_they_change_nothing(name: str) -> None:
    params, (accepted_values, refused_values) = SamplingParams(n=3), OF_VLLM[name]
    for value in accepted_values:
        setattr(params, name, value)
        assert params == SamplingParams(n=3, **{name: value}) == SamplingParams(n=3)
    for value in refused_values:
        for refused in (lambda: SamplingParams(n=3, **{name: value}), lambda: setattr(params, name, value)):  # noqa: B023
            with pytest.raises(RequestError) as refusal:
                refused()
            assert str(refusal.value).startswith(f"{name}={value!r:.57}"), refusal.value
            assert refusal.value.parameter == name


def test_the_former_name_of_structured_outputs_is_known() -> None:
    params = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["a"], json_object=None))
    assert params == SamplingParams(structured_outputs={"choice": ["a"]})
    params.guided_decoding = None  # type: ignore[attr-defined]
    assert params == SamplingParams()


def test_none_stands_for_defaults_in_from_optional() -> None:
    params = SamplingParams.from_optional(n=None, temperature=0.5, stop=None, top_p=None, max_tokens=None, seed=None)
    assert params == SamplingParams(temperature=0.5, max_tokens=None)
    assert params.clone() == params
    assert params.clone() is not params


def test_an_unknown_name_is_an_error_with_the_nearest_name() -> None:
    for mistyped, meant in [("temprature", "temperature"), ("top-p", "top_p"), ("Seed", "seed")]:
        with pytest.raises(RequestError, match=f"'{mistyped}'.*'{meant}'"):
            SamplingParams(**{mistyped: 1})
    with pytest.raises(RequestError, match=r"'zzz'.*help\(moeserve.SamplingParams\)"):
        SamplingParams(zzz=1)


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=np.float64(0.5),
        top_k=np.int64(3),
        seed=np.uint64(2**64 - 1),
        max_tokens=np.int32(9),
        stop_token_ids=np.array([1, 2]),
        logit_bias={np.int64(4): np.float64(0.5)},
    )
    plain = SamplingParams(
        temperature=0.5, top_p=0.5, top_k=3, seed=2**64 - 1, max_tokens=9, stop_token_ids=[1, 2], logit_bias={4: 0.5}
    )
    assert params == plain
    assert msgspec.msgpack.encode(params.for_engine()) == msgspec.msgpack.encode(plain.for_engine())
    for name, value in [("temperature", np.float32(101.0)), ("top_k", np.int64(-2)), ("top_k", np.float64(3.0))]:
        with pytest.raises(RequestError, match=rf"^{name}=\S+ must be"):
            SamplingParams(**{name: value})


def test_parameters_share_nothing_with_what_the_caller_passed() -> None:
    stop, ids, bias = ["a"], [1], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b")
    ids.append(2)
    bias[2] = 2.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (["a"], [1], {1: 1.0})


def test_a_schema_is_kept_as_it_was_given() -> None:
    schema = {"enum": ["ü"]}
    params = StructuredOutputsParams(json=schema)
    schema["enum"].append("b")
    assert params == StructuredOutputsParams(json='{"enum": ["ü"]}')
    assert SamplingParams(structured_outputs={"json": {"enum": ["ü"]}}) == SamplingParams(structured_outputs=params)


def test_assigned_values_are_checked_and_unknown_names_refused() -> None:
    params = SamplingParams()
    params.stop = "end"
    params.temperature = np.float32(0.5)  # type: ignore[assignment]
    assert params == SamplingParams(stop=["end"], temperature=0.5)
    with pytest.raises(RequestError, match="'max_tokens'"):
        params.max_token = 3  # type: ignore[attr-defined]
    params.min_tokens = 20  # may precede max_tokens, so the two are compared when they are used
    with pytest.raises(RequestError, match="min_tokens=20"):
        params.copy()
    params.max_tokens = 30
    assert params.copy() == params


def test_lists_changed_in_place_are_checked_when_they_are_used() -> None:
    params = SamplingParams(stop_token_ids=[1])
    copy, request_params = params.copy(), params.for_engine()
    params.stop_token_ids.append(-1)
    with pytest.raises(RequestError, match="stop_token_ids=-1"):
        params.copy()
    assert (copy.stop_token_ids, request_params.stop_token_ids) == ([1], (1,))


def test_parameters_of_a_request_are_immutable() -> None:
    params = EVERYTHING.for_engine()
    with pytest.raises(AttributeError):
        params.temperature = 1.0  # type: ignore[misc]
    grammar = OutputGrammar("regex", "a|b", "regex")
    given = dataclasses.asdict(EVERYTHING) | {"stop_token_ids": (4, 5), "grammar": grammar}
    given |= {"bad_token_ids": (), "allowed_bits": b"", "forced_token_ids": ()}
    assert msgspec.structs.asdict(params) == {name: given[name] for name in RequestParams.__struct_fields__}


REQUEST = Request(
    request_id="7-1",
    prompt_token_ids=[1, 2, 3],
    params=EVERYTHING.for_engine(),
    seed=2**64 - 1,
    eos_token_ids=[2],
    cache_salt="häuser",
)
REGISTRATION = Registration(
    slot=3,
    token_ids=[1, 2, 3],
    num_prompt_tokens=2,
    cache=CacheStart([[4, 1]]),
    params=REQUEST.params,
    seed=2**63,
    end_token_ids=[2],
)
PLAN = StepPlan(
    step=12,
    slots=[0, 3],
    starts=[9, 0],
    lengths=[1, 3],
    registrations=[REGISTRATION],
    cache=CacheChanges(new_blocks=[(0, [[7]])]),
)


def test_values_are_checked_once() -> None:
    """By `SamplingParams`, where the user gives them: the ranks and the engine's processes do not check them again."""
    with pytest.raises(RequestError):
        SamplingParams(temperature=-1).for_engine()
    unchecked = msgspec.structs.replace(RequestParams(), temperature=-1.0, top_p=7.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(unchecked), type=RequestParams) == unchecked


@pytest.mark.parametrize("message", [RequestParams(), REQUEST, PLAN], ids=lambda message: type(message).__name__)
def test_encoded_messages_decode_to_equal_ones(message: Any) -> None:
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
    assert arrived == message
    assert msgspec.to_builtins(arrived) == msgspec.to_builtins(message)
