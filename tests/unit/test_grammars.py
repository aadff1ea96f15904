"""Grammars of outputs: random walks give texts of the language, and hostile grammars end within their limits."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from grammar_walks import CHOICES, GRAMMARS, PATTERNS, SCHEMAS, ids_of, walk
from published_tokenizers import PACKAGES
from test_text import byte_level_tokenizer, llama_decoder, save, sentencepiece_tokenizer, word_tokenizer
from tokenizers import decoders

from moeserve.api.tokenizer import TextCodec
from moeserve.errors import RequestError
from moeserve.structured_outputs import StructuredOutputsParams
from moeserve.worker.grammars import Grammars, Matcher

SEEDS = range(12)
VOCABULARY = 400  # of the model: more than the tokenizers have


class Vocabulary:
    """A tokenizer, and the grammars for a model with it."""

    def __init__(self, folder: str, vocab_size: int = VOCABULARY) -> None:
        codec = TextCodec.load(folder)
        assert codec is not None
        self.codec = codec
        self.grammars = Grammars(folder, vocab_size)

    def walks(self, params: StructuredOutputsParams) -> list[str]:
        """Return the random outputs that have ended, of which there must be some."""
        self.grammars.check(params.for_engine())
        found = [walk(self.codec, self.grammars, params, seed) for seed in SEEDS]
        texts = [text for text in found if text is not None]
        assert len(texts) >= len(SEEDS) // 4, found
        return texts

    def matcher(self, **params: Any) -> Matcher:
        return self.grammars.matcher(StructuredOutputsParams(**params).for_engine())

    def refusal(self, **params: Any) -> str:
        with pytest.raises(RequestError) as refused:
            self.grammars.check(StructuredOutputsParams(**params).for_engine())
        return str(refused.value)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level_tokenizer,
    "llama": lambda: sentencepiece_tokenizer(llama_decoder()),
}


@pytest.fixture(scope="module", params=[*TOKENIZERS, "qwen3"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    if request.param in PACKAGES:
        folder = PACKAGES[request.param].folder
        if not folder.is_dir():
            pytest.skip("get the tokenizer with `make tokenizers`, which needs npm")
        return Vocabulary(str(folder), 151936)
    return Vocabulary(save(TOKENIZERS[request.param](), tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(save(byte_level_tokenizer(), tmp_path_factory.mktemp("small")))


@pytest.mark.parametrize("name", PATTERNS)
def test_outputs_match_the_regular_expression(vocabulary: Vocabulary, name: str) -> None:
    for text in vocabulary.walks(StructuredOutputsParams(regex=PATTERNS[name])):
        assert re.fullmatch(PATTERNS[name], text), text


@pytest.mark.parametrize("name", GRAMMARS)
def test_outputs_belong_to_the_grammar(vocabulary: Vocabulary, name: str) -> None:
    rules, pattern = GRAMMARS[name]
    for text in vocabulary.walks(StructuredOutputsParams(grammar=rules)):
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("disable_any_whitespace", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_are_valid_by_the_schema(vocabulary: Vocabulary, name: str, disable_any_whitespace: bool) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    params = StructuredOutputsParams(json=SCHEMAS[name], disable_any_whitespace=disable_any_whitespace)
    for text in vocabulary.walks(params):
        value = json.loads(text, object_pairs_hook=without_duplicates)
        validator.validate(value)
        assert text[0] in '{["'
        if disable_any_whitespace:
            assert not re.search(r"\s", re.sub(r'"([^"\\]|\\.)*"', "", text)), text


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def test_json_object_gives_objects(vocabulary: Vocabulary) -> None:
    for text in vocabulary.walks(StructuredOutputsParams(json_object=True)):
        assert isinstance(json.loads(text), dict)


def test_each_choice_is_possible_and_nothing_else(vocabulary: Vocabulary) -> None:
    """Byte by byte: only where a choice ends is the end allowed, and only choices are reached."""
    matcher_of = lambda: vocabulary.matcher(choice=CHOICES)  # noqa: E731
    codec, eos = vocabulary.codec, vocabulary.codec.eos_token_ids
    assert set(vocabulary.walks(StructuredOutputsParams(choice=CHOICES))) <= set(CHOICES)
    first = codec.encode("")
    for text in [*CHOICES, "x", "abc", "new", "a\nb"]:
        output = codec.encode(text)[len(first) :]
        if codec.decode(output, skip_special_tokens=False) != text:  # SentencePiece puts a space before
            continue
        allowed = matcher_of().allowed_tokens(output, eos)
        is_reached = allowed.error is None and eos[0] in ids_of(allowed)
        if vocabulary.codec.is_byte_level:
            assert is_reached == (text in CHOICES), text


def test_a_matcher_follows_from_the_tokens_alone(small: Vocabulary) -> None:
    """One that has seen the tokens one by one allows what a new one allows that is given all of them."""
    params = dict(json=SCHEMAS["scalars"])
    matcher, eos = small.matcher(**params), small.codec.eos_token_ids
    random, output = np.random.default_rng(3), []
    for _ in range(40):
        allowed = ids_of(matcher.allowed_tokens(output, eos))
        assert allowed == ids_of(small.matcher(**params).allowed_tokens(output, eos))
        output.append(int(random.choice([token_id for token_id in allowed if token_id not in eos])))


def test_only_tokens_that_end_the_request_end_the_output(small: Vocabulary) -> None:
    """The tokenizer's own end is not allowed if the request does not end with it; a stop token is, once complete."""
    eos, stop = small.codec.eos_token_ids[0], small.codec.encode("!")[-1]
    matcher = small.matcher(choice=["a", "ab"])
    assert stop not in ids_of(matcher.allowed_tokens([], [eos, stop]))
    output = small.codec.encode("a")
    assert set(ids_of(matcher.allowed_tokens(output, [stop]))) == {stop, *small.codec.encode("b")}
    done = small.matcher(choice=["a"])
    assert ids_of(done.allowed_tokens(output, [eos, stop])) == sorted([eos, stop])
    assert ids_of(small.matcher(choice=["a"]).allowed_tokens(output, [])) == []


def test_a_wrong_token_is_an_error_and_no_exception(small: Vocabulary) -> None:
    """A request that has ended may be in one more step, after a token that its grammar does not know."""
    matcher = small.matcher(choice=["a"])
    output = small.codec.encode("b")
    for _ in range(3):
        assert matcher.allowed_tokens(output, [2]).error is not None
        output.append(2)


def test_only_tokens_of_the_model_count(tmp_path: Path) -> None:
    """The tokenizer may have more tokens than the model."""
    codec = (narrow := Vocabulary(save(byte_level_tokenizer(), tmp_path), vocab_size=5)).codec
    assert max(codec.encode("z")) >= 5 > min(codec.encode("!"))
    assert "no token of this model" in narrow.refusal(choice=["z"])
    narrow.grammars.check(StructuredOutputsParams(choice=["!"]).for_engine())


def test_a_tokenizer_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    words = Vocabulary(save(word_tokenizer(["[UNK]", "the", "##re"], decoders.WordPiece()), tmp_path))
    assert f"structured_outputs cannot be served with the tokenizer in {tmp_path}" in words.refusal(choice=["the"])


MALFORMED = {
    "unclosed": (dict(regex="(a"), "regex"),
    "look-ahead": (dict(regex="(?=a)b"), "look-ahead"),
    "back-reference": (dict(regex=r"(a)\1"), "backreferences"),
    "unknown type": (dict(json={"type": "objekt"}), "objekt"),
    "false": (dict(json="false"), "Unsatisfiable"),
    "unknown key": (dict(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
    "remote": (dict(json={"$ref": "http://localhost/x"}), "http://localhost/x"),
    "undefined rule": (dict(grammar="start: missing"), "missing"),
    "neither lark nor gbnf": (dict(grammar="hello world"), "grammar"),
    "unknown special token": (dict(grammar="start: <tool_call>"), "tool_call"),
    "endless": (dict(grammar="start: start"), "grammar"),
    "own reference": (dict(json={"$ref": "#"}), "json"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_grammar_is_refused_with_its_parameter(small: Vocabulary, name: str) -> None:
    params, reason = MALFORMED[name]
    message = small.refusal(**params)
    assert message.startswith(f"structured_outputs: {next(iter(params))} cannot be served: ")
    assert reason in message
    assert len(message) < 400


def nested(inner: str, outer: str, depth: int) -> str:
    return outer * depth + inner + (")" * depth if outer == "(" else "}}" * depth)


HOSTILE: dict[str, dict[str, Any]] = {
    "nested counts": dict(regex="((a{100}){100}){100}"),
    "large count": dict(regex="(a{1000}){1000}"),
    "exponential": dict(regex="(a|b)*a(a|b){25}"),
    "many dots": dict(regex="(.*a.{1,40}b){5}"),
    "deep": dict(regex=nested("a", "(", 60_000)),
    "optional": dict(regex="a?" * 5000 + "a" * 5000),
    "unicode classes": dict(regex=r"[\p{L}\p{N}]{1,500}\p{Greek}{1,500}"),
    "alternatives": dict(regex="|".join(f"w{number}x{number * 7}" for number in range(9000))),
    "deep schema": dict(json='{"properties":{"a":' * 60 + "{}" + "}}" * 60),
    "most items": dict(json={"type": "array", "minItems": 10**9}),
    "longest string": dict(json={"type": "string", "minLength": 10**9}),
    "references": dict(
        json={
            "$defs": {
                f"d{i}": {kind: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} if i < 30 else {"type": "string"}
                for i, kind in enumerate(["allOf", "anyOf", "prefixItems"] * 11)
            },
            "$ref": "#/$defs/d0",
        }
    ),
    "products": dict(json={"allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(4)]} for i in range(12)]}),
    "optional properties": dict(json={"properties": {f"p{i}": {"type": "null"} for i in range(3000)}}),
    "ambiguous": dict(grammar='start: a a a a a a a a\na: start | "x" | "y" |'),
    "left-recursive": dict(grammar='start: start start | "a" | "b" | ""'),
    "repeated rules": dict(grammar='start: a{1000000}\na: b{1000000}\nb: "x"'),
    "a lexeme after itself": dict(grammar="start: /(a+){3}/{2}"),
    "complements": dict(grammar="start: X\nX: /(a|b)*a(a|b){15}/ & /(a|b)*b(a|b){17}/ & ~/(a|b)*a(a|b){13}/"),
    "deep rules": dict(grammar="start: " + nested('"a"', "(", 20_000)),
    "deep gbnf": dict(grammar="root ::= " + nested('"a"', "(", 20_000)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_within_its_limits(small: Vocabulary, name: str) -> None:
    """It is refused, or ends with an error, or each of its tokens takes little processor time."""
    params = StructuredOutputsParams(**HOSTILE[name]).for_engine()
    random, output, refusal = np.random.default_rng(5), list[int](), ""
    started = time.thread_time()
    try:
        small.grammars.check(params)
        matcher = small.grammars.matcher(params)
    except RequestError as error:
        refusal = str(error)
    else:
        for _ in range(200):
            allowed = matcher.allowed_tokens(output, [2])
            if allowed.error is not None or not (ids := ids_of(allowed)):
                break
            output.append(int(random.choice(ids)))
    assert not refusal or refusal.startswith(f"structured_outputs: {params.name} cannot be served")
    assert len(refusal) < 400
    assert time.thread_time() - started < 20, len(output)
    assert small.walks(StructuredOutputsParams(choice=["a"]))  # the others go on
