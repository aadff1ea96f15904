"""Schemas of clients: each is enforced, or refused with the place that prevents it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest
from grammar_walks import walk
from running_server import MODEL, running
from schemas_of_clients import SCHEMAS
from tiny_model import save_tiny_model

from moeserve import AsyncLLM
from moeserve.api.tokenizer import TextCodec
from moeserve.json_schemas import without_unique_items
from moeserve.server.output_format import outputs_of_schema
from moeserve.worker.grammars import Grammars

SEEDS = range(5)
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
# Schemas that no output can satisfy, or whose outputs no grammar can describe. All others must be served.
REFUSED = {
    "pydantic: dict by uuid",
    "pydantic: pattern with look-ahead",
    "zod: intersection of closed objects",
    "MCP: reference to another document",
    "MCP: reference to nothing",
    "MCP: reference to itself",
    "MCP: required is null",
    "MCP: required is a number",
    "MCP: unknown type",
    "MCP: type any",
    "MCP: type is null",
    "MCP: oneOf of overlapping",
    "MCP: dependencies",
    "MCP: impossible bounds",
    "MCP: impossible lengths",
    "MCP: pattern that is not valid",
    "MCP: pattern with a back-reference",
    "MCP: pattern with word boundaries",
    "MCP: recursive reference of 2019-09",
    "MCP: bounds as texts",
    "MCP: properties as a list",
}
# Schemas with `uniqueItems`, which are refused only if they are strict.
REFUSED_IF_STRICT = REFUSED | {
    "pydantic: set",
    "pydantic: frozen set of enum",
    "zod 3: set",
    "MCP: unique objects",
    "MCP: unique items of an enum",
}


@dataclass(frozen=True)
class Served:
    """A client of a server, and the grammars of its model."""

    http: httpx.Client
    codec: TextCodec
    grammars: Grammars

    def post(self, path: str = "/v1/chat/completions", **fields: Any) -> tuple[int, Any]:
        response = self.http.post(path, json={"model": MODEL, **fields})
        return response.status_code, response.json()

    def random_outputs(self, schema: Any, *, is_strict: bool) -> list[Any]:
        params = outputs_of_schema("schema", schema, is_strict=is_strict)
        texts = [walk(self.codec, self.grammars, params, seed) for seed in SEEDS]
        return [json.loads(text) for text in texts if text is not None]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=2048, num_threads=1, show_progress=False)
    codec = TextCodec.load(str(folder))
    assert codec is not None
    with running(llm, answer_parser="hermes") as server, server.http() as http:
        yield Served(http, codec, Grammars(str(folder), codec.num_tokens))
    llm.shutdown()


def validate(value: Any, schema: Any, *, is_strict: bool) -> None:
    schema = schema if is_strict else without_unique_items(schema)
    jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema).validate(value)


@pytest.mark.slow_but("pydantic")
@pytest.mark.parametrize("is_strict", [False, True], ids=["free", "strict"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_enforced_or_refused_with_its_place(served: Served, name: str, is_strict: bool) -> None:
    schema, is_refused = SCHEMAS[name], name in (REFUSED_IF_STRICT if is_strict else REFUSED)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": is_strict}}
    status, answer = served.post(**ASKED, response_format=form)
    assert status == (400 if is_refused else 200), answer
    if is_refused:
        assert "#" in answer["error"]["message"]
    else:
        for output in served.random_outputs(schema, is_strict=is_strict):
            validate(output, schema, is_strict=is_strict)

    tool = {"type": "function", "function": {"name": "call_me", "parameters": schema, "strict": is_strict}}
    status, answer = served.post(**ASKED, tools=[tool], tool_choice="required")
    assert status == (400 if is_refused and is_strict else 200), answer
    if status == 400:
        assert "'call_me'" in answer["error"]["message"]
        assert "#" in answer["error"]["message"]
        assert answer["error"]["param"] == "tools"


@pytest.mark.parametrize(("is_strict", "expected"), [(False, 200), (True, 400)])
def test_a_strict_format_of_the_responses_api_is_enforced_in_full(
    served: Served, is_strict: bool, expected: int
) -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMAS["pydantic: set"], "strict": is_strict}
    status, answer = served.post("/v1/responses", input="Hi", text={"format": form}, max_output_tokens=1)
    assert status == expected, answer
