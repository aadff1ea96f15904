"""JSON texts inside of requests and answers may be nested deeply: they are texts, and never fail the server."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from running_server import MODEL, RunningServer, running
from tiny_model import save_tiny_model

from moeserve import AsyncLLM, CompletionOutput, RequestOutput, SamplingParams

LEVELS = 1200  # more than Python's parser reads
TEXTS = {
    "open": "[" * 100_000,
    "closed": "[" * 5000 + "]" * 5000,
    "objects": '{"a":' * 5000 + "1" + "}" * 5000,
    "twice": json.dumps('{"a":' * 900 + "1" + "}" * 900),
    "just readable": '{"a":' * 900 + "1" + "}" * 900,
}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def nesting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    llm = AsyncLLM(folder, dtype="float32", max_model_len=4096, max_num_seqs=8, show_progress=False)
    with running(llm, answer_parser="hermes") as server:
        yield server
    llm.shutdown()


def call(text: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": text}}


@pytest.mark.parametrize("name", list(TEXTS))
def test_calls_of_histories(nesting_server: RunningServer, name: str) -> None:
    """Each request is answered, or refused because the prompt is too long for the model."""
    text = TEXTS[name]
    item = {"call_id": "1", "name": "f"}
    block = {"type": "tool_use", "id": "1", "name": "f", "input": text}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [call(text)]}]}),
        ("chat/completions", {"messages": [USER, {"role": "assistant", "function_call": call(text)["function"]}]}),
        ("responses", {"input": [USER, {"type": "function_call", "arguments": text, **item}]}),
        ("responses", {"input": [USER, {"type": "custom_tool_call", "input": text, **item}]}),
        ("responses", {"input": [USER, {"type": "mcp_call", "arguments": text, **item}]}),
        ("messages", {"max_tokens": 1, "messages": [USER, {"role": "assistant", "content": [block]}, USER]}),
    ]
    with nesting_server.http() as http:
        for path, body in requests:
            answer = http.post(f"/v1/{path}", json={"model": MODEL, **body})
            too_long = answer.status_code == 400 and "tokens" in answer.text
            assert answer.status_code == 200 or too_long, (path, answer.text)


@pytest.mark.parametrize("name", list(TEXTS))
def test_schemas_in_texts_are_refused(nesting_server: RunningServer, name: str) -> None:
    body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": TEXTS[name], "disable_any_whitespace": True}}
    with nesting_server.http() as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "json" in answer.json()["error"]["message"]


@pytest.fixture
def calling_server(nesting_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server whose model writes calls with arguments that are nested deeply."""
    inside = "[" * LEVELS + "]" * LEVELS
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"input": {inside}}}}}\n</tool_call>'
    token_ids = nesting_server.llm.codec.encode(text, add_special_tokens=False) if nesting_server.llm.codec else []

    async def generate(prompt: dict[str, Any], params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        output = CompletionOutput(0, text, token_ids, finish_reason="stop")
        yield RequestOutput("a", None, prompt["prompt_token_ids"], [output], finished=True)

    monkeypatch.setattr(nesting_server.llm, "generate", generate)
    return nesting_server


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_the_model(calling_server: RunningServer, stream: bool) -> None:
    schema = {"type": "object"}
    requests: dict[str, dict[str, Any]] = {
        "chat/completions": {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        },
        "responses": {"input": "Hi", "tools": [{"type": "custom", "name": "f"}]},
        "messages": {"max_tokens": 2000, "messages": [USER], "tools": [{"name": "f", "input_schema": schema}]},
    }
    with calling_server.http() as http:
        for path, body in requests.items():
            answer = http.post(f"/v1/{path}", json={"model": MODEL, "stream": stream, **body})
            assert answer.status_code == 200, (path, answer.text)
            assert "Internal" not in answer.text
            assert '"f"' in answer.text
