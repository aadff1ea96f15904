"""Parsers of answers: what a family writes is what is parsed, whole and in pieces, and no text is ever lost."""

# ruff: noqa: RUF001  # DeepSeek's markers have bars and blanks of their own

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from answer_renderers import STYLES, Answer, Call, Parsed, Style, answers, tools_of
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.errors import SettingsError
from moeserve.parsers.families import FAMILIES, ParserFamily, find_parser


def parse(
    family: str,
    pieces: list[str],
    *,
    tools: Any = None,
    starts_in_reasoning: bool = False,
    parse_tools: bool = True,
    parse_reasoning: bool = True,
) -> Parsed:
    parser = FAMILIES[family].make(
        tools, starts_in_reasoning=starts_in_reasoning, parse_tools=parse_tools, parse_reasoning=parse_reasoning
    )
    parsed = Parsed()
    for piece in pieces:
        parsed.add(parser.feed(piece, []))
    parsed.add(parser.finish())
    return parsed


def divided(text: str, seed: int) -> list[str]:
    """Return a text in random pieces, some of them empty."""
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=len(text) // 4))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


styles = pytest.mark.parametrize("style", STYLES, ids=lambda style: style.render.__name__)
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.slow_but("hermes", "deepseek_v3", "qwen3")
@styles
@given(data=st.data())
@settings(max_examples=40)
def test_what_a_model_writes_is_what_is_parsed(style: Style, data: st.DataObject) -> None:
    answer = data.draw(answers(style))
    text = style.render(answer)
    tools = tools_of(answer)
    whole = parse(style.family, [text], tools=tools)
    assert (whole.content, whole.reasoning) == (answer.content, answer.reasoning)
    assert [name for _, name, _ in whole.calls] == [call.name for call in answer.calls]
    assert [json.loads(arguments) for _, _, arguments in whole.calls] == [call.arguments for call in answer.calls]
    if style.value_end is None:
        assert [arguments for _, _, arguments in whole.calls] == [call.json_text for call in answer.calls]
    assert len({call_id for call_id, _, _ in whole.calls}) == len(answer.calls)
    for pieces in (list(text), divided(text, data.draw(st.integers(0, 999)))):
        assert parse(style.family, pieces, tools=tools).without_ids == whole.without_ids


@styles
def test_text_is_passed_on_as_it_comes(style: Style) -> None:
    """Only the possible start of a marker is held back, and the arguments are streamed if they are written in JSON."""
    arguments = {"city": "Zürich </tool_call>", "days": [1, {"a": None}]}
    call = Call("weather", arguments, json.dumps(arguments, ensure_ascii=False))
    text = style.render(Answer("One < two [and] three.", "Hm.", [call]))
    parser = FAMILIES[style.family].make(None, starts_in_reasoning=False, parse_tools=True, parse_reasoning=True)
    parsed = Parsed()
    for end in range(1, len(text) + 1):
        parsed.add(parser.feed(text[end - 1 : end]))
        assert not text[:end].endswith("Hm") or parsed.reasoning == "Hm"
        assert not text[:end].endswith(" two") or parsed.content == "One < two"
        if style.value_end is None and call.json_text in text:
            start = text.index(call.json_text)
            if start < end <= start + len(call.json_text):
                assert parsed.calls[-1][2] == call.json_text[: end - start]


@pytest.mark.slow_but("hermes", "deepseek_v3", "qwen3")
@styles
@given(data=st.data())
@settings(max_examples=25)
def test_an_answer_that_is_cut_off_is_a_part_of_the_answer(style: Style, data: st.DataObject) -> None:
    answer = data.draw(answers(style))
    text = style.render(answer)
    text = text[: data.draw(st.integers(0, len(text)))]
    tools = tools_of(answer)
    parsed = parse(style.family, [text], tools=tools)
    assert parse(style.family, list(text), tools=tools).without_ids == parsed.without_ids
    assert answer.reasoning.startswith(parsed.reasoning.rstrip()) or not parsed.content
    for (_, name, arguments), call in zip(parsed.calls, answer.calls, strict=False):
        assert name == call.name
        if style.value_end is None:
            assert call.json_text.startswith(arguments)


def fragments(family: ParserFamily) -> st.SearchStrategy[list[str]]:
    """Parts of all syntaxes in any order, most of them of one family, between numbered words."""
    style = next(style for style in STYLES if style.family == family.name)
    call = Call("f", {"a": "x", "b": 1}, '{"a": "x", "b": 1}')
    own = style.render(Answer("hello", "hm", [call, call]))
    parts = re.findall(r"<[^>]*>|\[[A-Z_/]+\]|\w+|\s+|[^\w\s]", own)
    common = ["<think>", "</think>", "{", "}", "[", "]", '"', "\\", ",", ":", "\n", " ", '{"name": "f", "arguments": {']
    common += ['{"name": ', '"arguments": ', '"f"', "null", "1", '"id": "abcdefghi"']
    part = st.sampled_from(parts) | st.sampled_from(common) | st.sampled_from([own, own[: len(own) // 2], '"a": 1'])
    return st.lists(part | st.just("WORD"), max_size=25)


@pytest.mark.slow_but("hermes", "deepseek_v3", "qwen3")
@families
@given(data=st.data())
@settings(max_examples=100)
def test_malformed_answers_raise_nothing_and_lose_nothing(family: str, data: st.DataObject) -> None:
    parts = data.draw(fragments(FAMILIES[family]))
    words = [f"q{number}z" for number, part in enumerate(parts) if part == "WORD"]
    text = "".join(f"q{number}z" if part == "WORD" else part for number, part in enumerate(parts))
    starts_in_reasoning = data.draw(st.booleans())
    whole = parse(family, [text], starts_in_reasoning=starts_in_reasoning)
    for pieces in (list(text), divided(text, data.draw(st.integers(0, 999)))):
        assert parse(family, pieces, starts_in_reasoning=starts_in_reasoning).without_ids == whole.without_ids
    texts = [whole.content, whole.reasoning, *(arguments for _, _, arguments in whole.calls)]
    for word in words:
        count = sum(part.count(word) for part in texts)
        in_header = any(word in name or word in call_id for call_id, name, _ in whole.calls)
        assert count == 1 or (count == 0 and in_header), (word, text)
    reasoning = FAMILIES[family].reasoning
    has_reasoning = starts_in_reasoning or reasoning is None or text.lstrip().startswith(reasoning[0])
    syntax = FAMILIES[family].syntax
    if not whole.calls and not has_reasoning and not getattr(syntax, "dropped", ()):
        assert whole.content == text


@families
def test_forced_calls_are_calls_of_the_family(family: str) -> None:
    forced = FAMILIES[family].forced_calls
    arguments = ['{"a": "}]"}', "{}", '{"b": [1, {"c": "</tool_call>"}]}'][: 1 if forced.separator is None else 3]
    calls = []
    for index, text in enumerate(arguments):
        before = forced.before_arguments.replace("{index}", str(index))
        calls.append(f"{forced.before_name}f_{index}{before}{text}{forced.after_arguments}")
    text = forced.begin + (forced.separator or "").join(calls) + forced.end
    expected = "", "", [(f"f_{index}", text) for index, text in enumerate(arguments)]
    assert parse(family, [text]).without_ids == parse(family, list(text)).without_ids == expected


@styles
def test_what_is_not_parsed_remains_in_the_content(style: Style) -> None:
    call = Call("f", {"a": "x"}, '{"a": "x"}')
    answer = Answer("Content.", "Reasoning.", [call])
    text = style.render(answer)
    if style.family == "gpt_oss":  # whose headers are never shown
        assert parse("gpt_oss", list(text), parse_reasoning=False).content == "Reasoning.\nContent."
        assert parse("gpt_oss", list(text), parse_tools=False).content == f"Content.\n{call.json_text}"
        return
    if style.family == "inkling":
        assert parse("inkling", list(text), parse_reasoning=False).content == "Reasoning.\nContent."
        expected = f'Content.\nf{{"name": "f", "args": {call.json_text}}}'
        assert parse("inkling", list(text), parse_tools=False).content == expected
        return
    if style.family == "cohere":  # whose markers of content are never shown
        for marker in ("<|START_RESPONSE|>", "<|END_RESPONSE|>"):
            text = text.replace(marker, "")
    assert parse(style.family, list(text), parse_tools=False, parse_reasoning=False).content == text
    without_calls = parse(style.family, list(text), parse_tools=False)
    assert without_calls.reasoning == "Reasoning."
    assert text.endswith(without_calls.content)
    without_reasoning = parse(style.family, list(text), parse_reasoning=False)
    assert text.startswith(without_reasoning.content)
    assert len(without_reasoning.calls) == len(answer.calls)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.reasoning is not None])
def test_reasoning_that_the_prompt_has_begun(family: str) -> None:
    begin, end = FAMILIES[family].reasoning or ("", "")
    assert FAMILIES[family].starts_in_reasoning(f"<|assistant|>{begin}\n")
    assert not FAMILIES[family].starts_in_reasoning(f"<|assistant|>{begin}\n\n{end}\n\n")
    for text, content, reasoning in [
        (f"Hm.\n{end}\n\nYes.", "Yes.", "Hm."),
        (f"{begin}Hm.{end}Yes.", "Yes.", "Hm."),
        (f"{end}Yes.", "Yes.", ""),
        ("Hm, not yet \n", "", "Hm, not yet \n"),
    ]:
        parsed = parse(family, list(text), starts_in_reasoning=True)
        assert (parsed.content, parsed.reasoning) == (content, reasoning)
    assert parse(family, list(f"Yes {begin}no{end}")).content == f"Yes {begin}no{end}"  # reasoning comes first


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "parameters": null}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>\n{"name": "f"}\n{"name": "g"}\n</tool_call>', [("f", "{}"), ("g", "{}")]),
        ("qwen3_coder", "<function=f>\n</function>\n</tool_call>", [("f", "{}")]),
        ("kimi_k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|><|tool_call_end|>", [("f", "{}")]),
        ("gpt_oss", "<|channel|>commentary to=python<|message|>print(1)<|call|>", [("python", "print(1)")]),
        ("gpt_oss", "<|channel|>commentary to=functions.f<|message|><|call|>", [("f", "{}")]),
    ],
)
def test_variants_that_models_write(family: str, text: str, expected: list[tuple[str, str]]) -> None:
    assert parse(family, list(text)).without_ids == ("", "", expected)


@styles
def test_calls_end_reasoning_that_lacks_its_end(style: Style) -> None:
    if style.family in ("gpt_oss", "inkling"):
        pytest.skip("its messages always end")
    text = style.render(Answer(reasoning="Hm.", calls=[Call("f", {}, "{}")]))
    assert FAMILIES[style.family].reasoning
    text = text.replace(FAMILIES[style.family].reasoning[1], "")
    assert parse(style.family, list(text)).without_ids == ("", "Hm.", [("f", "{}")])


@pytest.mark.parametrize(
    "style", [style for style in STYLES if style.value_end], ids=lambda style: style.render.__name__
)
@pytest.mark.parametrize("value", ["", " ", "\n", "\n\n", "  indented\n\nlines \n", "<", "</", "</par"])
def test_plain_values_keep_their_white_space(style: Style, value: str) -> None:
    call = Call("f", {"key": value, "other": value}, "")
    parsed = parse(style.family, list(style.render(Answer(calls=[call]))), tools=tools_of(Answer(calls=[call])))
    assert [json.loads(arguments) for _, _, arguments in parsed.calls] == [call.arguments]


@pytest.mark.parametrize(
    ("end", "arguments"),
    [
        (">", ""),
        (">\n<parameter=ke", '{"ke'),
        (">\n<parameter=key>\nval", '{"key": "val'),
        (">\n<parameter=key>\nvalue\n</parameter>\n", '{"key": "value"'),
        (">\n<parameter=key>\nvalue\n</parameter>\n</function>", '{"key": "value"}'),
    ],
)
def test_plain_parameters_that_are_cut_off_are_incomplete_json(end: str, arguments: str) -> None:
    text = "<tool_call>\n<function=f" + end
    expected = ("", "", [("f", arguments)]) if arguments else (text, "", [])
    assert parse("qwen3_coder", list(text)).without_ids == expected


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1]}}</tool_call> x', "]}}x", '{"a": 1'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, "b": 2}</tool_call>', ', "b": 2}', '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', "x", '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", '{"a": 1'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, None),
        ('<tool_call>{"name": "two words", "arguments": {}}</tool_call>', None, None),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, None),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', None, None),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>', None, None),
        ('<tool_call>{"name": "f", "name": "g"}</tool_call>', None, None),
        ("<tool_call>f(1)</tool_call>", None, None),
    ],
)
def test_a_malformed_call_ends_where_it_is_malformed(text: str, content: str | None, arguments: str | None) -> None:
    parsed = parse("hermes", list(text))
    if content is None:
        assert parsed == Parsed(content=text)
    else:
        assert parsed.without_ids == (content, "", [("f", arguments)])


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "string"}, 'a "b"\n', '"a \\"b\\"\\n"'),
        ({"type": "integer"}, " 12 ", "12"),
        ({"type": "integer"}, "twelve", '"twelve"'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "12", '"12"'),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", "[1]"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1", '"[1"'),
        ({"$ref": "#/$defs/point"}, '{"x": 1}', '{"x": 1}'),
        ({"$ref": "#/$defs/word"}, "12", '"12"'),
        ({"$ref": "#/$defs/loop"}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "1", "1"),
        ({"type": "object"}, "[" * 100_000, json.dumps("[" * 100_000)),
        ({}, "12", "12"),
        ({}, "text", '"text"'),
        ({}, '"text"', json.dumps('"text"')),
        (None, "None", "null"),
        ("no schema", "12", "12"),
    ],
)
def test_plain_text_becomes_json_by_the_schema(schema: Any, text: str, expected: str) -> None:
    definitions = {"point": {"type": "object"}, "word": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    parameters = {"properties": {"key": schema}, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = f"<tool_call>f<arg_key>key</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert parse("glm45", [answer], tools=tools).calls[0][2] == f'{{"key": {expected}}}'


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.", "Yes.", "Hm."),
        ("<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Yes.", "Hm."),
        ("<|channel|>final<|start|>assistant<|channel|>final<|message|>Yes.<|end|>", "<|channel|>final\nYes.", ""),
        ("<|message|>Yes.<|end|>", "Yes.", ""),
        ("Yes. <|end|>\n", "Yes. <|end|>\n", ""),
        ("<|channel|>mood<|message|>Yes.", "<|channel|>mood<|message|>Yes.", ""),
    ],
)
def test_messages_without_their_markers(text: str, content: str, reasoning: str) -> None:
    assert parse("gpt_oss", list(text)).without_ids == (content, reasoning, [])


def test_ids_are_those_of_the_model_or_random_and_never_equal() -> None:
    call = Call("f", {}, "{}")
    rendered = {style.render.__name__: style.render(Answer(calls=[call, call])) for style in STYLES}
    assert [call_id for call_id, _, _ in parse("kimi_k2", [rendered["kimi_k2"]]).calls] == [
        "functions.f:0",
        "functions.f:1",
    ]
    with_ids = parse("mistral", [rendered["mistral_with_ids"]]).calls
    assert [call_id for call_id, _, _ in with_ids] == ["abcDEF000", "abcDEF001"]
    repeated = parse("kimi_k2", [rendered["kimi_k2"].replace("f:1", "f:0")]).calls
    assert repeated[0][0] == "functions.f:0"
    assert re.fullmatch(r"call_[0-9a-f]{24}", repeated[1][0])
    for style, form in [("hermes", r"call_[0-9a-f]{24}"), ("mistral", r"[A-Za-z0-9]{9}")]:
        ids = [call_id for call_id, _, _ in parse(style, [rendered[style]]).calls]
        assert all(re.fullmatch(form, call_id) for call_id in ids)
        assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("model_type", "template", "family"),
    [
        ("qwen3_moe", "<tool_call>", "hermes"),
        ("qwen3_moe", "<tool_call>\n<function=", "qwen3_coder"),
        ("qwen3_moe", None, "hermes"),
        ("glm4_moe", "<tool_call><arg_key>", "glm45"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜> ```json", "deepseek_v3"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("qwen2", "<think></think>", "hermes"),
        ("kimi_k2", "<|im_system|>", "kimi_k2"),
        ("mixtral", "[INST]", "hermes"),
        ("mixtral", "[INST][TOOL_CALLS]", "mistral"),
        ("gpt_oss", None, "gpt_oss"),
        ("olmoe", None, "hermes"),
        ("hy_v3", "<tool_calls><tool_call><tool_sep><arg_key>", "hy_v3"),
        ("hy_v4", "<tool_calls><tool_call><arg_key>", "hy_v4"),
        ("laguna", "<tool_call><arg_key>", "glm45"),
        ("jamba", "<tool_calls>[", "minimax_m1"),
        ("kolibri1", "<tool_call>", "hermes"),
        ("step3p5", "<tool_call>\n<function=", "qwen3_coder"),
        ("deepseek_v32", None, "deepseek_v32"),
        ("deepseek_v32", "｜DSML｜ function_calls>", "deepseek_v32"),
        ("deepseek_v4", "<｜DSML｜tool_calls>", "deepseek_v4"),
        ("minimax_m3_vl", "]<]minimax[>[<tool_call>", "minimax_m3"),
        ("longcat_flash", "<longcat_tool_call>", "longcat"),
        ("dots3_note", "<dots_function_call>", "dots"),
        ("gemma4", "<|tool_call>call:", "gemma4"),
        ("cohere2_moe", "<|START_ACTION|>", "cohere"),
        ("inkling", "<|message_model|>", "inkling"),
    ],
)
def test_the_family_of_a_checkpoint(model_type: str, template: str | None, family: str) -> None:
    found = find_parser(None, model_type=model_type, chat_template=template)
    assert found.name == family


def test_tags_with_the_suffix_of_a_checkpoint() -> None:
    template = "<tool_calls:opensource><tool_sep:opensource><arg_key:opensource>"
    style = next(style for style in STYLES if style.family == "hy_v3")
    text = style.render(Answer("Yes.", "Hm.", [Call("f", {"a": 1}, "")]))
    text = re.sub(r"(<[^>]+)>", r"\1:opensource>", text)
    for name in (None, "hy_v3"):
        found = find_parser(name, model_type="hy_v3", chat_template=template)
        parser = found.make(None, starts_in_reasoning=False, parse_tools=True, parse_reasoning=True)
        parsed = Parsed()
        parsed.add(parser.feed(text))
        parsed.add(parser.finish())
        assert parsed.without_ids == ("Yes.", "Hm.", [("f", '{"a": 1}')])


DSML_CALL = '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="{}">{}</｜DSML｜parameter></｜DSML｜invoke>'
ELEMENTS = "<a><x>1</x><y>two</y></a><b><item>1</item><item><z>2</z></item></b><c></c><d>t<x>1</x><x>2</x></d></invoke>"
NESTED = '{"a": {"x": 1, "y": "two"}, "b": [1, {"z": 2}], "c": "", "d": {"x": [1, 2], "$text": "t"}}'


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        ("deepseek_v32", DSML_CALL.format("true", "12"), '{"a": "12"}'),
        ("deepseek_v32", DSML_CALL.format("false", "12"), '{"a": 12}'),
        ("gemma4", '<|tool_call>call:f{a:{b:true,<|"|>c<|"|>:None},d:[1.5,x y]}<tool_call|>', None),
        ("gemma4", "<|tool_call>call:f{a:" + "[" * 1000, "cut off"),
        ("minimax_m3", ']<]minimax[>[<invoke name="f">' + ELEMENTS.replace("<", "]<]minimax[>[<"), NESTED),
        ("minimax_m3", ']<]minimax[>[<invoke name="f">' + "]<]minimax[>[<a>" * 1000, "cut off"),
    ],
)
def test_nested_arguments(family: str, text: str, arguments: str | None) -> None:
    ((_, name, found),) = parse(family, list(text)).calls
    assert name == "f"
    if arguments == "cut off":
        assert found
    else:
        assert json.loads(found) == json.loads(arguments or '{"a": {"b": true, "c": null}, "d": [1.5, "x y"]}')


def test_types_of_values_in_nested_arguments() -> None:
    item = {"type": "object", "properties": {"code": {"type": "string"}, "number": {"type": "integer"}}}
    parameters = {"properties": {"list": {"type": "array", "items": item}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    elements = "<list><item><code>12</code><number>12</number></item></list></invoke>".replace("<", "]<]minimax[>[<")
    parsed = parse("minimax_m3", [f']<]minimax[>[<invoke name="f">{elements}'], tools=tools)
    assert json.loads(parsed.calls[0][2]) == {"list": [{"code": "12", "number": 12}]}


def test_a_family_by_name() -> None:
    found = find_parser("glm45", model_type="qwen3_moe", chat_template="<tool_call>")
    assert found is FAMILIES["glm45"]
    assert find_parser("openai", model_type="", chat_template=None) is FAMILIES["gpt_oss"]  # vLLM's name
    with pytest.raises(SettingsError, match="'olmo3'"):
        find_parser("olmo3", model_type="", chat_template=None)
    with pytest.raises(SettingsError, match=r"'glm46'.*'glm45'"):
        find_parser("glm46", model_type="qwen3_moe", chat_template=None)
