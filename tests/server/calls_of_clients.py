"""Calls of litellm and langchain-openai, which run in an environment of their own: they need an older openai.

    python calls_of_clients.py URL MODEL

Prints a line of JSON for each call: its name, the text or the tool calls of the answer, and its numbers of tokens.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any

import langchain_openai
import litellm

URL, MODEL = sys.argv[1:]
QUESTION = [{"role": "user", "content": "What is the capital of England?"}]
CITY = {
    "title": "city",
    "description": "A city.",
    "type": "object",
    "properties": {"name": {"enum": ["London", "Paris"]}},
    "required": ["name"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Look up a city.", "parameters": CITY}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}


def show(name: str, answer: Any, num_prompt: int, num_output: int) -> None:
    print(json.dumps({"name": name, "answer": answer, "num_prompt": num_prompt, "num_output": num_output}), flush=True)


def calls_of_litellm() -> None:
    litellm.suppress_debug_info = True
    base: dict[str, Any] = {
        "model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0, "temperature": 0
    }  # fmt: skip
    chat = {**base, "messages": QUESTION, "max_tokens": 16}

    def show_answer(name: str, answer: Any) -> None:
        message, usage = answer.choices[0].message, answer.usage
        calls = [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or []]
        show(f"litellm {name}", calls or message.content, usage.prompt_tokens, usage.completion_tokens)

    def show_stream(name: str, chunks: Iterable[Any]) -> None:
        show_answer(name, litellm.stream_chunk_builder(list(chunks), messages=QUESTION))

    show_answer("chat", litellm.completion(**chat))
    show_answer("asyncio", asyncio.run(litellm.acompletion(**chat)))
    show_stream("stream", litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    forced = {**chat, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    show_answer("tools", litellm.completion(**forced))
    show_stream("streamed tools", litellm.completion(**forced, stream=True, stream_options={"include_usage": True}))
    show_answer("schema", litellm.completion(**chat | {"response_format": FORMAT}))
    text = litellm.text_completion(
        **base | {"model": f"text-completion-openai/{MODEL}"}, prompt="One, two,", max_tokens=6
    )
    show("litellm text", text.choices[0].text, text.usage.prompt_tokens, text.usage.completion_tokens)
    response = litellm.responses(**base, input=QUESTION, max_output_tokens=16)
    show(
        "litellm responses",
        response.output[0].content[0].text,
        response.usage.input_tokens,
        response.usage.output_tokens,
    )
    anthropic = {**chat, "model": f"anthropic/{MODEL}", "api_base": URL}
    show_answer("anthropic", litellm.completion(**anthropic))
    show_stream("anthropic stream", litellm.completion(**anthropic, stream=True))
    show_answer("anthropic tools", litellm.completion(**forced | {"model": f"anthropic/{MODEL}", "api_base": URL}))


def calls_of_langchain() -> None:
    base: dict[str, Any] = {
        "model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "temperature": 0
    }  # fmt: skip
    chat = langchain_openai.ChatOpenAI(**base, max_tokens=16, stream_usage=True)

    def show_answer(name: str, message: Any, answer: Any = None) -> None:
        usage = message.usage_metadata
        show(f"langchain {name}", answer or message.text, usage["input_tokens"], usage["output_tokens"])

    def joined(chunks: Iterable[Any]) -> Any:
        first, *others = chunks
        for chunk in others:
            first = first + chunk
        return first

    show_answer("chat", chat.invoke(QUESTION))
    show_answer("asyncio", asyncio.run(chat.ainvoke(QUESTION)))
    show_answer("stream", joined(chat.stream(QUESTION)))
    for number, message in enumerate(chat.batch([QUESTION] * 3)):
        show_answer(f"batch {number}", message)
    longer = langchain_openai.ChatOpenAI(**base, max_tokens=60, stream_usage=True)
    forced = longer.bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False)
    for name, message in (("tools", forced.invoke(QUESTION)), ("streamed tools", joined(forced.stream(QUESTION)))):
        show_answer(name, message, [[call["name"], call["args"]] for call in message.tool_calls])
    structured = chat.with_structured_output(CITY, method="json_schema", include_raw=True).invoke(QUESTION)
    show_answer("schema", structured["raw"], json.dumps(structured["parsed"]))
    responses = langchain_openai.ChatOpenAI(**base, max_tokens=16, use_responses_api=True)
    show_answer("responses", responses.invoke(QUESTION))
    show_answer("streamed responses", joined(responses.stream(QUESTION)))
    completions = langchain_openai.OpenAI(**base, max_tokens=6)
    generated = completions.generate(["One, two,"])
    usage = generated.llm_output["token_usage"]
    show("langchain text", generated.generations[0][0].text, usage["prompt_tokens"], usage["completion_tokens"])


if __name__ == "__main__":
    calls_of_litellm()
    calls_of_langchain()
